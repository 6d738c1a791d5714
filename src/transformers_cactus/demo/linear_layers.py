"""Replacing the linear layers of a model."""

from __future__ import annotations

from collections.abc import Callable

from torch import nn


def replace_linear_layers(
    model: nn.Module, make: Callable[[nn.Linear], nn.Module], check: Callable[[list[nn.Linear]], None]
) -> None:
    """Put another module in the place of every linear layer of a model, in place.

    Args:
        model (`torch.nn.Module`): The model.
        make (callable): Gets a layer, returns what comes in its place.
        check (callable): Gets all layers first, and raises where they cannot be replaced.
    """
    places = [
        (parent, name, child)
        for parent in model.modules()
        for name, child in parent.named_children()
        if type(child) is nn.Linear
    ]
    check([linear for _, _, linear in places])
    for parent, name, linear in places:
        setattr(parent, name, make(linear))
