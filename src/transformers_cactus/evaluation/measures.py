"""What a rule does at the positions of one text, as sums that add up over texts."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ..acceptance import AcceptanceRule, GammaRule
from ..divergences import effective_divergence
from ..rules.threshold import ThresholdRule
from .positions import Positions
from .rounds import expected_rounds

Sums = dict[str, float]
"""Sums over the positions of a text: `positions`, their number; `accepted`, the acceptance probability; `measured`,
the number of positions with known divergences, and over these `kl`, `total_variation`, `entropy_change` (as in
[`EffectiveDivergence`], in nats) and `outside`, whether a token is emitted that the verifier excludes. For each block
length `m`, expected numbers: `rounds@m`, `kept@m` (drafted tokens accepted), `rejected@m`, and `spent@m`, the KL of
what is drawn over the measured positions, where a bonus token counts nothing."""


def measure(positions: Positions, rule: AcceptanceRule, blocks: Sequence[int], chosen: Tensor | None = None) -> Sums:
    """Measures a rule on one text, exactly: nothing is sampled but the choice of positions.

    Args:
        positions ([`Positions`]): The distributions of both models.
        rule ([`AcceptanceRule`]): The rule, with numbers for parameters.
        blocks (`Sequence[int]`): Block lengths.
        chosen (`torch.BoolTensor` of shape `[positions]`, *optional*): Where to compute divergences, all by default.

    Returns:
        `Sums`.
    """
    p, q = positions.draft, positions.verifier
    if chosen is None:
        chosen = torch.ones(len(p), dtype=torch.bool)
    chosen = chosen.to(p.device)
    spent = effective_divergence(p[chosen], q[chosen], rule)
    acceptance = spent.acceptance if bool(chosen.all()) else acceptance_at(p, q, rule)
    sums = {
        "positions": float(len(p)),
        "accepted": acceptance.sum().item(),
        "measured": float(chosen.sum()),
        "kl": spent.kl.sum().item(),
        "total_variation": spent.total_variation.sum().item(),
        "entropy_change": spent.entropy_change.sum().item(),
        "outside": float(spent.kl.isinf().sum()),
    }
    accepts = acceptance.cpu().double().numpy()
    for block in blocks:
        rounds = expected_rounds(accepts, block)
        drafted = torch.from_numpy(rounds.drafted).to(p.device)[chosen]
        sums |= {
            f"rounds@{block}": float(rounds.started.sum()),
            f"kept@{block}": float((rounds.drafted * accepts).sum()),
            f"rejected@{block}": float((rounds.drafted * (1 - accepts)).sum()),
            f"spent@{block}": torch.where(drafted > 0, drafted * spent.kl, 0.0).sum().item(),
        }
    return sums


def acceptance_at(p: Tensor, q: Tensor, rule: AcceptanceRule) -> Tensor:
    """The probability that a drafted token is accepted, `sum of p * phi`, without the distribution that is emitted.

    Args:
        p, q (`torch.Tensor` of shape `[positions, vocab]`): The distributions of draft and verifier.
        rule ([`AcceptanceRule`]): The rule.

    Returns:
        `torch.Tensor` of shape `[positions]`.
    """
    if isinstance(rule, GammaRule):
        # Tokens that the verifier finds as likely as the draft are never rejected, and some rules solve for gamma.
        kept = p.clone()
        likelier = p > q
        kept[likelier] = torch.minimum(p[likelier], rule.gamma(q[likelier]))
        return kept.sum(-1)
    if isinstance(rule, ThresholdRule):
        return rule.emitted(q, p)[1]
    target = rule.target(q, p)
    return effective_divergence(p, q, rule).acceptance if target is None else torch.minimum(p, target).sum(-1)


def choose_positions(lengths: Sequence[int], count: int | None, seed: int) -> list[Tensor | None]:
    """Chooses random positions of texts, for divergences that are expensive over a whole vocabulary.

    Args:
        lengths (`Sequence[int]`): Positions in each text.
        count (`int` or `None`): How many in all; `None` for all of them.
        seed (`int`): Same seed, same choice.

    Returns:
        `list`: For each text a `torch.BoolTensor` of its length, or `None` for all.
    """
    total = sum(lengths)
    if count is None or count >= total:
        return [None] * len(lengths)
    chosen = torch.zeros(total, dtype=torch.bool)
    chosen[torch.randperm(total, generator=torch.Generator().manual_seed(seed))[:count]] = True
    return list(chosen.split(list(lengths)))
