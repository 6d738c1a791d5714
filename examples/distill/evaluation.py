"""How good a draft is on held-out rows: acceptance and divergence at the positions of answers."""

import torch
from transformers import PreTrainedModel

from .objective import TEMPERATURE, TOP_K, TOP_P, truncate
from .shards import ANSWER, Rows


def warp(logits: torch.Tensor) -> torch.Tensor:
    """Sampling probabilities over the whole vocabulary at the settings that drafts are judged by."""
    top, ids = logits.topk(TOP_K, dim=-1)
    return torch.zeros_like(logits).scatter(-1, ids, truncate(top))


def truncated_acceptance(logits: torch.Tensor, top_ids: torch.Tensor, top_logp: torch.Tensor) -> torch.Tensor:
    """Lossless acceptance `sum(min(p, q))` of each position at the settings that drafts are judged by, `[positions]`.

    Args:
        logits: The draft's, `[positions, vocab]`.
        top_ids, top_logp: The verifier's labels, `[positions, k]`.
    """
    return torch.minimum(warp(logits).gather(1, top_ids), truncate(top_logp)).sum(-1)


@torch.inference_mode()
def evaluate(draft: PreTrainedModel, rows: Rows, *, batch: int = 4) -> dict[str, float]:
    """Mean lossless acceptance `sum(min(p, q))` over answers, with truncation and at temperature 1, and the KL there.

    At temperature 1 the verifier's unlabelled tail counts as one bucket, so that acceptance is a lower bound up to
    that bucket's mass and the divergence is a lower bound.
    """
    totals = torch.zeros(4, dtype=torch.float64)
    for start in range(0, len(rows), batch):
        part = rows[slice(start, start + batch)]
        chosen = part.role == ANSWER
        hidden = draft.base_model(input_ids=part.ids.long().to(draft.device)).last_hidden_state[chosen]
        logits = draft.get_output_embeddings()(hidden).float().cpu()
        top_ids, top_logp = part.top_ids[chosen].long(), part.top_logp[chosen].float()

        log_p = logits.log_softmax(-1).gather(1, top_ids)
        q = top_logp.exp()
        q_rest, p_rest = ((1 - x.sum(-1)).clamp(min=1e-6) for x in (q, log_p.exp()))
        kl = (q * (top_logp - log_p)).sum(-1) + q_rest * (q_rest / p_rest).log()
        plain = torch.minimum(log_p.exp(), q).sum(-1)
        truncated = truncated_acceptance(logits, top_ids, top_logp)
        totals += torch.stack([truncated.sum(), plain.sum(), kl.sum(), torch.tensor(float(len(kl)))]).double()
    accepted, plain, kl, count = totals.tolist()
    return {
        f"acceptance at T={TEMPERATURE} top-k {TOP_K} top-p {TOP_P}": accepted / count,
        "acceptance at T=1": plain / count,
        "KL at T=1": kl / count,
        "positions": count,
    }
