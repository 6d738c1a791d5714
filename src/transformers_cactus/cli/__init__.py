"""The `transformers-cactus` command."""

from __future__ import annotations

import sys
from importlib.util import find_spec

NEEDED = ("typer", "rich")
"""Packages of the extra `demo` that the command line cannot do without."""


def main() -> None:
    """Runs the command line; the entry point of the script `transformers-cactus`."""
    missing = [name for name in NEEDED if find_spec(name) is None]
    if missing:
        sys.exit(
            f"transformers-cactus: the command line needs {' and '.join(missing)}: "
            "pip install 'transformers-cactus[demo]'"
        )
    from .app import app

    app()
