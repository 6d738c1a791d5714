"""Aligned prompts and the arguments of a forward."""

import pytest
import torch

import tiny_models
from transformers_cactus._compat import cache_argument
from transformers_cactus.cache import RaggedCache
from transformers_cactus.inputs import forward_inputs, left_align, prefill


@pytest.mark.parametrize("padding_side", ["left", "right"])
def test_left_align_moves_tokens_to_the_start(padding_side: str) -> None:
    inputs = tiny_models.prompts([2, 5, 3], padding_side=padding_side)
    rows, lengths = left_align(**inputs)
    assert lengths.tolist() == [2, 5, 3]
    for row, ids, mask in zip(rows, inputs["input_ids"], inputs["attention_mask"], strict=True):
        kept = ids[mask.bool()]
        assert torch.equal(row[: len(kept)], kept)


def test_left_align_closes_gaps_and_drops_common_padding() -> None:
    ids = torch.tensor([[9, 4, 9, 5], [9, 9, 6, 7]])
    rows, lengths = left_align(ids, torch.tensor([[0, 1, 0, 1], [0, 0, 1, 1]]))
    assert rows.tolist() == [[4, 5], [6, 7]]
    assert lengths.tolist() == [2, 2]


def test_left_align_without_mask() -> None:
    ids = torch.ones(2, 3, dtype=torch.long)
    rows, lengths = left_align(ids)
    assert torch.equal(rows, ids)
    assert lengths.tolist() == [3, 3]


def test_prefill_leaves_the_last_token() -> None:
    model = tiny_models.build("llama")
    rows, lengths = left_align(**tiny_models.prompts([4, 1, 2]))
    cache = RaggedCache(3)
    with torch.no_grad():
        prefill(model, cache, rows, lengths)
    assert cache.lengths.tolist() == [3, 0, 1]


def test_prefill_of_single_tokens_runs_no_forward() -> None:
    cache = RaggedCache(2)
    prefill(None, cache, torch.ones(2, 1, dtype=torch.long), torch.ones(2, dtype=torch.long))
    assert cache.lengths.tolist() == [0, 0]


def test_forward_inputs_name_the_cache_as_the_model_does() -> None:
    model = tiny_models.build("llama")
    cache = RaggedCache(2)
    inputs = forward_inputs(model, cache, torch.ones(2, 3, dtype=torch.long), logits_to_keep=1)
    assert inputs[cache_argument(model)] is cache
    assert inputs["position_ids"].tolist() == [[0, 1, 2]] * 2
    with torch.no_grad():
        assert model(**inputs).logits.shape[1] == 1
