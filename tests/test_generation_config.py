"""`cactus_*` options in `generation_config.json`: saved, loaded, honoured, and overruled by a call."""

import pytest
import torch
from transformers import AutoModelForCausalLM, GenerationConfig

import tiny_models
import transformers_cactus
from transformers_cactus import Cactus, DeltaBetween, TopK

PROMPT = torch.tensor([[5, 17, 33, 8, 64, 21]])
OPTIONS = {"do_sample": True, "max_new_tokens": 16, "return_dict_in_generate": True}


@pytest.fixture
def loaded(tmp_path):
    """A verifier that was saved with options and loaded again, enabled, and its draft."""
    verifier, draft = tiny_models.pair("llama")
    verifier.generation_config = GenerationConfig(
        cactus_delta=0.75, cactus_rule="cactus-exact", cactus_engine="stock", pad_token_id=tiny_models.PAD
    )
    verifier.save_pretrained(tmp_path)
    verifier = AutoModelForCausalLM.from_pretrained(tmp_path)
    with transformers_cactus.enabled(verifier):
        yield verifier, draft


def generated(verifier, *, seed=0, **options):
    torch.manual_seed(seed)
    return verifier.generate(PROMPT, **OPTIONS | options)


def test_loaded_options_are_honoured(loaded):
    verifier, draft = loaded
    assert verifier.generation_config.cactus_delta == 0.75
    output = generated(verifier, assistant_model=draft)
    explicit = {"cactus_delta": 0.75, "cactus_rule": "cactus-exact", "cactus_engine": "stock"}
    bare = AutoModelForCausalLM.from_pretrained(verifier.name_or_path, generation_config=GenerationConfig())
    with transformers_cactus.enabled(bare):
        same = generated(bare, assistant_model=draft, **explicit)
    assert torch.equal(output.sequences, same.sequences)
    assert output.acceptance.divergence == same.acceptance.divergence
    assert 0 < max(output.acceptance.divergence) <= 0.75 + 1e-6  # the exact rule's promise


def test_a_call_wins(loaded):
    verifier, draft = loaded
    lossless = generated(verifier, assistant_model=draft, cactus_delta=0.0)
    assert lossless.acceptance.total_divergence == 0
    config = GenerationConfig(cactus_delta=0.0)
    by_config = generated(verifier, assistant_model=draft, generation_config=config)
    assert torch.equal(by_config.sequences, lossless.sequences)
    argument = generated(verifier, assistant_model=draft, generation_config=config, cactus_delta=0.75)
    assert argument.acceptance.total_divergence > 0
    assert verifier.generation_config.cactus_delta == 0.75 and config.cactus_delta == 0.0


def test_none_turns_it_off(loaded):
    verifier, draft = loaded
    output = generated(verifier, assistant_model=draft, cactus_delta=None)
    assert "acceptance" not in output
    output = generated(verifier, assistant_model=draft, generation_config=GenerationConfig(cactus_delta=None))
    assert "acceptance" not in output


@pytest.mark.parametrize(
    "options",
    [
        {"cactus_delta": DeltaBetween(7, 8, 0.5)},
        {"cactus_rule": Cactus(0.5)},
        {"cactus_rule": TopK(3)},
    ],
)
def test_objects_are_not_saved_as_if_they_were_nothing(loaded, tmp_path, options):
    verifier, draft = loaded
    verifier.generation_config = GenerationConfig(**options)
    if "cactus_rule" in options:
        assert generated(verifier, assistant_model=draft).acceptance.rounds > 0
    assert "is no number, name or list" in repr(verifier.generation_config)
    verifier.save_pretrained(tmp_path / "objects")
    saved = AutoModelForCausalLM.from_pretrained(tmp_path / "objects")
    with (
        transformers_cactus.enabled(saved),
        pytest.raises((TypeError, ValueError), match=r"(DeltaBetween|Cactus|TopK)\(.* is no number, name or list"),
    ):
        generated(saved, assistant_model=draft)


def test_without_a_draft_the_model_generates_plainly_and_says_so(loaded):
    verifier, _ = loaded
    with pytest.warns(UserWarning, match="this call has no draft"):
        output = generated(verifier)
    assert "acceptance" not in output


def test_what_is_wrong_in_the_file_is_said(loaded, tmp_path):
    verifier, draft = loaded
    verifier.generation_config.cactus_detla = 0.5
    verifier.save_pretrained(tmp_path / "wrong")
    wrong = AutoModelForCausalLM.from_pretrained(tmp_path / "wrong")
    with (
        transformers_cactus.enabled(wrong),
        pytest.raises(TypeError, match=r"generation_config entry 'cactus_detla'\. Did you mean 'cactus_delta'"),
    ):
        generated(wrong, assistant_model=draft)
