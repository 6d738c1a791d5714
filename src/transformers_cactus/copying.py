"""A draft model that also copies: its distribution mixed with what followed the same words before.

Where a text repeats itself, as code, lists and summaries do, what followed the last occurrence of an n-gram is a
better guess than a small model's. So the draft proposes the copied token with the probability with which such copies
are right, and what its model says otherwise. That mixture is the draft's distribution `p`, and all that acceptance
needs to know: no rule has to be told.
"""

from __future__ import annotations

from collections.abc import Sequence

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
        tokens (`torch.LongTensor` of shape `[batch, block]`): The copied tokens; any where there is none.
        weights (`torch.Tensor` of shape `[batch, block]`): Their shares of the draft's distribution; 0 for none.
    """

    def __init__(self, tokens: Tensor, weights: Tensor):
        self.tokens = tokens
        self.weights = weights
        self._follows: Tensor | None = None

    def mixed(self, processed: Processed, position: int) -> Processed:
        """The scores of one position with its copied token mixed in.

        Args:
            processed ([`Processed`] of shape `[batch, 1, vocab]`): The draft model's.
            position (`int`): Within the block.
        """
        if position >= self.tokens.shape[1]:
            return processed
        tokens, weights = self.tokens[:, position, None, None], self.weights[:, position, None, None]
        if self._follows is not None:
            weights = weights * self._follows[:, :, None]
        if processed.kept is None:
            return Processed(_raised(processed.scores, tokens, weights))
        kept, scores = processed.kept.tokens, processed.kept.scores
        absent = (kept != tokens).all(-1, keepdim=True)
        # The last place is always free: that of the largest score behind the k and their ties.
        kept = torch.cat([kept[..., :-1], torch.where(absent, tokens, kept[..., -1:])], dim=-1)
        place = (kept == tokens).long().argmax(-1, keepdim=True)
        return Processed(None, Kept(kept, _raised(scores, place, weights)), processed.vocab)

    def drafted(self, tokens: Tensor, position: int) -> None:
        """Hears what was drafted: a row that departs from what it would copy copies no more in this block.

        Args:
            tokens (`torch.LongTensor` of shape `[batch, 1]`): The drafted tokens.
            position (`int`): Within the block.
        """
        if position < self.tokens.shape[1]:
            same = tokens == self.tokens[:, position, None]
            self._follows = same if self._follows is None else self._follows & same


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
        device = sequences.last.device
        shares = on_device(padded_rows(weights), device, torch.float32)
        return Copies(on_device(padded_rows(rows), device), shares)


def _raised(scores: Tensor, places: Tensor, weights: Tensor) -> Tensor:
    """Log-probabilities of a mixture: of a row's distribution, and of the certainty of one place in it.

    Args:
        scores (`torch.Tensor` of shape `[batch, 1, n]`): Log-probabilities up to a constant.
        places (`torch.LongTensor` of shape `[batch, 1, 1]`): The places.
        weights (`torch.Tensor` of shape `[batch, 1, 1]`): Shares of the places.
    """
    mixed = scores.log_softmax(-1) + torch.log1p(-weights)
    return mixed.scatter(-1, places, torch.logaddexp(mixed.gather(-1, places), weights.log()))
