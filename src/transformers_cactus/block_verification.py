"""Block verification: a whole drafted block is judged together, and never fewer of its tokens are kept on average.

Verifying token by token throws away what is behind the first rejection, even where the block as a whole is as likely
for the target as for the draft. Block verification (Sun et al. 2024, Algorithm 2) keeps for every drafted prefix `x_1
… x_i` the weight

    w_0 = 1,   w_i = min(w_(i-1) * h(x_i) / p(x_i), 1),

accepts the prefix of length `i` with probability `w_i` if it is the whole block, else `s_i / (s_i + 1 - w_i)` with

    s_i = sum over x of max(w_i * h(x) - p(x), 0)   at the position behind it,

keeps the longest accepted prefix, and samples the next token from `max(w_i * h - p, 0)` there, or from the verifier
behind a whole block. By induction from the end, some prefix of at least `i` tokens is kept with probability `w_i`,
also where blocks end at different lengths by what was drafted. Whatever follows, the law is that of `h` at drafted
positions.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .acceptance import AcceptanceRule, Speculative
from .rows import Rows
from .verification import Verification, check_shapes, sample, verify


def verify_block(
    draft_tokens: Tensor,
    verifier_scores: Tensor,
    draft_scores: Tensor | None = None,
    rule: AcceptanceRule | None = None,
    *,
    block_lengths: Tensor | None = None,
    generator: torch.Generator | None = None,
    measure: bool = True,
) -> Verification:
    """Verifies a drafted block as a whole; for rules whose target `h` does not depend on the drafted token.

    Reads whole rows of both models at every position. Nothing waits for the device.

    Args:
        draft_tokens (`torch.LongTensor` of shape `[batch, block]`): The drafted tokens.
        verifier_scores (`torch.Tensor` of shape `[batch, block + 1, vocab]`): As in [`verify`].
        draft_scores (`torch.Tensor` of shape `[batch, block, draft_vocab]`, *optional*): As in [`verify`]. Without
            them, a block has one outcome only, both verifications are the same, and [`verify`] runs.
        rule ([`AcceptanceRule`], *optional*, defaults to [`Speculative`]): A rule with a target, or a lossless one.
        block_lengths (`torch.LongTensor` of shape `[batch]`, *optional*): As in [`verify`].
        generator (`torch.Generator`, *optional*): Source of randomness, on the device of the scores.
        measure (`bool`, *optional*, defaults to `True`): Whether to compute `divergence`.

    Returns:
        [`Verification`]. `accepted_losslessly` says which of the accepted tokens lossless block verification keeps as
        well, given the same random numbers.

    Raises:
        ValueError: If shapes do not fit together, or the rule has no target.
    """
    rule = target_rule(rule or Speculative())
    if draft_scores is None or not draft_tokens.shape[1]:
        options = {"block_lengths": block_lengths, "generator": generator, "measure": measure}
        return verify(draft_tokens, verifier_scores, draft_scores, rule, **options)  # type: ignore[arg-type]
    check_shapes(draft_tokens, verifier_scores, draft_scores, block_lengths)
    batch, block = draft_tokens.shape
    device = verifier_scores.device
    uniforms = torch.rand(batch, block + 1, generator=generator, device=device, dtype=torch.float32)
    if block_lengths is None:
        block_lengths = torch.full((batch,), block, device=device)
    positions = torch.arange(block, device=device)
    drafted = positions < block_lengths[:, None]
    draft_tokens = torch.where(drafted, draft_tokens, 0)
    verifier, draft = Rows(verifier_scores[:, :block]), Rows(draft_scores)
    q = verifier.probs()
    p = draft.probs(q.shape[-1])
    h = rule.target(q, p)
    assert h is not None
    p_n = draft.log_prob(draft_tokens)

    weights, residual = _weights(draft_tokens, h, p, p_n)
    accepted = _longest(weights, residual, block_lengths, uniforms[:, :block])
    kept_losslessly = accepted
    if measure and not rule.is_lossless:
        kept_losslessly = _longest(*_weights(draft_tokens, q, p, p_n), block_lengths, uniforms[:, :block])
    divergence = rule.divergence(draft_tokens, verifier, draft) if measure else None

    # A row that is no distribution spoils the decision about every prefix before it: it counts as where things end.
    broken = torch.stack([q[..., 0].isnan(), p[..., 0].isnan()]) & drafted
    first_broken = torch.where(broken.any(0), positions, block).amin(-1)
    accepted = torch.where(first_broken < block, first_broken, accepted)
    at = accepted.clamp(max=block - 1)[:, None]
    side = torch.where(broken[0].gather(-1, at), 1, torch.where(broken[1].gather(-1, at), 2, 0))[:, 0]

    verifier_probs = Rows(verifier_scores).probs_at(accepted)
    invalid = torch.where(first_broken < block, side, verifier_probs[:, 0].isnan().long())
    at = at[..., None].expand(-1, -1, q.shape[-1])
    recovery = (weights.gather(-1, at[..., 0]) * h.gather(1, at)[:, 0] - p.gather(1, at)[:, 0]).clamp(min=0)
    # Numerically empty residuals fall back to the verifier's own distribution.
    rejected = (accepted < block_lengths)[:, None] & (recovery.sum(-1, keepdim=True) > 0)
    next_token = sample(torch.where(rejected, recovery, verifier_probs), uniforms[:, block])
    lossless = positions < kept_losslessly[:, None]
    return Verification(accepted, next_token, lossless, divergence, None, invalid)


def target_rule(rule: AcceptanceRule) -> AcceptanceRule:
    """The rule as one with a target, where it is.

    Raises:
        ValueError: If the rule's `h` depends on the drafted token.
    """
    if rule.is_lossless:
        return Speculative()
    if type(rule).target is AcceptanceRule.target:
        raise ValueError(
            f"block verification weighs a whole block against one target distribution, and that of {rule} depends on "
            "the drafted token. It goes with 'speculative', 'ensemble' and 'optimal'."
        )
    return rule


def _weights(tokens: Tensor, h: Tensor, p: Tensor, log_p_n: Tensor) -> tuple[Tensor, Tensor]:
    """`w_0 … w_block`, `[batch, block + 1]`, and the mass of the residual behind each prefix, `s_0 … s_(block-1)`."""
    h_n = h.gather(-1, tokens[..., None])[..., 0]
    # In logarithms, for probabilities that underflow.
    ratios = torch.where(h_n == 0, 0.0, (h_n.log() - log_p_n).exp())
    weights = [torch.ones_like(ratios[:, 0])]
    for ratio in ratios.unbind(1):
        weights.append((weights[-1] * ratio).clamp(max=1))
    stacked = torch.stack(weights, dim=1)
    return stacked, (stacked[:, :-1, None] * h - p).clamp(min=0).sum(-1)


def _longest(weights: Tensor, residual: Tensor, lengths: Tensor, uniforms: Tensor) -> Tensor:
    """Length of the longest accepted prefix, `[batch]`."""
    block = uniforms.shape[1]
    ends = torch.arange(1, block + 1, device=uniforms.device)
    kept = weights[:, 1:]
    behind = torch.nn.functional.pad(residual[:, 1:], (0, 1))
    # 0 / 0 where nothing is left to recover: such a prefix is never where things end.
    inside = torch.where(behind > 0, behind / (behind + 1 - kept), 0.0)
    chance = torch.where(ends == lengths[:, None], kept, inside)
    return torch.where((uniforms < chance) & (ends <= lengths[:, None]), ends, 0).amax(-1)
