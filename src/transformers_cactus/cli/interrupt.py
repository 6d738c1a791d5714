"""Ctrl-C that stops an answer, not the program."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

import torch
from torch import Tensor
from transformers import StoppingCriteria


class StopOnRequest(StoppingCriteria):
    """Ends a text after the token during which `requested` became true."""

    requested = False

    def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Tensor:
        """See transformers' `StoppingCriteria`."""
        return torch.full((input_ids.shape[0],), self.requested, device=input_ids.device)


@contextmanager
def stop_on_interrupt() -> Iterator[StopOnRequest]:
    """Lets Ctrl-C stop generation at the next token, so that the caches stay whole; a second one raises at once.

    Yields:
        [`StopOnRequest`]: To pass to `generate` in its `stopping_criteria`.
    """
    criterion = StopOnRequest()

    def stop(number: int, frame: FrameType | None) -> None:
        if criterion.requested:
            raise KeyboardInterrupt
        criterion.requested = True

    before = signal.signal(signal.SIGINT, stop)
    try:
        yield criterion
    finally:
        signal.signal(signal.SIGINT, before)
