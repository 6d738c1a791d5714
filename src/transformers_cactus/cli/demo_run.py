"""`transformers-cactus demo`: one answer to watch, then the measurement."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from transformers import BatchEncoding

from ..demo import Arithmetic, Pair, load_pair
from ..outputs import AcceptanceStatistics
from . import demo_screen
from .answer import AnswerStreamer, legend
from .machine import describe_machine, describe_versions
from .measure import LOSSLESS, VERIFIER_ALONE, Measured, Settings, System, measure, run
from .models import arithmetic_for, pick_device, quiet_transformers
from .prompt import encode
from .report import acceptance_numbers, as_numbers

WARM_UP_TOKENS = 8


@dataclass(frozen=True)
class DemoRequest:
    """The options of the command that say what to run."""

    verifier: str | None
    draft: str | None
    dtype: torch.dtype | None
    device: str | None
    prompts: Sequence[str]
    deltas: Sequence[float]
    passes: int
    json_file: Path | None

    @property
    def systems(self) -> list[System]:
        """What is compared."""
        return [VERIFIER_ALONE, LOSSLESS, *(System(delta) for delta in self.deltas)]

    @property
    def shown(self) -> System:
        """The one whose answer is shown."""
        return System(self.deltas[len(self.deltas) // 2])


def run_demo(request: DemoRequest, settings: Settings, console: Console) -> None:
    """Loads the pair, streams an answer, measures, reports."""
    with quiet_transformers():
        with console.status("loading the models (half a minute longer the first time) …"):
            device = pick_device(request.device)
            arithmetic = arithmetic_for(request.dtype, device)
            pair = load_pair(request.verifier, request.draft, **arithmetic._asdict(), device=device)
        prompts = [encode(pair.tokenizer, prompt).to(device) for prompt in request.prompts]
        demo_screen.introduce(pair, request.verifier, request.draft, arithmetic, settings, console)
        demo_screen.announce(request.prompts[0], request.shown, console)
        text, acceptance = _answer(pair, prompts[0], request.shown, settings, console)
        measured = _measure(pair, prompts, request, settings, console)
    demo_screen.conclude(measured, len(prompts), request.passes, console)
    if request.json_file is not None:
        numbers = {
            "command": "demo",
            "machine": describe_machine(device),
            "versions": describe_versions(),
            "settings": _settings(request, settings, arithmetic),
            "answer": {
                "system": request.shown.name,
                "delta": request.shown.delta,
                "prompt": request.prompts[0],
                "text": text,
                "acceptance": acceptance_numbers(acceptance),
            },
            "results": [as_numbers(result, measured[0]) for result in measured],
        }
        request.json_file.write_text(json.dumps(numbers, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def _answer(
    pair: Pair, inputs: BatchEncoding, system: System, settings: Settings, console: Console
) -> tuple[str, AcceptanceStatistics]:
    """Streams one answer, and returns its text and statistics."""
    with AnswerStreamer(pair.tokenizer, console) as streamer:
        _, _, acceptance = run(pair, inputs, system, settings, settings.seed, streamer=streamer)
        assert acceptance is not None
        streamer.put_origins(acceptance.origins[len(streamer.origins) :])
    console.print()
    console.print(legend(acceptance.origins))
    return "".join(streamer.pieces), acceptance


def _measure(
    pair: Pair, prompts: Sequence[BatchEncoding], request: DemoRequest, settings: Settings, console: Console
) -> list[Measured]:
    calls = request.passes * len(prompts) * len(request.systems)
    with demo_screen.progress(calls, console) as next_call:
        # The other systems need no warm-up of their own: they run what lossless runs.
        for system in (VERIFIER_ALONE, LOSSLESS):
            short = replace(settings, max_new_tokens=min(WARM_UP_TOKENS, settings.max_new_tokens))
            run(pair, prompts[0], system, short, settings.seed)
        return measure(pair, prompts, request.systems, settings, passes=request.passes, before_call=next_call)


def _settings(request: DemoRequest, settings: Settings, arithmetic: Arithmetic) -> dict[str, Any]:
    return {
        "verifier": request.verifier or "default",
        "draft": request.draft or "default",
        "dtype": str(arithmetic.dtype).removeprefix("torch."),
        "packed": arithmetic.packed,
        "int8_draft": arithmetic.int8_draft,
        "prompts": list(request.prompts),
        "passes": request.passes,
        **asdict(settings),
    }
