"""Small numbers from the host to the device, without waiting for the device."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def on_device(values: Sequence[int] | Sequence[Sequence[int]], device: torch.device | str) -> Tensor:
    """Integers as a `torch.LongTensor`.

    Args:
        values: The numbers, in one list or in lists of one length.
        device (`torch.device` or `str`): Where they go. The copy to a GPU is queued behind what runs there:
            `torch.tensor(values, device=device)` would wait for it.
    """
    here = torch.tensor(values, dtype=torch.long)
    if torch.device(device).type == "cuda":
        return here.pin_memory().to(device, non_blocking=True)
    return here.to(device)
