"""Linear layers with 8-bit weights, for drafts on a processor.

A draft reads all its weights for every token, so its time is the time of that reading. In 8 bits there is half of what
bfloat16 has and a quarter of float32. What the draft proposes it still samples from its own distribution, so
acceptance stays exact: a rounded draft may be accepted less often, and nothing else.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

MOST_ROWS = 32
"""Rows from which PyTorch's 8-bit multiplication, made for a few, is slower than one in float32."""

PIECE = 16
"""Numbers of a row that the operator may take at once. Rows of other lengths were seen to crash it or to come out
wrong, on a processor on which multiples of 8 were enough."""


class Int8Linear(nn.Module):
    """A linear layer, for inference on a processor, with a weight of 8 bits and a scale per output.

    Args:
        linear (`torch.nn.Linear`): The layer to replace.
    """

    weight: Tensor
    """The weight before scaling, `[out_features, in_features]`, int8."""
    scales: Tensor
    """`[out_features]`, bfloat16."""

    def __init__(self, linear: nn.Linear):
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.bias = linear.bias
        weight, scales = quantize(linear.weight)
        self.register_buffer("weight", weight)
        self.register_buffer("scales", scales)

    def _save_to_state_dict(self, *_: Any) -> None:
        # What loads a draft knows nothing of scales, and would take the 8-bit numbers for weights.
        raise ValueError("a draft with 8-bit weights cannot be saved: save it first, and quantize it where it runs")

    def forward(self, hidden: Tensor) -> Tensor:
        """Multiplies `[..., in_features]`; returns `[..., out_features]` in the same dtype."""
        rows = hidden.reshape(-1, self.in_features)
        if len(rows) > MOST_ROWS:
            product = functional.linear(rows.float(), self.weight.float()) * self.scales.float()
        else:
            product = multiply(rows, self.weight, self.scales)
        product = product.to(hidden.dtype).view(*hidden.shape[:-1], self.out_features)
        return product if self.bias is None else product + self.bias


def quantize(weight: Tensor) -> tuple[Tensor, Tensor]:
    """A weight `[out, in]` in 8 bits, and the scale of each output in bfloat16."""
    weight = weight.detach().float()
    # Rounded before the division, so that what is divided makes up for it.
    scales = (weight.abs().amax(1) / 127).clamp(min=1e-12).to(torch.bfloat16)
    rounded = (weight / scales.float()[:, None]).round().clamp(-127, 127)
    return rounded.to(torch.int8), scales


def multiply(rows: Tensor, weight: Tensor, scales: Tensor) -> Tensor:
    """`rows @ (weight * scales).T` in bfloat16, the type in which PyTorch is fast at this."""
    return torch._weight_int8pack_mm(rows.to(torch.bfloat16), weight, scales)


def has_fitting_rows(linear: nn.Linear) -> bool:
    """Whether the operator can multiply a layer. It does not check, and reads beyond rows that do not fit."""
    return linear.in_features % PIECE == 0


def can_quantize() -> bool:
    """Whether this build of PyTorch has the operator."""
    return hasattr(torch, "_weight_int8pack_mm")
