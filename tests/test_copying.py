"""A draft model mixed with prompt look-up: what it proposes, and the exact law of what is emitted."""

import functools

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import transformers_cactus
from fast_calls import IGNORE_GREEDY, fast, noisy_copy, plain_alone
from reference import Distributions, Sampling, exact_law, model_drafter
from test_distribution import outcomes_of, tiny_llama
from test_fast_distribution import does_not_fit, fits
from tiny_models import build
from transformers_cactus.copying import Copier, Copies
from transformers_cactus.demo import load_pair
from transformers_cactus.ngrams import NgramIndex
from transformers_cactus.processing import Processed
from transformers_cactus.sequences import Sequences
from transformers_cactus.truncation import Kept

PROMPT = (5, 1, 2, 6, 5, 1, 2)
RATES = {2: 0.45, 3: 0.6, 4: 0.75}
ROWS = 3000
VOCAB = 14


def copied(text, count, largest=4):
    """What followed the latest occurrence of the longest final n-gram, with its shares; by a plain search."""
    for size in range(min(largest, len(text) - 1), 1, -1):
        starts = [start for start in range(len(text) - size) if text[start : start + size] == text[-size:]]
        if starts:
            found = text[starts[-1] + size :][:count]
            return [(token, RATES[min(size + place, 4)]) for place, token in enumerate(found)]
    return []


def copying_drafter(draft, prompt, block, new_tokens, most=9, largest=4):
    """For `exact_law`: the draft's distribution, mixed as long as it has drafted what it would copy."""

    def drafts(start):
        copies = copied(prompt + start, most, largest)

        def distribution(place):
            def after(text):
                p = draft[text]
                same = all(text[len(start) + before] == copies[before][0] for before in range(min(place, len(copies))))
                if place < len(copies) and same:
                    token, share = copies[place]
                    p = (1 - share) * p + share * np.eye(len(p))[token]
                return p

            return after

        return [distribution(place) for place in range(min(block, new_tokens - len(start) - 1))]

    return drafts


@functools.cache
def models():
    return tiny_llama(VOCAB, seed=0, layers=2), tiny_llama(VOCAB, seed=1, layers=1)


@functools.cache
def law(rule, budget, sampling, block, most=9, largest=4, copies=True):
    verifier, draft = (Distributions(model, PROMPT, 3, sampling) for model in models())
    drafter = copying_drafter(draft, PROMPT, block, 3, most, largest) if copies else model_drafter(draft, block, 3)
    return exact_law(verifier, drafter, 3, rule, budget)


@functools.cache
def sample(block, rows=1, **options):
    verifier, draft = models()
    with torch.random.fork_rng():
        torch.manual_seed(2028)
        output = transformers_cactus.generate(
            verifier,
            torch.tensor([PROMPT] * ROWS),
            assistant_model=draft,
            num_assistant_tokens=block,
            max_new_tokens=3,
            do_sample=True,
            return_dict_in_generate=True,
            **options,
        )
    return outcomes_of(output, len(PROMPT))


@pytest.mark.parametrize("sampling", [Sampling(), Sampling(0.8, 4, 0.95)], ids=["plain", "truncated"])
@pytest.mark.parametrize("rule, budget", [("speculative", 0.0), ("cactus", 0.5)])
def test_law(rule, budget, sampling):
    # Each of five views fails a sample of the right law with a probability below 1e-5 (chi_square.py).
    options = {"temperature": sampling.temperature, "top_k": sampling.top_k, "top_p": sampling.top_p}
    options |= {"cactus_rule": rule} | ({"cactus_delta": budget} if budget else {})
    outcomes = sample(2, prompt_lookup_num_tokens=9, **options)
    fits(outcomes, law(rule, budget, sampling, 2))
    # Origins tell the drafts apart where the law of the text does not depend on them.
    does_not_fit(outcomes, law(rule, budget, sampling, 2, copies=False))
    if sampling == Sampling():
        # Truncation excludes most of what a second token would copy.
        does_not_fit(outcomes, law(rule, budget, sampling, 2, most=1))
    fits(sample(2, prompt_lookup_num_tokens=1, **options), law(rule, budget, sampling, 2, most=1))
    fits(sample(2, **options), law(rule, budget, sampling, 2, copies=False))


def test_longest_ngram():
    options = {"top_k": 0, "cactus_delta": 0.5, "prompt_lookup_num_tokens": 9}
    outcomes = sample(2, max_matching_ngram_size=2, **options)
    fits(outcomes, law("cactus", 0.5, Sampling(), 2, largest=2))
    does_not_fit(outcomes, law("cactus", 0.5, Sampling(), 2))


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 10**6), st.integers(2, 12))
def test_kept_tokens_are_mixed_as_the_whole_vocabulary_is(seed, kept):
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.stack([torch.randperm(20, generator=generator)[:kept] for _ in range(3)])[:, None]
    scores = torch.randn(3, 1, kept, generator=generator).sort(descending=True).values
    scores[..., -1] = -torch.inf
    few = Processed(None, Kept(tokens, scores), 20)
    copied, shares = torch.randint(20, (3, 1), generator=generator), torch.tensor([[0.5], [0.0], [0.75]])
    copies = Copies(copied.tolist(), shares.tolist(), torch.device("cpu"))
    mixed = copies.mixed(few, 0)
    assert all(len(set(row)) == kept for row in mixed.kept.tokens[:, 0].tolist())
    expected = few.scores[:, 0].softmax(-1) * (1 - shares)
    expected.scatter_add_(1, copied, shares)
    torch.testing.assert_close(mixed.scores[:, 0].softmax(-1), expected, rtol=1e-4, atol=1e-6)
    whole = copies.mixed(Processed(few.scores), 0)
    torch.testing.assert_close(whole.scores[:, 0].softmax(-1), expected, rtol=1e-4, atol=1e-6)


@settings(max_examples=100, deadline=None)
@given(st.lists(st.integers(0, 3), min_size=2, max_size=30), st.integers(1, 5))
def test_index_finds_what_a_search_finds(tokens, largest):
    index, count = NgramIndex(largest, min(2, largest)), 4
    for end in range(2, len(tokens) + 1):
        found, size = index.following(7, tokens[:end], count)
        text = tuple(tokens[:end])
        sizes = [
            (n, [start for start in range(end - n) if text[start : start + n] == text[-n:]])
            for n in range(min(largest, end - 1), min(2, largest) - 1, -1)
        ]
        first = next(((n, starts[-1]) for n, starts in sizes if starts), None)
        if first is None:
            assert (found, size) == ([], 0)
        else:
            assert size == first[0] and tuple(found) == text[first[1] + size :][:count]


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(0, 3), min_size=2, max_size=20), st.integers(1, 6), st.integers(1, 6), st.integers(2, 4))
def test_copies_and_their_shares(tokens, count, most, largest):
    rows = torch.tensor([tokens, tokens[::-1]])
    copies = Copier(most, largest).find(Sequences(rows, [0, 0], len(tokens)), count)
    expected = [copied(tuple(row), min(count, most), largest) for row in rows.tolist()]
    if copies is None:
        assert not any(expected)
        return
    for row, wanted in enumerate(expected):
        shares = copies.weights[row]
        assert [*zip(copies.tokens[row], shares, strict=True)][: len(wanted)] == [
            (token, pytest.approx(share)) for token, share in wanted
        ]
        assert not any(shares[len(wanted) :])


@pytest.mark.filterwarnings(IGNORE_GREEDY)
def test_greedy_batches_are_the_verifiers():
    model = build("llama", layers=2)
    inputs = {
        "input_ids": torch.tensor([[0, 0, 7, 8, 9, 7, 8], [11, 12, 13, 14, 11, 12, 13], [0, 0, 0, 0, 0, 3, 4]]),
        "attention_mask": torch.tensor([[0, 0, 1, 1, 1, 1, 1], [1] * 7, [0, 0, 0, 0, 0, 1, 1]]),
    }
    output = fast(
        model, inputs, assistant_model=noisy_copy(model), prompt_lookup_num_tokens=5, eos_token_id=9, pad_token_id=0
    )
    expected = plain_alone(model, inputs, eos_token_id=9, pad_token_id=0)
    width = inputs["input_ids"].shape[1]
    for row, text in enumerate(expected):
        assert output.sequences[row, width:].tolist()[: len(text)] == text


@pytest.mark.filterwarnings(IGNORE_GREEDY)
def test_the_real_pair_copies():
    verifier, draft, tokenizer = load_pair(dtype=torch.float32)
    text = "Copy this line: the quick grey goat jumped over seven sleepy crocodiles at a quarter past noon."
    chat = [{"role": "user", "content": text}]
    inputs = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=True, return_tensors="pt")
    alone, copying = (
        fast(verifier, inputs, assistant_model=draft, max_new_tokens=24, **options)
        for options in ({}, {"prompt_lookup_num_tokens": 6})
    )
    assert alone.sequences.tolist() == copying.sequences.tolist()
    assert copying.acceptance.mean_accepted_length > alone.acceptance.mean_accepted_length + 0.5


@pytest.mark.parametrize(
    "options, message",
    [
        ({"cactus_engine": "stock"}, r"work together in the fast engine only.*cactus_engine='stock'.*Leave out"),
        ({"max_matching_ngram_size": 1}, "max_matching_ngram_size must be at least 2 beside assistant_model, got 1"),
        ({"assistant_early_exit": 1}, "one draft, this one has several"),
    ],
)
def test_errors(options, message):
    verifier, draft = models()
    call = {"assistant_model": draft, "prompt_lookup_num_tokens": 4, "cactus_delta": 0.5}
    with pytest.raises(ValueError, match=message):
        transformers_cactus.generate(verifier, torch.tensor([PROMPT]), **call, **options)
