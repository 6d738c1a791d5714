"""The verification of a block in Python numbers, where truncation has left so few that PyTorch only costs time.

Behind a forward that has filled the caches of a processor, each small operation of PyTorch takes tens of microseconds,
and a verification is some fifty of them. Acceptance and recovery are those of [`GammaRule`], in float64.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TypeGuard

import torch
from torch import Tensor

from .acceptance import AcceptanceRule, GammaRule
from .budget import two_point_kl
from .decided import Decided
from .truncation import Kept, KeptOnDemand
from .verification import Verification, sample_row

MOST = 1024
"""Scores of the verifier in a block, of all sequences, up to which this is faster."""

_SHARED = ("acceptance_probability", "recovery_weights", "divergence", "scale_of_others")


def is_its_gamma(rule: AcceptanceRule) -> TypeGuard[GammaRule]:
    """Whether a rule says no more than its `gamma`, which is all that is asked here."""
    return isinstance(rule, GammaRule) and all(
        getattr(type(rule), name) is getattr(GammaRule, name) for name in _SHARED
    )


def has_few_numbers(kept: Kept) -> bool:
    """Whether this can and should verify a block, of which `kept` is left of the verifier's scores."""
    return kept.device.type == "cpu" and math.prod(kept.shape) <= MOST


def verify_few(
    draft_tokens: Tensor,
    kept: Kept | KeptOnDemand,
    draft: Kept | None,
    rule: GammaRule,
    *,
    block_lengths: Tensor | None = None,
    generator: torch.Generator | None = None,
    measure: bool = True,
) -> Verification:
    """[`verify_kept`] in Python numbers. What lies behind a sequence's rejected token is not looked at.

    Args:
        draft_tokens (`torch.LongTensor` of shape `[batch, block]`): As in [`verify_kept`], like all that is not named.
        kept ([`Kept`] or [`KeptOnDemand`] of shape `[batch, block + 1, kept]`): What is left of the verifier's scores,
            on a CPU.
        draft ([`Kept`] of shape `[batch, block, kept]` or `None`): What is left of the draft's.

    Returns:
        [`Verification`], without `certificate`; `divergence` and `accepted_losslessly` are 0 behind a rejected token.
    """
    batch, block = draft_tokens.shape
    uniforms = torch.rand(batch, block + 1, generator=generator, dtype=torch.float32).tolist()
    drafted = draft_tokens.tolist()
    lengths = [block] * batch if block_lengths is None else block_lengths.tolist()
    # A rule with numbers for each sequence takes them all at once.
    raised = None if rule.batch_size is None else _raised(drafted, kept, lengths, rule)

    accepted, following, invalid = [], [], []
    lossless, reached = [], []
    for row, tokens in enumerate(drafted):
        exact: list[bool] = []
        pairs: list[tuple[float, float]] = []
        for place in range(lengths[row] + 1):
            candidates, weights = kept.at(row * (block + 1) + place)
            total = sum(weights)
            if place == lengths[row] or not 0 < total < math.inf:
                break
            token, uniform = tokens[place], uniforms[row][place]
            proposal = None if draft is None else draft.at(row * block + place)
            q_n = _share(token, candidates, weights, total)
            p_n = 1.0 if proposal is None else _share(token, *proposal, sum(proposal[1]))
            gamma = rule.gamma_of(q_n) if raised is None else raised[row][place]
            exact.append(uniform < _acceptance(q_n, p_n))
            pairs.append((gamma, q_n))
            if not uniform < _acceptance(gamma, p_n):
                weights = _recovery(token, candidates, weights, proposal, gamma)
                break
        accepted.append(place)
        invalid.append(0 if 0 < total < math.inf else 1)
        following.append(candidates[sample_row(weights, uniforms[row][block])])
        lossless.append(exact + [False] * (block - len(exact)))
        reached.append(pairs + [(0.0, 0.0)] * (block - len(pairs)))
    table = torch.tensor([accepted, following, invalid])
    divergence = None
    if measure:
        gammas, q = torch.tensor(reached, dtype=torch.float64).view(batch, block, 2).unbind(-1)
        divergence = two_point_kl(gammas, q).float()
    return Verification(
        table[0],
        table[1],
        torch.tensor(lossless).view(batch, block) if measure else None,
        divergence,
        None,
        table[2],
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


def _share(token: int, tokens: Sequence[int], weights: Sequence[float], total: float) -> float:
    """The probability of a token, 0 where it is not among the others."""
    return weights[tokens.index(token)] / total if token in tokens else 0.0


def _raised(
    drafted: list[list[int]], kept: Kept | KeptOnDemand, lengths: list[int], rule: GammaRule
) -> list[list[float]]:
    """`gamma` of each drafted token, 0 behind a sequence's block."""
    block = len(drafted[0])
    q = [[0.0] * block for _ in drafted]
    for row, tokens in enumerate(drafted):
        for place in range(lengths[row]):
            candidates, weights = kept.at(row * (block + 1) + place)
            q[row][place] = _share(tokens[place], candidates, weights, sum(weights))
    found: list[list[float]] = rule.gamma(torch.tensor(q, dtype=torch.float64)).tolist()
    return found


def _acceptance(gamma: float, p_n: float) -> float:
    """`min(1, gamma / p_n)`, and 0 for a token that stays out even if the draft cannot have drafted it."""
    if gamma == 0:
        return 0.0
    return 1.0 if gamma >= p_n else gamma / p_n


def _recovery(
    rejected: int,
    tokens: Sequence[int],
    weights: Sequence[float],
    proposal: tuple[list[int], list[float]] | None,
    gamma: float,
) -> list[float]:
    """Weights of what is drawn after a rejection, for `tokens`; see [`GammaRule.recovery_weights`]."""
    total = sum(weights)
    q_n = _share(rejected, tokens, weights, total)
    scale = 0.0 if q_n >= 1 else (1 - gamma) / (1 - q_n)
    if proposal is None:
        p = {}
    else:
        whole = sum(proposal[1])
        p = {token: weight / whole for token, weight in zip(*proposal, strict=True)}
    residual = [
        0.0 if token == rejected else max(weight / total * scale - p.get(token, 0.0), 0.0)
        for token, weight in zip(tokens, weights, strict=True)
    ]
    if sum(residual) > 0:
        return residual
    others = [0.0 if token == rejected else weight for token, weight in zip(tokens, weights, strict=True)]
    return others if sum(others) > 0 else list(weights)
