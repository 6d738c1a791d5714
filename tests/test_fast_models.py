"""The fast engine over architectures: a greedy batch of uneven prompts equals each row alone in plain `generate`."""

import functools

import pytest

import tiny_models
from fast_calls import IGNORE_GREEDY, drafts, fast, new_tokens, noisy_copy, plain, plain_alone

pytestmark = pytest.mark.filterwarnings(IGNORE_GREEDY)

NEW_TOKENS = 40
LENGTHS = [3, 12, 5, 15, 8]
"""Shorter and longer than the sliding window."""

each_variant = pytest.mark.parametrize(
    ("name", "attention"),
    [
        # Every model in the attention implementation that it has by default, and with the slow tests in all.
        pytest.param(name, attention, marks=[] if attention == tiny.attention[0] else pytest.mark.slow)
        for name, tiny in tiny_models.DECODERS.items()
        for attention in tiny.attention
    ],
)


@functools.cache
def model(name, attention):
    return tiny_models.build(name, attention=attention)


@functools.cache
def expected(name, attention):
    inputs = tiny_models.prompts(LENGTHS)
    texts = plain_alone(model(name, attention), inputs, max_new_tokens=NEW_TOKENS)
    # Varied text: a loop that repeats one token would pass for right too easily.
    assert all(len(text) == NEW_TOKENS and len(set(text)) > 4 for text in texts), texts
    return texts


@pytest.mark.parametrize("name", ["llama", "gpt2", "gemma3"])
def test_padded_batch_in_plain_generate(name, attention="eager"):
    # A check on the oracle: left padding changes nothing there either.
    inputs = tiny_models.prompts(LENGTHS)
    output = plain(model(name, attention), inputs, max_new_tokens=NEW_TOKENS)
    assert new_tokens(output, inputs) == expected(name, attention)


@each_variant
@pytest.mark.parametrize("kind", ["same", "noisy", "look-up"])
def test_batch_equals_each_row_alone(name, attention, kind):
    verifier = model(name, attention)
    inputs = tiny_models.prompts(LENGTHS)
    options = {"assistant_model": noisy_copy(verifier)} if kind == "noisy" else drafts(verifier, None)[kind]
    output = fast(verifier, inputs, **options, max_new_tokens=NEW_TOKENS)
    assert new_tokens(output, inputs) == expected(name, attention)
    assert (output.sequences[:, : max(LENGTHS)] == inputs["input_ids"]).all()
    if kind == "same":
        # Five rounds of 7 and one of 5: whatever the draft's cache lacked would show as a rejection.
        assert output.acceptance.accepted_per_round == [6, 6, 6, 6, 6, 4] * len(LENGTHS)
    else:
        # Rows accept different counts, and lose what they rejected.
        assert output.acceptance.accepted < output.acceptance.drafted
        assert len({tuple(row.accepted_per_round) for row in output.acceptance.sequences}) > 1


@each_variant
def test_right_padded_prompts(name, attention):
    verifier = model(name, attention)
    inputs = tiny_models.prompts(LENGTHS, padding_side="right")
    output = fast(verifier, inputs, **drafts(verifier, None)["same"], max_new_tokens=NEW_TOKENS)
    assert new_tokens(output, inputs) == expected(name, attention)
