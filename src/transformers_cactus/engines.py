"""Which decoding loop runs a call, and what it is given."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import functools
from collections.abc import Callable
from typing import Any

from transformers import GenerationConfig, StoppingCriteriaList, StopStringCriteria
from transformers.utils import ModelOutput

from . import _compat
from .acceptance import AcceptanceRule
from .advice import advise
from .cache import RaggedCache
from .compiled import compiler_error
from .configuration import RunOptions
from .decoding import FastCall, fast_decoding
from .feature_draft import is_feature_draft
from .one_by_one import run_one_by_one
from .settings import DRAFT_SETTINGS, CallSettings
from .stock import StockCall, stock_decoding
from .streaming import TokenByToken
from .support import supports_ragged

DEFAULT_BLOCK = 4
"""Tokens drafted per round in the fast engine with other schedules where nobody says how many."""

LONGEST_ADAPTIVE = 16
"""Most tokens drafted per round with the schedule `"adaptive"` where nobody says how many."""

LONGEST_BORROWED = 64
"""Most tokens taken from one of transformers' candidate generators, which decide themselves how many they draft."""

TEXT_INPUTS = frozenset(
    {"inputs", "input_ids", "attention_mask", "tokenizer", "assistant_tokenizer", "past_key_values", "cache"}
)
"""What the fast engine takes besides generation options."""

Generate = Callable[..., Any]


def run(setting: CallSettings, original: Generate, rule: AcceptanceRule) -> Any:
    """Runs a call that was found possible, in the engine it asks for.

    Args:
        setting ([`CallSettings`]): The call.
        original (callable): The model's own `generate`.
        rule ([`AcceptanceRule`]): The acceptance rule.

    Returns:
        What `generate` returns, with `acceptance` in it where it is no bare tensor.

    Raises:
        ValueError: If the call asks for the fast engine by name, which cannot run it.
    """
    stock = "cactus_engine='stock' takes one sequence at a time."
    reason = stock if setting.options.engine == "stock" else why_not_fast(setting)
    if reason is None:
        setting.options = _compiled_where_possible(setting)
        return run_fast(setting, original, rule)
    if is_feature_draft(setting["assistant_model"]):
        raise ValueError(f"a FeatureDraft runs in the fast engine only. {reason}")
    if setting.copies:
        raise ValueError(
            f"assistant_model and prompt_lookup_num_tokens work together in the fast engine only. {reason} Leave out "
            "one of them."
        )
    if setting.options.verification == "block":
        raise ValueError(f"cactus_verification='block' runs in the fast engine only. {reason}")
    if setting.asks_for_adaptive:
        advise(
            f"num_assistant_tokens_schedule='adaptive' works in the fast engine only. {reason} Blocks are constant."
        )
    if setting.options.compile:
        advise(f"cactus_compile=True works in the fast engine only. {reason} Nothing is compiled.")
    if setting.options.engine == "fast":
        raise ValueError(f"cactus_engine='fast' cannot run this call. {reason} Leave cactus_engine at 'auto'.")
    if setting.sequences > 1:
        advise(f"{reason} The {setting.sequences} sequences run one after another.")
        return run_one_by_one(setting, rule, functools.partial(run_stock, original=original))
    return run_stock(setting, rule, original)


def why_not_fast(setting: CallSettings) -> str | None:
    """The reason, as a sentence, for which the fast engine cannot run a call; `None` where it can."""
    for name in ("use_mtp", "speculation_type"):
        if setting[name]:
            return f"{name} drafts inside transformers' own loop only."
    borrowed = _borrowed_generator(setting)
    if borrowed is not None and setting.sequences > 1:
        return f"A draft by {borrowed} takes one sequence at a time."
    draft = setting["assistant_model"]
    longest = setting.longest()
    if is_feature_draft(draft):
        draft = draft.decoder
    for model in (setting.model, None if borrowed else draft):
        reason = None if model is None else supports_ragged(model, longest)
        if reason is not None:
            return reason
    for name in ("output_attentions", "output_hidden_states", "prefill_chunk_size", "synced_gpus"):
        if setting[name]:
            return f"{name} is served by transformers' own loop only."
    if setting["cache_implementation"] not in (None, "dynamic"):
        return f"cache_implementation={setting['cache_implementation']!r} is served by transformers' own loop only."
    for name in ("past_key_values", "cache"):
        cache = setting.call.get(name)
        if cache is not None and not isinstance(cache, RaggedCache) and cache.get_seq_length():
            return "A cache that this package did not return is continued by transformers' own loop only."
    options = vars(GenerationConfig()).keys() | _compat.generate_parameters(setting.model)
    extra = sorted(
        name for name, value in setting.call.items() if value is not None and name not in options | TEXT_INPUTS
    )
    if extra:
        return f"The model is given more than text ({', '.join(extra)})."
    if _compat.synced_gpus(setting.model, None):
        return "Processes that have to stay in step run transformers' own loop only."
    return None


def _borrowed_generator(setting: CallSettings) -> str | None:
    """The option for which one of transformers' candidate generators drafts in the fast engine, if there is one."""
    if setting["assistant_early_exit"]:
        return "assistant_early_exit"
    return None if setting["assistant_tokenizer"] is None else "assistant_tokenizer"


def _compiled_where_possible(setting: CallSettings) -> RunOptions:
    """The call's options, without `compile` where that cannot be had, which is said before any model runs."""
    if not setting.options.compile:
        return setting.options
    borrowed = _borrowed_generator(setting)
    if borrowed is not None:
        reason: str | None = f"a draft by {borrowed} runs in transformers' own code, in blocks of any length."
    elif is_feature_draft(setting["assistant_model"]):
        reason = "a FeatureDraft reads hidden states, which compiled forwards do not return."
    else:
        models = [model for model in (setting.model, setting["assistant_model"]) if model is not None]
        errors = (compiler_error(_compat.input_device(model)) for model in models)
        reason = next((f"torch.compile does not work here: {error}" for error in errors if error is not None), None)
    if reason is None:
        return setting.options
    advise(f"cactus_compile=True has no effect: {reason}")
    return dataclasses.replace(setting.options, compile=False)


def run_fast(setting: CallSettings, original: Generate, rule: AcceptanceRule) -> Any:
    """Runs a call in this package's own loop."""
    call = dict(setting.call)
    draft, streamer = call.pop("assistant_model", None), setting["streamer"]
    _take_stop_strings(setting, call)
    count, threshold = setting["prompt_lookup_num_tokens"], 0.0
    schedule, generator = "constant", None
    if _borrowed_generator(setting):
        generator = functools.partial(
            _compat.candidate_generator,
            setting.model,
            _draft_settings(setting),
            assistant_model=draft,
            target_tokenizer=setting["tokenizer"],
            assistant_tokenizer=call.pop("assistant_tokenizer", None),
        )
        # The generator itself decides how many tokens it drafts.
        count = LONGEST_BORROWED
    elif draft is not None:
        schedule = setting.schedule
        default = LONGEST_ADAPTIVE if schedule == "adaptive" else DEFAULT_BLOCK
        count = setting.draft_setting("num_assistant_tokens") or default
        threshold = setting.draft_setting("assistant_confidence_threshold") or 0.0
    fast_call = FastCall(
        rule=rule,
        options=setting.options,
        assistant_model=draft,
        num_assistant_tokens=int(count),
        schedule=schedule,
        confidence_threshold=float(threshold),
        prompt_lookup_num_tokens=None if draft is None else setting["prompt_lookup_num_tokens"],
        max_ngram_size=setting["max_matching_ngram_size"],
        candidate_generator=generator,
        streamer=None if streamer is None else TokenByToken(streamer),
    )
    # `generate` would take the call for assisted decoding and refuse batches.
    _unset(setting, call, "prompt_lookup_num_tokens")
    decoding = functools.partial(fast_decoding, cactus_call=fast_call)
    borrowed = _compat.unchanged_draft(setting.model if draft is None else draft, setting["tokenizer"])
    with borrowed if generator is not None else contextlib.nullcontext():
        return _finish(original(**call, custom_generate=decoding), fast_call)


def run_stock(setting: CallSettings, rule: AcceptanceRule, original: Generate) -> Any:
    """Runs a call in transformers' own assisted decoding loop."""
    call, streamer = dict(setting.call), setting["streamer"]
    assisted = {
        "assistant_model": setting["assistant_model"],
        "tokenizer": call.get("tokenizer"),
        "assistant_tokenizer": call.pop("assistant_tokenizer", None),
        "streamer": None if streamer is None else TokenByToken(streamer),
        "synced_gpus": _compat.synced_gpus(setting.model, call.get("synced_gpus")),
    }
    _take_stop_strings(setting, call)
    for name in ("past_key_values", "cache"):
        cache = call.get(name)
        if cache is not None and cache.get_seq_length():
            # transformers' loop would feed the whole prompt behind what the cache holds of it.
            call.pop(name)
    given = {name: value for name, value in assisted.items() if value is not None}
    stock_call = StockCall(rule, setting.options, given, _draft_settings(setting))
    decoding = functools.partial(stock_decoding, cactus_call=stock_call)
    return _finish(original(**call, custom_generate=decoding), stock_call)


def _draft_settings(setting: CallSettings) -> dict[str, Any]:
    return {name: value for name in DRAFT_SETTINGS if (value := setting.said(name)) is not None}


def _finish(output: Any, call: FastCall | StockCall) -> Any:
    if isinstance(output, (ModelOutput, dict)) and call.statistics is not None:
        output["acceptance"] = call.statistics
    return output


def _take_stop_strings(setting: CallSettings, call: dict[str, Any]) -> None:
    """Turns stop strings into a criterion: `generate` mislays the tokenizer on its way to a custom decoding method."""
    call.pop("custom_generate", None)
    strings = setting["stop_strings"]
    if strings is not None:
        criterion = StopStringCriteria(tokenizer=setting["tokenizer"], stop_strings=strings)
        call["stopping_criteria"] = StoppingCriteriaList([*(call.get("stopping_criteria") or []), criterion])
        _unset(setting, call, "stop_strings")


def _unset(setting: CallSettings, call: dict[str, Any], name: str) -> None:
    """Takes an option out of a call, wherever it comes from, without touching the caller's config."""
    call.pop(name, None)
    config = call.get("generation_config")
    if getattr(config, name, None) is not None:
        config = copy.deepcopy(config)
        setattr(config, name, None)
        call["generation_config"] = config
    if getattr(setting.model.generation_config, name, None) is not None:
        call[name] = None
