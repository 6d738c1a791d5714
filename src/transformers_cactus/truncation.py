"""Top-k, and a top-p behind it, without sorting the vocabulary: and a list of the few tokens that are left.

transformers' warpers make several passes over every row, and top-p sorts it; on a CPU that takes longer than the rest
of a round outside the models. Behind top-k only k tokens are left, and what comes later has to look at those only.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor
from transformers import LogitsProcessor, TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from .largest import largest

TIES = 8
"""Tokens looked at beyond the k-th, so that tokens tied with it are kept, as top-k keeps them."""

Left = tuple[list[float], list[float]]
"""Scores and weights of the tokens that truncation has left of a row."""


class Kept:
    """The few tokens of each position that truncation may have left; all others have the score `-inf`.

    Tokens and scores are each given as a tensor, or as Python numbers in a list for each position, and become the
    other when that is asked for.

    Args:
        tokens (`torch.LongTensor` of shape `[..., kept]` or `list[list[int]]`): Different tokens.
        scores (`torch.Tensor` of shape `[..., kept]` or `list[list[float]]`): Their scores, in float32; `-inf` for
            some that are cut off too.
        shape (sequence of `int`, *optional*): `[..., kept]`, where the tokens are given as Python numbers.
    """

    def __init__(
        self, tokens: Tensor | list[list[int]], scores: Tensor | list[list[float]], shape: Sequence[int] | None = None
    ):
        self._tokens = tokens if isinstance(tokens, Tensor) else None
        self._scores = scores if isinstance(scores, Tensor) else None
        self._token_rows = None if isinstance(tokens, Tensor) else tokens
        self._score_rows = None if isinstance(scores, Tensor) else scores
        self._weight_rows: list[list[float]] | None = None
        self.device = torch.device("cpu") if self._tokens is None else self._tokens.device
        """Where the tensors are."""
        if shape is None:
            shape = self.tokens.shape
        self.shape = tuple(shape)
        """`[..., kept]`."""

    @classmethod
    def joined(cls, parts: Sequence[Kept]) -> Kept:
        """Blocks `[batch, block, kept]` of the same rows as one, one behind another."""
        if any(part._score_rows is None for part in parts):
            tokens = torch.cat([part.tokens for part in parts], dim=1)
            return cls(tokens, torch.cat([part.scores for part in parts], dim=1))
        batch, _, kept = parts[0].shape
        here = [
            (part, slice(row * part.shape[1], (row + 1) * part.shape[1])) for row in range(batch) for part in parts
        ]
        whole = cls(
            [row for part, rows in here for row in part.token_rows[rows]],
            [row for part, rows in here for row in part.score_rows[rows]],
            (batch, sum(part.shape[1] for part in parts), kept),
        )
        whole.weight_rows = [row for part, rows in here for row in part.weight_rows[rows]]
        return whole

    @property
    def tokens(self) -> Tensor:
        """The tokens, `[..., kept]`."""
        if self._tokens is None:
            self._tokens = torch.tensor(self._token_rows).view(self.shape)
        return self._tokens

    @property
    def scores(self) -> Tensor:
        """The scores, `[..., kept]`."""
        if self._scores is None:
            self._scores = torch.tensor(self._score_rows, dtype=torch.float32).view(self.shape)
        return self._scores

    @property
    def token_rows(self) -> list[list[int]]:
        """The tokens as Python numbers, a list for each position. Waits for the device."""
        if self._token_rows is None:
            self._token_rows = self.tokens.reshape(-1, self.shape[-1]).tolist()
        return self._token_rows

    @property
    def score_rows(self) -> list[list[float]]:
        """The scores as Python numbers, a list for each position. Waits for the device."""
        if self._score_rows is None:
            self._score_rows = self.scores.reshape(-1, self.shape[-1]).tolist()
        return self._score_rows

    @property
    def weight_rows(self) -> list[list[float]]:
        """Numbers proportional to the probabilities, a list for each position. Waits for the device."""
        if self._weight_rows is None:
            self._weight_rows = list(map(_weights, self.score_rows))
        return self._weight_rows

    @weight_rows.setter
    def weight_rows(self, weights: list[list[float]]) -> None:
        self._weight_rows = weights

    def at(self, place: int) -> tuple[list[int], list[float]]:
        """Tokens and weights of one position, counted over all leading dimensions. Waits for the device."""
        return self.token_rows[place], self.weight_rows[place]


class KeptOnDemand:
    """[`Kept`] of scores that are truncated where they are looked at, each position when it is asked for.

    Args:
        truncation ([`Truncation`]): What truncates them.
        scores (`torch.Tensor` of shape `[..., vocab]`): The scores, on a CPU.
    """

    def __init__(self, truncation: Truncation, scores: Tensor):
        self._truncation = truncation
        self._scores = scores.reshape(-1, scores.shape[-1])
        self._found: dict[int, tuple[list[int], list[float]]] = {}

    def at(self, place: int) -> tuple[list[int], list[float]]:
        """See [`Kept.at`]. Where the scores are no distribution the weights are NaN."""
        if place not in self._found:
            here = self._scores[place : place + 1]
            (tokens,), (left,) = self._truncation.rows(here)
            self._found[place] = self._warped(here) if left is None else (tokens[: len(left[1])], left[1])
        return self._found[place]

    def _warped(self, scores: Tensor) -> tuple[list[int], list[float]]:
        """By the warpers themselves."""
        warped = self._truncation(None, scores)[0]
        tokens = (warped != -torch.inf).nonzero()[:, 0]
        left = warped[tokens]
        if not len(left) or not bool(left.isfinite().all()):
            return [0], [math.nan]
        return tokens.tolist(), _weights(left.tolist())


def _weights(scores: Sequence[float]) -> list[float]:
    highest = max(scores)
    return [math.exp(score - highest) for score in scores]


class Truncation(LogitsProcessor):
    """Up to three warpers in one: the same tokens stay, with the same scores up to rounding.

    `truncate` finds them without the warpers, except where more than `TIES` tokens tie with the k-th, and on devices
    other than the CPU, on which that test would wait for the device and sorting is fast. Called as a processor, the
    warpers themselves run.

    Args:
        temperature (`TemperatureLogitsWarper` or `None`): Runs first.
        top_k (`TopKLogitsWarper`): Runs next.
        top_p (`TopPLogitsWarper` or `None`): Runs on what is left.
    """

    def __init__(
        self, temperature: TemperatureLogitsWarper | None, top_k: TopKLogitsWarper, top_p: TopPLogitsWarper | None
    ):
        self.temperature = temperature
        self.top_k = top_k
        self.top_p = top_p
        self.most = top_k.top_k + TIES
        """Tokens that are looked at in each row."""

    def __call__(self, input_ids: Tensor | None, scores: Tensor) -> Tensor:
        """Truncates rows.

        Args:
            input_ids: Not used.
            scores (`torch.Tensor` of shape `[rows, vocab]`): Scores.

        Returns:
            `torch.Tensor` of shape `[rows, vocab]`.
        """
        for warper in (self.temperature, self.top_k, self.top_p):
            scores = scores if warper is None else warper(None, scores)
        return scores

    def truncate(self, scores: Tensor) -> Kept | None:
        """Says which tokens are left, and with what scores.

        Args:
            scores (`torch.Tensor` of shape `[..., vocab]`): Scores.

        Returns:
            [`Kept`] of shape `[..., kept]`, in descending order of the scores; `None` where the warpers themselves
            have to run: where a row holds NaN or infinity, fewer than k tokens that are not `-inf`, too many that are
            tied, or is too short.
        """
        if not self.can_list(scores):
            return None
        tokens, rows = self.rows(scores.reshape(-1, scores.shape[-1]))
        known = [row for row in rows if row is not None]
        if len(known) < len(rows):
            return None
        cut = [self.most - len(left) for left, _ in known]
        kept = Kept(
            tokens,
            [left + [-math.inf] * places for (left, _), places in zip(known, cut, strict=True)],
            (*scores.shape[:-1], self.most),
        )
        kept.weight_rows = [weights + [0.0] * places for (_, weights), places in zip(known, cut, strict=True)]
        return kept

    def can_list(self, scores: Tensor) -> bool:
        """Whether `rows` may be asked."""
        return scores.device.type == "cpu" and self.most < scores.shape[-1]

    def rows(self, scores: Tensor) -> tuple[list[list[int]], list[Left | None]]:
        """The largest of each row, and what the warpers leave of them.

        Args:
            scores (`torch.Tensor` of shape `[rows, vocab]`): Scores.

        Returns:
            The tokens of each row in descending order of their scores, `most` of them. Of the first few, which are
            left: their scores after the warpers, and weights as in `Kept.weight_rows`; `None` as in `truncate`.
        """
        values, tokens = largest(scores, self.most)
        # So few numbers take less time in Python than one operation of PyTorch does.
        return tokens, [self._cut(row) for row in values]

    def _cut(self, values: list[float]) -> Left | None:
        count = self.top_k.top_k
        smallest = values[count - 1]
        if not (values[-1] < smallest and values[0] < math.inf):
            return None
        while values[count] == smallest:
            count += 1
        left = values[:count]
        if self.temperature is not None:
            temperature = self.temperature.temperature
            left = [value / temperature for value in left]
        weights = _weights(left)
        if self.top_p is not None:
            count = self._nucleus(weights)
        return left[:count], weights[:count]

    def _nucleus(self, weights: list[float]) -> int:
        """How many tokens of some descending weights top-p keeps."""
        assert self.top_p is not None
        # As top-p does it: from the least probable token on, while their sum is at most 1 - top_p.
        spare, count = (1 - self.top_p.top_p) * sum(weights), len(weights)
        while count > self.top_p.min_tokens_to_keep:
            spare -= weights[count - 1]
            if spare < 0:
                break
            count -= 1
        return count


def fused(processors: list[LogitsProcessor]) -> list[LogitsProcessor]:
    """The same processors, with each top-k and its neighbours that it can take along as one [`Truncation`]."""
    result: list[LogitsProcessor] = []
    for processor in processors:
        # Other fill values than the default's would show in the scores.
        plain = getattr(processor, "filter_value", None) == -float("inf")
        previous = result[-1] if result else None
        if type(processor) is TopKLogitsWarper and plain:
            before = result.pop() if type(previous) is TemperatureLogitsWarper else None
            processor = Truncation(before, processor, None)
        elif type(processor) is TopPLogitsWarper and plain and type(previous) is Truncation and previous.top_p is None:
            result.pop()
            processor = Truncation(previous.temperature, previous.top_k, processor)
        result.append(processor)
    return result
