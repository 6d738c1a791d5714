"""Which number format verifies fastest on this machine."""

from __future__ import annotations

import time

import torch
from torch import Tensor
from torch.nn import functional as F


def pick_dtype(device: str | torch.device = "cpu") -> torch.dtype:
    """The faster of float32 and bfloat16 for a small model's forwards over one and over eight tokens.

    Accelerators get bfloat16. On a processor it depends: bfloat16 halves the memory traffic, but without its own
    instructions the arithmetic of a block of tokens is several times slower. So both are timed, in well under two
    seconds.

    Args:
        device (`str` or `torch.device`, *optional*, defaults to `"cpu"`): Where the models will run.

    Returns:
        `torch.dtype`: `torch.bfloat16` or `torch.float32`.
    """
    if torch.device(device).type != "cpu":
        return torch.bfloat16
    return min((torch.float32, torch.bfloat16), key=_seconds)


@torch.inference_mode()
def _seconds(dtype: torch.dtype, *, budget: float = 0.4) -> float:
    """Time for one and then eight rows through linear layers that do not fit the caches, best of several."""
    layers = [torch.zeros(1536, 576, dtype=dtype) for _ in range(24)]
    blocks = [torch.zeros(rows, 576, dtype=dtype) for rows in (1, 8)]
    best, end = [float("inf")] * len(blocks), time.perf_counter() + budget
    while time.perf_counter() < end:
        best = [min(old, _one_pass(block, layers)) for old, block in zip(best, blocks, strict=True)]
    return sum(best)


def _one_pass(block: Tensor, layers: list[Tensor]) -> float:
    start = time.perf_counter()
    for layer in layers:
        F.linear(block, layer)
    return time.perf_counter() - start
