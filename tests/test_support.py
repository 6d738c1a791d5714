"""Which models may run on ragged batches."""

import pytest

import tiny_models
from transformers_cactus.support import supports_ragged

LONGROPE = {"rope_type": "longrope", "rope_theta": 10_000.0, "short_factor": [1.0] * 6, "long_factor": [2.0] * 6}


@pytest.mark.parametrize(("name", "attention"), tiny_models.VARIANTS)
def test_decoders_are_supported(name: str, attention: str) -> None:
    assert supports_ragged(tiny_models.build(name, attention=attention)) is None


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("bloom", "ALiBi"),
        ("falcon_alibi", "ALiBi"),
        ("mamba", "state"),
        ("qwen3_next", "linear_attention"),
        ("t5", "encoder-decoder"),
        ("whisper", "encoder-decoder"),
        ("llava", "more than text"),
    ],
)
def test_others_are_refused(name: str, reason: str) -> None:
    assert reason in str(supports_ragged(tiny_models.build(name)))


@pytest.mark.parametrize("attention", ["flash_attention_2", "flash_attention_3", "flex_attention", "paged|sdpa"])
def test_attention_without_a_mask_per_row_is_refused(attention: str) -> None:
    model = tiny_models.build("llama")
    model.config._attn_implementation_internal = attention
    assert attention in str(supports_ragged(model))


@pytest.mark.parametrize("setting", [{"sliding_window": 8}, {"layer_types": ["sliding_attention"] * 3}])
def test_settings_that_the_class_does_not_know_are_refused(setting: dict[str, object]) -> None:
    model = tiny_models.build("llama")
    for key, value in setting.items():
        setattr(model.config, key, value)
    assert next(iter(setting)) in str(supports_ragged(model))


def test_rotary_frequencies_that_depend_on_the_batch() -> None:
    model = tiny_models.build("phi3")
    model.config.rope_parameters = LONGROPE | {"original_max_position_embeddings": 100}
    assert supports_ragged(model, max_length=100) is None
    assert "100 tokens" in str(supports_ragged(model, max_length=101))
    assert "100 tokens" in str(supports_ragged(model))
