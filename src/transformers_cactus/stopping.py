"""Where a row ends, as if every stopping condition had been checked after every token."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor
from transformers import StoppingCriteria
from transformers.generation import EosTokenCriteria, MaxLengthCriteria, MaxTimeCriteria

from .sequences import Sequences


class BlockStopping:
    """Stopping criteria over the tokens that a round emits.

    Length and EOS are read off the tokens on the host. The clock is read once per round, since a round's tokens come
    into being together. All other criteria are called for each token of each row, with that row's tokens up to it and
    without padding, in order, and not again after the one that ends the row.

    Args:
        criteria (iterable of `StoppingCriteria`): The criteria of the call.
        eos_token_ids (iterable of `int`): The EOS tokens.
    """

    def __init__(self, criteria: Iterable[StoppingCriteria], eos_token_ids: Iterable[int]):
        criteria = list(criteria)
        # `generate` adds a criterion for the EOS of its config, and a caller may bring another.
        own = [token for c in criteria if type(c) is EosTokenCriteria for token in c.eos_token_id.flatten().tolist()]
        self.eos = frozenset(eos_token_ids) | frozenset(own)
        self.max_length = min((c.max_length for c in criteria if type(c) is MaxLengthCriteria), default=None)
        self.clocks = [c for c in criteria if type(c) is MaxTimeCriteria]
        known = (MaxLengthCriteria, MaxTimeCriteria, EosTokenCriteria)
        self.others = [c for c in criteria if type(c) not in known]

    @property
    def reads_tokens(self) -> bool:
        """Whether `Sequences.write` must have been called with the emitted tokens before `cut`."""
        return bool(self.others)

    def cut(
        self, row: int, tokens: Sequence[int], sequences: Sequences, scores: Sequence[Tensor] | None = None
    ) -> tuple[int, bool]:
        """How many of a row's new tokens stay, and whether the row ends there.

        Args:
            row (`int`): The row.
            tokens (`list[int]`): Its new tokens, at least one.
            sequences ([`Sequences`]): The rows, not yet advanced.
            scores (list of `torch.Tensor` of shape `[vocab]`, *optional*): For criteria that read them: the scores of
                the row's generated tokens, at least up to the last of `tokens`.

        Returns:
            Two values, the first in [1, len(tokens)].
        """
        for count in range(1, len(tokens) + 1):
            # No short cut between criteria: each is asked after each token, as in token-by-token generation.
            reached = self.max_length is not None and sequences.ends[row] + count >= self.max_length
            ended = reached or tokens[count - 1] in self.eos
            generated = sequences.ends[row] - sequences.width + count
            seen = None if scores is None else tuple(one[None] for one in scores[:generated])
            for criterion in self.others:
                # A tensor of one flag, or a plain bool: `generate` takes both.
                ended |= bool(torch.as_tensor(criterion(sequences.prefix(row, count), seen)).all())
            if ended:
                return count, True
        return len(tokens), False

    def out_of_time(self) -> bool:
        """Whether the time is up: every row then ends with its first new token."""
        if not self.clocks:
            return False
        # The criterion asks the ids for the batch size and the device of its answer only.
        no_tokens = torch.empty(1, 0, dtype=torch.long)
        return any(bool(clock(no_tokens, None).all()) for clock in self.clocks)
