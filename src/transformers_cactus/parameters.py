"""Checking the numeric parameters of rules, and fitting them to the shapes they meet."""

from __future__ import annotations

import math
import numbers

import torch
from torch import Tensor


def check_parameter(
    name: str,
    value: object,
    *,
    unit: str,
    minimum: float = 0.0,
    maximum: float = math.inf,
    per_sequence: bool = True,
) -> None:
    """Raises a clear error unless `value` is a number, or a tensor of numbers, in a range.

    Args:
        name (`str`): What the user calls it.
        value: The value.
        unit (`str`): What it is, for the message.
        minimum, maximum (`float`): The range, both ends included.
        per_sequence (`bool`): Whether a tensor holds at most one number per sequence.

    Raises:
        TypeError: If the value is no number.
        ValueError: If it is NaN, out of range, or a tensor of another kind.
    """
    allowed = f"at least {minimum:g}" if maximum == math.inf else f"between {minimum:g} and {maximum:g}"
    if isinstance(value, Tensor):
        if (per_sequence and value.ndim > 1) or value.is_complex() or value.dtype == torch.bool:
            raise ValueError(
                f"{name} must be a number or a tensor of shape [batch], got {value.dtype} {list(value.shape)}."
            )
        if not bool(((value >= minimum) & (value <= maximum)).all()):
            # Six digits: 0.1 in float32 is not to be shown as 0.10000000149.
            given = ", ".join(f"{number:g}" for number in value.flatten().tolist())
            raise ValueError(f"every {name} must be {allowed} ({unit}), got {given}.")
        return
    # numbers.Real: NumPy's scalars as well.
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise TypeError(f"{name} must be a number, {allowed} ({unit}), got {value!r}.")
    if math.isnan(value) or not minimum <= float(value) <= maximum:
        raise ValueError(f"{name} must be {allowed} ({unit}), got {value!r}.")


def counted(number: int, noun: str) -> str:
    """A number and what it counts, for messages: "1 prompt", "2 prompts"."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def per_sequence(value: float | Tensor, like: Tensor) -> float | Tensor:
    """A parameter in a shape that broadcasts against `[batch, ...]`; one of that many dimensions as it is."""
    if not isinstance(value, Tensor):
        return value
    value = value.to(like.device)
    if value.ndim == like.ndim:
        return value
    return value.reshape(-1, *(1 for _ in range(like.ndim - 1))) if value.ndim else value
