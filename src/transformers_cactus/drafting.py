"""Drafters: what proposes the blocks that the verifier checks."""

from __future__ import annotations

import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers.generation import CandidateGenerator

from ._compat import input_device
from ._compat import vocab_size as vocab_size_of
from .cache import DraftMemory, RaggedCache
from .compiled import CompiledForward
from .inputs import forward_inputs, prefill
from .processing import BlockProcessor, Processed, to_vocabulary
from .sequences import Sequences
from .transfer import on_device
from .verification import sample


class Block(NamedTuple):
    """A drafted block, on the verifier's device."""

    tokens: Tensor
    """`[batch, block]`; what lies beyond a row's length means nothing."""
    scores: Processed | None
    """What the tokens were sampled from, `[batch, block, vocab]`; `None` for a draft without probabilities."""
    lengths: list[int]
    """Drafted tokens of each row."""

    @property
    def draft_scores(self) -> Tensor | None:
        """`scores` over the whole vocabulary."""
        return None if self.scores is None else self.scores.scores


class Drafter(ABC):
    """Proposes a block in each round and hears what became of it."""

    @abstractmethod
    def propose(self, sequences: Sequences, count: int) -> Block:
        """Drafts at most `count` tokens for each row.

        Args:
            sequences ([`Sequences`]): The rows. A drafter may write behind them.
            count (`int`): At least 1.
        """

    def commit(self, accepted: Sequence[int]) -> None:  # noqa: B027 - most drafters keep no state
        """Hears how many drafted tokens of each row were accepted. Called before the rows advance."""

    def keep(self, kept: Sequence[int]) -> None:  # noqa: B027 - as above
        """Hears which rows remain in the batch."""

    def resume(self, cache: RaggedCache) -> None:  # noqa: B027 - as above
        """Hears of a cache that an earlier call returned and that holds a prefix of the rows. Called at the start."""

    def memory(self) -> DraftMemory | None:
        """What a call that goes on from the end of this one can start with; `None` for a drafter without a cache."""
        return None


class ModelDrafter(Drafter):
    """A draft model, run token by token on a cache of its own.

    Args:
        model (`PreTrainedModel`): The draft. It may have another dtype and device than the verifier.
        processor ([`BlockProcessor`]): The call's logits processors: the draft is warped once, as the verifier is, and
            its scores are kept as its tokens were sampled from them.
        vocab_size (`int`): The verifier's. Tokens beyond it are never drafted.
        prompts (`torch.LongTensor` of shape `[batch, longest]`): Left-aligned prompts.
        lengths (`list[int]`): Their lengths.
        do_sample (`bool`): Whether to sample, or to take the most probable token.
        confidence_threshold (`float`): A row's block ends behind a token whose probability was below it. 0 for never.
            Costs a host synchronisation per drafted token.
        goes_on (callable, *optional*): [`BlockLength.goes_on`], asked after each drafted token but the last. Costs the
            same.
        compiled ([`CompiledForward`], *optional*): Runs the steps, of one token or two, where they are compiled.
    """

    def __init__(
        self,
        model: Any,
        processor: BlockProcessor,
        vocab_size: int,
        prompts: Tensor,
        lengths: Sequence[int],
        *,
        do_sample: bool,
        confidence_threshold: float = 0.0,
        goes_on: Callable[[Sequence[Sequence[float]]], bool] | None = None,
        compiled: CompiledForward | None = None,
    ):
        self.model = model
        self.processor = processor
        self.vocab_size = vocab_size
        self.do_sample = do_sample
        self.confidence_threshold = confidence_threshold
        self.goes_on = goes_on
        self.compiled = compiled
        self.device = input_device(model)
        self.cache = RaggedCache(len(prompts), device=self.device)
        self._prompts: tuple[Tensor, list[int]] | None = (prompts, list(lengths))
        self._unfed: Tensor | None = None
        self._unfed_rows: list[bool] = []
        self._fed = 0

    def propose(self, sequences: Sequences, count: int) -> Block:
        """See [`Drafter.propose`]."""
        device, batch = sequences.last.device, sequences.batch_size
        tokens: list[Tensor] = []
        scores: list[Processed] = []
        lengths = [count] * batch
        probabilities: list[list[float]] = []
        uniforms = torch.rand(count, batch, device=device).unbind() if self.do_sample else [None] * count
        logits = self._feed_unseen(sequences)
        for step in range(count):
            logits = to_vocabulary(logits, self.vocab_size).to(device, torch.float32)
            processed = self.processor(logits, sequences, first=step)
            tokens.append(_choose(processed, uniforms[step]))
            scores.append(processed)
            if step + 1 < count and (self.confidence_threshold > 0 or self.goes_on is not None):
                probabilities.append(_probability(processed, tokens[-1]).tolist())
                for row, probability in enumerate(probabilities[-1]):
                    if probability < self.confidence_threshold:
                        lengths[row] = min(lengths[row], step + 1)
                if max(lengths) == step + 1 or not (self.goes_on is None or self.goes_on(probabilities)):
                    break
            if step + 1 < count:
                if self.processor.reads_prefix:
                    sequences.write(torch.cat(tokens, dim=1))
                logits = self._feed(tokens[-1])
                self._fed += 1
        self._unfed = tokens[-1]
        lengths = [min(length, len(tokens)) for length in lengths]
        return Block(torch.cat(tokens, dim=1), Processed.joined(scores) if self.do_sample else None, lengths)

    def _feed_unseen(self, sequences: Sequences) -> Tensor:
        """Feeds what the draft has not seen of each row; the logits behind its last token, `[batch, 1, vocab]`."""
        self._fed = 0
        lengths = sequences.lengths()
        if self._prompts is not None:
            prompts, known = self._prompts
            self._prompts = None
            if known != lengths:
                prompts = _padded(sequences.tokens)
            return self._feed_prompts(prompts, lengths)
        assert self.cache.rows.counts is not None
        unseen = [length - seen for length, seen in zip(lengths, self.cache.rows.counts, strict=True)]
        if unseen == [2 if unfed else 1 for unfed in self._unfed_rows]:
            return self._feed_last(sequences.last)
        # The verifier went on alone for some rounds.
        missed = [row[-count:] for row, count in zip(sequences.tokens, unseen, strict=True)]
        return self._feed_rows(_padded(missed), unseen)

    def _feed_prompts(self, prompts: Tensor, lengths: list[int]) -> Tensor:
        if min(lengths) == max(lengths):
            return self._feed(prompts[:, self.cache.get_seq_length() :])
        ends = on_device(lengths, self.device)
        prompts = self._known(prompts)
        prefill(self.model, self.cache, prompts, ends, past_limit=True)
        return self._feed(prompts.gather(1, ends[:, None] - 1))

    def _feed_last(self, last: Tensor) -> Tensor:
        """Feeds each row's last token, behind its last drafted one where that was accepted."""
        if not any(self._unfed_rows):
            return self._feed(last[:, None])
        assert self._unfed is not None
        behind = on_device(self._unfed_rows, last.device).bool()
        # Rows that lack one token only end in padding, which is not committed.
        pair = torch.cat([torch.where(behind[:, None], self._unfed, last[:, None]), last[:, None]], dim=1)
        return self._feed_rows(pair, [2 if unfed else 1 for unfed in self._unfed_rows])

    def _feed_rows(self, tokens: Tensor, counts: list[int]) -> Tensor:
        """Feeds the first tokens of each row."""
        logits = self._logits(tokens)
        self.cache.commit(counts)
        last = on_device([count - 1 for count in counts], self.device)
        return logits[torch.arange(len(counts), device=self.device), last, None]

    def _feed(self, tokens: Tensor) -> Tensor:
        logits = self._logits(tokens, logits_to_keep=1)
        # Where the model had no choice it computed the others too.
        logits = logits if logits.shape[1] == 1 else logits[:, -1:]
        self.cache.commit(tokens.shape[1])
        return logits

    def _logits(self, tokens: Tensor, logits_to_keep: int | None = None) -> Tensor:
        known = self._known(tokens)
        # A row that has no positions left is fed like the others: its block is empty.
        if self.compiled is not None:
            return self.compiled(self.cache, known, logits_to_keep, past_limit=True)
        return self.model(**forward_inputs(self.model, self.cache, known, logits_to_keep, past_limit=True)).logits

    def _known(self, tokens: Tensor) -> Tensor:
        """Tokens on the draft's device; those that only the verifier's vocabulary has are read as another one."""
        size = vocab_size_of(self.model)
        return (tokens.clamp(max=size - 1) if size < self.vocab_size else tokens).to(self.device)

    def commit(self, accepted: Sequence[int]) -> None:
        """See [`Drafter.commit`]."""
        # The last drafted token was never fed. Of the others, those behind a rejection go.
        removed = [self._fed - min(count, self._fed) for count in accepted]
        if any(removed):
            self.cache.roll_back(removed)
        self._unfed_rows = [count == self._fed + 1 for count in accepted]

    def keep(self, kept: Sequence[int]) -> None:
        """See [`Drafter.keep`]."""
        if self._prompts is not None:
            prompts, lengths = self._prompts
            self._prompts = prompts[list(kept)], [lengths[row] for row in kept]
        self.cache.keep_rows(list(kept))
        if self._unfed is not None:
            self._unfed = self._unfed[torch.tensor(list(kept), device=self._unfed.device)]
        self._unfed_rows = [self._unfed_rows[row] for row in kept] if self._unfed_rows else []

    def resume(self, cache: RaggedCache) -> None:
        """See [`Drafter.resume`]."""
        assert self._prompts is not None
        prompts, lengths = self._prompts
        memory = cache.draft
        if memory is None or memory.model() is not self.model or memory.cache.batch_size != len(prompts):
            return
        # The caller may have rolled the verifier's cache back. The last token is fed for its logits.
        known = memory.cache.get_seq_length()
        extra = known - min(known, cache.get_seq_length(), min(lengths) - 1)
        self.cache = memory.cache
        self.cache.roll_back(extra)

    def memory(self) -> DraftMemory:
        """See [`Drafter.memory`]."""
        return DraftMemory(weakref.ref(self.model), self.cache)


class PromptLookupDrafter(Drafter):
    """Prompt look-up: what followed the last time the row's final n-gram occurred.

    The longest n-gram that occurred before decides, and of its occurrences the latest. An index of n-grams grows with
    the rows, so that a round costs no search.

    Args:
        max_ngram_size (`int`): Longest n-gram.
        eos_token_ids (iterable of `int`): A block ends before an EOS.
    """

    def __init__(self, max_ngram_size: int, eos_token_ids: Sequence[int]):
        self.max_ngram_size = max_ngram_size
        self.eos = frozenset(eos_token_ids)
        self._index: dict[int, dict[tuple[int, ...], int]] = {}
        self._indexed: dict[int, int] = {}

    def propose(self, sequences: Sequences, count: int) -> Block:
        """See [`Drafter.propose`]."""
        blocks = [
            self._look_up(row, tokens, count) for row, tokens in zip(sequences.rows, sequences.tokens, strict=True)
        ]
        longest = max(map(len, blocks))
        padded = [block + [0] * (longest - len(block)) for block in blocks]
        tokens = torch.tensor(padded, dtype=torch.long, device=sequences.last.device).view(len(blocks), longest)
        return Block(tokens, None, [len(block) for block in blocks])

    def _look_up(self, row: int, tokens: list[int], count: int) -> list[int]:
        index = self._index.setdefault(row, {})
        # An n-gram enters the index once a token follows it, with that token's place.
        for end in range(max(self._indexed.get(row, 1), 1), len(tokens)):
            for size in range(1, min(self.max_ngram_size, end) + 1):
                index[tuple(tokens[end - size : end])] = end
        self._indexed[row] = len(tokens)
        for size in range(min(self.max_ngram_size, len(tokens) - 1), 0, -1):
            start = index.get(tuple(tokens[-size:]))
            if start is not None:
                found = tokens[start : start + count]
                ends = [place for place, token in enumerate(found) if token in self.eos]
                return found[: ends[0]] if ends else found
        return []


def _choose(processed: Processed, uniforms: Tensor | None) -> Tensor:
    """The next token of each row, `[batch, 1]`: sampled, or without random numbers the most probable one."""
    if uniforms is None:
        return processed.scores.argmax(-1)
    if processed.kept is None:
        return sample(processed.scores[:, 0].softmax(-1), uniforms)[:, None]
    tokens, scores = processed.kept
    return tokens[:, 0].gather(-1, sample(scores[:, 0].softmax(-1), uniforms)[:, None])


def _probability(processed: Processed, tokens: Tensor) -> Tensor:
    """The probability of each row's token, `[batch]`."""
    if processed.kept is None:
        return processed.scores[:, 0].softmax(-1).gather(-1, tokens)[:, 0]
    kept, scores = processed.kept
    return (scores[:, 0].softmax(-1) * (kept[:, 0] == tokens)).sum(-1)


def _padded(rows: Sequence[Sequence[int]]) -> Tensor:
    longest = max(map(len, rows))
    return torch.tensor([[*row, *[0] * (longest - len(row))] for row in rows])


class GeneratorDrafter(Drafter):
    """Any of transformers' candidate generators, for one sequence.

    Args:
        generator (`CandidateGenerator`): One that needs no outputs of the verifier. Its own sampling is not touched.
        vocab_size (`int`): The verifier's.
    """

    def __init__(self, generator: CandidateGenerator, vocab_size: int):
        self.generator = generator
        self.vocab_size = vocab_size

    def propose(self, sequences: Sequences, count: int) -> Block:
        """See [`Drafter.propose`]."""
        self._prefix = sequences.padded_prefix(0, 0)
        drafted, scores = self.generator.get_candidates(self._prefix)
        device = sequences.last.device
        tokens = drafted[:, self._prefix.shape[1] :][:, :count].to(device)
        self._drafted = tokens.shape[1]
        if scores is not None:
            scores = to_vocabulary(scores[:, : self._drafted], self.vocab_size).to(device, torch.float32)
        return Block(tokens, None if scores is None or not self._drafted else Processed(scores), [self._drafted])

    def commit(self, accepted: Sequence[int]) -> None:
        """See [`Drafter.commit`]."""
        # Of the verifier's scores a generator asks only for how many positions there were.
        positions = self._prefix.new_empty(1, self._drafted + 1, 0)
        self.generator.update_candidate_strategy(self._prefix, positions, accepted[0])
