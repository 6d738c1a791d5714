"""What `calibrate` and `sweep` have in common: options, the pair, the prompts, and a progress bar."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated, Any

import typer

from .failures import usage_error
from .options import MODELS, RUNNING, SAMPLING, TEXT
from .prompts import PROMPTS

if TYPE_CHECKING:
    from rich.console import Console

    from ..demo import Pair
    from ..evaluation import Sampling
    from ..evaluation.calibration import Progress

Draft = Annotated[
    str | None,
    typer.Option(
        help="The small model that drafts, with the same tokenizer. Default: the one in this package, made for the "
        "default verifier.",
        rich_help_panel=MODELS,
        show_default=False,
    ),
]
Data = Annotated[
    str | None,
    typer.Option(
        help="Prompts: a file of JSON lines, a text file with one a line, or the name of a data set. Default: the "
        "verifier writes them itself; with --quick, the demo's.",
        rich_help_panel=TEXT,
        show_default=False,
    ),
]
Prompts = Annotated[
    int | None,
    typer.Option(
        min=2,
        help=f"How many prompts. Default: 32, with --quick {len(PROMPTS)}; all of a file that has fewer.",
        rich_help_panel=TEXT,
    ),
]
MaxNewTokens = Annotated[
    int | None,
    typer.Option(min=1, help="Length of a text at most. Default: 64, with --quick 24.", rich_help_panel=TEXT),
]
Temperature = Annotated[float | None, typer.Option(help="Above 0.", rich_help_panel=SAMPLING)]
TopK = Annotated[int | None, typer.Option(min=0, help="0 for all tokens.", rich_help_panel=SAMPLING)]
TopP = Annotated[float | None, typer.Option(min=0.0, max=1.0, help="1 for all.", rich_help_panel=SAMPLING)]
Seed = Annotated[int, typer.Option(min=0, help="Same seed, same texts.", rich_help_panel=SAMPLING)]
Quick = Annotated[bool, typer.Option("--quick", help="A few minutes, on a small sample.", rich_help_panel=RUNNING)]


def check_pair(verifier: str | None, draft: str | None) -> None:
    """Leaves with a usage error for a verifier without a draft, or the other way round."""
    if (verifier is None) != (draft is None):
        raise usage_error("name both --verifier and --draft, or neither for the pair in this package.")


def sampling_of(temperature: float | None, top_k: int | None, top_p: float | None) -> Sampling | None:
    """The settings that the options ask for, what is not given as in the paper; `None` if none is given."""
    from ..evaluation import Sampling

    given: dict[str, Any] = {"temperature": temperature, "top_k": top_k, "top_p": top_p}
    given = {name: value for name, value in given.items() if value is not None}
    try:
        return Sampling(**given) if given else None
    except (TypeError, ValueError) as error:
        raise usage_error(str(error)) from error


def load(verifier: str | None, draft: str | None, dtype: str, device: str | None) -> Pair:
    """The pair, by the demo's ways: generation defaults of a model play no part in what is measured."""
    from ..demo import load_pair
    from .models import arithmetic_for, dtype_named, pick_device

    place = pick_device(device)
    return load_pair(verifier, draft, **arithmetic_for(dtype_named(dtype), place)._asdict(), device=place)


def check_data(data: str | None, count: int | None, quick: bool) -> None:
    """Leaves with a usage error, before a model is loaded, where the prompts that are asked for are not there."""
    from ..evaluation.prompts import check_source

    if data is None and quick and count is not None and count > len(PROMPTS):
        raise usage_error(f"--quick has {len(PROMPTS)} prompts of its own: give --data for more.")
    if data is not None:
        try:
            check_source(data, count)
        except (OSError, ValueError, ImportError) as error:
            raise usage_error(f"--data: {error}") from error


def prompts_for(pair: Pair, data: str | None, count: int | None, quick: bool, seed: int) -> list[list[int]]:
    """Token ids of prompts, from where the options say."""
    from ..evaluation import read_prompts, write_prompts
    from .prompt import encode

    if data is None and quick:
        chosen = list(PROMPTS.values())[:count]
        return [encode(pair.tokenizer, prompt)["input_ids"][0].tolist() for prompt in chosen]
    number = count or (len(PROMPTS) if quick else 32)
    if data is not None:
        return read_prompts(data, pair.tokenizer, number, or_fewer=count is None)
    return write_prompts(pair.verifier, pair.tokenizer, number, seed)


@contextmanager
def progress_bar(console: Console) -> Iterator[Progress]:
    """A progress bar, or a line for each stage where there is no terminal.

    Yields:
        A function that takes the stage, how many of its steps are done, and how many there are.
    """
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    columns = (SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    bar = Progress(*columns, TimeElapsedColumn(), console=console, transient=True)
    task = bar.add_task("", total=1)
    stages: list[str] = []

    def report(stage: str, done: int, total: int) -> None:
        if console.is_terminal:
            bar.update(task, description=stage, completed=done, total=total)
        elif stage not in stages:
            console.print(stage, highlight=False)
        stages.append(stage)

    if console.is_terminal:
        with bar:
            yield report
    else:
        yield report
