"""How many tokens are drafted in a round: `num_assistant_tokens_schedule`."""

from __future__ import annotations

from collections.abc import Sequence


class BlockLength:
    """Always the same number, `num_assistant_tokens`: the schedule `"constant"`.

    Args:
        longest (`int`): `num_assistant_tokens`.
        rows (`int`): Sequences in the batch.
    """

    def __init__(self, longest: int, rows: int):
        self.longest = longest
        self.lengths = [longest] * rows

    def next(self) -> list[int]:
        """How many tokens each row wants to have drafted in the next round."""
        return self.lengths

    def goes_on(self, probabilities: Sequence[Sequence[float]]) -> bool:
        """Whether to draft another token in this round.

        Args:
            probabilities (`list[list[float]]`): Of each token drafted so far, the draft's probability for each row.
        """
        return True

    @property
    def reads_probabilities(self) -> bool:
        """Whether `goes_on` wants to be asked, which brings numbers to the host after each drafted token."""
        return False

    def update(self, drafted: Sequence[int], accepted: Sequence[int], seconds: float) -> None:
        """Hears of a round.

        Args:
            drafted (`list[int]`): Each row's drafted tokens.
            accepted (`list[int]`): How many of them were accepted.
            seconds (`float`): What the round took.
        """

    def keep(self, kept: Sequence[int]) -> None:
        """Hears which rows remain in the batch."""
        self.lengths = [self.lengths[row] for row in kept]


class HeuristicLength(BlockLength):
    """Two tokens more after a block that was kept whole, else one less, for each row: transformers' `"heuristic"`.

    Within the call: no config is changed, so `"heuristic_transient"` is the same.
    """

    def update(self, drafted: Sequence[int], accepted: Sequence[int], seconds: float) -> None:
        """See [`BlockLength.update`]."""
        if any(drafted):
            self.lengths = [
                length + 2 if count == own else max(1, length - 1)
                for length, own, count in zip(self.lengths, drafted, accepted, strict=True)
            ]
