"""Batches in the fast engine: padding, rows that end early, repeated prompts, options per row (cases 17 to 20)."""

import functools

import pytest
import torch
from transformers import pipeline

import tiny_models
import transformers_cactus
from fast_calls import IGNORE_GREEDY, drafts, each_draft, fast, new_tokens, noisy_copy, plain, plain_alone
from transformers_cactus import Cactus, CactusExact

pytestmark = pytest.mark.filterwarnings(IGNORE_GREEDY)


@functools.cache
def models(name="llama", attention=None):
    return tiny_models.pair(name, attention)


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_case_17_padding_and_a_row_that_ends_in_the_first_round(name, side):
    verifier, draft = models(name)
    inputs = tiny_models.prompts([3, 5, 8, 1], padding_side=side)
    full = plain_alone(verifier, inputs)
    eos = full[1][1]
    expected = [row[: row.index(eos) + 1] if eos in row else row for row in full]
    output = fast(verifier, inputs, assistant_model=draft, eos_token_id=eos, pad_token_id=0)
    assert new_tokens(output, inputs) == expected
    assert len(output.acceptance.sequences[1].drafted_per_round) <= 2
    # Padding behind what a row emitted is the pad token.
    tails = [row[8 + len(text) :] for row, text in zip(output.sequences.tolist(), expected, strict=True)]
    assert {token for tail in tails for token in tail} == {0}


@pytest.mark.parametrize("rows", [1, 3])
def test_case_17_all_rows_end_in_the_first_round(rows):
    verifier, draft = models()
    inputs = tiny_models.prompts([4] * rows)
    eos = [row[0] for row in plain_alone(verifier, inputs)]
    output = fast(verifier, inputs, assistant_model=draft, eos_token_id=eos, pad_token_id=0)
    assert torch.equal(output.sequences, plain(verifier, inputs, eos_token_id=eos, pad_token_id=0).sequences)


def test_case_17_holes_in_the_mask():
    # What the mask hides is no part of a row, wherever it stands.
    verifier, draft = models()
    inputs = tiny_models.prompts([6, 6])
    holes = {name: value.clone() for name, value in inputs.items()}
    holes["attention_mask"][0, 2] = holes["attention_mask"][0, 0] = 0
    output = fast(verifier, holes, assistant_model=draft)
    assert new_tokens(output, inputs) == plain_alone(verifier, holes)


@pytest.mark.parametrize("name", ["mistral", *(pytest.param(n, marks=pytest.mark.slow) for n in ("llama", "gpt2"))])
def test_case_18_thirty_uneven_rounds(name):
    # Some of the drafted tokens are wrong, at places that differ from row to row.
    verifier = models(name)[0]
    draft = noisy_copy(verifier)
    inputs = tiny_models.prompts([3, 12, 5, 8])
    output = fast(verifier, inputs, assistant_model=draft, max_new_tokens=100)
    assert new_tokens(output, inputs) == plain_alone(verifier, inputs, max_new_tokens=100)
    for row in output.acceptance.sequences:
        assert len(row.accepted_per_round) >= 16 and len(set(row.accepted_per_round)) > 3


@pytest.mark.parametrize(
    ("verifier", "draft"),
    [("mistral", "llama"), ("llama", "mistral"), ("gemma3", "gpt2"), ("gpt2", "gemma3"), ("phi3", "gemma2")],
)
def test_case_19_windows_of_one_model_only(verifier, draft):
    inputs = tiny_models.prompts([3, 20, 8])
    verifier, draft = models(verifier)[0], models(draft)[1]
    output = fast(verifier, inputs, assistant_model=draft, num_assistant_tokens=10)
    assert new_tokens(output, inputs) == plain_alone(verifier, inputs)


def test_case_20_return_sequences():
    verifier, draft = models()
    inputs = tiny_models.prompts([3, 8])
    torch.manual_seed(0)
    output = fast(verifier, inputs, assistant_model=draft, do_sample=True, num_return_sequences=3, cactus_delta=0.5)
    assert output.sequences.shape == (6, 8 + 24) and len(output.acceptance.sequences) == 6
    prompts = output.sequences[:, :8].tolist()
    assert prompts == [row for row in inputs["input_ids"].tolist() for _ in range(3)]
    assert len({tuple(row) for row in output.sequences.tolist()}) == 6


def test_case_20_pipeline_with_a_batch():
    # As a user's pipeline calls it: left padding, a generation config of its own, and a draft.
    from test_fast_stopping import letters

    verifier, draft = models()
    tokenizer = letters()
    tokenizer.padding_side = "left"
    writer = pipeline("text-generation", model=verifier, tokenizer=tokenizer, batch_size=2)
    texts = ["hello", "a longer prompt"]
    options = {"max_new_tokens": 10, "do_sample": False, "return_full_text": False}
    expected = [answer[0]["generated_text"] for answer in writer(texts, **options)]
    with transformers_cactus.enabled(verifier):
        answers = writer(texts, **options, assistant_model=draft, cactus_rule="speculative", cactus_engine="fast")
    assert [answer[0]["generated_text"] for answer in answers] == expected


INPUTS = tiny_models.prompts([3, 8, 5])


@pytest.mark.parametrize("rule", ["cactus", "cactus-exact"])
@pytest.mark.parametrize("as_tensor", [False, True])
def test_budget_per_row(rule, as_tensor):
    verifier, draft = models()
    deltas = [0.0, 0.5, 3.0]
    value = torch.tensor(deltas) if as_tensor else deltas
    torch.manual_seed(0)
    output = fast(verifier, INPUTS, assistant_model=draft, do_sample=True, cactus_rule=rule, cactus_delta=value)
    torch.manual_seed(0)
    lossless = fast(verifier, INPUTS, assistant_model=draft, do_sample=True, cactus_delta=0.0)
    spent = [max(row.divergence) for row in output.acceptance.sequences]
    assert spent[0] == 0 and 0 < spent[1] < spent[2]
    if rule == "cactus-exact":
        assert spent[1] <= 0.5 + 1e-5 and spent[2] <= 3.0 + 1e-5
    # The first round draws the same random numbers: the row without a budget is the lossless one.
    first = output.acceptance.sequences[0].accepted_per_round[0]
    assert first == lossless.acceptance.sequences[0].accepted_per_round[0]
    assert output.sequences[0, 8 : 9 + first].tolist() == lossless.sequences[0, 8 : 9 + first].tolist()


def test_budget_follows_its_row_when_others_leave():
    # Rows with an EOS early on leave; the last row's budget stays its own.
    verifier, draft = models()
    inputs = tiny_models.prompts([5] * 24)
    deltas = [0.0, 2.0] * 12
    torch.manual_seed(1)
    output = fast(
        verifier,
        inputs,
        assistant_model=draft,
        do_sample=True,
        cactus_delta=deltas,
        eos_token_id=list(range(2, 14)),
        pad_token_id=0,
    )
    rows = output.acceptance.sequences
    assert len({len(row.origins) for row in rows}) > 5
    assert all(sum(row.divergence) == 0 for row in rows[::2])
    assert all(sum(row.divergence) > 0 for row in rows[1::2] if len(row.origins) > 4)


def test_budget_per_prompt_with_return_sequences():
    verifier, draft = models()
    torch.manual_seed(0)
    output = fast(
        verifier, INPUTS, assistant_model=draft, do_sample=True, num_return_sequences=2, cactus_delta=[0.0, 2.0, 0.0]
    )
    spent = [sum(row.divergence) > 0 for row in output.acceptance.sequences]
    assert spent == [False, False, True, True, False, False]


@pytest.mark.parametrize("repeats", [1, 2])
@pytest.mark.parametrize("rule", [Cactus(torch.tensor([0.5, 0.5])), CactusExact(torch.tensor([0.5] * 6)), None])
def test_wrong_number_of_budgets(rule, repeats):
    verifier, draft = models()
    options = {"cactus_rule": rule} if rule else {"cactus_delta": [0.5]}

    def fail(*_):
        raise AssertionError("a model ran")

    hooks = [model.register_forward_pre_hook(fail) for model in (verifier, draft)]
    try:
        with pytest.raises(ValueError, match=r"parameters for \d prompts?, the call has 3"):
            fast(verifier, INPUTS, assistant_model=draft, do_sample=True, num_return_sequences=repeats, **options)
    finally:
        for hook in hooks:
            hook.remove()


@each_draft("look-up")
def test_neighbours_do_not_change_a_greedy_row(kind):
    verifier, draft = models("gpt2")
    options = drafts(verifier, draft)[kind]
    inputs = tiny_models.prompts([3, 8, 5, 7])
    batch = new_tokens(fast(verifier, inputs, **options), inputs)
    for row in range(4):
        alone = {name: value[row : row + 1] for name, value in inputs.items()}
        assert new_tokens(fast(verifier, alone, **options), alone)[0] == batch[row]
