"""The fast engine: our own decoding loop for decoder-only models, over batches of rows of different lengths.

A round: the drafter proposes a block; the verifier runs once over each row's last token and its block; the acceptance
rule keeps a prefix of the block and samples the next token; stopping conditions cut what was emitted; the caches go
back to what stays. One transfer per round tells the host what was accepted.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig, LogitsProcessorList, PreTrainedModel, StoppingCriteriaList
from transformers.generation import CandidateGenerator, GenerateDecoderOnlyOutput

from . import _compat
from .acceptance import AcceptanceRule, GammaRule
from .adaptive_length import AdaptiveLength
from .block_length import BlockLength, HeuristicLength
from .block_verification import verify_block
from .cache import RaggedCache
from .compiled import CompiledForward
from .configuration import RunOptions, delta_plan, warn_of_context, warn_of_greedy
from .copying import Copier
from .decided import Decided, to_host
from .delta_plan import DeltaPlan
from .drafting import Block, Drafter, GeneratorDrafter, PromptLookupDrafter
from .experience import experience_of, remember
from .feature_draft import is_feature_draft
from .feature_drafting import FeatureDrafter
from .few_numbers import MOST, decide, is_its_gamma
from .inputs import ForwardInputs, context_limit, left_align, logits_and_states, prefill
from .model_drafting import ModelDrafter
from .outputs import AcceptanceStatistics, SequenceStatistics
from .parameters import counted
from .processing import BlockProcessor, Processed
from .restriction import can_restrict, verify_kept
from .rows import Rows
from .sequences import Sequences
from .stopping import BlockStopping
from .transfer import on_device, padded_rows
from .truncation import KeptOnDemand
from .uniforms import Uniforms
from .verification import Verification, raise_if_invalid, verify, verify_greedy

LARGEST_FIRST_CAPACITY = 4096
"""Tokens per row for which the cache reserves memory at once. Beyond that it doubles as it fills: `max_length` is
often a limit that is not reached."""

DEFAULT_NGRAM = 2
"""Tokens of the longest n-gram that prompt look-up looks for by itself, as in transformers."""

WIDEST_COMPILED = 64
"""Most tokens of a row in a compiled verification. Blocks of the schedule `"heuristic"` may grow beyond, rarely."""


@dataclass
class FastCall:
    """What one call brings to the loop besides what `generate` prepares, and what it takes back."""

    rule: AcceptanceRule
    """The acceptance rule."""
    assistant_model: PreTrainedModel | None
    """The draft model; `None` for prompt look-up and early exit."""
    num_assistant_tokens: int
    """Longest block."""
    options: RunOptions
    """The `cactus_*` options that are not about the rule."""
    schedule: str = "constant"
    """`num_assistant_tokens_schedule`: see `block_length` and `adaptive_length`."""
    confidence_threshold: float = 0.0
    """See [`ModelDrafter`]."""
    prompt_lookup_num_tokens: int | None = None
    """Tokens that a draft model's block may copy from the row: see [`Copier`]."""
    max_ngram_size: int | None = None
    """See [`PromptLookupDrafter`] and [`Copier`]."""
    candidate_generator: Callable[..., CandidateGenerator] | None = None
    """Makes one of transformers' candidate generators, which then drafts: for drafts with another tokenizer, and for
    early exit. Gets what `generate` prepared, by name."""
    streamer: Any = None
    """Gets each token as soon as its round commits it."""
    statistics: AcceptanceStatistics | None = None
    """Filled by the call."""


@torch.no_grad()
def fast_decoding(
    model: PreTrainedModel,
    input_ids: Tensor,
    logits_processor: LogitsProcessorList,
    stopping_criteria: StoppingCriteriaList,
    generation_config: GenerationConfig,
    cactus_call: FastCall | None = None,
    **model_kwargs: Any,
) -> GenerateDecoderOnlyOutput | Tensor:
    """A decoding method for `generate(custom_generate=...)`.

    Args:
        model (`PreTrainedModel`): The verifier, decoder-only.
        input_ids (`torch.LongTensor` of shape `[batch, width]`): The prompts, padded on either side.
        logits_processor (`LogitsProcessorList`): The verifier's processors.
        stopping_criteria (`StoppingCriteriaList`): As if checked after every token.
        generation_config (`GenerationConfig`): As prepared by `generate`.
        cactus_call ([`FastCall`]): Bound beforehand, with `functools.partial`.
        **model_kwargs: `attention_mask`, and a [`RaggedCache`] to go on from.

    Returns:
        `GenerateDecoderOnlyOutput` or `torch.LongTensor` of shape `[batch, width + new]`, as `generate` returns them.

    Raises:
        FloatingPointError: If a model's scores are NaN, infinite or all `-inf`.
    """
    assert cactus_call is not None
    return _FastLoop(
        model, input_ids, logits_processor, stopping_criteria, generation_config, cactus_call, model_kwargs
    ).run()


class _FastLoop:
    def __init__(
        self,
        model: PreTrainedModel,
        input_ids: Tensor,
        logits_processor: LogitsProcessorList,
        stopping_criteria: StoppingCriteriaList,
        generation_config: GenerationConfig,
        call: FastCall,
        model_kwargs: dict[str, Any],
    ):
        self.model, self.call, self.config = model, call, generation_config
        self.forward_inputs = ForwardInputs(model)
        self.do_sample = bool(generation_config.do_sample)
        self.uniforms = Uniforms()
        if not self.do_sample:
            warn_of_greedy(call.rule)
        self.input_ids = input_ids
        mask = model_kwargs.get("attention_mask")
        prompts, lengths = left_align(input_ids, mask)
        prompt_lengths = lengths.tolist()
        self.prompts = prompts
        eos = getattr(generation_config, "_eos_token_tensor", None)
        self.eos = [] if eos is None else eos.flatten().tolist()
        self.stopping = BlockStopping(stopping_criteria, self.eos)
        self.processor = BlockProcessor(logits_processor)

        width = input_ids.shape[1]
        assert self.stopping.max_length is not None, "generate always sets a max_length"
        self.limit = self.stopping.max_length
        starts = [width - length for length in prompt_lengths]
        padded = left_pad(prompts, starts, width)
        self.sequences = Sequences(padded, starts, self.limit + call.num_assistant_tokens + 1)
        self.emitted: list[list[int]] = [[] for _ in prompt_lengths]
        self.statistics = [SequenceStatistics() for _ in prompt_lengths]
        returns_dict = bool(generation_config.return_dict_in_generate)
        self.counts = returns_dict
        self.kept_scores = _row_lists(prompt_lengths, returns_dict and generation_config.output_scores)
        self.kept_logits = _row_lists(prompt_lengths, returns_dict and generation_config.output_logits)

        self.block_length = self._block_length(len(prompt_lengths))
        self.round_started = time.perf_counter()
        width = call.num_assistant_tokens + 1
        # Adaptive blocks, of many lengths, are padded to few widths.
        least = 1 if call.schedule == "adaptive" else width
        self.compiled = self._compiled(model, least, max(width, WIDEST_COMPILED))
        self.compiled_draft = self._compiled(call.assistant_model, 1, 2)
        self.draft_limit: int | None = None
        self.warned_of_context = False
        repeats = generation_config.num_return_sequences or 1
        self.rule = rule_for_batch(call.rule, len(input_ids), repeats)
        self.plan = delta_plan(self.rule, call.options, len(input_ids) // repeats, repeats)
        self.drafter = self._drafter(prompt_lengths, model_kwargs)
        # Then what lies behind a rejected token need not even be truncated.
        self.looks_at_few = (
            self.do_sample
            and is_its_gamma(self.rule)
            and self.rule.batch_size is None
            and self.plan is None
            and self.kept_scores is None
            and not call.options.certificate
            and call.options.verification == "token"
        )
        # Who reads the rows on the device. Otherwise the tokens on the host are enough.
        self.reads_ids = self.processor.reads_prefix or isinstance(self.drafter, GeneratorDrafter)
        self.unfed: Tensor | None = None
        self.hidden_states: list[Tensor] | None = None
        given = model_kwargs.get(_compat.cache_argument(model))
        if isinstance(given, RaggedCache) and given.get_seq_length() > 0:
            self.cache = self._continued(given)
            self.drafter.resume(self.cache)
        else:
            capacity = min(self.limit + call.num_assistant_tokens, LARGEST_FIRST_CAPACITY)
            self.cache = RaggedCache(len(prompts), device=prompts.device, capacity=capacity)
        self._read_prompts(lengths)

    def run(self) -> GenerateDecoderOnlyOutput | Tensor:
        while self.sequences.batch_size:
            block = self._draft()
            logits = self._verifier_logits(block)
            processed = self._process(logits, block)
            outcome = self._verify(block, processed)
            emitted, finished = self._accept(block, outcome, processed, logits)
            self._commit(emitted, outcome)
            self._drop(finished)
        if self.call.streamer is not None:
            self.call.streamer.end()
        if isinstance(self.block_length, AdaptiveLength):
            remember(
                self.model, self.call.assistant_model, self.block_length.experience, self._acceptance_depends_on()
            )
        self.call.statistics = AcceptanceStatistics(self.statistics)
        return self._output()

    # 1. Draft a block.
    def _draft(self) -> Block:
        sequences = self.sequences
        # The verifier adds a token to every block.
        wanted = [
            min(n, self.limit - end - 1) for n, end in zip(self.block_length.next(), sequences.ends, strict=True)
        ]
        if self.draft_limit is not None:
            room = [max(self.draft_limit - length, 0) for length in sequences.lengths()]
            if not self.warned_of_context and any(own < n for own, n in zip(room, wanted, strict=True)):
                warn_of_context(self.draft_limit)
                self.warned_of_context = True
            wanted = list(map(min, wanted, room))
        count = max(wanted)
        if count <= 0:
            return Block(sequences.last.new_empty(sequences.batch_size, 0), None, [0] * sequences.batch_size)
        block = self.drafter.propose(sequences, count)
        # A row that is ahead of others keeps as many as it would draft alone: with a budget its law depends on that.
        return block._replace(lengths=[min(drafted, own) for drafted, own in zip(block.lengths, wanted, strict=True)])

    # 2. Run the verifier over each row's last token and its block.
    def _verifier_logits(self, block: Block) -> Tensor:
        size = block.tokens.shape[1]
        unfed = self.sequences.last[:, None] if self.unfed is None else self.unfed
        tokens = torch.cat([unfed, block.tokens], dim=1)
        if self.compiled is not None and self.unfed is None:
            return self.compiled(self.cache, tokens)
        inputs = self.forward_inputs(self.cache, tokens, size + 1)
        logits, self.hidden_states = logits_and_states(self.model, inputs, self.drafter.hidden_states)
        return logits[:, -size - 1 :]

    def _process(self, logits: Tensor, block: Block) -> Processed | KeptOnDemand:
        if self.processor.reads_prefix:
            self.sequences.write(block.tokens)
        scores = logits.to(self.sequences.last.device, torch.float32, copy=self.kept_logits is not None)
        if self.looks_at_few and block.tokens.shape[1] and (block.scores is None or block.scores.kept is not None):
            few = self.processor.on_demand(scores, self.sequences, MOST)
            if few is not None:
                return few
        return self.processor(scores, self.sequences)

    # 3. Keep a prefix of the block and choose the next token.
    def _verify(self, block: Block, processed: Processed | KeptOnDemand) -> Verification | Decided:
        if isinstance(processed, KeptOnDemand):
            drafted, draft = block.tokens.tolist(), None if block.scores is None else block.scores.kept
            uniforms = self.uniforms.take(len(drafted) * (len(drafted[0]) + 1))
            return decide(drafted, block.lengths, processed, draft, self._gamma, uniforms, measure=self.counts)
        lengths = None
        if min(block.lengths) < block.tokens.shape[1]:
            lengths = on_device(block.lengths, block.tokens.device)
        if not self.do_sample:
            return verify_greedy(block.tokens, processed.scores, block_lengths=lengths)
        rule, options, spent = self.rule, self.call.options, None
        if self.plan is not None and block.tokens.shape[1]:
            rule, spent = self._planned(self.plan, block, processed.scores)
        wanted: dict[str, Any] = {"block_lengths": lengths, "measure": self.counts}
        if options.verification == "block":
            return verify_block(block.tokens, processed.scores, block.draft_scores, rule, **wanted)
        wanted["certify"] = options.certificate and spent is None
        if processed.kept is not None and can_restrict(rule):
            outcome = verify_kept(block.tokens, processed.kept, block.scores, rule, **wanted)
        else:
            outcome = verify(block.tokens, processed.scores, block.draft_scores, rule, **wanted)
        return outcome if spent is None else outcome._replace(certificate=spent)

    def _gamma(self, row: int, place: int, q_n: float) -> float:
        assert isinstance(self.rule, GammaRule)
        return self.rule.gamma_of(q_n)

    def _planned(self, plan: DeltaPlan, block: Block, scores: Tensor) -> tuple[AcceptanceRule, Tensor | None]:
        """The rule with a budget for each position, and what each would spend."""
        generated = [self.emitted[origin] for origin in self.sequences.rows]
        # What lies beyond a row's length may be no token at all.
        beyond = torch.arange(block.tokens.shape[1]) >= torch.tensor(block.lengths)[:, None]
        tokens = block.tokens.masked_fill(beyond.to(block.tokens.device), 0)
        draft = None if block.draft_scores is None else Rows(block.draft_scores)
        return plan.for_block(generated, tokens, block.lengths, Rows(scores[:, :-1]), draft)

    # 4. Bring the outcome to the host, and cut it where a row ends.
    def _accept(
        self, block: Block, outcome: Verification | Decided, processed: Processed | KeptOnDemand, logits: Tensor
    ) -> tuple[list[list[int]], list[bool]]:
        sequences, size = self.sequences, block.tokens.shape[1]
        decided = to_host(outcome, block.tokens, measure=self.counts)
        raise_if_invalid(decided.invalid, decided.accepted, sequences.rows)
        accepted, tokens = decided.accepted, decided.emitted

        if self.stopping.reads_tokens:
            sequences.write(on_device(padded_rows(tokens), sequences.ids.device))
        late = self.stopping.out_of_time()
        finished = []
        for row, new in enumerate(tokens):
            seen = self._scores_up_to(row, processed) if self.stopping.reads_tokens else None
            count, ended = (1, True) if late else self.stopping.cut(row, new, sequences, seen)
            del new[count:]
            finished.append(ended)
            self._record(row, block, decided, new, processed, logits)
        now = time.perf_counter()
        self.block_length.update(block.lengths, accepted, now - self.round_started - self._compile_seconds())
        self.round_started = now
        if size:
            self.drafter.commit([min(count, len(new)) for count, new in zip(accepted, tokens, strict=True)])
        return tokens, finished

    def _compile_seconds(self) -> float:
        """What compiling took in this round; other rounds will not take that."""
        return sum(forward.take_seconds() for forward in (self.compiled, self.compiled_draft) if forward is not None)

    def _scores_up_to(self, row: int, processed: Processed | KeptOnDemand) -> list[Tensor] | None:
        """A row's scores with this round's, where the call keeps scores."""
        if self.kept_scores is None or isinstance(processed, KeptOnDemand):
            return None
        return [*self.kept_scores[self.sequences.rows[row]], *processed.scores[row]]

    def _record(
        self,
        row: int,
        block: Block,
        decided: Decided,
        new: list[int],
        processed: Processed | KeptOnDemand,
        logits: Tensor,
    ) -> None:
        origin, length = self.sequences.rows[row], block.lengths[row]
        self.emitted[origin] += new
        # Nothing was computed without sampling, or for a lossless block.
        certificate = [0.0] * length if decided.certificate is None else decided.certificate[row]
        if self.plan is not None:
            start = len(self.emitted[origin]) - len(new)
            self.plan.spend(row, start, certificate[: min(len(new), length)])
        if self.counts:
            count = decided.accepted[row]
            lossless = decided.accepted_losslessly[row][:count] if decided.accepted_losslessly else []
            divergence = decided.divergence[row] if decided.divergence else []
            certified = certificate if self.call.options.certificate else None
            self.statistics[origin].add_round(length, [flag > 0 for flag in lossless], divergence, len(new), certified)
        if self.kept_scores is not None and isinstance(processed, Processed):
            self.kept_scores[origin] += list(processed.scores[row, : len(new)].clone())
        if self.kept_logits is not None:
            self.kept_logits[origin] += list(logits[row, : len(new)].to(block.tokens.device, torch.float32))
        if self.call.streamer is not None:
            if self.counts:
                self.call.streamer.put_origins(self.statistics[origin].origins[-len(new) :])
            self.call.streamer.put(torch.tensor(new))

    # 5. Roll the verifier's cache back to the tokens that stay; the newest is fed in the next round.
    def _commit(self, emitted: list[list[int]], outcome: Verification | Decided) -> None:
        prompt = 0 if self.unfed is None else self.unfed.shape[1] - 1
        self.unfed = None
        kept = [prompt + len(new) for new in emitted]
        self.cache.commit(kept)
        if self.hidden_states is not None:
            self.drafter.read(self.hidden_states, kept)
        # Where a row was cut its last token is another one, but then the row ends.
        if self.reads_ids and not self.stopping.reads_tokens:
            self.sequences.write(on_device(padded_rows(emitted), self.sequences.ids.device))
        last = outcome.next_token
        self.sequences.advance(emitted, last if isinstance(last, Tensor) else on_device(last, self.prompts.device))

    # 6. Finished rows leave the batch.
    def _drop(self, finished: list[bool]) -> None:
        if not any(finished):
            return
        kept = [row for row, ended in enumerate(finished) if not ended]
        self.block_length.keep(kept)
        self.sequences.keep(kept)
        if kept:
            index = torch.tensor(kept, device=self.input_ids.device)
            self.cache.keep_rows(kept)
            self.drafter.keep(kept)
            self.rule = self.rule.select(index)
            if self.plan is not None:
                self.plan.keep(kept)

    def _drafter(self, prompt_lengths: list[int], model_kwargs: dict[str, Any]) -> Drafter:
        call = self.call
        if call.candidate_generator is not None:
            generator = call.candidate_generator(
                generation_config=self.config,
                input_ids=self.input_ids,
                inputs_tensor=self.input_ids,
                logits_processor=LogitsProcessorList(self.processor.without_user_defined().processors),
                model_kwargs=model_kwargs,
            )
            return GeneratorDrafter(generator, _compat.vocab_size(self.model))
        if call.assistant_model is None:
            return PromptLookupDrafter(call.max_ngram_size or DEFAULT_NGRAM, self.eos)
        draft, processor = call.assistant_model, self.processor.without_user_defined()
        vocab_size = _compat.vocab_size(self.model)
        copied = call.prompt_lookup_num_tokens
        how: dict[str, Any] = {
            "copier": None if copied is None else Copier(copied, call.max_ngram_size, self.eos),
            "uniforms": self.uniforms if self.do_sample else None,
            "confidence_threshold": call.confidence_threshold,
            "goes_on": self.block_length.goes_on if self.block_length.reads_probabilities else None,
        }
        if is_feature_draft(draft):
            self.draft_limit = context_limit(draft.decoder)
            embedding = self.model.get_input_embeddings()
            return FeatureDrafter(draft, embedding, processor, vocab_size, len(prompt_lengths), **how)
        self.draft_limit = context_limit(draft)
        return ModelDrafter(
            draft, processor, vocab_size, self.prompts, prompt_lengths, compiled=self.compiled_draft, **how
        )

    def _compiled(self, model: PreTrainedModel | None, least: int, most: int) -> CompiledForward | None:
        """The forwards of a model over `least` to `most` tokens, where the call asks for them to be compiled."""
        if model is None or not self.call.options.compile:
            return None
        capacity = min(self.limit + self.call.num_assistant_tokens + 1, LARGEST_FIRST_CAPACITY)
        return CompiledForward(model, least, most, capacity)

    def _acceptance_depends_on(self) -> str:
        """What a pair's acceptance and times depend on, besides the text: the rule, and how it drafts and runs."""
        rule, call = self.call.rule, self.call
        name = rule if rule.batch_size is None else type(rule).__name__
        return f"{name} {bool(call.prompt_lookup_num_tokens)} {call.options.compile}"

    def _block_length(self, rows: int) -> BlockLength:
        call = self.call
        if call.schedule == "adaptive":
            experience = experience_of(self.model, call.assistant_model, self._acceptance_depends_on())
            # Elsewhere than on a CPU each look at a probability waits for the device.
            on_cpu = _compat.input_device(call.assistant_model).type == "cpu"
            return AdaptiveLength(call.num_assistant_tokens, rows, experience, reads_probabilities=on_cpu)
        kind = BlockLength if call.schedule == "constant" else HeuristicLength
        return kind(call.num_assistant_tokens, rows)

    def _continued(self, given: RaggedCache) -> RaggedCache:
        rows, filled = given.batch_size, given.get_seq_length()
        if (rows, self.prompts.shape[1] > filled) != (len(self.prompts), True):
            raise ValueError(
                f"the given cache holds {filled} tokens of {rows} sequences, and the prompts are "
                f"{len(self.prompts)} of {self.prompts.shape[1]} tokens: pass a cache together with the sequences "
                "that it was returned with, followed by at least one token that it does not hold."
            )
        given.automatic = False
        return given

    def _read_prompts(self, lengths: Tensor) -> None:
        """Feeds what cannot wait for the first round, and leaves in `unfed` what that feeds with its block."""
        filled, wanted = self.cache.get_seq_length(), self.drafter.hidden_states
        rows, new = self.prompts[:, filled:], lengths - filled
        # Rows of different lengths have blocks that start at different places; and some drafts are told about the
        # prompt by the verifier.
        level = filled or min(self.sequences.starts) == max(self.sequences.starts)
        if level and not wanted:
            self.unfed = rows
            return
        read = prefill(self.model, self.cache, rows, new, hidden_states=wanted)
        if read is not None:
            self.drafter.read(read, (new - 1).tolist())

    def _output(self) -> GenerateDecoderOnlyOutput | Tensor:
        pad = self.config._pad_token_tensor
        fill = int(pad) if pad is not None else 0
        longest = max(map(len, self.emitted))
        new = [row + [fill] * (longest - len(row)) for row in self.emitted]
        ids = torch.cat([self.input_ids, torch.tensor(new, device=self.input_ids.device)], dim=1)
        if not self.config.return_dict_in_generate:
            return ids
        # Rows leave the batch as they finish, and take their cache along; one row's cache is whole at the end.
        cache = self.cache if len(self.emitted) == 1 else None
        self.cache.automatic = True
        self.cache.draft = self.drafter.memory()
        return _compat.decoder_only_output(
            sequences=ids, scores=_by_step(self.kept_scores), logits=_by_step(self.kept_logits), cache=cache
        )


def rule_for_batch(rule: AcceptanceRule, batch: int, repeats: int) -> AcceptanceRule:
    """The rule for a batch in which each prompt occurs several times.

    Raises:
        ValueError: If a parameter has one value per sequence, but of another number of sequences.
    """
    size = rule.batch_size
    if size is not None and size * repeats != batch:
        raise ValueError(
            f"{rule} has parameters for {counted(size, 'prompt')}, the call has {batch // repeats}: give one number, "
            "or one for each prompt (in a pipeline, for each of batch_size)."
        )
    return rule if repeats == 1 else rule.select(torch.arange(batch // repeats).repeat_interleave(repeats))


def left_pad(rows: Tensor, starts: list[int], width: int) -> Tensor:
    """Left-aligned rows as left-padded ones, `[batch, width]`, whatever side they were padded on before."""
    columns = torch.arange(width, device=rows.device) - torch.tensor(starts, device=rows.device)[:, None]
    return rows.gather(1, columns.clamp(0, rows.shape[1] - 1)).masked_fill(columns < 0, 0)


def _row_lists(rows: list[int], wanted: bool | None) -> list[list[Tensor]] | None:
    return [[] for _ in rows] if wanted else None


def _by_step(rows: list[list[Tensor]] | None) -> tuple[Tensor, ...] | None:
    """Scores by row and step as one tensor per step, `[batch, vocab]`; zeros where a row had ended."""
    if rows is None:
        return None
    longest = max(map(len, rows))
    nothing = torch.zeros_like(rows[0][0])
    return tuple(torch.stack([row[step] if step < len(row) else nothing for row in rows]) for step in range(longest))
