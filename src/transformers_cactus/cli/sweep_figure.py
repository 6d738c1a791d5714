"""A sweep's figure: what each rule pays for its acceptance."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.figure import Figure

from ..evaluation.sweep import Row, SettingResults

PANELS = {"kl": "KL of a drafted position from the verifier, nats", "total_variation": "total variation distance"}
LEAST = 1e-3
"""Divergences below this are left out: they would stretch the logarithmic axis."""

STYLES: dict[str, tuple[str, str]] = {
    "cactus": ("#009E73", "o"),
    "cactus-exact": ("#56B4E9", "s"),
    "optimal": ("#D55E00", "D"),
    "lenience": ("#CC79A7", "^"),
    "ensemble": ("#000000", "x"),
    "ensemble, within support": ("#777777", "+"),
    "typical": ("#E69F00", "v"),
    "top-k": ("#0072B2", "*"),
    "total-variation": ("#882255", "<"),
    "squared-hellinger": ("#999933", ">"),
    "jensen-shannon": ("#44AA99", "p"),
    "reverse-kl": ("#AA4499", "h"),
    "chi-square": ("#332288", "d"),
}
"""Colour and marker by rule; colours that stay apart for those who see few."""


def draw(found: Sequence[SettingResults], file: Path) -> None:
    """Draws acceptance against divergence, a column of panels for each sampling setting, a curve for each rule.

    Args:
        found (`Sequence[SettingResults]`): What a sweep returned.
        file (`Path`): Where to, by its ending a PNG or an SVG.
    """
    # Text as text, and the same file for the same numbers.
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": "sweep", "font.size": 9}):
        figure = Figure(figsize=(1.5 + 4.5 * len(found), 8.2), layout="constrained")
        axes = figure.subplots(len(PANELS), len(found), squeeze=False, sharey="col")
        for column, results in enumerate(found):
            for panel, (measure, title) in zip(axes[:, column], PANELS.items(), strict=True):
                _draw_panel(panel, results, measure)
                panel.set_xlabel(title)
                panel.set_ylabel("acceptance of a drafted token")
            axes[0, column].set_title(str(results.sampling))
        handles = {line.get_label(): line for panel in axes.flat for line in panel.get_lines()}
        figure.legend(handles.values(), handles.keys(), loc="outside lower center", ncols=4, frameon=False)
        figure.savefig(file, dpi=150, metadata={"Date": None} if file.suffix == ".svg" else None)


def _draw_panel(panel: Any, results: SettingResults, measure: str) -> None:
    for name, (colour, marker) in STYLES.items():
        rows = [row for row in results.rows if row.cell is not None and row.cell.name == name]
        points = [_point(row, measure) for row in rows]
        shown = [point for point in points if LEAST <= point[0] < float("inf")]
        if shown:
            style = {"linewidth": 2.2, "zorder": 3} if name == "cactus" else {"linewidth": 1.0}
            panel.plot(*zip(*shown, strict=True), color=colour, marker=marker, markersize=5, label=name, **style)
    lossless = results.rows[0].numbers["acceptance"].value
    panel.axhline(lossless, color="0.6", linestyle=":", linewidth=1, label="lossless")
    panel.set_xscale("log")
    panel.grid(alpha=0.25)


def _point(row: Row, measure: str) -> tuple[float, float]:
    return row.numbers[measure].value, row.numbers["acceptance"].value
