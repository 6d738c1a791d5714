"""The options of `transformers-cactus sweep`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from .evaluation_setup import (
    Data,
    Draft,
    MaxNewTokens,
    Prompts,
    Quick,
    Seed,
    Temperature,
    TopK,
    TopP,
    check_data,
    check_pair,
    sampling_of,
)
from .failures import one_line, usage_error
from .options import CACTUS, REPORT, Device, Dtype, Rule, Verifier

EPILOG = (
    "Examples:\n\n"
    "transformers-cactus sweep results --quick\n\n"
    "transformers-cactus sweep results --verifier Qwen/Qwen2.5-7B-Instruct --draft Qwen/Qwen2.5-0.5B-Instruct "
    "--data prompts.jsonl --prompts 100"
)


def sweep(
    folder: Annotated[
        Path,
        typer.Argument(
            file_okay=False, help="Where table and figure go. A sweep that was stopped goes on from what is there."
        ),
    ],
    verifier: Verifier = None,
    draft: Draft = None,
    data: Data = None,
    prompts: Prompts = None,
    max_new_tokens: MaxNewTokens = None,
    num_assistant_tokens: Annotated[
        list[int] | None,
        typer.Option(
            min=1,
            help="Tokens drafted in a round; repeat for more, text is generated with the first. Default: 4 and 8.",
            rich_help_panel=CACTUS,
        ),
    ] = None,
    rule: Annotated[
        list[Rule] | None,
        typer.Option(
            help="A rule to compare with the lossless one and cactus; repeat for more. Default: all but chi-square, "
            "which is cactus at half the budget, and without truncation but jensen-shannon and reverse-kl, which are "
            "slow there.",
            rich_help_panel=CACTUS,
        ),
    ] = None,
    temperature: Temperature = None,
    top_k: TopK = None,
    top_p: TopP = None,
    seed: Seed = 0,
    generated: Annotated[
        int | None,
        typer.Option(
            min=0,
            help="For how many of the prompts to generate text with every rule; 0 for none. Default: 8, with --quick "
            "2.",
            rich_help_panel=REPORT,
        ),
    ] = None,
    dtype: Dtype = Dtype.AUTO,
    device: Device = None,
    quick: Quick = False,
) -> None:
    """Compare acceptance rules over their parameter: acceptance, divergence, and text generated with them.

    Everything is measured twice, with the paper's sampling (temperature 0.6, top-k 20, top-p 0.95) and at temperature
    1 without truncation, unless sampling settings are given. Writes sweep.json, .csv, .md, .png and .svg.
    """
    with one_line():
        from importlib.util import find_spec

        from rich.console import Console

        from ..evaluation.sampling import PAPER, PLAIN
        from .sweep_run import SweepOptions, run_sweep

        if find_spec("matplotlib") is None:
            raise ImportError("the figure needs matplotlib: pip install matplotlib")
        check_pair(verifier, draft)
        check_data(data, prompts, quick)
        if generated == 1:
            raise usage_error("--generated must be 0, or at least 2 for intervals.")
        blocks = num_assistant_tokens or [4, 8]
        if len(set(blocks)) < len(blocks):
            raise usage_error(f"--num-assistant-tokens {blocks[0]} is given twice.")
        own = sampling_of(temperature, top_k, top_p)
        run_sweep(
            SweepOptions(
                folder=folder,
                verifier=verifier,
                draft=draft,
                dtype=dtype.value,
                device=device,
                data=data,
                prompts=prompts,
                max_new_tokens=max_new_tokens or (24 if quick else 64),
                blocks=blocks,
                samplings=[PAPER, PLAIN] if own is None else [own],
                seed=seed,
                generated=(2 if quick else 8) if generated is None else generated,
                quick=quick,
                rules=[choice.value for choice in rule or []],
            ),
            Console(highlight=False),
        )
