"""Rounds along a text, in expectation: how they follow one another where each position accepts with known probability.

A position is reached in a state: how many tokens of its round were drafted and accepted before it. In state `block`
the round ends there with a bonus token. In any other the position is drafted, and either accepts, with which the state
grows by one, or recovers, with which the round ends. A new round has state 0. Given the acceptance at each position,
the law of the states is a product of small matrices, so that accepted lengths are those of rounds that really follow
one another: rounds start more often where the last one failed.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray


class Rounds(NamedTuple):
    """Probabilities at each position, `[positions]` in float64."""

    started: NDArray[np.float64]
    """That a round starts there."""
    drafted: NDArray[np.float64]
    """That it holds a drafted token or its replacement, not a bonus token."""


def expected_rounds(acceptance: NDArray[np.float64], block: int) -> Rounds:
    """The law of the rounds of a text.

    Args:
        acceptance (`numpy.ndarray` of shape `[positions]`): The probability that a drafted token is accepted at each
            position, taken as independent of which token stands there.
        block (`int`): Tokens drafted in a round, at least 1.

    Returns:
        [`Rounds`]: Accepted tokens are `drafted * acceptance`, and accepted lengths their sum over that of `started`.
    """
    started, drafted = np.empty(len(acceptance)), np.empty(len(acceptance))
    state = np.eye(block + 1)[0]
    for position, accepts in enumerate(acceptance):
        started[position], drafted[position] = state[0], 1 - state[-1]
        longer = state[:-1] * accepts
        state = np.concatenate(([1 - longer.sum()], longer))
    return Rounds(started, drafted)
