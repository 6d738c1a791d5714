"""The ensemble rule: a mixture of the two models."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from typing_extensions import override

from ..parameters import check_parameter, per_sequence
from .target import TargetRule


@dataclass(frozen=True, eq=False)
class Ensemble(TargetRule):
    """Interpolation, `h = weight * q + (1 - weight) * p`: transformers' `assistant_ensemble_weight`.

    By its definition `h` gives mass to tokens that the verifier excludes (by top-k, top-p, bad words, a grammar) but
    the draft does not, unless `within_support`; `KL(h || q)` is infinite at such a position. Without draft
    probabilities the drafted token is raised to `weight * q_n + 1 - weight`.

    Args:
        weight (`float` or `torch.Tensor` of shape `[batch]`): The verifier's share, in [0, 1]. 1 is lossless.
        within_support (`bool`, *optional*, defaults to `False`): What `p` gives to tokens that the verifier excludes
            goes to `q` instead, so that they are never emitted.

    Raises:
        ValueError: If `weight` is out of range or NaN.
        TypeError: If `weight` is no number or `within_support` no `bool`.
    """

    weight: float | Tensor
    within_support: bool = False

    def __post_init__(self) -> None:
        check_parameter("weight", self.weight, maximum=1.0, unit="the verifier's share")
        if not isinstance(self.within_support, bool):
            raise TypeError(f"within_support must be True or False, got {self.within_support!r}.")

    @property
    @override
    def is_lossless(self) -> bool:
        return not isinstance(self.weight, Tensor) and self.weight == 1

    @property
    @override
    def leaves_support(self) -> bool:
        return not self.within_support and not self.is_lossless

    @override
    def target(self, verifier_probs: Tensor, draft_probs: Tensor) -> Tensor:
        weight = per_sequence(self.weight, verifier_probs)
        if self.within_support:
            draft_probs = torch.where(verifier_probs > 0, draft_probs, 0.0)
        # Also what the draft gives to tokens that the verifier's vocabulary lacks.
        excluded = (1 - draft_probs.sum(-1, keepdim=True)).clamp(min=0)
        return weight * verifier_probs + (1 - weight) * (draft_probs + excluded * verifier_probs)

    @override
    def raised_alone(self, q_n: Tensor) -> Tensor:
        weight = per_sequence(self.weight, q_n)
        raised = q_n + (1 - weight) * (1 - q_n)
        return torch.where(q_n > 0, raised, 0.0) if self.within_support else raised
