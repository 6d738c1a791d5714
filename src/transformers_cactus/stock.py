"""The stock engine: transformers' own assisted decoding loop, with Cactus deciding what is accepted.

Serves every kind of draft and of model that transformers can run assisted, one sequence at a time.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig, LogitsProcessor, LogitsProcessorList, PreTrainedModel, StoppingCriteriaList
from transformers.generation import CandidateGenerator

from . import _compat
from .acceptance import AcceptanceRule
from .configuration import RunOptions, delta_plan, warn_of_context, warn_of_greedy
from .inputs import context_limit
from .logits_process import CactusLogitsProcessor, DraftRecorder
from .outputs import AcceptanceStatistics


@dataclass
class StockCall:
    """What one call brings to the stock loop besides what `generate` prepares, and what it takes back."""

    rule: AcceptanceRule
    """The acceptance rule."""
    options: RunOptions
    """The `cactus_*` options that are not about the rule."""
    assisted: dict[str, Any]
    """Arguments of transformers' loop that `generate` does not pass on to a custom decoding method: the draft, the
    tokenizers, the streamer, `synced_gpus`."""
    draft_settings: dict[str, Any]
    """`num_assistant_tokens` and its like as the caller gave them."""
    statistics: AcceptanceStatistics | None = None
    """Filled by the call."""


def stock_decoding(
    model: PreTrainedModel,
    input_ids: Tensor,
    logits_processor: LogitsProcessorList,
    stopping_criteria: StoppingCriteriaList,
    generation_config: GenerationConfig,
    inputs_tensor: Tensor | None = None,
    cactus_call: StockCall | None = None,
    **model_kwargs: Any,
) -> Any:
    """A decoding method for `generate(custom_generate=...)`: assisted decoding in which a rule decides.

    Args:
        model (`PreTrainedModel`): The verifier.
        input_ids (`torch.LongTensor` of shape `[1, sequence]`): The prompt.
        logits_processor (`LogitsProcessorList`): The verifier's processors.
        stopping_criteria (`StoppingCriteriaList`): Checked after every token.
        generation_config (`GenerationConfig`): As prepared by `generate`.
        inputs_tensor (`torch.Tensor`, *optional*): The encoder's input of an encoder–decoder model.
        cactus_call ([`StockCall`]): Bound beforehand, with `functools.partial`.
        **model_kwargs: What the verifier's forward takes.

    Returns:
        What transformers' assisted decoding returns.
    """
    assert cactus_call is not None
    if not generation_config.do_sample:
        # Not checked earlier: Whisper, for one, decides about sampling on its own.
        warn_of_greedy(cactus_call.rule)
    if cactus_call.rule.batch_size not in (None, 1):
        raise ValueError(f"{cactus_call.rule} has parameters for several prompts, the call has one.")
    keep_scores = bool(generation_config.return_dict_in_generate and generation_config.output_scores)
    processor = CactusLogitsProcessor(
        cactus_call.rule,
        stopping_criteria,
        do_sample=bool(generation_config.do_sample),
        keep_scores=keep_scores,
        certify=cactus_call.options.certificate,
        plan=delta_plan(cactus_call.rule, cactus_call.options, 1),
    )

    def recorded(generator: CandidateGenerator) -> DraftRecorder:
        _compat.apply_draft_settings(generator, cactus_call.draft_settings)
        prompt_alone = model_kwargs.get("inputs_embeds") is not None
        if prompt_alone:
            _compat.draft_from_ids(generator)
        if shares_tokens:
            generator = DraftLimits(generator, _compat.vocab_size(draft), context_limit(draft))
        streamer = cactus_call.assisted.get("streamer")
        return DraftRecorder(generator, processor, input_ids.device, prompt_alone=prompt_alone, streamer=streamer)

    draft = cactus_call.assisted.get("assistant_model")
    shares_tokens = draft is not None and cactus_call.assisted.get("assistant_tokenizer") is None
    draft_processors = LogitsProcessorList(logits_processor)
    if shares_tokens and _compat.vocab_size(draft) > _compat.vocab_size(model):
        draft_processors.append(VocabularyLimit(_compat.vocab_size(model)))
    with _compat.unchanged_draft(model if draft is None else draft, cactus_call.assisted.get("tokenizer")):
        output = _compat.assisted_decoding(
            model,
            recorded,
            draft_processors,
            input_ids,
            logits_processor=LogitsProcessorList([*logits_processor, processor]),
            stopping_criteria=StoppingCriteriaList([processor.stopping_criteria]),
            generation_config=generation_config,
            inputs_tensor=inputs_tensor,
            **cactus_call.assisted,
            **model_kwargs,
        )
    cactus_call.statistics = AcceptanceStatistics([processor.statistics])
    return output


class DraftLimits(CandidateGenerator):
    """A candidate generator whose draft model may have fewer token ids or fewer positions than the verifier.

    Args:
        inner (`CandidateGenerator`): The candidate generator.
        vocabulary (`int`): The draft's vocabulary size. Ids beyond it are shown to the draft as id 0.
        context (`int`, *optional*): The draft's positions. From there on nothing is drafted.
    """

    def __init__(self, inner: CandidateGenerator, vocabulary: int, context: int | None):
        self.inner = inner
        self.vocabulary = vocabulary
        self.context = context
        self._drafts = True

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def get_candidates(self, input_ids: Tensor, **kwargs: Any) -> tuple[Tensor, Tensor | None]:
        """See transformers' `CandidateGenerator.get_candidates`."""
        length = input_ids.shape[1]
        if self._drafts and self.context is not None:
            self._drafts = length + int(getattr(self.inner, "num_assistant_tokens", 0)) <= self.context
            if not self._drafts:
                warn_of_context(self.context)
        if not self._drafts:
            return input_ids, None
        shown = torch.where(input_ids < self.vocabulary, input_ids, 0)
        sequence, scores = self.inner.get_candidates(shown, **kwargs)
        return torch.cat([input_ids, sequence[:, length:].to(input_ids.device)], dim=-1), scores

    def update_candidate_strategy(self, input_ids: Tensor, scores: Tensor, num_matches: int) -> None:
        """See transformers' `CandidateGenerator.update_candidate_strategy`."""
        if self._drafts:
            self.inner.update_candidate_strategy(input_ids, scores, num_matches)


class VocabularyLimit(LogitsProcessor):
    """Keeps a draft from proposing tokens that the verifier's vocabulary lacks.

    Two models with one tokenizer may pad their vocabularies to different sizes.

    Args:
        size (`int`): The verifier's vocabulary size.
    """

    def __init__(self, size: int):
        self.size = size

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """See transformers' `LogitsProcessor`."""
        beyond = torch.arange(scores.shape[-1], device=scores.device) >= self.size
        return scores.masked_fill(beyond, -torch.inf)
