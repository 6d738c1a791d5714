"""The distribution that one drafted position really emits.

A rule's target `h` depends on the drafted token, so the algorithm emits neither `h` nor the verifier's `q` but

    h_alg(x) = p(x) * phi(x) + sum over n of p(n) * (1 - phi(n)) * g_n(x),

with `KL(h_alg || q) <= min(Gamma(delta), KL(p || q))` (the paper's Theorem 3).
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from .acceptance import AcceptanceRule, GammaRule
from .rows import Rows, widest_float
from .rules.threshold import ThresholdRule


def effective_distribution(p: Tensor, q: Tensor, rule: AcceptanceRule, *, method: str = "auto") -> Tensor:
    """What a drafted position emits, over the draft's random proposal and the rule's acceptance and recovery.

    Args:
        p (`torch.Tensor` of shape `[..., vocab]`): The draft's probabilities.
        q (`torch.Tensor` of shape `[..., vocab]`): The verifier's probabilities.
        rule ([`AcceptanceRule`]): The rule. With a parameter of shape `[batch]`, `p` and `q` are `[batch, vocab]`.
        method (`str`, *optional*, defaults to `"auto"`):
            `"definition"` sums over every drafted token, O(vocab^2), for any rule. `"sorted"` sorts the tokens by
            `p / q`, O(vocab log vocab), for rules that raise the drafted token only. `"auto"` takes what is fastest:
            `h` itself where it does not depend on the drafted token, one sum where the recovery does not, else
            `"sorted"`; `"definition"` for rules of your own that are none of these.

    Returns:
        `torch.Tensor` of shape `[..., vocab]` in float64 (in float32 on devices without it).

    Raises:
        ValueError: If `p` and `q` differ in shape or are no distributions, or the method does not fit the rule.

    Example:
        >>> import torch
        >>> from transformers_cactus import Cactus, Speculative, effective_distribution
        >>> p, q = torch.tensor([0.5, 0.5]), torch.tensor([0.9, 0.1])
        >>> [round(x, 3) for x in effective_distribution(p, q, Speculative()).tolist()]
        [0.9, 0.1]
        >>> [round(x, 3) for x in effective_distribution(p, q, Cactus(0.1)).tolist()]
        [0.766, 0.234]
    """
    draft, verifier = checked_rows(p, q)
    return Emission.of(draft, verifier, rule, method).distribution.reshape(p.shape)


def checked_rows(p: Tensor, q: Tensor) -> tuple[Tensor, Tensor]:
    """Two tensors of probabilities as `[rows, vocab]` in float64, whose rows sum to 1.

    Raises:
        ValueError: If they differ in shape or are no distributions.
    """
    if p.shape != q.shape or not p.ndim:
        raise ValueError(f"p and q must have the same shape [..., vocab], got {list(p.shape)} and {list(q.shape)}.")
    draft, verifier = (x.to(widest_float(x.device)).reshape(-1, x.shape[-1]) for x in (p, q))
    for name, probs in (("p", draft), ("q", verifier)):
        if not bool(((probs >= 0).all(-1) & ((probs.sum(-1) - 1).abs() < 1e-3)).all()):
            raise ValueError(f"{name} must hold probabilities that sum to 1 along the last dimension.")
    # Probabilities that come from float32 sum to 1 only within its rounding.
    return draft / draft.sum(-1, keepdim=True), verifier / verifier.sum(-1, keepdim=True)


class Emission(NamedTuple):
    """What drafted positions emit."""

    distribution: Tensor
    """`h_alg`, `[rows, vocab]`."""
    acceptance: Tensor
    """The probability that the drafted token is accepted, `sum of p * phi`, `[rows]`."""

    @classmethod
    def of(cls, draft: Tensor, verifier: Tensor, rule: AcceptanceRule, method: str = "auto") -> Emission:
        """From distributions that are known to be such.

        Args:
            draft, verifier (`torch.Tensor` of shape `[rows, vocab]`): `p` and `q`.
            rule ([`AcceptanceRule`]): The rule; a parameter per sequence has one entry per row.
            method (`str`): As in [`effective_distribution`].
        """
        if method == "auto":
            target = rule.target(verifier, draft)
            if target is not None:
                return cls(target, torch.minimum(target, draft).sum(-1))
            if isinstance(rule, ThresholdRule):
                return cls(*rule.emitted(verifier, draft))
            method = "sorted" if isinstance(rule, GammaRule) else "definition"
        if method == "definition":
            return cls(*_by_definition(draft, verifier, rule))
        if method != "sorted" or not isinstance(rule, GammaRule):
            raise ValueError(f"method={method!r} is not available for {rule!r}; use 'definition'.")
        return cls(*_by_sorting(draft, verifier, rule))


def is_quick(rule: AcceptanceRule) -> bool:
    """Whether the effective distribution is known in O(vocab log vocab): for all rules of this package."""
    if isinstance(rule, (GammaRule, ThresholdRule)):
        return True
    return type(rule).target is not AcceptanceRule.target


def _by_definition(draft: Tensor, verifier: Tensor, rule: AcceptanceRule) -> tuple[Tensor, Tensor]:
    """The sum over drafted tokens, `[batch, vocab]`; one term per step, so that memory stays O(batch * vocab)."""
    batch, vocab = verifier.shape
    emitted, accepted = torch.zeros_like(verifier), torch.zeros_like(verifier[:, 0])
    draft_rows, verifier_rows = Rows.from_probs(draft[:, None]), Rows.from_probs(verifier[:, None])
    for n in range(vocab):
        drafted = torch.full((batch,), n, device=verifier.device)
        phi = rule.acceptance_probability(drafted[:, None], verifier_rows, draft_rows)[:, 0]
        weights = rule.recovery_weights(drafted, verifier, draft)
        recovery = weights / weights.sum(-1, keepdim=True)
        emitted += (draft[:, n] * (1 - phi))[:, None] * recovery
        emitted[:, n] += draft[:, n] * phi
        accepted += draft[:, n] * phi
    return emitted, accepted


def _by_sorting(draft: Tensor, verifier: Tensor, rule: GammaRule) -> tuple[Tensor, Tensor]:
    """The same for a rule that raises one token, `[batch, vocab]`.

    After a rejection of `n`, `h_n < p_n` and the others are scaled by `s_n = (1 - gamma_n) / (1 - q_n) <= 1`. So
    `g_n(x) = max(s_n q_x - p_x, 0) / Z_n` is positive where the ratio `r_x = p_x / q_x` is below `s_n`, and a rejected
    token itself has `r_n > gamma_n / q_n >= 1`. With tokens in the order of `r`, every `Z_n` is a difference of prefix
    sums of `q` and `p`, and the weight that all `n` put on `x` is one of suffix sums over the sorted `s_n`.
    """
    # Other tokens are never rejected, and some rules solve for their gamma.
    likelier = draft > verifier
    gamma = rule.gamma(torch.where(likelier, verifier, 0.0))
    phi = torch.where(likelier & (draft > gamma), gamma / draft, 1.0)
    scale = torch.where(verifier < 1, (1 - gamma) / (1 - verifier), 0.0)
    ratio = torch.where(verifier > 0, draft / verifier, torch.inf)

    ratio_sorted, order = ratio.sort(-1)
    mass = torch.nn.functional.pad(verifier.gather(-1, order).cumsum(-1), (1, 0))
    covered = torch.nn.functional.pad(draft.gather(-1, order).cumsum(-1), (1, 0))
    below = torch.searchsorted(ratio_sorted, scale.contiguous())
    residual = scale * mass.gather(-1, below) - covered.gather(-1, below)

    rejected = draft * (1 - phi)
    weight = torch.where((rejected > 0) & (residual > 0), rejected / residual, 0.0)
    scale_sorted, by_scale = scale.sort(-1)
    weight_sorted = weight.gather(-1, by_scale)

    def from_the_end(values: Tensor) -> Tensor:
        return torch.nn.functional.pad(values.flip(-1).cumsum(-1).flip(-1), (0, 1))

    above = torch.searchsorted(scale_sorted, ratio.contiguous(), right=True)
    scaled = from_the_end(weight_sorted * scale_sorted).gather(-1, above)
    plain = from_the_end(weight_sorted).gather(-1, above)
    emitted = draft * phi + (verifier * scaled - draft * plain).clamp(min=0)
    # Tokens whose residual is numerically empty recover from q without themselves; see GammaRule.recovery_weights.
    fallback = torch.where((rejected > 0) & (residual <= 0) & (verifier < 1), rejected / (1 - verifier), 0.0)
    emitted += verifier * (fallback.sum(-1, keepdim=True) - fallback)
    return emitted, (draft * phi).sum(-1)
