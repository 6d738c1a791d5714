"""How far the tokens that are really emitted are from the verifier's, position by position.

A rule's target `h` is not what a position emits (see `effective`), so `KL(h || q)` is not what the text pays. The
functions here measure the emitted distribution `h_alg` itself.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from .acceptance import AcceptanceRule
from .effective import Emission, checked_rows
from .rows import Rows, columns_with_mass, widest_float


@dataclass(frozen=True)
class EffectiveDivergence:
    """What relaxing acceptance does at drafted positions. All tensors have one entry per position, in float64."""

    acceptance: Tensor
    """The probability that the drafted token is accepted, `sum of p * phi`."""
    kl: Tensor
    """`KL(h_alg || q)` in nats; infinite where a token is emitted that the verifier excludes."""
    reverse_kl: Tensor
    """`KL(q || h_alg)` in nats; infinite where a token of the verifier is no longer emitted."""
    total_variation: Tensor
    """`sum of |h_alg - q| / 2`: the largest difference in the probability of any event, in [0, 1]."""
    entropy_change: Tensor
    """Entropy of `h_alg` less that of `q`, in nats: below 0 where the text gets more predictable."""


def effective_divergence(p: Tensor, q: Tensor, rule: AcceptanceRule) -> EffectiveDivergence:
    """Acceptance and divergence of what drafted positions really emit.

    Args:
        p (`torch.Tensor` of shape `[..., vocab]`): The draft's probabilities.
        q (`torch.Tensor` of shape `[..., vocab]`): The verifier's probabilities.
        rule ([`AcceptanceRule`]): The rule. With a parameter of shape `[batch]`, `p` and `q` are `[batch, vocab]`.

    Returns:
        [`EffectiveDivergence`], with tensors of shape `[...]`. `kl` is at most `KL(p || q)` for every rule that raises
        the drafted token only (the paper's Theorem 3).

    Raises:
        ValueError: If `p` and `q` differ in shape or are no distributions.

    Example:
        >>> import torch
        >>> from transformers_cactus import Cactus, effective_divergence
        >>> p, q = torch.tensor([0.5, 0.5]), torch.tensor([0.9, 0.1])
        >>> spent = effective_divergence(p, q, Cactus(0.1))
        >>> round(spent.acceptance.item(), 3), round(spent.kl.item(), 3)
        (0.734, 0.076)
    """
    draft, verifier = checked_rows(p, q)
    emission = Emission.of(draft, verifier, rule)
    h = emission.distribution
    measures = {
        "acceptance": emission.acceptance,
        "kl": kl(h, verifier),
        "reverse_kl": kl(verifier, h),
        "total_variation": (h - verifier).abs().sum(-1) / 2,
        "entropy_change": torch.special.entr(h).sum(-1) - torch.special.entr(verifier).sum(-1),
    }
    return EffectiveDivergence(**{name: value.reshape(p.shape[:-1]) for name, value in measures.items()})


def kl(first: Tensor, second: Tensor) -> Tensor:
    """`KL(first || second)` in nats of rows of probabilities, `[..., vocab]` to `[...]`; at least 0."""
    return torch.where(first > 0, first * (first / second).log(), 0.0).sum(-1).clamp(min=0)


def certificate(tokens: Tensor, verifier: Rows, draft: Rows | None, rule: AcceptanceRule) -> Tensor:
    """`KL(h_alg || q)` of the distribution that each position of a block is drawn from.

    Without draft probabilities the drafted token counts as given, and the distribution is `h` for that token. Costs
    O(vocab log vocab) per position, in float64; positions one after another, so that memory is that of one.

    Args:
        tokens (`torch.LongTensor` of shape `[batch, block]`): The drafted tokens.
        verifier (`Rows` of shape `[batch, block, vocab]`): `q` at their positions.
        draft (`Rows` of shape `[batch, block, draft_vocab]` or `None`): `p` at their positions.
        rule ([`AcceptanceRule`]): The rule.

    Returns:
        `torch.Tensor` of shape `[batch, block]`, in nats.
    """
    if draft is None:
        return rule.divergence(tokens, verifier, None)
    columns = [
        divergence_at(position, tokens, verifier, draft, rule.at(torch.full_like(tokens[:, 0], position)))
        for position in range(tokens.shape[1])
    ]
    return torch.stack(columns, dim=1)


def divergence_at(position: int, tokens: Tensor, verifier: Rows, draft: Rows | None, rule: AcceptanceRule) -> Tensor:
    """One column of [`certificate`], `[batch]`, for a rule without budgets per position."""
    at = torch.full_like(tokens[:, 0], position)
    work = widest_float(tokens.device)
    q = verifier.probs_at(at).to(work)
    q = q / q.sum(-1, keepdim=True)
    if draft is None:
        return rule.divergence(tokens[:, position : position + 1], Rows.from_probs(q[:, None]), None)[:, 0]
    p = draft.probs_at(at, q.shape[-1]).to(work)
    columns = columns_with_mass(p, q)
    p, q = p[:, columns], q[:, columns]
    return kl(Emission.of(p / p.sum(-1, keepdim=True), q, rule).distribution, q)
