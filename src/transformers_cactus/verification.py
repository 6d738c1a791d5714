"""A drafted block in, accepted counts and next tokens out."""

from __future__ import annotations

import math
from bisect import bisect_right
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor

from . import divergences
from .acceptance import AcceptanceRule, Speculative
from .fused_verification import fusable, fused_next_token, fused_rows
from .rows import Rows, widest_float

FEW = 512
"""Numbers that take less time in Python than the dozen operations of PyTorch that they would need."""

LARGE_ROW = 2**14
"""Scores of one position, of all sequences, that take longer than the operations around them."""


class Verification(NamedTuple):
    """What the verification of a block decided. All tensors stay on the device of the scores."""

    accepted: Tensor
    """Accepted drafted tokens of each sequence, `[batch]`: its accepted length, without the next token."""
    next_token: Tensor
    """The token after them, `[batch]`: a recovery token, or a bonus token where the whole block was accepted."""
    accepted_losslessly: Tensor | None
    """Whether lossless speculative sampling would have accepted the token as well, given the same random number,
    `[batch, block]`; means nothing behind a rejected token. `None` where it was not asked for."""
    divergence: Tensor | None
    """`KL(h || q)` in nats at every drafted position, `[batch, block]`; means nothing behind a rejected token. `None`
    where it was not asked for."""
    certificate: Tensor | None
    """`KL(h_alg || q)` in nats of what every drafted position really emits, `[batch, block]`; `None` where it was not
    asked for."""
    invalid: Tensor
    """Per sequence, `[batch]`: 0, or 1 or 2 where the verifier's or the draft's scores at position `accepted` are NaN,
    infinite or all `-inf`. `next_token` then means nothing."""

    def raise_if_invalid(self) -> None:
        """Raises where a model's scores were no distribution. Waits for the device.

        Raises:
            FloatingPointError: Names the side, the sequence and the position in the block.
        """
        raise_if_invalid(self.invalid.tolist(), self.accepted.tolist())


def raise_if_invalid(invalid: list[int], accepted: list[int], rows: list[int] | None = None) -> None:
    """Raises a `FloatingPointError` for the first sequence whose entry of `invalid` is not 0.

    `rows` are the sequences' numbers, where some have left the batch.
    """
    for row, side, position in zip(rows or range(len(invalid)), invalid, accepted, strict=True):
        if side:
            name = "verifier" if side == 1 else "draft"
            raise FloatingPointError(
                f"The {name}'s scores for sequence {row} at position {position} of the drafted block are NaN, "
                f"infinite or all -inf, so there is nothing to sample from. Check the {name}'s dtype (float16 "
                "overflows first) and that the logits processors leave at least one token."
            )


def verify(
    draft_tokens: Tensor,
    verifier_scores: Tensor,
    draft_scores: Tensor | None = None,
    rule: AcceptanceRule | None = None,
    *,
    block_lengths: Tensor | None = None,
    generator: torch.Generator | None = None,
    measure: bool = True,
    certify: bool = False,
) -> Verification:
    """Verifies a drafted block: the acceptance, recovery and bonus steps of speculative sampling (paper, Algorithm 1).

    Scores are processed logits or log-probabilities: any constant per row cancels. The acceptance step reads two
    scores and a log-sum-exp per position for rules that raise one token, and whole rows for others; one whole row per
    sequence is read for the next token. Nothing waits for the device. On GPUs, [`GammaRule`]s run in two kernels.

    Args:
        draft_tokens (`torch.LongTensor` of shape `[batch, block]`): The drafted tokens.
        verifier_scores (`torch.Tensor` of shape `[batch, block + 1, vocab]`): The verifier's scores at the drafted
            positions and at the one after them.
        draft_scores (`torch.Tensor` of shape `[batch, block, draft_vocab]`, *optional*): The scores that the tokens
            were sampled from; a vocabulary of another size than the verifier's is one padded differently. `None` for a
            draft without probabilities.
        rule ([`AcceptanceRule`], *optional*, defaults to [`Speculative`]): The rule.
        block_lengths (`torch.LongTensor` of shape `[batch]`, *optional*): Drafted tokens of each sequence, where they
            differ; what lies beyond is not read.
        generator (`torch.Generator`, *optional*): Source of randomness, on the device of the scores.
        measure (`bool`, *optional*, defaults to `True`): Whether to compute `accepted_losslessly` and `divergence`.
            The latter reads whole rows where the rule does.
        certify (`bool`, *optional*, defaults to `False`): Whether to compute `certificate`, which sorts whole rows.

    Returns:
        [`Verification`]. Call its `raise_if_invalid` unless the scores are known to be finite.

    Raises:
        ValueError: If shapes do not fit together.

    Example:
        >>> import torch
        >>> from transformers_cactus import Cactus, verify
        >>> draft_scores = torch.zeros(1, 2, 4)
        >>> verifier_scores = torch.tensor([[[3.0, 0, 0, 0], [0, 3.0, 0, 0], [0, 0, 9.0, 0]]])
        >>> outcome = verify(torch.tensor([[0, 1]]), verifier_scores, draft_scores, Cactus(0.75))
        >>> outcome.accepted.tolist()
        [2]
    """
    rule = Speculative() if rule is None else rule
    check_shapes(draft_tokens, verifier_scores, draft_scores, block_lengths)
    batch, block = draft_tokens.shape
    device = verifier_scores.device
    # One column for each acceptance decision and a last one for the next token: separate random numbers.
    uniforms = torch.rand(batch, block + 1, generator=generator, device=device, dtype=torch.float32)
    accepted_losslessly: Tensor | None = None
    divergence: Tensor | None = None
    fused = fusable(rule, verifier_scores, draft_scores)
    rows = _rows if fused is None else fused_rows
    verifier, draft = rows(verifier_scores, draft_scores)

    if block:
        beyond = None
        if block_lengths is not None:
            beyond = torch.arange(block, device=device) >= block_lengths[:, None]
            # Whatever pads shorter blocks, a negative id for one, must not reach an index.
            draft_tokens = draft_tokens.masked_fill(beyond, 0)
        candidates = (draft_tokens, verifier.first(block), draft)
        certificate = divergences.certificate(*candidates, rule) if certify else None
        judge = _judge_in_order if _stops_early(verifier_scores) else _judge
        accept, accepted_losslessly, divergence = judge(*candidates, rule, uniforms[:, :block], measure)
        accepted = (accept if beyond is None else accept & ~beyond).long().cumprod(-1).sum(-1)
    else:
        certificate = torch.zeros(batch, 0, device=device) if certify else None
        accepted = torch.zeros(batch, dtype=torch.long, device=device)
        if measure:
            accepted_losslessly = torch.zeros(batch, 0, dtype=torch.bool, device=device)
            divergence = torch.zeros(batch, 0, device=device)

    lengths = block if block_lengths is None else block_lengths
    outcome = (draft_tokens, accepted, lengths, verifier, draft)
    if fused is None:
        next_token, invalid = _next_token(*outcome, rule, uniforms[:, block])
    else:
        next_token, invalid = fused_next_token(*outcome, fused, generator)
    return Verification(accepted, next_token, accepted_losslessly, divergence, certificate, invalid)


def _rows(verifier_scores: Tensor, draft_scores: Tensor | None) -> tuple[Rows, Rows | None]:
    return Rows(verifier_scores), None if draft_scores is None else Rows(draft_scores)


def _next_token(
    draft_tokens: Tensor,
    accepted: Tensor,
    block_lengths: Tensor | int,
    verifier: Rows,
    draft: Rows | None,
    rule: AcceptanceRule,
    uniforms: Tensor,
) -> tuple[Tensor, Tensor]:
    """Samples each sequence's recovery or bonus token, and says which rows are no distribution, both `[batch]`."""
    block, vocab = draft_tokens.shape[1], verifier.scores.shape[-1]
    verifier_probs = verifier.probs_at(accepted)
    invalid = verifier_probs[:, 0].isnan().long()
    weights = verifier_probs
    if block:
        rejected = accepted < block_lengths
        # A sequence whose whole block was accepted has no rejected token: `where` drops what any index gives there.
        at = accepted.clamp(max=block - 1)
        tokens = draft_tokens.gather(-1, at[:, None])[:, 0]
        draft_probs = None if draft is None else draft.probs_at(at, vocab)
        recovery = rule.at(at).recovery_weights(tokens, verifier_probs, draft_probs)
        weights = torch.where(rejected[:, None], recovery, verifier_probs)
        if draft_probs is not None:
            invalid = invalid.masked_fill(rejected & draft_probs[:, 0].isnan() & (invalid == 0), 2)
    return sample(weights, uniforms), invalid


def verify_greedy(
    draft_tokens: Tensor, verifier_scores: Tensor, *, block_lengths: Tensor | None = None
) -> Verification:
    """Verifies a drafted block without sampling: a token is kept where it is the verifier's most probable one.

    Args and result as in [`verify`]; every accepted token counts as losslessly accepted.
    """
    check_shapes(draft_tokens, verifier_scores, None, block_lengths)
    block = draft_tokens.shape[1]
    selected = verifier_scores.argmax(-1)
    accept = draft_tokens == selected[:, :block]
    if block_lengths is not None:
        accept &= torch.arange(block, device=accept.device) < block_lengths[:, None]
    accepted = accept.long().cumprod(-1).sum(-1)
    at = accepted[:, None]
    next_token = selected.gather(-1, at)
    # The maximum is NaN where any score is, and infinite where sampling would fail as well.
    highest = verifier_scores.gather(1, at[..., None].expand(-1, -1, verifier_scores.shape[-1])).amax(-1)
    spent = torch.zeros_like(accept, dtype=torch.float32)
    return Verification(accepted, next_token[:, 0], accept, spent, None, (~highest[:, 0].isfinite()).long())


Judgement = tuple[Tensor, Tensor | None, Tensor | None]
"""Whether each drafted token is accepted, and, where asked for, whether it were losslessly, and `KL(h || q)`; all
`[batch, block]`."""


def _judge(
    tokens: Tensor, verifier: Rows, draft: Rows | None, rule: AcceptanceRule, uniforms: Tensor, measure: bool
) -> Judgement:
    accept = accept_tokens(tokens, verifier, draft, rule, uniforms)
    if not measure:
        return accept, None, None
    if rule.is_lossless:
        return accept, accept, torch.zeros_like(uniforms)
    lossless = accept_tokens(tokens, verifier, draft, Speculative(), uniforms)
    return accept, lossless, rule.divergence(tokens, verifier, draft)


def _stops_early(scores: Tensor) -> bool:
    """Whether to look at one position after another, and at none behind the last sequence's rejected token.

    Only where the host may ask at no cost, and where a position costs more than a dozen small operations do.
    """
    return scores.device.type == "cpu" and scores.shape[1] > 2 and scores[:, 0].numel() >= LARGE_ROW


def _judge_in_order(
    tokens: Tensor, verifier: Rows, draft: Rows | None, rule: AcceptanceRule, uniforms: Tensor, measure: bool
) -> Judgement:
    """The same, up to the last position that matters; `False` and 0 behind it. Needs memory for one position only."""
    accept, lossless = torch.zeros_like(tokens, dtype=torch.bool), torch.zeros_like(tokens, dtype=torch.bool)
    divergence = torch.zeros_like(uniforms)
    undecided = torch.ones_like(accept[:, 0])
    for position in range(tokens.shape[1]):
        here = slice(position, position + 1)
        found = _judge(
            tokens[:, here],
            verifier.at(position),
            None if draft is None else draft.at(position),
            rule.at(torch.full_like(tokens[:, 0], position)),
            uniforms[:, here],
            measure,
        )
        for whole, part in zip((accept, lossless, divergence), found, strict=True):
            if part is not None:
                whole[:, here] = part
        undecided &= accept[:, position]
        if not undecided.any():
            break
    return accept, lossless if measure else None, divergence if measure else None


def accept_tokens(
    tokens: Tensor, verifier: Rows, draft: Rows | None, rule: AcceptanceRule, uniforms: Tensor
) -> Tensor:
    """Whether the rule accepts each drafted token for the given random numbers.

    Args:
        tokens (`torch.LongTensor` of shape `[batch, block]`): The drafted tokens.
        verifier (`Rows` of shape `[batch, block, vocab]`): The verifier's distributions.
        draft (`Rows` of shape `[batch, block, vocab]` or `None`): The draft's distributions.
        rule ([`AcceptanceRule`]): The rule.
        uniforms (`torch.Tensor` of shape `[batch, block]`): Random numbers in [0, 1).

    Returns:
        `torch.BoolTensor` of shape `[batch, block]`; `False` where the scores are no distribution.
    """
    # Strictly below: a token of acceptance probability 0 must not pass on a random number of exactly 0.
    return uniforms < rule.acceptance_probability(tokens, verifier, draft)


def sample(weights: Tensor, uniforms: Tensor) -> Tensor:
    """Samples a token from each row by inverting its cumulative sum.

    Args:
        weights (`torch.Tensor` of shape `[batch, vocab]`): At least 0, not all 0; they need not sum to 1.
        uniforms (`torch.Tensor` of shape `[batch]`): Random numbers in [0, 1).

    Returns:
        `torch.LongTensor` of shape `[batch]`. Never a token of weight 0.
    """
    if weights.device.type == "cpu" and weights.numel() <= FEW:
        drawn = map(sample_row, weights.tolist(), uniforms.tolist())
        return torch.tensor(list(drawn))
    work = widest_float(weights.device)
    cumulative = weights.to(work).cumsum(-1)
    total = cumulative[:, -1:]
    # Rounding must not take the threshold up to the total, which no token lies above.
    threshold = torch.minimum(uniforms.to(work)[:, None] * total, torch.nextafter(total, torch.zeros_like(total)))
    # The first token whose cumulative weight exceeds the threshold raised it, so its own weight is above 0.
    token = torch.searchsorted(cumulative, threshold, right=True)[:, 0]
    return token.clamp(max=weights.shape[-1] - 1)


def sample_row(weights: list[float], uniform: float) -> int:
    """[`sample`] for one row of Python numbers."""
    cumulative = list(accumulate(weights))
    threshold = min(uniform * cumulative[-1], math.nextafter(cumulative[-1], 0.0))
    return min(bisect_right(cumulative, threshold), len(weights) - 1)


def check_shapes(
    draft_tokens: Tensor, verifier_scores: Tensor, draft_scores: Tensor | None, block_lengths: Tensor | None
) -> None:
    """Raises a `ValueError` where the arguments of [`verify`] do not fit together."""
    if draft_tokens.ndim != 2:
        raise ValueError(f"draft_tokens must have the shape [batch, block], got {list(draft_tokens.shape)}.")
    batch, block = draft_tokens.shape
    if verifier_scores.ndim != 3 or tuple(verifier_scores.shape[:2]) != (batch, block + 1):
        raise ValueError(
            f"verifier_scores must have the shape [{batch}, {block + 1}, vocab] (one position more than was drafted), "
            f"got {list(verifier_scores.shape)}."
        )
    if draft_scores is not None and (draft_scores.ndim != 3 or tuple(draft_scores.shape[:2]) != (batch, block)):
        raise ValueError(
            f"draft_scores must have the shape [{batch}, {block}, vocab], got {list(draft_scores.shape)}."
        )
    if block_lengths is not None and tuple(block_lengths.shape) != (batch,):
        raise ValueError(f"block_lengths must have the shape [{batch}], got {list(block_lengths.shape)}.")
