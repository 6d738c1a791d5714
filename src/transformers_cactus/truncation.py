"""Top-k, and a top-p behind it, without sorting the vocabulary: and a list of the few tokens that are left.

transformers' warpers make several passes over every row, and top-p sorts it; on a CPU that takes longer than the rest
of a round outside the models. Behind top-k only k tokens are left, and what comes later has to look at those only.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor
from transformers import LogitsProcessor, TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

TIES = 8
"""Tokens looked at beyond the k-th, so that tokens tied with it are kept, as top-k keeps them."""


class Truncation(LogitsProcessor):
    """Up to three warpers in one, with their results: the same tokens stay, with the same scores up to rounding.

    Where more than `TIES` tokens tie with the k-th, and on devices other than the CPU, on which that test would wait
    for the device and sorting is fast, the warpers themselves run.

    Args:
        temperature (`TemperatureLogitsWarper` or `None`): Runs first.
        top_k (`TopKLogitsWarper`): Runs next.
        top_p (`TopPLogitsWarper` or `None`): Runs on what is left.
    """

    def __init__(
        self, temperature: TemperatureLogitsWarper | None, top_k: TopKLogitsWarper, top_p: TopPLogitsWarper | None
    ):
        self.temperature = temperature
        self.top_k = top_k
        self.top_p = top_p

    def __call__(self, input_ids: Tensor | None, scores: Tensor) -> Tensor:
        """Truncates rows.

        Args:
            input_ids: Not used.
            scores (`torch.Tensor` of shape `[rows, vocab]`): Scores.

        Returns:
            `torch.Tensor` of shape `[rows, vocab]`.
        """
        return self.truncate(scores.clone())[0]

    def truncate(self, scores: Tensor) -> tuple[Tensor, Tensor | None]:
        """Truncates rows, and says which tokens are left.

        Args:
            scores (`torch.Tensor` of shape `[rows, vocab]`): Scores. May be overwritten.

        Returns:
            `torch.Tensor` of shape `[rows, vocab]` and `torch.LongTensor` of shape `[rows, kept]`: the scores, and
            different tokens of which all others have the score `-inf`; `None` where the warpers themselves had to run.
        """
        found = None if scores.device.type != "cpu" else self._largest(scores)
        if found is None:
            for warper in (self.temperature, self.top_k, self.top_p):
                scores = scores if warper is None else warper(None, scores)
            return scores, None
        values, tokens = found
        return scores.fill_(-torch.inf).scatter_(-1, tokens, scores.new_tensor(values)), tokens

    def _largest(self, scores: Tensor) -> tuple[list[list[float]], Tensor] | None:
        """What is left of the `k + TIES` largest scores of each row, in descending order, and their tokens.

        `None` where a row holds NaN or infinity, fewer than k tokens that are not `-inf`, too many that are tied, or
        is too short.
        """
        count = self.top_k.top_k + TIES
        if count >= scores.shape[-1]:
            return None
        values, tokens = scores.topk(count, dim=-1)
        # So few numbers take less time in Python than one operation of PyTorch does.
        rows = [self._cut(row) for row in values.tolist()]
        return None if None in rows else (rows, tokens)  # type: ignore[return-value]

    def _cut(self, values: list[float]) -> list[float] | None:
        """The scores of one row after the warpers, `-inf` for tokens that are cut off; `None` as in `_largest`."""
        kept = self.top_k.top_k
        smallest = values[kept - 1]
        if not (values[-1] < smallest and values[0] < math.inf):
            return None
        while values[kept] == smallest:
            kept += 1
        if self.temperature is not None:
            temperature = self.temperature.temperature
            values = [value / temperature for value in values[:kept]]
        if self.top_p is not None:
            kept = self._nucleus(values[:kept])
        return values[:kept] + [-math.inf] * (self.top_k.top_k + TIES - kept)

    def _nucleus(self, values: list[float]) -> int:
        """How many of some descending scores top-p keeps."""
        assert self.top_p is not None
        weights = [math.exp(value - values[0]) for value in values]
        # As top-p does it: from the least probable token on, while their sum is at most 1 - top_p.
        spare, kept = (1 - self.top_p.top_p) * sum(weights), len(weights)
        while kept > self.top_p.min_tokens_to_keep:
            spare -= weights[kept - 1]
            if spare < 0:
                break
            kept -= 1
        return kept


def fused(processors: list[LogitsProcessor]) -> list[LogitsProcessor]:
    """The same processors, with each top-k and its neighbours that it can take along as one [`Truncation`]."""
    result: list[LogitsProcessor] = []
    for processor in processors:
        # Other fill values than the default's would show in the scores.
        plain = getattr(processor, "filter_value", None) == -float("inf")
        previous = result[-1] if result else None
        if type(processor) is TopKLogitsWarper and plain:
            before = result.pop() if type(previous) is TemperatureLogitsWarper else None
            processor = Truncation(before, processor, None)
        elif type(processor) is TopPLogitsWarper and plain and type(previous) is Truncation and previous.top_p is None:
            result.pop()
            processor = Truncation(previous.temperature, previous.top_k, processor)
        result.append(processor)
    return result
