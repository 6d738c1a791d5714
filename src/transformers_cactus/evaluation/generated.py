"""Text generated under a rule: how fast, how long its rounds are, and what the verifier thinks of it."""

from __future__ import annotations

import time
import warnings
from collections.abc import Sequence
from typing import Any

from transformers import PreTrainedModel

from ..acceptance import AcceptanceRule
from ..integration import generate
from .measures import Sums, choose_positions, measure
from .positions import read_positions
from .sampling import Sampling
from .texts import Text, padded, seeded


def generate_text(
    verifier: PreTrainedModel,
    draft: PreTrainedModel,
    prompt: Sequence[int],
    rule: AcceptanceRule | None,
    sampling: Sampling,
    *,
    block: int,
    max_new_tokens: int,
    kl_positions: int | None,
    seed: int,
) -> Sums:
    """Generates one text and measures it.

    Args:
        verifier, draft (`PreTrainedModel`): The pair.
        prompt (`Sequence[int]`): Token ids.
        rule ([`AcceptanceRule`] or `None`): `None` for the verifier alone.
        sampling ([`Sampling`]): How to sample.
        block (`int`): Tokens drafted per round.
        max_new_tokens (`int`): Length at most.
        kl_positions (`int` or `None`): Compute divergences at so many of its positions, `None` for all.
        seed (`int`): Of the text.

    Returns:
        `Sums`: `tokens` and `seconds` of the call; `kept` drafted tokens, `rejected` ones and `rounds`; `nll`, the
        verifier's negative log-likelihood of the text in nats, at temperature 1 without truncation; `spent` over
        `measured` positions, the expected divergence of what is drawn there, as in [`measure`].
    """
    options: dict[str, Any] = {**sampling.options, "max_new_tokens": max_new_tokens, "return_dict_in_generate": True}
    if rule is not None:
        options |= {
            "assistant_model": draft,
            "cactus_rule": rule,
            "num_assistant_tokens": block,
            "num_assistant_tokens_schedule": "constant",
            "assistant_confidence_threshold": 0.0,
        }
    with seeded(seed), warnings.catch_warnings():
        # What it warns of is what is measured.
        warnings.filterwarnings("ignore", message=".* can emit tokens that the verifier excludes")
        started = time.perf_counter()
        output = generate(verifier, **padded(verifier, [prompt]), **options)
        tokens: list[int] = output.sequences[0].tolist()
        seconds = time.perf_counter() - started
    text = Text(tokens, len(prompt))
    positions = read_positions(verifier, draft, text, sampling)
    sums = {
        "tokens": float(len(tokens) - len(prompt)),
        "seconds": seconds,
        "nll": -positions.log_probs.sum().item(),
    }
    if rule is None:
        return sums
    (chosen,) = choose_positions([len(positions.draft)], kl_positions, seed)
    expected = measure(positions, rule, [block], chosen)
    acceptance = output.acceptance
    rejected = sum(
        kept < drafted
        for kept, drafted in zip(acceptance.accepted_per_round, acceptance.drafted_per_round, strict=True)
    )
    return sums | {
        "kept": float(acceptance.accepted),
        "rejected": float(rejected),
        "rounds": float(acceptance.rounds),
        "spent": expected[f"spent@{block}"],
        "measured": expected["measured"],
    }
