"""One pair of models, many ways to generate: speed, and what each accepts and spends.

    python -m benchmarks.compare                 # the real pair, one sequence, 24 prompts: more than half an hour
    python -m benchmarks.compare --quick         # one short repetition
    python -m benchmarks.compare --temperature 1 # without truncation
    python -m benchmarks.compare --batch 8 --systems 'ours*constant'

All systems run the same two model objects with the same sampling settings on the same prompts
(benchmarks/prompts.json) in one process. Each repetition runs every system once on one prompt, or on `--batch` of
them, in an order that rotates; a ratio is one within a repetition. Numbers are medians over repetitions, with
quartiles.

A speed-up over the verifier's bare forwards is `(AL + 1) / (v + m·c + o)`: `AL` drafted tokens are accepted in a round
of `m`; `v` is the verifier's forward in a round, `c` a forward of the draft, `o` everything that is not inside a
forward, per round, all in units of the verifier's forward over one token, `V(1)`, which the repetition's run of the
verifier alone gives. `m·c` is what the round's drafts took, whatever their number. Each call's first forward of either
model reads the prompt and is left out of `v` and `c`.

Acceptance by position, divergence and certificate are from further calls, which are not timed, on the same prompts.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from transformers_cactus import AcceptanceStatistics, Sampling
from transformers_cactus.demo import Pair
from transformers_cactus.evaluation.costs import measure_costs
from transformers_cactus.evaluation.sampling import PAPER

from .common import (
    ForwardTimer,
    PeakMemory,
    add_model_options,
    batches_of_prompts,
    load,
    machine,
    machine_line,
    wait_for,
    write_json,
)
from .compare_tables import tables_of
from .peers import Written
from .systems import CONSTANT, CONSTANT_BLOCK, ENSEMBLE, Inputs, System, assisted, chosen, draft_with, systems_for

BLOCKS = (1, 2, 3, 4, 6, 8)
"""Constant blocks that transformers' assisted generation is tried with."""
SEARCHES = 8
"""Prompts on which it is."""

WARM_UP_TOKENS = 4
ROWS_AT_ONCE = 8
"""Sequences in one call for statistics."""


@dataclass
class Run:
    """One timed call of one system."""

    system: str
    repetition: int
    tokens: int
    """Of all sequences together."""
    wall: float
    """Seconds."""
    forwards: float
    """Seconds inside the forwards of both models, as far as they go through the models' own `forward`."""
    rounds: int
    """Forwards of the verifier; 0 for a system that runs its layers by itself."""
    verifier_step: float | None
    """Mean seconds of its forwards behind the first."""
    draft_step: float | None
    """The same of the draft."""
    draft_per_round: float
    """Forwards of the draft, by `rounds`."""
    accepted_length: float | None
    """`tokens / rounds - 1` for one sequence, or what a peer says; `None` for a batch."""
    peak_memory: float | None
    """MiB above what there was before."""


def measure(
    pair: Pair, systems: Sequence[System], prompts: Sequence[Inputs], new_tokens: int, repetitions: int
) -> list[Run]:
    """Runs all systems in turns, after a short warm-up of each.

    Args:
        pair ([`Pair`]): The models.
        systems (`Sequence[System]`): What to run.
        prompts (`Sequence[Inputs]`): Each repetition takes the next.
        new_tokens (`int`): Length of every text.
        repetitions (`int`): How often to run every system.
    """
    memory = PeakMemory(pair.verifier.device)
    for system in systems:
        # Texts of some prompts meet the sizes for which something is compiled.
        warm_up = (
            [(inputs, new_tokens) for inputs in prompts[-4:]] if system.compiled else [(prompts[0], WARM_UP_TOKENS)]
        )
        for inputs, tokens in warm_up:
            system.generate(inputs, tokens)
    runs = []
    for repetition in range(repetitions):
        inputs, first = prompts[repetition % len(prompts)], repetition % len(systems)
        for system in [*systems[first:], *systems[:first]]:
            torch.manual_seed(repetition)
            memory.start()
            watched = {} if system.compiled else {"verifier": pair.verifier, "draft": pair.draft}
            with ForwardTimer(**watched) as timer:
                started = time.perf_counter()
                output = system.generate(inputs, new_tokens)
                wait_for(pair.verifier.device)
                wall = time.perf_counter() - started
            runs.append(_run(system, repetition, inputs, new_tokens, wall, timer, memory.stop(), output))
    return runs


def _run(
    system: System,
    repetition: int,
    inputs: Inputs,
    new_tokens: int,
    wall: float,
    timer: ForwardTimer,
    peak_memory: float | None,
    output: Any,
) -> Run:
    batch = inputs["input_ids"].shape[0]
    verifier, draft = timer.seconds("verifier"), timer.seconds("draft")
    rounds = len(verifier)
    accepted = new_tokens / rounds - 1 if rounds and batch == 1 else None
    written = batch * new_tokens
    if isinstance(output, Written):
        written, accepted = output.tokens, output.accepted_length
    return Run(
        system=system.name,
        repetition=repetition,
        tokens=written,
        wall=wall,
        forwards=sum(verifier) + sum(draft),
        rounds=rounds,
        verifier_step=statistics.fmean(verifier[1:]) if rounds > 1 else None,
        draft_step=statistics.fmean(draft[1:]) if len(draft) > 1 else None,
        draft_per_round=len(draft) / rounds if rounds else 0.0,
        accepted_length=accepted,
        peak_memory=peak_memory,
    )


def accepted_and_spent(system: System, prompts: Sequence[Inputs], new_tokens: int, seed: int) -> dict[str, Any]:
    """What a system of ours accepts and spends on some prompts.

    Returns:
        `dict`: `accepted_length`; `positions`, for each position of a block the share of rounds that came to it which
        accepted its token; `divergence`, `KL(h‖q)`, and `certificate`, `KL(h_alg‖q)`, in nats per token; `tokens`.
    """
    assert system.statistics is not None
    torch.manual_seed(seed)
    found = [system.statistics(inputs, new_tokens) for inputs in prompts]
    all_sequences = AcceptanceStatistics([sequence for each in found for sequence in each.sequences])
    rounds = list(zip(all_sequences.drafted_per_round, all_sequences.accepted_per_round, strict=True))
    positions = []
    for position in range(max(drafted for drafted, _ in rounds)):
        reached = [accepted > position for drafted, accepted in rounds if min(drafted - 1, accepted) >= position]
        if reached:
            positions.append(statistics.fmean(reached))
    return {
        "accepted_length": all_sequences.mean_accepted_length,
        "positions": positions,
        "divergence": all_sequences.total_divergence / all_sequences.emitted,
        "certificate": all_sequences.total_certificate / all_sequences.emitted,
        "tokens": all_sequences.emitted,
    }


def search_block(
    pair: Pair, sampling: Sampling, prompts: Sequence[Inputs], new_tokens: int, repetitions: int
) -> dict[str, float]:
    """Median tokens per second of transformers' assisted generation by its constant block."""
    systems = [
        assisted(pair, draft_with(pair.draft, num_assistant_tokens=block, **CONSTANT), sampling, str(block))
        for block in BLOCKS
    ]
    runs = measure(pair, systems, prompts, new_tokens, repetitions)
    return {
        system.name: statistics.median(run.tokens / run.wall for run in runs if run.system == system.name)
        for system in systems
    }


def compare(arguments: argparse.Namespace) -> dict[str, Any]:
    """All that the options ask for, as one document."""
    sampling = PAPER if arguments.temperature is None else Sampling(arguments.temperature, top_k=0, top_p=1.0)
    pair, arithmetic = load(arguments)
    prompts = batches_of_prompts(pair, arguments.batch)
    tokens, repetitions = arguments.new_tokens, arguments.repetitions
    block = constant_block = arguments.block
    systems = chosen(systems_for(pair, sampling, block, constant_block, arguments.batch), arguments.systems)
    block_search: dict[str, float] = {}
    if {CONSTANT_BLOCK, ENSEMBLE} & {system.name for system in systems}:
        # On the prompts that the comparison comes to last, if at all.
        search = (prompts[::-1], max(WARM_UP_TOKENS, tokens // 2), min(repetitions, SEARCHES))
        block_search = search_block(pair, sampling, *search)
        constant_block = int(max(block_search, key=lambda name: block_search[name]))
        systems = chosen(systems_for(pair, sampling, block, constant_block, arguments.batch), arguments.systems)
    costs = measure_costs(pair.verifier, pair.draft, block)
    runs = measure(pair, systems, prompts, tokens, repetitions)
    rows = min(ROWS_AT_ONCE, max(repetitions, arguments.batch))
    batches = batches_of_prompts(pair, rows)[: max(repetitions, arguments.batch) : rows]
    return {
        "machine": machine(
            pair.verifier.device, arithmetic=str(arithmetic), attention=pair.verifier.config._attn_implementation
        ),
        "quick": arguments.quick,
        "pair": [str(Path(model.name_or_path).name) or type(model).__name__ for model in (pair.verifier, pair.draft)],
        "sampling": str(sampling),
        "batch": arguments.batch,
        "block": block,
        "constant_block": constant_block,
        "new_tokens": tokens,
        "repetitions": repetitions,
        "costs": costs._asdict(),
        "block_search": block_search,
        "runs": [asdict(run) for run in runs],
        "statistics": {
            system.name: accepted_and_spent(system, batches, tokens, seed=0)
            for system in systems
            if system.statistics is not None
        },
    }


def main(words: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_model_options(parser)
    parser.add_argument("--temperature", type=float, help="without truncation; default: 0.6, top-k 20, top-p 0.95")
    parser.add_argument("--batch", type=int, default=1, help="sequences of a call")
    parser.add_argument("--block", type=int, default=4, help="tokens drafted per round, of ours and of other packages")
    parser.add_argument("--new-tokens", type=int, default=64, help="of every sequence")
    parser.add_argument("--repetitions", type=int, default=24, help="each with the next prompt")
    parser.add_argument("--systems", nargs="+", help="names, or patterns such as 'ours*constant'; default: all")
    parser.add_argument("--quick", action="store_true", help="one repetition of 8 tokens")
    parser.add_argument("--json", type=Path, help="write every run to this file")
    arguments = parser.parse_args(words)
    if arguments.quick:
        arguments.repetitions, arguments.new_tokens = 1, 8
    try:
        document = compare(arguments)
    except (OSError, ValueError) as error:
        parser.error(str(error))
    print(machine_line(document["machine"]), "\n\n", tables_of(document), sep="")
    write_json(arguments.json, document)


if __name__ == "__main__":
    main()
