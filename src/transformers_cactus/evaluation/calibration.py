"""From what a text may cost to the `delta` that spends it.

The verifier writes texts, both models read them once, and every `delta` of a grid is evaluated exactly at the same
positions. That gives what a token spends, how much is accepted and how long rounds get as functions of `delta`, which
are then inverted. What this leaves out: with `delta > 0` the text drifts away from the verifier's, and the positions
of a text that was generated with `delta` are not quite these. [`check_calibration`] measures what is really spent.
"""

from __future__ import annotations

import math
import numbers
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from transformers import PreTrainedModel

from ..acceptance import AcceptanceRule, BudgetRule
from ..configuration import RULES
from ..integration import generate
from .costs import Costs, measure_costs
from .curves import DELTAS, Curves, reached
from .estimates import Estimate, column, ratio, resampling
from .measures import Sums, choose_positions, measure
from .positions import read_positions
from .sampling import PAPER, Sampling, check_no_other_processors
from .texts import BATCH, padded, seeded, write_answers

Progress = Callable[[str, int, int], None]
"""Hears what is being done, how many of its steps are done, and how many there are."""


@dataclass(frozen=True)
class Calibration:
    """A `delta`, and what it does at drafted positions of the verifier's own text."""

    delta: Estimate
    """The budget to use, as `delta.value`, in nats for each drafted token, with its 95 % interval."""
    kl_per_token: Estimate
    """What a token of the text spends at that budget, in nats: the mean certificate."""
    acceptance: Estimate
    """The probability that a drafted token is accepted."""
    accepted_length: Estimate
    """Drafted tokens accepted per round, the extra token not counted."""
    lossless_accepted_length: Estimate
    """The same with `delta = 0`."""
    rule: str
    """The rule's name."""
    sampling: Sampling
    """What it was calibrated for; another setting has another `delta`."""
    num_assistant_tokens: int
    """The block length that it was calibrated for."""
    positions: int
    """Positions that were read."""
    texts: int
    """Texts that they are from."""
    costs: Costs | None = None
    """What the models' forwards take, where a speed-up was asked for."""

    @property
    def options(self) -> dict[str, Any]:
        """The options for `generate`: the rule, its `delta`, the sampling settings and the block length."""
        return {
            "cactus_rule": self.rule,
            "cactus_delta": self.delta.value,
            "num_assistant_tokens": self.num_assistant_tokens,
            **self.sampling.options,
        }


def calibrate(
    verifier: PreTrainedModel,
    draft: PreTrainedModel,
    prompts: Sequence[Sequence[int]],
    *,
    target_kl: float | None = None,
    target_acceptance: float | None = None,
    target_speedup: float | None = None,
    rule: str = "cactus",
    sampling: Sampling = PAPER,
    num_assistant_tokens: int = 4,
    max_new_tokens: int = 64,
    kl_positions: int | None = None,
    seed: int = 0,
    progress: Progress = lambda what, done, total: None,
) -> Calibration:
    """Finds the `cactus_delta` that reaches a target, from one pass over the verifier's own texts.

    Args:
        verifier (`PreTrainedModel`): The large model, decoder-only.
        draft (`PreTrainedModel`): The small one, with the same tokenizer.
        prompts (`Sequence[Sequence[int]]`): Token ids of at least two prompts, which the verifier continues; see
            [`~evaluation.read_prompts`] and [`~evaluation.write_prompts`].
        target_kl (`float`, *optional*): Nats that a generated token may spend on average, above 0.
        target_acceptance (`float`, *optional*): The probability that a drafted token is accepted, in (0, 1).
        target_speedup (`float`, *optional*): Tokens per second over those of the verifier alone, above 0, as far as
            the times of both models' forwards say; they are measured on one sequence, and what the loop itself takes
            comes on top. Give exactly one of the three targets.
        rule (`str`, *optional*, defaults to `"cactus"`): One with a `delta`.
        sampling ([`Sampling`], *optional*): By default temperature 0.6, top-k 20, top-p 0.95.
        num_assistant_tokens (`int`, *optional*, defaults to 4): Block length.
        max_new_tokens (`int`, *optional*, defaults to 64): Length of a text at most.
        kl_positions (`int`, *optional*): Compute divergences at this many random positions only. All by default;
            over a whole vocabulary, without truncation, one takes about a second for all budgets together.
        seed (`int`, *optional*, defaults to 0): Of texts and choices.
        progress (callable, *optional*): Hears what is being done, how many steps of it are done, and of how many.

    Returns:
        [`Calibration`]: The smallest `delta` that reaches the target.

    Raises:
        TypeError, ValueError: If an argument is out of range, before any model runs; or if the target is out of reach
            of any `delta`, with what can be reached.

    Example:
        ```python
        prompts = write_prompts(verifier, tokenizer, 32)
        found = calibrate(verifier, draft, prompts, target_kl=0.02)
        transformers_cactus.generate(verifier, **inputs, **found.options, assistant_model=draft)
        ```
    """
    targets = {"target_kl": target_kl, "target_acceptance": target_acceptance, "target_speedup": target_speedup}
    name, target = check_target(targets)
    check_rule(rule)
    _check_run(prompts, num_assistant_tokens, max_new_tokens, kl_positions)
    for model in (verifier, draft):
        check_no_other_processors(model)
    progress("texts", 0, 1)
    texts = write_answers(verifier, prompts, sampling, max_new_tokens, seed)
    lengths = [len(text.ids) - text.begin for text in texts]
    costs = measure_costs(verifier, draft, num_assistant_tokens) if name == "target_speedup" else None
    block = num_assistant_tokens
    table: list[list[Sums]] = [[] for _ in DELTAS]
    for done, (text, chosen) in enumerate(zip(texts, choose_positions(lengths, kl_positions, seed), strict=True)):
        progress("positions", done, len(texts))
        positions = read_positions(verifier, draft, text, sampling)
        for sums, delta in zip(table, DELTAS, strict=True):
            sums.append(measure(positions, _with_delta(rule, delta), [block], chosen))
    progress("positions", len(texts), len(texts))

    curves = Curves.of(table, block, seed)
    wanted = {
        "target_kl": curves.kl_per_token,
        "target_acceptance": curves.acceptance,
        "target_speedup": curves.speedup(costs, block) if costs is not None else curves.acceptance,
    }[name]
    found = reached(wanted, target, name)
    return Calibration(
        delta=found,
        kl_per_token=curves.at(curves.kl_per_token, found.value),
        acceptance=curves.at(curves.acceptance, found.value),
        accepted_length=curves.at(curves.accepted_length, found.value),
        lossless_accepted_length=curves.at(curves.accepted_length, 0.0),
        rule=rule,
        sampling=sampling,
        num_assistant_tokens=block,
        positions=sum(lengths),
        texts=len(texts),
        costs=costs,
    )


def check_calibration(
    calibration: Calibration,
    verifier: PreTrainedModel,
    draft: PreTrainedModel,
    prompts: Sequence[Sequence[int]],
    *,
    max_new_tokens: int = 64,
    seed: int = 1,
    progress: Progress = lambda what, done, total: None,
) -> Estimate:
    """Generates with the `delta` that was found, and measures with the certificate what a token really spends.

    Args:
        calibration ([`Calibration`]): What to check.
        verifier, draft (`PreTrainedModel`): The pair it is for.
        prompts (`Sequence[Sequence[int]]`): Token ids of at least two prompts.
        max_new_tokens (`int`, *optional*, defaults to 64): Length of a text at most.
        seed (`int`, *optional*, defaults to 1): Another than that of the calibration makes other texts.
        progress (callable, *optional*): As for [`calibrate`].

    Returns:
        [`Estimate`]: Nats per token, to compare with `calibration.kl_per_token`.
    """
    _check_run(prompts, calibration.num_assistant_tokens, max_new_tokens, None)
    sums: list[Sums] = []
    with seeded(seed):
        for done in range(0, len(prompts), BATCH):
            progress("check", done, len(prompts))
            output = generate(
                verifier,
                **padded(verifier, prompts[done : done + BATCH]),
                assistant_model=draft,
                **calibration.options,
                num_assistant_tokens_schedule="constant",
                assistant_confidence_threshold=0.0,
                max_new_tokens=max_new_tokens,
                cactus_certificate=True,
                return_dict_in_generate=True,
            )
            sums += [
                {"spent": sum(each.certificate), "tokens": float(len(each.certificate))}
                for each in output.acceptance.sequences
            ]
    progress("check", len(prompts), len(prompts))
    return ratio(resampling(len(sums), seed), column(sums, "spent"), column(sums, "tokens"))


def check_target(targets: dict[str, float | None]) -> tuple[str, float]:
    """The one target that is given.

    Raises:
        TypeError, ValueError: If there is not exactly one, or it is out of range.
    """
    given = {name: value for name, value in targets.items() if value is not None}
    if len(given) != 1:
        raise ValueError(f"give exactly one of {', '.join(targets)}, got {', '.join(given) or 'none'}.")
    (name, value), *_ = given.items()
    allowed = "between 0 and 1" if name == "target_acceptance" else "above 0 and finite"
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise TypeError(f"{name} must be a number {allowed}, got {value!r}.")
    if not value > 0 or math.isinf(value) or (name == "target_acceptance" and value >= 1):
        raise ValueError(f"{name} must be {allowed}, got {value:g}.")
    return name, float(value)


def check_rule(rule: str) -> None:
    """Raises for a rule without `delta`."""
    with_delta = sorted(name for name, kind in RULES.items() if issubclass(kind, BudgetRule))
    if rule not in with_delta:
        raise ValueError(f"rule must be one with a delta, {', '.join(map(repr, with_delta))}, got {rule!r}.")


def _with_delta(rule: str, delta: float) -> AcceptanceRule:
    kind: Any = RULES[rule]
    built: AcceptanceRule = kind(delta)
    return built


def _check_run(
    prompts: Sequence[Sequence[int]], num_assistant_tokens: int, max_new_tokens: int, kl_positions: int | None
) -> None:
    if len(prompts) < 2 or not all(len(prompt) for prompt in prompts):
        raise ValueError(f"give at least two prompts of at least one token for an interval, got {len(prompts)}.")
    for name, value in (
        ("num_assistant_tokens", num_assistant_tokens),
        ("max_new_tokens", max_new_tokens),
        ("kl_positions", kl_positions),
    ):
        if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
            raise ValueError(f"{name} must be a whole number of at least 1, got {value!r}.")
