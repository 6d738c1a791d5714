"""Which number format, and which matrix multiplication, verifies fastest on this machine."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from .packed_linear import can_pack, multiply, pack

LAYERS, OUT, IN = 24, 1536, 576
"""Together they do not fit the caches of a processor, as the layers of a model do not."""
ROWS = 5
"""A block of four drafted tokens and the one before it."""


class Arithmetic(NamedTuple):
    """How a pair of models computes."""

    dtype: torch.dtype
    packed: bool
    """Whether linear layers hold a packed copy of their weight; see [`PackedLinear`]."""

    def __str__(self) -> str:
        return str(self.dtype).removeprefix("torch.") + (" with packed weights" if self.packed else "")


def pick_arithmetic(device: str | torch.device = "cpu") -> Arithmetic:
    """The fastest way for the verification of a block by a small model.

    Accelerators get bfloat16. On a processor it depends: bfloat16 halves the memory traffic, but without its own
    instructions the arithmetic of a block of tokens is several times slower; and packed weights are for the
    processors that MKL is not tuned for. So all are timed, in turn, for about a second, over a block of five tokens:
    what is fastest for one token, and so for plain generation, may be another one.

    Args:
        device (`str` or `torch.device`, *optional*, defaults to `"cpu"`): Where the models will run.

    Returns:
        [`Arithmetic`]: `(dtype, packed)`.
    """
    if torch.device(device).type != "cpu":
        return Arithmetic(torch.bfloat16, packed=False)
    candidates = [Arithmetic(torch.float32, packed=False), Arithmetic(torch.bfloat16, packed=False)]
    if can_pack():
        candidates.append(Arithmetic(torch.float32, packed=True))
    seconds = _seconds(candidates)
    return candidates[seconds.index(min(seconds))]


@torch.inference_mode()
def _seconds(candidates: list[Arithmetic], *, budget: float = 1.0) -> list[float]:
    """Each candidate's time for `ROWS` through all layers, best of several, the candidates interleaved."""
    passes = [_pass(candidate) for candidate in candidates]
    best, end = [float("inf")] * len(candidates), time.perf_counter() + budget
    while time.perf_counter() < end:
        best = [min(old, _timed(one)) for old, one in zip(best, passes, strict=True)]
    return best


def _pass(candidate: Arithmetic) -> Callable[[], None]:
    """One pass through layers of this kind."""
    layers = [torch.zeros(OUT, IN, dtype=candidate.dtype) for _ in range(LAYERS)]
    multiplied: Callable[[Tensor, Tensor], Tensor] = F.linear
    if candidate.packed:
        layers, multiplied = [pack(layer) for layer in layers], multiply
    block = torch.zeros(ROWS, IN, dtype=candidate.dtype)

    def run() -> None:
        for layer in layers:
            multiplied(block, layer)

    return run


def _timed(run: Callable[[], None]) -> float:
    start = time.perf_counter()
    run()
    return time.perf_counter() - start
