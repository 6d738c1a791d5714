"""Cactus inside transformers' own assisted decoding loop.

That loop drafts a block, runs the verifier over it, and hands each position's scores to the logits processors, in
order and with exactly that position's prefix. [`CactusLogitsProcessor`] comes last: it decides there whether the
drafted token is kept and returns scores that leave one token, so that the loop's own comparison of drafted and
selected tokens carries the decision out. [`DraftRecorder`] stands around whatever draws up the draft, tells the
processor what was drafted, and hears from the loop how much of the block became output.

Deciding here, and not by handing the loop the scores `log h`, serves rules that no single `h` describes, keeps tokens
of probability 0 out even when a random number is exactly 0, and lets a stopping condition end a block in its middle.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import LogitsProcessor, StoppingCriteria, StoppingCriteriaList
from transformers.generation import CandidateGenerator

from .acceptance import AcceptanceRule, Speculative
from .delta_plan import DeltaPlan
from .divergences import certificate
from .outputs import SequenceStatistics
from .rows import Rows
from .streaming import TokenByToken
from .verification import accept_tokens, raise_if_invalid, sample


class CactusLogitsProcessor(LogitsProcessor):
    """Decides the tokens of a drafted block, one position after another. The last processor of the list.

    Without a recorded block, as in a call that drafts nothing, it returns the scores as they are.

    Args:
        rule ([`AcceptanceRule`]): The acceptance rule.
        stopping_criteria (`StoppingCriteriaList`, *optional*): Checked after every token, so that a block ends where
            token-by-token generation would end.
        do_sample (`bool`, *optional*, defaults to `True`): With `False`, selected tokens are the most probable ones:
            the scores are left alone and no rule applies.
        keep_scores (`bool`, *optional*, defaults to `False`): Put the verifier's own processed scores back before the
            loop stores them as `outputs.scores`.
        certify (`bool`, *optional*, defaults to `False`): Record what each position was really drawn from; see
            [`SequenceStatistics`].
        plan ([`DeltaPlan`], *optional*): The budgets of the positions, where they are not the rule's own.
    """

    def __init__(
        self,
        rule: AcceptanceRule,
        stopping_criteria: StoppingCriteriaList | None = None,
        *,
        do_sample: bool = True,
        keep_scores: bool = False,
        certify: bool = False,
        plan: DeltaPlan | None = None,
    ):
        self.rule = rule
        self.certify = certify
        self.plan = plan
        self._prompt_length: int | None = None
        self.stopping_criteria = StoppingCriteriaOnce(stopping_criteria or StoppingCriteriaList())
        self.do_sample = do_sample
        self.keep_scores = keep_scores
        self.statistics = SequenceStatistics()
        self.scores: list[Tensor] = []
        self._block: Tensor | None = None

    def begin_round(self, sequence: Tensor, draft_scores: Tensor | None, prefix_length: int) -> None:
        """Announces a drafted block.

        Args:
            sequence (`torch.LongTensor` of shape `[1, prefix + block]`): Prefix and drafted tokens. Where a block ends
                at a token that was drafted, as by a stopping condition, that entry is overwritten: the loop then sees
                a mismatch there, and emits nothing beyond.
            draft_scores (`torch.Tensor` of shape `[1, block, draft_vocab]` or `None`): What they were drawn from.
            prefix_length (`int`): Tokens before the block.
        """
        self._block = sequence
        self._prefix_length = prefix_length
        if self._prompt_length is None:
            self._prompt_length = prefix_length
        self._draft_scores = draft_scores
        self._ended = False
        self._stopped_at: int | None = None
        self._lossless: list[bool] = []
        self._divergence: list[float] = []
        self._certificate: list[float] = []
        self._round_scores: list[Tensor] = []

    def end_round(self, scores: Tensor, emitted: int) -> None:
        """Hears from the loop what became of the block.

        Args:
            scores (`torch.Tensor` of shape `[1, block + 1, vocab]`): The loop's scores. The verifier's own are put
                back into them.
            emitted (`int`): Tokens of the block, with the extra token, that became output.
        """
        if self._block is None:
            return
        drafted = self._block.shape[1] - self._prefix_length
        for position, row in enumerate(self._round_scores[:emitted]):
            scores[:, position] = row
        self.scores += self._round_scores[:emitted]
        certified = self._certificate if self.certify else None
        self.statistics.add_round(drafted, self._lossless, self._divergence, emitted, certified)
        self._block = None

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """Decides one position.

        Args:
            input_ids (`torch.LongTensor` of shape `[1, prefix + position]`): The position's prefix.
            scores (`torch.Tensor` of shape `[1, vocab]`): The verifier's processed scores there.

        Returns:
            `torch.Tensor` of shape `[1, vocab]`: 0 at the selected token and `-inf` elsewhere; `scores` themselves
            without sampling.

        Raises:
            FloatingPointError: If a model's scores are NaN, infinite or all `-inf`.
        """
        if self._block is None:
            return scores
        length = input_ids.shape[1]
        position = length - self._prefix_length
        drafted = self._block[:, length] if length < self._block.shape[1] else None
        if drafted is None and self._stopped_at is not None:
            # Only now: until here other processors were still to see the true prefix.
            self._block[:, self._stopped_at] = (self._block[:, self._stopped_at] + 1) % scores.shape[-1]
        if self._ended:
            # The loop looks no further than the first mismatch. Any one token will do.
            return _only(torch.zeros_like(input_ids[:, 0]), scores) if self.do_sample else scores
        if self.keep_scores:
            self._round_scores.append(scores.clone())
        if self.do_sample:
            token = self._sample_position(position, drafted, scores, input_ids[0, self._prompt_length :])
            selected = _only(token, scores)
        else:
            token = scores.argmax(dim=-1)
            selected = scores
            if drafted is not None:
                self._divergence.append(0.0)
                self._certificate.append(0.0)
        self._ended = drafted is None or bool(token != drafted)
        if drafted is not None and self.do_sample and not self._ended and len(self._lossless) == position:
            # Rejected, and drawn again by a rule whose recovery allows it: the round ends here all the same.
            self._ended, self._stopped_at = True, length
        if not self._ended:
            if not self.do_sample:
                self._lossless.append(True)
            emitted = torch.cat([input_ids, token[:, None]], dim=-1)
            seen = tuple(self.scores + self._round_scores) if self.keep_scores else None
            if bool(self.stopping_criteria(emitted, seen).all()):
                self._ended = True
                self._stopped_at = length
        return selected

    def _sample_position(self, position: int, drafted: Tensor | None, scores: Tensor, generated: Tensor) -> Tensor:
        """The token of one position, `[1]`: the drafted one, a recovery or a bonus token."""
        verifier = Rows(scores[:, None])
        draft_scores = None if self._draft_scores is None else self._draft_scores[:, position : position + 1]
        draft = None if draft_scores is None or drafted is None else Rows(draft_scores)
        uniforms = torch.rand(1, 2, device=scores.device)
        rule = self.rule
        if drafted is not None:
            tokens, spent = drafted[:, None], None
            if self.plan is not None:
                rule, spent = self.plan.for_block([generated.tolist()], tokens, [1], verifier, draft)
            if spent is not None and self.plan is not None:
                self.plan.spend(0, len(generated), [spent.item()])
            accept, lossless = (
                accept_tokens(tokens, verifier, draft, one, uniforms[:, :1]) for one in (rule, Speculative())
            )
            self._divergence.append(rule.divergence(tokens, verifier, draft).item())
            if self.certify:
                spent = certificate(tokens, verifier, draft, rule) if spent is None else spent
                self._certificate.append(spent.item())
            if bool(accept):
                self._lossless.append(bool(lossless))
                return drafted
        first = torch.zeros_like(uniforms[:, 0], dtype=torch.long)
        weights = verifier.probs_at(first)
        if bool(weights[:, 0].isnan()):
            raise_if_invalid([1], [position])
        if drafted is not None:
            draft_probs = None if draft is None else draft.probs_at(first, scores.shape[-1])
            if draft_probs is not None and bool(draft_probs[:, 0].isnan()):
                raise_if_invalid([2], [position])
            weights = rule.at(first).recovery_weights(drafted, weights, draft_probs)
        return sample(weights, uniforms[:, 1])


class DraftRecorder(CandidateGenerator):
    """A candidate generator that passes another one's drafts on and tells a [`CactusLogitsProcessor`] about them.

    Args:
        inner (`CandidateGenerator`): Any of transformers' candidate generators. Its own sampling is not touched.
        processor ([`CactusLogitsProcessor`]): Hears of every block.
        device (`torch.device`): The verifier's device, on which the loop compares tokens.
        prompt_alone (`bool`, *optional*, defaults to `False`): Pass nothing on in the first round, for prompts that
            the verifier reads as embeddings, which drafted tokens cannot be appended to.
        streamer ([`TokenByToken`], *optional*): Hears where a round's tokens came from.
    """

    def __init__(
        self,
        inner: CandidateGenerator,
        processor: CactusLogitsProcessor,
        device: torch.device,
        *,
        prompt_alone: bool = False,
        streamer: TokenByToken | None = None,
    ):
        self.inner = inner
        self.streamer = streamer
        self.processor = processor
        self.device = device
        self._drafts = not prompt_alone

    def __getattr__(self, name: str) -> Any:
        # `requires_model_outputs` and its like differ from generator to generator.
        return getattr(self.inner, name)

    @property
    def requires_model_outputs(self) -> bool:
        """Whether the loop hands the verifier's outputs to `get_candidates`."""
        return getattr(self.inner, "requires_model_outputs", False)

    def get_candidates(self, input_ids: Tensor, **kwargs: Any) -> tuple[Tensor, Tensor | None]:
        """Draws up the next block; see transformers' `CandidateGenerator.get_candidates`.

        Returns:
            The prefix with the drafted tokens, `[1, prefix + block]`, and `None` for the draft's scores: acceptance is
            the processor's, and the loop is left with comparing tokens.
        """
        sequence, draft_scores = self.inner.get_candidates(input_ids, **kwargs)
        if not self._drafts:
            # The draft is asked nevertheless: it sizes its masks by its first prompt.
            sequence, draft_scores = input_ids, None
        # A copy: the processor marks the end of a block in it.
        sequence = sequence.to(self.device, copy=True)
        if draft_scores is not None:
            draft_scores = draft_scores.to(self.device)
        self.processor.begin_round(sequence, draft_scores, input_ids.shape[1])
        return sequence, None

    def update_candidate_strategy(self, input_ids: Tensor, scores: Tensor, num_matches: int) -> None:
        """Closes the round; see transformers' `CandidateGenerator.update_candidate_strategy`."""
        origins = self.processor.statistics.origins
        known = len(origins)
        self.processor.end_round(scores, int(num_matches) + 1)
        if self.streamer is not None:
            self.streamer.put_origins(origins[known:])
        if self._drafts:
            self.inner.update_candidate_strategy(input_ids, scores, num_matches)
        self._drafts = True


class StoppingCriteriaOnce(StoppingCriteria):
    """Stopping criteria that are asked once per length, however often they are called for it.

    Criteria may count or time their calls. The processor asks after every token inside a block and the loop once more
    at the block's end.

    Args:
        criteria (`StoppingCriteriaList`): The criteria of the call.
    """

    def __init__(self, criteria: StoppingCriteriaList):
        self.criteria = criteria
        self._length = -1
        self._answer = torch.zeros(1, dtype=torch.bool)

    def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Tensor:
        """See transformers' `StoppingCriteria`; `torch.BoolTensor` of shape `[1]`."""
        if input_ids.shape[1] != self._length:
            self._length = input_ids.shape[1]
            self._answer = self.criteria(input_ids, scores, **kwargs)
        return self._answer


def _only(token: Tensor, scores: Tensor) -> Tensor:
    """Scores that leave one token, `[1, vocab]`."""
    return torch.full_like(scores, -torch.inf).scatter_(-1, token[:, None], 0.0)
