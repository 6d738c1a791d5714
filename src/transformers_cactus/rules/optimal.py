"""The optimal rule: the highest acceptance that a divergence can buy."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from typing_extensions import override

from ..parameters import check_parameter, per_sequence
from ..rows import columns_with_mass, widest_float
from .target import TargetRule

GRID = 16
"""Candidates that `normalizer` looks at in each of its steps."""

GRID_STEPS = 11
"""Its steps. `log(a)` is then known to within `multiplier / 16^11`, and the sum of `h` is 1 to within that share of 1,
at most 5e-12, since it grows no faster than `a`."""

LARGEST_MULTIPLIER = 80.0
"""Beyond this `exp(multiplier)` leaves float32, and no two probabilities in float32 that are not 0 are that far
apart."""


@dataclass(frozen=True, eq=False)
class Optimal(TargetRule):
    """The `h` that maximises `sum of min(p, h) - KL(h || q) / multiplier`: `h = clip(p, a * q, a * e^multiplier * q)`.

    The first term is the acceptance probability, so among all distributions that do not depend on the drafted token,
    none with the same acceptance probability has a smaller `KL(h || q)`. `a` is what makes `h` sum to 1. The
    Lagrangian of the constrained problem; compare Tran-Thien, "Mentored Decoding". Derivation: where `h < p` an
    increase of `h` buys acceptance at the price `(log(h / q) + 1) / multiplier`, and where `h > p` it buys none, so
    that `log(h / q)` is one constant on the latter tokens, larger by the multiplier on the former, and between the two
    where `h = p`.

    Args:
        multiplier (`float` or `torch.Tensor` of shape `[batch]`): Nats of `KL(h || q)` that a unit of acceptance
            probability may cost, at least 0. 0 is lossless; `inf` emits the draft's distribution wherever the verifier
            allows it.

    Raises:
        ValueError: If `multiplier` is negative or NaN.
        TypeError: If `multiplier` is no number.
    """

    multiplier: float | Tensor

    def __post_init__(self) -> None:
        check_parameter("multiplier", self.multiplier, unit="nats per unit of acceptance probability")

    @property
    @override
    def is_lossless(self) -> bool:
        return not isinstance(self.multiplier, Tensor) and self.multiplier == 0

    @override
    def target(self, verifier_probs: Tensor, draft_probs: Tensor) -> Tensor:
        ratio = self._ratio(verifier_probs)
        columns = columns_with_mass(verifier_probs)
        q, p = verifier_probs[..., columns], draft_probs[..., columns]
        scale = normalizer(q, p, ratio)
        h = p.clamp(min=scale * q, max=scale * ratio * q)
        target = torch.zeros_like(verifier_probs)
        target[..., columns] = h / h.sum(-1, keepdim=True)
        return target

    @override
    def raised_alone(self, q_n: Tensor) -> Tensor:
        raised = self._ratio(q_n) * q_n
        return raised / (raised + 1 - q_n)

    def _ratio(self, like: Tensor) -> Tensor:
        multiplier = torch.as_tensor(per_sequence(self.multiplier, like), dtype=like.dtype, device=like.device)
        return multiplier.clamp(max=LARGEST_MULTIPLIER).exp()


def normalizer(verifier_probs: Tensor, draft_probs: Tensor, ratio: Tensor) -> Tensor:
    """The `a` for which `clip(p, a * q, a * ratio * q)` sums to 1.

    The sum grows with `a`, is at most 1 at `a = 1 / ratio` and at least 1 at `a = 1`. With tokens in the order of
    `p / q`, it is a few prefix sums for any `a`, so that the search costs little beside the sorting. The number of
    steps is fixed: nothing waits for the device.

    Args:
        verifier_probs (`torch.Tensor` of shape `[..., vocab]`): `q`.
        draft_probs (`torch.Tensor` of shape `[..., vocab]`): `p`; may sum to less than 1.
        ratio (`torch.Tensor`): At least 1, broadcast against the rows.

    Returns:
        `torch.Tensor` of shape `[..., 1]` and of `q`'s dtype, in [1 / ratio, 1].
    """
    work = widest_float(verifier_probs.device)
    q, p = verifier_probs.to(work), torch.where(verifier_probs > 0, draft_probs, 0.0).to(work)
    by_ratio, order = torch.where(q > 0, p / q, torch.inf).sort(-1)
    q, p = q.gather(-1, order), p.gather(-1, order)
    covered = torch.nn.functional.pad(p.cumsum(-1), (1, 0))
    mass_before = torch.nn.functional.pad(q.cumsum(-1), (1, 0))
    # From the other end: a difference of sums from the first would lose what a large ratio is to multiply.
    mass_from = torch.nn.functional.pad(q.flip(-1).cumsum(-1).flip(-1), (0, 1))
    log_ratio = ratio.to(work).log().expand_as(q[..., :1])
    low, width = -log_ratio, log_ratio
    parts = torch.linspace(0, 1, GRID + 1, dtype=work, device=q.device)
    for _ in range(GRID_STEPS):
        candidates = low + width * parts
        bottom, top = candidates.exp(), (candidates + log_ratio).exp()
        below, above = torch.searchsorted(by_ratio, bottom), torch.searchsorted(by_ratio, top, right=True)
        total = bottom * mass_before.gather(-1, below) + top * mass_from.gather(-1, above)
        total += covered.gather(-1, above) - covered.gather(-1, below)
        # The first candidate is not too large, but for rounding.
        small = (total <= 1).long()
        small[..., 0] = 1
        low = candidates.gather(-1, small.cumprod(-1).sum(-1, keepdim=True) - 1)
        width = width / GRID
    return low.exp().to(verifier_probs.dtype)
