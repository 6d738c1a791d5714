"""Drafts that hold only their own layers: embedding and output matrix are the verifier's very tensors.

Such a folder has `cactus_shares_embeddings` in its `config.json`, and weights for the layers and the final norm only.
"""

from __future__ import annotations

import copy
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import AutoModelForCausalLM, PretrainedConfig, PreTrainedModel
from transformers.utils import cached_file

from ..subset_output import SubsetOutput

SHARES_EMBEDDINGS = "cactus_shares_embeddings"
OUTPUT_TOKENS = "output_tokens"
"""Name, among the weights, of the ids of the tokens that the draft can propose; absent where it can propose all."""
WEIGHTS = "model.safetensors"


def shares_embeddings(config: PretrainedConfig) -> bool:
    """Whether the draft with this config is stored without embedding and output matrix."""
    return bool(getattr(config, SHARES_EMBEDDINGS, False))


def own_parameters(draft: PreTrainedModel) -> dict[str, nn.Parameter]:
    """The parameters of a draft that are not the verifier's: those of its layers and its final norm, by full name."""
    return {name: p for name, p in draft.named_parameters() if ".layers." in name or ".norm." in name}


def new_shared_draft(config: PretrainedConfig, verifier: PreTrainedModel) -> PreTrainedModel:
    """A model of this config in the verifier's dtype, on its device, with its embedding and output matrix.

    Raises:
        ValueError: If the two do not fit.
    """
    mine, theirs = ((c.hidden_size, c.vocab_size) for c in (config, verifier.config))
    if mine != theirs:
        raise ValueError(
            f"the draft shares its verifier's embedding and needs hidden size {mine[0]} and vocabulary {mine[1]}, "
            f"but this verifier has {theirs[0]} and {theirs[1]}"
        )
    draft = AutoModelForCausalLM.from_config(config, dtype=verifier.dtype)
    draft.set_input_embeddings(verifier.get_input_embeddings())
    draft.set_output_embeddings(verifier.get_output_embeddings())
    return draft.to(verifier.device).eval()


def load_shared_draft(name: str, config: PretrainedConfig, verifier: PreTrainedModel) -> PreTrainedModel:
    """Read a draft that `save_shared_draft` wrote, from a folder or the Hub, for this verifier."""
    draft = new_shared_draft(config, verifier)
    weights, parameters = load_file(cached_file(name, WEIGHTS)), own_parameters(draft)
    tokens = weights.pop(OUTPUT_TOKENS, None)
    if tokens is not None:
        draft.set_output_embeddings(SubsetOutput(verifier.get_output_embeddings().weight, tokens))
    if weights.keys() != parameters.keys():
        raise ValueError(f"its {WEIGHTS} does not hold the layers that its config.json describes")
    with torch.no_grad():
        for name, parameter in parameters.items():
            parameter.copy_(weights[name])
    return draft


def save_shared_draft(draft: PreTrainedModel, folder: Path, output_tokens: torch.Tensor | None = None) -> None:
    """Write a draft's own layers in bfloat16, and its config, to a folder that `load_pair` accepts as `draft`.

    Args:
        draft (`PreTrainedModel`): The draft.
        folder (`Path`): Made if need be.
        output_tokens (`torch.LongTensor` of shape `[kept]`, *optional*): The tokens that it can propose when it is
            loaded; see [`SubsetOutput`].
    """
    folder.mkdir(parents=True, exist_ok=True)
    weights = {name: p.detach().to("cpu", torch.bfloat16).contiguous() for name, p in own_parameters(draft).items()}
    if output_tokens is not None:
        weights[OUTPUT_TOKENS] = output_tokens.to(torch.int32)
    config = copy.deepcopy(draft.config)
    config.__dict__.pop("_model_name_or_path", None)
    config.dtype = torch.bfloat16
    setattr(config, SHARES_EMBEDDINGS, True)
    config.save_pretrained(folder)
    save_file(weights, folder / WEIGHTS, metadata={"format": "pt"})
