"""All rules over their parameter, on the same positions of the verifier's own text and on text generated with them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray
from transformers import PreTrainedModel

from .calibration import Progress
from .estimates import Estimate, column, ratio, resampling, summarize
from .generated import generate_text
from .grid import LOSSLESS, REFERENCE, Cell, cells_for
from .measures import Sums, choose_positions, measure
from .positions import read_positions
from .sampling import Sampling, check_no_other_processors
from .store import Store
from .texts import Text, write_answers


@dataclass(frozen=True)
class SweepRequest:
    """What a sweep measures."""

    prompts: Sequence[Sequence[int]]
    """Token ids of at least two prompts."""
    samplings: Sequence[Sampling]
    """Settings, each measured on texts of its own."""
    blocks: Sequence[int]
    """Block lengths; text is generated with the first."""
    max_new_tokens: int
    """Length of the texts whose positions are read, at most."""
    kl_positions: int
    """Without truncation, divergences are computed at this many random positions; with it, at all."""
    generated_prompts: int
    """How many prompts text is generated for, with every rule; 0 for none, else at least 2."""
    generated_tokens: int
    """Length of these texts at most."""
    seed: int
    """Of all texts and choices."""
    rules: Sequence[str] = ()
    """Names of the rules, as for [`cells_for`]."""


@dataclass(frozen=True)
class Row:
    """What was found for a rule with one value of its parameter, by name; see [`summarize`] and [`generated_rows`]."""

    cell: Cell | None
    """`None` for the verifier alone."""
    numbers: Mapping[str, Estimate]

    @property
    def label(self) -> str:
        """Name for tables."""
        return "verifier alone" if self.cell is None else self.cell.label


@dataclass(frozen=True)
class SettingResults:
    """What was found under one sampling setting."""

    sampling: Sampling
    texts: int
    positions: int
    rows: list[Row]
    """Positions of the verifier's own text; the lossless rule first."""
    generated: list[Row] = field(default_factory=list)
    """Generated text; the verifier alone first. Empty where none was generated."""


def sweep(
    verifier: PreTrainedModel, draft: PreTrainedModel, request: SweepRequest, store: Store, progress: Progress
) -> list[SettingResults]:
    """Runs a sweep, or what is left of it.

    Args:
        verifier, draft (`PreTrainedModel`): The pair.
        request ([`SweepRequest`]): What to measure.
        store ([`Store`]): What is done.
        progress (callable): As for [`calibrate`].

    Returns:
        `list[SettingResults]`: One for each setting.

    Raises:
        ValueError: If there are fewer than two prompts, or a generation config changes what is sampled.
    """
    if len(request.prompts) < 2 or request.generated_prompts == 1:
        raise ValueError("intervals need at least two prompts, for positions and for generated text.")
    for model in (verifier, draft):
        check_no_other_processors(model)
    found = []
    for sampling in request.samplings:
        cells = cells_for(sampling, request.rules)
        table = _on_positions(verifier, draft, sampling, cells, request, store, progress)
        weights = resampling(len(table), request.seed)
        by_cell = [[sums[index] for sums in table] for index in range(len(cells))]
        rows = [
            Row(cell, summarize(sums, request.blocks, weights, by_cell[0]))
            for cell, sums in zip(cells, by_cell, strict=True)
        ]
        positions = int(column(by_cell[0], "positions").sum())
        results = SettingResults(sampling, len(table), positions, rows)
        if request.generated_prompts:
            results.generated.extend(_generated(verifier, draft, results, request, store, progress))
        found.append(results)
    return found


def _on_positions(
    verifier: PreTrainedModel,
    draft: PreTrainedModel,
    sampling: Sampling,
    cells: Sequence[Cell],
    request: SweepRequest,
    store: Store,
    progress: Progress,
) -> list[list[Sums]]:
    """The sums of each cell, for each text."""
    progress(f"writing texts, {sampling}", 0, 1)
    written = store.get(
        f"texts, {sampling}",
        lambda: write_answers(verifier, request.prompts, sampling, request.max_new_tokens, request.seed),
    )
    texts = [Text(*each) for each in written]
    truncated = sampling.top_k > 0 or sampling.top_p < 1
    lengths = [len(text.ids) - text.begin for text in texts]
    chosen = choose_positions(lengths, None if truncated else request.kl_positions, request.seed)

    def measured(index: int) -> list[Sums]:
        positions = read_positions(verifier, draft, texts[index], sampling)
        return [measure(positions, cell.rule, request.blocks, chosen[index]) for cell in cells]

    table = []
    for index in range(len(texts)):
        progress(f"positions, {sampling}", index, len(texts))
        table.append(store.get(f"positions, {sampling}, {index}", partial(measured, index)))
    progress(f"positions, {sampling}", len(texts), len(texts))
    return table


def systems_of(results: SettingResults) -> list[Cell | None]:
    """What text is generated with: nothing (the verifier alone), the lossless rule, and each other rule with the
    parameter whose acceptance is nearest to that of `REFERENCE`."""

    def acceptance(row: Row) -> float:
        return row.numbers["acceptance"].value

    name, value = REFERENCE
    reference = next(r for r in results.rows if r.cell is not None and (r.cell.name, r.cell.value) == (name, value))
    nearest: dict[str, Row] = {}
    for row in results.rows:
        assert row.cell is not None
        best = nearest.setdefault(row.cell.name, row)
        if abs(acceptance(row) - acceptance(reference)) < abs(acceptance(best) - acceptance(reference)):
            nearest[row.cell.name] = row
    return [None, *(row.cell for row in nearest.values())]


def _generated(
    verifier: PreTrainedModel,
    draft: PreTrainedModel,
    results: SettingResults,
    request: SweepRequest,
    store: Store,
    progress: Progress,
) -> list[Row]:
    sampling, systems = results.sampling, systems_of(results)
    truncated = sampling.top_k > 0 or sampling.top_p < 1
    parts = [f"generated, {sampling}, {index}" for index in range(request.generated_prompts)]
    options: dict[str, Any] = {"block": request.blocks[0], "kl_positions": None if truncated else 8}

    def generated(index: int) -> list[Sums]:
        turns = list(range(len(systems)))
        # In turns, so that a machine that slows down slows all of them down.
        turns = turns[index % len(systems) :] + turns[: index % len(systems)]
        sums: dict[int, Sums] = {}
        for done, turn in enumerate(turns):
            progress(f"generating, {sampling}", index * len(systems) + done, len(parts) * len(systems))
            cell = systems[turn]
            sums[turn] = generate_text(
                verifier,
                draft,
                request.prompts[index],
                None if cell is None else cell.rule,
                sampling,
                max_new_tokens=request.generated_tokens,
                seed=request.seed + index,
                **options,
            )
        return [sums[turn] for turn in range(len(systems))]

    if any(part not in store for part in parts):
        # The first calls of a process are slower than all others.
        for rule in (None, LOSSLESS.rule):
            generate_text(
                verifier, draft, request.prompts[0], rule, sampling, max_new_tokens=2, seed=request.seed, **options
            )
    table = [store.get(part, partial(generated, index)) for index, part in enumerate(parts)]
    weights = resampling(len(table), request.seed)
    by_system = [[sums[turn] for sums in table] for turn in range(len(systems))]
    return generated_rows(systems, by_system, weights)


def generated_rows(
    systems: Sequence[Cell | None], by_system: Sequence[Sequence[Sums]], weights: NDArray[np.float64]
) -> list[Row]:
    """The numbers of generated text.

    Args:
        systems (`Sequence[Cell | None]`): The verifier alone (`None`), the lossless rule, and others.
        by_system (`Sequence[Sequence[Sums]]`): What [`generate_text`] returned, for each system and text.
        weights (`numpy.ndarray`): See [`resampling`].

    Returns:
        `list[Row]`: With `tokens_per_second`; `speedup`, over the verifier alone; `nll_per_token` in nats; and where
        something was drafted `accepted_length`, `rejected` per token, `rejected_ratio` to the lossless rule's, and
        `kl_per_token` in nats.
    """
    alone, lossless = (
        by_system[systems.index(None)],
        by_system[next(i for i, cell in enumerate(systems) if cell is not None and cell.name == LOSSLESS.name)],
    )

    def pace(sums: Sequence[Sums]) -> NDArray[np.float64]:
        values: NDArray[np.float64] = (weights @ column(sums, "tokens")) / (weights @ column(sums, "seconds"))
        return values

    def per_token(sums: Sequence[Sums]) -> NDArray[np.float64]:
        values: NDArray[np.float64] = (weights @ column(sums, "rejected")) / (weights @ column(sums, "tokens"))
        return values

    rows = []
    for cell, sums in zip(systems, by_system, strict=True):
        speedup = pace(sums) / pace(alone)
        tokens = column(sums, "tokens")
        numbers = {
            "tokens_per_second": ratio(weights, tokens, column(sums, "seconds")),
            "speedup": Estimate.of(speedup[0], speedup[1:]),
            "nll_per_token": ratio(weights, column(sums, "nll"), tokens),
        }
        if cell is not None:
            numbers |= {
                "accepted_length": ratio(weights, column(sums, "kept"), column(sums, "rounds")),
                "rejected": ratio(weights, column(sums, "rejected"), tokens),
                "rejected_ratio": _versus(per_token(sums), per_token(lossless)),
                "kl_per_token": ratio(weights, column(sums, "spent"), column(sums, "measured")),
            }
        rows.append(Row(cell, numbers))
    return rows


def _versus(values: NDArray[np.float64], others: NDArray[np.float64]) -> Estimate:
    """The ratio of two numbers on the same resamples; NaN where the other one is 0 on all texts."""
    if not others[0]:
        return Estimate(*[np.nan] * 3)
    known = others > 0
    ratios = values[known] / others[known]
    return Estimate.of(ratios[0], ratios[1:])
