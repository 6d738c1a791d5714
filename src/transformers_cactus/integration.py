"""`model.generate(..., cactus_delta=...)`: from a call to the decoding loop."""

from __future__ import annotations

import functools
import inspect
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import MethodType
from typing import Any

from transformers import GenerationMixin, PreTrainedModel

from . import _compat
from .advice import advise
from .configuration import (
    RunOptions,
    check_together,
    options_of,
    pop_options,
    resolved,
    warn_of_support,
)
from .engines import run
from .settings import CallSettings


def generate(model: PreTrainedModel, *args: Any, **kwargs: Any) -> Any:
    """`model.generate` with the `cactus_*` options, without enabling anything on the model.

    Args:
        model (`PreTrainedModel`): The verifier.
        *args, **kwargs: Whatever `model.generate` takes, with a draft of any kind that transformers knows
            (`assistant_model`, `prompt_lookup_num_tokens`, `assistant_early_exit` ...), and:
        cactus_delta (`float`, `list` or `torch.Tensor` of shape `[batch]`, *optional*): Budget in nats for raising a
            drafted token's probability, at least 0; one for all sequences or one for each. 0 is lossless speculative
            sampling. `None` turns off what the generation config says, or leaves the rule to a `cactus_rule` without
            one in the same call. In the divergence's own unit with
            `"chi-square"`, `"total-variation"` and `"squared-hellinger"`. Or a schedule: a function that gets the list
            of a sequence's generated tokens before a position and returns the budget there, such as [`DeltaBetween`];
            it is called for every drafted position, which takes one transfer of the block to the host.
        cactus_budget (`float`, `list` or `torch.Tensor` of shape `[batch]`, *optional*): Nats that a sequence may
            spend in all, for rules with a `cactus_delta`. Counted in the divergence that is really spent (as in
            `cactus_certificate`, at the same price), and never exceeded: the last delta is cut to what is left, and
            from there on nothing is spent. Waits for the device at every drafted position.
        cactus_budget_window (`int`, *optional*): Tokens that `cactus_budget` is for; by default the whole sequence.
            With 100, the true divergences (`KL(h_alg || q)` of every position, as in `cactus_certificate`) of the
            generated tokens 1 to 100 sum to at most the budget, those of tokens 101 to 200 again, and so on: every
            window has the budget afresh, nothing is carried over, and a block that lies across two windows is charged
            to both, each position to its own. A text of `n` tokens spends at most `ceil(n / 100)` budgets.
        cactus_rule (`str` or [`AcceptanceRule`], *optional*, defaults to `"cactus"`): `"cactus"` ([`Cactus`]),
            `"cactus-exact"`, `"chi-square"`, `"ensemble"`, `"jensen-shannon"`, `"lenience"`, `"optimal"`,
            `"reverse-kl"`, `"speculative"`, `"squared-hellinger"`, `"top-k"`, `"total-variation"`, `"typical"`, or a
            rule object. The parameters below are those of the rules' classes; each is for one rule.
        cactus_factor (`float`, *optional*): [`Lenience`]: at least 1.
        cactus_multiplier (`float`, *optional*): [`Optimal`]: nats per unit of acceptance probability, at least 0.
        cactus_ensemble_weight (`float`, *optional*): [`Ensemble`]: the verifier's share, in [0, 1].
        cactus_within_support (`bool`, *optional*, defaults to `False`): [`Ensemble`]: emit nothing that the verifier
            excludes.
        cactus_posterior_threshold (`float`, *optional*, defaults to 0.09): [`Typical`]: a probability.
        cactus_posterior_alpha (`float`, *optional*, defaults to 0.3): [`Typical`]: factor of `exp(-entropy)`.
        cactus_recovery_from (`str`, *optional*, defaults to `"sample"`): [`Typical`]: `"sample"` or `"argmax"`.
        cactus_top_k (`int`, *optional*): [`TopK`]: how many of the verifier's most probable tokens are kept.
        cactus_engine (`str`, *optional*, defaults to `"auto"`): `"fast"` for this package's own decoding loop, for
            decoder-only models and batches; `"stock"` for transformers' assisted decoding loop, for every model and
            draft that it knows, one sequence at a time; `"auto"` for the first that can run the call.
        cactus_verification (`str`, *optional*, defaults to `"token"`): `"block"` judges a drafted block as a whole
            ([`verify_block`]), which never keeps fewer tokens on average: for `"speculative"`, `"ensemble"` and
            `"optimal"`, in the fast engine. Reads whole rows of the vocabulary.
        cactus_certificate (`bool`, *optional*, defaults to `False`): Record for each emitted token the exact
            divergence from the verifier of the distribution that it was really drawn from, on
            `output.acceptance.certificate` ([`SequenceStatistics`] says what it means; docs/certificate.md proves it).
            Needs `return_dict_in_generate=True`. Sorts and sums a whole row of the vocabulary in float64 at every
            drafted position: for a block of 4 and 49,152 tokens, 0.14 s a round more on one core of a server
            processor, 0.01 s with top-k 20.
        cactus_compile (`bool`, *optional*, defaults to `False`): Run the draft's steps and the verification, in the
            fast engine, as functions that `torch.compile` made, on a GPU as CUDA graphs. The first call of each size
            compiles for seconds to minutes, later ones use what is there. With prompt look-up there is only the
            verification to compile. docs/batches.md says what a size is and when it pays.

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
    model = _generating(model, "generate()")
    attribute: Any = model.__dict__.get("generate")
    if _is_enabled(model):
        attribute = attribute._cactus_previous
    return _call(model, attribute or _class_original(model), args, kwargs)


def generate_for_repository(
    model: PreTrainedModel, find_draft: Callable[[], PreTrainedModel | None], *args: Any, **kwargs: Any
) -> Any:
    """[`generate`] for a model whose `generate` attribute is the caller itself.

    Args:
        model (`PreTrainedModel`): The verifier.
        find_draft (callable): Returns a draft, or `None`, for a call that has cactus options and no draft.
        *args, **kwargs: As for [`generate`].

    Returns:
        As [`generate`].
    """
    parameters = inspect.signature(GenerationMixin.generate).parameters.keys() - {"self", "kwargs", "custom_generate"}
    # `generate(custom_generate=...)` passes on every parameter of its own. It may have been called by a model's own
    # `generate`, such as Whisper's, which must not run a second time.
    called_by_generate = parameters <= kwargs.keys()
    original = _original(GenerationMixin, model) if called_by_generate else _class_original(model)
    return _call(model, original, args, kwargs, find_draft)


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
        model = _generating(model, "enable()")
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
        model = _compat.uncompiled(model)
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
    before = _is_enabled(None if model is None else _generating(model, "enabled()"))
    enable(model)
    try:
        yield model
    finally:
        if not before:
            disable(model)


_lock = threading.Lock()


def _generating(model: Any, caller: str) -> Any:
    """The model itself, where `torch.compile` has wrapped it; an error for anything that cannot generate."""
    model = _compat.uncompiled(model)
    if isinstance(model, type) or not callable(getattr(model, "generate", None)):
        got = f"the class {model.__name__}" if isinstance(model, type) else type(model).__name__
        raise TypeError(f"{caller} needs a model that has generate(), as from_pretrained() returns it, got {got}.")
    return model


def _is_enabled(model: PreTrainedModel | None) -> bool:
    if model is None:
        return hasattr(GenerationMixin.generate, "_cactus_original")
    method = model.__dict__.get("generate")
    return hasattr(method, "_cactus_previous") and method.__self__ is model


def _instance_generate(model: PreTrainedModel, previous: Callable[..., Any] | None) -> MethodType:
    @functools.wraps(type(model).generate)
    def generate_with_cactus(self: PreTrainedModel, *args: Any, **kwargs: Any) -> Any:
        return _call(self, previous or _class_original(self), args, kwargs)

    generate_with_cactus._cactus_previous = previous  # type: ignore[attr-defined]
    # A bound method: a deep copy of the model gets one that is bound to the copy, and signatures are without `self`.
    return MethodType(generate_with_cactus, model)


def _class_generate(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def generate_with_cactus(self: PreTrainedModel, *args: Any, **kwargs: Any) -> Any:
        return _call(self, functools.partial(original, self), args, kwargs)

    generate_with_cactus._cactus_original = original  # type: ignore[attr-defined]
    return generate_with_cactus


def _class_original(model: PreTrainedModel) -> Callable[..., Any]:
    """The `generate` of the model's class, without what `enable()` put in its place."""
    return _original(type(model), model)


def _original(owner: type[GenerationMixin], model: PreTrainedModel) -> Callable[..., Any]:
    method = owner.generate
    return functools.partial(getattr(method, "_cactus_original", method), model)


def _call(
    model: PreTrainedModel,
    original: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    find_draft: Callable[[], PreTrainedModel | None] = lambda: None,
) -> Any:
    """Runs one call: the original `generate`, with our decoding method in it where the options ask for it."""
    given = pop_options(kwargs)
    call = _by_name(original, args, kwargs)
    config = call.get("generation_config")
    if getattr(config, "is_assistant", False) or _is_ours(call.get("custom_generate")):
        # A draft model's own call, or the inner call of a model that is enabled twice.
        return original(*args, **kwargs)
    options, rule = resolved(model.generation_config, config, given)
    if rule is None:
        if given.get("cactus_engine") is not None and "cactus_delta" not in given:
            raise ValueError("cactus_engine needs a rule: pass cactus_delta or cactus_rule beside it.")
        if CallSettings(model, call, RunOptions()).asks_for_adaptive:
            advise(
                "num_assistant_tokens_schedule='adaptive' has no effect in transformers' own loop, which a call "
                "without cactus options runs in: pass one, such as cactus_delta=0, which is lossless."
            )
        return original(*args, **kwargs)
    setting = CallSettings(model, call, RunOptions.of(options, rule))
    if not setting.has_draft():
        setting.call["assistant_model"] = find_draft()
    if not setting.has_draft() and not given and not options_of(config):
        advise(
            "the model's generation_config has cactus options, but this call has no draft: they have no effect.",
        )
        return original(*args, **kwargs)
    setting.check()
    check_together(rule, setting.options)
    warn_of_support(rule)
    return run(setting, original, rule)


def _by_name(original: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """The arguments of a call by name, whichever way they were passed."""
    signature = inspect.signature(original)
    if any(p.kind is inspect.Parameter.VAR_POSITIONAL for p in signature.parameters.values()):
        # Someone's wrapper that passes on whatever it gets.
        signature = inspect.signature(functools.partial(GenerationMixin.generate, None))
    bound = signature.bind_partial(*args, **kwargs)
    call = dict(bound.arguments)
    for name, parameter in signature.parameters.items():
        if parameter.kind is inspect.Parameter.VAR_KEYWORD:
            call.update(call.pop(name, {}))
    return call


def _is_ours(decoding: Any) -> bool:
    # By its argument, not by the function: a repository may bring another copy of this package's modules.
    return isinstance(decoding, functools.partial) and "cactus_call" in decoding.keywords
