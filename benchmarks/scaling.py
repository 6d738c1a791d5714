"""How the time of our loop grows with batch, prompt, new tokens and vocabulary, in all and outside the forwards.

    python -m benchmarks.scaling
    python -m benchmarks.scaling --quick

One quantity grows at a time, on tiny random models, whose own forwards take little; the draft is the verifier's first
layer, so that most tokens are accepted at any vocabulary. `t ~ size^exponent` is fitted by
least squares of logarithms, over all sizes and over the `LAST` largest, where a cost that does not grow hides less of
what does. What our loop does outside the forwards should grow at most linearly in each of the four; a larger exponent
over the largest sizes is flagged. Inside the forwards it need not: attention is quadratic in a prompt's length.

Repetitions take turns over the sizes; numbers are medians.
"""

from __future__ import annotations

import argparse
import math
import statistics
import time
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
import transformers
from transformers import LlamaConfig, LlamaForCausalLM

import transformers_cactus
from transformers_cactus.evaluation.sampling import PAPER

from .common import ForwardTimer, machine, machine_line, table, wait_for, write_json

LAST = 3
"""Of the largest sizes, for the exponent that is judged."""
LINEAR = 1.2
"""An exponent up to here counts as linear: three medians on a shared machine are not exact."""
BLOCK = 4
DELTA = 0.75
SMALL_VOCABULARY = 1024


class Case(NamedTuple):
    """A call's size."""

    batch: int = 1
    prompt: int = 32
    new_tokens: int = 32
    vocabulary: int = SMALL_VOCABULARY


class Growth(NamedTuple):
    """A quantity that grows."""

    field: str
    """Of [`Case`]."""
    sizes: tuple[int, ...]
    other: dict[str, int]
    """What differs from a case's defaults."""

    def case(self, size: int) -> Case:
        """The case of one size."""
        return Case(**{**self.other, self.field: size})


GROWTHS = {
    "batch": Growth("batch", (1, 2, 4, 8, 16), {}),
    "prompt length": Growth("prompt", (256, 512, 1024, 2048, 4096, 8192), {"new_tokens": 16}),
    "new tokens": Growth("new_tokens", (64, 128, 256, 512, 1024, 2048), {}),
    "vocabulary": Growth("vocabulary", (8_192, 16_384, 32_768, 65_536, 131_072, 262_144), {}),
}
"""By name in tables."""


class Times(NamedTuple):
    """Seconds of one call."""

    total: float
    outside: float
    """Outside the models' forwards."""


def tiny_model(vocabulary: int, layers: int) -> LlamaForCausalLM:
    """A random model, on the GPU if there is one."""
    config = LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=layers,
        num_attention_heads=2,
        max_position_embeddings=2**14,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=0,
    )
    torch.manual_seed(0)
    return LlamaForCausalLM(config).eval().to("cuda" if torch.cuda.is_available() else "cpu")


class Measured:
    """Calls of one pair."""

    def __init__(self, vocabulary: int):
        self.verifier, self.draft = tiny_model(vocabulary, layers=2), tiny_model(vocabulary, layers=1)
        self.draft.load_state_dict(self.verifier.state_dict(), strict=False)

    def call(self, case: Case, seed: int) -> Times:
        """One call, on random prompts of one length."""
        device = self.verifier.device
        ids = torch.randint(case.vocabulary, (case.batch, case.prompt), generator=torch.Generator().manual_seed(seed))
        ids = ids.to(device)
        torch.manual_seed(seed)
        call = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "max_new_tokens": case.new_tokens}
        options = {"cactus_delta": DELTA, "cactus_engine": "fast", "num_assistant_tokens": BLOCK, **PAPER.options}
        with ForwardTimer(verifier=self.verifier, draft=self.draft) as timer:
            started = time.perf_counter()
            transformers_cactus.generate(self.verifier, **call, **options, assistant_model=self.draft)
            wait_for(device)
            total = time.perf_counter() - started
        inside = sum(timer.seconds("verifier")) + sum(timer.seconds("draft"))
        return Times(total, total - inside)


def exponent(sizes: Sequence[int], seconds: Sequence[float]) -> float:
    """The `a` of `seconds ~ size^a`, by least squares of logarithms."""
    x, y = [math.log(size) for size in sizes], [math.log(value) for value in seconds]
    return statistics.linear_regression(x, y).slope


def measure_growth(growth: Growth, sizes: Sequence[int], repetitions: int) -> dict[str, Any]:
    """Times one quantity, and fits its exponents."""
    pairs: dict[int, Measured] = {}
    for size in sizes:
        case = growth.case(size)
        if case.vocabulary not in pairs:
            pairs[case.vocabulary] = Measured(case.vocabulary)
        pairs[case.vocabulary].call(case._replace(new_tokens=BLOCK), seed=0)
    calls: dict[int, list[Times]] = {size: [] for size in sizes}
    for repetition in range(repetitions):
        for size in sizes:
            case = growth.case(size)
            calls[size].append(pairs[case.vocabulary].call(case, repetition))
    medians = [Times(*(statistics.median(values) for values in zip(*calls[size], strict=True))) for size in sizes]
    found: dict[str, Any] = {"sizes": list(sizes), "fixed": Case()._replace(**growth.other)._asdict()}
    del found["fixed"][growth.field]
    for name in Times._fields:
        seconds = [getattr(times, name) for times in medians]
        last = exponent(sizes[-LAST:], seconds[-LAST:])
        found[name] = {"seconds": seconds, "exponent": exponent(sizes, seconds), "exponent_of_largest": last}
    found["above_linear"] = found["outside"]["exponent_of_largest"] > LINEAR
    return found


def measure(arguments: argparse.Namespace) -> dict[str, Any]:
    """All quantities, as one document."""
    transformers.logging.set_verbosity_error()
    warnings.filterwarnings("ignore", category=FutureWarning)
    shown = LAST if arguments.quick else None
    growths = {
        name: measure_growth(growth, growth.sizes[:shown], arguments.repetitions) for name, growth in GROWTHS.items()
    }
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    return {"machine": machine(device), "quick": arguments.quick, "growths": growths}


def tables_of(document: dict[str, Any]) -> str:
    """Two tables: seconds by size, and exponents with what is flagged."""
    header = ["growing", "sizes", "milliseconds outside the forwards", "milliseconds in all"]
    rows = [
        [
            name,
            ", ".join(map(str, found["sizes"])),
            *(", ".join(f"{1e3 * value:.0f}" for value in found[part]["seconds"]) for part in ("outside", "total")),
        ]
        for name, found in document["growths"].items()
    ]
    fitted = ["growing", "outside", f"outside, largest {LAST}", "in all", f"in all, largest {LAST}", "outside is"]
    exponents = [
        [
            name,
            *(
                f"{found[part][which]:.2f}"
                for part in ("outside", "total")
                for which in ("exponent", "exponent_of_largest")
            ),
            "**above linear**" if found["above_linear"] else "at most linear",
        ]
        for name, found in document["growths"].items()
    ]
    return f"{table(header, rows)}\n\nExponents:\n\n{table(fitted, exponents)}"


def main(words: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repetitions", type=int, default=3)
    parser.add_argument("--quick", action="store_true", help=f"one repetition of the {LAST} smallest sizes")
    parser.add_argument("--json", type=Path, help="write the numbers to this file")
    arguments = parser.parse_args(words)
    if arguments.quick:
        arguments.repetitions = 1
    document = measure(arguments)
    print(machine_line(document["machine"]), "\n\n", tables_of(document), sep="")
    write_json(arguments.json, document)


if __name__ == "__main__":
    main()
