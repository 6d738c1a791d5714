"""`model.generate(..., cactus_delta=...)`: from a call to the decoding loop."""

from __future__ import annotations

import functools
import inspect
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from transformers import GenerationMixin, PreTrainedModel, StoppingCriteriaList, StopStringCriteria
from transformers.utils import ModelOutput

from . import _compat
from .acceptance import AcceptanceRule
from .configuration import build_rule, options_of, pop_options
from .stock import StockCall, stock_decoding

DRAFT_OPTIONS = ("prompt_lookup_num_tokens", "assistant_early_exit", "use_mtp")
"""Options of a `GenerationConfig` that bring a draft without an assistant model."""

DRAFT_SETTINGS = ("num_assistant_tokens", "num_assistant_tokens_schedule", "assistant_confidence_threshold")
"""Options that steer a draft model. transformers reads them from the draft's own config and overlooks the call's."""

PADDING_LIMIT = 1024
"""Vocabulary sizes further apart than this are taken for different tokenizers, not for one tokenizer padded twice
(Qwen2.5's sizes differ by 128)."""


def generate(model: PreTrainedModel, *args: Any, **kwargs: Any) -> Any:
    """`model.generate` with the `cactus_*` options, without enabling anything on the model.

    Args:
        model (`PreTrainedModel`): The verifier.
        *args, **kwargs: Whatever `model.generate` takes, with a draft of any kind that transformers knows
            (`assistant_model`, `prompt_lookup_num_tokens`, `assistant_early_exit` ...), and:
        cactus_delta (`float`, *optional*): Budget in nats for raising a drafted token's probability, at least 0. 0 is
            lossless speculative sampling. `None` turns off what the generation config says.
        cactus_rule (`str` or [`AcceptanceRule`], *optional*, defaults to `"cactus"`): `"cactus"`, `"cactus-exact"`,
            `"lenience"`, `"speculative"`, or a rule object.
        cactus_factor (`float`, *optional*): The factor of `"lenience"`, at least 1.

    Returns:
        What `model.generate` returns. With `return_dict_in_generate=True` it has one more field, `acceptance`
        ([`AcceptanceStatistics`]).

    Raises:
        TypeError, ValueError: If an option is unknown or out of range, no draft was given, or the call asks for
            something that assisted decoding cannot do. Before any model runs.

    Example:
        ```python
        output = transformers_cactus.generate(
            verifier, **inputs, assistant_model=draft, do_sample=True, cactus_delta=0.75, return_dict_in_generate=True
        )
        print(output.acceptance)
        ```
    """
    attribute: Any = model.__dict__.get("generate")
    if _is_enabled(model):
        attribute = attribute._cactus_previous
    return _call(model, attribute or _class_original(model), args, kwargs)


def enable(model: PreTrainedModel | None = None) -> None:
    """Makes `model.generate` take the `cactus_*` options. Enabling twice is the same as once.

    Calls without any `cactus_*` option, on a model whose generation config has none, reach the original `generate`
    untouched.

    Args:
        model (`PreTrainedModel`, *optional*): The model, by an attribute on this one object, as transformers itself
            attaches custom generation. `None` stands for every model, present and future.

    Raises:
        TypeError: If `model` cannot generate.
    """
    with _lock:
        if model is None:
            if not _is_enabled(None):
                GenerationMixin.generate = _class_generate(GenerationMixin.generate)
            return
        if not callable(getattr(model, "generate", None)):
            raise TypeError(f"enable() needs a model that has generate(), got {type(model).__name__}.")
        if not _is_enabled(model):
            model.generate = _instance_generate(model, model.__dict__.get("generate"))


def disable(model: PreTrainedModel | None = None) -> None:
    """Undoes [`enable`], exactly. Does nothing where nothing was enabled.

    Args:
        model (`PreTrainedModel`, *optional*): The model that was passed to `enable`, or `None` as there.
    """
    with _lock:
        if model is None:
            original = getattr(GenerationMixin.generate, "_cactus_original", None)
            if original is not None:
                GenerationMixin.generate = original
            return
        if not _is_enabled(model):
            return
        previous = model.__dict__.pop("generate")._cactus_previous
        if previous is not None:
            model.generate = previous


@contextmanager
def enabled(model: PreTrainedModel | None = None) -> Iterator[PreTrainedModel | None]:
    """[`enable`] for the length of a `with` block. A model that was enabled before stays enabled.

    Args:
        model (`PreTrainedModel`, *optional*): As in `enable`.

    Yields:
        `model`.
    """
    before = _is_enabled(model)
    enable(model)
    try:
        yield model
    finally:
        if not before:
            disable(model)


_lock = threading.Lock()


def _is_enabled(model: PreTrainedModel | None) -> bool:
    if model is None:
        return hasattr(GenerationMixin.generate, "_cactus_original")
    # A copied model brings its attribute along, which still belongs to the original.
    return getattr(model.__dict__.get("generate"), "_cactus_model", None) is model


def _instance_generate(model: PreTrainedModel, previous: Callable[..., Any] | None) -> Callable[..., Any]:
    @functools.wraps(type(model).generate)
    def generate_with_cactus(*args: Any, **kwargs: Any) -> Any:
        return _call(model, previous or _class_original(model), args, kwargs)

    # Seen by `inspect.signature`, and so by pipelines, like a bound method.
    parameters = list(inspect.signature(type(model).generate).parameters.values())[1:]
    generate_with_cactus.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    generate_with_cactus._cactus_model = model  # type: ignore[attr-defined]
    generate_with_cactus._cactus_previous = previous  # type: ignore[attr-defined]
    return generate_with_cactus


def _class_generate(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def generate_with_cactus(self: PreTrainedModel, *args: Any, **kwargs: Any) -> Any:
        return _call(self, functools.partial(original, self), args, kwargs)

    generate_with_cactus._cactus_original = original  # type: ignore[attr-defined]
    return generate_with_cactus


def _class_original(model: PreTrainedModel) -> Callable[..., Any]:
    """The `generate` of the model's class, without what `enable()` put in its place."""
    method = type(model).generate
    return functools.partial(getattr(method, "_cactus_original", method), model)


def _call(model: PreTrainedModel, original: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Runs one call: the original `generate`, with our decoding method in it where the options ask for it."""
    given = pop_options(kwargs)
    call = _by_name(original, args, kwargs)
    config = call.get("generation_config")
    if getattr(config, "is_assistant", False) or _is_ours(call.get("custom_generate")):
        # A draft model's own call, or the inner call of a model that is enabled twice.
        return original(*args, **kwargs)
    options = {**options_of(model.generation_config), **options_of(config), **given}
    rule = None if given.get("cactus_delta", 0) is None else build_rule(options)
    if rule is None:
        return original(*args, **kwargs)
    setting = _Settings(model, call)
    if not setting.has_draft() and not given and not options_of(config):
        warnings.warn(
            "the model's generation_config has cactus options, but this call has no draft: they have no effect.",
            UserWarning,
            stacklevel=3,
        )
        return original(*args, **kwargs)
    setting.check()
    return _run_stock(setting, original, rule)


def _by_name(original: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """The arguments of a call by name, whichever way they were passed."""
    signature = inspect.signature(original)
    bound = signature.bind_partial(*args, **kwargs)
    call = dict(bound.arguments)
    for name, parameter in signature.parameters.items():
        if parameter.kind is inspect.Parameter.VAR_KEYWORD:
            call.update(call.pop(name, {}))
        elif parameter.kind is inspect.Parameter.VAR_POSITIONAL and call.pop(name, ()):
            raise TypeError(f"pass the arguments of generate() by name; unexpected positional ones for {original}.")
    return call


def _is_ours(decoding: Any) -> bool:
    return isinstance(decoding, functools.partial) and decoding.func is stock_decoding


class _Settings:
    """A call's settings, as `generate` will see them: an argument, else the given config's, else the model's."""

    def __init__(self, model: PreTrainedModel, call: dict[str, Any]):
        self.model = model
        self.call = call

    def __getitem__(self, name: str) -> Any:
        if name in self.call:
            return self.call[name]
        given = self.given(name)
        return getattr(self.model.generation_config, name, None) if given is None else given

    def given(self, name: str) -> Any:
        """What this call says, leaving the model's own generation config aside."""
        value = self.call.get(name)
        return getattr(self.call.get("generation_config"), name, None) if value is None else value

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
        if self["stop_strings"] is not None and self["tokenizer"] is None:
            raise ValueError("stop_strings need tokenizer=<the verifier's tokenizer> in the call.")
        self._check_vocabularies()

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


def _run_stock(setting: _Settings, original: Callable[..., Any], rule: AcceptanceRule) -> Any:
    call = dict(setting.call)
    call.pop("custom_generate", None)
    assisted = {
        "assistant_model": setting["assistant_model"],
        "tokenizer": call.get("tokenizer"),
        "assistant_tokenizer": call.pop("assistant_tokenizer", None),
        "streamer": call.get("streamer"),
        "synced_gpus": _compat.synced_gpus(setting.model, call.get("synced_gpus")),
    }
    if setting["stop_strings"] is not None:
        # `generate` mislays the tokenizer on its way to a custom decoding method.
        call["stopping_criteria"] = StoppingCriteriaList(
            [*(call.get("stopping_criteria") or []), StopStringCriteria(call["tokenizer"], setting["stop_strings"])]
        )
        call["stop_strings"] = None
    draft_settings = {name: value for name in DRAFT_SETTINGS if (value := setting.given(name)) is not None}
    stock_call = StockCall(rule, {k: v for k, v in assisted.items() if v is not None}, draft_settings)
    decoding = functools.partial(stock_decoding, cactus_call=stock_call)
    output = original(**call, custom_generate=decoding)
    if isinstance(output, (ModelOutput, dict)) and stock_call.statistics is not None:
        output["acceptance"] = stock_call.statistics
    return output
