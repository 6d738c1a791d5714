"""The verification of a block over the few tokens that truncation has left of the verifier's distribution.

Rules that raise the drafted token and scale the others never emit a token that the verifier excludes. So all that
matters of the vocabulary are the verifier's tokens at each position, and how much the draft gives to all others
together: a distribution over some twenty tokens and one for the rest, on which the same rules come to the same result.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from .acceptance import AcceptanceRule, GammaRule
from .few_numbers import has_few_numbers, is_its_gamma, verify_few
from .processing import Processed
from .truncation import Kept
from .verification import Verification, verify


def can_restrict(rule: AcceptanceRule) -> bool:
    """Whether a rule never looks at, or emits, what the verifier excludes."""
    return isinstance(rule, GammaRule)


def verify_kept(
    draft_tokens: Tensor,
    kept: Kept,
    draft_scores: Processed | None,
    rule: AcceptanceRule,
    *,
    block_lengths: Tensor | None = None,
    generator: torch.Generator | None = None,
    measure: bool = True,
    certify: bool = False,
) -> Verification:
    """[`verify`] where few tokens are left: the same law of what comes out, from other random numbers.

    Args:
        draft_tokens (`torch.LongTensor` of shape `[batch, block]`): As in [`verify`], like all that is not named.
        kept ([`Kept`] of shape `[batch, block + 1, kept]`): What is left of the verifier's scores.
        draft_scores ([`Processed`] of shape `[batch, block, vocab]` or `None`): The draft's.
        rule ([`AcceptanceRule`]): One that `can_restrict` allows.

    Returns:
        [`Verification`].
    """
    block, rest = draft_tokens.shape[1], kept.shape[-1]
    known = draft_scores is None or draft_scores.kept is not None
    draft_kept = None if draft_scores is None else draft_scores.kept
    if block and known and not certify and is_its_gamma(rule) and has_few_numbers(kept):
        return verify_few(
            draft_tokens,
            kept,
            draft_kept,
            rule,
            block_lengths=block_lengths,
            generator=generator,
            measure=measure,
        )
    ahead = kept.tokens[:, :block]
    places = ahead == draft_tokens[..., None]
    # The draft's tokens that the verifier excludes share the last place.
    tokens = torch.where(places.any(-1), places.long().argmax(-1), rest)
    draft = None
    if draft_scores is not None:
        probs = _probs_of(ahead, draft_scores)
        draft = torch.cat([probs, (1 - probs.sum(-1, keepdim=True)).clamp(min=0)], dim=-1).log()
    outcome = verify(
        tokens,
        F.pad(kept.scores, (0, 1), value=-torch.inf),
        draft,
        rule,
        block_lengths=block_lengths,
        generator=generator,
        measure=measure,
        certify=certify,
    )
    # The last place, which the verifier excludes, comes out only where the scores were no distribution.
    at = kept.tokens[torch.arange(len(ahead), device=ahead.device), outcome.accepted]
    next_token = at.gather(-1, outcome.next_token.clamp(max=rest - 1)[:, None])[:, 0]
    return outcome._replace(next_token=next_token)


def _probs_of(tokens: Tensor, draft: Processed) -> Tensor:
    """The draft's probabilities of some tokens of each position, `[batch, block, kept]`."""
    if draft.kept is None:
        return (draft.scores.gather(-1, tokens) - draft.scores.logsumexp(-1, keepdim=True)).exp()
    same = tokens[..., None] == draft.kept.tokens[..., None, :]
    return (same * draft.kept.scores.softmax(-1)[..., None, :]).sum(-1)
