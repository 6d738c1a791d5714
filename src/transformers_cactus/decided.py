"""What the verification of a block decided, as Python numbers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

if TYPE_CHECKING:
    from .verification import Verification


class Decided(NamedTuple):
    """The fields of a [`Verification`] as Python numbers, and the tokens that it was about."""

    accepted: list[int]
    """Accepted drafted tokens of each sequence."""
    next_token: list[int]
    """The token after them."""
    invalid: list[int]
    """0 where the models' scores were distributions."""
    drafted: list[list[int]]
    """The drafted tokens of each sequence."""
    accepted_losslessly: Sequence[Sequence[float]] | None
    """Above 0 for true. `None` where it was not asked for, like the two below."""
    divergence: list[list[float]] | None
    """In nats."""
    certificate: list[list[float]] | None
    """In nats."""

    @property
    def emitted(self) -> list[list[int]]:
        """The new tokens of each sequence."""
        rows = zip(self.drafted, self.accepted, self.next_token, strict=True)
        return [[*drafted[:count], following] for drafted, count, following in rows]


def to_host(outcome: Verification | Decided, drafted: Tensor, *, measure: bool = True) -> Decided:
    """Brings the outcome of a block to the host, in one transfer.

    Args:
        outcome ([`Verification`] or [`Decided`]): What was decided.
        drafted (`torch.LongTensor` of shape `[batch, block]`): The drafted tokens.
        measure (`bool`): Whether to bring `accepted_losslessly` and `divergence`.
    """
    if isinstance(outcome, Decided):
        return outcome
    block = drafted.shape[1]
    lossless, divergence = (outcome.accepted_losslessly, outcome.divergence) if measure else (None, None)
    measured = (lossless, divergence, outcome.certificate)
    columns = [outcome.accepted[:, None].float(), outcome.next_token[:, None], outcome.invalid[:, None], drafted]
    # As float32, which holds token ids exactly (all integers below 2^24), one transfer takes everything.
    table = torch.cat([*columns, *(column for column in measured if column is not None)], dim=1).tolist()
    accepted, next_token, invalid = ([int(row[column]) for row in table] for column in range(3))
    tokens = [[int(token) for token in row[3 : 3 + block]] for row in table]
    found: list[list[list[float]] | None] = []
    start = 3 + block
    for column in measured:
        found.append(None if column is None else [row[start : start + block] for row in table])
        start += 0 if column is None else block
    return Decided(accepted, next_token, invalid, tokens, *found)
