"""Top-k followed by top-p without sorting the vocabulary.

transformers' top-p sorts every row, which on a CPU takes longer than the rest of a round outside the models. Behind
top-k only k tokens are left, and sorting those is enough.
"""

from __future__ import annotations

import torch
from torch import Tensor
from transformers import LogitsProcessor, TopKLogitsWarper, TopPLogitsWarper

TIES = 8
"""Tokens looked at beyond the k-th, so that tokens tied with it are kept, as top-k keeps them."""


class TopKTopP(LogitsProcessor):
    """The two warpers in one, with their results: the same tokens stay, with the same scores.

    Where more than `TIES` tokens tie with the k-th, and on devices other than the CPU, on which that test would wait
    for the device and sorting is fast, the warpers themselves run.

    Args:
        top_k (`TopKLogitsWarper`): Runs first.
        top_p (`TopPLogitsWarper`): Runs on what is left.
    """

    def __init__(self, top_k: TopKLogitsWarper, top_p: TopPLogitsWarper):
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
        k, vocab = self.top_k.top_k, scores.shape[-1]
        if scores.device.type != "cpu" or k + TIES >= vocab:
            return self.top_p(input_ids, self.top_k(input_ids, scores))
        values, tokens = scores.topk(k + TIES, dim=-1)
        smallest = values[:, k - 1 : k]
        if not bool((values[:, -1:] < smallest).all()):
            # Also where a row holds NaN, or fewer than k tokens that are not -inf.
            return self.top_p(input_ids, self.top_k(input_ids, scores))
        values = values.masked_fill(values < smallest, -torch.inf)
        # As top-p does it: from the least probable token on, while their sum is at most 1 - top_p.
        ascending = values.flip(-1)
        removed = ascending.softmax(-1).cumsum(-1) <= 1 - self.top_p.top_p
        removed[:, -self.top_p.min_tokens_to_keep :] = False
        kept = ascending.masked_fill(removed, self.top_p.filter_value).flip(-1)
        kept = kept.masked_fill(values == -torch.inf, self.top_k.filter_value)
        return torch.full_like(scores, self.top_k.filter_value).scatter_(-1, tokens, kept)


def fused(processors: list[LogitsProcessor]) -> list[LogitsProcessor]:
    """The same processors, with each top-k that a top-p follows directly replaced by one [`TopKTopP`]."""
    result: list[LogitsProcessor] = []
    for processor in processors:
        adjacent = type(processor) is TopPLogitsWarper and bool(result) and type(result[-1]) is TopKLogitsWarper
        # Other fill values than the default's would show in the scores.
        if adjacent and result[-1].filter_value == processor.filter_value == -float("inf"):
            processor = TopKTopP(result.pop(), processor)
        result.append(processor)
    return result
