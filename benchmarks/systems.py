"""The ways to generate that `benchmarks.compare` runs against one another, all on the same two model objects.

So dtype, attention implementation, threads and device are the same for all. A system that is new needs one entry here:
an acceptance rule of ours one in `RULES`, a way to draft one in `DRAFTS`.
"""

from __future__ import annotations

import copy
import fnmatch
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers import CompileConfig, PreTrainedModel

import transformers_cactus
from transformers_cactus import AcceptanceStatistics, Sampling
from transformers_cactus.demo import Pair

from . import peers

ALONE = "verifier alone"
ALONE_COMPILED = "verifier alone, static cache, compiled"
ENSEMBLE_WEIGHT = 0.8
"""Of the verifier in transformers' ensemble. Accepts about as much as Cactus with delta 1 in docs/sweep."""
CONSTANT_BLOCK = "transformers, assisted, constant block"
ENSEMBLE = f"transformers, ensemble {ENSEMBLE_WEIGHT:g}, constant block"

RULES: dict[str, dict[str, Any]] = {
    **{f"delta {delta:g}": {"cactus_delta": delta} for delta in (0.0, 0.25, 0.5, 0.75, 1.0)},
    # Between delta 0.25 and 0.5 in docs/sweep.
    "optimal": {"cactus_rule": "optimal", "cactus_multiplier": 2.0},
}
"""Our acceptance rules, as options of a call."""

DRAFTS: dict[str, dict[str, Any]] = {
    "constant": {"num_assistant_tokens_schedule": "constant"},
    "adaptive": {"num_assistant_tokens_schedule": "adaptive"},
    "adaptive + copying": {"num_assistant_tokens_schedule": "adaptive", "prompt_lookup_num_tokens": 16},
    "compiled + adaptive + copying": {
        "cactus_compile": True,
        "num_assistant_tokens_schedule": "adaptive",
        "prompt_lookup_num_tokens": 16,
    },
}
"""How our drafts are made, as options of a call."""

Inputs = dict[str, torch.Tensor]


@dataclass(frozen=True)
class System:
    """A way to generate."""

    name: str
    """In tables, and for `--systems`."""
    generate: Callable[[Inputs, int], Any]
    """Writes this many tokens for each prompt; what it returns counts for peers only, see [`peers.Written`]."""
    statistics: Callable[[Inputs, int], AcceptanceStatistics] | None = None
    """The same with what it accepts and spends, which takes time of its own; `None` for systems that do not know."""
    compiled: bool = False
    """Whether its forwards are compiled: then nothing may watch them, and they are warmed up for longer."""


def systems_for(pair: Pair, sampling: Sampling, block: int, constant_block: int, batch: int) -> list[System]:
    """All systems that can run this.

    Args:
        pair ([`Pair`]): The models.
        sampling ([`Sampling`]): The same for all.
        block (`int`): Tokens drafted per round, of ours and of peers.
        constant_block (`int`): The same for transformers' loop, where it is constant.
        batch (`int`): Sequences of a call. transformers' assisted generation and flashspec take one only.
    """

    def alone(inputs: Inputs, new_tokens: int) -> Any:
        return pair.verifier.generate(**inputs, **sampling.options, max_new_tokens=new_tokens)

    def alone_compiled(inputs: Inputs, new_tokens: int) -> Any:
        options = {**sampling.options, "cache_implementation": "static", "compile_config": compile_everywhere()}
        return pair.verifier.generate(**inputs, **options, max_new_tokens=new_tokens)

    systems = [System(ALONE, alone), System(ALONE_COMPILED, alone_compiled, compiled=True)]
    if batch == 1:
        best = draft_with(pair.draft, num_assistant_tokens=constant_block, **CONSTANT)
        systems += [
            assisted(pair, draft_with(pair.draft), sampling, "transformers, assisted, defaults"),
            assisted(pair, best, sampling, CONSTANT_BLOCK),
            assisted(pair, best, sampling, ENSEMBLE, assistant_ensemble_weight=ENSEMBLE_WEIGHT),
        ]
    systems += [System(name, generate) for name, generate in peers.available(pair, sampling, block, batch).items()]
    return systems + [
        ours(pair, sampling, f"ours, {rule}, {draft}", block, **options, **drafting)
        for rule, options in RULES.items()
        for draft, drafting in DRAFTS.items()
    ]


def compile_everywhere() -> CompileConfig:
    """transformers compiles what `generate` runs on GPUs only, unless it is told so."""
    config = CompileConfig()
    config._compile_all_devices = True
    return config


CONSTANT = {"num_assistant_tokens_schedule": "constant", "assistant_confidence_threshold": 0.0}
"""Every round of transformers' loop drafts the same number of tokens."""


def draft_with(draft: PreTrainedModel, **settings: Any) -> PreTrainedModel:
    """The same module with draft settings of its own: transformers reads them from the draft, and changes them."""
    shell = copy.copy(draft)
    shell.generation_config = copy.deepcopy(draft.generation_config)
    shell.generation_config.update(**settings)
    return shell


def assisted(pair: Pair, draft: PreTrainedModel, sampling: Sampling, name: str, **options: Any) -> System:
    """transformers' own assisted generation."""

    def generate(inputs: Inputs, new_tokens: int) -> Any:
        call = {**inputs, **sampling.options, "max_new_tokens": new_tokens, **options}
        return pair.verifier.generate(**call, assistant_model=draft)

    return System(name, generate)


def ours(pair: Pair, sampling: Sampling, name: str, block: int, **options: Any) -> System:
    """The fast engine."""

    def call(inputs: Inputs, new_tokens: int, **more: Any) -> Any:
        options_of_all = {"cactus_engine": "fast", "max_new_tokens": new_tokens}
        # The adaptive schedule finds the length by itself.
        if options.get("num_assistant_tokens_schedule") != "adaptive":
            options_of_all["num_assistant_tokens"] = block
        return transformers_cactus.generate(
            pair.verifier,
            **inputs,
            **sampling.options,
            **options_of_all,
            **options,
            **more,
            assistant_model=pair.draft,
        )

    def statistics(inputs: Inputs, new_tokens: int) -> AcceptanceStatistics:
        return call(inputs, new_tokens, return_dict_in_generate=True, cactus_certificate=True).acceptance

    # Compiled or not, it accepts and spends the same, and a batch of its own would be compiled for minutes.
    compiled = bool(options.get("cactus_compile"))
    return System(name, call, None if compiled else statistics, compiled)


def chosen(systems: Sequence[System], patterns: Sequence[str] | None) -> list[System]:
    """Those whose name matches one of some shell patterns, and always the verifier alone.

    Raises:
        ValueError: If a pattern matches none.
    """
    for pattern in patterns or ():
        if not any(fnmatch.fnmatchcase(system.name, pattern) for system in systems):
            raise ValueError(f"no system is called {pattern!r}. There are: {'; '.join(s.name for s in systems)}.")
    return [
        system
        for system in systems
        if patterns is None
        or system.name == ALONE
        or any(fnmatch.fnmatchcase(system.name, pattern) for pattern in patterns)
    ]
