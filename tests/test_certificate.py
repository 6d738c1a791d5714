"""What the emitted tokens are really drawn from: measures, bounds, and the certificate of a call by enumeration."""

import functools
import itertools
import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import tiny_models
import transformers_cactus
import transformers_cactus.effective
import transformers_cactus.rows
from reference import (
    Sampling,
    drafted_position,
    exact_law,
    look_up_drafter,
    model_drafter,
    seen_as,
    verifier_law,
)
from test_distribution import OPTION, VARIANT, distributions, draft_model, verifier_model
from test_effective import distributions as pairs
from transformers_cactus import (
    AcceptanceRule,
    Cactus,
    CactusExact,
    ChiSquare,
    Ensemble,
    JensenShannon,
    Lenience,
    Optimal,
    ReverseKL,
    Speculative,
    SquaredHellinger,
    TopK,
    TotalVariation,
    Typical,
    effective_distribution,
    effective_divergence,
)

GAMMA_RULES = [Cactus, CactusExact, ChiSquare, TotalVariation, ReverseKL, SquaredHellinger, JensenShannon]
MIXED = [Speculative(), Cactus(0.4), CactusExact(0.4), Lenience(2.0), Optimal(1.5), Ensemble(0.3)]


def divergence_of(f, x, y):
    """`D_f(x || y)` of positive distributions."""
    return (y * f(x / y)).sum()


F = {
    "kl": lambda t: t * np.log(t),
    "reverse kl": lambda t: -np.log(t),
    "total variation": lambda t: np.abs(t - 1) / 2,
    "chi-square": lambda t: (t - 1) ** 2,
    "squared hellinger": lambda t: (np.sqrt(t) - 1) ** 2 / 2,
}


def on(p, q, rule):
    return effective_divergence(torch.from_numpy(p), torch.from_numpy(q), rule)


# The measures.


@pytest.mark.parametrize("rule", [*MIXED, Typical(0.2), TopK(2)], ids=repr)
@settings(max_examples=15, deadline=None)
@given(pairs())
def test_measures_are_those_of_the_emitted_distribution(rule, pair):
    p, q = pair
    h = effective_distribution(torch.from_numpy(p), torch.from_numpy(q), rule, method="definition").numpy()
    found = on(p, q, rule)
    with np.errstate(divide="ignore", invalid="ignore"):
        kl = np.where(h > 0, h * np.log(h / q), 0).sum()
        reverse_kl = np.where(q > 0, q * np.log(q / h), 0).sum()
        entropies = [-np.where(x > 0, x * np.log(x), 0).sum() for x in (h, q)]
    # Within rounding h may be 0 or next to it.
    assert found.kl.item() == pytest.approx(kl, abs=1e-9)
    if h[q > 0].min() > 1e-9:
        assert found.reverse_kl.item() == pytest.approx(reverse_kl, abs=1e-6)
    assert found.total_variation.item() == pytest.approx(np.abs(h - q).sum() / 2, abs=1e-10)
    assert found.entropy_change.item() == pytest.approx(entropies[0] - entropies[1], abs=1e-9)


@pytest.mark.parametrize("rule", [*MIXED, Typical(0.2), TopK(2)], ids=repr)
def test_acceptance_is_that_of_the_drafted_tokens(rule):
    generator = np.random.default_rng(0)
    p, q = generator.dirichlet(np.full(9, 0.5), size=2)
    rows = [transformers_cactus.rows.Rows.from_probs(torch.from_numpy(x).expand(1, 9, 9)) for x in (q, p)]
    phi = rule.acceptance_probability(torch.arange(9)[None], *rows)[0].numpy()
    found = on(p, q, rule).acceptance.item()
    assert found == pytest.approx((p * phi).sum(), abs=1e-9)
    by_definition = transformers_cactus.effective.Emission.of(
        *(torch.from_numpy(x)[None] for x in (p, q)), rule, "definition"
    )
    assert by_definition.acceptance.item() == pytest.approx(found, abs=1e-9)


def test_shapes_and_errors():
    p, q = torch.rand(2, 4, 3, 7).softmax(-1)
    found = effective_divergence(p, q, Cactus(0.3))
    for value in vars(found).values():
        assert value.shape == (4, 3) and value.dtype == torch.float64
    with pytest.raises(ValueError, match="same shape"):
        effective_divergence(p, q[0], Cactus(0.3))


def test_exclusions_make_infinite_divergences():
    p, q = np.array([0.5, 0.5, 0.0]), np.array([0.0, 0.6, 0.4])
    assert math.isinf(on(p, q, Ensemble(0.5)).kl) and math.isfinite(on(p, q, Ensemble(0.5, within_support=True)).kl)
    assert math.isinf(on(p, q, TopK(1)).reverse_kl)


@pytest.mark.parametrize("name", F)
@pytest.mark.parametrize("rule_class", GAMMA_RULES)
@settings(max_examples=15, deadline=None)
@given(pairs(smallest=1e-6), st.floats(0, 3))
def test_never_further_than_the_draft_in_any_divergence(rule_class, name, pair, delta):
    # Theorem 3 of the paper, whatever the budget is measured in and whatever the distance is.
    p, q = pair
    h = effective_distribution(torch.from_numpy(p), torch.from_numpy(q), rule_class(delta)).numpy()
    limit = divergence_of(F[name], p, q)
    assert divergence_of(F[name], h, q) <= limit + 1e-9 * (1 + limit)


@pytest.mark.parametrize("make", [Optimal, lambda x: Ensemble(min(x, 1.0))], ids=["optimal", "ensemble"])
@settings(max_examples=25, deadline=None)
@given(pairs(smallest=1e-6), st.floats(0, 8))
def test_neither_do_rules_with_a_target(make, pair, parameter):
    p, q = pair
    assert on(p, q, make(parameter)).kl.item() <= divergence_of(F["kl"], p, q) + 1e-9


@pytest.mark.parametrize("make", [*GAMMA_RULES, Optimal, lambda x: Lenience(1 + x)], ids=lambda x: x.__name__)
@settings(max_examples=15, deadline=None)
@given(pairs(smallest=1e-6), st.lists(st.floats(0, 3), min_size=2, max_size=5))
def test_acceptance_and_divergence_grow_with_the_budget(make, pair, budgets):
    found = [on(*pair, make(budget)) for budget in sorted(budgets)]
    for smaller, larger in itertools.pairwise(found):
        assert smaller.acceptance <= larger.acceptance + 1e-9
        assert smaller.kl <= larger.kl + 1e-9
        assert smaller.total_variation <= larger.total_variation + 1e-9


# The certificate of a call, against an enumeration of everything that can happen.

PROMPT = (1, 2, 3)
VOCAB = 8
NEW = 3


@functools.cache
def models():
    verifier = distributions(verifier_model(VOCAB), PROMPT, NEW, Sampling())
    return verifier, {
        times: distributions(draft_model("negated", VOCAB), PROMPT, NEW, Sampling(), times) for times in (1, 2)
    }


def kl(x, y):
    with np.errstate(divide="ignore", invalid="ignore"):
        return float(np.where(x > 0, x * np.log(x / y), 0).sum())


def enumerated(rule, budget, block):
    """The divergence at a drafted position by prefix, the expected sum, and the text's own divergence."""
    verifier, drafts = models()
    draft = drafts[1]
    by_prefix = {
        prefix: kl(sum(drafted_position(draft[prefix], verifier[prefix], rule, budget).values()), verifier[prefix])
        for length in range(NEW)
        for prefix in itertools.product(range(VOCAB), repeat=length)
    }
    law = exact_law(verifier, model_drafter(draft, block, NEW), NEW, rule, budget)
    expected = sum(mass * sum(certified(by_prefix, outcome)) for outcome, mass in law.items())
    texts, own = seen_as(law, lambda outcome: outcome[0]), verifier_law(verifier, NEW)
    return by_prefix, expected, sum(mass * math.log(mass / own[text]) for text, mass in texts.items() if mass > 0)


def certified(by_prefix, outcome):
    """The certificate of each token of a text, by the origins of its tokens."""
    text, origins = outcome
    return [by_prefix[text[:at]] if origin in DRAFTED else 0.0 for at, origin in enumerate(origins)]


DRAFTED = ("lossless", "delta", "recovered")
CASES = [("cactus", 0.5), ("cactus-exact", 0.5), ("optimal", 2.0), ("typical", 0.2), ("top-k", 3), ("ensemble", 0.5)]


@pytest.mark.parametrize("block", [1, 2])
@pytest.mark.parametrize(("rule", "budget"), CASES)
def test_the_expected_sum_bounds_the_divergence_of_the_text(rule, budget, block):
    _, expected, of_text = enumerated(rule, budget, block)
    assert 0.01 < of_text <= expected * (1 + 1e-9)
    if block == 1:
        # The second token is drafted after a rejection only, which the text does not tell: something is lost.
        assert of_text < 0.999 * expected
    else:
        # The first two tokens are drafted, in one round or in two, and the last is not: tight.
        assert of_text == pytest.approx(expected)


def call(engine, rows, rule, budget, **options):
    option = OPTION.get(rule, "cactus_delta")
    given = {"cactus_rule": rule, option: budget} | VARIANT.get(rule, {}) | {"cactus_certificate": True}
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return transformers_cactus.generate(
            verifier_model(VOCAB),
            **{"inputs": torch.tensor([PROMPT] * rows), "assistant_model": draft_model("negated", VOCAB)}
            | {
                "num_assistant_tokens": 2,
                "max_new_tokens": NEW,
                "do_sample": True,
                "top_k": 0,
                "cactus_engine": engine,
            }
            | {"return_dict_in_generate": True, "num_assistant_tokens_schedule": "constant"}
            | {"assistant_confidence_threshold": 0.0}
            | given
            | options,
        )


@pytest.mark.filterwarnings("ignore:.*can emit tokens that the verifier excludes:UserWarning")
@pytest.mark.parametrize(("engine", "rows"), [("fast", 2000), ("stock", 1)])
@pytest.mark.parametrize(("rule", "budget"), CASES)
def test_a_call_records_what_each_token_was_drawn_from(rule, budget, engine, rows):
    by_prefix, expected, _ = enumerated(rule, budget, 2)
    output = call(engine, rows, rule, budget)
    texts = output.sequences[:, len(PROMPT) :].tolist()
    totals = []
    for text, row in zip(texts, output.acceptance.sequences, strict=True):
        outcome = tuple(text), tuple(origin.value for origin in row.origins)
        assert row.certificate == pytest.approx(certified(by_prefix, outcome), rel=1e-3, abs=1e-5)
        totals.append(sum(row.certificate))
    assert output.acceptance.total_certificate == pytest.approx(sum(totals))
    if rows > 1:
        assert output.acceptance.total_certificate > 0
        # Five standard deviations.
        assert abs(np.mean(totals) - expected) < 5 * np.std(totals) / math.sqrt(rows) + 1e-4


@pytest.mark.parametrize(("engine", "rows"), [("fast", 300), ("stock", 1)])
def test_without_draft_probabilities_the_drafted_token_is_given(engine, rows):
    prompt = (5, 1, 2, 5, 1)
    output = call(
        engine,
        rows,
        "cactus",
        0.5,
        inputs=torch.tensor([prompt] * rows),
        assistant_model=None,
        num_assistant_tokens=None,
        prompt_lookup_num_tokens=2,
    )
    verifier = distributions(verifier_model(VOCAB), prompt, NEW, Sampling())
    drafter = look_up_drafter(prompt, 2, NEW, VOCAB, engine)
    assert output.acceptance.drafted > 0
    # One-hot on the first drafted token.
    first = drafter(())[0](())
    expected = kl(sum(drafted_position(first, verifier[()], "cactus", 0.5).values()), verifier[()])
    for row in output.acceptance.sequences:
        assert row.certificate[0] == pytest.approx(expected, rel=1e-3)
        assert row.certificate == pytest.approx(row.divergence)


def test_lossless_and_greedy_calls_have_nothing_to_record():
    output = call("fast", 50, "cactus", 0.0)
    assert max(output.acceptance.certificate) < 1e-9 and len(output.acceptance.certificate) == 150
    with pytest.warns(UserWarning, match="without sampling"):
        greedy = call("fast", 2, "cactus", 0.5, do_sample=False)
    assert greedy.acceptance.certificate == [0.0] * 6
    assert call("fast", 2, "cactus", 0.5, cactus_certificate=False).acceptance.certificate == []


def test_the_certificate_changes_nothing_else():
    with_it, without = (call("fast", 20, "cactus", 0.5, cactus_certificate=flag) for flag in (True, False))
    per_token = with_it.acceptance.total_certificate / 60
    assert f", really spent {per_token:.4f} nats a token" in str(with_it.acceptance)
    assert "really spent" not in str(without.acceptance)
    assert torch.equal(with_it.sequences, without.sequences)
    assert with_it.acceptance.divergence == without.acceptance.divergence


def test_tokens_cut_by_a_stopping_condition_are_not_recorded():
    verifier, draft = tiny_models.pair("llama")
    inputs = tiny_models.prompts([7, 5])
    torch.manual_seed(0)
    options = {"assistant_model": draft, "do_sample": True, "top_k": 0, "cactus_delta": 1.0, "max_new_tokens": 20}
    options |= {"cactus_certificate": True, "return_dict_in_generate": True, "eos_token_id": list(range(20, 40))}
    output = transformers_cactus.generate(verifier, **inputs, **options, pad_token_id=0)
    for row in output.acceptance.sequences:
        assert len(row.certificate) == len(row.origins) < 20


class OfOnesOwn(AcceptanceRule):
    def acceptance_probability(self, tokens, verifier, draft):
        return torch.ones_like(verifier.log_prob(tokens))

    def recovery_weights(self, tokens, verifier_probs, draft_probs):
        return verifier_probs

    def divergence(self, tokens, verifier, draft):
        return torch.zeros_like(verifier.log_prob(tokens))


def test_what_is_refused():
    with pytest.raises(ValueError, match="return_dict_in_generate=True"):
        call("fast", 1, "cactus", 0.5, return_dict_in_generate=False)
    with pytest.raises(TypeError, match="cactus_certificate must be True or False"):
        call("fast", 1, "cactus", 0.5, cactus_certificate=1)
    options = {"assistant_model": draft_model("negated", VOCAB), "return_dict_in_generate": True}
    with pytest.raises(ValueError, match=r"O\(vocab\^2\)"):
        transformers_cactus.generate(
            verifier_model(VOCAB), torch.tensor([PROMPT]), cactus_rule=OfOnesOwn(), cactus_certificate=True, **options
        )
