"""Small numbers from the host to the device, without waiting for the device."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor

Number = TypeVar("Number", bound=float)


def on_device(
    values: Sequence[float] | Sequence[Sequence[float]],
    device: torch.device | str,
    dtype: torch.dtype = torch.long,
) -> Tensor:
    """Numbers as a tensor.

    Args:
        values: The numbers, in one list or in lists of one length.
        device (`torch.device` or `str`): Where they go. The copy to a GPU is queued behind what runs there:
            `torch.tensor(values, device=device)` would wait for it.
        dtype (`torch.dtype`, *optional*, defaults to `torch.long`): Of the tensor.
    """
    here = torch.tensor(values, dtype=dtype)
    if torch.device(device).type == "cuda":
        return here.pin_memory().to(device, non_blocking=True)
    return here.to(device)


def padded_rows(rows: Sequence[Sequence[Number]]) -> list[list[Number]]:
    """Rows of one length, with zeros behind the shorter ones."""
    longest = max(map(len, rows))
    zero: Any = 0
    return [[*row, *[zero] * (longest - len(row))] for row in rows]
