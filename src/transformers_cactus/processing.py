"""Logits processors over a whole block: each position as if it had been reached token by token."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor
from transformers import LogitsProcessor
from transformers.generation import logits_process as hf

from . import _compat
from .sequences import Sequences
from .truncation import Kept, KeptOnDemand, Truncation, fused

EXCLUDE_ONLY: tuple[type, ...] = (
    hf.TopPLogitsWarper,
    hf.TopHLogitsWarper,
    hf.MinPLogitsWarper,
    hf.TypicalLogitsWarper,
    hf.EpsilonLogitsWarper,
    hf.EtaLogitsWarper,
    hf.TemperatureLogitsWarper,
    hf.LogitNormalization,
    hf.SuppressTokensLogitsProcessor,
)
"""Processors that do not look at the prefix, and leave every score of `-inf` as it is."""

PREFIX_FREE: tuple[type, ...] = (*EXCLUDE_ONLY, hf.TopKLogitsWarper, hf.InfNanRemoveLogitsProcessor, Truncation)
"""Processors that do not look at the prefix: they take all rows and positions at once."""

MINIMUM_LENGTH: tuple[type, ...] = (hf.MinLengthLogitsProcessor, hf.MinNewTokensLengthLogitsProcessor)
"""Processors that exclude EOS up to a length. Applied to the EOS columns directly: their own way, a mask over the
vocabulary for every position, took a third of a round's time outside the models on a CPU."""

LENGTH_ONLY: tuple[type, ...] = (
    hf.ForcedBOSTokenLogitsProcessor,
    hf.ForcedEOSTokenLogitsProcessor,
    hf.ExponentialDecayLengthPenalty,
    hf.SuppressTokensAtBeginLogitsProcessor,
)
"""Processors that look at the prefix's length only, which `generate` set up for padded prompts."""


class Processed:
    """Processed scores of a block, in float32.

    Args:
        scores (`torch.Tensor` of shape `[batch, block, vocab]` or `None`): The scores, where they are written down.
        kept ([`Kept`] of shape `[batch, block, kept]`, *optional*): All that is left of each position, if it is known.
        vocab (`int`, *optional*): The size of the vocabulary, where `kept` alone is given.
    """

    def __init__(self, scores: Tensor | None, kept: Kept | None = None, vocab: int = 0):
        self.kept = kept
        self.vocab = vocab if scores is None else scores.shape[-1]
        self._scores = scores

    @classmethod
    def joined(cls, blocks: Sequence[Processed]) -> Processed:
        """Blocks of the same rows as one, one behind another."""
        kept = [block.kept for block in blocks if block.kept is not None]
        if len(kept) < len(blocks):
            return cls(torch.cat([block.scores for block in blocks], dim=1))
        return cls(None, Kept.joined(kept), blocks[0].vocab)

    @property
    def scores(self) -> Tensor:
        """The scores of the whole vocabulary, `[batch, block, vocab]`, written down when they are first asked for."""
        if self._scores is None:
            assert self.kept is not None
            tokens, scores = self.kept.tokens, self.kept.scores
            nothing = scores.new_full((*tokens.shape[:-1], self.vocab), -torch.inf)
            self._scores = nothing.scatter_(-1, tokens, scores)
        return self._scores


class BlockProcessor:
    """Applies logits processors to the scores of a block, in their order.

    A processor of another type than the above is taken to depend on the prefix: it runs once for each row and
    position, on exactly that row's tokens before that position, without padding. It also runs for positions that turn
    out to lie behind a rejection, so a processor that keeps state sees more calls than there are tokens.

    Args:
        processors (iterable of `LogitsProcessor`): The processors.
    """

    def __init__(self, processors: Iterable[LogitsProcessor]):
        self.processors = fused(list(processors))
        self._eos = {id(p): p.eos_token_id.flatten().tolist() for p in self.processors if type(p) in MINIMUM_LENGTH}

    @property
    def reads_prefix(self) -> bool:
        """Whether `Sequences.write` must have been called with the block's tokens before scores are processed."""
        return any(type(processor) not in PREFIX_FREE + MINIMUM_LENGTH for processor in self.processors)

    def without_user_defined(self) -> BlockProcessor:
        """The processors that a draft follows too: those of transformers.

        A user's own processor may keep state, which the draft's calls would confuse. What the draft proposes against
        it is rejected, so this costs acceptance, not correctness.
        """
        # Not by this package's name: in a repository on the Hub its modules have another.
        known = [
            p
            for p in self.processors
            if isinstance(p, Truncation) or type(p).__module__.partition(".")[0] == "transformers"
        ]
        return BlockProcessor(known)

    def __call__(self, scores: Tensor, sequences: Sequences, first: int = 0) -> Processed:
        """Processes a block.

        Args:
            scores (`torch.Tensor` of shape `[batch, block, vocab]`): Logits in float32. May be overwritten.
            sequences ([`Sequences`]): The rows, with the drafted tokens written behind them.
            first (`int`, *optional*, defaults to 0): How many written tokens precede the block's first position.

        Returns:
            [`Processed`]: The processed scores.
        """
        processed = Processed(scores)
        for processor in self.processors:
            kept = processor.truncate(processed.scores) if isinstance(processor, Truncation) else None
            if kept is not None:
                processed = Processed(None, kept, processed.vocab)
                continue
            scores = self._apply(processor, processed.scores, sequences, first)
            # What is left stays known as long as the later processors bring nothing back.
            if processed.kept is not None and type(processor) in EXCLUDE_ONLY:
                tokens = processed.kept.tokens
                kept = Kept(tokens, scores.gather(-1, tokens))
            processed = Processed(scores, kept)
        return processed

    def on_demand(self, scores: Tensor, sequences: Sequences, most: int) -> KeptOnDemand | None:
        """The same for who looks at few of the positions: each is truncated when it is asked for.

        Args:
            scores, sequences: See `__call__`.
            most (`int`): Numbers that may be left of the block.

        Returns:
            [`KeptOnDemand`]; `None` where more may be left, or where truncation is not the last of the processors.
        """
        truncation = self.processors[-1] if self.processors else None
        if not isinstance(truncation, Truncation) or not truncation.can_list(scores):
            return None
        if scores.shape[:-1].numel() * truncation.most > most:
            return None
        for processor in self.processors[:-1]:
            scores = self._apply(processor, scores, sequences, 0)
        return KeptOnDemand(truncation, scores)

    def _apply(self, processor: LogitsProcessor, scores: Tensor, sequences: Sequences, first: int) -> Tensor:
        batch, block, vocab = scores.shape
        if type(processor) in PREFIX_FREE:
            return processor(None, scores.reshape(batch * block, vocab)).view(batch, block, vocab)
        if type(processor) in MINIMUM_LENGTH:
            exclude_eos(processor, self._eos[id(processor)], scores, sequences, first)
            return scores
        for position in range(block):
            written = first + position
            if sequences.uniform:
                prefixes = sequences.ids[:, : sequences.ends[0] + written]
                scores[:, position] = self._for_all(processor, sequences)(prefixes, scores[:, position])
                continue
            for row in range(batch):
                if type(processor) in LENGTH_ONLY:
                    prefix = sequences.padded_prefix(row, written)
                else:
                    prefix = sequences.prefix(row, written)
                one = _compat.processor_of_rows(
                    processor, [sequences.rows[row]], sequences.prompt(row), sequences.width
                )
                scores[row : row + 1, position] = one(prefix, scores[row : row + 1, position])
        return scores

    @staticmethod
    def _for_all(processor: LogitsProcessor, sequences: Sequences) -> LogitsProcessor:
        """The processor for all remaining rows at once, some of which may have left the batch."""
        width = sequences.width
        return _compat.processor_of_rows(processor, sequences.rows, sequences.ids[:, :width], width)


def exclude_eos(
    processor: LogitsProcessor, eos_token_ids: list[int], scores: Tensor, sequences: Sequences, first: int
) -> None:
    """Sets the EOS scores of a block to `-inf` where a row is shorter than a minimum length, in place.

    Args:
        processor: One of `MINIMUM_LENGTH`.
        eos_token_ids (`list[int]`): Its EOS tokens, on the host.
        scores (`torch.Tensor` of shape `[batch, block, vocab]`): Scores.
        sequences ([`Sequences`]): The rows.
        first (`int`): How many tokens behind the rows precede the block's first position.
    """
    if isinstance(processor, hf.MinLengthLogitsProcessor):
        shortest = processor.min_length
    else:
        shortest = processor.prompt_length_to_skip + processor.min_new_tokens
    known = [token for token in eos_token_ids if token < scores.shape[-1]]
    for row, end in enumerate(sequences.ends):
        for token in known if end + first < shortest else ():
            scores[row, : shortest - end - first, token] = -torch.inf


def to_vocabulary(logits: Tensor, size: int) -> Tensor:
    """Logits over the verifier's vocabulary, where the draft's is padded to another size.

    Args:
        logits (`torch.Tensor` of shape `[..., draft_vocab]`): The draft's logits.
        size (`int`): The verifier's vocabulary size.

    Returns:
        `torch.Tensor` of shape `[..., size]`: Tokens that the verifier lacks are left out, tokens that the draft lacks
        have `-inf`.
    """
    if logits.shape[-1] == size:
        return logits
    if logits.shape[-1] > size:
        return logits[..., :size]
    return torch.nn.functional.pad(logits, (0, size - logits.shape[-1]), value=-torch.inf)
