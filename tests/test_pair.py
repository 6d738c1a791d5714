"""The shipped pair: it loads, it shares what it says it shares, and the draft is still as good as it was."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import (
    AutoConfig,
    LogitsProcessorList,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from tiny_models import build
from transformers_cactus.demo import Pair, load_pair, pick_arithmetic
from transformers_cactus.demo.pair import SHIPPED_DRAFT
from transformers_cactus.demo.shared_draft import (
    load_shared_draft,
    new_shared_draft,
    own_parameters,
    save_shared_draft,
)

# Sampled from the verifier at temperature 0.6, top-k 20, top-p 0.95; never trained on.
CHATS = [
    (
        "I'd like to schedule a wedding. Can you assist with that?",
        "I'd be happy to help with that. What kind of wedding are you envisioning? Are you looking for a wedding "
        "that's a mix of traditional and modern? Or do you have a specific style or theme in mind?",
    ),
    (
        "Can you provide me with some statistical methods that could help in evaluating the effectiveness of my "
        "product in reducing plastic waste?",
        "I'm sorry for the error. Unfortunately, I don't have the capability to provide statistical methods, but I "
        "can certainly explain how we can use data analysis to evaluate the effectiveness of your product in reducing "
        "plastic waste.",
    ),
    (
        "If there's one thing that's always unachievable, it's to be human.",
        "The human. The very definition of a being that can't be measured. Every moment, every struggle, is unique, "
        "and that's what makes them so endlessly interesting.",
    ),
]


@pytest.fixture(scope="module")
def pair() -> Pair:
    return load_pair(dtype=torch.float32)


def test_both_models_use_the_same_embedding_and_rows_of_one_output_matrix(pair: Pair):
    embedding, output = pair.verifier.get_input_embeddings().weight, pair.verifier.get_output_embeddings().weight
    assert pair.draft.get_input_embeddings().weight.data_ptr() == embedding.data_ptr() == output.data_ptr()
    proposed = pair.draft.get_output_embeddings()
    assert len(proposed.tokens) == 8192
    assert torch.equal(proposed.weight, output[proposed.tokens])
    assert pair.tokenizer.eos_token_id in proposed.tokens


def test_shipped_draft_is_small():
    assert (SHIPPED_DRAFT / "model.safetensors").stat().st_size <= 16_000_000


def test_models_bring_no_generation_defaults(pair: Pair):
    for model in (pair.verifier, pair.draft):
        changed = model.generation_config.to_diff_dict()
        assert set(changed) <= {"bos_token_id", "eos_token_id", "pad_token_id", "transformers_version"}
        assert not model.training and model.dtype == torch.float32


@torch.inference_mode()
def acceptance(pair: Pair, question: str, answer: str) -> torch.Tensor:
    """`sum(min(p, q))` at every position of the answer."""
    chat = [{"role": "user", "content": question}]
    prompt = pair.tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
    begin = len(pair.tokenizer(prompt, add_special_tokens=False).input_ids)
    ids = pair.tokenizer(prompt + answer, add_special_tokens=False, return_tensors="pt").input_ids
    warp = LogitsProcessorList([TemperatureLogitsWarper(0.6), TopKLogitsWarper(20), TopPLogitsWarper(0.95)])
    p, q = (warp(ids, model(ids).logits[0, begin - 1 : -1]).softmax(-1) for model in (pair.draft, pair.verifier))
    return torch.minimum(p, q).sum(-1)


def test_lossless_acceptance_does_not_regress(pair: Pair):
    accepted = torch.cat([acceptance(pair, *chat) for chat in CHATS])
    assert accepted.mean() > 0.51  # 0.545 when it was trained


def test_shared_draft_survives_saving(tmp_path: Path):
    verifier, draft = build("llama", layers=3), new_shared_draft(build("llama", layers=2).config, build("llama"))
    for parameter in own_parameters(draft).values():
        parameter.data = parameter.data.bfloat16().float()
    save_shared_draft(draft, tmp_path)
    assert len(load_file(tmp_path / "model.safetensors")) == len(own_parameters(draft))

    again = load_shared_draft(str(tmp_path), AutoConfig.from_pretrained(tmp_path), verifier)
    ids = torch.arange(9)[None]
    assert torch.equal(again(ids).logits, draft(ids).logits)
    assert again.get_output_embeddings().weight.data_ptr() == verifier.get_output_embeddings().weight.data_ptr()


def test_a_draft_is_no_verifier():
    with pytest.raises(ValueError, match=r"^cannot load the verifier .*needs a verifier's embedding"):
        load_pair(SHIPPED_DRAFT, dtype=torch.float32)


def test_missing_models_are_named_in_one_line():
    with pytest.raises(OSError, match=r"^cannot load the verifier /no/such/model: there is no such folder$"):
        load_pair("/no/such/model", dtype=torch.float32)
    with pytest.raises(OSError, match=r"^cannot load the draft \./no-such-draft: there is no such folder$"):
        load_pair(draft="./no-such-draft", dtype=torch.float32)


def test_shipped_draft_refuses_another_verifier():
    with pytest.raises(ValueError, match="hidden size 576 and vocabulary 49152, but this verifier has 48 and 97"):
        new_shared_draft(AutoConfig.from_pretrained(SHIPPED_DRAFT), build("llama"))


def test_arithmetic_is_one_that_runs_here_and_bfloat16_on_accelerators():
    dtype, packed, int8_draft = pick_arithmetic()
    assert dtype in (torch.float32, torch.bfloat16) and not (packed and dtype == torch.bfloat16)
    assert isinstance(int8_draft, bool)
    assert pick_arithmetic("cuda") == (torch.bfloat16, False, False)
