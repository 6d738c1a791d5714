"""Whole decoder layers with 8-bit weights, for drafts on a processor.

Behind a verifier's forward, which leaves nothing of a draft in the caches of a processor, each operation costs tens of
microseconds whatever it computes, and a draft step is little else. So a layer here multiplies four times where
transformers' does seven times, with fewer operations around that.
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers.models.llama.modeling_llama import LlamaDecoderLayer

from .int8_linear import Int8Linear, can_quantize, has_fitting_rows
from .packed_linear import PackedLinear
from .replacing import is_linear, linear_layers, replace_modules


class Int8LlamaLayer(nn.Module):
    """A decoder layer of Llama, for inference: the same function, in 8-bit weights and bfloat16 activations.

    The residual stream, rotary embedding, attention and the cache keep the layer's own dtype.

    Args:
        layer (`LlamaDecoderLayer`): The layer to replace; one that `can_join` allows.
    """

    def __init__(self, layer: LlamaDecoderLayer):
        super().__init__()
        attention, feed_forward = layer.self_attn, layer.mlp
        self.layer_idx, self.head_dim, self.scaling = attention.layer_idx, attention.head_dim, attention.scaling
        projections = (attention.q_proj, attention.k_proj, attention.v_proj)
        heads = [projection.out_features // self.head_dim for projection in projections]
        self.queries, self.rotated, self.heads = heads[0], heads[0] + heads[1], sum(heads)
        self.attention_input = _joined(*projections)
        self.attention_output = _joined(attention.o_proj)
        self.gate_and_up = _joined(feed_forward.gate_proj, feed_forward.up_proj)
        self.down = _joined(feed_forward.down_proj)
        self.attention_norm, self.feed_forward_norm = layer.input_layernorm, layer.post_attention_layernorm

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None = None,
        *,
        position_embeddings: tuple[Tensor, Tensor],
        cache: Any = None,
        past_key_values: Any = None,
        **_: Any,
    ) -> Tensor:
        """Hidden states `[batch, tokens, hidden]` behind the layer, with the arguments of transformers' own.

        Releases of it differ in what they call the cache. The arguments that are not named say how a layer computes,
        and not what.
        """
        # Not `or`: an empty cache is false.
        cache = past_key_values if cache is None else cache
        batch, tokens = hidden_states.shape[:2]

        states = self.attention_input(_normed(hidden_states, self.attention_norm)).to(hidden_states.dtype)
        states = states.view(batch, tokens, self.heads, self.head_dim).transpose(1, 2)
        rotated = _rotated(states[:, : self.rotated], *position_embeddings)
        keys, values = rotated[:, self.queries :], states[:, self.rotated :]
        if cache is not None:
            keys, values = cache.update(keys, values, self.layer_idx)
        attended = functional.scaled_dot_product_attention(
            rotated[:, : self.queries],
            keys,
            values,
            attn_mask=attention_mask,
            is_causal=attention_mask is None and tokens > 1,
            scale=self.scaling,
            enable_gqa=True,
        )
        attended = attended.transpose(1, 2).reshape(batch, tokens, -1).to(torch.bfloat16)
        hidden_states = hidden_states + self.attention_output(attended)

        gate, up = self.gate_and_up(_normed(hidden_states, self.feed_forward_norm)).chunk(2, dim=-1)
        return hidden_states + self.down(functional.silu(gate) * up)


def _joined(*linears: nn.Linear) -> Int8Linear:
    """One multiplication that gives the outputs of several, one behind another."""
    joined = nn.Linear(
        linears[0].in_features, sum(linear.out_features for linear in linears), bias=False, device="meta"
    )
    joined.weight = nn.Parameter(torch.cat([linear.weight.detach() for linear in linears]), requires_grad=False)
    return Int8Linear(joined)


def _normed(hidden_states: Tensor, norm: Any) -> Tensor:
    normed = functional.rms_norm(hidden_states, hidden_states.shape[-1:], norm.weight, norm.variance_epsilon)
    return normed.to(torch.bfloat16)


def _rotated(states: Tensor, cosines: Tensor, sines: Tensor) -> Tensor:
    """Rotary embedding of `[batch, heads, tokens, head_dim]`; cosines and sines `[batch, tokens, head_dim]`."""
    first, second = states.chunk(2, dim=-1)
    return torch.addcmul(states * cosines[:, None], torch.cat((-second, first), dim=-1), sines[:, None])


def can_join(layer: nn.Module) -> bool:
    """Whether a layer is Llama's, without the biases and other activations that some have."""
    if type(layer) is not LlamaDecoderLayer:
        return False
    linears = [module for module in layer.modules() if isinstance(module, nn.Linear)]
    plain = all(can_replace(linear) and linear.bias is None for linear in linears)
    some, activation = torch.tensor([-1.0, 2.0]), cast(Any, layer.mlp).act_fn
    return plain and torch.equal(activation(some), functional.silu(some))


def can_replace(module: nn.Module) -> bool:
    """Whether a module is a linear layer that [`Int8Linear`] can stand for."""
    return is_linear(module) and has_fitting_rows(module)


def quantize_linear_layers(draft: nn.Module) -> None:
    """Give every linear layer of a draft 8-bit weights, in place. It cannot be saved from then on.

    Llama's decoder layers become [`Int8LlamaLayer`]s, all other linear layers [`Int8Linear`]s. Those whose number of
    inputs is not a multiple of 16 stay as they are.

    Args:
        draft (`torch.nn.Module`): On a processor.

    Raises:
        ValueError: If it is elsewhere, if layers are packed already, or if this build of PyTorch lacks the operator.
    """
    _check(linear_layers(draft))
    if any(isinstance(module, PackedLinear) for module in draft.modules()):
        raise ValueError("packed layers cannot be quantized: quantize a draft instead of packing it")
    replace_modules(draft, can_join, Int8LlamaLayer)
    replace_modules(draft, can_replace, Int8Linear)


def _check(linears: list[nn.Linear]) -> None:
    if not can_quantize():
        raise ValueError("this build of PyTorch multiplies no 8-bit weights: leave the linear layers as they are")
    elsewhere = {linear.weight.device.type for linear in linears} - {"cpu"}
    if elsewhere:
        raise ValueError(f"only layers on a processor are quantized, but the draft is on {', '.join(elsewhere)}")
