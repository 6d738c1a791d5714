"""Every private or version-dependent name of transformers, PEFT and torch.compile that this package touches.

Checked against transformers 5.17.0 and 5.24.0, PEFT 0.21.2 and torch 2.13.0.
"""

import dataclasses
import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import lru_cache
from typing import Any

import torch
from transformers import (
    EncoderNoRepeatNGramLogitsProcessor,
    EncoderRepetitionPenaltyLogitsProcessor,
    PrefixConstrainedLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
)
from transformers.generation import GenerateDecoderOnlyOutput
from transformers.generation.candidate_generator import AssistantVocabTranslatorCache


@lru_cache(maxsize=256)
def _parameters(forward: Callable[..., Any]) -> frozenset[str]:
    return frozenset(inspect.signature(forward).parameters)


def uncompiled(model: Any) -> Any:
    """Return the model inside what `torch.compile(model)` returns, whose `generate` is the inner model's."""
    return getattr(model, "_orig_mod", model)


def bare(model: Any) -> Any:
    """Return the model inside the wrappers of `torch.compile` and PEFT, adapters included.

    Not from a wrapper that adds virtual tokens to the prompt: there PEFT itself has no model to return that does.
    """
    model = uncompiled(model)
    if not hasattr(type(model), "get_base_model") or model.active_peft_config.is_prompt_learning:
        return model
    return uncompiled(model.get_base_model())


def forward_parameters(model: Any) -> frozenset[str]:
    """Return the names of the parameters of the model's forward."""
    return _parameters(type(bare(model)).forward)


def cache_argument(model: Any) -> str:
    """Return the name under which the model's forward takes its cache: `past_key_values` in 5.17, `cache` in 5.24."""
    return "cache" if "cache" in forward_parameters(model) else "past_key_values"


def input_device(model: Any) -> torch.device:
    """Return the device on which the model takes its inputs; weights that accelerate offloads are elsewhere."""
    if model.device.type != "meta":
        return model.device
    hooks = (getattr(module, "_hf_hook", None) for module in model.modules())
    devices = (getattr(part, "execution_device", None) for hook in hooks for part in getattr(hook, "hooks", [hook]))
    return torch.device(next((device for device in devices if device is not None), model.device))


def text_config(model: Any) -> Any:
    """Return the configuration of the part of the model that writes text."""
    return model.config.get_text_config(decoder=True)


def attention_implementation(model: Any) -> str:
    """Return the name of the attention implementation in use, such as "sdpa" or "eager"."""
    return str(text_config(model)._attn_implementation)


def is_stateful(model: Any) -> bool:
    """Whether the model keeps a state that cannot be rolled back token by token."""
    return bool(model._is_stateful)


def can_exit_early(model: Any) -> bool:
    """Whether the library can run the first layers of the model as a draft."""
    base = getattr(model, model.base_model_prefix, None)
    return not model.config.is_encoder_decoder and hasattr(getattr(base, "config", None), "num_hidden_layers")


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


def is_tensor_parallel(model: Any) -> bool:
    """Whether a model's layers are split over processes, each of which runs the whole of `generate`."""
    return (getattr(model, "tp_size", None) or 1) > 1


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


def candidate_generator(model: Any, settings: dict[str, Any], **arguments: Any) -> Any:
    """Make the candidate generator that transformers would use, with the call's settings of its draft."""
    generator = model._get_candidate_generator(**arguments)
    apply_draft_settings(generator, settings)
    return generator


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
def unchanged_draft(draft: Any, tokenizer: Any = None) -> Iterator[None]:
    """Put back what candidate generators write to the draft, also after an exception.

    Drafting with another tokenizer resets the draft's repetition penalty and, with sampling, replaces its embeddings
    for good by ones for the tokens that both vocabularies have; early exit sets its number of layers.

    Args:
        draft: the draft, or the verifier where it drafts by early exit.
        tokenizer: the verifier's, where the draft has another one.
    """
    config = draft.generation_config
    embeddings = draft.get_input_embeddings(), draft.get_output_embeddings()
    penalty = config.repetition_penalty
    base = getattr(draft, draft.base_model_prefix, draft)
    layers = getattr(base.config, "num_hidden_layers", None)
    try:
        yield
    finally:
        config.repetition_penalty = penalty
        if layers is not None and base.config.num_hidden_layers != layers:
            base.config.num_hidden_layers = layers
        if draft.get_output_embeddings() is not embeddings[1]:
            draft.set_input_embeddings(embeddings[0])
            draft.set_output_embeddings(embeddings[1])
            # The library would take the translation that it remembers for one with replaced embeddings.
            AssistantVocabTranslatorCache._cache.pop(tokenizer, None)


def processor_of_rows(processor: Any, rows: list[int], prompts: Any, width: int) -> Any:
    """Return a processor for some rows of a batch, called with these rows alone and without their padding.

    Few processors tell rows apart: the one for `prefix_allowed_tokens_fn` hands their numbers to the function, and
    some hold what they need of each row's prompt.

    Args:
        processor: the processor that `generate` set up for the padded batch.
        rows: numbers of the rows.
        prompts: their prompts without padding, `[len(rows), length]`.
        width: columns of the padded prompts.
    """
    if isinstance(processor, PrefixConstrainedLogitsProcessor):
        allowed = processor._prefix_allowed_tokens_fn
        return PrefixConstrainedLogitsProcessor(lambda index, ids: allowed(rows[index], ids), num_beams=1)
    if type(processor) is RepetitionPenaltyLogitsProcessor and processor.prompt_ignore_length is not None:
        ignored, padding = processor.prompt_ignore_length, width - prompts.shape[1]
        ignored = max(ignored - padding, 0) if isinstance(ignored, int) else (ignored[rows] - padding).clamp(min=0)
        return RepetitionPenaltyLogitsProcessor(processor.penalty, ignored)
    if type(processor) is EncoderRepetitionPenaltyLogitsProcessor:
        return EncoderRepetitionPenaltyLogitsProcessor(1 / processor.penalty, prompts)
    if type(processor) is EncoderNoRepeatNGramLogitsProcessor:
        return EncoderNoRepeatNGramLogitsProcessor(processor.ngram_size, prompts)
    return processor


def decoder_only_output(*, cache: Any, **fields: Any) -> GenerateDecoderOnlyOutput:
    """Return what `generate` returns with `return_dict_in_generate`; 5.17 and 5.24 name its cache differently."""
    names = {field.name for field in dataclasses.fields(GenerateDecoderOnlyOutput)}
    return GenerateDecoderOnlyOutput(**fields, **{"cache" if "cache" in names else "past_key_values": cache})


def generate_parameters(model: Any) -> frozenset[str]:
    """Return the names of the parameters of the model's `generate`."""
    return _parameters(type(model).generate)


def compile_errors() -> tuple[type[Exception], ...]:
    """Return what `torch.compile` raises for a function that it cannot compile, and where it has no compiler.

    Imported when needed: it takes a while, and few calls compile.
    """
    from torch._dynamo.exc import FailOnRecompileLimitHit, TorchDynamoException

    return TorchDynamoException, FailOnRecompileLimitHit


def keeps_address(buffer: Any) -> None:
    """Let CUDA graphs read and write a tensor where it is. A graph for one at another address is recorded anew."""
    torch._dynamo.mark_static_address(buffer, guard=False)


def adapter_layers(model: Any) -> list[Any]:
    """Return the layers of a model that PEFT has given adapters."""
    return [module for module in model.modules() if hasattr(module, "_disable_adapters")]


def adapter_is_off(layer: Any) -> bool:
    """Whether a layer runs without its adapters."""
    return bool(layer._disable_adapters)


def switch_adapters(layers: list[Any], off: list[bool]) -> None:
    """Run layers without, or with, their adapters. PEFT's own switch sets what is trainable as well."""
    for layer, value in zip(layers, off, strict=True):
        layer._disable_adapters = value
