"""Cactus with another f-divergence than KL as the measure of its budget.

The paper's Theorem 2 holds for every `D_f(h || q) = sum over x of q(x) * f(h(x) / q(x))` with a convex `f`: the best
`h` raises the drafted token to the largest `gamma` in `[q_n, 1]` with

    q_n * f(gamma / q_n) + (1 - q_n) * f((1 - gamma) / (1 - q_n)) <= delta,

and scales all others alike. The unit of `delta` is that of the divergence. KL itself is [`CactusExact`], and the
paper's closed form, [`Cactus`], is the chi-square rule at twice its budget.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from typing_extensions import override

from ..acceptance import BudgetRule
from ..budget import largest_gamma
from ..parameters import per_sequence


@dataclass(frozen=True, eq=False)
class ChiSquare(BudgetRule):
    """Budget for the chi-square divergence, `f(t) = (t - 1)^2`: `gamma = min(q_n + sqrt(delta * q_n * (1 - q_n)), 1)`.

    Args:
        delta (`float` or `torch.Tensor` of shape `[batch]`): Budget for `sum of (h - q)^2 / q`, a pure number of at
            least 0. 0 is lossless.

    Raises:
        ValueError: If `delta` is negative or NaN.
        TypeError: If `delta` is no number.
    """

    @override
    def gamma(self, q_n: Tensor) -> Tensor:
        raised = (q_n + torch.sqrt(per_sequence(self.delta, q_n) * q_n * (1 - q_n))).clamp(max=1)
        return _between(q_n, raised)


@dataclass(frozen=True, eq=False)
class TotalVariation(BudgetRule):
    """Budget for the total variation distance, `f(t) = |t - 1| / 2`: `gamma = min(q_n + delta, 1)`.

    Args:
        delta (`float` or `torch.Tensor` of shape `[batch]`): Budget for `sum of |h - q| / 2`, a probability: at least
            0, which is lossless; 1 and above keep every token that the verifier does not exclude.

    Raises:
        ValueError: If `delta` is negative or NaN.
        TypeError: If `delta` is no number.
    """

    @override
    def gamma(self, q_n: Tensor) -> Tensor:
        return _between(q_n, (q_n + per_sequence(self.delta, q_n)).clamp(max=1))


@dataclass(frozen=True, eq=False)
class ReverseKL(BudgetRule):
    """Budget for `KL(q || h)`, `f(t) = -log t`. No finite budget lets `gamma` reach 1, so nothing is excluded.

    Args:
        delta (`float` or `torch.Tensor` of shape `[batch]`): Budget in nats, at least 0. 0 is lossless.

    Raises:
        ValueError: If `delta` is negative or NaN.
        TypeError: If `delta` is no number.
    """

    @override
    def gamma(self, q_n: Tensor) -> Tensor:
        return largest_gamma(q_n, per_sequence(self.delta, q_n), lambda ratio: -ratio.log())


@dataclass(frozen=True, eq=False)
class SquaredHellinger(BudgetRule):
    """Budget for the squared Hellinger distance, `f(t) = (sqrt(t) - 1)^2 / 2`.

    `1 - sum of sqrt(h * q)` is `1 - cos(phi - theta)` for `gamma = sin(phi)^2` and `q_n = sin(theta)^2`, so the root
    is `gamma = sin(min(theta + arccos(1 - delta), pi / 2))^2`.

    Args:
        delta (`float` or `torch.Tensor` of shape `[batch]`): Budget, a pure number of at least 0, which is lossless;
            1 and above keep every token that the verifier does not exclude.

    Raises:
        ValueError: If `delta` is negative or NaN.
        TypeError: If `delta` is no number.
    """

    @override
    def gamma(self, q_n: Tensor) -> Tensor:
        delta = torch.as_tensor(per_sequence(self.delta, q_n), dtype=q_n.dtype, device=q_n.device).clamp(max=1)
        # arccos(1 - delta), without the rounding of 1 - delta.
        angle = q_n.sqrt().asin() + 2 * (delta / 2).sqrt().asin()
        return _between(q_n, angle.clamp(max=math.pi / 2).sin().square())


@dataclass(frozen=True, eq=False)
class JensenShannon(BudgetRule):
    """Budget for the Jensen–Shannon divergence, `f(t) = (t * log t - (t + 1) * log((t + 1) / 2)) / 2`.

    Args:
        delta (`float` or `torch.Tensor` of shape `[batch]`): Budget in nats, at least 0, which is lossless; log 2 and
            above keep every token that the verifier does not exclude.

    Raises:
        ValueError: If `delta` is negative or NaN.
        TypeError: If `delta` is no number.
    """

    @override
    def gamma(self, q_n: Tensor) -> Tensor:
        def f(ratio: Tensor) -> Tensor:
            return (torch.special.xlogy(ratio, ratio) - (ratio + 1) * ((ratio + 1) / 2).log()) / 2

        return largest_gamma(q_n, per_sequence(self.delta, q_n), f)


@dataclass(frozen=True, eq=False)
class FDivergence(BudgetRule):
    """Budget for an f-divergence of your own.

    Args:
        delta (`float` or `torch.Tensor` of shape `[batch]`): Budget in the unit of `f`, at least 0. 0 is lossless.
        f (callable): Takes a `torch.Tensor` of ratios `h / q`, of any shape, in float64, and returns `f` of each. It
            must be convex on `(0, inf)`, with `f(1) = 0` and a bend at 1; `f(0)` may be infinite.

    Raises:
        ValueError: If `delta` is negative or NaN, or `f` is seen not to be such a function.
        TypeError: If `delta` is no number, or `f` cannot be called or returns no tensor of its argument's shape.

    Example:
        >>> from transformers_cactus import FDivergence
        >>> rule = FDivergence(0.1, lambda t: (t - 1) ** 2 / (t + 1))  # the triangular discrimination
    """

    f: Callable[[Tensor], Tensor]

    def __post_init__(self) -> None:
        super().__post_init__()
        _check_convex(self.f)

    @override
    def gamma(self, q_n: Tensor) -> Tensor:
        return largest_gamma(q_n, per_sequence(self.delta, q_n), self.f)


def _between(q_n: Tensor, raised: Tensor) -> Tensor:
    """`raised`, but what the verifier excludes stays out, rounding lowers nothing, and infinite budgets make no
    NaN."""
    return torch.where((q_n <= 0) | (q_n >= 1), q_n, torch.maximum(raised, q_n))


def _check_convex(f: Callable[[Tensor], Tensor]) -> None:
    """Raises unless a function looks convex on a grid, is 0 at 1, and bends there."""
    if not callable(f):
        raise TypeError(f"f must be a function of a tensor of ratios, got {f!r}.")
    # Even steps on both sides of 1, where most ratios lie, and wider ones beyond.
    ratios = torch.cat([torch.logspace(-9, -1, 33), torch.linspace(0.1, 2, 191)[1:], torch.logspace(0.31, 9, 36)])
    ratios = ratios.double()
    ratios[(ratios - 1).abs().argmin()] = 1.0
    values = f(ratios)
    if not isinstance(values, Tensor) or values.shape != ratios.shape:
        raise TypeError("f must return a tensor of its argument's shape.")
    if not bool(values.isfinite().all()):
        raise ValueError("f must be finite for ratios above 0.")
    at_one = values[ratios == 1].abs().max()
    if bool(at_one > 1e-9):
        raise ValueError(f"f(1) must be 0, got {at_one.item():g}.")
    slopes = values.diff() / ratios.diff()
    # Slopes of large numbers come with rounding errors in proportion.
    tolerance = 1e-9 * (1 + slopes.abs()[1:] + slopes.abs()[:-1])
    if not bool((slopes.diff() >= -tolerance).all()):
        raise ValueError("f must be convex: its slope must not fall.")
    around = f(torch.tensor([0.999, 1.001], dtype=torch.float64)).sum()
    if not bool(around > 1e-12):
        raise ValueError("f must bend at 1, or some divergence would cost nothing.")
