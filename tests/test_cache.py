"""The ragged batch cache: stored keys and values, lengths, growth, and text that equals plain generation."""

import functools
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import tiny_models
from ragged_driver import plain_greedy, plain_greedy_alone, ragged_greedy
from transformers_cactus.cache import RaggedCache
from transformers_cactus.inputs import forward_inputs, left_align, prefill

HEADS, WIDTH = 2, 4
PROMPT_LENGTHS = [3, 12, 8, 1, 20]
NEW_TOKENS = 40


@functools.cache
def reference(name: str) -> list[list[int]]:
    """What plain `generate` writes for each prompt alone."""
    model = tiny_models.build(name, layers=2)
    return plain_greedy_alone(model, tiny_models.prompts(PROMPT_LENGTHS), NEW_TOKENS)


def states(rows: int, tokens: int) -> torch.Tensor:
    return torch.randn(rows, HEADS, tokens, WIDTH)


def ragged(model: Any, lengths: list[int], **cache_options: Any) -> tuple[RaggedCache, torch.Tensor]:
    """Return a cache that holds prompts of the given lengths but for their last tokens, and those last tokens."""
    rows, row_lengths = left_align(**tiny_models.prompts(lengths))
    cache = RaggedCache(len(rows), **cache_options)
    prefill(model, cache, rows, row_lengths)
    return cache, rows.gather(1, row_lengths[:, None] - 1)


def logits(model: Any, cache: RaggedCache, tokens: torch.Tensor) -> torch.Tensor:
    return model(**forward_inputs(model, cache, tokens)).logits


@pytest.mark.parametrize(("name", "attention"), tiny_models.VARIANTS)
def test_uneven_rows_write_what_each_row_writes_alone(name: str, attention: str) -> None:
    model = tiny_models.build(name, layers=2, attention=attention)
    inputs = tiny_models.prompts(PROMPT_LENGTHS)
    alone = reference(name)
    assert len(set(alone[0])) > 4, "greedy text must vary, or a wrong cache goes unnoticed"
    assert ragged_greedy(model, inputs, NEW_TOKENS, alone) == alone


@pytest.mark.parametrize("name", tiny_models.DECODERS)
def test_uneven_rows_write_what_plain_generate_writes_for_the_batch(name: str) -> None:
    model = tiny_models.build(name, layers=2)
    inputs = tiny_models.prompts(PROMPT_LENGTHS)
    assert ragged_greedy(model, inputs, NEW_TOKENS, reference(name), seed=1) == plain_greedy(model, inputs, NEW_TOKENS)


@pytest.mark.parametrize("name", ["llama", "gemma3"])
@pytest.mark.parametrize("lengths", [[12], [9, 9, 9]])
@pytest.mark.parametrize("tell_host", [True, False])
def test_equal_rows_with_and_without_the_host_knowing(name: str, lengths: list[int], tell_host: bool) -> None:
    model = tiny_models.build(name)
    inputs = tiny_models.prompts(lengths)
    plain = plain_greedy(model, inputs, 20)
    assert ragged_greedy(model, inputs, 20, plain, tell_host=tell_host) == plain


@pytest.mark.parametrize("padding_side", ["left", "right"])
def test_either_padding_side(padding_side: str) -> None:
    model = tiny_models.build("llama", layers=2)
    inputs = tiny_models.prompts(PROMPT_LENGTHS, padding_side=padding_side)
    alone = reference("llama")
    assert ragged_greedy(model, inputs, NEW_TOKENS, alone, tell_host=False) == alone


class Oracle:
    """The same operations on one list of keys per row."""

    def __init__(self, rows: int) -> None:
        self.rows = [torch.zeros(HEADS, 0, WIDTH) for _ in range(rows)]

    def append(self, new: torch.Tensor, counts: list[int]) -> None:
        kept = [keys[:, :count] for keys, count in zip(new, counts, strict=True)]
        self.rows = [torch.cat(pair, 1) for pair in zip(self.rows, kept, strict=True)]

    def cut(self, counts: list[int]) -> None:
        self.rows = [row[:, : row.shape[1] - count] for row, count in zip(self.rows, counts, strict=True)]


@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_holds_exactly_what_was_committed(data: st.DataObject) -> None:
    torch.manual_seed(0)
    batch = data.draw(st.integers(1, 4))
    cache, oracle = RaggedCache(batch), Oracle(batch)
    for _ in range(data.draw(st.integers(1, 12))):
        batch = len(oracle.rows)
        tokens = data.draw(st.sampled_from([1, 2, 5, 40]))
        new = states(batch, tokens)
        returned = [cache.update(new, -new, layer)[0] for layer in range(2)]
        assert all(keys.shape[2] == cache.rows.longest + tokens for keys in returned)
        counts = data.draw(st.lists(st.integers(0, tokens), min_size=batch, max_size=batch))
        known = data.draw(st.booleans())
        cache.commit(counts if known else torch.tensor(counts))
        oracle.append(new, counts)
        action = data.draw(st.sampled_from(["go on", "roll back", "keep", "repeat", "tell"]))
        if action == "roll back":
            counts = [data.draw(st.integers(0, row.shape[1])) for row in oracle.rows]
            cache.roll_back(counts if known else torch.tensor(counts))
            oracle.cut(counts)
        elif action == "keep":
            rows = data.draw(st.lists(st.integers(0, batch - 1), min_size=1, max_size=batch, unique=True))
            cache.keep_rows(rows)
            oracle.rows = [oracle.rows[row] for row in rows]
        elif action == "repeat" and batch <= 2:
            cache.repeat_rows(2)
            oracle.rows = [row for row in oracle.rows for _ in range(2)]
        elif action == "tell":
            cache.rows.tell([row.shape[1] for row in oracle.rows])
        lengths = [row.shape[1] for row in oracle.rows]
        assert cache.lengths.tolist() == lengths
        assert cache.rows.counts in (None, lengths)
        assert cache.rows.longest >= max(lengths)
        for layer in cache.layers:
            for row, keys in enumerate(oracle.rows):
                assert torch.equal(layer.key_buffer[row, :, : keys.shape[1]], keys)
                assert torch.equal(layer.value_buffer[row, :, : keys.shape[1]], -keys)


def test_capacity_doubles_and_new_slots_are_zero() -> None:
    cache = RaggedCache(2)
    seen = []
    for _ in range(300):
        cache.update(states(2, 1), states(2, 1), 0)
        cache.commit([1, 0])
        seen.append(cache.layers[0].key_buffer.shape[2])
    assert sorted(set(seen)) == [64, 128, 256, 512]
    assert not cache.layers[0].key_buffer[1, :, 1:].any()


def test_capacity_given_up_front_never_moves() -> None:
    cache = RaggedCache(1, capacity=100)
    cache.update(states(1, 5), states(1, 5), 0)
    cache.commit(5)
    address = cache.layers[0].key_buffer.data_ptr()
    cache.update(states(1, 95), states(1, 95), 0)
    assert cache.layers[0].key_buffer.data_ptr() == address
    assert cache.layers[0].key_buffer.shape[2] == 100


def test_keep_rows_frees_memory() -> None:
    cache = RaggedCache(4)
    cache.update(states(4, 3), states(4, 3), 0)
    cache.commit(3)
    before = cache.layers[0].key_buffer.untyped_storage().nbytes()
    cache.keep_rows([2])
    assert cache.layers[0].key_buffer.untyped_storage().nbytes() == before // 4
    assert cache.batch_size == 1


def test_keep_rows_makes_the_rest_level_again() -> None:
    cache = RaggedCache(3)
    cache.update(states(3, 4), states(3, 4), 0)
    cache.commit([4, 2, 2])
    assert not cache.rows.level
    cache.keep_rows([1, 2])
    assert cache.rows.level
    assert cache.get_seq_length() == 2


@pytest.mark.parametrize(("name", "attention"), [("llama", "sdpa"), ("mistral", "eager"), ("gemma3", "sdpa")])
def test_roll_back_to_the_prompt_leaves_no_trace(name: str, attention: str) -> None:
    model = tiny_models.build(name, attention=attention)
    cache, last = ragged(model, [3, 12, 9])
    block = torch.cat([last, torch.tensor([[5, 6, 7], [8, 9, 10], [11, 12, 13]])], 1)
    with torch.no_grad():
        expected = logits(model, cache, block)
        cache.commit(0)
        for counts in ([4, 2, 3], [1, 4, 4]):
            logits(model, cache, torch.randint(3, 90, (3, 4)))
            cache.commit(counts)
        cache.roll_back([5, 6, 7])
        assert torch.equal(logits(model, cache, block), expected)


GARBAGE = [("llama", "sdpa"), ("llama", "eager"), ("mistral", "sdpa"), ("gemma2", "eager"), ("llama4", "sdpa")]


@pytest.mark.parametrize(("name", "attention"), [*GARBAGE, ("gpt2", "sdpa"), ("gpt_oss", "eager")])
@pytest.mark.parametrize("garbage", [1e18, -1e18])
def test_what_lies_behind_a_row_never_matters(name: str, attention: str, garbage: float) -> None:
    model = tiny_models.build(name, attention=attention)
    cache, last = ragged(model, [3, 12, 9, 20])
    block = torch.cat([last, torch.randint(3, 90, (4, 3), generator=torch.Generator().manual_seed(0))], 1)
    with torch.no_grad():
        expected = logits(model, cache, block)
        cache.commit(0)
        for layer in cache.layers:
            for row, length in enumerate(cache.lengths.tolist()):
                layer.key_buffer[row, :, length:] = garbage
                layer.value_buffer[row, :, length:] = garbage
        assert torch.equal(logits(model, cache, block), expected)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_half_precision(dtype: torch.dtype, attention: str) -> None:
    model = tiny_models.build("llama", attention=attention).to(dtype)
    with torch.no_grad():
        cache, last = ragged(model, [3, 12])
        together = logits(model, cache, last)[0]
        rows, _ = left_align(**tiny_models.prompts([3, 12]))
        alone = model(rows[:1, :3]).logits[0, -1:]
    assert cache.layers[0].key_buffer.dtype == dtype
    torch.testing.assert_close(together, alone, atol=0.1, rtol=0.1)


def test_repeated_rows_continue_alike() -> None:
    model = tiny_models.build("qwen3")
    with torch.no_grad():
        cache, last = ragged(model, [3, 12])
        cache.repeat_rows(2)
        repeated = logits(model, cache, last.repeat_interleave(2, 0))
    assert torch.equal(repeated[0], repeated[1])
    assert torch.equal(repeated[2], repeated[3])
    assert not torch.equal(repeated[1], repeated[2])


def test_reset_empties_the_rows() -> None:
    model = tiny_models.build("llama")
    with torch.no_grad():
        cache, last = ragged(model, [5, 2])
        cache.reset()
        assert cache.lengths.tolist() == [0, 0]
        fresh = logits(model, RaggedCache(2), last)
        assert torch.equal(logits(model, cache, last), fresh)


def test_buffers_cannot_be_mistaken_for_tokens() -> None:
    cache = RaggedCache(1)
    cache.update(states(1, 3), states(1, 3), 0)
    assert cache.layers[0].keys is None
    assert cache.layers[0].values is None


def test_impossible_counts_are_refused() -> None:
    cache = RaggedCache(2)
    cache.update(states(2, 3), states(2, 3), 0)
    with pytest.raises(ValueError, match="Cannot commit"):
        cache.commit(4)
    with pytest.raises(ValueError, match="2 rows"):
        cache.commit([1])
    cache.commit([3, 1])
    with pytest.raises(ValueError, match="Cannot roll back"):
        cache.roll_back(2)


def test_a_round_reads_nothing_from_the_device() -> None:
    """Tensors on the meta device have no values: reading one, as a wait for a GPU would, raises."""
    model = tiny_models.build("gemma3")
    cache = RaggedCache(2, device="meta")
    prompt = states(2, 9).to("meta")
    for layer in range(2):
        cache.update(prompt, prompt, layer)
    kept = torch.empty(2, dtype=torch.long, device="meta")
    with pytest.raises((NotImplementedError, RuntimeError)):
        kept.tolist()
    cache.commit(kept)
    inputs = forward_inputs(model, cache, torch.ones(2, 3, dtype=torch.long, device="meta"))
    for layer in range(2):
        cache.update(prompt[:, :, :3], prompt[:, :, :3], layer)
    cache.commit(kept)
    cache.roll_back(kept)
    cache.keep_rows([1])
    assert set(inputs["attention_mask"]) == {"sliding_attention", "full_attention"}
