"""What a call of `generate` asks for, and whether it can be had."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import Cache, PreTrainedModel

from . import _compat
from .advice import advise
from .configuration import RunOptions
from .copying import SMALLEST as SMALLEST_COPIED
from .feature_draft import is_feature_draft
from .parameters import check_parameter

DRAFT_OPTIONS = ("prompt_lookup_num_tokens", "assistant_early_exit", "use_mtp")
"""Options of a `GenerationConfig` that bring a draft without an assistant model."""

PADDING_LIMIT = 1024
"""Vocabulary sizes further apart than this are taken for different tokenizers, not for one tokenizer padded twice
(Qwen2.5's sizes differ by 128)."""

DRAFT_SETTINGS = ("num_assistant_tokens", "num_assistant_tokens_schedule", "assistant_confidence_threshold")
"""Options that steer a draft model. transformers reads them from the draft's own config and overlooks the call's."""

SCHEDULES = ("constant", "heuristic", "heuristic_transient", "adaptive")
"""What `num_assistant_tokens_schedule` may be."""


class CallSettings:
    """A call's settings, as `generate` will see them: an argument, else the given config's, else the model's.

    Args:
        model (`PreTrainedModel`): The verifier.
        call (`dict`): The call's arguments by name, without the `cactus_*` options.
        options ([`RunOptions`]): The `cactus_*` options that are not about the rule.
    """

    def __init__(self, model: PreTrainedModel, call: dict[str, Any], options: RunOptions):
        self.model = _compat.bare(model)
        self.call = _without_equal_tokenizer(call)
        self.options = options

    def __getitem__(self, name: str) -> Any:
        if name in self.call:
            return self.call[name]
        return self.said(name)

    def given(self, name: str) -> Any:
        """What this call says, leaving the model's own generation config aside."""
        value = self.call.get(name)
        return getattr(self.call.get("generation_config"), name, None) if value is None else value

    def said(self, name: str) -> Any:
        """The same, or else what the model's own config says: an argument of `None` says nothing."""
        given = self.given(name)
        return getattr(self.model.generation_config, name, None) if given is None else given

    @property
    def batch_size(self) -> int:
        """Prompts of the call; 1 where it has none."""
        for name in ("input_ids", "inputs", "input_features", "inputs_embeds", "pixel_values"):
            if isinstance(self.call.get(name), Tensor):
                return int(self.call[name].shape[0])
        return 1

    @property
    def sequences(self) -> int:
        """Sequences that the call returns."""
        return self.batch_size * (self["num_return_sequences"] or 1)

    def longest(self) -> int | None:
        """Tokens of the longest row that can occur, or `None` where the call does not say."""
        prompt = self.call.get("input_ids") if self.call.get("inputs") is None else self.call["inputs"]
        if self["max_new_tokens"] is None:
            return self["max_length"]
        return None if prompt is None else int(prompt.shape[1]) + int(self["max_new_tokens"])

    def draft_setting(self, name: str) -> Any:
        """An option that steers a draft: what is said of it, else the draft's own, where transformers reads it."""
        said = self.said(name)
        config = getattr(self["assistant_model"], "generation_config", None)
        return getattr(config, name, None) if said is None else said

    @property
    def schedule(self) -> str:
        """How long the blocks of a draft model are to be: what the call or the draft says, else `"adaptive"`.

        That has the clock decide. So blocks are constant where nobody asks for it and it would do harm: where one of
        `DRAFT_SETTINGS` says something of them, where PyTorch is to use deterministic algorithms, where several
        processes have to stay in step, and in compiled forwards, of which adaptive blocks need several.
        """
        said = {name: self.draft_setting(name) for name in DRAFT_SETTINGS}
        if said["num_assistant_tokens_schedule"] is not None:
            return said["num_assistant_tokens_schedule"]
        in_step = torch.are_deterministic_algorithms_enabled() or self._split_model() is not None
        steered = any(value is not None for value in said.values())
        return "constant" if steered or in_step or self.options.compile else "adaptive"

    @property
    def asks_for_adaptive(self) -> bool:
        """Whether a draft model's blocks are to have the schedule `"adaptive"` by name."""
        return (
            self["assistant_model"] is not None and self.draft_setting("num_assistant_tokens_schedule") == "adaptive"
        )

    def _split_model(self) -> str | None:
        """Which of the models is split over processes that each run this loop."""
        models = {"verifier": self.model, "draft": self["assistant_model"]}
        return next((name for name, model in models.items() if _compat.is_tensor_parallel(model)), None)

    @property
    def copies(self) -> bool:
        """Whether a draft model's distribution is mixed with prompt look-up."""
        # Not by their truth: torch.compile gives a model a length that raises.
        objects = {name for name in ("assistant_model", "assistant_tokenizer") if self[name] is not None}
        drafts = objects | {name for name in DRAFT_OPTIONS if self[name]}
        return drafts == {"assistant_model", "prompt_lookup_num_tokens"}

    def has_draft(self) -> bool:
        """Whether anything will propose tokens."""
        return self["assistant_model"] is not None or any(self[name] for name in DRAFT_OPTIONS)

    def check(self) -> None:
        """Raises, before any model runs, for what cannot work."""
        if not self.has_draft():
            raise ValueError(
                "cactus options need a draft to verify, and this call has none. Pass assistant_model=<a smaller model "
                "with the same tokenizer>, or prompt_lookup_num_tokens=10 to draft from the prompt itself, or "
                "assistant_early_exit=<layer> for a model trained for it."
            )
        self._check_draft()
        self._check_objects()
        if self.options.certificate and not self["return_dict_in_generate"]:
            raise ValueError(
                "cactus_certificate is reported on the output: pass return_dict_in_generate=True with it."
            )
        if self["custom_generate"] is not None:
            raise ValueError("custom_generate and cactus options cannot be combined: both replace the decoding loop.")
        if (self["num_beams"] or 1) > 1:
            raise ValueError(
                f"cactus options need num_beams=1, got {self['num_beams']}: beams are not sampled tokens."
            )
        if self["assistant_ensemble_weight"] is not None:
            raise ValueError(
                "assistant_ensemble_weight and cactus options are two acceptance rules; a call can have one. Leave "
                "one of them out."
            )
        if self["use_cache"] is False:
            raise ValueError("cactus options need a cache to roll back: leave out use_cache=False.")
        if (self["guidance_scale"] or 1) != 1:
            raise ValueError(
                "guidance_scale and cactus options cannot be combined: classifier-free guidance keeps a context of "
                "its own that cannot be rolled back after a rejection."
            )
        if self["stop_strings"] is not None and self["tokenizer"] is None:
            raise ValueError("stop_strings need tokenizer=<the verifier's tokenizer> in the call.")
        ids = self.call.get("inputs") if self.call.get("input_ids") is None else self.call["input_ids"]
        if self.call.get("inputs_embeds") is not None and ids is None and not self.model.config.is_encoder_decoder:
            raise ValueError(
                "cactus options need the prompt's token ids, from which the draft continues. Pass input_ids=<the ids> "
                "beside inputs_embeds."
            )
        for name, model in (("verifier", self.model), ("draft", self["assistant_model"])):
            if model is not None and _compat.is_stateful(model):
                raise ValueError(
                    f"the {name} {type(model).__name__} keeps a recurrent state, which cannot be rolled back after a "
                    "rejected token: speculative decoding does not work with it."
                )
        if self["assistant_early_exit"] and not _compat.can_exit_early(self.model):
            raise ValueError(
                f"assistant_early_exit needs a decoder-only language model, got {type(self.model).__name__}."
            )
        if self["streamer"] is not None and self.sequences > 1:
            raise ValueError(
                f"a streamer takes one sequence, this call has {self.sequences}: call generate() once for each."
            )
        self._check_vocabularies()

    def _check_draft(self) -> None:
        draft, settings = self["assistant_model"], [name for name in DRAFT_OPTIONS if self[name]]
        if draft is not None and not (hasattr(draft, "generate") and hasattr(draft, "generation_config")):
            raise TypeError(
                f"assistant_model must be a model, got {type(draft).__name__}: load it with from_pretrained()."
            )
        if len(settings) + (draft is not None) > 1 and not self.copies:
            names = ", ".join([*settings, *(["assistant_model"] if draft is not None else [])])
            raise ValueError(f"a call has one draft, this one has several ({names}). Leave out all but one.")
        for name in ("prompt_lookup_num_tokens", "num_assistant_tokens", "max_matching_ngram_size"):
            value = self.draft_setting(name) if name in DRAFT_SETTINGS else self[name]
            if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
                raise ValueError(f"{name} must be a whole number of at least 1, got {value!r}.")
        if is_feature_draft(draft):
            draft.check_verifier(self.model)
            if self["assistant_tokenizer"] is not None:
                raise ValueError("a FeatureDraft has its verifier's tokenizer: leave out assistant_tokenizer.")
        largest = self.given("max_matching_ngram_size")
        if self.copies and largest is not None and largest < SMALLEST_COPIED:
            raise ValueError(
                f"max_matching_ngram_size must be at least {SMALLEST_COPIED} beside assistant_model, got {largest}: "
                "what followed a single token says less than a draft model does."
            )
        schedule = self.draft_setting("num_assistant_tokens_schedule")
        if schedule is not None and schedule not in SCHEDULES:
            raise ValueError(
                f"num_assistant_tokens_schedule must be one of {', '.join(map(repr, SCHEDULES))}, got {schedule!r}."
            )
        split = self._split_model() if schedule == "adaptive" and draft is not None else None
        if split is not None:
            raise ValueError(
                f"num_assistant_tokens_schedule='adaptive' goes by the clock, and the {split} is split over processes "
                "that have to run the same forwards: leave it out, or give 'constant'."
            )
        threshold = self.draft_setting("assistant_confidence_threshold")
        if threshold is not None:
            check_parameter("assistant_confidence_threshold", threshold, unit="a probability", maximum=1.0)
        ignored = [name for name in DRAFT_SETTINGS if self.given(name) is not None]
        if draft is None and self["prompt_lookup_num_tokens"] and ignored:
            advise(
                f"no effect without assistant_model: {', '.join(ignored)}. prompt_lookup_num_tokens says how many "
                "tokens are drafted."
            )
        layers = (
            getattr(_compat.text_config(self.model), "num_hidden_layers", None)
            if self["assistant_early_exit"]
            else None
        )
        if layers is not None and not 1 <= self["assistant_early_exit"] < layers:
            raise ValueError(
                f"assistant_early_exit must be a layer from 1 to {layers - 1}, got {self['assistant_early_exit']!r}."
            )
        tokenizers = self["tokenizer"], self["assistant_tokenizer"]
        if tokenizers[1] is not None and (draft is None or tokenizers[0] is None):
            raise ValueError("assistant_tokenizer needs assistant_model and tokenizer=<the verifier's> beside it.")

    def _check_objects(self) -> None:
        for name in ("past_key_values", "cache"):
            cache = self.call.get(name)
            if cache is not None and not isinstance(cache, Cache):
                raise TypeError(
                    f"{name} must be a cache, as an earlier call returns it with return_dict_in_generate=True, got "
                    f"{type(cache).__name__}."
                )
        streamer = self["streamer"]
        if streamer is not None and not (hasattr(streamer, "put") and hasattr(streamer, "end")):
            raise TypeError(
                "streamer must be an object with put() and end(), such as transformers.TextStreamer(tokenizer), got "
                f"{type(streamer).__name__}."
            )

    def _check_vocabularies(self) -> None:
        draft = self["assistant_model"]
        if draft is None or self["assistant_tokenizer"] is not None:
            return
        sizes = _compat.vocab_size(self.model), _compat.vocab_size(draft)
        if abs(sizes[0] - sizes[1]) > PADDING_LIMIT:
            raise ValueError(
                f"the verifier's vocabulary has {sizes[0]} entries and the draft's {sizes[1]}: too far apart for one "
                "tokenizer padded to different sizes. Pass tokenizer=<the verifier's> and assistant_tokenizer=<the "
                "draft's>, or take a draft with the verifier's tokenizer."
            )


def _without_equal_tokenizer(call: dict[str, Any]) -> dict[str, Any]:
    """A call without `assistant_tokenizer` where that has the verifier's vocabulary.

    transformers' pipelines pass it on whenever two models pad one vocabulary to different sizes.
    """
    vocabularies = [getattr(call.get(name), "get_vocab", None) for name in ("tokenizer", "assistant_tokenizer")]
    if None in vocabularies or vocabularies[0]() != vocabularies[1]():  # type: ignore[misc]
        return call
    return {name: value for name, value in call.items() if name != "assistant_tokenizer"}
