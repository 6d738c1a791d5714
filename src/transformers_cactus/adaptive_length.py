"""The schedule `"adaptive"`: as many drafted tokens as pay, by what the last rounds took and brought."""

from __future__ import annotations

import statistics
import weakref
from collections import defaultdict, deque
from collections.abc import Sequence
from copy import deepcopy
from typing import Any

from .block_length import BlockLength

FIRST_LENGTHS = (4, 0, 2, 0, 6, 1)
"""Block lengths of the first rounds with a pair of models, which show what a drafted token costs."""

REMEMBERED = 15
"""Rounds of one block length whose times count."""

FORGETTING = 0.97
"""What an observed acceptance counts for after another one: about the last 30 matter."""

FORGETTING_IN_A_PAUSE = 0.3
"""The same when drafting is tried again after a pause."""

PLAIN_EVERY = 100
"""While drafting pays: rounds after which one without a draft shows again what that takes."""

TRY_AFTER = (16, 256)
"""While drafting does not pay: rounds until it is tried again, at first and at the most; doubled each time."""

EDGES = (0.1, 0.3, 0.5, 0.7, 0.85, 0.95, 0.99)
"""Draft probabilities between which a token's acceptance is told apart."""


class Rate:
    """A running estimate of a probability: recent observations count more, and the first few have company.

    Args:
        prior (`float`): Estimate before anything was seen, worth two observations.
    """

    def __init__(self, prior: float):
        self.seen, self.true = 2.0, 2.0 * prior

    def add(self, outcome: bool) -> None:
        """Adds an observation."""
        self.fade(FORGETTING)
        self.seen += 1
        self.true += outcome

    def fade(self, factor: float) -> None:
        """Lets what was seen count for less."""
        self.seen *= factor
        self.true *= factor

    @property
    def value(self) -> float:
        """The estimate."""
        return self.true / self.seen


class RoundTimes:
    """What rounds take by block length: medians of what was measured, and a line through them for lengths above 0.

    A round without a draft is a case of its own: a verifier's forward may take one token at another price than two.
    """

    def __init__(self) -> None:
        self._seconds: dict[int, deque[float]] = defaultdict(lambda: deque(maxlen=REMEMBERED))
        self._line: tuple[float, float] | None = None

    def add(self, length: int, seconds: float) -> None:
        """Adds a round."""
        self._seconds[length].append(seconds)
        self._line = None

    def __contains__(self, length: int) -> bool:
        return length in self._seconds

    @property
    def knows_drafting(self) -> bool:
        """Whether a round with a draft has been timed, without which there is no line."""
        return any(self._seconds)

    def line(self) -> tuple[float, float]:
        """Seconds of a round as `(start, step)`: `start + step * length` for every length above 0."""
        if self._line is None:
            self._line = self._fitted()
        return self._line

    def of(self, length: int) -> float:
        """Seconds of a round."""
        if length == 0 and 0 in self:
            return statistics.median(self._seconds[0])
        start, step = self.line()
        return start + step * length

    def _fitted(self) -> tuple[float, float]:
        points = [(length, statistics.median(seen), len(seen)) for length, seen in self._seconds.items() if length]
        total = sum(weight for *_, weight in points)
        mean_length = sum(length * weight for length, _, weight in points) / total
        mean_time = sum(time * weight for _, time, weight in points) / total
        spread = sum(weight * (length - mean_length) ** 2 for length, _, weight in points)
        if spread == 0:
            # One length says nothing about another. A tenth is a cheap draft.
            step = mean_time / (mean_length + 10)
        else:
            slope = sum(w * (length - mean_length) * (time - mean_time) for length, time, w in points) / spread
            step = max(slope, 0.0)
        return max(mean_time - step * mean_length, 0.0), step


class Experience:
    """What is known of a pair of models: acceptance by position and by the draft's probability, and times by batch."""

    def __init__(self) -> None:
        self.rounds = 0
        self.by_position: list[Rate] = []
        self.by_probability = [Rate((low + high) / 2) for low, high in zip((0, *EDGES), (*EDGES, 1), strict=True)]
        self.any = Rate(0.6)
        self.times: dict[int, RoundTimes] = {}
        # Where drafting does not pay: rounds until it is tried again, and from then until the next time. A new call
        # does not begin with a try, for which its draft would have to read the prompt.
        self.patience = self.pause = TRY_AFTER[0]

    def at_position(self, position: int) -> float:
        """Probability that a drafted token is accepted once those before it are."""
        return self.by_position[position].value if position < len(self.by_position) else self.any.value

    def at_probability(self, probability: float) -> float:
        """The same for a token of some probability under the draft."""
        return self.by_probability[sum(probability >= edge for edge in EDGES)].value

    def add(self, accepted: int, drafted: int, probabilities: Sequence[float]) -> None:
        """Adds a row's round."""
        # What lies behind a rejected token was not judged.
        for position in range(min(accepted + 1, drafted)):
            outcome = position < accepted
            if position == len(self.by_position):
                self.by_position.append(Rate(self.any.value))
            self.by_position[position].add(outcome)
            self.any.add(outcome)
            # Of a full block's last token nobody asked.
            if position < len(probabilities):
                self.by_probability[sum(probabilities[position] >= edge for edge in EDGES)].add(outcome)

    def fade(self) -> None:
        """Lets acceptance count for little that was seen long ago."""
        for rate in (*self.by_position, *self.by_probability, self.any):
            rate.fade(FORGETTING_IN_A_PAUSE)

    def times_of(self, rows: int) -> RoundTimes:
        """Times of a batch size; those of the nearest known one to begin with."""
        if rows not in self.times:
            nearest = min(self.times, key=lambda known: abs(known - rows), default=None)
            self.times[rows] = RoundTimes() if nearest is None else deepcopy(self.times[nearest])
        return self.times[rows]


class AdaptiveLength(BlockLength):
    """As many drafted tokens as bring the most tokens per second.

    Before a round, the length `m` that maximises `(1 + s_1 + ... + s_m) / T(m)`: `s_j` is the estimated probability
    that the first `j` drafted tokens are all accepted, `T(m)` what a round of that length took lately. 0 where
    drafting does not pay: then it is tried again now and then. During a round, where the draft's probabilities are on
    the host anyway, drafting stops at the first token from which on another one brings less than the time it takes
    would bring elsewhere.

    What a round decides about its length uses earlier rounds, the clock, and tokens that are drafted already; the
    token that made it stop is still verified. So given what came before, a drafted position is sampled and judged as
    with any other length, and lossless rules stay lossless. A seed alone no longer fixes the text: the clock has a
    part in how many random numbers a round draws, and for relaxed rules also in which positions are drafted, and so
    have their law, and which come from the verifier.

    Args:
        longest (`int`): `num_assistant_tokens`: the longest block.
        rows (`int`): Sequences in the batch.
        experience ([`Experience`]): What is known of the models; learns from every round.
        reads_probabilities (`bool`): Whether to stop within a round.
    """

    def __init__(self, longest: int, rows: int, experience: Experience, *, reads_probabilities: bool):
        super().__init__(longest, rows)
        self.experience = experience
        self._reads = reads_probabilities
        self._probabilities: list[list[float]] = []
        self._trying = 0
        self._since_plain = 0
        self._last: int | None = None
        self._unusual = True
        self._speed = 0.0

    @property
    def reads_probabilities(self) -> bool:
        """See [`BlockLength.reads_probabilities`]."""
        return self._reads

    def next(self) -> list[int]:
        """See [`BlockLength.next`]."""
        length = min(self._wanted(), self.longest)
        # The first round feeds the prompts, and the one after a pause what the draft has missed.
        self._unusual = self._last is None or (self._last == 0 and length > 0)
        self.lengths = [length] * len(self.lengths)
        return self.lengths

    def goes_on(self, probabilities: Sequence[Sequence[float]]) -> bool:
        """See [`BlockLength.goes_on`]."""
        self._probabilities = [list(rows) for rows in probabilities]
        if self._learning:
            return True
        _, step = self._times.line()
        surviving = 0.0
        for row in zip(*probabilities, strict=True):
            survival = self.experience.any.value
            for probability in row:
                survival *= self.experience.at_probability(probability)
            surviving += survival
        return surviving > step * self._speed

    def update(self, drafted: Sequence[int], accepted: Sequence[int], seconds: float) -> None:
        """See [`BlockLength.update`]."""
        experience, length = self.experience, max(drafted)
        for row, (own, count) in enumerate(zip(drafted, accepted, strict=True)):
            experience.add(count, own, [step[row] for step in self._probabilities])
        if not self._unusual:
            self._times.add(length, seconds)
            experience.rounds += 1
        self._since_plain = self._since_plain + 1 if length else 0
        self._probabilities = []
        self._last = length

    def keep(self, kept: Sequence[int]) -> None:
        """See [`BlockLength.keep`]."""
        super().keep(kept)
        self._last = None

    @property
    def _times(self) -> RoundTimes:
        return self.experience.times_of(len(self.lengths))

    @property
    def _learning(self) -> bool:
        return self.experience.rounds < len(FIRST_LENGTHS) or not self._times.knows_drafting

    def _wanted(self) -> int:
        times = self._times
        if self._learning:
            # Texts may be too short for the lengths that were asked for.
            return FIRST_LENGTHS[self.experience.rounds % len(FIRST_LENGTHS)]
        best, self._speed = self._best()
        if best == 0:
            return self._retried()
        self.experience.pause = self.experience.patience = TRY_AFTER[0]
        self._trying = 0
        if self._since_plain >= PLAIN_EVERY or 0 not in times:
            return 0
        return self.longest if self._reads else best

    def _best(self) -> tuple[int, float]:
        """The best length, and its expected tokens per second."""
        times, rows = self._times, len(self.lengths)
        found = (0, rows / times.of(0))
        expected = survival = 1.0
        before = 0.0
        for length in range(1, self.longest + 1):
            survival *= self.experience.at_position(length - 1)
            expected += survival
            speed = rows * expected / times.of(length)
            if speed > found[1]:
                found = length, speed
            if speed < before:
                # Each further token brings less and costs the same: from here on it only gets worse.
                break
            before = speed
        return found

    def _retried(self) -> int:
        """0, or now and then a short draft for two rounds, the first of which is not timed."""
        if self._trying:
            self._trying -= 1
            return min(2, self.longest)
        experience = self.experience
        experience.pause -= 1
        if experience.pause > 0:
            return 0
        experience.fade()
        experience.patience = experience.pause = min(2 * experience.patience, TRY_AFTER[1])
        self._trying = 1
        return min(2, self.longest)


_known: weakref.WeakKeyDictionary[Any, weakref.WeakKeyDictionary[Any, dict[str, Experience]]]
_known = weakref.WeakKeyDictionary()


def experience_of(verifier: Any, draft: Any, how: str = "") -> Experience:
    """What earlier calls have learned about two models: a copy, for a call that may run beside others.

    Args:
        verifier, draft (`PreTrainedModel`): The models.
        how (`str`, *optional*): What else acceptance depends on, such as the rule: each has an experience of its own.
    """
    return deepcopy(_known.get(verifier, {}).get(draft, {}).get(how)) or Experience()


def remember(verifier: Any, draft: Any, experience: Experience, how: str = "") -> None:
    """Keeps what a call has learned for later ones; arguments as in `experience_of`."""
    _known.setdefault(verifier, weakref.WeakKeyDictionary()).setdefault(draft, {})[how] = experience
