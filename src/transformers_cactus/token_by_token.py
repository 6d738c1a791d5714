"""Drafting token by token: what a draft model and a feature draft have in common."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from .copying import Copier
from .drafting import Block, Drafter
from .processing import BlockProcessor, Processed, to_vocabulary
from .sequences import Sequences
from .truncation import Kept
from .uniforms import Uniforms
from .verification import FEW, sample, sample_row


class TokenByTokenDrafter(Drafter):
    """Samples each token of a block from scores that depend on those before it.

    Args:
        processor ([`BlockProcessor`]): The call's logits processors: the draft is warped once, as the verifier is, and
            its scores are kept as its tokens were sampled from them.
        vocab_size (`int`): The verifier's. Tokens beyond it are never drafted.
        uniforms ([`Uniforms`] or `None`): Random numbers to sample with; `None` to take the most probable token.
        confidence_threshold (`float`): A row's block ends behind a token whose probability was below it. 0 for never.
            Costs a host synchronisation per drafted token.
        goes_on (callable, *optional*): [`BlockLength.goes_on`], asked after each drafted token but the last. Costs the
            same.
        copier ([`Copier`], *optional*): Mixes in what the rows would copy from themselves.
    """

    def __init__(
        self,
        processor: BlockProcessor,
        vocab_size: int,
        *,
        uniforms: Uniforms | None,
        confidence_threshold: float = 0.0,
        goes_on: Callable[[Sequence[Sequence[float]]], bool] | None = None,
        copier: Copier | None = None,
    ):
        self.processor = processor
        self.vocab_size = vocab_size
        self.uniforms = uniforms
        self.confidence_threshold = confidence_threshold
        self.goes_on = goes_on
        self.copier = copier
        self._fed = 0

    @abstractmethod
    def _first_logits(self, sequences: Sequences) -> Tensor:
        """Feeds what the draft has not seen of each row; the logits behind its last token, `[batch, 1, vocab]`."""

    @abstractmethod
    def _next_logits(self, tokens: Tensor) -> Tensor:
        """Feeds the tokens just drafted, `[batch, 1]`; the logits behind them, `[batch, 1, vocab]`."""

    def propose(self, sequences: Sequences, count: int) -> Block:
        """See [`Drafter.propose`]."""
        device, batch = sequences.last.device, sequences.batch_size
        tokens: list[Tensor] = []
        scores: list[Processed] = []
        lengths = [count] * batch
        probabilities: list[list[float]] = []
        self._fed = 0
        copies = None if self.copier is None else self.copier.find(sequences, count)
        logits = self._first_logits(sequences)
        for step in range(count):
            logits = to_vocabulary(logits, self.vocab_size).to(device, torch.float32)
            processed = self.processor(logits, sequences, first=step)
            if copies is not None:
                processed = copies.mixed(processed, step)
            tokens.append(_choose(processed, self.uniforms))
            if copies is not None:
                copies.drafted(tokens[-1])
            scores.append(processed)
            if step + 1 < count and (self.confidence_threshold > 0 or self.goes_on is not None):
                probabilities.append(_probabilities(processed, tokens[-1]))
                for row, probability in enumerate(probabilities[-1]):
                    if probability < self.confidence_threshold:
                        lengths[row] = min(lengths[row], step + 1)
                if max(lengths) == step + 1 or not (self.goes_on is None or self.goes_on(probabilities)):
                    break
            if step + 1 < count:
                if self.processor.reads_prefix:
                    sequences.write(torch.cat(tokens, dim=1))
                logits = self._next_logits(tokens[-1])
                self._fed += 1
        lengths = [min(length, len(tokens)) for length in lengths]
        return Block(torch.cat(tokens, dim=1), Processed.joined(scores) if self.uniforms else None, lengths)


def _choose(processed: Processed, uniforms: Uniforms | None) -> Tensor:
    """The next token of each row, `[batch, 1]`: sampled, or without random numbers the most probable one."""
    if uniforms is None:
        return processed.scores.argmax(-1)
    if processed.kept is None:
        probs = processed.scores[:, 0].softmax(-1)
        return sample(probs, torch.rand(len(probs), device=probs.device))[:, None]
    kept = processed.kept
    if not _is_few(kept):
        probs = kept.scores[:, 0].softmax(-1)
        return kept.tokens[:, 0].gather(-1, sample(probs, torch.rand(len(probs), device=probs.device))[:, None])
    rows = zip(kept.token_rows, kept.weight_rows, uniforms.take(kept.shape[0]), strict=True)
    return torch.tensor([[tokens[sample_row(weights, uniform)]] for tokens, weights, uniform in rows])


def _probabilities(processed: Processed, tokens: Tensor) -> list[float]:
    """The probability of each row's token."""
    if processed.kept is None:
        found: list[float] = processed.scores[:, 0].softmax(-1).gather(-1, tokens)[:, 0].tolist()
        return found
    rows = zip(processed.kept.token_rows, processed.kept.weight_rows, tokens[:, 0].tolist(), strict=True)
    return [weights[kept.index(token)] / sum(weights) for kept, weights, token in rows]


def _is_few(kept: Kept) -> bool:
    return kept.device.type == "cpu" and math.prod(kept.shape) <= FEW
