"""Drafters: what proposes the blocks that the verifier checks."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from transformers.generation import CandidateGenerator

from .cache import DraftMemory, RaggedCache
from .ngrams import NgramIndex
from .processing import Processed, to_vocabulary
from .sequences import Sequences


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

    hidden_states: Sequence[int] = ()
    """Which of the verifier's hidden states the drafter reads, by their place in `output_hidden_states`."""

    @abstractmethod
    def propose(self, sequences: Sequences, count: int) -> Block:
        """Drafts at most `count` tokens for each row.

        Args:
            sequences ([`Sequences`]): The rows. A drafter may write behind them.
            count (`int`): At least 1.
        """

    def read(self, hidden_states: Sequence[Tensor], counts: Sequence[int]) -> None:  # noqa: B027 - most read none
        """Gets the verifier's hidden states of the tokens that it has read, in order, before the rows advance.

        Args:
            hidden_states (sequence of `torch.Tensor` of shape `[batch, tokens, hidden]`): Those asked for.
            counts (`list[int]`): How many of the tokens stay, in each row.
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


class PromptLookupDrafter(Drafter):
    """Prompt look-up: what followed the last time the row's final n-gram occurred.

    The longest n-gram that occurred before decides, and of its occurrences the latest.

    Args:
        max_ngram_size (`int`): Longest n-gram.
        eos_token_ids (iterable of `int`): A block ends before an EOS.
    """

    def __init__(self, max_ngram_size: int, eos_token_ids: Sequence[int]):
        self.index = NgramIndex(max_ngram_size, stops=eos_token_ids)

    def propose(self, sequences: Sequences, count: int) -> Block:
        """See [`Drafter.propose`]."""
        blocks = [
            self.index.following(row, tokens, count)[0]
            for row, tokens in zip(sequences.rows, sequences.tokens, strict=True)
        ]
        longest = max(map(len, blocks))
        padded = [block + [0] * (longest - len(block)) for block in blocks]
        tokens = torch.tensor(padded, dtype=torch.long, device=sequences.last.device).view(len(blocks), longest)
        return Block(tokens, None, [len(block) for block in blocks])


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
