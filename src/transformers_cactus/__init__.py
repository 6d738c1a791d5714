"""Constrained acceptance speculative sampling (Cactus) for Hugging Face transformers."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from ._version import __version__

if TYPE_CHECKING:
    from .acceptance import AcceptanceRule, Cactus, CactusExact, GammaRule, Lenience, Speculative, gamma_star
    from .adapters import without_adapter
    from .block_verification import verify_block
    from .conversation import Conversation, Reply
    from .delta_plan import DeltaBetween
    from .divergences import EffectiveDivergence, effective_divergence
    from .effective import effective_distribution
    from .evaluation import Calibration, Sampling, calibrate, check_calibration, read_prompts, write_prompts
    from .feature_draft import FeatureDraft, FeatureDraftConfig
    from .integration import disable, enable, enabled, generate
    from .logits_process import CactusLogitsProcessor
    from .outputs import AcceptanceStatistics, Origin, SequenceStatistics
    from .pipelines import pipeline
    from .rules import (
        ChiSquare,
        Ensemble,
        FDivergence,
        JensenShannon,
        Optimal,
        ReverseKL,
        SquaredHellinger,
        TopK,
        TotalVariation,
        Typical,
    )
    from .verification import Verification, verify
    from .visualization import Visualization, visualize

_MODULES = {
    "acceptance": ("AcceptanceRule", "Cactus", "CactusExact", "GammaRule", "Lenience", "Speculative", "gamma_star"),
    "adapters": ("without_adapter",),
    "conversation": ("Conversation", "Reply"),
    "block_verification": ("verify_block",),
    "delta_plan": ("DeltaBetween",),
    "divergences": ("EffectiveDivergence", "effective_divergence"),
    "effective": ("effective_distribution",),
    "evaluation": ("Calibration", "Sampling", "calibrate", "check_calibration", "read_prompts", "write_prompts"),
    "feature_draft": ("FeatureDraft", "FeatureDraftConfig"),
    "integration": ("disable", "enable", "enabled", "generate"),
    "logits_process": ("CactusLogitsProcessor",),
    "outputs": ("AcceptanceStatistics", "Origin", "SequenceStatistics"),
    "pipelines": ("pipeline",),
    "rules": (
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
    ),
    "verification": ("Verification", "verify"),
    "visualization": ("Visualization", "visualize"),
}
_HOMES = {name: module for module, names in _MODULES.items() for name in names}

__all__ = [
    "AcceptanceRule",
    "AcceptanceStatistics",
    "Cactus",
    "CactusExact",
    "CactusLogitsProcessor",
    "Calibration",
    "ChiSquare",
    "Conversation",
    "DeltaBetween",
    "EffectiveDivergence",
    "Ensemble",
    "FDivergence",
    "FeatureDraft",
    "FeatureDraftConfig",
    "GammaRule",
    "JensenShannon",
    "Lenience",
    "Optimal",
    "Origin",
    "Reply",
    "ReverseKL",
    "Sampling",
    "SequenceStatistics",
    "Speculative",
    "SquaredHellinger",
    "TopK",
    "TotalVariation",
    "Typical",
    "Verification",
    "Visualization",
    "__version__",
    "calibrate",
    "check_calibration",
    "disable",
    "effective_distribution",
    "effective_divergence",
    "enable",
    "enabled",
    "gamma_star",
    "generate",
    "pipeline",
    "read_prompts",
    "verify",
    "verify_block",
    "visualize",
    "without_adapter",
    "write_prompts",
]


def __getattr__(name: str) -> Any:
    """Imports a public name when it is first used: torch and transformers take seconds to load."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(f".{_HOMES[name]}", __name__), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return __all__
