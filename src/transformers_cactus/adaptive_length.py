"""The schedule `"adaptive"`: as many drafted tokens as pay, by what the last rounds took and brought."""

from __future__ import annotations

from collections.abc import Sequence

from .block_length import BlockLength
from .experience import Experience
from .round_times import RoundTimes

FIRST_LENGTHS = (0, 4, 2, 6, 1, 0)
"""Block lengths of the first rounds with a pair of models, which show what a drafted token costs."""

PLAIN_EVERY = 200
"""While drafting pays: rounds after which one without a draft shows again what that takes."""


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
        # A call's first round reads the prompt, which no draft is to blame for.
        if self._last is not None and 0 in self._times:
            brought = 1 + sum(accepted) / len(accepted)
            experience.account(length, brought, seconds, self._times.of(0))
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
        if not self._times.knows_drafting:
            return True
        return self.experience.rounds < len(FIRST_LENGTHS) and not self._times.hopeless

    def _wanted(self) -> int:
        times, experience, first = self._times, self.experience, self._last is None
        if self._learning:
            # Without a draft at first: then what its reading of the prompt takes shows in the next round. Texts may be
            # too short for the lengths that were asked for.
            return 0 if first else FIRST_LENGTHS[experience.rounds % len(FIRST_LENGTHS)]
        best, self._speed = self._best()
        if best == 0:
            return self._tried(first)
        experience.pays()
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

    def _tried(self, first: bool) -> int:
        """0, or now and then a short draft for two rounds, the first of which is not timed."""
        if self._trying:
            self._trying -= 1
        elif first or not self.experience.tries_again():
            return 0
        else:
            self._trying = 1
        return min(2, self.longest)
