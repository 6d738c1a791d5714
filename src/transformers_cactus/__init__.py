"""Constrained acceptance speculative sampling (Cactus) for Hugging Face transformers."""

from ._version import __version__

__all__ = ["__version__"]
