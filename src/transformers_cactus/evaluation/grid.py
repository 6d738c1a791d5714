"""The rules that a sweep compares, each over a range of its parameter."""

from __future__ import annotations

from collections.abc import Collection
from typing import NamedTuple

from ..acceptance import AcceptanceRule, Cactus, CactusExact, Lenience, Speculative
from ..rules import (
    ChiSquare,
    Ensemble,
    JensenShannon,
    Optimal,
    ReverseKL,
    SquaredHellinger,
    TopK,
    TotalVariation,
    Typical,
)
from .sampling import Sampling


class Cell(NamedTuple):
    """A rule with a value for its parameter."""

    name: str
    """The rule's name."""
    parameter: str
    """The parameter's name; empty for a rule without one."""
    value: float
    """The parameter's value."""
    rule: AcceptanceRule
    """The rule itself."""

    @property
    def label(self) -> str:
        """Both, for tables."""
        return f"{self.name}, {self.parameter} {self.value:g}" if self.parameter else self.name


LOSSLESS = Cell("lossless", "", 0.0, Speculative())
"""What all others are compared with."""

REFERENCE = ("cactus", 0.75)
"""Other rules generate text with the parameter that accepts about as much as this one: the paper's rule and budget."""

DELTAS = (0.01, 0.03, 0.1, 0.25, 0.5, 0.75, 1.0, 2.0)


LEFT_OUT = ("chi-square",)
"""Rules that take part only where they are named: this one is `cactus` at half the budget."""

SLOW_WITHOUT_TRUNCATION = ("jensen-shannon", "reverse-kl")
"""Rules that without truncation take part only where they are named: they solve for a root at every token that the
draft likes better than the verifier, a tenth of a second for each parameter at a position of 49,152 tokens."""


def cells_for(sampling: Sampling, rules: Collection[str] = ()) -> list[Cell]:
    """Rules over their parameter, the lossless one first.

    Args:
        sampling ([`Sampling`]): Of both models.
        rules (`Collection[str]`, *optional*): Names of rules. By default all but `LEFT_OUT`, and without truncation
            `SLOW_WITHOUT_TRUNCATION`. The lossless rule and that of `REFERENCE`, with which all others are compared,
            always take part.

    Returns:
        `list[Cell]`: The rules one after another, each with its parameter rising in what it accepts.
    """
    truncated = sampling.top_k > 0 or sampling.top_p < 1
    left_out = LEFT_OUT if truncated else (*LEFT_OUT, *SLOW_WITHOUT_TRUNCATION)
    cells = [LOSSLESS]
    cells += [Cell("cactus", "delta", x, Cactus(x)) for x in DELTAS]
    cells += [Cell("cactus-exact", "delta", x, CactusExact(x)) for x in DELTAS]
    cells += [Cell("optimal", "multiplier", x, Optimal(x)) for x in (0.1, 0.25, 0.5, 1.0, 1.5, 2.0, 4.0)]
    cells += [Cell("lenience", "factor", x, Lenience(x)) for x in (1.25, 1.5, 2.0, 3.0, 5.0, 10.0)]
    cells += [Cell("ensemble", "weight", x, Ensemble(x)) for x in (0.9, 0.8, 0.7, 0.6, 0.4)]
    cells += [
        Cell("ensemble, within support", "weight", x, Ensemble(x, within_support=True))
        for x in (0.9, 0.8, 0.7, 0.6, 0.4, 0.2)
    ]
    # Both of the criterion's numbers at once, in the ratio of Medusa's defaults, 0.09 and 0.3 = sqrt(0.09).
    cells += [Cell("typical", "threshold", x, Typical(x, x**0.5)) for x in (0.6, 0.4, 0.2, 0.09, 0.03, 0.01)]
    cells += [Cell("top-k", "k", x, TopK(x)) for x in (1, 2, 3, 5, 10)]
    cells += [Cell("total-variation", "delta", x, TotalVariation(x)) for x in (0.02, 0.05, 0.1, 0.2, 0.4)]
    cells += [Cell("squared-hellinger", "delta", x, SquaredHellinger(x)) for x in (0.01, 0.03, 0.1, 0.2, 0.4)]
    cells += [Cell("chi-square", "delta", 2 * x, ChiSquare(2 * x)) for x in DELTAS]
    cells += [Cell("jensen-shannon", "delta", x, JensenShannon(x)) for x in (0.003, 0.01, 0.03, 0.1, 0.3)]
    cells += [Cell("reverse-kl", "delta", x, ReverseKL(x)) for x in (0.01, 0.03, 0.1, 0.3, 1.0)]

    def taken(cell: Cell) -> bool:
        # Variants of a rule are named behind a comma.
        rule = cell.name.partition(",")[0]
        return rule in (LOSSLESS.name, REFERENCE[0]) or (rule in rules if rules else rule not in left_out)

    return list(filter(taken, cells))
