"""The package's own modules as the flat folder that transformers can load from a repository."""

from __future__ import annotations

import ast
from pathlib import Path

PACKAGE = Path(__file__).parents[1]
ENTRY = "hub.generate"


def flat_sources() -> dict[str, str]:
    """The text of `generate.py` and of every module that it needs, by file name.

    transformers copies the modules that a file of a repository imports relatively from beside it, and no others: a
    package's folders become parts of the file names, and imports follow.
    """
    sources: dict[str, str] = {}
    wanted = [ENTRY]
    while wanted:
        module = wanted.pop()
        name = f"{_flat(module)}.py"
        if name not in sources:
            sources[name], needed = _rewritten(module)
            wanted += needed
    return dict(sorted(sources.items()))


def _flat(module: str) -> str:
    return "generate" if module == ENTRY else module.replace(".", "_")


def _file(module: str) -> Path:
    folder = PACKAGE.joinpath(*module.split("."))
    return folder / "__init__.py" if folder.is_dir() else folder.with_suffix(".py")


def _rewritten(module: str) -> tuple[str, list[str]]:
    """A module's text with flat imports, and the modules that it imports."""
    file = _file(module)
    text = file.read_text(encoding="utf-8")
    lines = text.splitlines(keepends=True)
    package = module.split(".") if file.name == "__init__.py" else module.split(".")[:-1]
    needed = []
    for node in ast.walk(ast.parse(text)):
        if not isinstance(node, ast.ImportFrom) or not node.level:
            continue
        parts = package[: len(package) - node.level + 1]
        if node.module is None and not parts:
            # `from . import module`: stays as it is, and the module comes along.
            needed += [alias.name for alias in node.names]
            _replace(lines, node, "." * node.level, ".")
            continue
        target = ".".join(parts + (node.module.split(".") if node.module else []))
        needed.append(target)
        _replace(lines, node, "." * node.level + (node.module or ""), f".{_flat(target)}")
    return "".join(lines), needed


def _replace(lines: list[str], node: ast.ImportFrom, old: str, new: str) -> None:
    first = node.lineno - 1
    lines[first] = lines[first].replace(f"from {old} import", f"from {new} import", 1)
