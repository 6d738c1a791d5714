"""Top-k acceptance: keep what is among the verifier's k most probable tokens."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from typing_extensions import override

from .threshold import ThresholdRule


@dataclass(frozen=True)
class TopK(ThresholdRule):
    """Accept a drafted token that is among the `k` most probable of `q`; a baseline of the paper.

    After a rejection, sample from `max(q_k - p, 0)`, where `q_k` is `q` cut to those tokens and renormalised. Tokens
    that tie with the k-th are among them, as in transformers' top-k. There is no lossless setting. Not to be confused
    with `generate`'s `top_k`, which cuts the verifier's own distribution and holds with every rule.

    Args:
        k (`int`): At least 1.

    Raises:
        ValueError: If `k` is below 1.
        TypeError: If `k` is no whole number.
    """

    k: int

    def __post_init__(self) -> None:
        if isinstance(self.k, bool) or not isinstance(self.k, int):
            raise TypeError(f"k must be a whole number of tokens, got {self.k!r}.")
        if self.k < 1:
            raise ValueError(f"k must be at least 1 token, got {self.k!r}.")

    @override
    def accepts(self, q_n: Tensor, verifier_probs: Tensor) -> Tensor:
        smallest = verifier_probs.topk(min(self.k, verifier_probs.shape[-1]), dim=-1).values[..., -1:]
        return (q_n >= smallest) & (q_n > 0)

    @override
    def recovery(self, verifier_probs: Tensor, draft_probs: Tensor | None) -> Tensor:
        cut = torch.where(self.accepts(verifier_probs, verifier_probs), verifier_probs, 0.0)
        cut = cut / cut.sum(-1, keepdim=True)
        if draft_probs is None:
            return cut
        residual = (cut - draft_probs).clamp(min=0)
        # Rounding: a token was rejected, so p has mass outside, and the residual is not empty.
        return torch.where(residual.sum(-1, keepdim=True) > 0, residual, cut)
