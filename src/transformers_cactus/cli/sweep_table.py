"""A sweep's numbers as tables, for the terminal and for Markdown."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from rich import box
from rich.table import Table as RichTable

from ..evaluation.estimates import Estimate
from ..evaluation.sweep import Row, SettingResults

NOTES = (
    "In brackets: 95 % intervals, from a bootstrap over texts. Acceptance: the probability that a drafted token is "
    "accepted. AL m: drafted tokens accepted per round with blocks of m, the extra token not counted. Rej: rejections "
    "per token over those of the lossless rule. KL: nats between what a drafted position emits and the verifier; per "
    "token, where a bonus token spends nothing. TV: total variation. Entropy: its change in nats. Outside: share of "
    "positions at which a token may be emitted that top-k or top-p exclude from the verifier. NLL: the verifier's "
    "negative log-likelihood of the text per token, in nats, at temperature 1 without truncation."
)


class Table(NamedTuple):
    """A table of text."""

    title: str
    header: list[str]
    rows: list[list[str]]


def tables_of(results: SettingResults, blocks: Sequence[int]) -> list[Table]:
    """What was found under one setting: on the verifier's own text, and on generated text if there is any.

    Args:
        results ([`SettingResults`]): The setting's results.
        blocks (`Sequence[int]`): Block lengths that were measured.
    """
    first = blocks[0]
    columns = {"acceptance": "acceptance"}
    columns |= {f"AL {block}": f"accepted_length@{block}" for block in blocks}
    columns |= {f"Rej {first}": f"rejected_ratio@{first}", "KL": "kl", "KL per token": f"kl_per_token@{first}"}
    columns |= {"TV": "total_variation", "entropy": "entropy_change", "outside": "outside"}
    own = f"{results.sampling}: {results.positions:,} positions of {results.texts} texts of the verifier"
    tables = [_table(own, results.rows, columns, ("acceptance", "KL"))]
    if results.generated:
        columns = {
            "tokens/s": "tokens_per_second",
            "speed-up": "speedup",
            f"AL {first}": "accepted_length",
            "Rej": "rejected_ratio",
            "KL per token": "kl_per_token",
            "NLL": "nll_per_token",
        }
        title = f"{results.sampling}: generated text, rules at about equal acceptance"
        tables.append(_table(title, results.generated, columns, ("speed-up", f"AL {first}", "NLL")))
    return tables


def _table(title: str, rows: Sequence[Row], columns: dict[str, str], with_interval: Sequence[str]) -> Table:
    body = [
        [row.label, *(_shown(row.numbers.get(name), title in with_interval) for title, name in columns.items())]
        for row in rows
    ]
    return Table(title, ["rule", *columns], body)


def _shown(estimate: Estimate | None, with_interval: bool) -> str:
    if estimate is None or math.isnan(estimate.value):
        return "–"
    if math.isinf(estimate.value):
        return "∞"
    value = _number(estimate.value)
    return f"{value} ({_number(estimate.low)}–{_number(estimate.high)})" if with_interval else value


def _number(value: float) -> str:
    # Two decimals say nothing of small divergences.
    return f"{value:.3f}" if 0 < abs(value) < 0.1 else f"{value:.2f}"


def as_rich(table: Table) -> RichTable:
    """For a terminal."""
    shown = RichTable(
        title=table.title, box=box.SIMPLE_HEAD, header_style="bold", title_justify="left", pad_edge=False
    )
    for index, name in enumerate(table.header):
        shown.add_column(name, justify="right" if index else "left")
    for row in table.rows:
        shown.add_row(*row)
    return shown


def as_markdown(table: Table) -> str:
    """For a page, its title in bold."""
    rule = ["---", *["---:"] * (len(table.header) - 1)]
    lines = [f"| {' | '.join(cells)} |" for cells in (table.header, *table.rows)]
    return "\n".join([f"**{table.title}**", "", lines[0], f"|{'|'.join(rule)}|", *lines[1:]])
