"""The demo's numbers, as a table and as JSON."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

from rich import box
from rich.table import Table

from ..outputs import AcceptanceStatistics, Origin
from .measure import Measured

COLUMNS = ("tokens/s", "speed ratio", "AL", "accepted", "KL per token")


def as_table(measured: Sequence[Measured]) -> Table:
    """One row per system; the first is what the others are compared with."""
    table = Table(box=box.SIMPLE_HEAD, header_style="bold", pad_edge=False)
    table.add_column("", no_wrap=True)
    for title in COLUMNS:
        table.add_column(title, justify="right", no_wrap=True)
    for result in measured:
        numbers = as_numbers(result, measured[0])
        table.add_row(
            result.system.name,
            f"{numbers['tokens_per_second']:.1f}",
            f"{numbers['ratio']:.2f}",
            *(_shown(numbers.get(name), form) for name, form in _ACCEPTANCE_FORMATS.items()),
            style="bold" if result.ratio(measured[0]) == max(r.ratio(measured[0]) for r in measured) else "",
        )
    return table


_ACCEPTANCE_FORMATS = {"mean_accepted_length": ".2f", "accepted_share": ".0%", "divergence_per_token": ".3f"}


def _shown(value: float | None, form: str) -> str:
    return "–" if value is None else format(value, form)


def as_numbers(result: Measured, baseline: Measured) -> dict[str, Any]:
    """One system's numbers, as plain values."""
    numbers: dict[str, Any] = {
        "system": result.system.name,
        "delta": result.system.delta,
        "tokens_per_second": result.tokens_per_second,
        "ratio": result.ratio(baseline),
        "tokens": sum(result.tokens),
        "seconds": sum(result.seconds),
        "tokens_per_second_of_each_pass": result.speeds,
    }
    return numbers | (acceptance_numbers(result.acceptance) if result.rounds else {})


def acceptance_numbers(acceptance: AcceptanceStatistics) -> dict[str, Any]:
    """Acceptance statistics, as plain values."""
    origins = Counter(acceptance.origins)
    numbers = {
        "rounds": acceptance.rounds,
        "drafted": acceptance.drafted,
        "accepted": acceptance.accepted,
        "emitted": acceptance.emitted,
        "mean_accepted_length": acceptance.mean_accepted_length,
        "accepted_share": acceptance.accepted / acceptance.drafted if acceptance.drafted else 0.0,
        "divergence_per_token": acceptance.total_divergence / acceptance.emitted if acceptance.emitted else 0.0,
        "origins": {origin.value: origins[origin] for origin in Origin},
    }
    if acceptance.certificate:
        numbers["certificate_per_token"] = acceptance.total_certificate / acceptance.emitted
    return numbers
