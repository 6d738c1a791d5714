"""Where a drafter keeps the scores that a block's tokens were sampled from."""

from __future__ import annotations

import torch
from torch import Tensor

from .truncation import Kept


class DraftScores:
    """Scores of a block, `[batch, block, vocab]`, in the same memory in every round: it is large.

    Positions of which truncation has left a few tokens cost a few writes, as all else is `-inf` from before.

    Args:
        batch (`int`): Rows. Later rounds may have fewer.
        block (`int`): The longest block.
        vocab (`int`): The verifier's vocabulary size.
        device (`torch.device`): Where the scores are kept.
    """

    def __init__(self, batch: int, block: int, vocab: int, device: torch.device):
        self._memory = torch.full((batch, block, vocab), -torch.inf, device=device)
        self._kept: dict[int, Tensor] = {}
        self._full: set[int] = set()

    def fits(self, batch: int, block: int) -> bool:
        """Whether a round of this size has room."""
        return batch <= self._memory.shape[0] and block <= self._memory.shape[1]

    def put(self, position: int, scores: Tensor) -> Tensor:
        """Keeps the scores of one position of each row.

        Args:
            position (`int`): The position in the block.
            scores (`torch.Tensor` of shape `[batch, vocab]`): Scores.

        Returns:
            `torch.Tensor` of shape `[batch, vocab]`: The memory that they are in now.
        """
        self._kept.pop(position, None)
        self._full.add(position)
        return self._memory[: len(scores), position].copy_(scores)

    def put_kept(self, position: int, kept: Kept) -> Tensor:
        """The same where few tokens are left.

        Args:
            position (`int`): The position in the block.
            kept ([`Kept`] of shape `[batch, kept]`): The tokens and their scores.

        Returns:
            `torch.Tensor` of shape `[batch, vocab]`: The memory that they are in now.
        """
        before = self._kept.pop(position, None)
        if position in self._full:
            self._memory[:, position] = -torch.inf
            self._full.remove(position)
        elif before is not None:
            self._memory[: len(before), position].scatter_(-1, before, -torch.inf)
        self._kept[position] = kept.tokens
        return self._memory[: len(kept.tokens), position].scatter_(-1, *kept)

    def block(self, batch: int, block: int) -> Tensor:
        """The scores of the first positions, `[batch, block, vocab]`, until the next round overwrites them."""
        return self._memory[:batch, :block]
