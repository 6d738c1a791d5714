"""The options of `transformers-cactus demo`."""

from __future__ import annotations

from typing import Annotated

import typer

from .failures import one_line, usage_error
from .options import (
    CACTUS,
    MODELS,
    RUNNING,
    SAMPLING,
    TEXT,
    Device,
    Dtype,
    Engine,
    EngineChoice,
    JsonFile,
    Verifier,
    check_writable,
)
from .prompts import PROMPTS

EPILOG = (
    "Examples:\n\n"
    "transformers-cactus demo --quick\n\n"
    "transformers-cactus demo --prompt 'Why is the sky blue?' --delta 0.1 --delta 0.5\n\n"
    "transformers-cactus demo --verifier Qwen/Qwen2.5-1.5B-Instruct --draft Qwen/Qwen2.5-0.5B-Instruct --json out.json"
)


def demo(
    verifier: Verifier = None,
    draft: Annotated[
        str | None,
        typer.Option(
            help="The small model that drafts. Default: the one in this package, made for the default verifier.",
            rich_help_panel=MODELS,
            show_default=False,
        ),
    ] = None,
    prompt: Annotated[
        str | None, typer.Option(help="Your own prompt instead of built-in ones.", rich_help_panel=TEXT)
    ] = None,
    prompts: Annotated[
        int | None,
        typer.Option(
            min=1,
            max=len(PROMPTS),
            help="How many of the built-in prompts to measure. Default: 3, with --quick 1.",
            rich_help_panel=TEXT,
        ),
    ] = None,
    max_new_tokens: Annotated[
        int | None,
        typer.Option(min=1, help="Length of an answer. Default: 64, with --quick 32.", rich_help_panel=TEXT),
    ] = None,
    delta: Annotated[
        list[float] | None,
        typer.Option(
            help="Budget of Cactus in nats, above 0; repeat for more. Default: 0.25, 0.75 and 1, with --quick 0.75.",
            rich_help_panel=CACTUS,
        ),
    ] = None,
    num_assistant_tokens: Annotated[
        int, typer.Option(min=1, help="Tokens drafted in a round.", rich_help_panel=CACTUS)
    ] = 4,
    temperature: Annotated[float, typer.Option(help="Above 0.", rich_help_panel=SAMPLING)] = 0.6,
    top_k: Annotated[int, typer.Option(min=0, help="0 for all tokens.", rich_help_panel=SAMPLING)] = 20,
    top_p: Annotated[float, typer.Option(min=0.0, max=1.0, help="1 for all.", rich_help_panel=SAMPLING)] = 0.95,
    seed: Annotated[int, typer.Option(min=0, help="Same seed, same texts.", rich_help_panel=SAMPLING)] = 0,
    dtype: Annotated[
        Dtype,
        typer.Option(help="Number format; auto tries which is fastest on this machine.", rich_help_panel=RUNNING),
    ] = Dtype.AUTO,
    device: Device = None,
    engine: EngineChoice = Engine.AUTO,
    passes: Annotated[
        int | None,
        typer.Option(
            min=1, help="How often to measure every prompt. Default: 2, with --quick 1.", rich_help_panel=RUNNING
        ),
    ] = None,
    quick: Annotated[bool, typer.Option("--quick", help="A short run.", rich_help_panel=RUNNING)] = False,
    json_file: JsonFile = None,
) -> None:
    """Watch a real model pair generate with Cactus, then compare speed and divergence.

    One answer is streamed, every token coloured by its origin; then the prompts are measured.
    """
    with one_line():
        from rich.console import Console

        from .demo_run import DemoRequest, run_demo
        from .measure import Settings
        from .models import dtype_named

        if prompt is not None and prompts is not None:
            raise usage_error("give --prompt or --prompts, not both.")
        if prompt == "":
            raise usage_error("the prompt is empty.")
        deltas = delta or ([0.75] if quick else [0.25, 0.75, 1.0])
        if not all(value > 0 for value in deltas):
            raise usage_error(f"--delta must be above 0 (0 is the lossless row), got {min(deltas):g}.")
        if temperature <= 0:
            raise usage_error(f"--temperature must be above 0, got {temperature:g}.")
        check_writable(json_file)
        chosen = [prompt] if prompt is not None else list(PROMPTS.values())[: prompts or (1 if quick else 3)]
        run_demo(
            DemoRequest(
                verifier=verifier,
                draft=draft,
                dtype=dtype_named(dtype.value),
                device=device,
                prompts=chosen,
                deltas=deltas,
                passes=passes or (1 if quick else 2),
                json_file=json_file,
            ),
            Settings(
                max_new_tokens=max_new_tokens or (32 if quick else 64),
                num_assistant_tokens=num_assistant_tokens,
                temperature=temperature,
                top_k=top_k,
                top_p=top_p,
                seed=seed,
                engine=engine.value,
            ),
            Console(highlight=False),
        )
