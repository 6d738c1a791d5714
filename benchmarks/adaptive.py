"""The adaptive block length against constant ones, with a good, a poor and an expensive draft.

    python -m benchmarks.adaptive
    python -m benchmarks.adaptive --quick

The regimes are made from one pair of models: the draft is *good* where a large budget accepts most of what it proposes
(temperature 1 without truncation, delta 1); *poor* when it reads scrambled hidden states before its output layer, so
that nearly nothing of what it proposes is accepted; *expensive* when the verifier drafts for itself. All lengths of a
regime, the verifier alone among them, take turns on the same prompts. Tokens per second are those of all texts
together, what the schedule spends on learning included: how many tokens a short text accepts is mostly chance. In
brackets: the middle half of what comes out when the repetitions are drawn anew, with replacement.

The schedule is to reach 0.95 of the constant length that turns out to have been the best, and of the verifier alone.
"""

from __future__ import annotations

import argparse
import copy
import itertools
import random
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel

from transformers_cactus import Sampling
from transformers_cactus.demo import Pair
from transformers_cactus.evaluation.sampling import PAPER, PLAIN

from .common import Spread, add_model_options, batches_of_prompts, load, machine, machine_line, table, write_json
from .compare import measure
from .systems import ALONE, DRAFTS, System, ours, systems_for

BLOCKS = (1, 2, 4, 8)
"""Constant lengths."""
ADAPTIVE = "adaptive"
SHARE = 0.95
"""What the schedule is to reach of the best constant length, and of the verifier alone."""
RESAMPLES = 1000


def scrambled(draft: PreTrainedModel) -> PreTrainedModel:
    """The same draft, on the same weights, whose output layer reads hidden states shifted by one place."""
    weights = itertools.chain(draft.parameters(), draft.buffers())
    poor = copy.deepcopy(draft, {id(weight): weight for weight in weights})
    output = poor.get_output_embeddings()
    output.register_forward_pre_hook(lambda module, inputs: (inputs[0].roll(1, dims=-1),))
    return poor


def regimes_of(pair: Pair) -> dict[str, tuple[Pair, Sampling, dict[str, Any]]]:
    """By name: the models, the sampling and the rule's options."""
    lossless = {"cactus_delta": 0.0}
    return {
        "good draft": (pair, PLAIN, {"cactus_delta": 1.0}),
        "poor draft": (pair._replace(draft=scrambled(pair.draft)), PAPER, lossless),
        "expensive draft": (pair._replace(draft=pair.verifier), PAPER, lossless),
    }


def systems_of(pair: Pair, sampling: Sampling, rule: dict[str, Any]) -> list[System]:
    """The verifier alone, the constant lengths and the adaptive one."""
    alone = next(system for system in systems_for(pair, sampling, 1, 1, batch=1) if system.name == ALONE)
    constant = [ours(pair, sampling, str(block), block, **rule, **DRAFTS["constant"]) for block in BLOCKS]
    return [alone, *constant, ours(pair, sampling, ADAPTIVE, 0, **rule, **DRAFTS["adaptive"])]


def measure_all(arguments: argparse.Namespace) -> dict[str, Any]:
    """All regimes, as one document."""
    pair, arithmetic = load(arguments)
    prompts = batches_of_prompts(pair, 1)
    found = {}
    for name, (models, sampling, rule) in regimes_of(pair).items():
        runs = measure(
            models, systems_of(models, sampling, rule), prompts, arguments.new_tokens, arguments.repetitions
        )
        found[name] = [asdict(run) for run in runs]
    return {
        "machine": machine(pair.verifier.device, arithmetic=str(arithmetic)),
        "quick": arguments.quick,
        "new_tokens": arguments.new_tokens,
        "repetitions": arguments.repetitions,
        "regimes": found,
    }


def speeds(runs: list[dict[str, Any]], repetitions: Sequence[int]) -> dict[str, float]:
    """Tokens per second of each system in some repetitions together, which may occur more than once."""
    totals: dict[str, tuple[float, float]] = {}
    for run in runs:
        times = repetitions.count(run["repetition"])
        tokens, wall = totals.get(run["system"], (0.0, 0.0))
        totals[run["system"]] = (tokens + times * run["tokens"], wall + times * run["wall"])
    return {system: tokens / wall for system, (tokens, wall) in totals.items()}


def share(runs: list[dict[str, Any]], other: str) -> Spread:
    """The adaptive schedule's speed over another's, with the quartiles of resampled repetitions."""
    all_of_them = sorted({run["repetition"] for run in runs})
    source = random.Random(0)
    resampled = [source.choices(all_of_them, k=len(all_of_them)) for _ in range(RESAMPLES)]
    ratios = [found[ADAPTIVE] / found[other] for found in (speeds(runs, drawn) for drawn in [all_of_them, *resampled])]
    return Spread.of(ratios)._replace(median=ratios[0])


def best_constant(runs: list[dict[str, Any]]) -> str:
    """The constant length that turned out to be the fastest."""
    found = speeds(runs, sorted({run["repetition"] for run in runs}))
    return max(map(str, BLOCKS), key=lambda block: found[block])


def tables_of(document: dict[str, Any]) -> str:
    """Speeds by length, and what the adaptive schedule reaches."""
    what = f"Batch 1; {document['new_tokens']} new tokens; {document['repetitions']} repetitions; tokens/s."
    header = ["regime", "alone", *(f"blocks of {block}" for block in BLOCKS), ADAPTIVE]
    header += ["adaptive / best constant", "adaptive / alone"]
    rows, missed = [], []
    for name, runs in document["regimes"].items():
        found, best = speeds(runs, range(document["repetitions"])), best_constant(runs)
        over_constant, over_alone = share(runs, best), share(runs, ALONE)
        shown = [f"{found[system]:.1f}" for system in (ALONE, *map(str, BLOCKS), ADAPTIVE)]
        rows.append([name, *shown, f"{over_constant.show(2)}, of {best}", over_alone.show(2)])
        if min(over_constant.median, over_alone.median) < SHARE:
            missed.append(name)
    reached = f"It is to reach {SHARE:g} of both: " + (
        f"missed with the {', the '.join(missed)}." if missed else "it does."
    )
    return "\n\n".join([what, table(header, rows), reached])


def main(words: Sequence[str] | None = None) -> None:
    """Parses the command line, measures, prints."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_model_options(parser)
    parser.add_argument("--new-tokens", type=int, default=64, help="of every text")
    parser.add_argument("--repetitions", type=int, default=8, help="each with the next prompt")
    parser.add_argument("--quick", action="store_true", help="one repetition of 8 tokens")
    parser.add_argument("--json", type=Path, help="write every run to this file")
    arguments = parser.parse_args(words)
    if arguments.quick:
        arguments.repetitions, arguments.new_tokens = 1, 8
    document = measure_all(arguments)
    print(machine_line(document["machine"]), "\n\n", tables_of(document), sep="")
    write_json(arguments.json, document)


if __name__ == "__main__":
    main()
