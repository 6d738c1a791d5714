"""A real model pair that needs no set-up: a small instruct model and a draft made for it, shipped with the package."""

from .arithmetic import Arithmetic, pick_arithmetic
from .int8_layers import quantize_linear_layers
from .packed_linear import pack_linear_layers
from .pair import Pair, load_pair

__all__ = ["Arithmetic", "Pair", "load_pair", "pack_linear_layers", "pick_arithmetic", "quantize_linear_layers"]
