"""The verification of a block in Python numbers, where truncation has left so few that PyTorch only costs time.

Behind a forward that has filled the caches of a processor, each small operation of PyTorch takes tens of microseconds,
and a verification is some fifty of them. Acceptance and recovery are those of [`GammaRule`], in float64.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from .acceptance import GammaRule
from .budget import two_point_kl
from .decided import Decided
from .truncation import Kept
from .verification import Verification, sample_row

MOST = 1024
"""Scores of the verifier in a block, of all sequences, up to which this is faster."""

_SHARED = ("acceptance_probability", "recovery_weights", "divergence", "scale_of_others")


def has_few_numbers(kept: Kept, rule: GammaRule) -> bool:
    """Whether this can and should verify a block.

    Args:
        kept ([`Kept`]): What is left of the verifier's scores.
        rule ([`GammaRule`]): The rule; one that says more than its `gamma` is left to itself.
    """
    same = all(getattr(type(rule), name) is getattr(GammaRule, name) for name in _SHARED)
    return same and kept.device.type == "cpu" and math.prod(kept.shape) <= MOST


def verify_few(
    draft_tokens: Tensor,
    kept: Kept,
    draft: Kept | None,
    rule: GammaRule,
    *,
    block_lengths: Tensor | None = None,
    generator: torch.Generator | None = None,
    measure: bool = True,
) -> Verification:
    """[`verify_kept`] in Python numbers.

    Args:
        draft_tokens (`torch.LongTensor` of shape `[batch, block]`): As in [`verify_kept`], like all that is not named.
        kept ([`Kept`] of shape `[batch, block + 1, kept]`): What is left of the verifier's scores, on a CPU.
        draft ([`Kept`] of shape `[batch, block, kept]` or `None`): What is left of the draft's.

    Returns:
        [`Verification`], without `certificate`.
    """
    batch, block = draft_tokens.shape
    uniforms = torch.rand(batch, block + 1, generator=generator, dtype=torch.float32).tolist()
    drafted = draft_tokens.tolist()
    lengths = [block] * batch if block_lengths is None else block_lengths.tolist()
    verifier = _distributions(kept)
    proposals = None if draft is None else _distributions(draft)
    q = [
        [verifier[row][place].get(token, 0.0) if place < lengths[row] else 0.0 for place, token in enumerate(tokens)]
        for row, tokens in enumerate(drafted)
    ]
    gamma, divergence = _raised(q, rule, measure)

    accepted, lossless, following = [], [], []
    for row, tokens in enumerate(drafted):
        phi, exact = [], []
        for place in range(lengths[row]):
            p_n = 1.0 if proposals is None else proposals[row][place].get(tokens[place], 0.0)
            phi.append(_acceptance(gamma[row][place], p_n))
            exact.append(uniforms[row][place] < _acceptance(q[row][place], p_n))
        count = next((place for place, share in enumerate(phi) if not uniforms[row][place] < share), lengths[row])
        weights = verifier[row][count]
        if count < lengths[row]:
            p = {tokens[count]: 1.0} if proposals is None else proposals[row][count]
            weights = _recovery(weights, p, tokens[count], gamma[row][count])
        candidates = list(weights)
        following.append(candidates[sample_row(list(weights.values()), uniforms[row][block])])
        accepted.append(count)
        lossless.append(exact + [False] * (block - len(exact)))
    invalid = [0] * batch
    return Verification(
        torch.tensor(accepted),
        torch.tensor(following),
        torch.tensor(lossless).view(batch, block) if measure else None,
        divergence,
        None,
        torch.tensor(invalid),
        Decided(
            accepted,
            following,
            invalid,
            drafted,
            lossless if measure else None,
            None if divergence is None else divergence.tolist(),
            None,
        ),
    )


def _distributions(kept: Kept) -> list[list[dict[int, float]]]:
    """By sequence and position, the probability of each token that is left."""
    found = list(map(_distribution, kept.token_rows, kept.weight_rows))
    positions = kept.shape[1]
    return [found[start : start + positions] for start in range(0, len(found), positions)]


def _distribution(tokens: Sequence[int], weights: Sequence[float]) -> dict[int, float]:
    total = sum(weights)
    return {token: weight / total for token, weight in zip(tokens, weights, strict=True) if weight > 0}


def _raised(q: list[list[float]], rule: GammaRule, measure: bool) -> tuple[list[list[float]], Tensor | None]:
    """`gamma` of each drafted token; and, where asked for, `KL(h || q)`, `[batch, block]`."""
    if rule.is_lossless:
        return q, torch.zeros(len(q), len(q[0])) if measure else None
    q_n = torch.tensor(q, dtype=torch.float64)
    gamma = rule.gamma(q_n)
    return gamma.tolist(), two_point_kl(gamma, q_n).float() if measure else None


def _acceptance(gamma: float, p_n: float) -> float:
    """`min(1, gamma / p_n)`, and 0 for a token that stays out even if the draft cannot have drafted it."""
    if gamma == 0:
        return 0.0
    return 1.0 if gamma >= p_n else gamma / p_n


def _recovery(q: dict[int, float], p: dict[int, float], rejected: int, gamma: float) -> dict[int, float]:
    """Weights of what is drawn after a rejection; see [`GammaRule.recovery_weights`]."""
    q_n = q.get(rejected, 0.0)
    scale = 0.0 if q_n >= 1 else (1 - gamma) / (1 - q_n)
    others = {token: value for token, value in q.items() if token != rejected}
    residual = {token: max(value * scale - p.get(token, 0.0), 0.0) for token, value in others.items()}
    if sum(residual.values()) > 0:
        return residual
    return others if sum(others.values()) > 0 else q
