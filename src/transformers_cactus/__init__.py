"""Constrained acceptance speculative sampling (Cactus) for Hugging Face transformers."""

from ._version import __version__
from .acceptance import AcceptanceRule, Cactus, CactusExact, GammaRule, Lenience, Speculative, gamma_star
from .effective import effective_distribution
from .verification import Verification, verify

__all__ = [
    "AcceptanceRule",
    "Cactus",
    "CactusExact",
    "GammaRule",
    "Lenience",
    "Speculative",
    "Verification",
    "__version__",
    "effective_distribution",
    "gamma_star",
    "verify",
]
