"""A draft that reads the verifier's hidden states, after EAGLE (Li et al. 2024, 2025).

What a verifier has computed for its last tokens says more about the next ones than a small model could find out from
the text. So this draft has one or two layers of its own, no embedding, and a small output layer. At position `i` it
sees the token `x_i` and the verifier's hidden states at `i - 1`. Behind the last token that the verifier has read,
within a block, its own last hidden states take their place.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NoReturn, TypeGuard

import torch
from torch import Tensor, nn
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    GenerationMixin,
    PretrainedConfig,
    PreTrainedModel,
)
from transformers.utils import ModelOutput

from . import _compat


class FeatureDraftConfig(PretrainedConfig):
    """Configuration of a [`FeatureDraft`].

    Args:
        decoder_config (`PretrainedConfig` or `dict`): Of the draft's own layers: any decoder-only architecture of
            transformers. Its `hidden_size` is that of the verifier's embedding.
        target_layer_ids (`list[int]`): The verifier's layers whose outputs are read, from 0. Of the last one, what is
            read has been through the verifier's final norm. The name is that of transformers' DFlash drafts.
        target_hidden_size (`int`, *optional*): Width of the verifier's hidden states; `hidden_size` by default.
        vocab_size (`int`): The verifier's.
        draft_vocab_size (`int`, *optional*): How many tokens the draft can propose; all by default.
    """

    model_type = "cactus_feature_draft"
    sub_configs: ClassVar = {"decoder_config": AutoConfig}

    def __init__(
        self,
        decoder_config: PretrainedConfig | dict[str, Any] | None = None,
        target_layer_ids: Sequence[int] = (),
        target_hidden_size: int | None = None,
        vocab_size: int = 0,
        draft_vocab_size: int | None = None,
        **kwargs: Any,
    ):
        if isinstance(decoder_config, dict):
            decoder_config = AutoConfig.for_model(**decoder_config)
        # transformers writes into the configurations of a model that it builds.
        self.decoder_config = copy.deepcopy(decoder_config)
        self.target_layer_ids = list(target_layer_ids)
        self.target_hidden_size = target_hidden_size
        self.vocab_size = vocab_size
        self.draft_vocab_size = draft_vocab_size
        super().__init__(**kwargs)


@dataclass
class FeatureDraftOutput(ModelOutput):
    """What a [`FeatureDraft`] returns."""

    logits: Tensor | None = None
    """`[batch, positions, vocab]`."""
    last_hidden_state: Tensor | None = None
    """`[batch, positions, hidden]`: the next step reads them in the place of the verifier's hidden states."""


class FeatureDraft(PreTrainedModel, GenerationMixin):
    """A draft that reads the verifier's hidden states. It runs in the fast engine, as `assistant_model`.

    Args:
        config ([`FeatureDraftConfig`]): Its configuration.

    Raises:
        ValueError: If the configuration lacks something, or names layers or a vocabulary that cannot be.

    Example:
        ```python
        draft = FeatureDraft.from_pretrained("my-draft")
        transformers_cactus.generate(verifier, **inputs, assistant_model=draft, do_sample=True, cactus_delta=0.5)
        ```
    """

    config_class = FeatureDraftConfig
    base_model_prefix = "decoder"
    main_input_name = "inputs_embeds"
    _supports_sdpa = True
    draft_tokens: Tensor

    def __init__(self, config: FeatureDraftConfig):
        super().__init__(config)
        _check(config)
        own: Any = config.decoder_config
        width, read = own.hidden_size, config.target_hidden_size or own.hidden_size
        self.project = nn.Linear(len(config.target_layer_ids) * read, width, bias=False)
        self.feature_norm = nn.RMSNorm(width, eps=1e-5)
        self.fuse = nn.Linear(2 * width, width, bias=False)
        self.decoder = AutoModel.from_config(own)
        self.decoder.set_input_embeddings(None)
        proposed = config.draft_vocab_size or config.vocab_size
        self.lm_head = nn.Linear(width, proposed, bias=False)
        self.register_buffer("draft_tokens", torch.arange(proposed))
        self.post_init()

    def get_input_embeddings(self) -> None:
        """Nothing: the verifier's embedding is used."""
        return None

    def features(self, hidden_states: Sequence[Tensor]) -> Tensor:
        """What the draft reads of the verifier.

        Args:
            hidden_states (sequence of `torch.Tensor` of shape `[batch, tokens, target_hidden]`): Of the layers
                `target_layer_ids`, in that order.

        Returns:
            `torch.Tensor` of shape `[batch, tokens, hidden]`.
        """
        weight = self.project.weight
        return self.project(torch.cat([states.to(weight.device, weight.dtype) for states in hidden_states], dim=-1))

    def forward(
        self, inputs_embeds: Tensor, features: Tensor, places: Tensor | int | None = None, **kwargs: Any
    ) -> FeatureDraftOutput:
        """Runs the draft's layers.

        Args:
            inputs_embeds (`torch.Tensor` of shape `[batch, block, hidden]`): Tokens, through the verifier's embedding.
            features (`torch.Tensor` of shape `[batch, block, hidden]`): [`features`] of the token before each one, or
                the draft's own `last_hidden_state` for it; zeros where there is none.
            places (`torch.LongTensor` of shape `[batch]` or `int`, *optional*): One position of each row to return;
                all by default.
            **kwargs: For the decoder: positions, mask, cache.

        Returns:
            [`FeatureDraftOutput`]: Of the positions asked for.
        """
        pair = torch.cat([inputs_embeds, self.feature_norm(features)], dim=-1)
        hidden = self.decoder(inputs_embeds=self.fuse(pair), **kwargs).last_hidden_state
        if isinstance(places, Tensor):
            hidden = hidden[torch.arange(len(places), device=hidden.device), places, None]
        elif places is not None:
            hidden = hidden[:, places, None]
        return FeatureDraftOutput(logits=self.logits(hidden), last_hidden_state=hidden)

    def logits(self, hidden: Tensor) -> Tensor:
        """Scores of the next token.

        Args:
            hidden (`torch.Tensor` of shape `[..., hidden]`): Last hidden states.

        Returns:
            `torch.Tensor` of shape `[..., vocab]`: Over the verifier's vocabulary, `-inf` for tokens that are never
            proposed.
        """
        scores = self.lm_head(hidden)
        if len(self.draft_tokens) == self.config.vocab_size:
            return scores
        logits = scores.new_full((*scores.shape[:-1], self.config.vocab_size), -torch.inf)
        return logits.index_copy_(-1, self.draft_tokens, scores)

    def check_verifier(self, verifier: PreTrainedModel) -> None:
        """Raises for a verifier whose hidden states it cannot read.

        Args:
            verifier (`PreTrainedModel`): A decoder-only model.

        Raises:
            ValueError: If it has too few layers, or other sizes than the draft was made for.
        """
        config, own = _compat.text_config(verifier), self.config
        width = own.decoder_config.hidden_size
        needed = {
            "vocab_size": own.vocab_size,
            "hidden_size": own.target_hidden_size or width,
            "embedding size": width,
        }
        embedding = verifier.get_input_embeddings().weight
        found = {
            "vocab_size": config.vocab_size,
            "hidden_size": config.hidden_size,
            "embedding size": embedding.shape[1],
        }
        layers = max(own.target_layer_ids, default=-1)
        if config.num_hidden_layers <= layers:
            raise ValueError(
                f"this FeatureDraft reads the layers {own.target_layer_ids} (target_layer_ids, from 0), but "
                f"{type(verifier).__name__} has {config.num_hidden_layers}. Take the draft that was trained for this "
                "verifier, or other layers."
            )
        wrong = [f"{name} {value}, not {found[name]}" for name, value in needed.items() if value != found[name]]
        if wrong:
            raise ValueError(
                f"this FeatureDraft was made for another verifier than {type(verifier).__name__}: it needs "
                f"{'; '.join(wrong)}. Take the draft that was trained for this verifier."
            )

    def generate(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Raises: this draft writes no text by itself.

        Raises:
            TypeError: Always.
        """
        raise TypeError(
            "a FeatureDraft reads its verifier's hidden states: pass it as assistant_model=, to a verifier."
        )


def _check(config: FeatureDraftConfig) -> None:
    if config.decoder_config is None:
        raise ValueError("a FeatureDraft needs decoder_config: the configuration of its own layers.")
    layers, proposed = config.target_layer_ids, config.draft_vocab_size
    whole = all(isinstance(layer, int) and not isinstance(layer, bool) and layer >= 0 for layer in layers)
    if not layers or not whole or len(set(layers)) < len(layers):
        raise ValueError(
            f"target_layer_ids must name at least one layer of the verifier, each once, from 0, got {layers}."
        )
    if proposed is not None and not 1 <= proposed <= config.vocab_size:
        raise ValueError(
            f"draft_vocab_size must be from 1 to vocab_size, which is {config.vocab_size}, got {proposed}: leave it "
            "out for all tokens."
        )


def is_feature_draft(model: Any) -> TypeGuard[FeatureDraft]:
    """Whether a model is a [`FeatureDraft`], of this package or of a copy of it in a repository on the Hub."""
    return getattr(getattr(model, "config", None), "model_type", None) == FeatureDraftConfig.model_type


# A repository may bring another copy of this module.
AutoConfig.register(FeatureDraftConfig.model_type, FeatureDraftConfig, exist_ok=True)
AutoModelForCausalLM.register(FeatureDraftConfig, FeatureDraft, exist_ok=True)
