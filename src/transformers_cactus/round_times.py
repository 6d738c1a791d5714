"""What rounds take by block length, as far as it was measured."""

from __future__ import annotations

import bisect
import itertools
import statistics
from collections import defaultdict, deque
from collections.abc import Iterable

REMEMBERED = 15
"""Rounds of one block length whose times count."""

TOLERANCE = 0.01
"""Share of a median that it has to move by for the line to be drawn anew."""


class RoundTimes:
    """Medians of what was measured, and a line through them for lengths above 0.

    A round without a draft is a case of its own: a verifier's forward may take one token at another price than two.
    The line is a weighted median of the slopes between every two lengths (Theil-Sen), so that a length that was seen
    once, while the machine was busy with something else, does not turn it.
    """

    def __init__(self) -> None:
        self._seconds: dict[int, deque[float]] = defaultdict(lambda: deque(maxlen=REMEMBERED))
        self._medians: dict[int, float] = {}
        self._line: tuple[float, float] | None = None

    def add(self, length: int, seconds: float) -> None:
        """Adds a round."""
        seen = self._seconds[length]
        known = len(seen) == REMEMBERED
        seen.append(seconds)
        # The lower one of two: what disturbs a round only makes it longer.
        median = statistics.median_low(seen)
        if known and abs(median - self._medians[length]) <= TOLERANCE * median:
            return
        self._medians[length], self._line = median, None

    def __contains__(self, length: int) -> bool:
        return length in self._seconds

    @property
    def knows_drafting(self) -> bool:
        """Whether a round with a draft has been timed, without which there is no line."""
        return any(self._seconds)

    @property
    def hopeless(self) -> bool:
        """Whether every block that was timed, of two lengths at least, took longer than all its tokens do alone."""
        alone = self._medians[0] if 0 in self else 0.0
        slow = [self._medians[m] >= (m + 1) * alone for m in self._seconds if m]
        return alone > 0 and len(slow) > 1 and all(slow)

    def line(self) -> tuple[float, float]:
        """Seconds of a round as `(start, step)`: `start + step * length` for every length above 0."""
        if self._line is None:
            self._line = self._fitted()
        return self._line

    def of(self, length: int) -> float:
        """Seconds of a round."""
        if length == 0 and 0 in self:
            return self._medians[0]
        start, step = self.line()
        return start + step * length

    def _fitted(self) -> tuple[float, float]:
        points = [(m, self._medians[m], len(seen)) for m, seen in self._seconds.items() if m]
        if len(points) == 1:
            ((length, seconds, _),) = points
            # One length says nothing about another: as if the verifier took a block as it takes a token, or, where
            # that is unknown too, as if the draft took a tenth.
            start = min(self._medians[0], seconds) if 0 in self else seconds / (1 + length / 10)
            return start, (seconds - start) / length
        slopes = [
            ((time - other) / (m - n), seen * known)
            for (m, time, seen), (n, other, known) in itertools.combinations(points, 2)
        ]
        step = max(_weighted_median(slopes), 0.0)
        return max(_weighted_median((time - step * m, seen) for m, time, seen in points), 0.0), step


def _weighted_median(values: Iterable[tuple[float, float]]) -> float:
    """The smallest value up to which at least half of the weight lies, of pairs of a value and its weight."""
    ordered = sorted(values)
    reached = list(itertools.accumulate(weight for _, weight in ordered))
    return ordered[bisect.bisect_left(reached, reached[-1] / 2)][0]
