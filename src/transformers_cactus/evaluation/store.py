"""What a long measurement has done so far, in a file, so that it can be stopped and go on."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any


class Store:
    """Finished parts of a measurement, one a line behind a first line that says what is measured.

    Args:
        file (`Path`): Where they are kept; made if it is not there.
        request (`dict`): What is measured, as plain values.

    Raises:
        ValueError: If the file belongs to another measurement.
        OSError: If it cannot be read or made.
    """

    def __init__(self, file: Path, request: dict[str, Any]):
        self._file = file
        self._parts: dict[str, Any] = {}
        first = json.dumps({"request": request})
        if not file.exists():
            file.write_text(first + "\n", encoding="utf-8")
            return
        lines = file.read_text(encoding="utf-8").split("\n")
        if lines[0] != first:
            raise ValueError(f"{file} belongs to another measurement: name another folder, or delete it.")
        # A line that was cut off by the end of the program has no line end behind it: it counts for nothing.
        for line in lines[1:-1]:
            part = json.loads(line)
            self._parts[part["part"]] = part["value"]
        if lines[-1]:
            file.write_text("\n".join(lines[:-1]) + "\n", encoding="utf-8")

    def __contains__(self, part: str) -> bool:
        return part in self._parts

    def get(self, part: str, compute: Callable[[], Any]) -> Any:
        """A part of the measurement, which is computed and kept if it is not there.

        Args:
            part (`str`): Its name.
            compute (callable): Returns it, as plain values.
        """
        if part not in self._parts:
            value = compute()
            with self._file.open("a", encoding="utf-8") as file:
                file.write(json.dumps({"part": part, "value": value}) + "\n")
            self._parts[part] = value
        return self._parts[part]
