"""An output layer that scores some of the vocabulary, for drafts.

Most of a small draft's time goes into its output layer. Text is made of few tokens, so a draft that can propose only
those loses little acceptance and much time (FR-Spec, Zhao et al. 2025). The others get the probability 0, which
speculative sampling allows: the verifier's mass there is reached by recovery and bonus tokens.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn


class SubsetOutput(nn.Module):
    """Logits over the whole vocabulary, `-inf` for all tokens but some.

    Args:
        weight (`torch.Tensor` of shape `[vocab, hidden]`): A full output matrix. The rows of `tokens` are copied.
        tokens (`torch.LongTensor` of shape `[kept]`): The tokens that are scored.
    """

    tokens: Tensor

    def __init__(self, weight: Tensor, tokens: Tensor):
        super().__init__()
        self.vocab_size = weight.shape[0]
        tokens = tokens.to(weight.device, torch.long)
        self.register_buffer("tokens", tokens, persistent=False)
        with torch.device("meta"):
            self.kept = nn.Linear(weight.shape[1], len(tokens), bias=False)
        self.kept.weight = nn.Parameter(weight.detach()[tokens].clone(), requires_grad=False)

    @property
    def weight(self) -> Tensor:
        """The rows that are scored, `[kept, hidden]`."""
        return self.kept.weight

    def forward(self, hidden: Tensor) -> Tensor:
        """Scores hidden states.

        Args:
            hidden (`torch.Tensor` of shape `[..., hidden]`): Last hidden states.

        Returns:
            `torch.Tensor` of shape `[..., vocab]`.
        """
        scores = self.kept(hidden)
        logits = scores.new_full((*scores.shape[:-1], self.vocab_size), -torch.inf)
        return logits.index_copy_(-1, self.tokens, scores)
