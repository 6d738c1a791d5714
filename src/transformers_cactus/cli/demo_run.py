"""`transformers-cactus demo`: watch one answer, then see what it cost and what it was worth."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from transformers import BatchEncoding

from ..demo import Pair, load_pair, pick_dtype
from .answer import AnswerStreamer, legend
from .machine import describe_machine, describe_versions
from .measure import LOSSLESS, VERIFIER_ALONE, Measured, Settings, System, measure, run
from .models import pick_device, quiet_transformers
from .prompt import encode
from .report import acceptance_numbers, as_numbers, as_table

WARM_UP_TOKENS = 8


@dataclass(frozen=True)
class DemoRequest:
    """The options of the command."""

    verifier: str | None
    draft: str | None
    dtype: torch.dtype | None
    device: str | None
    prompts: Sequence[str]
    deltas: Sequence[float]
    passes: int
    json_file: Path | None


def run_demo(request: DemoRequest, settings: Settings, console: Console) -> None:
    """Loads the pair, streams an answer, measures, reports."""
    with quiet_transformers():
        with console.status("loading the models (the first time takes half a minute longer) …"):
            device = pick_device(request.device)
            dtype = request.dtype or pick_dtype(device)
            pair = load_pair(request.verifier, request.draft, dtype=dtype, device=device)
        prompts = [encode(pair.tokenizer, prompt).to(device) for prompt in request.prompts]
        machine = describe_machine(device)
        systems = [VERIFIER_ALONE, LOSSLESS, *(System(delta) for delta in request.deltas)]
        _introduce(request, pair, settings, machine, console)
        shown = systems[2 + len(request.deltas) // 2]
        answer = _show_answer(pair, request.prompts[0], prompts[0], shown, settings, console)
        measured = _measure(pair, prompts, systems, settings, request.passes, console)
    _conclude(measured, request, console)
    if request.json_file is not None:
        numbers = {
            "command": "demo",
            "machine": machine,
            "versions": describe_versions(),
            "settings": {
                "verifier": request.verifier or "default",
                "draft": request.draft or "default",
                "dtype": str(dtype).removeprefix("torch."),
                "prompts": list(request.prompts),
                "passes": request.passes,
                **asdict(settings),
            },
            "answer": {"system": shown.name, "delta": shown.delta, "prompt": request.prompts[0], **answer},
            "results": [as_numbers(result, measured[0]) for result in measured],
        }
        request.json_file.write_text(json.dumps(numbers, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
        console.print(f"\nNumbers written to {escape(str(request.json_file))}", highlight=False)


def _introduce(
    request: DemoRequest, pair: Pair, settings: Settings, machine: dict[str, Any], console: Console
) -> None:
    verifier = Path(request.verifier or "SmolLM2-135M-Instruct").name
    draft = Path(request.draft).name if request.draft else "the draft in this package"
    own = {id(p): p.numel() for p in pair.draft.parameters()}
    shared = sum(own.pop(id(p), 0) for p in pair.verifier.parameters())
    layers = pair.draft.config.get_text_config().num_hidden_layers
    for name, text in {
        "verifier": f"{verifier}, {_millions(sum(p.numel() for p in pair.verifier.parameters()))} parameters",
        "draft": f"{draft}, {layers} layers, {_millions(sum(own.values()))} parameters"
        + (" besides the verifier's embedding" if shared else ""),
        "machine": f"{machine['processor']}, {machine['threads']} threads"
        if machine["device"] == "cpu"
        else machine["device"],
        "settings": f"{str(pair.verifier.dtype).removeprefix('torch.')}, temperature {settings.temperature:g}, top-k "
        f"{settings.top_k}, top-p {settings.top_p:g}, {settings.num_assistant_tokens} tokens drafted a round",
    }.items():
        console.print(f"[bold]{name:>9}[/]  {escape(text)}", highlight=False)


def _millions(parameters: int) -> str:
    return f"{parameters / 1e6:.1f} M" if parameters >= 100_000 else str(parameters)


def _show_answer(
    pair: Pair, prompt: str, inputs: BatchEncoding, system: System, settings: Settings, console: Console
) -> dict[str, Any]:
    """Streams one answer, and returns its text and numbers."""
    console.print(f"\n[bold]prompt[/]  {escape(prompt)}", highlight=False)
    console.print(f"[bold]answer[/]  [dim]{system.name}[/]\n", highlight=False)
    with AnswerStreamer(pair.tokenizer, console) as streamer:
        _, _, acceptance = run(pair, inputs, system, settings, settings.seed, streamer=streamer)
        assert acceptance is not None
        streamer.put_origins(acceptance.origins[len(streamer.origins) :])
    console.print()
    console.print(legend(acceptance.origins))
    return {"text": "".join(streamer.pieces), "acceptance": acceptance_numbers(acceptance)}


def _measure(
    pair: Pair,
    prompts: Sequence[BatchEncoding],
    systems: Sequence[System],
    settings: Settings,
    passes: int,
    console: Console,
) -> list[Measured]:
    """Measures behind a progress bar, or behind a line for each call where there is no terminal."""
    calls = passes * len(prompts) * len(systems)
    console.print()
    columns = (SpinnerColumn(), TextColumn("measuring"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    bar = Progress(*columns, TextColumn("{task.description}"), console=console, transient=True)
    with bar if console.is_terminal else Progress(disable=True) as progress:
        task = progress.add_task("warming up", total=calls)
        for system in systems[:2]:
            run(pair, prompts[0], system, _shortened(settings), settings.seed)
        started = 0

        def next_call(system: System) -> None:
            nonlocal started
            progress.update(task, description=system.name, completed=started)
            started += 1
            if not console.is_terminal:
                console.print(f"measuring {started}/{calls}: {system.name}", highlight=False)

        return measure(pair, prompts, systems, settings, passes=passes, before_call=next_call)


def _shortened(settings: Settings) -> Settings:
    return Settings(**asdict(settings) | {"max_new_tokens": min(WARM_UP_TOKENS, settings.max_new_tokens)})


def _conclude(measured: Sequence[Measured], request: DemoRequest, console: Console) -> None:
    console.print(as_table(measured))
    count = f"{len(request.prompts)} prompt{'s' if len(request.prompts) > 1 else ''}"
    console.print(
        f"\n[dim]Whole calls over {count}, in turns; medians of {request.passes} passes. AL: drafted tokens kept per "
        "round, the extra token not counted. KL per token: how far from the verifier's own distribution the tokens "
        "were drawn, KL(h‖q) in nats; 0 is exactly the verifier's.[/]",
        highlight=False,
    )
