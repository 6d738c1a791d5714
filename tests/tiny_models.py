"""Tiny, randomly initialised models of real architectures, in float32, for every test that needs a model.

`initializer_range` is large (0.3) so that greedy text varies instead of repeating one token, and no model has an EOS
unless a test gives one to `generate`.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import transformers
from transformers import PreTrainedModel

VOCAB = 97
WINDOW = 8
IMAGE_TOKEN = 96
PAD = 0

_COMMON = {
    "vocab_size": VOCAB,
    "pad_token_id": PAD,
    "bos_token_id": 1,
    "eos_token_id": None,
    "initializer_range": 0.3,
    "tie_word_embeddings": False,
}


def _llama_like(hidden: int, layers: int, **extra: Any) -> dict[str, Any]:
    """Return the names that most decoder-only configurations share."""
    sizes = {
        "hidden_size": hidden,
        "intermediate_size": 2 * hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": hidden // 4,
        "max_position_embeddings": 256,
    }
    return _COMMON | sizes | extra


def _alternating(layers: int) -> list[str]:
    return ["sliding_attention" if layer % 2 == 0 else "full_attention" for layer in range(layers)]


def _llama(hidden: int, layers: int) -> Any:
    return transformers.LlamaConfig(**_llama_like(hidden, layers))


def _qwen2(hidden: int, layers: int) -> Any:
    return transformers.Qwen2Config(**_llama_like(hidden, layers))


def _qwen2_sliding(hidden: int, layers: int) -> Any:
    extra = {"use_sliding_window": True, "sliding_window": WINDOW, "layer_types": _alternating(layers)}
    return transformers.Qwen2Config(**_llama_like(hidden, layers, **extra))


def _qwen3(hidden: int, layers: int) -> Any:
    return transformers.Qwen3Config(**_llama_like(hidden, layers))


def _mistral(hidden: int, layers: int) -> Any:
    return transformers.MistralConfig(**_llama_like(hidden, layers, sliding_window=WINDOW))


def _gemma2(hidden: int, layers: int) -> Any:
    extra = {"sliding_window": WINDOW, "layer_types": _alternating(layers), "query_pre_attn_scalar": hidden // 4}
    return transformers.Gemma2Config(**_llama_like(hidden, layers, **extra))


def _gemma3(hidden: int, layers: int) -> Any:
    extra = {"sliding_window": WINDOW, "layer_types": _alternating(layers), "query_pre_attn_scalar": hidden // 4}
    return transformers.Gemma3TextConfig(**_llama_like(hidden, layers, **extra))


def _phi3(hidden: int, layers: int) -> Any:
    return transformers.Phi3Config(**_llama_like(hidden, layers, sliding_window=WINDOW))


def _gpt2(hidden: int, layers: int) -> Any:
    sizes = {"n_embd": hidden, "n_layer": layers, "n_head": 4, "n_positions": 256}
    return transformers.GPT2Config(**_COMMON | sizes)


def _gpt_neox(hidden: int, layers: int) -> Any:
    return transformers.GPTNeoXConfig(**_llama_like(hidden, layers))


def _opt(hidden: int, layers: int) -> Any:
    sizes = {
        "hidden_size": hidden,
        "word_embed_proj_dim": hidden,
        "ffn_dim": 2 * hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": 4,
        "max_position_embeddings": 256,
        "init_std": 0.3,
    }
    return transformers.OPTConfig(**_COMMON | sizes)


def _mixtral(hidden: int, layers: int) -> Any:
    extra = {"num_local_experts": 4, "num_experts_per_tok": 2}
    return transformers.MixtralConfig(**_llama_like(hidden, layers, **extra))


def _qwen3_moe(hidden: int, layers: int) -> Any:
    extra = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": hidden}
    return transformers.Qwen3MoeConfig(**_llama_like(hidden, layers, **extra))


def _llama4(hidden: int, layers: int) -> Any:
    extra = {
        "intermediate_size_mlp": 2 * hidden,
        "num_local_experts": 2,
        "attention_chunk_size": WINDOW,
        "layer_types": ["chunked_attention" if layer % 2 == 0 else "full_attention" for layer in range(layers)],
        "no_rope_layers": [(layer + 1) % 2 for layer in range(layers)],
    }
    return transformers.Llama4TextConfig(**_llama_like(hidden, layers, **extra))


def _gpt_oss(hidden: int, layers: int) -> Any:
    extra = {
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "sliding_window": WINDOW,
        "layer_types": _alternating(layers),
        "rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0},
    }
    return transformers.GptOssConfig(**_llama_like(hidden, layers, **extra))


def _bloom(hidden: int, layers: int) -> Any:
    return transformers.BloomConfig(**_COMMON | {"hidden_size": hidden, "n_layer": layers, "n_head": 4})


def _falcon_alibi(hidden: int, layers: int) -> Any:
    sizes = {"hidden_size": hidden, "num_hidden_layers": layers, "num_attention_heads": 4, "alibi": True}
    return transformers.FalconConfig(**_COMMON | sizes | {"new_decoder_architecture": False})


def _mamba(hidden: int, layers: int) -> Any:
    return transformers.MambaConfig(
        **_COMMON | {"hidden_size": hidden, "num_hidden_layers": layers, "state_size": 8, "time_step_rank": 4}
    )


def _qwen3_next(hidden: int, layers: int) -> Any:
    extra = {
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": hidden,
        "shared_expert_intermediate_size": hidden,
        "linear_num_value_heads": 2,
        "linear_num_key_heads": 2,
        "linear_key_head_dim": 8,
        "linear_value_head_dim": 8,
        "layer_types": ["linear_attention" if layer % 2 == 0 else "full_attention" for layer in range(layers)],
    }
    return transformers.Qwen3NextConfig(**_llama_like(hidden, layers, **extra))


def _t5(hidden: int, layers: int) -> Any:
    sizes = {"d_model": hidden, "d_kv": hidden // 4, "d_ff": 2 * hidden, "num_layers": layers, "num_heads": 4}
    return transformers.T5Config(**_COMMON | sizes | {"decoder_start_token_id": PAD, "initializer_factor": 2.0})


def _whisper(hidden: int, layers: int) -> Any:
    sizes = {
        "d_model": hidden,
        "encoder_layers": 1,
        "encoder_attention_heads": 4,
        "encoder_ffn_dim": 2 * hidden,
        "decoder_layers": layers,
        "decoder_attention_heads": 4,
        "decoder_ffn_dim": 2 * hidden,
        "num_mel_bins": 8,
        "max_source_positions": 20,
        "max_target_positions": 128,
        "decoder_start_token_id": 1,
        "begin_suppress_tokens": None,
        "suppress_tokens": None,
        "init_std": 0.3,
    }
    return transformers.WhisperConfig(**_COMMON | sizes)


def _llava(hidden: int, layers: int) -> Any:
    vision = transformers.CLIPVisionConfig(
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        image_size=8,
        patch_size=4,
        initializer_factor=10.0,
    )
    return transformers.LlavaConfig(
        vision_config=vision,
        text_config=_llama(hidden, layers),
        image_token_index=IMAGE_TOKEN,
        image_seq_length=4,
        initializer_range=0.3,
        pad_token_id=PAD,
        eos_token_id=None,
        tie_word_embeddings=False,
    )


@dataclass(frozen=True)
class Tiny:
    """How to build one architecture, and the attention implementations that it has."""

    config: Callable[[int, int], Any]
    auto_class: str = "AutoModelForCausalLM"
    attention: tuple[str, ...] = field(default=("sdpa", "eager"))


DECODERS: dict[str, Tiny] = {
    "llama": Tiny(_llama),
    "qwen2": Tiny(_qwen2),
    "qwen2_sliding": Tiny(_qwen2_sliding),
    "qwen3": Tiny(_qwen3),
    "mistral": Tiny(_mistral),
    "gemma2": Tiny(_gemma2, attention=("eager",)),
    "gemma3": Tiny(_gemma3),
    "phi3": Tiny(_phi3),
    "gpt2": Tiny(_gpt2),
    "gpt_neox": Tiny(_gpt_neox),
    "opt": Tiny(_opt),
    "mixtral": Tiny(_mixtral),
    "qwen3_moe": Tiny(_qwen3_moe),
    "llama4": Tiny(_llama4),
    "gpt_oss": Tiny(_gpt_oss, attention=("eager",)),
}
"""Decoder-only models whose cache holds a key and a value per token."""

OTHERS: dict[str, Tiny] = {
    "bloom": Tiny(_bloom, attention=("eager",)),
    "falcon_alibi": Tiny(_falcon_alibi),
    "mamba": Tiny(_mamba, attention=("eager",)),
    "qwen3_next": Tiny(_qwen3_next),
    "t5": Tiny(_t5, "AutoModelForSeq2SeqLM"),
    "whisper": Tiny(_whisper, "AutoModelForSpeechSeq2Seq"),
    "llava": Tiny(_llava, "AutoModelForImageTextToText"),
}
"""Models with ALiBi, recurrent state, an encoder, or images."""

ALL = DECODERS | OTHERS

VARIANTS = [(name, attention) for name, tiny in DECODERS.items() for attention in tiny.attention]
"""Each decoder-only model with each of its attention implementations, for parametrisation."""


def build(name: str, *, seed: int = 0, hidden: int = 48, layers: int = 3, attention: str | None = None) -> Any:
    """Build one tiny model.

    Args:
        name: a key of `ALL`.
        seed: of the random weights; the global random state is left as it was.
        hidden: hidden size, a multiple of 8.
        layers: number of (decoder) layers.
        attention: attention implementation; the first that the architecture has where it is None.

    Returns:
        The model in float32 on the CPU, in evaluation mode.
    """
    tiny = ALL[name]
    auto_class = getattr(transformers, tiny.auto_class)
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model: PreTrainedModel = auto_class.from_config(
            tiny.config(hidden, layers), attn_implementation=attention or tiny.attention[0], dtype=torch.float32
        )
    if name == "t5":
        # T5 adds embeddings of unit size to small layer outputs, so that its greedy text would repeat one token.
        model.shared.weight.data.mul_(0.1)
    return model.eval()


def pair(name: str, attention: str | None = None) -> tuple[Any, Any]:
    """Return a verifier and a smaller, differently seeded draft of the same architecture and vocabulary."""
    return (
        build(name, seed=0, hidden=48, layers=3, attention=attention),
        build(name, seed=1, hidden=32, layers=2, attention=attention),
    )


def prompts(lengths: list[int], *, seed: int = 0, padding_side: str = "left") -> dict[str, torch.Tensor]:
    """Return random token prompts of the given lengths, padded to the longest.

    Args:
        lengths: one per row.
        seed: of the tokens.
        padding_side: "left" or "right".

    Returns:
        `input_ids` and `attention_mask`, both `[len(lengths), max(lengths)]`.
    """
    generator = torch.Generator().manual_seed(seed)
    longest = max(lengths)
    input_ids = torch.full((len(lengths), longest), PAD)
    attention_mask = torch.zeros_like(input_ids)
    for row, length in enumerate(lengths):
        columns = slice(longest - length, longest) if padding_side == "left" else slice(0, length)
        input_ids[row, columns] = torch.randint(3, IMAGE_TOKEN, (length,), generator=generator)
        attention_mask[row, columns] = 1
    return {"input_ids": input_ids, "attention_mask": attention_mask}


def generate_inputs(name: str, *, batch: int = 1, length: int = 7, seed: int = 0) -> dict[str, torch.Tensor]:
    """Return what `build(name).generate(**inputs)` needs, without padding.

    Args:
        name: a key of `ALL`.
        batch: number of rows.
        length: number of text tokens in a prompt.
        seed: of the inputs.

    Returns:
        `input_ids` and `attention_mask`; `input_features` instead for Whisper, and `pixel_values` besides for LLaVA,
        whose prompt starts with the four positions of its image.
    """
    generator = torch.Generator().manual_seed(seed)
    if name == "whisper":
        return {"input_features": torch.randn(batch, 8, 40, generator=generator)}
    inputs = prompts([length] * batch, seed=seed)
    if name == "llava":
        image = torch.full((batch, 4), IMAGE_TOKEN)
        inputs["input_ids"] = torch.cat([image, inputs["input_ids"]], dim=1)
        inputs["attention_mask"] = torch.ones_like(inputs["input_ids"])
        inputs["pixel_values"] = torch.randn(batch, 3, 8, 8, generator=generator)
    return inputs
