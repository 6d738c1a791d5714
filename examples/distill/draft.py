"""The draft: a few of the verifier's own layers between its frozen embedding and output matrix."""

import copy
from collections.abc import Sequence

import torch
from transformers import PreTrainedModel

from transformers_cactus.demo.shared_draft import new_shared_draft, own_parameters


def build_draft(verifier: PreTrainedModel, layers: Sequence[int]) -> PreTrainedModel:
    """A model of the verifier's class with copies of some of its layers, sharing its embedding and output matrix.

    Only the copied layers and the final norm are trainable.

    Args:
        verifier: A decoder-only model whose base model has `layers` and `norm`.
        layers: Which layers to start from, e.g. `(0, 1)`; one may be repeated.
    """
    source = verifier.base_model
    if not (hasattr(source, "layers") and hasattr(source, "norm")):
        raise ValueError(f"{type(verifier).__name__} has no `layers` and `norm`: only Llama-like models are supported")
    config = copy.deepcopy(verifier.config)
    config.num_hidden_layers = len(layers)
    if getattr(config, "layer_types", None):
        config.layer_types = [config.layer_types[layer] for layer in layers]
    draft = new_shared_draft(config, verifier)
    for to, layer in zip(draft.base_model.layers, layers, strict=True):
        to.load_state_dict(source.layers[layer].state_dict())
    draft.base_model.norm.load_state_dict(source.norm.state_dict())
    draft.requires_grad_(False)
    for parameter in own_parameters(draft).values():
        parameter.requires_grad_(True)
    check_plain_output(draft)
    return draft.train()


@torch.no_grad()
def check_plain_output(draft: PreTrainedModel) -> None:
    """Refuse models that change the logits after the output matrix: the objective scores a part of its rows only."""
    ids = torch.arange(8, device=draft.device)[None]
    hidden = draft.base_model(input_ids=ids).last_hidden_state
    if not torch.allclose(draft.get_output_embeddings()(hidden), draft(input_ids=ids).logits, rtol=1e-3, atol=1e-3):
        raise ValueError(f"{type(draft).__name__} scales or caps its logits, which this recipe does not support")
