"""The figure of a comparison: speed against divergence."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.figure import Figure

from .compare_tables import Summary, summaries
from .systems import ALONE

COLOURS = ("#009E73", "#D55E00", "#0072B2", "#CC79A7", "#E69F00", "#56B4E9", "#000000", "#882255", "#999933")
"""Of our ways to draft, and of `optimal` with each, and then of all that has no divergence of its own."""


def draw(documents: Sequence[dict[str, Any]], file: Path) -> None:
    """Draws a panel for each comparison: ours by what a token spends, the others, which are lossless or do not say, as
    lines across.

    Args:
        documents (`Sequence[dict]`): Comparisons with the same pair.
        file (`Path`): Where to, by its ending a PNG or an SVG.
    """
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": "benchmarks", "font.size": 9}):
        figure = Figure(figsize=(1 + 5.2 * len(documents), 5.4), layout="constrained")
        panels = figure.subplots(1, len(documents), squeeze=False)[0]
        for panel, document in zip(panels, documents, strict=True):
            _draw_panel(panel, document)
        figure.savefig(file, metadata={"Date": None} if file.suffix == ".svg" else None)


def _draw_panel(panel: Any, document: dict[str, Any]) -> None:
    found, spent = summaries(document), document["statistics"]
    series: dict[str, list[str]] = {}
    for system in spent:
        _, rule, drafting = system.split(", ")
        series.setdefault(f"ours, {'Cactus' if rule.startswith('delta') else rule}, {drafting}", []).append(system)
    others = [system for system in found if system not in spent and system != ALONE]
    colours = [COLOURS[index % len(COLOURS)] for index in range(len(series) + len(others))]
    for (label, systems), colour in zip(series.items(), colours, strict=False):
        points = [(spent[system]["certificate"], *_with_errors(found[system])) for system in systems]
        x, y, below, above = zip(*points, strict=True)
        style = {"marker": "D" if len(points) == 1 else "o", "capsize": 2, "linewidth": 1.2, "markersize": 4}
        panel.errorbar(x, y, yerr=(below, above), color=colour, label=label, **style)
    for system, colour in zip(others, colours[len(series) :], strict=True):
        panel.axhline(found[system].ratio.median, color=colour, linestyle="--", linewidth=1, label=system)
    panel.axhline(1, color="0.6", linestyle=":", linewidth=1, label=ALONE)
    panel.set_xlabel("certificate, nats a token")
    panel.set_ylabel("tokens/s over the verifier alone")
    panel.set_title(f"{document['sampling']}, batch {document['batch']}")
    panel.grid(alpha=0.25)
    panel.legend(frameon=False, fontsize=7)


def _with_errors(found: Summary) -> tuple[float, float, float]:
    ratio = found.ratio
    return ratio.median, ratio.median - ratio.low, ratio.high - ratio.median
