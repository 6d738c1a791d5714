"""Linear layers for processors on which a few rows cost much more than one.

PyTorch multiplies float32 matrices on a processor with MKL, which repacks the weight at every call that has more than
one row; on processors that it is not tuned for, five rows then take almost twice as long as one, and speculative
decoding cannot pay. oneDNN, which is part of PyTorch too, takes a weight that was packed once.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from .replacing import is_linear, linear_layers, replace_modules

TYPICAL_ROWS = 5
"""Rows that the layout of a packed weight is chosen for: a block of four drafted tokens and one more."""


class PackedLinear(nn.Linear):
    """A linear layer, for inference in float32 on a processor, that holds a second, packed copy of its weight.

    The plain weight stays what it was, shared with whatever shares it; a change of it after packing has no effect on
    what the layer computes.

    Args:
        linear (`torch.nn.Linear`): The layer to replace.
    """

    packed: Tensor

    def __init__(self, linear: nn.Linear):
        nn.Module.__init__(self)
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.weight, self.bias = linear.weight, linear.bias
        self.packed = pack(linear.weight)

    def forward(self, hidden: Tensor) -> Tensor:
        """Multiplies `[..., in_features]`; returns `[..., out_features]`."""
        return multiply(hidden, self.packed, self.bias)


def pack(weight: Tensor) -> Tensor:
    """A copy of a weight `[out, in]` in oneDNN's own layout, for [`multiply`] only."""
    return torch.ops.mkldnn._reorder_linear_weight(weight.detach(), TYPICAL_ROWS)


def multiply(hidden: Tensor, packed: Tensor, bias: Tensor | None = None) -> Tensor:
    """`hidden @ weight.T + bias` with a packed weight."""
    return torch.ops.mkldnn._linear_pointwise(hidden, packed, bias, "none", [], "")


def can_pack() -> bool:
    """Whether this build of PyTorch has the operators."""
    return torch.backends.mkldnn.is_available() and hasattr(torch.ops.mkldnn, "_linear_pointwise")


def pack_linear_layers(model: nn.Module) -> None:
    """Replace every linear layer of a model, in place.

    Args:
        model (`torch.nn.Module`): In float32, on a processor.

    Raises:
        ValueError: If it is not, or if this build of PyTorch lacks the operators.
    """
    _check(linear_layers(model))
    replace_modules(model, is_linear, PackedLinear)


def _check(linears: list[nn.Linear]) -> None:
    if not can_pack():
        raise ValueError("this build of PyTorch has no oneDNN: leave the linear layers as they are")
    kinds = {(linear.weight.device.type, linear.weight.dtype) for linear in linears}
    if kinds - {("cpu", torch.float32)}:
        found = ", ".join(f"{dtype} on {device}" for device, dtype in kinds)
        raise ValueError(f"only float32 on a processor can be packed, but the model has layers of {found}")
