"""Rules with one target distribution, the same whatever was drafted: speculative sampling against it emits it."""

from __future__ import annotations

from abc import abstractmethod

import torch
from torch import Tensor
from typing_extensions import override

from ..acceptance import AcceptanceRule
from ..budget import two_point_kl
from ..rows import Rows


class TargetRule(AcceptanceRule):
    """Speculative sampling with `h` in the place of `q`, so that `h` is exactly what a drafted position emits.

    `h` depends on the whole rows of both models, so a verification reads them at every drafted position, which rules
    that raise the drafted token only do not. Without draft probabilities, `p` is one-hot on the drafted token.
    """

    @abstractmethod
    @override
    def target(self, verifier_probs: Tensor, draft_probs: Tensor) -> Tensor: ...

    @abstractmethod
    def raised_alone(self, q_n: Tensor) -> Tensor:
        """`h_n` where `p` is one-hot on the drafted token; the other tokens of `h` are then in proportion to `q`.

        Args:
            q_n (`torch.Tensor` of shape `[batch, block]`): The verifier's probability of the drafted token.
        """

    @override
    def acceptance_probability(self, tokens: Tensor, verifier: Rows, draft: Rows | None) -> Tensor:
        if draft is None:
            return self.raised_alone(verifier.log_prob(tokens).exp())
        q = verifier.probs()
        h_n = self.target(q, draft.probs(q.shape[-1])).gather(-1, tokens[..., None])[..., 0]
        # In logarithms, for p_n that underflow. h_n = 0 rejects, even where p_n is 0 too.
        ratio = (h_n.log() - draft.log_prob(tokens)).clamp(max=0).exp()
        return torch.where(h_n == 0, 0.0, ratio)

    @override
    def recovery_weights(self, tokens: Tensor, verifier_probs: Tensor, draft_probs: Tensor | None) -> Tensor:
        without_token = verifier_probs.scatter(-1, tokens[:, None], 0.0)
        # Numerically empty residuals fall back to q without the rejected token, or to that token where the verifier
        # allows no other.
        fallback = torch.where(without_token.sum(-1, keepdim=True) > 0, without_token, verifier_probs)
        if draft_probs is None:
            return fallback
        # The rejected token has h_n < p_n, so it is not in the residual.
        residual = (self.target(verifier_probs, draft_probs) - draft_probs).clamp(min=0)
        return torch.where(residual.sum(-1, keepdim=True) > 0, residual, fallback)

    @override
    def divergence(self, tokens: Tensor, verifier: Rows, draft: Rows | None) -> Tensor:
        if draft is None:
            q_n = verifier.log_prob(tokens).exp()
            return two_point_kl(self.raised_alone(q_n), q_n)
        q = verifier.probs()
        h = self.target(q, draft.probs(q.shape[-1]))
        return torch.where(h > 0, torch.special.xlogy(h, h / q), 0.0).sum(-1).clamp(min=0)
