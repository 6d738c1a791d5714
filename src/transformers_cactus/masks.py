"""Attention masks for the rows of a `RaggedCache`: full, sliding-window and chunked attention."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ._compat import attention_implementation, text_config

LAYER_TYPES = frozenset({"full_attention", "sliding_attention", "chunked_attention"})
"""The kinds of attention layer for which `ragged_masks` has a mask."""


def layer_types(config: Any) -> Sequence[str]:
    """Return the kinds of attention layer of a model, one per layer, or one for all.

    Args:
        config: the model's text configuration.
    """
    declared = getattr(config, "layer_types", None)
    if declared is not None:
        return list(declared)
    if getattr(config, "sliding_window", None) is not None:
        return ["sliding_attention"]
    if getattr(config, "attention_chunk_size", None) is not None:
        return ["chunked_attention"]
    return ["full_attention"]


def visible(layer_type: str, config: Any, positions: Tensor, keys: int) -> Tensor:
    """Say which keys each query may attend to.

    Args:
        layer_type: one of `LAYER_TYPES`.
        config: the model's text configuration.
        positions: of the queries, `[batch, k]`.
        keys: number of keys; the position of a key is its index.

    Returns:
        Boolean, `[batch, 1, k, keys]`.
    """
    query = positions[:, None, :, None]
    key = torch.arange(keys, device=positions.device)
    seen = key <= query
    if layer_type == "sliding_attention":
        seen &= key > query - config.sliding_window
    elif layer_type == "chunked_attention":
        size = config.attention_chunk_size
        seen &= key // size == query // size
    return seen


def ragged_masks(model: Any, positions: Tensor, keys: int) -> Tensor | dict[str, Tensor]:
    """Build what the model's forward takes as `attention_mask` for rows of different lengths.

    Args:
        model: a model for which `supports_ragged` gives no reason against it.
        positions: of the new tokens, `[batch, k]`.
        keys: number of keys that the cache returns.

    Returns:
        A mask `[batch, 1, k, keys]`, or a dict of them by layer type where the model has several. Boolean for sdpa;
        for eager attention, which adds the mask to the scores, 0 where visible and the dtype's minimum elsewhere.
    """
    config = text_config(model)
    masks = {kind: visible(kind, config, positions, keys) for kind in set(layer_types(config))}
    if attention_implementation(model) == "eager":
        masks = {kind: _additive(mask, model.dtype) for kind, mask in masks.items()}
    return masks if len(masks) > 1 else next(iter(masks.values()))


def _additive(seen: Tensor, dtype: torch.dtype) -> Tensor:
    return torch.zeros(seen.shape, dtype=dtype, device=seen.device).masked_fill_(~seen, torch.finfo(dtype).min)
