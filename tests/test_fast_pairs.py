"""Pairs of models in the fast engine that differ in vocabulary, context, dtype or settings (cases 6 to 11)."""

import copy
import functools

import pytest
import torch
import transformers

import tiny_models
from fast_calls import IGNORE_GREEDY, fast, new_tokens, plain, plain_alone
from transformers_cactus import Origin

pytestmark = pytest.mark.filterwarnings(IGNORE_GREEDY)

INPUTS = tiny_models.prompts([7, 4, 9])


@functools.cache
def models():
    return tiny_models.pair("llama")


def padded(model, vocab_size):
    """A copy of a model with more entries in its vocabulary, and likely ones: they have the largest weights."""
    model = copy.deepcopy(model)
    extra = vocab_size - model.config.vocab_size
    model.resize_token_embeddings(vocab_size, mean_resizing=False)
    with torch.no_grad():
        model.lm_head.weight[-extra:] = 3 * model.lm_head.weight[:extra]
        model.model.embed_tokens.weight[-extra:] = model.model.embed_tokens.weight[:extra]
    return model


@pytest.mark.parametrize("engine", ["fast", "auto", "stock"])
def test_case_6_verifier_with_more_entries(engine):
    # Its own mass on them stays reachable; the draft, which lacks them, reads something else in their place.
    verifier = padded(models()[0], 105)
    inputs = INPUTS if engine != "stock" else tiny_models.prompts([7])
    expected = plain_alone(verifier, inputs)
    assert max(map(max, expected)) >= 97
    for draft in (models()[0], models()[1]):
        assert new_tokens(fast(verifier, inputs, assistant_model=draft, cactus_engine=engine), inputs) == expected


@pytest.mark.parametrize("engine", ["fast", "auto", "stock"])
def test_case_6_prompt_of_entries_that_the_draft_lacks(engine):
    verifier = padded(models()[0], 105)
    inputs = tiny_models.prompts([7])
    inputs["input_ids"][0, 2] = 104
    output = fast(verifier, inputs, assistant_model=models()[1], cactus_engine=engine)
    assert new_tokens(output, inputs) == plain_alone(verifier, inputs)


def test_case_6_draft_with_more_entries():
    # They are never drafted, though the draft likes them best.
    draft = padded(models()[1], 105)
    output = fast(models()[0], INPUTS, assistant_model=draft)
    assert new_tokens(output, INPUTS) == plain_alone(models()[0], INPUTS)
    assert int(fast(models()[0], INPUTS, assistant_model=draft, do_sample=True).sequences.max()) < 97


def test_case_6_reachable_in_sampling():
    verifier = padded(models()[0], 105)
    torch.manual_seed(0)
    output = fast(verifier, tiny_models.prompts([5] * 64), assistant_model=models()[1], do_sample=True)
    assert int(output.sequences.max()) >= 97


@functools.cache
def short_context(positions, seed=1):
    """A GPT-2 draft that takes few tokens."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        config = tiny_models.DECODERS["gpt2"].config(32, 2)
        config.n_positions = positions
        return transformers.GPT2LMHeadModel(config).eval()


@pytest.mark.parametrize(
    "lengths", [[20], [7], [15, 15], [20, 4], [13, 4, 9]], ids=["prompt", "text", "edge", "one row", "uneven"]
)
def test_case_8_draft_context_shorter_than_the_text(lengths):
    verifier = tiny_models.build("gpt2")
    inputs = tiny_models.prompts(lengths)
    with pytest.warns(UserWarning) as recorded:
        output = fast(verifier, inputs, assistant_model=short_context(16))
    assert new_tokens(output, inputs) == plain_alone(verifier, inputs)
    messages = [str(warning.message) for warning in recorded if "16 tokens at most" in str(warning.message)]
    assert len(messages) == 1
    # What fits is drafted, for each row as if it were alone.
    drafted = [sum(row.drafted_per_round) for row in output.acceptance.sequences]
    assert [count > 0 for count in drafted] == [length < 16 for length in lengths]


def test_case_8_a_row_without_positions_leaves_the_others_theirs():
    # As a copy of the verifier the draft is always right.
    verifier = copy.deepcopy(short_context(64, seed=3))
    draft = copy.deepcopy(verifier)
    draft.config.n_positions = 24
    draft.transformer.wpe.weight = torch.nn.Parameter(draft.transformer.wpe.weight[:24])
    inputs = tiny_models.prompts([23, 5])
    first = plain_alone(verifier, inputs)
    eos = next(token for token in first[0][3:] if token not in first[0][:3] and token not in first[1])
    with pytest.warns(UserWarning, match="24 tokens at most"):
        output = fast(verifier, inputs, assistant_model=draft, eos_token_id=eos, pad_token_id=0)
    assert new_tokens(output, inputs) == [first[0][: first[0].index(eos) + 1], first[1]]
    long, short = output.acceptance.sequences
    assert max(long.drafted_per_round) <= 1 and long.drafted_per_round[-1] == 0
    # 19 positions: 6 + 1 and 6 + 1 tokens, then 5 drafted ones that still have a position, then none.
    assert short.drafted_per_round[:4] == short.accepted_per_round[:4] == [6, 6, 5, 0]


def test_case_8_limit_of_the_verifier_itself():
    # Rows whose text may fill the verifier's whole context, unevenly: a block must not run beyond it.
    verifier = short_context(24)
    draft = copy.deepcopy(short_context(64))
    draft.load_state_dict({**verifier.state_dict(), "transformer.wpe.weight": draft.transformer.wpe.weight})
    draft.transformer.wpe.weight.data[:24] = verifier.transformer.wpe.weight
    with torch.no_grad():
        noise = torch.randn(97, 32, generator=torch.Generator().manual_seed(0))
        draft.lm_head.weight += 0.1 * noise
    inputs = tiny_models.prompts([7, 7, 7, 7])
    expected = plain(verifier, inputs, max_length=24)
    output = fast(verifier, inputs, assistant_model=draft, max_length=24)
    assert torch.equal(output.sequences, expected.sequences)
    # A check on the test: with blocks of 6, some row is ahead of another by enough to reach beyond.
    assert len({sum(row.accepted_per_round[:2]) for row in output.acceptance.sequences}) > 1


@pytest.mark.parametrize(
    ("verifier_dtype", "draft_dtype"),
    [("float32", "bfloat16"), ("bfloat16", "float32"), ("float16", "float16"), ("float32", "float16")],
)
def test_case_9_dtypes(verifier_dtype, draft_dtype):
    verifier = copy.deepcopy(models()[0]).to(getattr(torch, verifier_dtype))
    draft = copy.deepcopy(models()[0]).to(getattr(torch, draft_dtype))
    output = fast(verifier, INPUTS, assistant_model=draft)
    texts = new_tokens(output, INPUTS)
    expected = plain_alone(verifier, INPUTS)
    if verifier_dtype == "float32":
        assert texts == expected
    else:
        # Ties of low precision may fall otherwise in a block than one by one.
        assert [row[:3] for row in texts] == [row[:3] for row in expected]
    assert output.acceptance.accepted > output.acceptance.drafted / 2
    torch.manual_seed(0)
    sampled = fast(verifier, INPUTS, assistant_model=draft, do_sample=True, top_k=0, cactus_delta=0.5)
    assert sampled.acceptance.accepted > sampled.acceptance.drafted / 2


def test_case_10_settings_of_the_draft_itself():
    # The draft's own way of sampling is not the call's: it must not change a token, and its EOS ends nothing.
    verifier, draft = models()
    changed = copy.deepcopy(draft)
    first = new_tokens(plain(verifier, INPUTS), INPUTS)
    changed.generation_config = transformers.GenerationConfig(
        do_sample=True, temperature=0.3, top_k=3, repetition_penalty=2.0, eos_token_id=first[0][1], max_length=5
    )
    for options in ({}, {"do_sample": True, "cactus_delta": 0.5}):
        torch.manual_seed(0)
        expected = fast(verifier, INPUTS, assistant_model=draft, **options)
        torch.manual_seed(0)
        output = fast(verifier, INPUTS, assistant_model=changed, **options)
        assert torch.equal(output.sequences, expected.sequences)
        assert output.acceptance == expected.acceptance


def test_case_10_the_draft_is_warped_once():
    # A copy of the verifier samples from the verifier's own warped distribution: nothing is ever rejected.
    verifier, draft = models()[0], copy.deepcopy(models()[0])
    torch.manual_seed(0)
    output = fast(
        verifier, INPUTS, assistant_model=draft, do_sample=True, temperature=1.7, top_k=20, repetition_penalty=1.3
    )
    assert Origin.RECOVERED not in output.acceptance.origins
    assert output.acceptance.emitted == 3 * 24
