"""`transformers-cactus sweep`: loads, measures what is not measured yet, and writes table and figure."""

from __future__ import annotations

import csv
import io
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rich.console import Console

from ..evaluation import Sampling
from ..evaluation.store import Store
from ..evaluation.sweep import Row, SettingResults, SweepRequest, sweep
from .evaluation_setup import load, progress_bar, prompts_for
from .machine import describe_machine, describe_versions
from .models import quiet_transformers, shipped_draft
from .sweep_figure import draw
from .sweep_table import NOTES, as_markdown, as_rich, tables_of


@dataclass(frozen=True)
class SweepOptions:
    """The options of the command."""

    folder: Path
    verifier: str | None
    draft: str | None
    dtype: str
    device: str | None
    data: str | None
    prompts: int | None
    max_new_tokens: int
    blocks: Sequence[int]
    samplings: Sequence[Sampling]
    seed: int
    generated: int
    quick: bool
    rules: Sequence[str]

    @property
    def plain(self) -> dict[str, Any]:
        """What is measured, as plain values."""
        names = ("verifier", "draft", "dtype", "data", "prompts", "max_new_tokens", "seed", "generated", "quick")
        values = {name: getattr(self, name) for name in names}
        values |= {"blocks": list(self.blocks), "samplings": [str(sampling) for sampling in self.samplings]}
        values |= {"rules": sorted(self.rules)}
        # A model that was trained on in its folder is another one, and so are prompts that were written anew.
        sources = {"verifier": self.verifier, "draft": self.draft or shipped_draft(), "data": self.data}
        return values | {"files": {role: _files(source) for role, source in sources.items()}}


def _files(source: str | None) -> dict[str, list[int]]:
    """Size and time of what a local source is read from."""
    place = Path(source) if source is not None else None
    if place is None or not place.exists():
        return {}
    files = sorted(place.glob("*.safetensors")) if place.is_dir() else [place]
    return {file.name: [file.stat().st_size, file.stat().st_mtime_ns] for file in files}


def run_sweep(options: SweepOptions, console: Console) -> None:
    """Runs a sweep, or what is left of it, and reports."""
    options.folder.mkdir(parents=True, exist_ok=True)
    store = Store(options.folder / "progress.jsonl", options.plain)
    with quiet_transformers(), progress_bar(console) as progress:
        progress("loading the models", 0, 1)
        pair = load(options.verifier, options.draft, options.dtype, options.device)
        progress("prompts", 0, 1)
        prompts = store.get(
            "prompts", lambda: prompts_for(pair, options.data, options.prompts, options.quick, options.seed)
        )
        request = SweepRequest(
            prompts=prompts,
            samplings=options.samplings,
            blocks=options.blocks,
            max_new_tokens=options.max_new_tokens,
            kl_positions=24 if options.quick else 200,
            generated_prompts=min(options.generated, len(prompts)),
            generated_tokens=min(options.max_new_tokens, 16) if options.quick else options.max_new_tokens,
            seed=options.seed,
            rules=options.rules,
        )
        if options.quick:
            # The second setting's texts would take the quick out of it.
            first, *others = options.samplings
            found = sweep(pair.verifier, pair.draft, replace(request, samplings=[first]), store, progress)
            request = replace(request, samplings=others, generated_prompts=0)
            found += sweep(pair.verifier, pair.draft, request, store, progress)
        else:
            found = sweep(pair.verifier, pair.draft, request, store, progress)
    machine = {"machine": describe_machine(pair.verifier.device), "versions": describe_versions()}
    _write(options, found, {"command": "sweep", **machine, "settings": _without_files(options.plain)})
    for results in found:
        for table in tables_of(results, options.blocks):
            console.print(as_rich(table))
    console.print(f"[dim]{NOTES}[/]")
    console.print(f"wrote sweep.json, .csv, .md, .png and .svg to {options.folder}")


def _write(options: SweepOptions, found: Sequence[SettingResults], about: dict[str, Any]) -> None:
    sections = [as_markdown(table) for results in found for table in tables_of(results, options.blocks)]
    files = {
        "sweep.json": json.dumps(about | {"results": [as_plain(results) for results in found]}, indent=1) + "\n",
        "sweep.csv": as_csv(found),
        "sweep.md": "\n\n".join([*sections, NOTES]) + "\n",
    }
    for name, text in files.items():
        (options.folder / name).write_text(text, encoding="utf-8")
    for kind in ("png", "svg"):
        draw(found, options.folder / f"sweep.{kind}")


def _without_files(values: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in values.items() if name != "files"}


def as_plain(results: SettingResults) -> dict[str, Any]:
    """What was found under one setting, as values for JSON: `null` for what is infinite or unknown."""
    return {
        "sampling": str(results.sampling),
        "texts": results.texts,
        "positions": results.positions,
        "rules": [_plain_row(row) for row in results.rows],
        "generated": [_plain_row(row) for row in results.generated],
    }


def _plain_row(row: Row) -> dict[str, Any]:
    about = {
        "rule": None if row.cell is None else row.cell.name,
        "parameter": None if row.cell is None else row.cell.parameter or None,
        "value": None if row.cell is None or not row.cell.parameter else row.cell.value,
    }
    numbers = {
        name: {part: value if math.isfinite(value) else None for part, value in estimate._asdict().items()}
        for name, estimate in row.numbers.items()
    }
    return about | numbers


def as_csv(found: Sequence[SettingResults]) -> str:
    """A line for each number: where it is from, its name, its value and its interval."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(["sampling", "text", "rule", "parameter", "value", "measure", "estimate", "low", "high"])
    for results in found:
        for source, rows in (("verifier's own", results.rows), ("generated", results.generated)):
            for row in rows:
                cell = row.cell
                about = ["verifier alone", "", ""] if cell is None else [cell.name, cell.parameter, cell.value]
                for name, estimate in row.numbers.items():
                    writer.writerow([results.sampling, source, *about, name, *estimate])
    return text.getvalue()
