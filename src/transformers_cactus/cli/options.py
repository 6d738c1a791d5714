"""Options that several commands have."""

from __future__ import annotations

from enum import Enum
from pathlib import Path
from typing import Annotated

import typer

from .failures import usage_error

MODELS, TEXT, SAMPLING, CACTUS, RUNNING, REPORT = (
    "Models",
    "Prompt and text",
    "Sampling",
    "Drafting and acceptance",
    "Running",
    "Report",
)
"""Groups of options in the help."""


class Dtype(str, Enum):
    """Number formats."""

    AUTO = "auto"
    FLOAT32 = "float32"
    BFLOAT16 = "bfloat16"
    FLOAT16 = "float16"


class Engine(str, Enum):
    """Decoding loops."""

    AUTO = "auto"
    FAST = "fast"
    STOCK = "stock"


class Rule(str, Enum):
    """Acceptance rules by name. Spelled out, since loading them loads torch, which takes longer than the help may."""

    CACTUS = "cactus"
    CACTUS_EXACT = "cactus-exact"
    CHI_SQUARE = "chi-square"
    ENSEMBLE = "ensemble"
    JENSEN_SHANNON = "jensen-shannon"
    LENIENCE = "lenience"
    OPTIMAL = "optimal"
    REVERSE_KL = "reverse-kl"
    SPECULATIVE = "speculative"
    SQUARED_HELLINGER = "squared-hellinger"
    TOP_K = "top-k"
    TOTAL_VARIATION = "total-variation"
    TYPICAL = "typical"


class Verification(str, Enum):
    """Ways to judge a drafted block."""

    TOKEN = "token"
    BLOCK = "block"


RuleChoice = Annotated[
    Rule | None, typer.Option("--rule", help="Acceptance rule. Default: cactus.", rich_help_panel=CACTUS)
]
Parameters = Annotated[
    list[str] | None,
    typer.Option(
        "--parameter",
        metavar="NAME=VALUE",
        help="A parameter of the rule; repeat for more. lenience: factor. optimal: multiplier. ensemble: "
        "ensemble_weight, within_support. typical: posterior_threshold, posterior_alpha, recovery_from. top-k: "
        "top_k. The others have --delta, or none.",
        rich_help_panel=CACTUS,
    ),
]
Verifier = Annotated[
    str | None,
    typer.Option(
        help="The large model whose text you want: a name on the Hub or a folder. Default: SmolLM2-135M-Instruct.",
        rich_help_panel=MODELS,
        show_default=False,
    ),
]
Device = Annotated[
    str | None,
    typer.Option(help="Such as cpu or cuda:1. Default: the first GPU, else the processor.", rich_help_panel=RUNNING),
]
EngineChoice = Annotated[
    Engine,
    typer.Option(
        "--engine",
        help="Decoding loop: this package's own (fast), transformers' (stock), or the first that fits.",
        rich_help_panel=RUNNING,
    ),
]
JsonFile = Annotated[
    Path | None,
    typer.Option("--json", metavar="FILE", dir_okay=False, help="Write the numbers here.", rich_help_panel=REPORT),
]


def check_writable(file: Path | None) -> None:
    """Makes sure early that a report can be written late."""
    if file is not None and not file.absolute().parent.is_dir():
        raise usage_error(f"--json {file}: there is no such folder.")
