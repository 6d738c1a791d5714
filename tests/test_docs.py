"""The documentation: every Python block runs, every command of ours has its options, every page is in the menu."""

import functools
import re
import shlex
from pathlib import Path

import pytest
import torch
import typer

import transformers_cactus
from transformers_cactus import demo, rules
from transformers_cactus.cli.app import app

ROOT = Path(__file__).parents[1]
PAGES = sorted((ROOT / "docs").glob("*.md"))
START = ROOT / "docs" / "index.md"


def blocks(page: Path, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", page.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE)


def run(page: Path, scope: dict) -> dict:
    for block in blocks(page, "python"):
        exec(compile(block, str(page), "exec"), scope)
    return scope


@functools.cache
def started() -> dict:
    """What the first page defines; all others go on from it."""
    return run(START, {})


@pytest.fixture
def apart(tmp_path, monkeypatch):
    """A folder to write to, and no model enabled afterwards."""
    monkeypatch.chdir(tmp_path)
    yield
    transformers_cactus.disable(started()["verifier"])


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("page", [page for page in PAGES if blocks(page, "python")], ids=lambda page: page.stem)
def test_every_block_runs(page, apart, capsys):
    torch.manual_seed(0)
    if page == START:
        assert "mean accepted length" in str(started()["output"].acceptance)
        return
    scope = run(page, dict(started()))
    assert isinstance(scope["verifier"], type(started()["verifier"]))


def test_pages_with_code_are_found():
    assert sum(bool(blocks(page, "python")) for page in PAGES) >= 6
    assert demo.load_pair.__name__ in blocks(START, "python")[0]


def test_all_pages_are_in_the_menu():
    menu = re.findall(r"^  - [^:]+: ([\w-]+\.md)$", (ROOT / "mkdocs.yml").read_text(encoding="utf-8"), re.MULTILINE)
    assert sorted(menu) == [page.name for page in PAGES]


def test_every_public_name_is_in_the_reference():
    named = re.findall(
        r"^::: transformers_cactus\.([\w.]+)$", (ROOT / "docs" / "reference.md").read_text(), re.MULTILINE
    )
    assert "rules" in named and len(set(named)) == len(named)
    public = set(transformers_cactus.__all__) - {"__version__"}
    assert public - set(named) == set(rules.__all__)


def test_what_pages_take_from_the_readme_is_there():
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    parts = {
        name for page in PAGES for name in re.findall(r'^--8<-- "README\.md:(\w+)"$', page.read_text(), re.MULTILINE)
    }
    assert parts >= {"measured", "limits"}
    for name in parts:
        assert readme.count(f"[start:{name}]") == readme.count(f"[end:{name}]") == 1


def commands() -> list[list[str]]:
    """Every call of our command in README and docs."""
    text = "\n".join(block for page in [ROOT / "README.md", *PAGES] for block in blocks(page, "bash"))
    return [
        shlex.split(line, comments=True)[1:] for line in text.splitlines() if line.startswith("transformers-cactus")
    ]


def test_commands_have_their_options():
    group = typer.main.get_command(app)
    assert {words[0] for words in commands()} >= {"chat", "export-hub"}
    for name, *words in commands():
        command = group.commands[name]
        with command.make_context(name, words, resilient_parsing=False) as context:
            assert context.params


def test_targets_of_make_are_there():
    text = "\n".join(page.read_text(encoding="utf-8") for page in [ROOT / "README.md", *PAGES])
    named = set(re.findall(r"(?:^|`)make ([a-z][a-z-]*)", text, re.MULTILINE))
    defined = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))
    assert {"demo", "test", "docs"} <= named <= defined
