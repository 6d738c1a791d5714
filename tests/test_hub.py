"""The exported repository, run where this package is not installed, from a folder and from a Hub."""

import json
import re
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

import clean_environment
import tiny_models
import tiny_tokenizers
import transformers_cactus
from hub_stand_in import HubStandIn
from transformers_cactus.cli.app import app
from transformers_cactus.configuration import OPTIONS, PARAMETERS
from transformers_cactus.hub import export_hub
from transformers_cactus.hub.sources import flat_sources


@pytest.fixture(scope="module")
def python(tmp_path_factory) -> Path:
    return clean_environment.build(tmp_path_factory.mktemp("environment"))


def export(*arguments):
    result = CliRunner().invoke(app, ["export-hub", *map(str, arguments)])
    assert result.exit_code == 0, result.output
    return result.output


def save_pair(folder: Path) -> list[str]:
    """Save a tiny verifier and draft, and return the options that name them."""
    for name, model in zip(("verifier", "draft"), tiny_models.pair("llama"), strict=True):
        model.save_pretrained(folder / name)
        tiny_tokenizers.build().save_pretrained(folder / name)
    return ["--verifier", str(folder / "verifier"), "--draft", str(folder / "draft")]


def test_every_import_of_the_flat_sources_is_among_them():
    sources = flat_sources()
    assert {"generate.py", "decoding.py", "_compat.py"} <= sources.keys()
    text = "\n".join(sources.values())
    needed = set(re.findall(r"^\s*from \.(\w+) import", text, re.MULTILINE))
    needed |= set(re.findall(r"^\s*from \. import (\w+)$", text, re.MULTILINE))
    assert {f"{name}.py" for name in needed} == sources.keys() - {"generate.py"}
    # transformers finds modules by lines of this form only.
    assert not re.findall(r"^\s*(from \.\w*\.|from \.\.|import \.)", text, re.MULTILINE)


def test_code_alone(python, tmp_path):
    repository = tmp_path / "cactus"
    assert f"to {repository}" in export(repository)
    requirements = (repository / "custom_generate" / "requirements.txt").read_text().split()
    assert requirements[1].startswith("transformers>=5") and requirements[0].startswith("torch>=")
    card = (repository / "README.md").read_text()
    assert card.startswith("---\n") and "custom_generate" in card and 'custom_generate="cactus"' in card
    for option in set(OPTIONS) - set(PARAMETERS) | {"cactus_delta", "num_assistant_tokens_schedule"}:
        assert f"`{option}" in card
    assert "$" not in card and "Apache License" in (repository / "LICENSE").read_text()

    printed = clean_environment.run(python, "clean_code_repository.py", tmp_path / "cache", repository)
    verifier, draft = tiny_models.pair("llama")
    torch.manual_seed(0)
    ours = transformers_cactus.generate(
        verifier,
        **tiny_models.prompts([7]),
        assistant_model=draft,
        do_sample=True,
        max_new_tokens=12,
        num_assistant_tokens=4,
        cactus_delta=0.75,
    )
    assert json.loads(printed.splitlines()[-1]) == ours[0].tolist()


def test_with_a_pair(python, tmp_path):
    repository = tmp_path / "pair"
    export(repository, *save_pair(tmp_path), "--delta", "0.75")
    assert json.loads((repository / "generation_config.json").read_text())["cactus_delta"] == 0.75
    assert (repository / "draft" / "config.json").is_file()
    printed = clean_environment.run(python, "clean_pair_repository.py", tmp_path / "cache", repository)
    verifier, draft = tiny_models.pair("llama")
    inputs = tiny_tokenizers.build()("abc de", return_tensors="pt")
    torch.manual_seed(0)
    options = {"assistant_model": draft, "do_sample": True, "max_new_tokens": 12, "cactus_delta": 0.75}
    options["num_assistant_tokens"] = 4
    ours = transformers_cactus.generate(verifier, inputs["input_ids"], **options)
    assert json.loads(printed.splitlines()[-1]) == ours[0].tolist()


@pytest.mark.slow
def test_pushed_and_loaded_from_a_hub(python, tmp_path, monkeypatch):
    with HubStandIn(tmp_path / "hub") as hub:
        environment = {"HF_ENDPOINT": hub.address, "HF_TOKEN": "hf_test", "HF_HUB_DISABLE_TELEMETRY": "1"}
        arguments = ["export-hub", tmp_path / "pair", *save_pair(tmp_path), "--push-to-hub", "someone/pair"]
        script = "from transformers_cactus.cli import main; main()"
        printed = hub.run_here(script, arguments, tmp_path / "home", environment)
        assert "uploaded: " in printed and hub.repositories() == ["someone/pair"]
        stored = hub.files("someone/pair")
        assert {"README.md", "custom_generate/generate.py", "draft/model.safetensors"} <= stored.keys()
        assert stored["custom_generate/outputs.py"] == (tmp_path / "pair/custom_generate/outputs.py").read_bytes()
        assert 'custom_generate="someone/pair"' in stored["README.md"].decode()
        for script in ("clean_code_repository.py", "clean_pair_repository.py"):
            clean_environment.run(python, script, tmp_path / "cache", "someone/pair", **environment)


def test_what_is_refused(tmp_path):
    verifier, draft = tiny_models.pair("llama")
    (tmp_path / "file").touch()
    with pytest.raises(FileExistsError, match="not empty"):
        export_hub(tmp_path)
    with pytest.raises(ValueError, match="all three, or none"):
        export_hub(tmp_path / "new", verifier=verifier, draft=draft)
    with pytest.raises(ValueError, match="at least 0"):
        export_hub(tmp_path / "new", delta=-1)
    assert not (tmp_path / "new").exists()
    runner = CliRunner()
    for wrong in (["--verifier", "x"], ["--private"], ["--dtype", "bfloat16"]):
        assert runner.invoke(app, ["export-hub", str(tmp_path / "new"), *wrong]).exit_code == 2


def test_exporting_leaves_the_model_as_it_was(tmp_path):
    verifier, draft = tiny_models.pair("llama")
    for before in (None, 0.1):
        if before is not None:
            verifier.generation_config.cactus_delta = before
        export_hub(
            tmp_path / str(before), verifier=verifier, draft=draft, tokenizer=tiny_tokenizers.build(), delta=1.0
        )
        assert vars(verifier.generation_config).get("cactus_delta") == before
