"""Time outside the models, and tokens per second of the fast engine against transformers' own loops.

    python -m benchmarks.overhead                  # the real pair: batch 1, 8 and 16
    python -m benchmarks.overhead --quick          # one repetition, short answers

A short form of `benchmarks.compare`, which says how systems are run, with what a batch saves against its prompts one
after another. "wall / forwards" is a call's wall time over the time inside the forwards of the two models, measured by
hooks. "AL" is the mean accepted length: accepted drafted tokens per round, without the extra token; for one sequence.
`V(1)`, `v` and `c` are the costs of a forward: see `measure_costs`.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from transformers_cactus.demo import Pair
from transformers_cactus.evaluation.costs import measure_costs
from transformers_cactus.evaluation.sampling import PAPER

if not __package__:
    # `python benchmarks/overhead.py`: the other modules of the package are found from the folder above.
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
    __package__ = "benchmarks"

from .common import (
    PeakMemory,
    Spread,
    add_model_options,
    batches_of_prompts,
    load,
    machine,
    machine_line,
    table,
    write_json,
)
from .compare import Run, measure
from .compare_tables import summaries
from .systems import ALONE, CONSTANT_BLOCK, Inputs, System, chosen, systems_for

LOSSLESS = "ours, delta 0, constant"
ONE_BY_ONE = f"{LOSSLESS}, one after another"


def systems_of_overhead(pair: Pair, block: int, batch: int) -> list[System]:
    """The systems of one batch size."""
    wanted = [ALONE, LOSSLESS, "ours, delta 0.75, constant"]
    if batch == 1:
        wanted.append(CONSTANT_BLOCK)
    systems = chosen(systems_for(pair, PAPER, block, block, batch), wanted)
    if batch > 1:
        lossless = next(system for system in systems if system.name == LOSSLESS)
        systems.append(System(ONE_BY_ONE, lambda inputs, new_tokens: one_by_one(lossless, inputs, new_tokens)))
    return systems


def one_by_one(system: System, inputs: Inputs, new_tokens: int) -> None:
    """Runs each row of left-padded prompts alone."""
    for row, mask in enumerate(inputs["attention_mask"].bool()):
        system.generate({name: value[row : row + 1, mask] for name, value in inputs.items()}, new_tokens)


def memory_line(pair: Pair, block: int) -> str:
    """Peak memory of plain `generate` and of ours, at batch 8, with prompts of 512 and 256 new tokens."""
    ids = torch.randint(100, 20000, (8, 512)).to(pair.verifier.device)
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    peaks = {}
    for system in chosen(systems_for(pair, PAPER, block, block, batch=8), [LOSSLESS]):
        memory = PeakMemory(pair.verifier.device)
        memory.start()
        system.generate(inputs, 256)
        peaks[system.name] = memory.stop()
    plain, ours = peaks[ALONE], peaks[LOSSLESS]
    if plain is None or ours is None:
        raise OSError("this system does not keep a process's peak memory: --memory needs Linux or a GPU.")
    return f"peak memory above the models, MiB: plain generate {plain:.0f}, ours {ours:.0f} ({ours / plain:.2f})"


def table_of(runs: Sequence[Run]) -> str:
    """The results of one batch size."""
    rows = []
    for system, found in summaries({"runs": [asdict(run) for run in runs]}).items():
        outside, accepted = found.wall_over_forwards, found.accepted_length
        rows.append(
            [
                system,
                f"{found.tokens_per_second.median:.1f}",
                f"{found.ratio.median:.2f}",
                "–" if outside is None else f"{outside.median:.3f}",
                "–" if accepted is None else f"{accepted.median:.2f}",
            ]
        )
    return table(["system", "tokens/s", "over the verifier alone", "wall / forwards", "AL"], rows)


def against_assisted(runs: Sequence[Run]) -> str:
    """Our loop against transformers', both lossless: tokens per second, and a round against a round.

    The two accept equally many tokens on average, but not in these few texts; rounds of the same block length do not
    depend on that.
    """
    ours, theirs = ({run.repetition: run for run in runs if run.system == name} for name in (LOSSLESS, CONSTANT_BLOCK))
    speed = Spread.of([ours[r].tokens / ours[r].wall * theirs[r].wall / theirs[r].tokens for r in ours])
    pace = Spread.of([theirs[r].wall / theirs[r].rounds * ours[r].rounds / ours[r].wall for r in ours])
    return (
        f"ours at delta 0 over transformers' assisted generation: {speed.show(2)} in tokens/s, "
        f"{pace.show(2)} in rounds/s"
    )


def main(words: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_model_options(parser)
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8, 16])
    parser.add_argument("--block", type=int, default=4, help="tokens drafted per round")
    parser.add_argument("--new-tokens", type=int, default=96)
    parser.add_argument("--repetitions", type=int, default=6, help="each with other prompts")
    parser.add_argument("--memory", action="store_true", help="peak memory at batch 8, prompt 512, 256 new tokens")
    parser.add_argument("--quick", action="store_true", help="one repetition of 32 tokens")
    parser.add_argument("--json", type=Path, help="write every run to this file")
    arguments = parser.parse_args(words)
    if arguments.quick:
        arguments.repetitions, arguments.new_tokens = 1, 32
    pair, arithmetic = load(arguments)
    found = machine(pair.verifier.device, arithmetic=str(arithmetic))
    print(f"{machine_line(found)}, block {arguments.block}", flush=True)
    if arguments.memory:
        print(memory_line(pair, arguments.block))
        return
    cost = measure_costs(pair.verifier, pair.draft, arguments.block)
    print(f"V(1) {cost.verifier_step * 1e3:.0f} ms, v {cost.verifier_block:.2f}, c {cost.draft_step:.2f}", flush=True)
    everything: dict[int, Any] = {}
    for batch in arguments.batches:
        systems, prompts = systems_of_overhead(pair, arguments.block, batch), batches_of_prompts(pair, batch)
        runs = measure(pair, systems, prompts, arguments.new_tokens, arguments.repetitions)
        print(f"\nBatch {batch}\n\n{table_of(runs)}", flush=True)
        if batch == 1:
            print(f"\n{against_assisted(runs)}", flush=True)
        everything[batch] = [asdict(run) for run in runs]
    write_json(arguments.json, {"machine": found, "costs": cost._asdict(), "runs": everything})


if __name__ == "__main__":
    main()
