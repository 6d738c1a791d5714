"""The fast engine with transformers' own candidate generators: early exit, and a draft with another tokenizer."""

import pytest
import torch

import tiny_tokenizers
import transformers_cactus
from tiny_models import VOCAB, build, prompts

FAST = {"cactus_engine": "fast", "return_dict_in_generate": True}
BLOCK = {"num_assistant_tokens": 4, "assistant_confidence_threshold": 0.0}


@pytest.mark.filterwarnings("ignore:.*no effect without sampling.*:UserWarning")
def test_early_exit_equals_plain_greedy():
    verifier, inputs = build("llama"), prompts([7])
    plain = verifier.generate(**inputs, do_sample=False, max_new_tokens=16)
    ours = transformers_cactus.generate(
        verifier, **inputs, do_sample=False, max_new_tokens=16, assistant_early_exit=1, cactus_delta=0.0, **FAST
    )
    assert torch.equal(ours.sequences, plain)
    assert verifier.config.num_hidden_layers == 3


def test_early_exit_keeps_everything_without_a_limit_on_the_budget():
    torch.manual_seed(0)
    options = {"do_sample": True, "top_k": 0, "max_new_tokens": 24, "cactus_delta": float("inf")}
    output = transformers_cactus.generate(
        build("llama"), **prompts([7]), **options, assistant_early_exit=1, **BLOCK, **FAST
    )
    assert output.acceptance.accepted == output.acceptance.drafted > 10
    assert output.acceptance.emitted == 24


@pytest.mark.parametrize("do_sample", [False, True])
def test_a_draft_with_another_tokenizer(do_sample):
    verifier, draft = build("llama"), build("llama", seed=1, hidden=32, layers=1)
    draft.resize_token_embeddings(VOCAB + 3, mean_resizing=False)
    ours, theirs = tiny_tokenizers.build(), tiny_tokenizers.build(["th", "he", "an"], size=VOCAB + 3)
    inputs = ours("the cat and the hat ", return_tensors="pt", return_token_type_ids=False)
    embeddings = draft.get_output_embeddings()
    torch.manual_seed(0)
    output = transformers_cactus.generate(
        verifier,
        **inputs,
        do_sample=True,
        top_k=0 if do_sample else 1,
        max_new_tokens=16,
        assistant_model=draft,
        tokenizer=ours,
        assistant_tokenizer=theirs,
        cactus_delta=0.5,
        **BLOCK,
        **FAST,
    )
    assert output.acceptance.emitted == 16
    assert output.acceptance.drafted > 0
    assert draft.get_output_embeddings() is embeddings
    if not do_sample:
        # Top-k of 1 leaves the verifier's most probable token only, whatever is drafted.
        plain = verifier.generate(**inputs, do_sample=False, max_new_tokens=16)
        assert torch.equal(output.sequences, plain)


@pytest.mark.parametrize("engine", ["fast", "stock"])
def test_case_7_vocabularies_of_one_size_with_other_meanings(engine):
    # Both tokenizers are given, so drafted text is translated, and the text follows the verifier.
    verifier, draft = build("llama"), build("llama", seed=1, hidden=32, layers=1)
    ours, theirs = tiny_tokenizers.build(["ca"]), tiny_tokenizers.build(["th", "he", "an"])
    assert len(ours) == len(theirs) == VOCAB
    inputs = ours("the cat and the hat ", return_tensors="pt", return_token_type_ids=False)
    options = {"assistant_model": draft, "tokenizer": ours, "assistant_tokenizer": theirs, **BLOCK}
    torch.manual_seed(0)
    output = transformers_cactus.generate(
        verifier,
        **inputs,
        do_sample=True,
        top_k=1,
        max_new_tokens=16,
        cactus_delta=0.0,
        cactus_engine=engine,
        return_dict_in_generate=True,
        **options,
    )
    assert output.acceptance.drafted > 0
    assert torch.equal(output.sequences, verifier.generate(**inputs, do_sample=False, max_new_tokens=16))


@pytest.mark.filterwarnings("ignore:.*one after another.*:UserWarning")
def test_a_batch_of_them_runs_one_after_another():
    output = transformers_cactus.generate(
        build("llama"), **prompts([4, 7]), do_sample=True, max_new_tokens=6, assistant_early_exit=1, cactus_delta=0.1
    )
    assert output.shape == (2, 13)
