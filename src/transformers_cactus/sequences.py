"""The growing rows of a batch: their tokens, on the device and on the host."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from .transfer import on_device


class Sequences:
    """Prompts and what was generated behind them.

    Rows keep the left padding that they came with, so that a row's column is its position as `generate` counts it;
    whoever needs a row without padding starts at `starts`.

    Args:
        input_ids (`torch.LongTensor` of shape `[batch, width]`): Left-padded prompts.
        starts (`list[int]`): First column of each row that is no padding.
        capacity (`int`): Columns to reserve, for the longest row with a drafted block behind it.
    """

    def __init__(self, input_ids: Tensor, starts: Sequence[int], capacity: int):
        batch, self.width = input_ids.shape
        self.ids = torch.nn.functional.pad(input_ids, (0, max(capacity - self.width, 0)))
        self.rows = list(range(batch))
        """Which row of the call each remaining row is."""
        self.starts = list(starts)
        self.ends = [self.width] * batch
        """Column behind each row's last token."""
        self.tokens = [row[start:] for row, start in zip(input_ids.tolist(), starts, strict=True)]
        """Each row's tokens without padding, on the host."""
        self.last = input_ids[:, -1].clone()
        """Each row's last token, `[batch]`, on the device."""

    @property
    def batch_size(self) -> int:
        """Remaining rows."""
        return len(self.rows)

    @property
    def uniform(self) -> bool:
        """Whether all rows have the same columns, without padding."""
        return not any(self.starts) and min(self.ends) == max(self.ends)

    def lengths(self) -> list[int]:
        """Tokens of each row, without padding."""
        return [end - start for start, end in zip(self.starts, self.ends, strict=True)]

    def write(self, tokens: Tensor) -> None:
        """Writes tokens behind each row without making them part of it.

        Args:
            tokens (`torch.LongTensor` of shape `[batch, count]`): The tokens.
        """
        count = tokens.shape[1]
        missing = max(self.ends) + count - self.ids.shape[1]
        if missing > 0:
            # Blocks may grow in a call, and rows that are far ahead reach beyond their end with them.
            self.ids = torch.nn.functional.pad(self.ids, (0, missing))
        if min(self.ends) == max(self.ends):
            self.ids[:, self.ends[0] : self.ends[0] + count] = tokens
        else:
            columns = on_device(self.ends, self.ids.device)[:, None] + torch.arange(count, device=tokens.device)
            self.ids.scatter_(1, columns, tokens)

    def advance(self, emitted: Sequence[Sequence[int]], last: Tensor) -> None:
        """Makes written tokens part of the rows.

        Args:
            emitted (`list[list[int]]`): The new tokens of each row.
            last (`torch.LongTensor` of shape `[batch]`): The last of them, on the device.
        """
        for row, new in enumerate(emitted):
            self.tokens[row] += new
            self.ends[row] += len(new)
        self.last = last

    def prompt(self, row: int) -> Tensor:
        """A row's prompt without padding, `[1, length]`."""
        return self.ids[row : row + 1, self.starts[row] : self.width]

    def prefix(self, row: int, tokens: int) -> Tensor:
        """A row without padding, followed by some of the written tokens, `[1, length + tokens]`."""
        return self.ids[row : row + 1, self.starts[row] : self.ends[row] + tokens]

    def padded_prefix(self, row: int, tokens: int) -> Tensor:
        """A row with its padding, followed by some of the written tokens, `[1, columns + tokens]`."""
        return self.ids[row : row + 1, : self.ends[row] + tokens]

    def keep(self, kept: Sequence[int]) -> None:
        """Drops all rows but some."""
        index = on_device(kept, self.ids.device)
        self.ids, self.last = self.ids[index], self.last[index]
        for values in (self.rows, self.starts, self.ends, self.tokens):
            values[:] = [values[row] for row in kept]
