"""Forwards of fixed shape over a ragged cache, compiled by `torch.compile` once and used again by every later call.

A graph is for one shape, so whatever grows or shrinks within a call is padded: each row's new tokens to a width, the
batch to the rows that it had before some of them ended (until half of them have), the keys to the capacity of the
cache. Masks hide the padding, and what was computed for it is dropped, so that a forward returns what the plain one
does, up to rounding.
"""

from __future__ import annotations

import functools
import textwrap
import time
import weakref
from collections.abc import Callable
from types import FunctionType
from typing import Any, Final

import torch
from torch import Tensor
from torch.nn.functional import pad

from ._compat import cache_argument, compile_errors, keeps_address
from .advice import advise
from .cache import RaggedCache
from .inputs import ForwardInputs
from .masks import ragged_masks

BACKEND = "inductor"
"""Backend of `torch.compile`. With `"eager"` or `"aot_eager"`, which need no compiler, nothing gets faster."""

SMALLEST_CAPACITY: Final = 256
"""Tokens per row of the smallest cache. Larger ones are powers of two, so that calls of many lengths share a graph."""

Graph = Callable[[Any, dict[str, Any]], Tensor]
"""Takes a model and the keyword arguments of its forward, returns logits."""

_graphs: weakref.WeakKeyDictionary[Any, dict[tuple[int, int, int], Graph]] = weakref.WeakKeyDictionary()
"""The compiled forwards of each model, by rows, width and capacity."""

_refused: weakref.WeakSet[Any] = weakref.WeakSet()
"""Models that torch could not compile."""


class CompiledForward:
    """A model's forward over the next few tokens of each row.

    The first one of each shape compiles, which takes seconds to minutes. It is the plain forward where the cache is
    empty, where there are too many tokens, and where the model cannot be compiled, which is said once.

    Args:
        model: a model for which `supports_ragged` gives no reason against it.
        least: tokens of the smallest width; each further width is double.
        most: of more tokens nothing is compiled.
        capacity: tokens that a row is expected to reach.
    """

    def __init__(self, model: Any, least: int, most: int, capacity: int) -> None:
        self.model = model
        self.forward_inputs = ForwardInputs(model)
        self.least, self.most = least, most
        self.capacity = capacity
        self._seconds = 0.0

    def __call__(
        self, cache: RaggedCache, input_ids: Tensor, logits_to_keep: int | None = None, *, past_limit: bool = False
    ) -> Tensor:
        """Run the model over the next tokens of each row.

        Args:
            cache: what the rows hold so far.
            input_ids: `[batch, k]`.
            logits_to_keep: see [`ForwardInputs`], for the plain forward.
            past_limit: see [`ForwardInputs`].

        Returns:
            Logits, `[batch, k, vocab]`; from the plain forward those to keep.
        """
        limit = self.forward_inputs.limit
        # The plain forward says what is wrong with a position that the model does not have.
        possible = past_limit or limit is None or cache.rows.longest < limit
        if possible and input_ids.shape[1] <= self.most and cache.is_filled and self.model not in _refused:
            try:
                return self._compiled(cache, input_ids)
            except compile_errors() as error:
                # A graph is of the whole forward, so that nothing has been written when this is raised.
                _refused.add(self.model)
                advise(f"{type(self.model).__name__} runs without being compiled, which failed: {_summary(error)}")
        inputs = self.forward_inputs(cache, input_ids, logits_to_keep, past_limit=past_limit)
        return self.model(**inputs).logits

    def take_seconds(self) -> float:
        """Return how long the first forwards of a shape took, those since this was called last."""
        seconds, self._seconds = self._seconds, 0.0
        return seconds

    def _compiled(self, cache: RaggedCache, input_ids: Tensor) -> Tensor:
        batch, tokens = input_ids.shape
        width = self.least
        while width < tokens:
            width *= 2
        rows, held = cache.buffer_shape
        capacity = _power_of_two(max(cache.rows.longest + width, self.capacity, held))
        cache.fix(capacity)
        targets = pad(cache.lengths, (0, rows - batch))[:, None] + torch.arange(width, device=cache.lengths.device)
        limit = self.forward_inputs.limit
        # A row near its end is fed the other rows' width. Its tokens behind the limit are rolled back.
        positions = targets if limit is None else targets.clamp(max=limit - 1)
        inputs = {
            "input_ids": pad(input_ids, (0, width - tokens, 0, rows - batch)),
            "position_ids": positions,
            "attention_mask": ragged_masks(self.model, positions, capacity),
            self.forward_inputs.cache_argument: cache,
            "use_cache": True,
        }
        cache.rows.targets = targets
        try:
            logits = self._run((rows, width, capacity), inputs)
        finally:
            cache.rows.targets = None
        cache.rows.pending = tokens
        return logits[:batch, :tokens]

    def _run(self, shape: tuple[int, int, int], inputs: dict[str, Any]) -> Tensor:
        graphs = _graphs.setdefault(self.model, {})
        if shape in graphs:
            return graphs[shape](self.model, inputs)
        started = time.perf_counter()
        graph = _graph(inputs["input_ids"].device)
        logits = graph(self.model, inputs)
        graphs[shape] = graph
        self._seconds += time.perf_counter() - started
        return logits


@functools.cache
def compiler_error(device: torch.device) -> str | None:
    """Return why torch cannot compile for a device, found by compiling a trivial function; None where it can."""
    # Where torch does not compile for the platform or the Python version at all, it says so by a RuntimeError.
    errors: tuple[type[Exception], ...] = (RuntimeError, *compile_errors())
    try:
        torch.compile(_increment, backend=BACKEND, dynamic=False, fullgraph=True)(torch.zeros(8, device=device))
    except errors as error:
        return _summary(error)
    return None


def _graph(device: torch.device) -> Graph:
    # torch keeps what it compiled with the code object, looks through all of it in each call, and gives up after some
    # number of shapes: each graph gets code of its own.
    own = FunctionType(_forward.__code__.replace(), _forward.__globals__)
    if device.type != "cuda":
        return torch.compile(own, backend=BACKEND, dynamic=False, fullgraph=True)
    captured = torch.compile(own, backend=BACKEND, dynamic=False, fullgraph=True, mode="reduce-overhead")

    def replay(model: Any, inputs: dict[str, Any]) -> Tensor:
        # A CUDA graph reads and writes fixed addresses: those of the buffers, which it need not copy, and its own for
        # the logits, which the next replay overwrites.
        for layer in inputs[cache_argument(model)].layers:
            for buffer in (layer.key_buffer, layer.value_buffer):
                keeps_address(buffer)
        torch.compiler.cudagraph_mark_step_begin()
        return captured(model, inputs).clone()

    return replay


def _forward(model: Any, inputs: dict[str, Any]) -> Tensor:
    return model(**inputs).logits


def _increment(values: Tensor) -> Tensor:
    return values + 1


def _power_of_two(tokens: int) -> int:
    return max(SMALLEST_CAPACITY, 1 << (tokens - 1).bit_length())


def _summary(error: Exception) -> str:
    """The start of a message of torch, which goes on with advice for developers."""
    return textwrap.shorten(str(error), 160, placeholder=" ...") or type(error).__name__
