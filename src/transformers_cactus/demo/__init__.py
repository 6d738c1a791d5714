"""A real model pair that needs no set-up: a small instruct model and a draft made for it, shipped with the package."""

from .pair import Pair, load_pair
from .precision import pick_dtype

__all__ = ["Pair", "load_pair", "pick_dtype"]
