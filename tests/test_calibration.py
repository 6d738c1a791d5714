"""From a target to a delta: curves and their inverses, and whether texts with that delta spend what they should."""

import json
import math

import numpy as np
import pytest
import torch
from transformers import GenerationConfig
from typer.testing import CliRunner

import tiny_models
from fast_calls import noisy_copy
from test_cli import character_tokenizer
from transformers_cactus import Cactus
from transformers_cactus.cli.app import app
from transformers_cactus.evaluation import Sampling, calibrate, check_calibration
from transformers_cactus.evaluation.costs import Costs, measure_costs
from transformers_cactus.evaluation.curves import DELTAS, Curves, reached
from transformers_cactus.evaluation.estimates import column
from transformers_cactus.evaluation.measures import measure
from transformers_cactus.evaluation.positions import read_positions
from transformers_cactus.evaluation.texts import write_answers

SAMPLING = Sampling(0.8, 12, 0.95)


@pytest.fixture(scope="module")
def pair():
    """A draft that is the verifier with noise in its output: as like it as real drafts are."""
    verifier = tiny_models.build("llama", hidden=32, layers=2)
    return verifier, noisy_copy(verifier, 0.5)


def prompts(count, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, 90, (count, 5), generator=generator).tolist()


@pytest.fixture(scope="module")
def found(pair):
    """A calibration on many texts."""
    return calibrate(*pair, prompts(96), target_kl=0.05, sampling=SAMPLING, max_new_tokens=16)


def noise(estimate):
    """The standard error that an interval says."""
    return (estimate.high - estimate.low) / 2 / 1.96


def test_texts_spend_what_they_should(pair, found):
    assert found.kl_per_token.value == pytest.approx(0.05)
    spent = check_calibration(found, *pair, prompts(96, seed=1), max_new_tokens=16)
    # Three standard errors: a false alarm in 0.3 % of such samples of both.
    allowed = 3 * math.hypot(noise(spent), noise(found.kl_per_token))
    assert abs(spent.value - 0.05) <= allowed
    assert allowed < 0.005, "an interval that everything lands in shows nothing"


@pytest.mark.parametrize("factor", [0.5, 2.0])
def test_another_delta_is_noticed(pair, found, factor):
    other = type(found)(**vars(found) | {"delta": found.delta._replace(value=factor * found.delta.value)})
    spent = check_calibration(other, *pair, prompts(96, seed=1), max_new_tokens=16)
    assert not found.kl_per_token.low <= spent.value <= found.kl_per_token.high


def test_values_between_budgets_are_those_of_the_rule(pair, found):
    """The numbers at the delta that was found, which is no budget of the grid, are those that it has itself."""
    texts = write_answers(pair[0], prompts(96), SAMPLING, 16, seed=0)
    sums = [measure(read_positions(*pair, text, SAMPLING), Cactus(found.delta.value), [4]) for text in texts]
    direct = {name: column(sums, name).sum() for name in sums[0]}
    assert direct["spent@4"] / direct["measured"] == pytest.approx(0.05, rel=0.02)
    assert direct["accepted"] / direct["positions"] == pytest.approx(found.acceptance.value, rel=0.01)
    assert direct["kept@4"] / direct["rounds@4"] == pytest.approx(found.accepted_length.value, rel=0.01)
    assert found.positions == direct["positions"] == 96 * 16 and found.texts == 96
    assert found.lossless_accepted_length.value < found.accepted_length.value
    for estimate in (found.delta, found.kl_per_token, found.acceptance, found.accepted_length):
        assert estimate.low < estimate.value < estimate.high


def test_acceptance_is_a_target_too(pair):
    found = calibrate(*pair, prompts(6), target_acceptance=0.7, sampling=SAMPLING, max_new_tokens=12)
    assert found.acceptance.value == pytest.approx(0.7) and found.delta.low <= found.delta.value <= found.delta.high
    exact = calibrate(
        *pair, prompts(6), target_acceptance=0.7, sampling=SAMPLING, max_new_tokens=12, rule="cactus-exact"
    )
    assert exact.rule == "cactus-exact" and exact.delta.value != found.delta.value
    assert exact.options["cactus_delta"] == exact.delta.value and exact.options["top_k"] == 12


def test_a_few_positions_are_an_estimate_of_all(pair):
    some = calibrate(*pair, prompts(20), target_kl=0.05, sampling=SAMPLING, max_new_tokens=16, kl_positions=100)
    everything = calibrate(*pair, prompts(20), target_kl=0.05, sampling=SAMPLING, max_new_tokens=16)
    assert some.delta.low < everything.delta.value < some.delta.high and some.delta != everything.delta
    assert some.lossless_accepted_length == pytest.approx(everything.lossless_accepted_length)


def curves_of(acceptance):
    return Curves(acceptance=acceptance, accepted_length=4 * acceptance, kl_per_token=acceptance**2)


def test_curves_are_inverted():
    rising = np.sqrt(np.array(DELTAS))[None] * np.array([[1.0], [0.9], [1.1]])
    found = reached(rising, 0.5, "target_kl")
    assert found.value == pytest.approx(0.25, rel=1e-9)
    assert 0.25 / 1.1**2 < found.low < 0.25 < found.high < 0.25 / 0.9**2
    curves = curves_of(rising / 4)
    assert curves.at(curves.accepted_length, 0.09).value == pytest.approx(0.3)
    speedup = curves.speedup(Costs(0.1, 1.5, 0.125), 4)
    assert speedup[0, 0] == pytest.approx(0.5) and reached(speedup, 0.7, "target_speedup").value == pytest.approx(0.16)


def test_a_curve_that_falls_again_gives_the_smallest_delta():
    bump = np.minimum(np.array(DELTAS), 1 / (1e-9 + np.array(DELTAS)))
    found = reached(np.stack([bump, bump]), 0.25, "target_kl")
    assert found.value < 0.5


@pytest.mark.parametrize(
    ("name", "target", "message"),
    [
        ("target_kl", 5.0, "no delta spends more than 4 nats"),
        ("target_acceptance", 0.01, "between 0.100"),
        ("target_speedup", 9.0, "between 0.10 .lossless. and 4.00"),
    ],
)
def test_targets_out_of_reach_say_what_can_be_reached(name, target, message):
    curve = np.maximum(np.sqrt(np.array(DELTAS)), 0.1)[None].repeat(2, 0)
    if name == "target_kl":
        curve = curve - 0.1 + 0.1 * (curve > 3.9)
    with pytest.raises(ValueError, match=message):
        reached(curve, target, name)


def test_costs_are_times_of_forwards(pair):
    costs = measure_costs(*pair, 4, repetitions=3)
    assert 0 < costs.verifier_step < 1 and costs.verifier_block > 0.3 and costs.draft_step > 0.05
    assert Costs(0.1, 2.0, 0.25).speedup(2.0, 4) == pytest.approx(1.0)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({}, "exactly one of .* got none"),
        ({"target_kl": 0.1, "target_acceptance": 0.5}, "exactly one"),
        ({"target_kl": 0.0}, "above 0"),
        ({"target_kl": -1.0}, "target_kl must be above 0 and finite, got -1"),
        ({"target_kl": float("nan")}, "target_kl must be"),
        ({"target_acceptance": 1.0}, "between 0 and 1"),
        ({"target_kl": 0.1, "rule": "optimal"}, "one with a delta"),
        ({"target_kl": 0.1, "num_assistant_tokens": 0}, "num_assistant_tokens must be"),
        ({"target_kl": 0.1, "max_new_tokens": 2.0}, "max_new_tokens must be"),
        ({"target_kl": 0.1, "prompts": [[5, 6]]}, "at least two prompts"),
        ({"target_kl": 0.1, "prompts": [[5, 6], []]}, "at least one token"),
    ],
)
def test_bad_input_is_refused_before_any_model_runs(arguments, message):
    arguments = {"prompts": [[5, 6], [7, 8]]} | arguments
    with pytest.raises(ValueError, match=message):
        calibrate(None, None, **arguments)


# The command.


@pytest.fixture(scope="module")
def folders(pair, tmp_path_factory):
    root = tmp_path_factory.mktemp("models")
    for name, model in zip(("verifier", "draft"), pair, strict=True):
        model.save_pretrained(root / name)
        character_tokenizer().save_pretrained(root / name)
    (root / "prompts.txt").write_text("\n".join(f"question {number}" for number in range(8)))
    return root


@pytest.fixture
def invoke(monkeypatch):
    monkeypatch.setenv("COLUMNS", "120")
    return lambda *arguments: CliRunner().invoke(app, [str(a) for a in arguments])


def test_the_command_finds_checks_and_writes(folders, invoke, tmp_path):
    config = GenerationConfig(eos_token_id=7, max_length=50)
    # As in a model that came without a generation_config.json: transformers forgets options that stand beside it.
    config._from_model_config = True
    config.save_pretrained(tmp_path)
    arguments = ["--verifier", folders / "verifier", "--draft", folders / "draft", "--data", folders / "prompts.txt"]
    arguments += ["--prompts", 8, "--max-new-tokens", 12, "--target-acceptance", 0.7, "--dtype", "float32"]
    result = invoke("calibrate", *arguments, "--write", tmp_path, "--json", tmp_path / "numbers.json")
    assert result.exit_code == 0, result.output
    numbers = json.loads((tmp_path / "numbers.json").read_text())
    delta = numbers["calibration"]["delta"]
    assert delta["low"] <= delta["value"] <= delta["high"] and numbers["check"]["value"] > 0
    assert f"{delta['value']:.4g}" in result.output and "generated with it" in result.output
    written = GenerationConfig.from_pretrained(tmp_path)
    assert written.cactus_delta == delta["value"] and written.cactus_rule == "cactus" and written.eos_token_id == 7
    assert (written.do_sample, written.temperature, written.top_k, written.top_p) == (True, 0.6, 20, 0.95)
    assert "do_sample=True, temperature=0.6, top_k=20, top_p=0.95" in " ".join(result.output.split())
    again = invoke("calibrate", *arguments, "--no-check", "--json", tmp_path / "again.json")
    assert again.exit_code == 0 and "generated with it" not in again.output
    # Without --prompts, a file that has fewer than the default is taken whole: here, the same eight.
    arguments.remove("--prompts")
    arguments.remove(8)
    again = invoke("calibrate", *arguments, "--no-check", "--json", tmp_path / "again.json")
    assert again.exit_code == 0, again.output
    assert json.loads((tmp_path / "again.json").read_text())["calibration"]["delta"] == delta


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "exactly one of --target-kl, --target-acceptance, --target-speedup"),
        (["--target-kl", "0"], "--target-kl must be above 0"),
        (["--target-kl", "0.1", "--temperature", "0"], "temperature and top_p must be above 0"),
        (["--target-kl", "0.1", "--verifier", "x"], "name both --verifier and --draft"),
        (["--target-kl", "0.1", "--json", "/no/such/folder/x.json"], "no such folder"),
        (["--target-kl", "0.1", "--data", "prompts.jsnl/x/y"], "--data: no such file: prompts.jsnl/x/y"),
        (["--target-kl", "0.1", "--data", "prompts.txt"], "--data: no such file: prompts.txt"),
        (["--target-kl", "0.1", "--data", __file__, "--prompts", "9999"], "prompts, 9999 are asked for"),
        (["--target-kl", "0.1", "--quick", "--prompts", "7"], "--quick has 6 prompts of its own"),
    ],
)
def test_wrong_options_are_one_line(invoke, arguments, message):
    result = invoke("calibrate", *arguments)
    assert result.exit_code == 2
    assert message in result.stderr and result.stderr.startswith("error: ") and result.stderr.count("\n") == 1


@pytest.mark.slow
def test_the_real_pair_lands_within_the_interval(invoke, tmp_path):
    result = invoke("calibrate", "--target-kl", 0.05, "--quick", "--json", tmp_path / "numbers.json")
    assert result.exit_code == 0, result.output
    numbers = json.loads((tmp_path / "numbers.json").read_text())
    predicted, spent = numbers["calibration"]["kl_per_token"], numbers["check"]
    assert predicted["value"] == pytest.approx(0.05)
    assert spent["low"] <= predicted["high"] and predicted["low"] <= spent["high"]
    assert spent["high"] < 0.2
