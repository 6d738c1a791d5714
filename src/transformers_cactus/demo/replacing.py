"""Replacing modules inside a model."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeGuard

from torch import nn


def replace_modules(model: nn.Module, chosen: Callable[[nn.Module], bool], make: Callable[[Any], nn.Module]) -> None:
    """Put another module in the place of some, in place.

    Args:
        model (`torch.nn.Module`): The model.
        chosen (callable): Which modules are replaced.
        make (callable): Gets one of them, returns what comes in its place.
    """
    places = [
        (parent, name, child) for parent in model.modules() for name, child in parent.named_children() if chosen(child)
    ]
    for parent, name, child in places:
        setattr(parent, name, make(child))


def is_linear(module: nn.Module) -> TypeGuard[nn.Linear]:
    """Whether a module is PyTorch's own linear layer, and none that does more."""
    return type(module) is nn.Linear


def linear_layers(model: nn.Module) -> list[nn.Linear]:
    """The modules of a model for which that is so."""
    return [module for module in model.modules() if is_linear(module)]
