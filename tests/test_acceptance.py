"""Acceptance probability and recovery distribution of every rule, against the formulas written out in NumPy."""

import dataclasses
import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from transformers_cactus import Cactus, CactusExact, Lenience, Speculative
from transformers_cactus.rows import Rows

RULES = {
    "speculative": Speculative(),
    "cactus-0": Cactus(0.0),
    "cactus-0.3": Cactus(0.3),
    "cactus-2": Cactus(2.0),
    "cactus-inf": Cactus(math.inf),
    "exact-0": CactusExact(0.0),
    "exact-0.3": CactusExact(0.3),
    "exact-2": CactusExact(2.0),
    "exact-inf": CactusExact(math.inf),
    "lenience-1": Lenience(1.0),
    "lenience-1.7": Lenience(1.7),
    "lenience-inf": Lenience(math.inf),
}
every_rule = pytest.mark.parametrize("rule", RULES.values(), ids=RULES)


def divergence(gamma, q_n):
    """KL(h || q), where h raises a token from `q_n` to `gamma`."""
    raised = gamma * math.log(gamma / q_n) if gamma > 0 else 0.0
    return raised + ((1 - gamma) * math.log((1 - gamma) / (1 - q_n)) if gamma < 1 else 0.0)


def reference_gamma(rule, q_n):
    if q_n in (0.0, 1.0) or isinstance(rule, Speculative):
        return q_n
    if isinstance(rule, Lenience):
        return min(rule.factor * q_n, 1.0)
    if isinstance(rule, Cactus):
        return min(q_n + math.sqrt(2 * rule.delta * q_n * (1 - q_n)), 1.0)
    if rule.delta >= -math.log(q_n):
        return 1.0
    low, high = q_n, 1.0
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if divergence(middle, q_n) <= rule.delta else (low, middle)
    return low


def reference(rule, p, q, n):
    """`phi` and the normalised `g` for the drafted token `n`; `p` is None for a draft without probabilities."""
    gamma = reference_gamma(rule, q[n])
    h = q * ((1 - gamma) / (1 - q[n]) if q[n] < 1 else 0.0)
    h[n] = gamma
    p = np.eye(len(q))[n] if p is None else p
    phi = 0.0 if gamma == 0 else min(1.0, gamma / p[n]) if p[n] > 0 else 1.0
    residual = np.maximum(h - p, 0)
    return phi, residual / residual.sum() if residual.sum() > 0 else None


def rows(probs):
    """One position of one sequence."""
    return Rows.from_probs(torch.from_numpy(probs)[None, None])


def phi_of(rule, p, q, n):
    drafted = torch.tensor([[n]])
    return rule.acceptance_probability(drafted, rows(q), None if p is None else rows(p)).item()


def g_of(rule, p, q, n):
    weights = rule.recovery_weights(
        torch.tensor([n]), torch.from_numpy(q)[None], None if p is None else torch.from_numpy(p)[None]
    )
    assert bool((weights >= 0).all()) and 0 < weights.sum() < math.inf
    return (weights / weights.sum())[0].numpy()


@st.composite
def distributions(draw):
    """A pair p, q with zeros, ties, p = q and one-hot rows among them."""
    size = draw(st.integers(2, 8))

    def one():
        kind = draw(st.sampled_from(["weights", "sparse", "one-hot"]))
        if kind == "one-hot":
            return np.eye(size)[draw(st.integers(0, size - 1))]
        elements = st.sampled_from([0.0, 1.0, 2.0]) if kind == "sparse" else st.floats(1e-6, 1)
        weights = draw(hnp.arrays(np.float64, size, elements=elements))
        return weights / weights.sum() if weights.sum() > 0 else np.full(size, 1 / size)

    q = one()
    return (q.copy() if draw(st.booleans()) and draw(st.booleans()) else one()), q


@every_rule
@settings(max_examples=25, deadline=None)
@given(distributions(), st.data())
def test_phi_and_g_follow_the_formulas(rule, pair, data):
    p, q = pair
    n = data.draw(st.integers(0, len(q) - 1))
    for draft in (p, None):
        phi, g = reference(rule, draft, q, n)
        assert phi_of(rule, draft, q, n) == pytest.approx(phi, abs=1e-7)
        # A residual of rounding noise is drawn from with a probability of rounding noise: nothing to compare.
        if g is not None and phi < 1 - 1e-9:
            np.testing.assert_allclose(g_of(rule, draft, q, n), g, atol=1e-6)


@every_rule
@settings(max_examples=25, deadline=None)
@given(distributions(), st.data())
def test_what_the_verifier_excludes_is_neither_accepted_nor_recovered(rule, pair, data):
    p, q = pair
    n = data.draw(st.integers(0, len(q) - 1))
    for draft in (p, None):
        assert (phi_of(rule, draft, q, n) > 0) <= (q[n] > 0)
        g = g_of(rule, draft, q, n)
        assert not g[q == 0].any()
        # A rejected token comes back only where the verifier has no other.
        assert g[n] == 0 or q[n] == 1


@every_rule
def test_gamma_stays_between_q_and_one(rule):
    q = torch.cat([torch.linspace(0, 1, 1001), torch.logspace(-37, -3, 200), 1 - torch.logspace(-7, -3, 50)])
    gamma = rule.gamma(q)
    assert bool((gamma >= q).all()) and bool((gamma <= 1).all())
    assert not gamma[q == 0].any()


@pytest.mark.parametrize("delta", [1e-6, 0.01, 0.3, 0.75, 5.0])
def test_divergence_and_the_budget(delta):
    q = torch.linspace(0.001, 0.999, 500, dtype=torch.float64)
    verifier = Rows.from_probs(torch.stack([q, 1 - q], -1)[None])
    drafted = torch.zeros(1, 500, dtype=torch.long)
    for rule in (Cactus(delta), CactusExact(delta)):
        spent = rule.divergence(drafted, verifier, None)[0]
        gamma = rule.gamma(q)
        expected = [divergence(min(g, 1.0), x) for g, x in zip(gamma.tolist(), q.tolist(), strict=True)]
        np.testing.assert_allclose(spent.numpy(), expected, atol=1e-9)
        kept = gamma <= 0.5 if isinstance(rule, Cactus) else torch.ones_like(q, dtype=torch.bool)
        assert bool((spent[kept] <= delta + 1e-9).all())
        assert bool((spent <= 2 * delta + 1e-9).all())
    # The closed form does overspend while it can at all, KL(h || q) <= -log q_n: the second bound is needed.
    assert (Cactus(delta).divergence(drafted, verifier, None).max() > delta) == (delta < 1.25)


@every_rule
def test_no_budget_no_divergence(rule):
    q = torch.rand(1, 4, 9)
    spent = rule.divergence(torch.randint(9, (1, 4)), Rows.from_probs(q), None)
    lossless = isinstance(rule, Speculative) or getattr(rule, "delta", 1) == 0 or getattr(rule, "factor", 2) == 1
    assert bool((spent == 0).all()) == lossless


@every_rule
def test_a_draft_probability_that_underflows(rule):
    drafted = torch.tensor([[1]])
    draft = Rows(torch.tensor([[[0.0, -1000.0, 0.0]]]))
    likely = Rows(torch.tensor([[[0.0, 1.0, 0.0]]]))
    excluded = Rows(torch.tensor([[[0.0, -torch.inf, 0.0]]]))
    assert rule.acceptance_probability(drafted, likely, draft) == 1
    assert rule.acceptance_probability(drafted, excluded, draft) == 0
    # Both underflow in float32, q_n by less: still accepted. Both alike: the ratio is what counts.
    tiny = Rows(torch.tensor([[[0.0, -80.0, 0.0]]]))
    assert rule.acceptance_probability(drafted, tiny, draft) == 1
    smaller = Rows(torch.tensor([[[0.0, -82.0, 0.0]]]))
    lossless = Speculative().acceptance_probability(drafted, smaller, tiny).item()
    assert lossless == pytest.approx(math.exp(-2), rel=1e-3)


@every_rule
def test_a_verifier_with_one_token_left(rule):
    alone = torch.tensor([[[-torch.inf, 3.0, -torch.inf]]])
    draft = Rows(torch.zeros(1, 1, 3))
    for n, phi in ((0, 0.0), (1, 1.0), (2, 0.0)):
        drafted = torch.tensor([[n]])
        for p in (draft, None):
            assert rule.acceptance_probability(drafted, Rows(alone), p) == phi
            probs = None if p is None else torch.full((1, 3), 1 / 3)
            weights = rule.recovery_weights(drafted[0], alone[0].softmax(-1), probs)
            assert weights.argmax() == 1 and weights.count_nonzero() == 1


@every_rule
def test_an_empty_residual_falls_back_to_the_verifier_without_the_rejected_token(rule):
    q = torch.tensor([[0.5, 0.25, 0.25, 0.0]])
    weights = rule.recovery_weights(torch.tensor([1]), q, q.clone())
    assert torch.allclose(weights / weights.sum(), torch.tensor([[2 / 3, 0.0, 1 / 3, 0.0]]))


def test_without_a_limit_every_token_that_the_verifier_allows_is_kept():
    q = torch.tensor([[[1e-30, 0.5, 0.0, 1.0]]]).double()
    verifier = Rows.from_probs((q / q.sum()).expand(1, 4, 4))
    drafted = torch.arange(4)[None]
    for rule in (Cactus(math.inf), CactusExact(math.inf), Lenience(math.inf)):
        for draft in (Rows(torch.zeros(1, 4, 4)), None):
            assert rule.acceptance_probability(drafted, verifier, draft).tolist() == [[1, 1, 0, 1]]


@pytest.mark.parametrize("rule_class", [Cactus, CactusExact, Lenience])
def test_one_parameter_per_sequence(rule_class):
    parameters = [1.0, 1.5, 8.0]
    per_row = rule_class(torch.tensor(parameters))
    generator = torch.Generator().manual_seed(0)
    p, q = (torch.randn(3, 4, 6, generator=generator) for _ in range(2))
    drafted = torch.randint(6, (3, 4), generator=generator)
    last = drafted[:, -1], q[:, -1].softmax(-1), p[:, -1].softmax(-1)
    phi = per_row.acceptance_probability(drafted, Rows(q), Rows(p))
    spent = per_row.divergence(drafted, Rows(q), Rows(p))
    weights = per_row.recovery_weights(*last)
    for row, parameter in enumerate(parameters):
        one = slice(row, row + 1)
        alone = rule_class(parameter)
        assert torch.equal(phi[one], alone.acceptance_probability(drafted[one], Rows(q[one]), Rows(p[one])))
        assert torch.equal(spent[one], alone.divergence(drafted[one], Rows(q[one]), Rows(p[one])))
        assert torch.equal(weights[one], alone.recovery_weights(*(x[one] for x in last)))

    kept = torch.tensor([2, 0])
    fewer = per_row.select(kept)
    assert torch.equal(fewer.acceptance_probability(drafted[kept], Rows(q[kept]), Rows(p[kept])), phi[kept])
    for shared in (rule_class(1.5), Speculative()):
        assert shared.select(kept) is shared


@every_rule
def test_half_precision_is_computed_in_float32(rule):
    scores = torch.randn(2, 2, 3, 50).to(torch.float16)
    drafted = torch.randint(50, (2, 3))
    phi = rule.acceptance_probability(drafted, Rows(scores[0]), Rows(scores[1]))
    assert phi.dtype == torch.float32
    assert torch.equal(phi, rule.acceptance_probability(drafted, Rows(scores[0].float()), Rows(scores[1].float())))


@every_rule
def test_rules_are_immutable_values(rule):
    with pytest.raises(dataclasses.FrozenInstanceError):
        rule.delta = 5.0
    before = repr(rule)
    rule.acceptance_probability(torch.zeros(1, 1, dtype=torch.long), Rows(torch.zeros(1, 1, 3)), None)
    assert repr(rule) == before
    assert len({rule, rule}) == 1


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: Cactus(-1), ValueError, "delta must be at least 0.*-1"),
        (lambda: Cactus(math.nan), ValueError, "delta must be at least 0"),
        (lambda: Cactus("0.5"), TypeError, "delta must be a number.*'0.5'"),
        (lambda: Cactus(None), TypeError, "delta must be a number"),
        (lambda: Cactus(True), TypeError, "delta must be a number"),
        (lambda: Cactus(torch.tensor([0.1, -0.1])), ValueError, "every delta must be at least 0"),
        (lambda: Cactus(torch.zeros(2, 2)), ValueError, r"shape \[batch\]"),
        (lambda: Cactus(torch.tensor([True])), ValueError, r"shape \[batch\]"),
        (lambda: CactusExact(-0.5), ValueError, "delta must be at least 0"),
        (lambda: CactusExact([0.5]), TypeError, "delta must be a number"),
        (lambda: Lenience(0.9), ValueError, "factor must be at least 1"),
        (lambda: Lenience(math.nan), ValueError, "factor must be at least 1"),
        (lambda: Lenience("2"), TypeError, "factor must be a number"),
        (lambda: Lenience(torch.tensor([0.5])), ValueError, "every factor must be at least 1"),
    ],
)
def test_parameter_errors(make, error, message):
    with pytest.raises(error, match=message):
        make()


def test_a_rule_with_a_gamma_of_its_own_has_it_for_single_numbers_too():
    class Halved(Cactus):
        def gamma(self, q_n):
            return (super().gamma(q_n) + q_n) / 2

    class Same(Cactus):
        pass

    q_n = torch.tensor([0.0, 1e-6, 0.2, 0.7, 1.0], dtype=torch.float64)
    for rule in (Halved(0.5), Same(0.5), Cactus(0.5), Cactus(math.inf), CactusExact(0.5), Speculative()):
        alone = torch.tensor([rule.gamma_of(value) for value in q_n.tolist()], dtype=torch.float64)
        torch.testing.assert_close(alone, rule.gamma(q_n), rtol=1e-12, atol=1e-12)
    assert Halved(0.5).gamma_of(0.2) < Cactus(0.5).gamma_of(0.2)
