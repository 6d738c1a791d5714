"""What a drafted position emits: both methods against a NumPy double loop, and the paper's bounds."""

import itertools
import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from transformers_cactus import Cactus, CactusExact, Lenience, Speculative, effective_distribution
from transformers_cactus.rows import Rows

RULES = [
    Speculative(),
    *(Cactus(delta) for delta in (0.0, 0.05, 0.75, math.inf)),
    *(CactusExact(delta) for delta in (0.05, 0.75)),
    Lenience(1.5),
]
every_rule = pytest.mark.parametrize("rule", RULES, ids=repr)


def kl(x, y):
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.where(x > 0, x * np.log(x / y), 0.0).sum()


def reference_gamma(rule, q_n):
    """`gamma` for the rules whose formula is closed; the exact root has its own tests."""
    if isinstance(rule, Lenience):
        return min(rule.factor * q_n, 1.0)
    if isinstance(rule, Cactus) and 0 < q_n < 1:
        return min(q_n + math.sqrt(2 * rule.delta * q_n * (1 - q_n)), 1.0)
    return q_n


def reference(p, q, rule):
    """The sum over drafted and recovered tokens, one at a time."""
    emitted = np.zeros(len(q))
    for n in np.flatnonzero(p):
        gamma = reference_gamma(rule, q[n])
        h = q * (0.0 if q[n] == 1 else (1 - gamma) / (1 - q[n]))
        h[n] = gamma
        phi = min(1.0, gamma / p[n])
        emitted[n] += p[n] * phi
        residual = np.maximum(h - p, 0)
        if phi < 1:
            if residual.sum() == 0:
                residual = np.where(np.arange(len(q)) == n, 0.0, q)
            emitted += p[n] * (1 - phi) * residual / residual.sum()
    return emitted


@st.composite
def distributions(draw, smallest=0.0):
    """A pair p, q; unless `smallest` is above 0, with zeros, ties, p = q and one-hot rows among them."""
    size = draw(st.integers(2, 12))

    def one():
        kinds = ["weights", "peaked"] + (["ties", "one-hot"] if smallest == 0 else [])
        kind = draw(st.sampled_from(kinds))
        if kind == "one-hot":
            return np.eye(size)[draw(st.integers(0, size - 1))]
        elements = {
            "weights": st.floats(1e-3, 1),
            "peaked": st.floats(-16, 0).map(math.exp),
            "ties": st.sampled_from([0.0, 1.0, 2.0, 5.0]),
        }[kind]
        weights = draw(hnp.arrays(np.float64, size, elements=elements))
        return weights / weights.sum() if weights.sum() > 0 else np.full(size, 1 / size)

    q = one()
    return (q.copy() if draw(st.integers(0, 5)) == 0 else one()), q


def emitted_by(p, q, rule, method="auto"):
    return effective_distribution(torch.from_numpy(p), torch.from_numpy(q), rule, method=method).numpy()


@every_rule
@settings(max_examples=20, deadline=None)
@given(distributions())
def test_sorting_equals_the_definition(rule, pair):
    by_definition, by_sorting = (emitted_by(*pair, rule, method=method) for method in ("definition", "sorted"))
    np.testing.assert_allclose(by_sorting, by_definition, rtol=0, atol=1e-10)
    np.testing.assert_allclose(by_definition.sum(), 1, atol=1e-10)
    assert (by_sorting >= 0).all()
    # The verifier's exclusions hold.
    assert not by_definition[pair[1] == 0].any() and not by_sorting[pair[1] == 0].any()


@pytest.mark.parametrize("rule", [r for r in RULES if not isinstance(r, CactusExact)], ids=repr)
@settings(max_examples=20, deadline=None)
@given(distributions())
def test_against_a_double_loop(rule, pair):
    np.testing.assert_allclose(emitted_by(*pair, rule, "definition"), reference(*pair, rule), rtol=0, atol=1e-10)


@pytest.mark.parametrize("rule", [Speculative(), Cactus(0.0), CactusExact(0.0), Lenience(1.0)], ids=repr)
@settings(max_examples=20, deadline=None)
@given(distributions())
def test_without_a_budget_the_verifier_is_what_comes_out(rule, pair):
    np.testing.assert_allclose(emitted_by(*pair, rule), pair[1], rtol=0, atol=1e-10)


@every_rule
@settings(max_examples=25, deadline=None)
@given(distributions(smallest=1e-7))
def test_never_further_from_the_verifier_than_the_draft(rule, pair):
    p, q = pair
    # Theorem 3, first bound: over-relaxing gives the draft, not worse.
    assert kl(emitted_by(p, q, rule), q) <= kl(p, q) + 1e-9


@pytest.mark.parametrize("rule_class", [Cactus, CactusExact])
@settings(max_examples=20, deadline=None)
@given(distributions(smallest=1e-7), st.lists(st.floats(0, 3), min_size=2, max_size=6))
def test_acceptance_and_divergence_grow_with_the_budget(rule_class, pair, deltas):
    p, q = pair
    spent = [kl(emitted_by(p, q, rule_class(delta)), q) for delta in sorted(deltas)]
    assert all(smaller <= larger + 1e-9 for smaller, larger in itertools.pairwise(spent))
    drafted, rows = (
        torch.arange(len(q))[None],
        [Rows.from_probs(torch.from_numpy(x).expand(1, len(x), -1)) for x in pair],
    )
    accepted = [rule_class(delta).acceptance_probability(drafted, rows[1], rows[0])[0] for delta in sorted(deltas)]
    assert all(bool((smaller <= larger + 1e-12).all()) for smaller, larger in itertools.pairwise(accepted))


def test_the_text_may_spend_more_than_a_drafted_token():
    # The bound of Theorem 3 is a function of delta, not delta itself: each h keeps the budget, their mixture with the
    # recoveries does not. The documentation promises no more than this.
    p, q = np.full(3, 1 / 3), np.array([0.727, 0.268, 0.005])
    assert 1 < kl(emitted_by(p, q, CactusExact(1.0)), q) < kl(p, q)


@every_rule
def test_a_large_vocabulary_and_float32_input(rule):
    generator = torch.Generator().manual_seed(0)
    p, q = (3 * torch.randn(2, 3, 200, generator=generator) for _ in range(2))
    p, q = p.softmax(-1), q.softmax(-1)
    p[0, 0], q[0, 1, 100:] = q[0, 0], 0.0
    q = q / q.sum(-1, keepdim=True)
    emitted = effective_distribution(p, q, rule)
    assert emitted.shape == (2, 3, 200) and emitted.dtype == torch.float64
    assert torch.allclose(emitted.sum(-1), torch.ones(2, 3, dtype=torch.float64), atol=1e-9)
    assert torch.allclose(emitted, effective_distribution(p, q, rule, method="definition"), rtol=0, atol=1e-10)


def test_one_budget_per_row():
    generator = torch.Generator().manual_seed(0)
    p, q = (torch.randn(3, 20, generator=generator).softmax(-1) for _ in range(2))
    deltas = torch.tensor([0.0, 0.2, 1.0])
    for method in ("definition", "sorted"):
        together = effective_distribution(p, q, Cactus(deltas), method=method)
        for row, delta in enumerate(deltas.tolist()):
            alone = effective_distribution(p[row], q[row], Cactus(delta), method=method)
            assert torch.allclose(together[row], alone, rtol=0, atol=1e-6)


def test_errors_say_what_is_wrong():
    half = torch.tensor([0.5, 0.5])
    with pytest.raises(ValueError, match="same shape"):
        effective_distribution(half, torch.ones(3) / 3, Speculative())
    with pytest.raises(ValueError, match="p must hold probabilities"):
        effective_distribution(half * 2, half, Speculative())
    with pytest.raises(ValueError, match="q must hold probabilities"):
        effective_distribution(half, torch.tensor([1.5, -0.5]), Speculative())
    with pytest.raises(ValueError, match="q must hold probabilities"):
        effective_distribution(half, torch.tensor([math.nan, 0.5]), Speculative())
    with pytest.raises(ValueError, match="fastest"):
        effective_distribution(half, half, Speculative(), method="fastest")
