"""`delta` position by position: a schedule that looks at the text, and a running budget that is never overspent."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from .acceptance import AcceptanceRule, BudgetRule
from .divergences import divergence_at
from .parameters import check_parameter
from .rows import Rows, widest_float
from .saving import Unsavable

Schedule = Callable[[list[int]], float]
"""The budget of a position, given the generated tokens before it."""

HALVINGS = 30
"""Halvings of `delta` where the budget does not allow it all."""

LARGEST_DELTA = 100.0
"""Where the halving starts for an infinite `delta`."""

LEFTOVER = 1e-3
"""Share of a budget below which what is left of it counts as nothing, or every round would look for a tiny `delta`."""


@dataclass(frozen=True)
class DeltaBetween(Unsavable):
    """A schedule for `cactus_delta`: one budget between two marks of the text, and another outside.

    For example generous where a reasoning model thinks and strict where it answers.

    Args:
        opening (`int`): The token id that opens, such as that of `<think>`.
        closing (`int`): The token id that closes. Itself still inside.
        inside (`float`): Budget inside, in the unit of the rule's `delta`.
        outside (`float`, *optional*, defaults to 0): Budget outside.
        starts_inside (`bool`, *optional*, defaults to `False`): Whether the prompt ends inside, as where a chat
            template has written the opening mark.

    Raises:
        ValueError: If a budget is negative or NaN, a mark is negative, or both marks are the same token.
        TypeError: If a budget is no number, or a mark no token id.

    Example:
        >>> from transformers_cactus import DeltaBetween
        >>> schedule = DeltaBetween(opening=7, closing=8, inside=0.75)
        >>> schedule([5]), schedule([5, 7, 5]), schedule([5, 7, 5, 8])
        (0.0, 0.75, 0.0)
    """

    opening: int
    closing: int
    inside: float
    outside: float = 0.0
    starts_inside: bool = False

    def __post_init__(self) -> None:
        for name in ("opening", "closing"):
            mark = getattr(self, name)
            if isinstance(mark, bool) or not isinstance(mark, int):
                raise TypeError(
                    f"{name} must be a token id, got {mark!r}: tokenizer.convert_tokens_to_ids('<think>') looks it up."
                )
            if mark < 0:
                raise ValueError(f"{name} must be a token id, at least 0, got {mark}.")
        if self.opening == self.closing:
            raise ValueError(
                f"opening and closing are both token {self.opening}. A tokenizer gives the same id to all texts that "
                "are no token of its own: take marks that are."
            )
        for name in ("inside", "outside"):
            check_parameter(name, getattr(self, name), unit="a budget")

    def __call__(self, generated: Sequence[int]) -> float:
        """The budget behind the generated tokens."""
        for token in reversed(generated):
            if token in (self.opening, self.closing):
                return self.inside if token == self.opening else self.outside
        return self.inside if self.starts_inside else self.outside


def scheduled(schedule: Schedule, generated: list[int]) -> float:
    """What a schedule says for the position behind the generated tokens.

    Raises:
        ValueError: If it is negative or NaN.
        TypeError: If it is no number, or the schedule cannot be called with a list of tokens.
    """
    try:
        value = schedule(generated)
    except TypeError as error:
        raise TypeError(
            f"cactus_delta={schedule!r} is called with the list of the token ids generated so far and must return a "
            f"budget, but failed: {error}"
        ) from error
    if isinstance(value, Tensor) and value.ndim:
        raise TypeError(
            f"what the schedule cactus_delta returns must be one number, got a tensor of shape {list(value.shape)}."
        )
    check_parameter("what the schedule cactus_delta returns", value, unit="a budget")
    return float(value)


class DeltaPlan:
    """The budgets of a call's drafted positions, and what the sequences have left.

    What a position spends is the divergence of the distribution that it is really drawn from, `KL(h_alg || q)` (see
    [`divergences.certificate`]): it is known before anything is sampled, so that `delta` can be cut to what is left.

    With a window, generated tokens number 0 to `window - 1` have the budget together, the next `window` tokens have it
    afresh, and so on: a block that lies across two windows is charged to both, each position to its own. Nothing is
    carried over.

    Args:
        rule ([`BudgetRule`]): The rule, with the budget of positions for which there is no schedule.
        schedule (callable, *optional*): The budget of a position, given the list of generated tokens before it.
        budget (`torch.Tensor` of shape `[batch]`, *optional*): What each sequence may spend in a window, in nats.
        window (`int`, *optional*): Tokens of a window; the whole sequence is one by default.
    """

    def __init__(self, rule: BudgetRule, schedule: Schedule | None, budget: Tensor | None, window: int | None = None):
        self.rule = rule
        self.schedule = schedule
        self.total = None if budget is None else budget.double().tolist()
        self.left = None if self.total is None else list(self.total)
        self.size = window
        self.windows = [] if self.total is None else [0] * len(self.total)

    def for_block(
        self, generated: list[list[int]], tokens: Tensor, lengths: list[int], verifier: Rows, draft: Rows | None
    ) -> tuple[AcceptanceRule, Tensor | None]:
        """The rule for a block, before it is verified.

        Args:
            generated (`list[list[int]]`): The generated tokens of each sequence.
            tokens (`torch.LongTensor` of shape `[batch, block]`): The drafted tokens.
            lengths (`list[int]`): Drafted tokens of each sequence.
            verifier (`Rows` of shape `[batch, block, vocab]`): `q` at their positions.
            draft (`Rows` of shape `[batch, block, vocab]` or `None`): `p` at their positions.

        Returns:
            [`AcceptanceRule`] with a budget per position, and where there is a running budget what each position
            spends if it is reached, `[batch, block]`.
        """
        deltas = self._scheduled(generated, tokens, lengths)
        if self.left is None or self.total is None:
            return self.rule.with_deltas(deltas), None
        starts = [len(text) for text in generated]
        for row, start in enumerate(starts):
            self._enter(row, start)
        enough = [left if left >= LEFTOVER * total else 0.0 for left, total in zip(self.left, self.total, strict=True)]
        left, total = (torch.tensor(x, dtype=deltas.dtype, device=tokens.device) for x in (enough, self.total))
        spent = []
        for position in range(tokens.shape[1]):
            if self.size is not None and position:
                fresh = [(start + position) % self.size == 0 for start in starts]
                left = torch.where(torch.tensor(fresh, device=tokens.device), total, left)
            delta = torch.where(left <= 0, 0.0, deltas[:, position])
            delta, cost = self._affordable(delta, left, tokens, verifier, draft, position)
            deltas[:, position] = delta
            # What halving leaves over is too little to look for again.
            left = torch.where(cost < left * (1 - LEFTOVER), left - cost, 0.0)
            spent.append(cost)
        return self.rule.with_deltas(deltas), torch.stack(spent, dim=1)

    def spend(self, row: int, start: int, spent: Sequence[float]) -> None:
        """Takes from a sequence's budget what its emitted tokens were drawn for.

        Args:
            row (`int`): The sequence.
            start (`int`): Generated tokens before these.
            spent (`Sequence[float]`): What each of the drafted tokens among them spends, in nats.
        """
        if self.left is None:
            return
        for position, nats in enumerate(spent, start):
            self._enter(row, position)
            self.left[row] = max(self.left[row] - nats, 0.0)

    def _enter(self, row: int, position: int) -> None:
        """Gives a sequence its budget afresh where a position is not in the window of those before."""
        window = 0 if self.size is None else position // self.size
        if self.left is not None and self.total is not None and window != self.windows[row]:
            self.windows[row], self.left[row] = window, self.total[row]

    def keep(self, kept: Sequence[int]) -> None:
        """Drops all sequences but some."""
        if self.left is not None and self.total is not None:
            self.left, self.total = [self.left[row] for row in kept], [self.total[row] for row in kept]
            self.windows = [self.windows[row] for row in kept]
        if self.rule.batch_size is not None:
            self.rule = self.rule.select(torch.tensor(list(kept), dtype=torch.long))

    def _scheduled(self, generated: list[list[int]], tokens: Tensor, lengths: list[int]) -> Tensor:
        """The budget that each position has without a running budget, `[batch, block]`."""
        work = widest_float(tokens.device)
        if self.schedule is None:
            delta = torch.as_tensor(self.rule.delta, dtype=work, device=tokens.device)
            return delta.reshape(-1, 1).expand(tokens.shape).clone()
        # The only way to show a function of the user's what was drafted.
        drafted = tokens.tolist()
        deltas = torch.zeros(tokens.shape, dtype=work)
        for row, length in enumerate(lengths):
            for position in range(length):
                deltas[row, position] = scheduled(self.schedule, generated[row] + drafted[row][:position])
        return deltas.to(tokens.device)

    def _affordable(
        self, delta: Tensor, left: Tensor, tokens: Tensor, verifier: Rows, draft: Rows | None, position: int
    ) -> tuple[Tensor, Tensor]:
        """The largest budgets up to `delta` that do not spend more than what is left, and what they spend,
        `[batch]`."""

        def cost(delta: Tensor) -> Tensor:
            rule = self.rule.with_deltas(delta)
            spent = divergence_at(position, tokens, verifier, draft, rule)
            # Rounding must not charge for what is lossless.
            return torch.where(delta == 0, 0.0, spent)

        spent = cost(delta)
        too_much = spent > left
        if not bool(too_much.any()):
            return delta, spent
        low, high = torch.zeros_like(delta), delta.clamp(max=LARGEST_DELTA)
        for _ in range(HALVINGS):
            middle = (low + high) / 2
            fits = cost(middle) <= left
            low, high = torch.where(fits, middle, low), torch.where(fits, high, middle)
        delta = torch.where(too_much, low, delta)
        return delta, torch.where(too_much, cost(low), spent)
