"""The comparison of all rules: numbers, resuming, tables and the figure."""

import csv
import json
import re
import warnings

import pytest
from typer.testing import CliRunner

import tiny_models
from fast_calls import noisy_copy
from test_cli import character_tokenizer
from transformers_cactus import Cactus, Speculative
from transformers_cactus.cli.app import app
from transformers_cactus.evaluation import Sampling
from transformers_cactus.evaluation.generated import generate_text
from transformers_cactus.evaluation.grid import REFERENCE, cells_for
from transformers_cactus.evaluation.sampling import PAPER, PLAIN
from transformers_cactus.evaluation.store import Store
from transformers_cactus.evaluation.sweep import SweepRequest, sweep, systems_of

REQUEST = SweepRequest(
    prompts=[[5, 6, 7], [8, 9], [10, 11, 12, 13]],
    samplings=[Sampling(0.8, 12, 0.95)],
    blocks=[2, 3],
    max_new_tokens=6,
    kl_positions=10,
    generated_prompts=2,
    generated_tokens=6,
    seed=0,
)


@pytest.fixture(scope="module")
def pair():
    verifier = tiny_models.build("llama", hidden=32, layers=2)
    return verifier, noisy_copy(verifier, 0.5)


@pytest.fixture(scope="module")
def results(pair, tmp_path_factory):
    store = Store(tmp_path_factory.mktemp("sweep") / "progress.jsonl", {})
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        (found,) = sweep(*pair, REQUEST, store, lambda *_: None)
    return found


def numbers_of(results, name, value=None):
    return next(
        row.numbers for row in results.rows if row.cell.name == name and (value is None or row.cell.value == value)
    )


def test_rules_are_compared_on_the_same_positions(results):
    lossless, cactus = numbers_of(results, "lossless"), numbers_of(results, *REFERENCE)
    assert len(results.rows) == len(cells_for(PAPER)) and results.positions == 18 and results.texts == 3
    assert lossless["kl"].value == pytest.approx(0, abs=1e-9) and lossless["rejected_ratio@2"] == (1, 1, 1)
    assert cactus["acceptance"].value > lossless["acceptance"].value and cactus["kl"].value > 0.01
    assert (
        cactus["rejected_ratio@2"].value < 1 and cactus["accepted_length@3"].value > cactus["accepted_length@2"].value
    )
    assert cactus["kl_per_token@2"].value < cactus["kl"].value, "bonus tokens spend nothing"


def test_only_the_ensemble_leaves_the_verifiers_support(results):
    outside = {row.cell.name for row in results.rows if row.numbers["outside"].value > 0}
    assert outside == {"ensemble"}
    assert {row.cell.name for row in results.rows if row.numbers["kl"].value == float("inf")} == outside


def test_generated_text_is_compared_at_about_equal_acceptance(results):
    systems = systems_of(results)
    assert systems[0] is None and systems[1].name == "lossless"
    assert [row.cell for row in results.generated] == systems
    names = [cell.name for cell in systems[1:]]
    assert len(set(names)) == len(names) == len({cell.name for cell in cells_for(PAPER)})
    aim = numbers_of(results, *REFERENCE)["acceptance"].value
    for cell in systems[2:]:
        gaps = [abs(row.numbers["acceptance"].value - aim) for row in results.rows if row.cell.name == cell.name]
        assert abs(numbers_of(results, cell.name, cell.value)["acceptance"].value - aim) == min(gaps)
    alone, lossless = results.generated[0].numbers, results.generated[1].numbers
    assert alone["speedup"] == (1, 1, 1) and "accepted_length" not in alone
    assert lossless["rejected_ratio"] == (1, 1, 1) and lossless["kl_per_token"].value == pytest.approx(0, abs=1e-9)
    assert all(row.numbers["tokens_per_second"].value > 0 for row in results.generated)


def test_a_generated_text_is_measured_as_it_is(pair):
    sampling = REQUEST.samplings[0]
    options = {"block": 3, "max_new_tokens": 10, "kl_positions": None}
    sums = generate_text(*pair, [5, 6, 7], Cactus(0.5), sampling, seed=4, **options)
    again = generate_text(*pair, [5, 6, 7], Cactus(0.5), sampling, seed=4, **options)
    assert {**sums, "seconds": 0} == {**again, "seconds": 0} and sums["seconds"] > 0
    assert sums["tokens"] == 10 and sums["rounds"] - 1 <= sums["tokens"] - sums["kept"] <= sums["rounds"]
    assert sums["spent"] > 0 and sums["measured"] == 10
    few = generate_text(*pair, [5, 6, 7], Cactus(0.5), sampling, seed=4, **options | {"kl_positions": 4})
    assert few["measured"] == 4 and few["nll"] == sums["nll"]
    # Greedy-like text is likelier than text at a high temperature.
    cold, hot = (
        generate_text(*pair, [5, 6, 7], Speculative(), Sampling(t, 0, 1.0), seed=4, **options)["nll"]
        for t in (0.05, 3.0)
    )
    assert cold < hot


def test_a_sweep_that_was_stopped_goes_on(pair, results, tmp_path):
    file = tmp_path / "progress.jsonl"
    calls = []

    def stop(limit):
        def progress(stage, done, total):
            calls.append(stage)
            if len(calls) == limit:
                raise KeyboardInterrupt

        return progress

    for limit in (4, 9):
        calls.clear()
        with pytest.raises(KeyboardInterrupt):
            sweep(*pair, REQUEST, Store(file, {}), stop(limit))
    lines = file.read_text().count("\n")
    (found,) = sweep(*pair, REQUEST, Store(file, {}), lambda *_: None)
    assert 3 < lines < file.read_text().count("\n")
    for row, other in zip(found.rows, results.rows, strict=True):
        # Unequal infinite numbers would be unequal, unknown ones are: NaN.
        assert repr(row) == repr(other)


def test_a_sweep_needs_texts_for_intervals(pair, tmp_path):
    store = Store(tmp_path / "progress.jsonl", {})
    for request in (vars(REQUEST) | {"prompts": [[5]]}, vars(REQUEST) | {"generated_prompts": 1}):
        with pytest.raises(ValueError, match="at least two"):
            sweep(*pair, SweepRequest(**request), store, lambda *_: None)


# The command.


@pytest.fixture(scope="module")
def folder(pair, tmp_path_factory):
    """What the command leaves behind."""
    root = tmp_path_factory.mktemp("models")
    for name, model in zip(("verifier", "draft"), pair, strict=True):
        model.save_pretrained(root / name)
        character_tokenizer().save_pretrained(root / name)
    (root / "prompts.txt").write_text("one\ntwo\nthree\n")
    arguments = ["--verifier", root / "verifier", "--draft", root / "draft", "--data", root / "prompts.txt"]
    arguments += ["--prompts", 3, "--max-new-tokens", 5, "--generated", 2, "--quick", "--dtype", "float32"]
    result = CliRunner().invoke(app, [str(a) for a in ["sweep", root / "results", *arguments]], env={"COLUMNS": "200"})
    assert result.exit_code == 0, result.output
    (root / "output.txt").write_text(result.output)
    return root


def test_the_command_writes_numbers(folder):
    def no_constant(name):
        pytest.fail(f"{name} is no JSON")

    text = (folder / "results" / "sweep.json").read_text()
    numbers = json.loads(text, parse_constant=no_constant)
    first, second = numbers["results"]
    assert first["sampling"] == str(PAPER) and second["sampling"] == str(PLAIN)
    assert len(first["rules"]) == len(cells_for(PAPER)) and len(second["rules"]) == len(cells_for(PLAIN))
    assert first["generated"] and not second["generated"], "--quick generates under the first setting only"
    cactus = next(row for row in first["rules"] if (row["rule"], row["value"]) == REFERENCE)
    assert cactus["parameter"] == "delta" and 0 < cactus["acceptance"]["value"] < 1
    with (folder / "results" / "sweep.csv").open() as file:
        lines = list(csv.DictReader(file))
    line = next(
        x
        for x in lines
        if (x["sampling"], x["rule"], x["value"], x["measure"]) == (str(PAPER), "cactus", "0.75", "kl")
    )
    assert float(line["estimate"]) == pytest.approx(cactus["kl"]["value"]) and line["text"] == "verifier's own"


def test_the_tables_have_every_row(folder):
    markdown = (folder / "results" / "sweep.md").read_text()
    rows = [line for line in markdown.splitlines() if line.startswith("| ") and not line.startswith("| rule")]
    generated = 1 + len({cell.name for cell in cells_for(PAPER)})
    assert len(rows) == len(cells_for(PAPER)) + len(cells_for(PLAIN)) + generated
    assert all(line.count("|") in (11, 8) for line in rows) and "nan" not in markdown
    output = (folder / "output.txt").read_text()
    assert "cactus, delta 0.75" in output and "∞" in output


def test_the_figure_names_every_rule(folder):
    assert (folder / "results" / "sweep.png").read_bytes().startswith(b"\x89PNG")
    svg = (folder / "results" / "sweep.svg").read_text()
    shown = set(re.findall(r">([^<>]+)</text>", svg))
    assert {str(PAPER), str(PLAIN), "lossless"} <= shown
    assert {cell.name for cell in cells_for(PAPER)} <= shown


def test_a_second_run_measures_nothing(folder, monkeypatch):
    before = (folder / "results" / "sweep.json").read_text()
    parts = (folder / "results" / "progress.jsonl").read_text()
    arguments = ["--verifier", folder / "verifier", "--draft", folder / "draft", "--data", folder / "prompts.txt"]
    arguments += ["--prompts", 3, "--max-new-tokens", 5, "--generated", 2, "--quick", "--dtype", "float32"]
    call = [str(a) for a in ["sweep", folder / "results", *arguments]]
    assert CliRunner().invoke(app, call).exit_code == 0
    assert (folder / "results" / "sweep.json").read_text() == before
    assert (folder / "results" / "progress.jsonl").read_text() == parts
    other = CliRunner().invoke(app, [*call, "--seed", "1"])
    assert other.exit_code == 1 and "another measurement" in other.stderr and other.stderr.count("\n") == 1


def test_rules_can_be_chosen(folder):
    arguments = ["--verifier", folder / "verifier", "--draft", folder / "draft", "--data", folder / "prompts.txt"]
    arguments += ["--prompts", 3, "--max-new-tokens", 3, "--generated", 0, "--dtype", "float32"]
    arguments += ["--rule", "chi-square", "--rule", "jensen-shannon"]
    result = CliRunner().invoke(app, [str(a) for a in ["sweep", folder / "chosen", *arguments]])
    assert result.exit_code == 0, result.output
    numbers = json.loads((folder / "chosen" / "sweep.json").read_text())
    for results in numbers["results"]:
        assert {row["rule"] for row in results["rules"]} == {"lossless", "cactus", "chi-square", "jensen-shannon"}
    assert "chi-square" in (folder / "chosen" / "sweep.svg").read_text()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--generated", "1"], "--generated must be 0, or at least 2"),
        (["--num-assistant-tokens", "4", "--num-assistant-tokens", "4"], "given twice"),
        (["--top-p", "0"], "must be above 0"),
        (["--draft", "x"], "name both --verifier and --draft"),
    ],
)
def test_wrong_options_are_one_line(tmp_path, arguments, message):
    result = CliRunner().invoke(app, ["sweep", str(tmp_path / "results"), *arguments])
    assert result.exit_code == 2 and not (tmp_path / "results").exists()
    assert message in result.stderr and result.stderr.startswith("error: ") and result.stderr.count("\n") == 1
