"""Distributions over the vocabulary at every position of a block, read as sparingly as a rule allows."""

from __future__ import annotations

import torch
from torch import Tensor


def widest_float(device: torch.device) -> torch.dtype:
    """The most accurate floating-point type that a device has."""
    return torch.float32 if device.type == "mps" else torch.float64


def columns_with_mass(*probs: Tensor) -> Tensor | slice:
    """The tokens that have a probability above 0 in any row: few after truncation, and sorting those is enough.

    Looked up on the CPU only; elsewhere, where that would wait for the device, all of them.

    Args:
        *probs (`torch.Tensor` of shape `[..., vocab]`): Probabilities.

    Returns:
        An index for the last dimension.
    """
    if probs[0].device.type != "cpu":
        return slice(None)
    # Not equal to 0, so that NaN counts.
    found = [(rows != 0).reshape(-1, rows.shape[-1]).any(0) for rows in probs]
    columns = torch.stack(found).any(0).nonzero()[:, 0]
    # Copying most of a row costs more than it saves.
    return columns if 2 * len(columns) < probs[0].shape[-1] else slice(None)


class Rows:
    """One distribution per position, given by scores that are log-probabilities up to a constant per row.

    A model's processed logits are such scores, and so are exact log-probabilities. Nothing of the size of `scores` is
    kept: most rules ask for the probability of one token per position, and for one whole row per sequence.

    Args:
        scores (`torch.Tensor` of shape `[batch, block, vocab]`):
            Logits or log-probabilities, `-inf` for probability 0. Half-precision scores are read in float32, float64
            scores stay float64.
        log_normalizer (`torch.Tensor` of shape `[batch, block]`, *optional*): Log-sum-exp of every row, where it is
            known; NaN where a row is no distribution.
    """

    def __init__(self, scores: Tensor, log_normalizer: Tensor | None = None):
        self.scores = scores
        self.dtype = torch.promote_types(scores.dtype, torch.float32)
        self.log_normalizer = log_normalizer
        self._asked: tuple[Tensor, Tensor] | None = None

    @classmethod
    def from_probs(cls, probs: Tensor) -> Rows:
        """Rows given as probabilities, `[batch, block, vocab]`."""
        return cls(probs.log())

    def first(self, count: int) -> Rows:
        """The rows of the first `count` positions."""
        known = self.log_normalizer
        return Rows(self.scores[:, :count], None if known is None else known[:, :count])

    def at(self, position: int) -> Rows:
        """The rows of one position, `[batch, 1, vocab]`."""
        known, here = self.log_normalizer, slice(position, position + 1)
        return Rows(self.scores[:, here], None if known is None else known[:, here])

    def log_prob(self, tokens: Tensor) -> Tensor:
        """Log-probability of one token per position.

        Args:
            tokens (`torch.LongTensor` of shape `[batch, block]`): A token per position.

        Returns:
            `torch.Tensor` of shape `[batch, block]`, in nats.
        """
        # Asked several times in a round for the same tokens.
        if self._asked is None or self._asked[0] is not tokens:
            known = self.log_normalizer
            log_probs = self.scores if known is not None else self.scores.log_softmax(-1, dtype=self.dtype)
            found = log_probs.gather(-1, tokens[..., None])[..., 0]
            self._asked = tokens, found if known is None else found.to(self.dtype) - known
        return self._asked[1]

    def probs_at(self, positions: Tensor, vocab: int | None = None) -> Tensor:
        """The whole row of one position per sequence.

        Args:
            positions (`torch.LongTensor` of shape `[batch]`): A position of the block for each sequence.
            vocab (`int`, *optional*): Cut or pad the row with zeros to this many tokens.

        Returns:
            `torch.Tensor` of shape `[batch, vocab]`: Probabilities. A row that is no distribution comes back as NaN.
        """
        rows = self.scores[torch.arange(len(positions), device=positions.device), positions].to(self.dtype)
        return _resized(rows.softmax(dim=-1), vocab)

    def probs(self, vocab: int | None = None) -> Tensor:
        """All rows, for rules that cannot do with less.

        Args:
            vocab (`int`, *optional*): Cut or pad the rows with zeros to this many tokens.

        Returns:
            `torch.Tensor` of shape `[batch, block, vocab]`: Probabilities. A row that is no distribution comes back as
            NaN.
        """
        return _resized(self.scores.to(self.dtype).softmax(dim=-1), vocab)


def _resized(probs: Tensor, vocab: int | None) -> Tensor:
    if vocab is None or vocab == probs.shape[-1]:
        return probs
    if vocab < probs.shape[-1]:
        return probs[..., :vocab]
    return torch.nn.functional.pad(probs, (0, vocab - probs.shape[-1]))
