"""Which number formats, and which matrix multiplications, are fastest on this machine."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from . import int8_linear
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

    int8_draft: bool = False
    """Whether the draft's linear layers hold 8-bit weights; see [`Int8Linear`]."""

    def __str__(self) -> str:
        dtype = str(self.dtype).removeprefix("torch.") + (" with packed weights" if self.packed else "")
        return dtype + (", draft in 8 bits" if self.int8_draft else "")


def pick_arithmetic(device: str | torch.device = "cpu") -> Arithmetic:
    """The fastest way to verify a block with a small model, and to draft.

    Accelerators get bfloat16. On a processor it depends: bfloat16 halves the memory traffic, but without its own
    instructions the arithmetic of a block of tokens is several times slower; and packed weights are for the
    processors that MKL is not tuned for. So all are timed, in turn, for about a second, over a block of five tokens:
    what is fastest for one token, and so for plain generation, may be another one. Then so is 8-bit drafting,
    for less time, over one token.

    Args:
        device (`str` or `torch.device`, *optional*, defaults to `"cpu"`): Where the models will run.

    Returns:
        [`Arithmetic`]: `(dtype, packed, int8_draft)`.
    """
    if torch.device(device).type != "cpu":
        return Arithmetic(torch.bfloat16, packed=False)
    candidates = [Arithmetic(torch.float32, packed=False), Arithmetic(torch.bfloat16, packed=False)]
    if can_pack():
        candidates.append(Arithmetic(torch.float32, packed=True))
    verifying = _seconds([_pass(candidate, ROWS) for candidate in candidates])
    best = candidates[verifying.index(min(verifying))]
    if int8_linear.can_quantize():
        plain, quantized = _seconds([_pass(best, 1), _pass(best._replace(int8_draft=True), 1)], budget=0.4)
        best = best._replace(int8_draft=quantized < plain)
    return best


@torch.inference_mode()
def _seconds(passes: list[Callable[[], None]], *, budget: float = 1.0) -> list[float]:
    """Each pass's time, best of several, interleaved."""
    best, end = [float("inf")] * len(passes), time.perf_counter() + budget
    while time.perf_counter() < end:
        best = [min(old, _timed(one)) for old, one in zip(best, passes, strict=True)]
    return best


def _pass(candidate: Arithmetic, rows: int) -> Callable[[], None]:
    """One pass of some rows through layers of this kind."""
    block = torch.zeros(rows, IN, dtype=candidate.dtype)
    layers = [torch.zeros(OUT, IN, dtype=candidate.dtype) for _ in range(LAYERS)]
    if candidate.int8_draft:
        quantized = [int8_linear.quantize(layer) for layer in layers]
        return lambda: _through(block, lambda block, layer: int8_linear.multiply(block, *layer), quantized)
    if candidate.packed:
        packed = [pack(layer) for layer in layers]
        return lambda: _through(block, multiply, packed)
    return lambda: _through(block, functional.linear, layers)


def _through(block: Tensor, multiplied: Callable[[Tensor, Any], Tensor], layers: Sequence[Any]) -> None:
    for layer in layers:
        multiplied(block, layer)


def _timed(run: Callable[[], None]) -> float:
    start = time.perf_counter()
    run()
    return time.perf_counter() - start
