"""Loading models by name or folder for the command line."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
import transformers
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForSeq2SeqLM,
    AutoTokenizer,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from ..demo import Arithmetic, pick_arithmetic
from ..demo.bundled import bundled_verifier
from ..demo.pair import SHIPPED_DRAFT, change_linear_layers
from ..demo.shared_draft import load_shared_draft, shares_embeddings
from ..paths import looks_like_path


class Models(NamedTuple):
    """What a call to `generate` needs."""

    verifier: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    draft: PreTrainedModel | None
    draft_tokenizer: PreTrainedTokenizerBase | None
    """Only where it is another one than the verifier's."""


@contextmanager
def quiet_transformers() -> Iterator[None]:
    """Keeps transformers' progress bars and advice for programmers out of the output."""
    logging = transformers.utils.logging
    verbosity, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)
        if bars:
            logging.enable_progress_bar()


def pick_device(name: str | None) -> torch.device:
    """The named device, else the first GPU, else the processor.

    Raises:
        ValueError: If there is no such device.
    """
    try:
        device = torch.device(name or ("cuda" if torch.cuda.is_available() else "cpu"))
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        raise ValueError(f"cannot use the device {name!r}: {str(error).splitlines()[0]}") from error
    return device


def dtype_named(name: str) -> torch.dtype | None:
    """The dtype of this name, `None` for "auto"."""
    dtype: torch.dtype | None = None if name == "auto" else getattr(torch, name)
    return dtype


def arithmetic_for(dtype: torch.dtype | None, device: torch.device) -> Arithmetic:
    """The dtype that was asked for, with PyTorch's own matrix multiplication; else what is fastest on the device."""
    return pick_arithmetic(device) if dtype is None else Arithmetic(dtype, packed=False)


def load_models(
    verifier: str | None,
    draft: str | None,
    *,
    dtype: torch.dtype | None,
    device: torch.device,
    attn_implementation: str | None = None,
    trust_remote_code: bool = False,
) -> Models:
    """Loads a verifier and, if named, a draft.

    Args:
        verifier (`str` or `None`): Name or folder. `None` stands for the demo's verifier.
        draft (`str` or `None`): Name or folder, possibly of a draft that shares the verifier's embedding.
        dtype (`torch.dtype` or `None`): Of both. `None` stands for each model's own, and for the demo's verifier for
            what is fastest here.
        device (`torch.device`): Of both.
        attn_implementation (`str`, *optional*): Of both.
        trust_remote_code (`bool`, *optional*, defaults to `False`): Whether to run code that comes with a model.

    Raises:
        OSError: If a model cannot be found or read; both are looked for before the first is loaded.
    """
    packed = int8_draft = False
    if verifier is None:
        verifier = bundled_verifier()
        dtype, packed, int8_draft = arithmetic_for(dtype, device)
    common: dict[str, Any] = {"trust_remote_code": trust_remote_code}
    config = _load("verifier", AutoConfig, verifier, **common)
    draft_config = None if draft is None else _load("draft", AutoConfig, draft, **common)
    tokenizer = _load("verifier's tokenizer", AutoTokenizer, verifier, **common)
    common |= {"dtype": dtype or "auto", "attn_implementation": attn_implementation}
    large = _load("verifier", _model_class(config), verifier, **common).to(device).eval()
    small, other = _load_draft(draft, draft_config, large, tokenizer, common)
    change_linear_layers(large, small, packed=packed, int8_draft=int8_draft)
    return Models(large, tokenizer, small, other)


def _load_draft(
    draft: str | None,
    config: Any,
    verifier: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    common: dict[str, Any],
) -> tuple[PreTrainedModel | None, PreTrainedTokenizerBase | None]:
    """The draft if there is one, and its tokenizer if that is not the verifier's."""
    if draft is None:
        return None, None
    if shares_embeddings(config):
        return load_shared_draft(draft, config, verifier), None
    model = _load("draft", _model_class(config), draft, **common).to(verifier.device).eval()
    other = _load("draft's tokenizer", AutoTokenizer, draft, trust_remote_code=common["trust_remote_code"])
    return model, None if other.get_vocab() == tokenizer.get_vocab() else other


def shipped_draft() -> str:
    """Folder of the draft in this package, which belongs to the demo's verifier."""
    return str(SHIPPED_DRAFT)


def _model_class(config: Any) -> Any:
    return AutoModelForSeq2SeqLM if config.is_encoder_decoder else AutoModelForCausalLM


def _load(role: str, auto_class: Any, name: str, **options: Any) -> Any:
    if not os.path.isdir(name) and looks_like_path(name):
        raise OSError(f"cannot load the {role}: there is no folder {name!r}")
    try:
        return auto_class.from_pretrained(name, **options)
    except (OSError, ValueError, ImportError) as error:
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise OSError(f"cannot load the {role} {name!r}: {reason}") from error
