"""Where n-grams of growing rows occurred last."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple


class Occurrence(NamedTuple):
    """An earlier occurrence of a row's last tokens."""

    end: int
    """The place behind it."""
    size: int
    """Tokens of the n-gram."""


class NgramIndex:
    """Finds the latest occurrence of a row's longest final n-gram that occurred before.

    It grows with the rows, so that a round costs no search.

    Args:
        largest (`int`): Tokens of the longest n-gram.
        smallest (`int`, *optional*, defaults to 1): Tokens of the shortest.
        stops (iterable of `int`): Tokens before which what follows an occurrence ends.
    """

    def __init__(self, largest: int, smallest: int = 1, stops: Sequence[int] = ()):
        self.largest = largest
        self.smallest = smallest
        self.stops = frozenset(stops)
        self._places: dict[int, dict[tuple[int, ...], int]] = {}
        self._indexed: dict[int, int] = {}

    def following(self, row: int, tokens: list[int], count: int) -> tuple[list[int], int]:
        """What followed the last time.

        Args:
            row (`int`): The row's number, by which its index is kept.
            tokens (`list[int]`): All its tokens; they only grow from call to call.
            count (`int`): How many to return at most.

        Returns:
            `(list[int], int)`: The tokens, none where there is no such n-gram, and how long the n-gram was.
        """
        found = self._occurrence(row, tokens)
        if found is None:
            return [], 0
        after = tokens[found.end : found.end + count]
        ends = [place for place, token in enumerate(after) if token in self.stops]
        return (after[: ends[0]] if ends else after), found.size

    def _occurrence(self, row: int, tokens: list[int]) -> Occurrence | None:
        places = self._places.setdefault(row, {})
        # An n-gram enters the index once a token follows it, with that token's place.
        for end in range(max(self._indexed.get(row, 1), 1), len(tokens)):
            for size in range(self.smallest, min(self.largest, end) + 1):
                places[tuple(tokens[end - size : end])] = end
        self._indexed[row] = len(tokens)
        for size in range(min(self.largest, len(tokens) - 1), self.smallest - 1, -1):
            place = places.get(tuple(tokens[-size:]))
            if place is not None:
                return Occurrence(place, size)
        return None
