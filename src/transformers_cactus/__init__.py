"""Constrained acceptance speculative sampling (Cactus) for Hugging Face transformers."""

from ._version import __version__
from .acceptance import AcceptanceRule, Cactus, CactusExact, GammaRule, Lenience, Speculative, gamma_star
from .effective import effective_distribution
from .integration import disable, enable, enabled, generate
from .logits_process import CactusLogitsProcessor
from .outputs import AcceptanceStatistics, Origin, SequenceStatistics
from .verification import Verification, verify

__all__ = [
    "AcceptanceRule",
    "AcceptanceStatistics",
    "Cactus",
    "CactusExact",
    "CactusLogitsProcessor",
    "GammaRule",
    "Lenience",
    "Origin",
    "SequenceStatistics",
    "Speculative",
    "Verification",
    "__version__",
    "disable",
    "effective_distribution",
    "enable",
    "enabled",
    "gamma_star",
    "generate",
    "verify",
]
