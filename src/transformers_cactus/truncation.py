"""Top-k, and a top-p behind it, without sorting the vocabulary: and a list of the few tokens that are left.

transformers' warpers make several passes over every row, and top-p sorts it; on a CPU that takes longer than the rest
of a round outside the models. Behind top-k only k tokens are left, and what comes later has to look at those only.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor
from transformers import LogitsProcessor, TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

TIES = 8
"""Tokens looked at beyond the k-th, so that tokens tied with it are kept, as top-k keeps them."""


class Truncation(LogitsProcessor):
    """Up to three warpers in one, with their results: the same tokens stay, with the same scores.

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
        return self.truncate(scores)[0]

    def truncate(self, scores: Tensor) -> tuple[Tensor, Tensor | None]:
        """Truncates rows, and says which tokens are left.

        Args:
            scores (`torch.Tensor` of shape `[rows, vocab]`): Scores.

        Returns:
            `torch.Tensor` of shape `[rows, vocab]` and `torch.LongTensor` of shape `[rows, kept]`: the scores, and
            different tokens of which all others have the score `-inf`; `None` where the warpers themselves had to run.
        """
        found = None if scores.device.type != "cpu" else largest(scores, self.top_k.top_k)
        if found is None:
            for warper in (self.temperature, self.top_k, self.top_p):
                scores = scores if warper is None else warper(None, scores)
            return scores, None
        values, tokens = found
        if self.temperature is not None:
            values /= self.temperature.temperature
        if self.top_p is not None:
            probs = np.exp(values - values[:, :1])
            probs /= probs.sum(-1, keepdims=True)
            # As top-p does it: from the least probable token on, while their sum is at most 1 - top_p.
            removed = probs[:, ::-1].cumsum(-1)[:, ::-1] <= 1 - self.top_p.top_p
            removed[:, : self.top_p.min_tokens_to_keep] = False
            values[removed] = -np.inf
        kept = torch.full_like(scores, -torch.inf).scatter_(-1, tokens, torch.from_numpy(values))
        return kept, tokens


def largest(scores: Tensor, k: int) -> tuple[np.ndarray, Tensor] | None:
    """The `k` largest scores of each row, and those tied with the k-th, in descending order, with their tokens.

    Args:
        scores (`torch.Tensor` of shape `[rows, vocab]`): Scores.
        k (`int`): How many.

    Returns:
        Two arrays of shape `[rows, k + TIES]`: scores, `-inf` behind the last one, and different tokens. `None` where
        a row holds NaN or infinity, fewer than `k` tokens that are not `-inf`, too many tied ones, or is too short.
    """
    if k + TIES >= scores.shape[-1]:
        return None
    largest_scores, tokens = scores.topk(k + TIES, dim=-1)
    # On arrays this small an operation of NumPy takes a fraction of the time of one of PyTorch.
    values = largest_scores.numpy()
    smallest = values[:, k - 1 : k]
    if not ((values[:, -1:] < smallest).all() and np.isfinite(values[:, 0]).all()):
        return None
    values[values < smallest] = -np.inf
    return values, tokens


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
