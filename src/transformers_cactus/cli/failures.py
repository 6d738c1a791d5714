"""What the user sees when something goes wrong: one line on standard error, and an exit code."""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TextIO

import typer

TRACEBACK = "TRANSFORMERS_CACTUS_TRACEBACK"
"""Environment variable that lets an error through as a traceback."""

USAGE, INTERRUPTED = 2, 130


def usage_error(message: str) -> typer.Exit:
    """Prints what is wrong with the options; raise the result."""
    typer.echo(f"error: {message}", err=True)
    return typer.Exit(USAGE)


@contextmanager
def one_line() -> Iterator[None]:
    """Turns expected errors, warnings and Ctrl-C inside the block into single lines.

    Expected are the errors with which this package and transformers reject models and options. With the environment
    variable `TRANSFORMERS_CACTUS_TRACEBACK` set, they come with their traceback.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("default", UserWarning)
        warnings.showwarning = _show_warning
        try:
            yield
        except (OSError, ValueError, ImportError, FloatingPointError) as error:
            if isinstance(error, BrokenPipeError) or os.environ.get(TRACEBACK):
                raise
            typer.echo(f"error: {_first_line(error)}", err=True)
            raise typer.Exit(1) from error
        except KeyboardInterrupt:
            typer.echo("\ninterrupted", err=True)
            raise typer.Exit(INTERRUPTED) from None


def _first_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__


def _show_warning(
    message: Warning | str,
    category: type[Warning],
    filename: str,
    lineno: int,
    file: TextIO | None = None,
    line: str | None = None,
) -> None:
    if issubclass(category, UserWarning):  # the others speak to programmers
        typer.echo(f"warning: {message}", err=True)
