"""What is known of a pair of models, for the adaptive block length: kept between calls."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from copy import deepcopy
from typing import Any

from .round_times import RoundTimes

FORGETTING = 0.985
"""What an observed acceptance counts for after another one: about the last 60 matter."""

FORGETTING_IN_A_PAUSE = 0.3
"""The same when drafting is tried again after a pause."""

TRY_AFTER = (16, 256)
"""While drafting does not pay: rounds until it is tried again, at first and at the most; doubled each time."""

TRIES_COST = 0.03
"""While drafting does not pay: the share of the time that tries may take, what the draft then has to read included."""

LARGEST_DEBT = 32
"""Rounds of the verifier alone: tries that took longer count for no more. A stalled machine is no try's fault."""

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
        self.debt = 0.0

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

    def account(self, length: int, tokens: float, seconds: float, alone: float) -> None:
        """Keeps account of what drafting has cost beyond what it brought, of which tries are to pay a share at most.

        Args:
            length (`int`): Tokens drafted in a round.
            tokens (`float`): Tokens that it brought, per row.
            seconds (`float`): What it took.
            alone (`float`): What a round without a draft takes.
        """
        self.debt += seconds - tokens * alone if length else -TRIES_COST * seconds
        self.debt = min(max(self.debt, 0.0), LARGEST_DEBT * alone)

    def tries_again(self) -> bool:
        """Where drafting does not pay, asked before each round: whether it is time for a try."""
        self.pause -= 1
        if self.pause > 0 or self.debt > 0:
            return False
        for rate in (*self.by_position, *self.by_probability, self.any):
            rate.fade(FORGETTING_IN_A_PAUSE)
        self.patience = self.pause = min(2 * self.patience, TRY_AFTER[1])
        return True

    def pays(self) -> None:
        """Hears that drafting pays."""
        self.pause = self.patience = TRY_AFTER[0]

    def times_of(self, rows: int) -> RoundTimes:
        """Times of a batch size; those of the nearest known one to begin with."""
        if rows not in self.times:
            nearest = min(self.times, key=lambda known: abs(known - rows), default=None)
            self.times[rows] = RoundTimes() if nearest is None else deepcopy(self.times[nearest])
        return self.times[rows]


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
