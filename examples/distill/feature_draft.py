"""A draft that reads the verifier's hidden states: built, and trained on the same shards as the others.

Training unrolls what happens in a block: the first pass reads the verifier's hidden states everywhere; in the second,
each token is read with the draft's own hidden states of the token before, behind keys and values of the first pass; in
the third once more. All passes are judged by the verifier's labels (EAGLE-3's training-time test).
"""

import copy
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import DynamicCache, PreTrainedModel

from transformers_cactus._compat import cache_argument
from transformers_cactus.demo.shared_draft import SHARES_EMBEDDINGS
from transformers_cactus.feature_draft import FeatureDraft, FeatureDraftConfig

from .evaluation import truncated_acceptance
from .objective import TEMPERATURE, truncate
from .shards import ANSWER, FORCED, Rows
from .training import Plan, Trainer

PASS_WEIGHTS = (1.0, 0.7, 0.5)
"""Weight of each pass in the loss: a later token of a block counts only where those before it were accepted."""

BLOCK = 4
"""Tokens of a block that acceptance is told for."""


def build_feature_draft(start: PreTrainedModel, proposed: Tensor, read: Sequence[int]) -> FeatureDraft:
    """A feature draft that begins as a plain draft which does not look at the verifier's hidden states yet.

    Args:
        start: A Llama-like draft with the verifier's embedding: `build_draft`'s, trained or not.
        proposed: Tokens that it can propose, `[kept]`.
        read: Which of the verifier's layers are read, from 0.
    """
    own = copy.deepcopy(start.config)
    own.pad_token_id = None
    own.__dict__.pop(SHARES_EMBEDDINGS, None)
    config = FeatureDraftConfig(
        decoder_config=own, target_layer_ids=read, vocab_size=own.vocab_size, draft_vocab_size=len(proposed)
    )
    draft = FeatureDraft(config).to(start.device, torch.float32)
    with torch.no_grad():
        draft.decoder.layers.load_state_dict(start.base_model.layers.state_dict())
        draft.decoder.norm.load_state_dict(start.base_model.norm.state_dict())
        draft.draft_tokens.copy_(proposed)
        # Output matrices of both models are tied to the embedding here.
        draft.lm_head.weight.copy_(start.get_input_embeddings().weight[proposed])
        draft.fuse.weight.zero_()
        draft.fuse.weight[:, : own.hidden_size].fill_diagonal_(1.0)
        draft.project.weight.normal_(std=draft.project.weight.shape[1] ** -0.5)
    return draft


class Passes:
    """The unrolled passes of a draft over whole rows."""

    def __init__(self, draft: FeatureDraft, embedding: torch.nn.Module):
        self.draft, self.embedding = draft, embedding

    def __call__(self, ids: Tensor, hidden_states: Sequence[Tensor], count: int) -> list[Tensor]:
        """The draft's last hidden states in each pass, `[rows, length, hidden]`.

        Args:
            ids: `[rows, length]`.
            hidden_states: The verifier's, of each layer that is read, `[rows, length, hidden]`.
            count: How many passes.
        """
        rows, length = ids.shape
        with torch.no_grad():
            embedded = self.embedding(ids)
        features = shifted(self.draft.features(hidden_states))
        cache, passes = DynamicCache(), []
        here = torch.arange(length, device=ids.device)
        behind = here[:, None] - here[None]  # how far before its query a key is
        positions = here[None].expand(rows, -1)
        for number in range(count):
            # Behind the verifier's last token, pass k is k tokens into the block: each pass has one key for a query.
            seen = [behind >= number, *(behind == number - own for own in range(1, number + 1))]
            mask = torch.cat(seen, dim=1).expand(rows, 1, -1, -1)
            hidden = self.draft.decoder(
                inputs_embeds=self.fused(embedded, features),
                position_ids=positions,
                attention_mask=mask,
                use_cache=True,
                **{cache_argument(self.draft.decoder): cache},
            ).last_hidden_state
            passes.append(hidden)
            features = shifted(hidden)
        return passes

    def fused(self, embedded: Tensor, features: Tensor) -> Tensor:
        """What the draft's layers are given."""
        draft = self.draft
        return draft.fuse(torch.cat([embedded, draft.feature_norm(features)], dim=-1))


def shifted(features: Tensor) -> Tensor:
    """What belongs to the token before each one."""
    return F.pad(features, (0, 0, 1, 0))[:, :-1]


class FeatureObjective:
    """The divergence from the verifier over the proposed tokens, and the chance that it rejects."""

    def __init__(self, draft: FeatureDraft, *, acceptance_weight: float = 1.0, user_weight: float = 0.5):
        self.draft, self.acceptance_weight, self.user_weight = draft, acceptance_weight, user_weight
        self.place = torch.full((draft.config.vocab_size,), -1)
        self.place[draft.draft_tokens.cpu()] = torch.arange(len(draft.draft_tokens))
        self.place = self.place.to(draft.device)

    def __call__(self, hidden: Tensor, rows: Rows) -> dict[str, Tensor]:
        """`loss` and its parts, of the draft's last hidden states `[rows, length, width]`."""
        chosen = rows.role != FORCED
        weight = torch.where(rows.role[chosen] == ANSWER, 1.0, self.user_weight)
        weight = weight / weight.sum()
        top_ids, top_logp = rows.top_ids[chosen].long(), rows.top_logp[chosen].float()
        logits = self.draft.lm_head(hidden[chosen])
        place = self.place[top_ids]
        known = place >= 0
        scores = logits.gather(1, place.clamp(min=0))
        log_p = scores - logits.logsumexp(-1, keepdim=True)
        q = top_logp.exp() * known
        divergence = (q * (top_logp - log_p)).sum(-1)
        p = (scores / TEMPERATURE - (logits / TEMPERATURE).logsumexp(-1, keepdim=True)).exp() * known
        acceptance = torch.minimum(p, truncate(top_logp)).sum(-1)
        parts = {"kl": weight @ divergence, "acceptance": weight @ acceptance}
        return {"loss": parts["kl"] + self.acceptance_weight * (1 - parts["acceptance"]), **parts}


class FeatureTrainer(Trainer):
    """A run of a feature draft: the verifier reads each batch too, for its hidden states.

    Args:
        verifier: In evaluation mode.
        draft: What `build_feature_draft` returned.
        data, checkpoint, plan: See [`Trainer`].
    """

    draft: FeatureDraft

    def __init__(self, verifier: PreTrainedModel, draft: FeatureDraft, data: Path, checkpoint: Path, plan: Plan):
        self.verifier = verifier
        self.passes = Passes(draft, verifier.get_input_embeddings())
        super().__init__(draft, data, checkpoint, plan)

    def parameters(self) -> dict[str, torch.nn.Parameter]:
        """See [`Trainer.parameters`]."""
        return dict(self.draft.named_parameters())

    def begin(self, resumed: bool) -> None:
        """See [`Trainer.begin`]."""
        self.objective = FeatureObjective(self.draft, acceptance_weight=self.plan.acceptance_weight)

    @torch.no_grad()
    def hidden_states(self, rows: Rows) -> list[Tensor]:
        """What the draft reads of the verifier, each `[rows, length, hidden]`."""
        places = [layer + 1 for layer in self.draft.config.target_layer_ids]
        found = self.verifier.base_model(rows.ids.long(), output_hidden_states=places, use_cache=False).hidden_states
        return [found[place] for place in places]

    def losses(self, rows: Rows) -> dict[str, Tensor]:
        """See [`Trainer.losses`]."""
        shown: dict[str, Tensor] = {}
        total = torch.zeros((), device=rows.ids.device)
        passes = self.passes(rows.ids.long(), self.hidden_states(rows), len(PASS_WEIGHTS))
        for number, (hidden, weight) in enumerate(zip(passes, PASS_WEIGHTS, strict=True)):
            parts = self.objective(hidden, rows)
            total = total + weight * parts["loss"]
            shown[f"acceptance {number + 1}"] = parts["acceptance"]
        return {"loss": total, **shown}

    @torch.inference_mode()
    def results(self, rows: Rows) -> dict[str, float]:
        """Mean lossless acceptance at the paper's settings over answers, for each token of a block."""
        totals, positions = torch.zeros(BLOCK), 0
        for start in range(0, len(rows), 4):
            part = self.to_device(rows[slice(start, start + 4)])
            chosen = part.role == ANSWER
            positions += int(chosen.sum())
            top_ids, top_logp = part.top_ids[chosen].long(), part.top_logp[chosen].float()
            for number, hidden in enumerate(self.passes(part.ids.long(), self.hidden_states(part), BLOCK)):
                logits = self.draft.logits(hidden[chosen])
                totals[number] += truncated_acceptance(logits, top_ids, top_logp).sum().cpu()
        return {f"acceptance of token {place + 1}": float(total) / positions for place, total in enumerate(totals)}
