"""Block verification: the law of whole blocks and of texts by enumeration, and how many tokens it keeps.

Comparisons with a law use `chi_square.ALPHA`, at most five of one sample: a false-alarm rate below 1e-4 (see there).
"""

import functools
import itertools
import math
from collections import defaultdict

import numpy as np
import pytest
import torch

import chi_square
import tiny_models
import transformers_cactus
from fast_calls import IGNORE_GREEDY, fast, new_tokens, plain_alone
from reference import Sampling, optimal_target, verifier_law
from test_distribution import distributions, draft_model, outcomes_of, verifier_model
from transformers_cactus import Cactus, Ensemble, Lenience, Optimal, Speculative, TopK, Typical, verify, verify_block

TARGETS = {
    "speculative": (Speculative(), lambda p, q: q),
    "optimal": (Optimal(2.0), lambda p, q: optimal_target(p, q, 2.0)),
    "ensemble": (Ensemble(0.5), lambda p, q: (p + q) / 2),
}
"""Rules with a target, and the target in NumPy."""
each_target = pytest.mark.parametrize("name", TARGETS)


def seeded(seed=0):
    return torch.Generator().manual_seed(seed)


# The law of a block, written from the paper's Algorithm 2.


def round_law(length, p_of, h_of, q_of, vocab):
    """The law of what a round emits: by accepted prefix and next token, `{(tokens, accepted): probability}`."""
    law = defaultdict(float)
    for drafted in itertools.product(range(vocab), repeat=length):
        probability = math.prod(p_of(drafted[:at])[drafted[at]] for at in range(length))
        if probability == 0:
            continue
        weight = [1.0]
        for at, token in enumerate(drafted):
            weight.append(min(weight[-1] * h_of(drafted[:at])[token] / p_of(drafted[:at])[token], 1.0))
        residual = [np.maximum(w * h_of(drafted[:at]) - p_of(drafted[:at]), 0) for at, w in enumerate(weight[:-1])]
        accept = [
            left.sum() / (left.sum() + 1 - w) if left.sum() > 1e-15 else 0.0
            for w, left in zip(weight[:-1], residual, strict=True)
        ]
        accept = [1.0, *accept[1:], weight[-1]][: length + 1] if length else [1.0]
        for kept in range(length + 1):
            chance = accept[kept] * math.prod(1 - later for later in accept[kept + 1 :])
            following = q_of(drafted) if kept == length else residual[kept]
            if chance * following.sum() < 1e-15:
                continue
            for token in np.flatnonzero(following):
                mass = probability * chance * following[token] / following.sum()
                law[(*drafted[:kept], int(token)), kept] += mass
    return dict(law)


@functools.cache
def tables(vocab, length, seed):
    """Random conditional distributions of the draft and the verifier after every prefix."""
    generator = np.random.default_rng(seed)
    prefixes = [x for n in range(length + 1) for x in itertools.product(range(vocab), repeat=n)]
    return tuple({prefix: generator.dirichlet(np.full(vocab, 0.7)) for prefix in prefixes} for _ in range(2))


@each_target
@pytest.mark.parametrize(("vocab", "length", "seed"), [(3, 3, 0), (4, 2, 1), (5, 1, 2), (2, 4, 3)])
def test_a_block_completed_by_the_target_has_the_targets_law(name, vocab, length, seed):
    p, q = tables(vocab, length, seed)
    _, target = TARGETS[name]

    def h_of(prefix):
        return target(p[prefix], q[prefix])

    completed = defaultdict(float)
    for (tokens, _), mass in round_law(length, p.__getitem__, h_of, q.__getitem__, vocab).items():
        for rest in itertools.product(range(vocab), repeat=length + 1 - len(tokens)):
            text = tokens + rest
            kernels = [h_of(text[:at]) if at < length else q[text[:at]] for at in range(len(tokens), length + 1)]
            completed[text] += mass * math.prod(k[x] for k, x in zip(kernels, rest, strict=True))
    for text in itertools.product(range(vocab), repeat=length + 1):
        kernels = [h_of(text[:at]) if at < length else q[text[:at]] for at in range(length + 1)]
        assert completed[text] == pytest.approx(math.prod(k[x] for k, x in zip(kernels, text, strict=True)), abs=1e-9)


def blocks(vocab, length, seed, rows):
    """Drafted blocks with the scores of both models."""
    p, q = tables(vocab, length, seed)
    generator = np.random.default_rng(seed + 100)
    drafted = np.zeros((rows, length), dtype=int)
    for at in range(length):
        uniforms = generator.random(rows)
        for prefix in itertools.product(range(vocab), repeat=at):
            chosen = (drafted[:, :at] == prefix).all(1)
            drafted[chosen, at] = np.searchsorted(p[prefix].cumsum(), uniforms[chosen]).clip(max=vocab - 1)
    scores = [
        np.stack([[np.log(table[tuple(row[:at])]) for at in range(places)] for row in drafted])
        for table, places in ((q, length + 1), (p, length))
    ]
    return torch.from_numpy(drafted), *map(torch.from_numpy, scores)


def emitted(outcome, tokens):
    return [
        ((*row[:kept], following), kept)
        for row, kept, following in zip(
            tokens.tolist(), outcome.accepted.tolist(), outcome.next_token.tolist(), strict=True
        )
    ]


@each_target
@pytest.mark.parametrize(("vocab", "length", "seed"), [(3, 3, 0), (4, 2, 1)])
def test_blocks_have_the_exact_law(name, vocab, length, seed):
    rule, target = TARGETS[name]
    p, q = tables(vocab, length, seed)
    tokens, verifier, draft = blocks(vocab, length, seed, 12_000)
    outcome = verify_block(tokens, verifier, draft, rule, generator=seeded(), measure=False)
    law = round_law(length, p.__getitem__, lambda prefix: target(p[prefix], q[prefix]), q.__getitem__, vocab)
    assert chi_square.p_value(emitted(outcome, tokens), law) > chi_square.ALPHA
    # The law of another rule, and of verifying token by token, are told apart; the optimal target leaves the two
    # verifications little to differ in.
    other = verify(tokens, verifier, draft, rule, generator=seeded(), measure=False)
    if name != "optimal":
        assert chi_square.p_value(emitted(other, tokens), law) < chi_square.ALPHA
    wrong = Optimal(0.5) if name != "optimal" else Speculative()
    other = verify_block(tokens, verifier, draft, wrong, generator=seeded(), measure=False)
    assert chi_square.p_value(emitted(other, tokens), law) < chi_square.ALPHA


@each_target
def test_never_fewer_tokens_than_one_by_one(name):
    rule, _ = TARGETS[name]
    gained = []
    for seed in range(3):
        tokens, verifier, draft = blocks(3, 3, seed, 6000)
        block = verify_block(tokens, verifier, draft, rule, generator=seeded(), measure=False).accepted.double()
        token = verify(tokens, verifier, draft, rule, generator=seeded(), measure=False).accepted.double()
        gained.append((block.mean() - token.mean()).item())
        assert gained[-1] > -4 * math.sqrt((block.var() + token.var()).item() / 6000)
    assert max(gained) > 0.03


def test_blocks_of_different_lengths_are_as_if_alone():
    tokens, verifier, draft = blocks(4, 2, 1, 6000)
    lengths = torch.arange(6000) % 3
    garbled = tokens.masked_fill(torch.arange(2) >= lengths[:, None], -100)
    outcome = verify_block(garbled, verifier, draft, Speculative(), block_lengths=lengths, generator=seeded())
    p, q = tables(4, 2, 1)
    for length in range(3):
        rows = lengths == length
        law = round_law(length, p.__getitem__, q.__getitem__, q.__getitem__, 4)
        found = [pair for pair, kept in zip(emitted(outcome, tokens), rows.tolist(), strict=True) if kept]
        assert chi_square.p_value(found, law) > chi_square.ALPHA


def test_lossless_flags_are_the_lossless_decision_on_the_same_random_numbers():
    tokens, verifier, draft = blocks(3, 3, 0, 2000)
    relaxed = verify_block(tokens, verifier, draft, Optimal(3.0), generator=seeded())
    lossless = verify_block(tokens, verifier, draft, generator=seeded())
    assert torch.equal(relaxed.accepted_losslessly.sum(-1), lossless.accepted)
    assert torch.equal(lossless.accepted_losslessly.sum(-1), lossless.accepted)
    assert relaxed.accepted.double().mean() > lossless.accepted.double().mean()
    assert torch.equal(relaxed.divergence, verify(tokens, verifier, draft, Optimal(3.0)).divergence)


def test_without_draft_probabilities_it_is_verification_token_by_token():
    tokens, verifier, _ = blocks(3, 3, 0, 500)
    one, other = (f(tokens, verifier, None, generator=seeded()) for f in (verify_block, verify))
    assert torch.equal(one.accepted, other.accepted) and torch.equal(one.next_token, other.next_token)


def test_identical_models_keep_everything():
    tokens, verifier, _ = blocks(3, 3, 0, 500)
    outcome = verify_block(tokens, verifier, verifier[:, :-1], generator=seeded())
    assert outcome.accepted.tolist() == [3] * 500


@pytest.mark.parametrize(("side", "code"), [("verifier", 1), ("draft", 2)])
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_scores_that_are_no_distribution_are_named(side, code, bad):
    tokens, verifier, draft = blocks(3, 3, 0, 8)
    {"verifier": verifier, "draft": draft}[side][5, 1, 0] = bad
    outcome = verify_block(tokens, verifier, draft, generator=seeded())
    assert outcome.invalid.tolist() == [code if row == 5 else 0 for row in range(8)]
    with pytest.raises(FloatingPointError, match=f"{side}'s scores for sequence 5 at position 1 "):
        outcome.raise_if_invalid()


# Through `generate`.

PROMPT = (1, 2, 3)
VOCAB, NEW = 8, 3


@functools.cache
def text_law(kind, block, name):
    """The law of texts and origins, round by round; at most one of them per accepted prefix and text."""
    verifier, draft = (
        distributions(model, PROMPT, NEW, Sampling()) for model in (verifier_model(VOCAB), draft_model(kind, VOCAB))
    )
    _, target = TARGETS[name]
    finished = defaultdict(float)
    waiting = {((), ()): 1.0}
    while waiting:
        (text, rounds), mass = waiting.popitem()
        length = min(block, NEW - len(text) - 1)
        law = round_law(
            length,
            lambda x, text=text: draft[text + x],
            lambda x, text=text: target(draft[text + x], verifier[text + x]),
            lambda x, text=text: verifier[text + x],
            VOCAB,
        )
        for (tokens, kept), probability in law.items():
            outcome = text + tokens, (*rounds, kept)
            where = finished if len(outcome[0]) == NEW else waiting
            where[outcome] = where.get(outcome, 0.0) + mass * probability
    return dict(finished)


def call(name, kind, block, rows, **options):
    with torch.random.fork_rng():
        torch.manual_seed(2026)
        return transformers_cactus.generate(
            verifier_model(VOCAB),
            torch.tensor([PROMPT] * rows),
            **{"assistant_model": draft_model(kind, VOCAB), "num_assistant_tokens": block, "max_new_tokens": NEW}
            | {"do_sample": True, "top_k": 0, "return_dict_in_generate": True, "cactus_rule": TARGETS[name][0]}
            | {"cactus_verification": "block"}
            | options,
        )


@pytest.mark.filterwarnings("ignore:.*can emit tokens that the verifier excludes:UserWarning")
@pytest.mark.parametrize("kind", ["other", "swapped"])
@each_target
def test_texts_have_the_exact_law(name, kind):
    output = call(name, kind, 2, 4000)
    texts = [text for text, _ in outcomes_of(output, len(PROMPT))]
    rounds = [tuple(row.accepted_per_round) for row in output.acceptance.sequences]
    law = text_law(kind, 2, name)
    found = list(zip(texts, rounds, strict=True))
    for view in (lambda x: x, lambda x: x[0], lambda x: x[0][0], lambda x: x[0][1], lambda x: x[1]):
        expected = defaultdict(float)
        for outcome, mass in law.items():
            expected[view(outcome)] += mass
        assert chi_square.p_value(map(view, found), expected) > chi_square.ALPHA
    own = verifier_law(distributions(verifier_model(VOCAB), PROMPT, NEW, Sampling()), NEW)
    assert (chi_square.p_value(texts, own) > chi_square.ALPHA) == (name == "speculative")


def test_origins_tell_what_lossless_verification_keeps_too():
    origins = {origin.value for origin in call("optimal", "other", 2, 300).acceptance.origins}
    assert {"lossless", "delta", "recovered"} <= origins
    assert "delta" not in {origin.value for origin in call("speculative", "other", 2, 300).acceptance.origins}


@pytest.mark.filterwarnings(IGNORE_GREEDY)
def test_greedy_text_is_the_verifiers_own():
    verifier, draft = tiny_models.pair("llama")
    inputs = tiny_models.prompts([7, 3, 5])
    output = fast(verifier, inputs, assistant_model=draft, cactus_verification="block")
    assert new_tokens(output, inputs) == plain_alone(verifier, inputs)


@pytest.mark.parametrize("rule", [Cactus(0.5), Lenience(2.0), Typical(), TopK(3)], ids=repr)
def test_rules_without_a_target_are_refused(rule):
    with pytest.raises(ValueError, match=r"depends on the drafted token. It goes with 'speculative'"):
        call("speculative", "other", 2, 1, cactus_rule=rule)
    with pytest.raises(ValueError, match="depends on the drafted token"):
        verify_block(torch.zeros(1, 1, dtype=torch.long), torch.zeros(1, 2, 3), torch.zeros(1, 1, 3), rule)


def test_what_else_is_refused():
    with pytest.raises(ValueError, match=r"fast engine only, not with cactus_engine='stock'"):
        call("speculative", "other", 2, 1, cactus_engine="stock")
    with pytest.raises(ValueError, match=r"must be one of 'token', 'block', got 'tree'"):
        call("speculative", "other", 2, 1, cactus_verification="tree")
    with pytest.raises(ValueError, match="cactus_certificate needs cactus_verification='token'"):
        call("optimal", "other", 2, 1, cactus_certificate=True)
    # Without a budget there is nothing to certify.
    lossless = call("speculative", "other", 2, 3, cactus_rule=Cactus(0.0), cactus_certificate=True)
    assert lossless.acceptance.certificate == [0.0] * 9
