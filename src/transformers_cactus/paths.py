"""Telling a file or folder that is not there from a name on the Hub."""

from __future__ import annotations

import os
from pathlib import Path

FILE_ENDINGS = (".txt", ".json", ".jsonl")


def looks_like_path(name: str) -> bool:
    """Whether a name means something on this machine, so that asking the Hub for it would only take time.

    Args:
        name (`str`): Of a model or a data set: `user/name` on the Hub, or a file or folder.
    """
    parts = name.count("/")
    in_a_folder_here = parts > 0 and Path(name).parent.is_dir()
    return name.startswith((".", "~", os.sep)) or name.endswith(FILE_ENDINGS) or parts > 1 or in_a_folder_here
