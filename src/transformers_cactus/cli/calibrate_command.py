"""The options of `transformers-cactus calibrate`."""

from __future__ import annotations

from enum import Enum
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
from .options import CACTUS, REPORT, Device, Dtype, JsonFile, Verifier, check_writable

TARGET = "Target (exactly one)"

EPILOG = (
    "Examples:\n\n"
    "transformers-cactus calibrate --target-kl 0.02 --quick\n\n"
    "transformers-cactus calibrate --verifier Qwen/Qwen2.5-7B-Instruct --draft Qwen/Qwen2.5-0.5B-Instruct "
    "--data prompts.jsonl --target-acceptance 0.8 --write my-model"
)


class Rule(str, Enum):
    """Rules with a budget in nats."""

    CACTUS = "cactus"
    CACTUS_EXACT = "cactus-exact"


def calibrate(
    verifier: Verifier = None,
    draft: Draft = None,
    data: Data = None,
    prompts: Prompts = None,
    max_new_tokens: MaxNewTokens = None,
    target_kl: Annotated[
        float | None, typer.Option(help="Nats that a token may spend on average.", rich_help_panel=TARGET)
    ] = None,
    target_acceptance: Annotated[
        float | None, typer.Option(help="Share of drafted tokens that are accepted.", rich_help_panel=TARGET)
    ] = None,
    target_speedup: Annotated[
        float | None,
        typer.Option(
            help="Over the verifier alone, for one sequence, by the measured times of the models' forwards.",
            rich_help_panel=TARGET,
        ),
    ] = None,
    rule: Annotated[Rule, typer.Option(help="Acceptance rule.", rich_help_panel=CACTUS)] = Rule.CACTUS,
    num_assistant_tokens: Annotated[
        int, typer.Option(min=1, help="Tokens drafted in a round.", rich_help_panel=CACTUS)
    ] = 4,
    temperature: Temperature = None,
    top_k: TopK = None,
    top_p: TopP = None,
    seed: Seed = 0,
    check: Annotated[
        bool,
        typer.Option(
            "--check/--no-check", help="Generate with the delta, and measure what it spends.", rich_help_panel=REPORT
        ),
    ] = True,
    dtype: Dtype = Dtype.AUTO,
    device: Device = None,
    quick: Quick = False,
    write: Annotated[
        Path | None,
        typer.Option(
            metavar="FOLDER",
            exists=True,
            file_okay=False,
            help="Write the rule, its delta and the sampling settings into this model's generation_config.json.",
            rich_help_panel=REPORT,
        ),
    ] = None,
    json_file: JsonFile = None,
) -> None:
    """Find the delta that spends a given number of nats per token, from texts that the verifier writes.

    Sampling settings that are not given are the paper's: temperature 0.6, top-k 20, top-p 0.95.
    """
    with one_line():
        from rich.console import Console

        from ..evaluation.calibration import check_target
        from ..evaluation.sampling import PAPER
        from .calibrate_run import CalibrateRequest, run_calibrate

        check_pair(verifier, draft)
        check_data(data, prompts, quick)
        targets = {"target_kl": target_kl, "target_acceptance": target_acceptance, "target_speedup": target_speedup}
        try:
            check_target(targets)
        except (TypeError, ValueError) as error:
            raise usage_error(str(error).replace("target_", "--target-")) from error
        sampling = sampling_of(temperature, top_k, top_p) or PAPER
        check_writable(json_file)
        run_calibrate(
            CalibrateRequest(
                verifier=verifier,
                draft=draft,
                dtype=dtype.value,
                device=device,
                data=data,
                prompts=prompts,
                max_new_tokens=max_new_tokens or (24 if quick else 64),
                targets=targets,
                rule=rule.value,
                num_assistant_tokens=num_assistant_tokens,
                sampling=sampling,
                seed=seed,
                check=check,
                quick=quick,
                write=write,
                json_file=json_file,
            ),
            Console(highlight=False),
        )
