"""Every private or version-dependent name of transformers that this package touches.

Checked against transformers 5.17.0 and 5.24.0.
"""

import dataclasses
import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import lru_cache
from typing import Any

from transformers import PrefixConstrainedLogitsProcessor
from transformers.generation import GenerateDecoderOnlyOutput


@lru_cache(maxsize=256)
def _parameters(forward: Callable[..., Any]) -> frozenset[str]:
    return frozenset(inspect.signature(forward).parameters)


def forward_parameters(model: Any) -> frozenset[str]:
    """Return the names of the parameters of the model's forward."""
    return _parameters(type(model).forward)


def cache_argument(model: Any) -> str:
    """Return the name under which the model's forward takes its cache: `past_key_values` in 5.17, `cache` in 5.24."""
    return "cache" if "cache" in forward_parameters(model) else "past_key_values"


def text_config(model: Any) -> Any:
    """Return the configuration of the part of the model that writes text."""
    return model.config.get_text_config(decoder=True)


def attention_implementation(model: Any) -> str:
    """Return the name of the attention implementation in use, such as "sdpa" or "eager"."""
    return str(text_config(model)._attn_implementation)


def is_stateful(model: Any) -> bool:
    """Whether the model keeps a state that cannot be rolled back token by token."""
    return bool(model._is_stateful)


def relies_on_given_mask(model: Any) -> bool:
    """Whether attention depends on the prepared mask and the positions alone.

    The library promises this for models that run with a static cache: its buffer is longer than what is filled, so
    nothing may be derived from the number of keys.
    """
    return bool(model._can_compile_fullgraph)


def has_own_masks(model: Any) -> bool:
    """Whether the model replaces the library's function that builds masks from layer types."""
    return hasattr(model, "create_masks_for_generate")


def is_heterogeneous(config: Any) -> bool:
    """Whether layers of one type may have different settings, such as windows of different size."""
    return bool(getattr(config, "is_heterogeneous", False))


def record_past(cache: Any) -> None:
    """Make layers with a bounded memory (sliding windows) keep what `roll_back` needs."""
    cache.activate_past_recording()


def roll_back(cache: Any, tokens: int) -> None:
    """Remove the last tokens of every row from a cache of transformers.

    Args:
        cache: a cache on which `record_past` was called before its first use.
        tokens: how many, at least 0; 0 still trims sliding windows to their working size.
    """
    cache.crop(-tokens)


def vocab_size(model: Any) -> int:
    """Return the number of entries of the model's output vocabulary."""
    return int(model.config.get_text_config().vocab_size)


def synced_gpus(model: Any, requested: bool | None) -> bool:
    """Whether every process has to go on running until all are finished, as `generate` decides it."""
    return bool(model._extract_generation_mode_kwargs(None, {}, requested, None, None)["synced_gpus"])


def assisted_decoding(
    model: Any,
    wrap: Callable[[Any], Any],
    draft_processors: Any,
    input_ids: Any,
    **arguments: Any,
) -> Any:
    """Run transformers' assisted decoding loop with a wrapped candidate generator, without touching the model.

    Args:
        model: the verifier.
        wrap: gets the candidate generator that the loop would use, returns the one that it uses.
        draft_processors: the logits processors that the candidate generator gets; the loop gets those in `arguments`.
        input_ids: the prompt.
        **arguments: the loop's other arguments.
    """
    return type(model)._assisted_decoding(_WrappedVerifier(model, wrap, draft_processors), input_ids, **arguments)


class _WrappedVerifier:
    """Stands in for the verifier as the loop's `self`: everything is the model's but the choice of generator."""

    def __init__(self, model: Any, wrap: Callable[[Any], Any], draft_processors: Any):
        self._model = model
        self._wrap = wrap
        self._draft_processors = draft_processors

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._model(*args, **kwargs)

    def _get_candidate_generator(self, **arguments: Any) -> Any:
        arguments["logits_processor"] = self._draft_processors
        return self._wrap(self._model._get_candidate_generator(**arguments))


def apply_draft_settings(generator: Any, settings: dict[str, Any]) -> None:
    """Let a candidate generator with a draft model follow the call's settings; it reads the draft's config only."""
    for name, value in settings.items():
        for holder in (generator, getattr(generator, "assistant_generation_config", None)):
            if hasattr(holder, name):
                setattr(holder, name, value)
    if "assistant_confidence_threshold" in settings and hasattr(generator, "generation_config"):
        generator.generation_config.assistant_confidence_threshold = settings["assistant_confidence_threshold"]


def draft_from_ids(generator: Any) -> None:
    """Let a candidate generator's draft model read the prompt's ids: it gets the verifier's embeddings as well."""
    getattr(generator, "assistant_kwargs", {}).pop("inputs_embeds", None)


@contextmanager
def unchanged_draft(draft: Any) -> Iterator[None]:
    """Put back what candidate generators write to the draft, also after an exception.

    Drafting with another tokenizer resets the draft's repetition penalty; early exit sets its number of layers.
    """
    config = draft.generation_config
    penalty = config.repetition_penalty
    base = getattr(draft, draft.base_model_prefix, draft)
    layers = getattr(base.config, "num_hidden_layers", None)
    try:
        yield
    finally:
        config.repetition_penalty = penalty
        if layers is not None and base.config.num_hidden_layers != layers:
            base.config.num_hidden_layers = layers


def processor_of_row(processor: Any, row: int) -> Any:
    """Return a processor for one row of a batch, called with that row alone."""
    return processor_of_rows(processor, [row])


def processor_of_rows(processor: Any, rows: list[int]) -> Any:
    """Return a processor for some rows of a batch, called with these rows.

    Only the one for `prefix_allowed_tokens_fn` tells rows apart: it hands their numbers to the function.
    """
    if not isinstance(processor, PrefixConstrainedLogitsProcessor):
        return processor
    allowed = processor._prefix_allowed_tokens_fn
    return PrefixConstrainedLogitsProcessor(lambda index, ids: allowed(rows[index], ids), num_beams=1)


def decoder_only_output(*, cache: Any, **fields: Any) -> GenerateDecoderOnlyOutput:
    """Return what `generate` returns with `return_dict_in_generate`; 5.17 and 5.24 name its cache differently."""
    names = {field.name for field in dataclasses.fields(GenerateDecoderOnlyOutput)}
    return GenerateDecoderOnlyOutput(**fields, **{"cache" if "cache" in names else "past_key_values": cache})


def generate_parameters(model: Any) -> frozenset[str]:
    """Return the names of the parameters of the model's `generate`."""
    return _parameters(type(model).generate)
