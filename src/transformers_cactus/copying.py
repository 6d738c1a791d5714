"""A draft model that also copies: its distribution mixed with what followed the same words before.

Where a text repeats itself, as code, lists and summaries do, what followed the last occurrence of an n-gram is a
better guess than a small model's. So the draft proposes the copied token with the probability with which such copies
are right, and what its model says otherwise. That mixture is the draft's distribution `p`, and all that acceptance
needs to know: no rule has to be told.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cached_property

import torch
from torch import Tensor

from .ngrams import NgramIndex
from .processing import Processed
from .sequences import Sequences
from .transfer import on_device, padded_rows
from .truncation import Kept

SMALLEST, LARGEST = 2, 4
"""Tokens of the n-grams that are looked up, where the call does not name a longest."""

HIT_RATES = {2: 0.45, 3: 0.6}
"""By n-gram size, about the copied token's probability under the verifier: see `python -m benchmarks.copying`."""

HIT_RATE_OF_LONGER = 0.75


class Copies:
    """What the block of each row would copy.

    Args:
        tokens (`list[list[int]]`): The copied tokens of each row.
        weights (`list[list[float]]`): Their shares of the draft's distribution.
        device (`torch.device`): Where the scores are.
    """

    def __init__(self, tokens: list[list[int]], weights: list[list[float]], device: torch.device):
        self.tokens = padded_rows(tokens)
        self.weights = padded_rows(weights)
        self.device = device
        self._drafted: list[Tensor] = []
        self._known = 0
        self._follows: Tensor | bool = True
        """Which rows drafted what they would copy, `[batch, 1]`, as far as the first `_known` tokens tell."""

    @cached_property
    def _on_device(self) -> tuple[Tensor, Tensor]:
        return on_device(self.tokens, self.device), on_device(self.weights, self.device, torch.float32)

    def mixed(self, processed: Processed, position: int) -> Processed:
        """The scores of one position with its copied token mixed in.

        Args:
            processed ([`Processed`] of shape `[batch, 1, vocab]`): The draft model's.
            position (`int`): Within the block.
        """
        if position >= len(self.tokens[0]):
            return processed
        if processed.kept is not None:
            return Processed(None, self._mixed_few(processed.kept, position), processed.vocab)
        tokens, weights = self._on_device
        for drafted in self._drafted[self._known :]:
            self._follows = (drafted == tokens[:, self._known, None]) & self._follows
            self._known += 1
        shares = weights[:, position, None] * self._follows
        return Processed(_raised(processed.scores, tokens[:, position, None, None], shares[..., None]))

    def _mixed_few(self, kept: Kept, position: int) -> Kept:
        drafted = [tokens[:, 0].tolist() for tokens in self._drafted]
        token_rows, score_rows = [], []
        for row, (tokens, scores) in enumerate(zip(kept.token_rows, kept.score_rows, strict=True)):
            follows = all(own[row] == copied for own, copied in zip(drafted, self.tokens[row], strict=False))
            share = self.weights[row][position] if follows else 0.0
            if share:
                tokens, scores = _with_share(tokens, scores, self.tokens[row][position], share)
            token_rows.append(tokens)
            score_rows.append(scores)
        return Kept(token_rows, score_rows, kept.shape)

    def drafted(self, tokens: Tensor) -> None:
        """Hears what was drafted: a row that departs from what it would copy copies no more in this block.

        Args:
            tokens (`torch.LongTensor` of shape `[batch, 1]`): The drafted tokens.
        """
        if len(self._drafted) < len(self.tokens[0]):
            self._drafted.append(tokens)


class Copier:
    """Finds what rows would copy.

    Args:
        most (`int`): Tokens copied in a block, at most.
        largest (`int`, *optional*): Tokens of the longest n-gram that is looked up.
        eos_token_ids (iterable of `int`): Never copied.
    """

    def __init__(self, most: int, largest: int | None = None, eos_token_ids: Sequence[int] = ()):
        largest = LARGEST if largest is None else largest
        self.most = most
        self.index = NgramIndex(largest, SMALLEST, eos_token_ids)

    def find(self, sequences: Sequences, count: int) -> Copies | None:
        """What the rows would copy in a block of at most `count` tokens; `None` where no row has anything."""
        rows, weights = [], []
        for row, tokens in zip(sequences.rows, sequences.tokens, strict=True):
            found, size = self.index.following(row, tokens, min(count, self.most))
            rows.append(found)
            # Behind each copied token that is drafted the n-gram is longer by one.
            weights.append([HIT_RATES.get(size + behind, HIT_RATE_OF_LONGER) for behind in range(len(found))])
        if not any(rows):
            return None
        return Copies(rows, weights, sequences.last.device)


def _with_share(tokens: list[int], scores: list[float], copied: int, share: float) -> tuple[list[int], list[float]]:
    """[`_raised`] of a row of few tokens, among which the copied one may have to be put."""
    highest = max(scores)
    total = highest + math.log(sum(math.exp(score - highest) for score in scores))
    mixed = [score - total + math.log1p(-share) for score in scores]
    # The last place is always free: that of the largest score behind the k and their ties.
    place = tokens.index(copied) if copied in tokens else len(tokens) - 1
    mixed[place] = math.log(math.exp(mixed[place]) + share)
    return [*tokens[:place], copied, *tokens[place + 1 :]], mixed


def _raised(scores: Tensor, places: Tensor, weights: Tensor) -> Tensor:
    """Log-probabilities of a mixture: of a row's distribution, and of the certainty of one place in it.

    Args:
        scores (`torch.Tensor` of shape `[batch, 1, n]`): Log-probabilities up to a constant.
        places (`torch.LongTensor` of shape `[batch, 1, 1]`): The places.
        weights (`torch.Tensor` of shape `[batch, 1, 1]`): Shares of the places.
    """
    mixed = scores.log_softmax(-1) + torch.log1p(-weights)
    return mixed.scatter(-1, places, torch.logaddexp(mixed.gather(-1, places), weights.log()))
