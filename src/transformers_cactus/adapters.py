"""A model with LoRA adapters, drafted for by itself without them."""

from __future__ import annotations

import copy
import functools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from transformers import PreTrainedModel

from . import _compat


def without_adapter(model: Any) -> PreTrainedModel:
    """The model below an adapter, as a draft for the model with it. No weight is copied.

    It pays where the two agree on most tokens and a forward without the adapter is cheaper, and it shows what the
    adapter changes. Do not use the model in another thread while it drafts: the adapter is off for that long.

    Args:
        model (`peft.PeftModel` or `PreTrainedModel` with adapters): The verifier.

    Returns:
        `PreTrainedModel`: Shares everything with the verifier.

    Raises:
        ValueError: If the model has no adapter layers, or they are merged into its weights.

    Example:
        ```python
        verifier = PeftModel.from_pretrained(base, "my-adapter")
        transformers_cactus.generate(verifier, **inputs, assistant_model=without_adapter(verifier), cactus_delta=0.5)
        ```
    """
    base = _compat.bare(model)
    layers = _compat.adapter_layers(base)
    if not layers:
        raise ValueError(f"{type(base).__name__} has no adapter layers to switch off.")
    if any(layer.merged for layer in layers):
        raise ValueError("the adapter is merged into the weights: call unmerge_adapter() first.")

    @functools.wraps(type(base).forward)
    def forward(self: PreTrainedModel, *args: Any, **kwargs: Any) -> Any:
        with _switched_off(layers):
            return type(base).forward(self, *args, **kwargs)

    draft: PreTrainedModel = copy.copy(base)
    draft.__dict__.pop("generate", None)
    draft.__class__ = type(type(base).__name__, (type(base),), {"forward": forward})
    return draft


@contextmanager
def _switched_off(layers: list[Any]) -> Iterator[None]:
    before = [_compat.adapter_is_off(layer) for layer in layers]
    _compat.switch_adapters(layers, [True] * len(layers))
    try:
        yield
    finally:
        _compat.switch_adapters(layers, before)
