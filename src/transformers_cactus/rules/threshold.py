"""Rules that keep a drafted token for certain where the verifier finds it likely enough, and reject it elsewhere."""

from __future__ import annotations

from abc import abstractmethod

import torch
from torch import Tensor
from typing_extensions import override

from ..acceptance import AcceptanceRule
from ..rows import Rows


class ThresholdRule(AcceptanceRule):
    """`phi` is 1 or 0, and `g` is the same whichever token was rejected. A subclass says what both depend on."""

    @abstractmethod
    def accepts(self, q_n: Tensor, verifier_probs: Tensor) -> Tensor:
        """Whether tokens are kept.

        Args:
            q_n (`torch.Tensor` of shape `[batch, ..., tokens]`): Probabilities of any number of tokens of each row.
            verifier_probs (`torch.Tensor` of shape `[batch, ..., vocab]`): The rows, `q`.

        Returns:
            `torch.BoolTensor` like `q_n`; `False` where `q_n` is 0.
        """

    @abstractmethod
    def recovery(self, verifier_probs: Tensor, draft_probs: Tensor | None) -> Tensor:
        """`g` of rows.

        Args:
            verifier_probs (`torch.Tensor` of shape `[batch, ..., vocab]`): `q`.
            draft_probs (`torch.Tensor` of shape `[batch, ..., vocab]` or `None`): `p`; `None` where the draft has no
                probabilities and its token was rejected.

        Returns:
            `torch.Tensor` of shape `[batch, ..., vocab]`: Weights proportional to `g`.
        """

    @override
    def acceptance_probability(self, tokens: Tensor, verifier: Rows, draft: Rows | None) -> Tensor:
        probs = verifier.probs()
        q_n = probs.gather(-1, tokens[..., None])
        kept = self.accepts(q_n, probs)[..., 0].to(probs.dtype)
        p_n = 0.0 if draft is None else draft.log_prob(tokens)
        # Only for NaN: a token is never accepted on rows that are no distributions.
        return torch.where(q_n[..., 0].isnan() | torch.as_tensor(p_n, device=probs.device).isnan(), torch.nan, kept)

    @override
    def recovery_weights(self, tokens: Tensor, verifier_probs: Tensor, draft_probs: Tensor | None) -> Tensor:
        return self.recovery(verifier_probs, draft_probs)

    @override
    def divergence(self, tokens: Tensor, verifier: Rows, draft: Rows | None) -> Tensor:
        """`KL(h || q)` where `h` is one-hot on an accepted token, and the recovery without a draft on a rejected
        one."""
        probs = verifier.probs()
        q_n = probs.gather(-1, tokens[..., None])
        kept = self.accepts(q_n, probs)[..., 0]
        weights = self.recovery(probs, None)
        recovered = weights / weights.sum(-1, keepdim=True)
        lost = torch.special.xlogy(recovered, recovered / probs)
        rejected = torch.where(recovered > 0, lost, 0.0).sum(-1)
        return torch.where(kept, -q_n[..., 0].log(), rejected).clamp(min=0)

    def emitted(self, verifier_probs: Tensor, draft_probs: Tensor) -> tuple[Tensor, Tensor]:
        """What a drafted position emits, `h_alg`, and how often it accepts, in O(vocab) but for what `accepts` needs.

        Args:
            verifier_probs, draft_probs (`torch.Tensor` of shape `[batch, vocab]`): `q` and `p`.

        Returns:
            `torch.Tensor` of shape `[batch, vocab]` and `torch.Tensor` of shape `[batch]`.
        """
        kept = draft_probs * self.accepts(verifier_probs, verifier_probs)
        accepted = kept.sum(-1)
        weights = self.recovery(verifier_probs, draft_probs)
        rejected = (draft_probs.sum(-1) - accepted).clamp(min=0)
        return kept + rejected[:, None] * weights / weights.sum(-1, keepdim=True), accepted
