"""The benchmarks run, on tiny models where they take any, and their numbers are what they say they are."""

import json
import shutil
import sys
from collections import Counter
from pathlib import Path

import pytest
import torch

import tiny_models
from test_conversation import chat_tokenizer

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks import adaptive, common, compare, copying, overhead, report, scaling, systems, verification  # noqa: E402
from benchmarks.compare_tables import against_transformers, summaries  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore")
NEW_TOKENS = 8


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    """Options that name a tiny pair."""
    folder = tmp_path_factory.mktemp("pair")
    for name, model in zip(("verifier", "draft"), tiny_models.pair("llama"), strict=True):
        model.save_pretrained(folder / name)
        chat_tokenizer().save_pretrained(folder / name)
    return ["--verifier", str(folder / "verifier"), "--draft", str(folder / "draft"), "--dtype", "float32"]


@pytest.fixture(scope="module")
def documents(pair, tmp_path_factory):
    """What every benchmark that the page is made from writes in its quick mode."""
    folder = tmp_path_factory.mktemp("docs") / "benchmarks"
    # Compiled systems run, but compiling would take longer than all else here.
    with torch.compiler.set_stance("force_eager"):
        compare.main([*pair, "--quick", "--json", str(folder / "compare.json")])
    shutil.copy(folder / "compare.json", folder / "compare-prompts.json")
    fewer = ["--temperature", "1", "--systems", "[!o]*", "ours*constant"]
    with torch.compiler.set_stance("force_eager"):
        compare.main([*pair, "--quick", *fewer, "--json", str(folder / "compare-temperature-1.json")])
    batches = ["--batch", "8", "--systems", "ours, delta 0*constant"]
    compare.main([*pair, "--quick", *batches, "--json", str(folder / "compare-batch-8.json")])
    shutil.copy(folder / "compare-batch-8.json", folder / "compare-batch-16.json")
    verification.main(["--quick", "--vocabularies", "32k", "--json", str(folder / "verification.json")])
    scaling.main(["--quick", "--json", str(folder / "scaling.json")])
    adaptive.main([*pair, "--quick", "--json", str(folder / "adaptive.json")])
    return folder, {file.stem: json.loads(file.read_text()) for file in folder.glob("*.json")}


def test_every_system_is_compared(documents):
    found = documents[1]["compare"]
    names = {run["system"] for run in found["runs"]}
    rules = {f"ours, {rule}, {draft}" for rule in systems.RULES for draft in systems.DRAFTS}
    assert names >= {systems.ALONE, systems.CONSTANT_BLOCK, systems.ENSEMBLE} | rules
    assert set(found["statistics"]) == {rule for rule in rules if "compiled" not in rule}
    assert found["constant_block"] == max(compare.BLOCKS, key=lambda block: found["block_search"][str(block)])
    assert documents[1]["compare-temperature-1"]["sampling"] == "temperature 1, no truncation"


def test_a_batch_counts_all_its_tokens(documents):
    found = documents[1]["compare-batch-8"]
    assert {run["tokens"] for run in found["runs"]} == {8 * NEW_TOKENS}
    assert {entry["tokens"] for entry in found["statistics"].values()} == {8 * NEW_TOKENS}
    assert not {run["system"] for run in found["runs"]} & {systems.CONSTANT_BLOCK, systems.ENSEMBLE}


def test_the_parts_of_a_call_are_parts_of_it(documents):
    runs = [run for run in documents[1]["compare"]["runs"] if run["draft_step"] and run["rounds"] > 1]
    assert len(runs) > 5
    for run in runs:
        assert run["tokens"] == pytest.approx((run["accepted_length"] + 1) * run["rounds"])
        drafts = run["draft_per_round"] * run["rounds"]
        # Without the first forward of each model, which reads the prompt.
        inside = (run["rounds"] - 1) * run["verifier_step"] + (drafts - 1) * run["draft_step"]
        assert 0 < inside < run["forwards"] < run["wall"]


def test_delta_spends_and_accepts(documents):
    spent = documents[1]["compare"]["statistics"]
    assert spent["ours, delta 0, constant"]["certificate"] == pytest.approx(0, abs=1e-6)
    assert spent["ours, delta 1, constant"]["certificate"] > 0
    assert all(0 <= rate <= 1 for entry in spent.values() for rate in entry["positions"])


def timed(system, repetition, wall):
    """A run of ten tokens."""
    nothing = {"verifier_step": 1.0, "draft_step": None, "accepted_length": None, "peak_memory": None}
    return {"system": system, "repetition": repetition, "wall": wall, "tokens": 10, "rounds": 10, **nothing} | {
        "forwards": wall / 2,
        "draft_per_round": 0.0,
    }


def test_what_is_said_of_transformers_at_its_best():
    # The second repetition is twice as slow; half of all time is outside the forwards.
    walls = {systems.ALONE: 9, systems.CONSTANT_BLOCK: 6, "ours, delta 0, constant": 4, "ours, delta 0.5, constant": 1}
    runs = [timed(name, slow - 1, slow * wall) for slow in (1, 2) for name, wall in walls.items()]
    assert against_transformers({"runs": runs}) == (
        "Over transformers' assisted generation with that block, lossless against lossless: 1.50 (1.50–1.50) with "
        "constant blocks. If nothing of ours took time but the forwards: 3.00."
    )
    assert against_transformers({"runs": runs[:1]}) is None


def test_ratios_are_within_a_repetition():
    # The machine is twice as slow in the second repetition, and ten times in the third.
    runs = [timed(systems.ALONE, r, slow) for r, slow in enumerate((1, 2, 10))]
    runs += [timed("other", r, slow / 3) for r, slow in enumerate((1, 2, 10))]
    found = summaries({"runs": runs})
    assert found["other"].ratio == pytest.approx((3, 3, 3))
    assert found["other"].tokens_per_second.median == pytest.approx(15)
    assert found["other"].wall_over_forwards.median == pytest.approx(2)


def test_the_page_has_every_table(documents):
    folder, found = documents
    report.main(["--folder", str(folder)])
    page = folder.with_suffix(".md").read_text(encoding="utf-8")
    assert "{{" not in page
    assert set(report.TABLES) == set(found)
    for name, table in report.TABLES.items():
        assert table(found[name]) in page
    figure = (folder / report.FIGURE).read_text(encoding="utf-8")
    assert "certificate" in figure and systems.CONSTANT_BLOCK in figure


def test_the_page_in_the_documentation_is_made_from_its_files():
    folder = ROOT / report.FOLDER
    documents = {name: json.loads((folder / f"{name}.json").read_text(encoding="utf-8")) for name in report.TABLES}
    assert folder.with_suffix(".md").read_text(encoding="utf-8") == report.page(documents)


def test_adaptive_lengths_are_held_against_the_best_constant_one(documents):
    found = documents[1]["adaptive"]["regimes"]
    assert set(found) == {"good draft", "poor draft", "expensive draft"}
    for runs in found.values():
        assert {run["system"] for run in runs} == {systems.ALONE, *map(str, adaptive.BLOCKS), adaptive.ADAPTIVE}

    walls = {systems.ALONE: (10, 10), "1": (9, 9), "2": (6, 1), "4": (5, 5), "8": (8, 8), adaptive.ADAPTIVE: (4, 2)}
    runs = [timed(name, repetition, wall) for name, its in walls.items() for repetition, wall in enumerate(its)]
    assert adaptive.best_constant(runs) == "2"
    assert adaptive.speeds(runs, [0, 1, 1])["2"] == pytest.approx(3 * runs[0]["tokens"] / 8)
    over_constant, over_alone = adaptive.share(runs, "2"), adaptive.share(runs, systems.ALONE)
    # Of both texts together. Drawn anew there are also two of the first, 12 / 8, and two of the second, 1 / 2.
    assert over_constant.median == pytest.approx(7 / 6)
    assert 1 / 2 <= over_constant.low <= 7 / 6 <= over_constant.high <= 12 / 8
    assert over_alone.median == pytest.approx(20 / 6)


def test_the_poor_draft_is_poor():
    _, draft = tiny_models.pair("llama")
    poor, ids = adaptive.scrambled(draft), torch.arange(12)[None]
    assert poor.get_input_embeddings().weight is draft.get_input_embeddings().weight
    assert not torch.allclose(poor(ids).logits, draft(ids).logits)
    shifted = draft.get_output_embeddings()(draft.base_model(ids).last_hidden_state.roll(1, dims=-1))
    torch.testing.assert_close(poor(ids).logits, shifted)


def test_copies_are_counted(pair, tmp_path):
    file = tmp_path / "copying.json"
    copying.main([*pair, "--new-tokens", "24", "--answers", "1", "--json", str(file)])
    rows = json.loads(file.read_text())["rows"]
    assert {row["n"] for row in rows} <= {2, 3, 4} and rows
    assert all(0 <= row[key] <= 1 for row in rows for key in ("share", "copied", "drafted"))
    assert 0 < sum(row["share"] for row in rows) <= 1


def test_missing_files_are_named(tmp_path, capsys):
    with pytest.raises(SystemExit):
        report.main(["--folder", str(tmp_path)])
    assert "scaling.json" in capsys.readouterr().err


def test_unknown_systems_are_refused(pair, capsys):
    with pytest.raises(SystemExit):
        compare.main([*pair, "--systems", "theirs*"])
    error = capsys.readouterr().err
    assert "'theirs*'" in error and systems.ALONE in error


def test_verification_states_what_it_leaves_out(documents):
    found = documents[1]["verification"]
    combinations = len(verification.BLOCKS) * len(verification.BATCHES)
    assert len(found["timed"]) + len(found["skipped"]) == combinations
    assert all(each["gib"] > found["gib"] for each in found["skipped"])
    assert all((each["over_transformers"] is None) == (each["batch"] > 1) for each in found["timed"])


def test_extra_memory_is_the_peak_of_one_call():
    def call(turn):
        for _ in range(3):
            torch.empty(2**20, dtype=torch.float32)  # 4 MiB, given back each time
        return torch.empty(2**20, dtype=torch.float32)

    assert verification.extra_memory(call, torch.device("cpu")) == pytest.approx(4, rel=0.01)


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="only Linux keeps the peak of a process")
def test_peak_memory_sees_what_is_given_back():
    memory = common.PeakMemory(torch.device("cpu"))
    memory.start()
    torch.ones(64 * 2**18)
    assert 60 < memory.stop() < 80


def test_forwards_are_timed_inside_the_block_only():
    verifier, draft = tiny_models.pair("llama")
    ids = torch.ones(1, 3, dtype=torch.long)
    verifier(ids)
    with common.ForwardTimer(verifier=verifier, draft=draft) as timer:
        verifier(ids)
        verifier(ids)
        draft(ids)
    verifier(ids)
    assert [len(timer.seconds(name)) for name in ("verifier", "draft")] == [2, 1]
    assert min(timer.seconds("verifier")) > 0


def test_exponents_are_those_of_powers(documents):
    sizes = (3, 7, 50)
    assert scaling.exponent(sizes, [5 * size**1.5 for size in sizes]) == pytest.approx(1.5)
    found = documents[1]["scaling"]["growths"]
    assert set(found) == set(scaling.GROWTHS)
    for growth in found.values():
        assert growth["above_linear"] == (growth["outside"]["exponent_of_largest"] > scaling.LINEAR)
        assert all(a < b for a, b in zip(growth["outside"]["seconds"], growth["total"]["seconds"], strict=True))


def test_overhead_runs(pair, capsys, tmp_path):
    words = ["--batches", "1", "3", "--repetitions", "1", "--new-tokens", str(NEW_TOKENS)]
    overhead.main([*pair, *words, "--json", str(tmp_path / "overhead.json")])
    printed = capsys.readouterr().out
    assert systems.CONSTANT_BLOCK in printed and overhead.ONE_BY_ONE in printed
    runs = json.loads((tmp_path / "overhead.json").read_text())["runs"]
    assert {run["tokens"] for run in runs["3"]} == {3 * NEW_TOKENS}


def test_prompts_are_of_all_kinds():
    prompts = json.loads(common.PROMPTS.read_text(encoding="utf-8"))["prompts"]
    kinds = ("chat", "code", "arithmetic", "summary", "list", "story")
    assert Counter(entry["kind"] for entry in prompts) == dict.fromkeys(kinds, 4)
    assert {entry["kind"] for entry in prompts[:6]} == set(kinds)
    assert len({entry["text"] for entry in prompts}) == 24
