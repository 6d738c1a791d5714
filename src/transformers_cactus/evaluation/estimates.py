"""From sums over texts to numbers with confidence intervals."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from .measures import Sums

RESAMPLES = 1000
LEVEL = 0.95
"""Of all intervals: percentiles of a bootstrap over whole texts, since positions of one text are alike."""


class Estimate(NamedTuple):
    """A number and its 95 % interval."""

    value: float
    low: float
    high: float

    @classmethod
    def of(cls, value: float, resampled: NDArray[np.float64]) -> Estimate:
        """From the number on all texts and on resampled ones, `[resamples]`."""
        tail = (1 - LEVEL) / 2
        low, high = np.quantile(resampled, [tail, 1 - tail])
        return cls(float(value), float(low), float(high))


def resampling(texts: int, seed: int = 0, resamples: int = RESAMPLES) -> NDArray[np.float64]:
    """How often each text is drawn, `[1 + resamples, texts]`; the first row is the texts as they are."""
    drawn = np.random.default_rng(seed).multinomial(texts, np.full(texts, 1 / texts), size=resamples)
    return np.concatenate([np.ones((1, texts)), drawn])


def column(sums: Sequence[Sums], name: str) -> NDArray[np.float64]:
    """One of the sums of every text, `[texts]`."""
    return np.array([each[name] for each in sums])


def ratio(weights: NDArray[np.float64], numerator: NDArray[np.float64], denominator: NDArray[np.float64]) -> Estimate:
    """The ratio of two totals over texts.

    Args:
        weights (`numpy.ndarray` of shape `[1 + resamples, texts]`): See [`resampling`].
        numerator, denominator (`numpy.ndarray` of shape `[texts]`): What each text adds to the totals.

    Returns:
        [`Estimate`]: infinite in all parts where the numerator is infinite for a text; NaN where the denominators are
        all 0.
    """
    if np.isinf(numerator).any():
        return Estimate(np.inf, np.inf, np.inf)
    with np.errstate(invalid="ignore", divide="ignore"):
        values = (weights @ numerator) / (weights @ denominator)
    # A text may have none of what is counted; a resample of such texts alone says nothing.
    known = values[1:][np.isfinite(values[1:])]
    return Estimate.of(values[0], known) if known.size and np.isfinite(values[0]) else Estimate(*[np.nan] * 3)


def summarize(
    sums: Sequence[Sums],
    blocks: Sequence[int],
    weights: NDArray[np.float64],
    lossless: Sequence[Sums] | None = None,
) -> Mapping[str, Estimate]:
    """The numbers of one rule over all texts.

    Args:
        sums (`Sequence[Sums]`): One for each text.
        blocks (`Sequence[int]`): Block lengths.
        weights (`numpy.ndarray`): See [`resampling`]; the same for all rules, so that ratios are of the same texts.
        lossless (`Sequence[Sums]`, *optional*): Of lossless speculative sampling on the same texts.

    Returns:
        `Mapping[str, Estimate]`: `acceptance` (probability at a position); `kl`, `total_variation` and
        `entropy_change` per drafted position, in nats where they have a unit; `outside`, the share of positions at
        which a token may be emitted that the verifier excludes; and for each block length `m`
        `accepted_length@m` (per round, the extra token not counted), `kl_per_token@m` (a bonus token spends nothing),
        `rejected@m` (rejections per token) and, with `lossless`, `rejected_ratio@m`.
    """

    def of(numerator: str, denominator: str) -> Estimate:
        return ratio(weights, column(sums, numerator), column(sums, denominator))

    found = {"acceptance": of("accepted", "positions")}
    found |= {name: of(name, "measured") for name in ("kl", "total_variation", "entropy_change", "outside")}
    for block in blocks:
        found[f"accepted_length@{block}"] = of(f"kept@{block}", f"rounds@{block}")
        found[f"kl_per_token@{block}"] = of(f"spent@{block}", "measured")
        found[f"rejected@{block}"] = of(f"rejected@{block}", "positions")
        if lossless is not None:
            name = f"rejected@{block}"
            found[f"rejected_ratio@{block}"] = ratio(weights, column(sums, name), column(lossless, name))
    return found
