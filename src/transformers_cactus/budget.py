"""How far a drafted token's probability may be raised: `gamma` for a divergence budget `delta`.

Raising token `n` of the verifier's distribution `q` to `gamma` and scaling the other tokens by
`(1 - gamma) / (1 - q_n)` gives a distribution `h` with

    KL(h || q) = gamma * log(gamma / q_n) + (1 - gamma) * log((1 - gamma) / (1 - q_n)),

which depends on the vocabulary through `q_n` alone. All budgets and divergences are in nats.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from .rows import widest_float

NEWTON_STEPS = 7
"""Steps of `exact_gamma`'s root finder. Over q in [1e-12, 1 - 1e-12] and delta in [1e-12, 20], 6 steps from its
starting point leave `KL(h || q)` within 2e-14 nats of the budget in float64; the seventh is margin."""

ROOT_BITS = 48
"""`largest_gamma` knows `gamma` to within 2^-48 = 4e-15."""

FEW = 4096
"""Numbers up to which an operation takes the same time for 64 times as many candidates."""


def two_point_kl(gamma: Tensor, q_n: Tensor) -> Tensor:
    """`KL(h || q)` in nats of a distribution whose one token was raised from `q_n` to `gamma`.

    Args:
        gamma (`torch.Tensor`): Raised probability, in [0, 1].
        q_n (`torch.Tensor`): The verifier's probability of the token, broadcast against `gamma`.

    Returns:
        `torch.Tensor` in the broadcast shape: at least 0; infinite where `gamma > 0 = q_n`.
    """
    # torch.special.xlogy gives 0 * log 0 = 0. The sum can come out a rounding error below 0.
    raised = torch.special.xlogy(gamma, gamma / q_n)
    others = torch.special.xlogy(1 - gamma, (1 - gamma) / (1 - q_n))
    return (raised + others).clamp_(min=0).masked_fill_(gamma == q_n, 0.0)


def closed_form_gamma(q_n: Tensor, delta: Tensor | float) -> Tensor:
    """`min(q_n + sqrt(2 * delta * q_n * (1 - q_n)), 1)`, the paper's second-order solution (Corollary 5).

    Args:
        q_n (`torch.Tensor`): The verifier's probability of the drafted token, in [0, 1].
        delta (`torch.Tensor` or `float`): Budget in nats, at least 0, may be infinite; broadcast against `q_n`.

    Returns:
        `torch.Tensor` like `q_n`. 0 where `q_n` is 0. `KL(h || q) <= delta` wherever the result is at most 0.5
        (Corollary 6); above that it can be up to twice the budget.
    """
    # A probability can come out a rounding error above 1.
    variance = q_n * (1 - q_n).clamp_(min=0)
    raised = (q_n + (variance * (2 * delta)).sqrt_()).clamp_(max=1)
    if isinstance(delta, Tensor) or delta == math.inf:
        # An infinite budget makes 0 * inf where q_n is 0 or 1.
        raised = torch.where((q_n <= 0) | (q_n >= 1), q_n, raised)
    return raised


def closed_form_gamma_of(q_n: float, delta: float) -> float:
    """[`closed_form_gamma`] of one number, for which ten operations of PyTorch would take too long."""
    return min(q_n + math.sqrt(2 * delta * q_n * (1 - q_n)), 1.0) if 0 < q_n < 1 else q_n


def exact_gamma(q_n: Tensor, delta: Tensor | float) -> Tensor:
    """The largest `gamma` in `[q_n, 1]` with `KL(h || q) <= delta` (the root that Theorem 2 of the paper asks for).

    The divergence is convex and increasing in `gamma` on `[q_n, 1]`, so Newton's method started above the root comes
    down to it without overshooting. The start is the smaller of two upper bounds of the root: Pinsker's,
    `q_n + sqrt(delta / 2)`, close for large budgets, and Bernstein's, the positive root `x` of
    `x^2 = 2 * delta * (q_n * (1 - q_n) + x / 3)` above `q_n`, close for small `q_n` or `delta`.

    Args:
        q_n (`torch.Tensor`): The verifier's probability of the drafted token, in [0, 1].
        delta (`torch.Tensor` or `float`): Budget in nats, at least 0, may be infinite; broadcast against `q_n`.

    Returns:
        `torch.Tensor` like `q_n`; solved in float64 (in float32 on devices without it). 1 where
        `delta >= -log(q_n)`, 0 where `q_n` is 0.
    """
    work = widest_float(q_n.device)
    q = q_n.to(work)
    budget = torch.as_tensor(delta, dtype=work, device=q.device).expand_as(q)
    one_below = 1 - torch.finfo(work).eps
    # Outside this range the answer is known, and a value inside keeps the iteration free of NaN.
    solvable = (q > 0) & (q < one_below) & (budget > 0) & (budget < -q.log())
    inner_q = torch.where(solvable, q, 0.5)
    inner_budget = torch.where(solvable, budget, 0.1)

    third = inner_budget / 3
    bernstein = inner_q + third + torch.sqrt(third**2 + 2 * inner_budget * inner_q * (1 - inner_q))
    pinsker = inner_q + torch.sqrt(inner_budget / 2)
    gamma = torch.minimum(bernstein, pinsker).clamp(max=one_below)
    for _ in range(NEWTON_STEPS):
        excess = gamma * (gamma / inner_q).log() + (1 - gamma) * ((1 - gamma) / (1 - inner_q)).log() - inner_budget
        slope = (gamma / inner_q).log() - ((1 - gamma) / (1 - inner_q)).log()
        # Below the root by rounding, or at a slope of 0: stay.
        step = torch.where((excess > 0) & (slope > 0), excess / slope, 0.0)
        gamma = torch.maximum(gamma - step, inner_q)

    certain = (q >= one_below) | ((q > 0) & (budget >= -q.log()))
    unsolved = torch.where(certain, 1.0, q)
    return torch.where(solvable, gamma, unsolved).to(q_n.dtype)


def largest_gamma(q_n: Tensor, delta: Tensor | float, f: Callable[[Tensor], Tensor]) -> Tensor:
    """The largest `gamma` in `[q_n, 1]` with `D_f(h || q) <= delta` (the root that Theorem 2 of the paper asks for).

    `D_f(h || q) = q_n * f(gamma / q_n) + (1 - q_n) * f((1 - gamma) / (1 - q_n))` is convex in `gamma`, 0 at `q_n` and
    increasing from there. The interval that holds the root is cut into parts again and again, which needs no
    derivative of `f`: into 64, so that operations are few, or into 2 where numbers are many.

    Args:
        q_n (`torch.Tensor`): The verifier's probability of the drafted token, in [0, 1].
        delta (`torch.Tensor` or `float`): Budget in the unit of `f`, at least 0, may be infinite; broadcast against
            `q_n`.
        f (callable): Convex, elementwise, `f(1) = 0`. Gets ratios of probabilities in float64.

    Returns:
        `torch.Tensor` like `q_n`; solved in float64 (in float32 on devices without it). 0 where `q_n` is 0.
    """
    work = widest_float(q_n.device)
    q = q_n.to(work)
    budget = torch.as_tensor(delta, dtype=work, device=q.device).expand_as(q)
    solvable = (q > 0) & (q < 1) & (budget > 0)
    if q.device.type == "cpu":
        # Most of a truncated row has no root, and on the CPU it costs nothing to look.
        return q.masked_scatter(solvable, _root(q[solvable], budget[solvable], f)).to(q_n.dtype)
    return torch.where(solvable, _root(torch.where(solvable, q, 0.5), budget, f), q).to(q_n.dtype)


def _root(q: Tensor, budget: Tensor, f: Callable[[Tensor], Tensor]) -> Tensor:
    """`largest_gamma` for probabilities strictly between 0 and 1."""
    inner, budget = q[..., None], budget[..., None]

    def within(gamma: Tensor) -> Tensor:
        # False for NaN, as 0 * log 0 gives.
        return inner * f(gamma / inner) + (1 - inner) * f((1 - gamma) / (1 - inner)) <= budget

    parts = 64 if q.numel() <= FEW else 2
    steps = torch.arange(1, parts, dtype=q.dtype, device=q.device) / parts
    low, width = inner, 1 - inner
    for _ in range(round(ROOT_BITS / math.log2(parts))):
        low = low + width * within(low + width * steps).sum(-1, keepdim=True) / parts
        width = width / parts
    return torch.where(within(torch.ones_like(inner)), 1.0, low)[..., 0]
