"""`transformers-cactus generate`: one prompt, any models, text to standard output."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers import TextStreamer, set_seed

from ..configuration import RunOptions, build_rule, check_together, parameters_of
from ..integration import generate
from ..outputs import AcceptanceStatistics
from .machine import describe_machine, describe_versions
from .models import Models, load_models, pick_device, quiet_transformers, shipped_draft
from .prompt import encode
from .report import acceptance_numbers
from .rule_parameters import read_parameters

SAMPLING = ("temperature", "top_k", "top_p", "min_p")
"""Options that have a meaning only with sampling."""


@dataclass(frozen=True)
class Request:
    """The options of the command, apart from those for `generate` itself."""

    prompt: str
    verifier: str | None
    draft: str | None
    loading: dict[str, Any]
    """Arguments of `load_models`, with the device by name."""
    chat: bool | None
    system: str | None
    seed: int | None
    stats: bool
    json_file: Path | None


def check_options(
    options: dict[str, Any], rule: str | None, parameters: Sequence[str], draft: str | None, verifier: str | None
) -> dict[str, Any]:
    """Completes the options for `generate`, before anything is loaded.

    Args:
        options (`dict`): The options that were given, by their names in `generate`, but for the rule and its
            parameters.
        rule (`str` or `None`): The rule that was named.
        parameters (`Sequence[str]`): The rule's parameters, see [`read_parameters`].
        draft (`str` or `None`): The draft that was named.
        verifier (`str` or `None`): The verifier that was named.

    Raises:
        TypeError, ValueError: If they contradict each other or are out of range.
    """
    options = dict(options)
    if options.get("temperature") == 0:
        del options["temperature"]
        options.setdefault("do_sample", False)
    lookup = "prompt_lookup_num_tokens" in options
    chosen = rule or "cactus"
    wants_draft = rule is not None or parameters or any(name.startswith("cactus_") for name in options)
    if draft is None and verifier is not None and not lookup:
        if wants_draft:
            raise ValueError(
                "what decides about drafted tokens needs something that drafts: give --draft <a smaller model with "
                "the same tokenizer> or --prompt-lookup-num-tokens 10."
            )
    else:
        options |= {"cactus_rule": chosen} | ({"cactus_delta": 0.0} if "cactus_delta" in parameters_of(chosen) else {})
        options |= read_parameters(chosen, parameters)
        built = build_rule(_cactus(options))
        assert built is not None
        check_together(built, RunOptions.of(_cactus(options), built))
        if not built.is_lossless:
            options.setdefault("do_sample", True)
    if lookup and draft is None and verifier is not None and "num_assistant_tokens" in options:
        raise ValueError("--num-assistant-tokens is for a draft: --prompt-lookup-num-tokens alone says how many.")
    if "num_assistant_tokens" in options:
        # Exactly this many: the defaults adapt the number, and stop early where the draft is unsure.
        options |= {"num_assistant_tokens_schedule": "constant", "assistant_confidence_threshold": 0.0}
    if any(name in options for name in SAMPLING):
        options.setdefault("do_sample", True)
    return options


def _cactus(options: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in options.items() if name.startswith("cactus_")}


def run_generate(request: Request, options: dict[str, Any]) -> None:
    """Loads, generates, reports.

    Args:
        request ([`Request`]): The options of the command.
        options (`dict`): The options for `generate`, as `check_options` returns them.
    """
    loading = request.loading | {"device": pick_device(request.loading["device"])}
    draft = request.draft
    if draft is None and request.verifier is None:
        draft = shipped_draft()
    with quiet_transformers():
        models = load_models(request.verifier, draft, **loading)
        inputs = encode(models.tokenizer, request.prompt, chat=request.chat, system=request.system)
        if request.seed is not None:
            set_seed(request.seed)
            if draft is not None:
                options = {"num_assistant_tokens_schedule": "constant"} | options
        start = time.perf_counter()
        output = generate(
            models.verifier,
            **inputs.to(models.verifier.device),
            **options,
            **_models_of(models),
            streamer=TextStreamer(models.tokenizer, skip_prompt=True, skip_special_tokens=True),
            return_dict_in_generate=True,
        )
        tokens = output.sequences[0].tolist()
        seconds = time.perf_counter() - start
    # An encoder–decoder model's output has no prompt in it, only its start token.
    new = tokens[1 if models.verifier.config.is_encoder_decoder else inputs["input_ids"].shape[1] :]
    acceptance: AcceptanceStatistics | None = output.get("acceptance")
    if request.stats:
        print(_line(len(new), seconds, acceptance), file=sys.stderr)
    if request.json_file is not None:
        numbers = {
            "command": "generate",
            "machine": describe_machine(models.verifier.device),
            "versions": describe_versions(),
            "settings": options | {"verifier": request.verifier, "draft": request.draft, "seed": request.seed},
            "text": models.tokenizer.decode(new, skip_special_tokens=True),
            "tokens": len(new),
            "seconds": seconds,
            "tokens_per_second": len(new) / seconds,
            "acceptance": None if acceptance is None else acceptance_numbers(acceptance),
        }
        request.json_file.write_text(json.dumps(numbers, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def _models_of(models: Models) -> dict[str, Any]:
    extra: dict[str, Any] = {"tokenizer": models.tokenizer}
    if models.draft is not None:
        extra["assistant_model"] = models.draft
    if models.draft_tokenizer is not None:
        extra["assistant_tokenizer"] = models.draft_tokenizer
    return extra


def _line(tokens: int, seconds: float, acceptance: AcceptanceStatistics | None) -> str:
    speed = f"{seconds:.2f} s, {tokens / seconds:.1f} tokens/s"
    return f"{tokens} tokens, {speed}" if acceptance is None else f"{acceptance}, {speed}"
