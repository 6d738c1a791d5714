"""Time outside the models, and tokens per second of the fast engine against transformers' own loops.

    python benchmarks/overhead.py                  # the real pair: batch 1, 8 and 16
    python benchmarks/overhead.py --quick          # one repetition, short answers

All systems run the same models with the same sampling settings (temperature 0.6, top-k 20, top-p 0.95) on the same
prompts in one process. Repetitions are interleaved: each runs every system once, on prompts of its own, and a ratio is
the median over the repetitions of a ratio within one repetition. "wall / forwards" is a call's wall time over the time
inside the forwards of the two models, measured by hooks. "AL" is the mean accepted length: accepted drafted tokens per
round, without the extra token. `V(1)`, `v` and `c` are the costs of a forward: see `measure_costs`.
"""

from __future__ import annotations

import argparse
import copy
import json
import platform
import statistics
import threading
import time
import warnings
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import psutil
import torch
import transformers
from transformers import PreTrainedModel

import transformers_cactus
from transformers_cactus.cli.prompts import PROMPTS
from transformers_cactus.demo import Arithmetic, Pair, load_pair, pick_arithmetic
from transformers_cactus.evaluation.costs import measure_costs

SAMPLING = {"do_sample": True, "temperature": 0.6, "top_k": 20, "top_p": 0.95}


class ForwardTimer:
    """Seconds spent inside the forwards of some models."""

    def __init__(self, *models: PreTrainedModel):
        self.seconds, self._started = 0.0, 0.0
        for model in models:
            model.register_forward_pre_hook(self._start, with_kwargs=True)
            model.register_forward_hook(self._stop)

    def _start(self, *_: Any) -> None:
        self._started = time.perf_counter()

    def _stop(self, *_: Any) -> None:
        self.seconds += time.perf_counter() - self._started


@dataclass
class Run:
    """One call of one system."""

    system: str
    repetition: int
    tokens: int
    wall: float
    forwards: float
    accepted_length: float | None


def inputs_for(pair: Pair, batch: int, first: int = 0) -> dict[str, torch.Tensor]:
    """Some prompts through the chat template, left-padded, beginning with the one numbered `first`."""
    prompts = list(PROMPTS.values())
    texts = [prompts[(first + row) % len(prompts)] for row in range(batch)]
    chats = [[{"role": "user", "content": text}] for text in texts]
    pair.tokenizer.padding_side = "left"
    return dict(
        pair.tokenizer.apply_chat_template(
            chats, add_generation_prompt=True, padding=True, return_dict=True, return_tensors="pt"
        )
    )


def systems_for(pair: Pair, batch: int, block: int, new_tokens: int, first: int = 0) -> dict[str, Callable[[], Any]]:
    """The calls to compare, by name. All write exactly `new_tokens` tokens per sequence: see `without_end`."""
    length = {"max_new_tokens": new_tokens}
    inputs = inputs_for(pair, batch, first)
    common: dict[str, Any] = {**inputs, **SAMPLING, **length}
    # transformers reads the block length from the draft's config; ours takes it from the call.
    constant = copy.copy(pair.draft)
    constant.generation_config = copy.deepcopy(pair.draft.generation_config)
    constant.generation_config.num_assistant_tokens = block
    constant.generation_config.num_assistant_tokens_schedule = "constant"
    constant.generation_config.assistant_confidence_threshold = 0.0

    def ours(delta: float) -> Callable[[], Any]:
        options: dict[str, Any] = {"cactus_delta": delta, "cactus_engine": "fast", "num_assistant_tokens": block}
        options["return_dict_in_generate"] = True
        return lambda: transformers_cactus.generate(pair.verifier, assistant_model=pair.draft, **common, **options)

    systems = {"verifier alone": lambda: pair.verifier.generate(**common)}
    if batch == 1:
        systems["transformers, assisted"] = lambda: pair.verifier.generate(assistant_model=constant, **common)
    systems["ours, delta 0"] = ours(0.0)
    systems["ours, delta 0.75"] = ours(0.75)
    if batch > 1:
        single = [{name: value[row : row + 1] for name, value in inputs.items()} for row in range(batch)]
        for row in single:
            seen = row["attention_mask"][0].bool()
            row.update({name: value[:, seen] for name, value in row.items()})

        def one_by_one() -> torch.Tensor:
            options = {"cactus_delta": 0.0, "cactus_engine": "fast", "num_assistant_tokens": block}
            rows = [
                transformers_cactus.generate(
                    pair.verifier, assistant_model=pair.draft, **row, **SAMPLING, **length, **options
                )[:, -new_tokens:]
                for row in single
            ]
            return torch.cat([inputs["input_ids"], torch.cat(rows)], dim=1)

        systems["ours, delta 0, one after another"] = one_by_one
    return systems


def without_end(pair: Pair) -> Pair:
    """The pair without an end-of-sequence token: all texts have one length, and no processor has to see to it."""
    for model in (pair.verifier, pair.draft):
        model.generation_config.eos_token_id = None
        model.config.eos_token_id = None
    return pair


def measure(pair: Pair, batch: int, block: int, new_tokens: int, repetitions: int) -> list[Run]:
    """Runs all systems, interleaved, after one short warm-up of each."""
    timer = ForwardTimer(pair.verifier, pair.draft)
    for call in systems_for(pair, batch, block, 4).values():
        call()
    runs = []
    for repetition in range(repetitions):
        for name, call in systems_for(pair, batch, block, new_tokens, first=repetition).items():
            torch.manual_seed(repetition)
            timer.seconds, started = 0.0, time.perf_counter()
            output = call()
            wall = time.perf_counter() - started
            acceptance = getattr(output, "acceptance", None)
            length = None if acceptance is None else acceptance.mean_accepted_length
            runs.append(Run(name, repetition, batch * new_tokens, wall, timer.seconds, length))
    return runs


def peak_memory(call: Callable[[], Any]) -> float:
    """MiB of the process at the most during a call, above what it had before. Looked at every 10 ms."""
    process, done = psutil.Process(), threading.Event()
    before = peak = process.memory_info().rss

    def watch() -> None:
        nonlocal peak
        while not done.wait(0.01):
            peak = max(peak, process.memory_info().rss)

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        call()
    finally:
        done.set()
        watcher.join()
    return (peak - before) / 2**20


def print_memory(pair: Pair, block: int) -> None:
    """Peak memory of plain `generate` and of ours, at batch 8, with prompts of 512 and 256 new tokens."""
    ids = torch.randint(100, 20000, (8, 512))
    common: dict[str, Any] = {**SAMPLING, "max_new_tokens": 256, "input_ids": ids}
    common["attention_mask"] = torch.ones_like(ids)
    options: dict[str, Any] = {"cactus_delta": 0.0, "cactus_engine": "fast", "num_assistant_tokens": block}
    ours = peak_memory(
        lambda: transformers_cactus.generate(pair.verifier, assistant_model=pair.draft, **common, **options)
    )
    plain = peak_memory(lambda: pair.verifier.generate(**common))
    print(f"peak memory above the models, MiB: plain generate {plain:.0f}, ours {ours:.0f} ({ours / plain:.2f})")


def ratio(runs: list[Run], system: str, other: str) -> float:
    """Median over repetitions of one system's tokens per second over another's."""
    speeds = {(run.system, run.repetition): run.tokens / run.wall for run in runs}
    repetitions = {run.repetition for run in runs}
    return statistics.median(speeds[system, r] / speeds[other, r] for r in repetitions)


def table(runs: list[Run], batch: int) -> list[str]:
    """The results of one batch size as lines of a Markdown table."""
    lines = [
        f"\nBatch {batch}\n",
        "| system | tokens/s | over the verifier alone | wall / forwards | AL |",
        "|---|---:|---:|---:|---:|",
    ]
    for system in dict.fromkeys(run.system for run in runs):
        own = [run for run in runs if run.system == system]
        speed = statistics.median(run.tokens / run.wall for run in own)
        outside = statistics.median(run.wall / run.forwards for run in own)
        lengths = [run.accepted_length for run in own if run.accepted_length is not None]
        accepted = f"{statistics.fmean(lengths):.2f}" if lengths else ""
        versus = ratio(runs, system, "verifier alone")
        lines.append(f"| {system} | {speed:.1f} | {versus:.2f} | {outside:.3f} | {accepted} |")
    if batch == 1:
        versus = ratio(runs, "ours, delta 0", "transformers, assisted")
        lines.append(f"\nours at delta 0 over transformers' assisted generation: {versus:.2f}")
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--verifier", help="name or folder; by default the real pair of the demo")
    parser.add_argument("--draft", help="name or folder")
    parser.add_argument("--dtype", choices=["float32", "bfloat16", "float16"], help="by default what is fastest here")
    parser.add_argument("--packed", action="store_true", help="float32 with packed weights")
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8, 16])
    parser.add_argument("--block", type=int, default=4, help="tokens drafted per round")
    parser.add_argument("--new-tokens", type=int, default=96)
    parser.add_argument("--repetitions", type=int, default=6, help="each with other prompts")
    parser.add_argument("--memory", action="store_true", help="peak memory at batch 8, prompt 512, 256 new tokens")
    parser.add_argument("--quick", action="store_true", help="one repetition of 32 tokens")
    parser.add_argument("--json", type=Path, help="write every run to this file")
    arguments = parser.parse_args()
    if arguments.quick:
        arguments.repetitions, arguments.new_tokens = 1, 32
    warnings.filterwarnings("ignore", message=".*no effect without sampling.*")
    transformers.logging.set_verbosity_error()
    if arguments.dtype or arguments.packed:
        arithmetic = Arithmetic(getattr(torch, arguments.dtype or "float32"), arguments.packed)
    else:
        arithmetic = pick_arithmetic("cuda" if torch.cuda.is_available() else "cpu")
    pair = without_end(load_pair(arguments.verifier, arguments.draft, **arithmetic._asdict()))
    machine = {
        "processor": platform.processor() or platform.machine(),
        "cores": psutil.cpu_count(logical=False),
        "threads": torch.get_num_threads(),
        "arithmetic": str(arithmetic),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "python": platform.python_version(),
    }
    print(", ".join(f"{name} {value}" for name, value in machine.items()), f"block {arguments.block}", flush=True)
    if arguments.memory:
        print_memory(pair, arguments.block)
        return
    cost = measure_costs(pair.verifier, pair.draft, arguments.block)
    print(f"V(1) {cost.verifier_step * 1e3:.0f} ms, v {cost.verifier_block:.2f}, c {cost.draft_step:.2f}", flush=True)
    everything = {}
    for batch in arguments.batches:
        runs = measure(pair, batch, arguments.block, arguments.new_tokens, arguments.repetitions)
        print("\n".join(table(runs, batch)), flush=True)
        everything[batch] = [asdict(run) for run in runs]
    if arguments.json:
        arguments.json.write_text(
            json.dumps({"machine": machine, "costs": cost._asdict(), "runs": everything}, indent=1) + "\n"
        )


if __name__ == "__main__":
    main()
