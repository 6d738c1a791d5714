"""The verification of a block in Python numbers, where truncation has left so few that PyTorch only costs time.

Behind a forward that has filled the caches of a processor, each small operation of PyTorch takes tens of microseconds,
and a verification is some fifty of them. Acceptance and recovery are those of [`GammaRule`], in float64.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
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

Gamma = Callable[[int, int, float], float]
"""See [`decide`]."""

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
        [`Verification`], without `certificate`; `divergence` and `accepted_losslessly` are 0 behind a rejected token.
    """
    batch, block = draft_tokens.shape
    drafted = draft_tokens.tolist()
    lengths = [block] * batch if block_lengths is None else block_lengths.tolist()
    uniforms = torch.rand(batch * (block + 1), generator=generator, dtype=torch.float32).tolist()
    found = decide(drafted, lengths, kept, draft, gammas(rule, drafted, lengths, kept), uniforms, measure=measure)
    lossless = None if found.accepted_losslessly is None else torch.tensor(found.accepted_losslessly)
    divergence = None if found.divergence is None else torch.tensor(found.divergence)
    return Verification(
        torch.tensor(found.accepted),
        torch.tensor(found.next_token),
        None if lossless is None else lossless.view(batch, block).bool(),
        None if divergence is None else divergence.view(batch, block),
        None,
        torch.tensor(found.invalid),
    )


def decide(
    drafted: list[list[int]],
    lengths: Sequence[int],
    kept: Kept | KeptOnDemand,
    draft: Kept | None,
    gamma: Gamma,
    uniforms: Sequence[float],
    *,
    measure: bool = True,
) -> Decided:
    """[`verify_few`] of Python numbers. What lies behind a sequence's rejected token is not looked at.

    Args:
        drafted (`list[list[int]]`): The drafted tokens of each sequence, as many for all.
        lengths (`list[int]`): How many of them count.
        kept ([`Kept`] or [`KeptOnDemand`] of shape `[batch, block + 1, kept]`): What is left of the verifier's scores.
        draft ([`Kept`] of shape `[batch, block, kept]` or `None`): What is left of the draft's.
        gamma (callable): The raised probability of a drafted token, by sequence, position and the verifier's.
        uniforms (`list[float]`): `batch * (block + 1)` random numbers in [0, 1).
        measure (`bool`): Whether to say `accepted_losslessly` and `divergence`.

    Returns:
        [`Decided`].
    """
    block = len(drafted[0])
    accepted, following, invalid = [], [], []
    lossless, raised = [], []
    for row, (tokens, length) in enumerate(zip(drafted, lengths, strict=True)):
        first = row * (block + 1)
        exact: list[bool] = []
        pairs: list[tuple[float, float]] = []
        for place in range(length + 1):
            candidates, weights = kept.at(first + place)
            total = sum(weights)
            is_distribution = 0 < total < math.inf
            if place == length or not is_distribution:
                break
            token, uniform = tokens[place], uniforms[first + place]
            proposal = None if draft is None else draft.at(row * block + place)
            q_n = _share(token, candidates, weights, total)
            p_n = 1.0 if proposal is None else _share(token, *proposal, sum(proposal[1]))
            gamma_n = gamma(row, place, q_n)
            exact.append(uniform < _acceptance(q_n, p_n))
            pairs.append((gamma_n, q_n))
            if not uniform < _acceptance(gamma_n, p_n):
                weights = _recovery(token, candidates, weights, proposal, gamma_n)
                break
        accepted.append(place)
        invalid.append(0 if is_distribution else 1)
        following.append(candidates[sample_row(weights, uniforms[first + block])])
        lossless.append(exact + [False] * (block - len(exact)))
        raised.append(pairs + [(0.0, 0.0)] * (block - len(pairs)))
    divergence = None
    if measure:
        gammas, q = torch.tensor(raised, dtype=torch.float64).view(-1, block, 2).unbind(-1)
        divergence = two_point_kl(gammas, q).tolist()
    return Decided(accepted, following, invalid, drafted, lossless if measure else None, divergence, None)


def gammas(rule: GammaRule, drafted: list[list[int]], lengths: Sequence[int], kept: Kept) -> Gamma:
    """The raised probability of a drafted token, for [`decide`]; arguments as there."""
    if rule.batch_size is None:
        return lambda row, place, q_n: rule.gamma_of(q_n)
    # A rule with numbers for each sequence takes all at once.
    block = len(drafted[0])
    q = torch.zeros(len(drafted), block, dtype=torch.float64)
    for row, tokens in enumerate(drafted):
        for place in range(lengths[row]):
            candidates, weights = kept.at(row * (block + 1) + place)
            q[row, place] = _share(tokens[place], candidates, weights, sum(weights))
    table = rule.gamma(q).tolist()
    return lambda row, place, q_n: table[row][place]


def _share(token: int, tokens: Sequence[int], weights: Sequence[float], total: float) -> float:
    """The probability of a token, 0 where it is not among the others."""
    return weights[tokens.index(token)] / total if token in tokens else 0.0


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
