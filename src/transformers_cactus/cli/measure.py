"""The same prompts through the verifier alone, lossless speculative sampling, and Cactus: how fast, at what price."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from transformers import BatchEncoding, set_seed

from ..demo import Pair
from ..integration import generate
from ..outputs import AcceptanceStatistics, SequenceStatistics


@dataclass(frozen=True)
class System:
    """A way to generate."""

    delta: float | None
    """Budget of Cactus; 0 is lossless, and `None` the verifier alone."""

    @property
    def name(self) -> str:
        """Its name in tables."""
        if self.delta is None:
            return "verifier alone"
        return f"Cactus, delta {self.delta:g}" if self.delta else "lossless (delta 0)"


VERIFIER_ALONE, LOSSLESS = System(None), System(0.0)


@dataclass(frozen=True)
class Settings:
    """What all systems have in common."""

    max_new_tokens: int
    num_assistant_tokens: int
    temperature: float
    top_k: int
    top_p: float
    seed: int
    engine: str


@dataclass
class Measured:
    """What one system did."""

    system: System
    tokens: list[int] = field(default_factory=list)
    """Generated tokens in each pass over the prompts."""
    seconds: list[float] = field(default_factory=list)
    """Wall time of each pass, prompts included."""
    rounds: list[SequenceStatistics] = field(default_factory=list)
    """Acceptance in each call; none for the verifier alone."""

    @property
    def speeds(self) -> list[float]:
        """Tokens per second in each pass."""
        return [tokens / seconds for tokens, seconds in zip(self.tokens, self.seconds, strict=True)]

    @property
    def tokens_per_second(self) -> float:
        """The median over the passes."""
        return statistics.median(self.speeds)

    @property
    def acceptance(self) -> AcceptanceStatistics:
        """Statistics over all passes."""
        return AcceptanceStatistics(self.rounds)

    def ratio(self, other: Measured) -> float:
        """Speed over another system's: the median over the passes, each compared within itself."""
        return statistics.median(mine / theirs for mine, theirs in zip(self.speeds, other.speeds, strict=True))


def run(
    pair: Pair, inputs: BatchEncoding, system: System, settings: Settings, seed: int, **options: Any
) -> tuple[list[int], float, AcceptanceStatistics | None]:
    """One call.

    Args:
        pair ([`Pair`]): The models.
        inputs (`BatchEncoding`): One prompt.
        system ([`System`]): How to generate.
        settings ([`Settings`]): Lengths and sampling.
        seed (`int`): Of this call.
        **options: Further arguments for `generate`.

    Returns:
        The generated tokens, the wall time in seconds, and the acceptance statistics if there was a draft.
    """
    options |= {
        "do_sample": True,
        "temperature": settings.temperature,
        "top_k": settings.top_k,
        "top_p": settings.top_p,
        "max_new_tokens": settings.max_new_tokens,
        "return_dict_in_generate": True,
    }
    if system.delta is not None:
        options |= {
            "assistant_model": pair.draft,
            "cactus_delta": system.delta,
            "cactus_engine": settings.engine,
            "num_assistant_tokens": settings.num_assistant_tokens,
            "num_assistant_tokens_schedule": "constant",
            "assistant_confidence_threshold": 0.0,
        }
    set_seed(seed)
    start = time.perf_counter()
    output = generate(pair.verifier, **inputs, **options)
    tokens: list[int] = output.sequences[0, inputs["input_ids"].shape[1] :].tolist()
    return tokens, time.perf_counter() - start, output.get("acceptance")


def measure(
    pair: Pair,
    prompts: Sequence[BatchEncoding],
    systems: Sequence[System],
    settings: Settings,
    *,
    passes: int,
    before_call: Callable[[System], None],
) -> list[Measured]:
    """Runs every prompt through every system, some times over.

    Systems take turns prompt by prompt, in an order that rotates, so that a machine that slows down slows all of them
    down. Every system gets the same seeds.

    Args:
        pair ([`Pair`]): The models, warmed up.
        prompts (`Sequence[BatchEncoding]`): The prompts.
        systems (`Sequence[System]`): The systems.
        settings ([`Settings`]): Lengths and sampling.
        passes (`int`): How often to go over all prompts.
        before_call (`Callable`): Hears which system is next.

    Returns:
        `list[Measured]`: One per system.
    """
    measured = [Measured(system, [0] * passes, [0.0] * passes) for system in systems]
    turn = 0
    for number in range(passes):
        for index, inputs in enumerate(prompts):
            for result in measured[turn:] + measured[:turn]:
                before_call(result.system)
                seed = settings.seed + number * len(prompts) + index
                tokens, seconds, acceptance = run(pair, inputs, result.system, settings, seed)
                result.tokens[number] += len(tokens)
                result.seconds[number] += seconds
                result.rounds += acceptance.sequences if acceptance is not None else []
            turn = (turn + 1) % len(measured)
    return measured
