"""Writes docs/benchmarks.md and its figure from what the other benchmarks measured.

python -m benchmarks.report            # reads and writes in docs/benchmarks, as `make bench` does
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from . import adaptive, compare_tables, scaling, verification
from .common import machine_line
from .compare_figure import draw

PAGE = Path(__file__).parent / "page.md"
"""The text, with a `{{ name }}` where the tables of `name.json` go."""
FOLDER = Path("docs/benchmarks")
FIGURE = "speed.svg"

TABLES: dict[str, Callable[[dict[str, Any]], str]] = {
    "compare-prompts": compare_tables.tables_of,
    "compare": compare_tables.tables_of,
    "compare-temperature-1": compare_tables.tables_of,
    "compare-batch-8": compare_tables.tables_of,
    "compare-batch-16": compare_tables.tables_of,
    "adaptive": adaptive.tables_of,
    "verification": verification.tables_of,
    "scaling": scaling.tables_of,
}
"""What makes the tables of each file."""


def page(documents: dict[str, dict[str, Any]]) -> str:
    """The page, with the tables and what they were measured on."""
    text = PAGE.read_text(encoding="utf-8")
    for name, document in documents.items():
        quick = "\n\n**From a quick run, which shows that the benchmark works and no more.**" * document["quick"]
        text = text.replace(
            f"{{{{ {name} }}}}", f"{machine_line(document['machine'])}.{quick}\n\n{TABLES[name](document)}"
        )
    return text


def main(words: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--folder", type=Path, default=FOLDER, help="where the JSON files are; the page goes beside it"
    )
    folder: Path = parser.parse_args(words).folder
    missing = [name for name in TABLES if not (folder / f"{name}.json").exists()]
    if missing:
        parser.error(f"there is no {', '.join(f'{name}.json' for name in missing)} in {folder}: run make bench.")
    documents = {name: json.loads((folder / f"{name}.json").read_text(encoding="utf-8")) for name in TABLES}
    draw([documents["compare"], documents["compare-temperature-1"]], folder / FIGURE)
    folder.with_suffix(".md").write_text(page(documents), encoding="utf-8")


if __name__ == "__main__":
    main()
