"""The distributions of both models at every position of a text, from one forward of each."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import PreTrainedModel

from .. import _compat
from ..rows import widest_float
from .sampling import Sampling
from .texts import Text


class Positions(NamedTuple):
    """What both models say at the positions of an answer. Columns are the tokens that either gives a probability."""

    draft: Tensor
    """`p`, after temperature, top-k and top-p, `[positions, columns]`, in float64 (float32 on devices without it)."""
    verifier: Tensor
    """`q`, likewise."""
    log_probs: Tensor
    """The verifier's log-probability in nats of each token of the answer, at temperature 1 without truncation,
    `[positions]`."""


@torch.inference_mode()
def read_positions(verifier: PreTrainedModel, draft: PreTrainedModel, text: Text, sampling: Sampling) -> Positions:
    """Reads a text with both models.

    Args:
        verifier (`PreTrainedModel`): The large model.
        draft (`PreTrainedModel`): The small one, with the same tokenizer. Vocabularies may be padded differently.
        text ([`Text`]): Prompt and answer, the answer not empty.
        sampling ([`Sampling`]): What turns logits into `p` and `q`.

    Returns:
        [`Positions`], on the verifier's device.

    Raises:
        FloatingPointError: If a model's logits are no numbers.
    """
    logits = [_logits(model, text) for model in (draft, verifier)]
    device = logits[1].device
    width = max(rows.shape[-1] for rows in logits)
    rows = []
    for name, values in zip(("draft", "verifier"), logits, strict=True):
        # A token that a model lacks has probability 0 there.
        missing = values.new_full((len(values), width - values.shape[-1]), -torch.inf)
        probs = sampling.probabilities(torch.cat([values, missing], dim=-1).to(device))
        if not bool(probs.isfinite().all()):
            raise FloatingPointError(f"the {name}'s logits hold NaN or infinity on a text of {len(text.ids)} tokens.")
        rows.append(probs)
    own = torch.tensor(text.ids[text.begin :], device=device)[:, None]
    log_probs = logits[1].log_softmax(-1).gather(-1, own)[:, 0]
    p, q = (x.to(widest_float(device)) for x in _used_columns(*rows))
    return Positions(p, q, log_probs)


def _logits(model: PreTrainedModel, text: Text) -> Tensor:
    """Logits in float32 that predict the tokens of the answer, `[positions, vocab]`."""
    answer = len(text.ids) - text.begin
    options: dict[str, Any] = {}
    if "logits_to_keep" in _compat.forward_parameters(model):
        options["logits_to_keep"] = answer + 1
    ids = torch.tensor([text.ids], device=_compat.input_device(model))
    logits: Tensor = model(ids, **options).logits[0, -answer - 1 : -1].float()
    return logits


def _used_columns(draft: Tensor, verifier: Tensor) -> tuple[Tensor, Tensor]:
    used = torch.maximum(draft, verifier)
    columns = int((used > 0).sum(-1).max())
    if columns == used.shape[-1]:
        return draft, verifier
    kept = used.topk(columns, dim=-1).indices
    return draft.gather(-1, kept), verifier.gather(-1, kept)
