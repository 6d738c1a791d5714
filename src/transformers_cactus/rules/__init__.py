"""Acceptance rules beyond the paper's own, one idea a file. Those of the paper are in `acceptance`."""

from .ensemble import Ensemble
from .f_divergences import ChiSquare, FDivergence, JensenShannon, ReverseKL, SquaredHellinger, TotalVariation
from .optimal import Optimal
from .top_k import TopK
from .typical import Typical

__all__ = [
    "ChiSquare",
    "Ensemble",
    "FDivergence",
    "JensenShannon",
    "Optimal",
    "ReverseKL",
    "SquaredHellinger",
    "TopK",
    "TotalVariation",
    "Typical",
]
