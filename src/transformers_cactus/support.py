"""Whether a model can run on rows of different lengths: a `RaggedCache` and masks built by this package."""

from typing import Any

from ._compat import (
    attention_implementation,
    bare,
    forward_parameters,
    has_own_masks,
    is_heterogeneous,
    is_stateful,
    relies_on_given_mask,
    text_config,
)
from .masks import LAYER_TYPES, layer_types

_LENGTH_DEPENDENT_ROTARY = frozenset({"dynamic", "longrope"})
_MASK_SETTINGS = ("layer_types", "sliding_window", "attention_chunk_size")


def supports_ragged(model: Any, max_length: int | None = None) -> str | None:
    """Say why a model cannot run on a ragged batch.

    Decided from what the model declares about itself; a model that declares nothing is refused.

    Args:
        model: any model of transformers.
        max_length: the longest row that will occur, with its drafted tokens; None where it is not known.

    Returns:
        None where the model can, else the reason as a sentence.
    """
    model = bare(model)
    config = text_config(model)
    name = type(model).__name__
    if model.config.is_encoder_decoder:
        return f"{name} is an encoder-decoder model."
    if config is not model.config:
        return f"{name} takes more than text."
    unknown = sorted(set(layer_types(config)) - LAYER_TYPES)
    if is_stateful(model) or unknown:
        kinds = f" ({', '.join(unknown)})" if unknown else ""
        return f"{name} keeps state that is not one key and value per token{kinds}."
    attention = attention_implementation(model)
    if attention not in ("sdpa", "eager"):
        return f"Attention implementation {attention!r} takes no mask per row; load the model with 'sdpa' or 'eager'."
    return _position_reason(model, config, name, max_length) or _mask_reason(model, config, name)


def _position_reason(model: Any, config: Any, name: str, max_length: int | None) -> str | None:
    if _has_alibi(model, config):
        return f"{name} uses ALiBi, which derives positions from a padding mask."
    if "position_ids" not in forward_parameters(model):
        return f"The forward of {name} takes no position_ids."
    limit = _rotary_limit(config)
    if limit is not None and (max_length is None or max_length > limit):
        return f"The rotary frequencies of {name} depend on the longest row of a batch beyond {limit} tokens."
    return None


def _mask_reason(model: Any, config: Any, name: str) -> str | None:
    if not getattr(config, "is_causal", True) or getattr(config, "use_bidirectional_attention", False):
        return f"{name} attends in both directions."
    if has_own_masks(model):
        return f"{name} builds masks of its own."
    ignored = [
        key for key in _MASK_SETTINGS if getattr(config, key, None) is not None and not hasattr(type(config), key)
    ]
    if ignored:
        return f"The configuration of {name} sets {' and '.join(ignored)}, which its class does not know."
    if is_heterogeneous(config) or getattr(config, "num_kv_shared_layers", None):
        return f"The layers of {name} share caches or differ in their settings."
    if not relies_on_given_mask(model):
        return f"{name} is not known to attend by a given mask alone."
    return None


def _has_alibi(model: Any, config: Any) -> bool:
    everything = config.to_dict()
    settings = [everything, *(value for value in everything.values() if isinstance(value, dict))]
    declared = any("alibi" in str(key) and value for setting in settings for key, value in setting.items())
    return declared or hasattr(model.base_model, "build_alibi_tensor")


def _rotary_limit(config: Any) -> int | None:
    """Return the length up to which rotary frequencies are constant, or None where they always are."""
    parameters = getattr(config, "rope_parameters", None) or {}
    nested = [value for value in parameters.values() if isinstance(value, dict)]
    limits = [
        rope.get("original_max_position_embeddings") or config.max_position_embeddings
        for rope in nested or [parameters]
        if rope.get("rope_type") in _LENGTH_DEPENDENT_ROTARY
    ]
    return min(limits, default=None)
