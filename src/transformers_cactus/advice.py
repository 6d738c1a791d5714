"""Warnings that point at the caller's line."""

from __future__ import annotations

import sys
import warnings

PASSED_OVER = (__name__.partition(".")[0], "transformers", "torch", "contextlib", "functools")
"""Packages between a caller and what there is to say."""


def advise(message: str) -> None:
    """Issues a `UserWarning` for the innermost line outside this package, transformers and torch."""
    level, frame = 2, sys._getframe(1)
    while frame.f_back is not None and frame.f_globals.get("__name__", "").partition(".")[0] in PASSED_OVER:
        level, frame = level + 1, frame.f_back
    warnings.warn(message, UserWarning, stacklevel=level)
