"""The examples run: on the small pair that they take without arguments, Whisper on tiny models."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from transformers import WhisperProcessor

import tiny_models
import tiny_speech

EXAMPLES = Path(__file__).parents[1] / "examples"
pytestmark = pytest.mark.slow


def run(script, *arguments):
    command = [sys.executable, str(EXAMPLES / script), *map(str, arguments)]
    finished = subprocess.run(command, capture_output=True, text=True, check=False, env=os.environ)
    assert finished.returncode == 0, finished.stderr
    return finished.stdout


def test_all_are_run_here():
    scripts = {file.name for file in EXAMPLES.glob("*.py")}
    tested = set(re.findall(r"\w+\.py", Path(__file__).read_text(encoding="utf-8")))
    assert scripts - {"models.py", "distill_draft.py"} <= tested  # the recipe has a test file of its own


@pytest.mark.parametrize(
    ("script", "expected"),
    [
        ("quickstart.py", r"model\.generate after enable(.|\n)*lossless(.|\n)*options on the GenerationConfig"),
        ("batch.py", r"delta 0\.0\)(.|\n)*0\.000 nats(.|\n)*delta 0\.25\)(.|\n)*delta 0\.75\)"),
        ("pipeline.py", r"--- (.|\n)*--- (.|\n)*--- A cactus is"),
        ("streaming.py", r"\S+ \S+"),
        ("chat.py", r"read (\d+) of \1 prompt(.|\n)*read (\d\d) of \d\d+ prompt"),
        ("prompt_lookup.py", r"delta 0\.0: \d+ tokens(.|\n)*delta 0\.5: \d+ tokens"),
        ("compare_rules.py", r"Speculative(.|\n)*0\.000(.|\n)*Optimal"),
    ],
    ids=lambda value: value if value.endswith(".py") else "",
)
def test_on_the_small_pair(script, expected):
    assert re.search(expected, run(script))


def test_whisper(tmp_path):
    processor = WhisperProcessor(tiny_speech.feature_extractor(), tiny_speech.tokenizer())
    for name, model in zip(("verifier", "draft"), tiny_models.pair("whisper"), strict=True):
        model.save_pretrained(tmp_path / name)
        processor.save_pretrained(tmp_path / name)
    printed = run("whisper.py", "--verifier", tmp_path / "verifier", "--draft", tmp_path / "draft")
    assert re.search(r"delta 0\.0: \S+(.|\n)*delta 0\.5: \S+", printed)


def test_other_models_by_name(tmp_path):
    from test_conversation import chat_tokenizer

    for name, model in zip(("verifier", "draft"), tiny_models.pair("llama"), strict=True):
        model.save_pretrained(tmp_path / name)
        chat_tokenizer().save_pretrained(tmp_path / name)
    assert "tokens in" in run("quickstart.py", "--verifier", tmp_path / "verifier", "--draft", tmp_path / "draft")


@pytest.mark.filterwarnings("ignore")
def test_the_notebook(capsys):
    (file,) = EXAMPLES.glob("*.ipynb")
    cells = json.loads(file.read_text(encoding="utf-8"))["cells"]
    code = ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]
    scope: dict = {}
    shown = 0
    for source in code:
        *_, last = source.splitlines()
        if last.startswith("transformers_cactus.visualize"):
            source = source.replace(last, f"view = {last}")
        exec(compile(source, str(file), "exec"), scope)
        if "view" in scope:
            assert "<svg" in scope.pop("view")._repr_html_()
            shown += 1
    assert shown == 2 and capsys.readouterr().out.count("mean accepted length") == 3
