"""What depends on `delta`, as curves over a grid of budgets, and their inverses."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .costs import Costs
from .estimates import Estimate, column, resampling
from .measures import Sums

DELTAS: tuple[float, ...] = (0.0, *np.geomspace(1e-7, 16.0, 28).tolist())
"""Budgets that are evaluated, a factor of two apart."""


@dataclass(frozen=True)
class Curves:
    """Numbers as functions of `delta`, on all texts (first row) and on resampled ones: `[1 + resamples, deltas]`."""

    acceptance: NDArray[np.float64]
    accepted_length: NDArray[np.float64]
    kl_per_token: NDArray[np.float64]

    @classmethod
    def of(cls, table: Sequence[Sequence[Sums]], block: int, seed: int) -> Curves:
        """From the sums of each text for each of `DELTAS`."""
        weights = resampling(len(table[0]), seed)

        def curve(numerator: str, denominator: str) -> NDArray[np.float64]:
            totals = [
                np.array([column(sums, name) for sums in table]) @ weights.T for name in (numerator, denominator)
            ]
            with np.errstate(invalid="ignore"):
                values = (totals[0] / totals[1]).T
            # A resample may miss every text with a chosen position.
            return values[np.isfinite(values).all(-1)]

        return cls(
            acceptance=curve("accepted", "positions"),
            accepted_length=curve(f"kept@{block}", f"rounds@{block}"),
            kl_per_token=curve(f"spent@{block}", "measured"),
        )

    def speedup(self, costs: Costs, block: int) -> NDArray[np.float64]:
        """The speed-up over the verifier alone that the accepted lengths allow."""
        return (self.accepted_length + 1) / (costs.verifier_block + block * costs.draft_step)

    @staticmethod
    def at(curve: NDArray[np.float64], delta: float) -> Estimate:
        """The value of a curve between two of `DELTAS`."""
        values = np.array([np.interp(_axis(delta), _axis(np.array(DELTAS)), row) for row in curve])
        return Estimate.of(values[0], values[1:])


def _axis(delta: Any) -> Any:
    """On which curves are interpolated: small budgets spend, and gain, about as their root."""
    return np.sqrt(delta)


def reached(curve: NDArray[np.float64], target: float, name: str) -> Estimate:
    """The smallest `delta` at which a curve reaches a target, on all texts and on resampled ones."""
    # Not quite monotone: more bonus tokens, which spend nothing, come with a larger delta.
    rising = np.maximum.accumulate(curve, axis=-1)
    if not rising[0, 0] <= target <= rising[0, -1]:
        what = {
            "target_kl": f"no delta spends more than {rising[0, -1]:.4g} nats a token: all keep the target",
            "target_acceptance": f"acceptance is between {rising[0, 0]:.3f} (lossless) and {rising[0, -1]:.3f}",
            "target_speedup": f"the speed-up is between {rising[0, 0]:.2f} (lossless) and {rising[0, -1]:.2f}",
        }[name]
        raise ValueError(f"{name}={target:g} is out of reach: {what}.")
    axis = _axis(np.array(DELTAS))
    roots = np.empty(len(rising))
    for row, values in enumerate(rising):
        above = int(np.searchsorted(values, target))
        if above == 0 or above == len(values):
            roots[row] = axis[min(above, len(values) - 1)]
            continue
        share = (target - values[above - 1]) / (values[above] - values[above - 1])
        roots[row] = axis[above - 1] + share * (axis[above] - axis[above - 1])
    return Estimate.of(roots[0] ** 2, roots[1:] ** 2)
