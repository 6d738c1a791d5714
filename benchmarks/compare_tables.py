"""A comparison's numbers: as tables, and the summary that the figure draws too."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from .common import Spread, table
from .systems import ALONE, CONSTANT_BLOCK

LOSSLESS = "ours, delta 0, "
"""What the names of our lossless systems begin with."""

Document = dict[str, Any]
Runs = list[dict[str, Any]]


class Summary(NamedTuple):
    """One system, medians over repetitions with their quartiles; `None` where it cannot be known."""

    tokens_per_second: Spread
    ratio: Spread
    """Over the verifier alone in the same repetition."""
    accepted_length: Spread | None
    verifier_cost: Spread | None
    """`v`."""
    draft_cost: Spread | None
    """`c`."""
    draft_per_round: Spread | None
    """`m`."""
    other_cost: Spread | None
    """`o`."""
    wall_over_forwards: Spread | None
    peak_memory: Spread | None
    """MiB."""


def summaries(document: Document) -> dict[str, Summary]:
    """Each system's summary, in the order in which they are defined."""
    runs = document["runs"]
    alone = {run["repetition"]: run for run in runs if run["system"] == ALONE}
    order = sorted({run["system"] for run in runs if run["repetition"] == 0}, key=_first_of(runs))
    return {system: _summary([run for run in runs if run["system"] == system], alone) for system in order}


def _first_of(runs: Runs) -> Callable[[str], int]:
    names = [run["system"] for run in runs]
    return names.index


def _summary(own: Runs, alone: dict[int, dict[str, Any]]) -> Summary:
    def spread(number: Callable[[dict[str, Any], dict[str, Any]], float], *needed: str) -> Spread | None:
        values = [
            number(run, alone[run["repetition"]])
            for run in own
            if all(run[name] for name in needed) and alone[run["repetition"]]["verifier_step"]
        ]
        return Spread.of(values) if values else None

    accepted = [run["accepted_length"] for run in own if run["accepted_length"] is not None]
    memory = [run["peak_memory"] for run in own if run["peak_memory"] is not None]
    return Summary(
        tokens_per_second=Spread.of([run["tokens"] / run["wall"] for run in own]),
        ratio=Spread.of([_speed(run) / _speed(alone[run["repetition"]]) for run in own]),
        accepted_length=Spread.of(accepted) if accepted and own[0]["system"] != ALONE else None,
        verifier_cost=spread(lambda run, one: run["verifier_step"] / one["verifier_step"], "verifier_step"),
        draft_cost=spread(lambda run, one: run["draft_step"] / one["verifier_step"], "draft_step"),
        draft_per_round=spread(lambda run, one: run["draft_per_round"], "draft_step"),
        other_cost=spread(
            lambda run, one: (run["wall"] - run["forwards"]) / run["rounds"] / one["verifier_step"], "rounds"
        ),
        wall_over_forwards=spread(lambda run, one: run["wall"] / run["forwards"], "rounds"),
        peak_memory=Spread.of(memory) if memory else None,
    )


def _speed(run: dict[str, Any]) -> float:
    return run["tokens"] / run["wall"]


def tables_of(document: Document) -> str:
    """Both tables of a comparison, with what they are about."""
    costs, search = document["costs"], document["block_search"]
    what = (
        f"{document['sampling']}; batch {document['batch']}; {document['new_tokens']} new tokens; "
        f"{document['repetitions']} repetitions; blocks of {document['block']} where nothing else is said."
    )
    alone = (
        f"Forwards by themselves behind 100 tokens: V(1) {costs['verifier_step'] * 1e3:.0f} ms, "
        f"v {costs['verifier_block']:.2f}, c {costs['draft_step']:.3f}."
    )
    parts = [what, alone]
    if search:
        tried = ", ".join(f"{block}: {speed:.1f}" for block, speed in search.items())
        best = f"the best, {document['constant_block']}, is its constant block below"
        parts.append(f"Tokens/s of transformers' assisted generation by constant block: {tried}; {best}.")
    parts += [_speed_table(document), against_transformers(document), _acceptance_table(document)]
    return "\n\n".join(part for part in parts if part)


def against_transformers(document: Document) -> str | None:
    """Our lossless systems over transformers' at its best, in the same repetition; `None` where either is missing."""
    theirs = {run["repetition"]: _speed(run) for run in document["runs"] if run["system"] == CONSTANT_BLOCK}
    ours: dict[str, Runs] = {}
    for run in document["runs"]:
        if run["system"].startswith(LOSSLESS):
            ours.setdefault(run["system"].removeprefix(LOSSLESS), []).append(run)
    if not theirs or not ours:
        return None
    speeds, bounds = [], []
    for draft, runs in ours.items():
        ratio = Spread.of([_speed(run) / theirs[run["repetition"]] for run in runs])
        speeds.append(f"{ratio.show(2)} with {draft} blocks")
        # Nothing is known of forwards that are compiled.
        within = [run["tokens"] / run["forwards"] / theirs[run["repetition"]] for run in runs if run["forwards"]]
        bounds.append(f"{Spread.of(within).median:.2f}" if within else "–")
    return (
        f"Over transformers' assisted generation with that block, lossless against lossless: {', '.join(speeds)}. "
        f"If nothing of ours took time but the forwards: {', '.join(bounds)}."
    )


def _speed_table(document: Document) -> str:
    header = ["system", "tokens/s", "over the verifier alone", "AL", "v", "m", "c", "o", "wall / forwards", "MiB"]
    rows = []
    for system, found in summaries(document).items():
        optional = [
            (found.accepted_length, 2),
            (found.verifier_cost, 2),
            (found.draft_per_round, 1),
            (found.draft_cost, 3),
            (found.other_cost, 3),
            (found.wall_over_forwards, 3),
            (found.peak_memory, 0),
        ]
        shown = ["–" if spread is None else f"{spread.median:.{digits}f}" for spread, digits in optional]
        rows.append([system, found.tokens_per_second.show(1), found.ratio.show(2), *shown])
    return table(header, rows)


def _acceptance_table(document: Document) -> str:
    header = ["system", "AL", "acceptance by position in the block", "KL(h‖q) a token", "certificate a token"]
    rows = [
        [
            system,
            f"{found['accepted_length']:.2f}",
            ", ".join(f"{rate:.2f}" for rate in found["positions"][: 2 * document["block"]]),
            f"{found['divergence']:.4f}",
            f"{found['certificate']:.4f}",
        ]
        for system, found in document["statistics"].items()
    ]
    return table(header, rows) if rows else ""
