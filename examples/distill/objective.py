"""What is minimised: the divergence from the verifier, and the chance that it rejects.

The verifier's distribution is known by its most probable tokens, the rest being one bucket. The draft's is computed
over the tokens that matter (the most frequent of the data, and those that the verifier names in the batch) and a
random sample of the others, which stands for all of them in the normalising constant: scoring the whole vocabulary
would cost more than the draft's layers.
"""

import math
from collections.abc import Sequence

import torch
from torch.nn import functional as F

from .shards import ANSWER, FORCED, Rows

TEMPERATURE, TOP_K, TOP_P = 0.6, 20, 0.95
NAMED = -5.0  # log-probability from which a rare token of the labels is scored by itself


def frequent_tokens(groups: Sequence[Rows], count: int, vocab_size: int) -> torch.Tensor:
    """The `count` tokens with the most probability mass in the verifier's labels, in ascending order."""
    mass = torch.zeros(vocab_size)
    for rows in groups:
        mass.index_add_(0, rows.top_ids.flatten().long(), rows.top_logp.flatten().float().exp())
    return mass.topk(min(count, vocab_size)).indices.sort().values


def truncate(log_probs: torch.Tensor) -> torch.Tensor:
    """Sampling probabilities of descending log-probabilities under temperature, top-k and top-p."""
    probs = (log_probs[..., :TOP_K] / TEMPERATURE).softmax(-1)
    probs = probs * (probs.cumsum(-1) - probs < TOP_P)
    return F.pad(probs / probs.sum(-1, keepdim=True), (0, log_probs.shape[-1] - TOP_K))


class Objective:
    """Loss of a batch, for a draft with a frozen output layer.

    Args:
        output: The output layer of both models.
        frequent: Ids of the tokens that are always scored.
        sampled: How many of the other tokens are drawn for the normalising constant of each batch.
        acceptance_weight: Weight of the rejection probability beside the divergence.
        user_weight: Weight of the positions in user turns: a draft only ever writes answers, but learns from all text.
    """

    def __init__(
        self,
        output: torch.nn.Linear,
        frequent: torch.Tensor,
        *,
        sampled: int = 1024,
        acceptance_weight: float = 1.0,
        user_weight: float = 0.5,
    ):
        self.output, self.frequent = output, frequent.to(output.weight.device)
        self.acceptance_weight, self.user_weight = acceptance_weight, user_weight
        self.is_rare = torch.ones(output.weight.shape[0], dtype=torch.bool, device=output.weight.device)
        self.is_rare[self.frequent] = False
        self.sampled = sampled
        self.matrix = output.weight[self.frequent].detach()

    def __call__(self, hidden: torch.Tensor, rows: Rows, generator: torch.Generator) -> dict[str, torch.Tensor]:
        """`loss`, and the two parts of it, of the draft's last hidden states `[rows, length, width]`."""
        chosen = rows.role != FORCED
        weight = torch.where(rows.role[chosen] == ANSWER, 1.0, self.user_weight)
        weight = weight / weight.sum()
        top_ids, top_logp = rows.top_ids[chosen].long(), rows.top_logp[chosen].float()
        named = torch.unique(top_ids[self.is_rare[top_ids] & (top_logp > NAMED)])
        logits, log_weight = self.logits(hidden[chosen], named, generator)
        place = torch.full((len(self.is_rare),), -1, device=hidden.device)
        place[self.frequent] = torch.arange(len(self.frequent), device=hidden.device)
        place[named] = torch.arange(len(named), device=hidden.device) + len(self.frequent)
        place = place[top_ids]
        known = place >= 0
        scores = logits.gather(1, place.clamp(min=0))

        log_p = scores - (logits + log_weight).logsumexp(-1, keepdim=True)
        q = top_logp.exp() * known
        p_rest = (1 - (log_p.exp() * known).sum(-1)).clamp(min=1e-6)
        q_rest = (1 - q.sum(-1)).clamp(min=1e-6)
        divergence = (q * (top_logp - log_p)).sum(-1) + q_rest * (q_rest / p_rest).log()

        p = (scores / TEMPERATURE - (logits / TEMPERATURE + log_weight).logsumexp(-1, keepdim=True)).exp() * known
        acceptance = torch.minimum(p, truncate(top_logp)).sum(-1)

        parts = {"kl": weight @ divergence, "acceptance": weight @ acceptance}
        return {"loss": parts["kl"] + self.acceptance_weight * (1 - parts["acceptance"]), **parts}

    def logits(
        self, hidden: torch.Tensor, named: torch.Tensor, generator: torch.Generator
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Logits of the frequent tokens, the named and some other rare ones; and the log of what each stands for."""
        others = self.is_rare.clone()
        others[named] = False
        ids = others.nonzero()[:, 0]
        sampled = min(self.sampled, len(ids))
        drawn = torch.randint(max(len(ids), 1), (sampled,), generator=generator)
        rare = torch.cat([named, ids[drawn.to(ids.device)]])
        logits = [self.score(hidden, self.matrix, self.frequent), self.score(hidden, self.output.weight[rare], rare)]
        log_weight = hidden.new_zeros(len(self.frequent) + len(rare))
        if sampled:
            log_weight[-sampled:] = math.log(len(ids) / sampled)
        return torch.cat(logits, dim=-1), log_weight

    def score(self, hidden: torch.Tensor, matrix: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        """Logits of the tokens `ids`, whose rows of the output matrix are given."""
        return F.linear(hidden, matrix, None if self.output.bias is None else self.output.bias[ids])
