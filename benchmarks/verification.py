"""One verification call alone: time and memory by vocabulary, block and batch, against transformers' and a bare read.

    python -m benchmarks.verification
    python -m benchmarks.verification --quick

Times `verify` (rule: Cactus with delta 0.75), the same with the statistics that `return_dict_in_generate=True` asks
for, transformers' `_speculative_sampling` (one sequence only, as its loop), and, as the least that any of them can
take, a sum over the drafted positions' scores of both models. Scores are random, in float32, without truncation. The
calls take turns, with other random numbers every time; numbers are medians, ratios medians of ratios within a turn.

Combinations whose scores need more memory than `--gib` are left out, and listed.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile
from transformers.generation.utils import _speculative_sampling

from transformers_cactus import Cactus, verify

from .common import Spread, machine, machine_line, table, wait_for, write_json

# The profiler writes a line when it starts and one when it stops, where nobody asks it not to.
os.environ.setdefault("KINETO_LOG_LEVEL", "99")

VOCABULARIES = {"32k": 32_000, "49k": 49_152, "128k": 128_256, "152k": 151_936, "256k": 256_000}
"""Of Llama 2, SmolLM2, Llama 3, Qwen2.5 and Gemma 2."""
BLOCKS = (4, 8, 20)
BATCHES = (1, 8, 32)
SCALE, NOISE = 4.0, 3.0
"""Standard deviations of the verifier's logits, and of the draft's errors."""
LEAST_TURNS = 5
QUICK_GIB = 0.03
DECIDED_AT = ("152k", 20, 1)
"""Vocabulary, block and batch for which ours is to take at most `SHARE` of transformers' time."""
SHARE = 0.5

DRAWS = 8
"""Drafted blocks on the same scores, which turns go through."""

OURS, MEASURED, THEIRS, READ = "ours", "ours, with statistics", "transformers", "read"

Call = Callable[[int], Any]
"""Takes the number of its turn."""


@dataclass
class Timed:
    """One combination."""

    vocabulary: str
    block: int
    batch: int
    accepted_length: float
    """Of ours, over some calls: how many tokens were accepted of those that were drafted."""
    milliseconds: dict[str, Spread]
    """By call."""
    over_transformers: Spread | None
    """Time of ours over transformers'."""
    over_read: Spread
    """Time of ours over that of the read."""
    extra_mib: dict[str, float]
    """Most memory at a time besides the scores, by call."""


def calls_for(vocabulary: int, block: int, batch: int, device: torch.device) -> dict[str, Call]:
    """The calls to compare, on the same scores."""
    generator = torch.Generator(device).manual_seed(0)
    verifier = torch.randn(batch, block + 1, vocabulary, generator=generator, device=device).mul_(SCALE)
    draft = torch.randn(batch, block, vocabulary, generator=generator, device=device).mul_(NOISE)
    draft += verifier[:, :block]
    # Row by row: the softmax of all rows would double the memory that is needed.
    drawn = torch.stack([_drawn(row, generator) for row in draft])
    rule = Cactus(0.75)
    calls: dict[str, Call] = {
        OURS: lambda turn: verify(drawn[..., turn % DRAWS], verifier, draft, rule, measure=False),
        MEASURED: lambda turn: verify(drawn[..., turn % DRAWS], verifier, draft, rule),
        READ: lambda turn: verifier[:, :block].sum() + draft.sum(),
    }
    if batch == 1:
        calls[THEIRS] = lambda turn: _speculative_sampling(drawn[..., turn % DRAWS], draft, block, verifier)
    return calls


def _drawn(scores: Tensor, generator: torch.Generator) -> Tensor:
    """`DRAWS` tokens for each position of scores `[block, vocab]`, `[block, DRAWS]`."""
    return torch.multinomial(scores.softmax(-1), DRAWS, replacement=True, generator=generator)


def in_turns(calls: dict[str, Call], device: torch.device, budget: float) -> dict[str, list[float]]:
    """Seconds of each call, turn by turn, until `budget` seconds are over."""
    seconds: dict[str, list[float]] = {name: [] for name in calls}
    for call in calls.values():
        call(0)
    names, end = list(calls), time.perf_counter() + budget
    while len(seconds[OURS]) < LEAST_TURNS or time.perf_counter() < end:
        turn = len(seconds[OURS])
        first = turn % len(names)
        for name in names[first:] + names[:first]:
            wait_for(device)
            started = time.perf_counter()
            calls[name](turn)
            wait_for(device)
            seconds[name].append(time.perf_counter() - started)
    return seconds


def extra_memory(call: Call, device: torch.device) -> float:
    """MiB that PyTorch holds at the most during a call, above what it held before.

    On the CPU it keeps no peak: there the profiler writes down every allocation.
    """
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        call(0)
        return (torch.cuda.max_memory_allocated(device) - before) / 2**20
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        call(0)
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "trace.json"
        profiled.export_chrome_trace(str(file))
        events = json.loads(file.read_text(encoding="utf-8"))["traceEvents"]
    allocations = sorted((event["ts"], event["args"]["Bytes"]) for event in events if event["name"] == "[memory]")
    held = peak = 0
    for _, size in allocations:
        held += size
        peak = max(peak, held)
    return peak / 2**20


def time_one(name: str, block: int, batch: int, device: torch.device, budget: float) -> Timed:
    """Times one combination."""
    calls = calls_for(VOCABULARIES[name], block, batch, device)
    seconds = in_turns(calls, device, budget)

    def over(other: str) -> Spread:
        return Spread.of([own / its for own, its in zip(seconds[OURS], seconds[other], strict=True)])

    return Timed(
        vocabulary=name,
        block=block,
        batch=batch,
        accepted_length=statistics.fmean(calls[OURS](turn).accepted.float().mean().item() for turn in range(DRAWS)),
        milliseconds={call: Spread.of([1e3 * value for value in values]) for call, values in seconds.items()},
        over_transformers=over(THEIRS) if THEIRS in seconds else None,
        over_read=over(READ),
        extra_mib={call: extra_memory(calls[call], device) for call in calls if call != READ},
    )


def gib_of_scores(vocabulary: int, block: int, batch: int) -> float:
    """What the scores of both models take in float32."""
    return 4 * batch * (2 * block + 1) * vocabulary / 2**30


def measure(arguments: argparse.Namespace) -> dict[str, Any]:
    """All combinations, as one document."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    found, skipped = [], []
    for name in arguments.vocabularies:
        for block in BLOCKS:
            for batch in BATCHES:
                gib = gib_of_scores(VOCABULARIES[name], block, batch)
                if gib > arguments.gib:
                    skipped.append({"vocabulary": name, "block": block, "batch": batch, "gib": gib})
                    continue
                found.append(asdict(time_one(name, block, batch, device, arguments.seconds)))
    return {
        "machine": machine(device),
        "quick": arguments.quick,
        "gib": arguments.gib,
        "timed": found,
        "skipped": skipped,
    }


def tables_of(document: dict[str, Any]) -> str:
    """The table, what was left out, and what was to be decided."""
    header = ["vocabulary", "block", "batch", "AL", "ours, ms", "with statistics", "transformers", "read"]
    header += ["ours / transformers", "ours / read", "extra MiB, ours", "transformers"]
    rows = []
    for each in document["timed"]:
        times = [each["milliseconds"].get(name) for name in (OURS, MEASURED, THEIRS, READ)]
        ratio, memory = each["over_transformers"], each["extra_mib"]
        rows.append(
            [each["vocabulary"], str(each["block"]), str(each["batch"]), f"{each['accepted_length']:.1f}"]
            + ["–" if spread is None else f"{spread[0]:.2f}" for spread in times]
            + ["–" if ratio is None else Spread(*ratio).show(2), Spread(*each["over_read"]).show(1)]
            + [f"{memory[OURS]:.1f}", f"{memory[THEIRS]:.1f}" if THEIRS in memory else "–"]
        )
    parts = [table(header, rows)]
    if document["skipped"]:
        names = [f"{each['vocabulary']}, block {each['block']}, batch {each['batch']}" for each in document["skipped"]]
        parts.append(f"Left out, because the scores need more than {document['gib']:g} GiB: {'; '.join(names)}.")
    return "\n\n".join([*parts, *_decision(document)])


def _decision(document: dict[str, Any]) -> list[str]:
    for each in document["timed"]:
        if (each["vocabulary"], each["block"], each["batch"]) == DECIDED_AT and each["over_transformers"]:
            ratio = Spread(*each["over_transformers"])
            kept = "as it is to be" if ratio.median <= SHARE else "more than it is to be"
            return [
                f"At a vocabulary of {DECIDED_AT[0]}, block {DECIDED_AT[1]}, batch {DECIDED_AT[2]}, ours takes "
                f"{ratio.show(2)} of transformers' time: {kept}, at most {SHARE:g}."
            ]
    return []


def main(words: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--vocabularies", nargs="+", choices=list(VOCABULARIES), default=list(VOCABULARIES))
    parser.add_argument("--seconds", type=float, default=1.0, help=f"for each combination, but {LEAST_TURNS} turns")
    parser.add_argument("--gib", type=float, default=1.0, help="of scores at the most")
    parser.add_argument("--quick", action="store_true", help=f"no longer than need be, up to {QUICK_GIB} GiB")
    parser.add_argument("--json", type=Path, help="write the numbers to this file")
    arguments = parser.parse_args(words)
    if arguments.quick:
        arguments.seconds, arguments.gib = 0.0, min(arguments.gib, QUICK_GIB)
    document = measure(arguments)
    print(machine_line(document["machine"]), "\n\n", tables_of(document), sep="")
    write_json(arguments.json, document)


if __name__ == "__main__":
    main()
