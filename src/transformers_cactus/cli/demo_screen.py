"""What the demo prints around the answer."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from transformers import PreTrainedModel

from ..demo import Arithmetic, Pair
from .machine import describe_machine
from .measure import Measured, Settings, System
from .report import as_table


def introduce(
    pair: Pair,
    verifier: str | None,
    draft: str | None,
    arithmetic: Arithmetic,
    settings: Settings,
    console: Console,
) -> None:
    """Says who works where and how.

    Args:
        pair ([`Pair`]): The models.
        verifier (`str` or `None`): The verifier's name as the user gave it.
        draft (`str` or `None`): The draft's.
        arithmetic ([`Arithmetic`]): How they compute.
        settings ([`Settings`]): How they generate.
        console (`Console`): Where to print.
    """
    machine = describe_machine(pair.verifier.device)
    processor = f"{machine['processor']}, {_count(machine['threads'], 'thread')}"
    layers = _count(pair.draft.config.get_text_config().num_hidden_layers, "layer")
    own, shared = _parameters(pair.draft, besides=pair.verifier)
    lines = {
        "verifier": f"{_short(verifier or 'SmolLM2-135M-Instruct')}, {_parameters(pair.verifier)[0]} parameters",
        "draft": f"{_short(draft) if draft else 'made for it'}, {layers}, {own} parameters"
        + (" besides the verifier's embedding" if shared else ""),
        "machine": processor if machine["device"] == "cpu" else machine["device"],
        "settings": f"{arithmetic}, temperature {settings.temperature:g}, top-k "
        f"{settings.top_k}, top-p {settings.top_p:g}, {_count(settings.num_assistant_tokens, 'token')} drafted a "
        "round",
    }
    for name, text in lines.items():
        console.print(f"[dim]{name:>9}[/]  {escape(text)}", highlight=False)


def announce(prompt: str, system: System, console: Console) -> None:
    """Says what is asked, and who answers."""
    console.print(f"\n[bold]Prompt[/]  {escape(prompt)}", highlight=False)
    console.print(f"[bold]Answer[/]  [dim]({system.name})[/]\n", highlight=False)


@contextmanager
def progress(calls: int, console: Console) -> Iterator[Callable[[System], None]]:
    """A progress bar, or a line for each call where there is no terminal.

    Args:
        calls (`int`): How many there will be.
        console (`Console`): Where to print.

    Yields:
        A function to call before each call, with its system.
    """
    console.print()
    columns = (SpinnerColumn(), TextColumn("measuring"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    bar = Progress(*columns, TextColumn("{task.description}"), console=console, transient=True)
    started = 0

    def next_call(system: System) -> None:
        nonlocal started
        if console.is_terminal:
            bar.update(task, description=system.name, completed=started)
        started += 1
        if not console.is_terminal:
            console.print(f"measuring {started}/{calls}: {system.name}", highlight=False)

    task = bar.add_task("warming up", total=calls)
    if console.is_terminal:
        with bar:
            yield next_call
    else:
        yield next_call
        console.print()


def conclude(measured: Sequence[Measured], prompts: int, passes: int, console: Console) -> None:
    """The table, and how to read it."""
    console.print(as_table(measured))
    console.print(
        f"[dim]Whole calls over {_count(prompts, 'prompt')}, systems in turns, {_count(passes, 'pass', 'es')} "
        f"(medians). AL: drafted tokens kept per round, the extra token not counted. KL per token: how "
        "far the distributions that tokens were drawn from are from the verifier's own, KL(h‖q) in nats.[/]",
        highlight=False,
    )


def _short(name: str) -> str:
    return Path(name).name or name


def _count(number: int, thing: str, plural: str = "s") -> str:
    return f"{number} {thing}{plural if number != 1 else ''}"


def _parameters(model: PreTrainedModel, besides: PreTrainedModel | None = None) -> tuple[str, bool]:
    """How many parameters a model has that another one has not, and whether they share any."""
    others = set() if besides is None else {id(parameter) for parameter in besides.parameters()}
    sizes = {id(parameter): parameter.numel() for parameter in model.parameters()}
    own = sum(size for key, size in sizes.items() if key not in others)
    return f"{own / 1e6:.1f} M" if own >= 100_000 else str(own), not others.isdisjoint(sizes)
