"""The rules beyond the paper's own: acceptance, recovery and effective distribution, against formulas in NumPy."""

import math
import warnings

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from scipy.special import entr, xlogy

import test_acceptance
from test_effective import distributions
from transformers_cactus import (
    Cactus,
    CactusExact,
    ChiSquare,
    Ensemble,
    FDivergence,
    JensenShannon,
    Optimal,
    ReverseKL,
    Speculative,
    SquaredHellinger,
    TopK,
    TotalVariation,
    Typical,
    effective_distribution,
    verify,
    verify_block,
)
from transformers_cactus.budget import largest_gamma
from transformers_cactus.rows import Rows
from transformers_cactus.rules.optimal import normalizer

F = {
    ChiSquare: lambda t: (t - 1) ** 2,
    TotalVariation: lambda t: np.abs(t - 1) / 2,
    ReverseKL: lambda t: -np.log(t),
    SquaredHellinger: lambda t: (np.sqrt(t) - 1) ** 2 / 2,
    JensenShannon: lambda t: (xlogy(t, t) - (t + 1) * np.log((t + 1) / 2)) / 2,
}
"""The `f` of each f-divergence."""

WHOLE_ROW = {
    "ensemble-0": Ensemble(0.0),
    "ensemble-0.4": Ensemble(0.4),
    "ensemble-within-0": Ensemble(0.0, within_support=True),
    "ensemble-within-0.4": Ensemble(0.4, within_support=True),
    "optimal-0.5": Optimal(0.5),
    "optimal-3": Optimal(3.0),
    "optimal-inf": Optimal(math.inf),
}
THRESHOLD = {
    "typical": Typical(),
    "typical-argmax": Typical(0.3, 0.9, "argmax"),
    "top-1": TopK(1),
    "top-3": TopK(3),
}
FAMILY = {f"{cls.__name__}-{delta}": cls(delta) for cls in F for delta in (0.2, math.inf)}
BEYOND = WHOLE_ROW | THRESHOLD | FAMILY
ALL = test_acceptance.RULES | BEYOND
"""With the paper's own."""
every_rule = pytest.mark.parametrize("rule", BEYOND.values(), ids=BEYOND)
whole_row = pytest.mark.parametrize("rule", WHOLE_ROW.values(), ids=WHOLE_ROW)
threshold = pytest.mark.parametrize("rule", THRESHOLD.values(), ids=THRESHOLD)


def spent(f, gamma, q_n):
    with np.errstate(divide="ignore", invalid="ignore"):
        return q_n * f(gamma / q_n) + (1 - q_n) * f((1 - gamma) / (1 - q_n))


def rows(probs):
    """One position of one sequence."""
    return Rows.from_probs(torch.from_numpy(probs)[None, None])


def phi_of(rule, p, q, n):
    drafted = torch.tensor([[n]])
    return rule.acceptance_probability(drafted, rows(q), None if p is None else rows(p)).item()


def g_of(rule, p, q, n):
    draft = None if p is None else torch.from_numpy(p)[None]
    weights = rule.recovery_weights(torch.tensor([n]), torch.from_numpy(q)[None], draft)
    assert bool((weights >= 0).all()) and 0 < weights.sum() < math.inf
    return (weights / weights.sum())[0].numpy()


def kl(x, y):
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.where(x > 0, x * np.log(x / y), 0.0).sum()


# The f-divergence family.


@pytest.mark.parametrize("rule_class", F)
@pytest.mark.parametrize("delta", [1e-6, 0.01, 0.2, 0.6, 3.0])
def test_gamma_is_the_largest_within_the_budget(rule_class, delta):
    q = np.concatenate([np.logspace(-10, -2, 40), np.linspace(0.02, 0.99, 60), 1 - np.logspace(-2, -8, 20)])
    gamma = rule_class(delta).gamma(torch.from_numpy(q)).numpy()
    f = F[rule_class]
    assert (gamma >= q).all() and (gamma <= 1).all()
    assert (spent(f, np.minimum(gamma, 1), q) <= delta * (1 + 1e-9) + 1e-12)[gamma < 1].all()
    # A step further is beyond it; one of a share of what was gained, for the rounding of small divergences.
    further = gamma + np.maximum(1e-4 * (gamma - q), 1e-12)
    room = further < 1
    assert (spent(f, further[room], q[room]) > delta).all()
    # The edge itself is within the budget where the rule goes all the way.
    assert (spent(f, np.ones_like(q), q) <= delta * (1 + 1e-9))[gamma == 1].all()


@pytest.mark.parametrize("rule_class", F)
def test_edges_of_the_family(rule_class):
    q = torch.tensor([0.0, 1e-30, 0.3, 1.0], dtype=torch.float64)
    assert rule_class(0.0).gamma(q).tolist() == q.tolist() and rule_class(0.0).is_lossless
    assert rule_class(math.inf).gamma(q)[[0, 3]].tolist() == [0, 1]
    assert (rule_class(math.inf).gamma(q)[1:] > 1 - 1e-12).all()


def test_chi_square_is_the_papers_rule_at_twice_its_budget():
    q = torch.linspace(0, 1, 101)
    assert torch.allclose(ChiSquare(1.5).gamma(q), Cactus(0.75).gamma(q))


@pytest.mark.parametrize("rule_class", [*F, CactusExact])
def test_a_function_of_ones_own(rule_class):
    functions = {
        ChiSquare: lambda t: (t - 1) ** 2,
        TotalVariation: lambda t: (t - 1).abs() / 2,
        ReverseKL: lambda t: -t.log(),
        SquaredHellinger: lambda t: 1 - t.sqrt(),
        JensenShannon: lambda t: (t * t.log() - (t + 1) * ((t + 1) / 2).log()) / 2,
        CactusExact: lambda t: t * t.log() - t + 1,
    }
    q = torch.rand(7, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    own = FDivergence(0.2, functions[rule_class]).gamma(q)
    assert torch.allclose(own, rule_class(0.2).gamma(q), rtol=0, atol=1e-7)


@pytest.mark.parametrize(
    ("f", "error", "message"),
    [
        (lambda t: t.sqrt() - 1, ValueError, "must be convex"),
        (lambda t: t**2, ValueError, r"f\(1\) must be 0, got 1"),
        (lambda t: t - 1, ValueError, "must bend at 1"),
        (lambda t: (t - 2).log() * 0, ValueError, "must be finite"),
        (lambda t: t.sum(), TypeError, "argument's shape"),
        (lambda t: 0.0, TypeError, "argument's shape"),
        ("kl", TypeError, "must be a function"),
    ],
)
def test_functions_that_make_no_divergence(f, error, message):
    with pytest.raises(error, match=message):
        FDivergence(0.1, f)


def test_the_grid_search_equals_the_newton_solver():
    q = torch.rand(2000, dtype=torch.float64, generator=torch.Generator().manual_seed(0)) ** 3
    delta = 2 * torch.rand(2000, dtype=torch.float64, generator=torch.Generator().manual_seed(1)) ** 2
    found = largest_gamma(q, delta, lambda t: torch.special.xlogy(t, t))
    assert torch.allclose(found, CactusExact(delta).gamma(q), rtol=0, atol=1e-9)


# Rules with a target of their own.


def reference_target(rule, p, q):
    """`h` by the definition; `optimal` by bisection in the logarithm."""
    if isinstance(rule, Ensemble):
        kept = np.where((q > 0) | (not rule.within_support), p, 0.0)
        return rule.weight * q + (1 - rule.weight) * (kept + (1 - kept.sum()) * q)
    upper = min(rule.multiplier, 80.0)
    low, high = -upper, 0.0
    for _ in range(200):
        nu = (low + high) / 2
        total = np.clip(p, q * math.exp(nu), q * math.exp(nu + upper)).sum()
        low, high = (nu, high) if total < 1 else (low, nu)
    return np.clip(p, q * math.exp(high), q * math.exp(high + upper))


@whole_row
@settings(max_examples=25, deadline=None)
@given(distributions(), st.data())
def test_target_acceptance_and_recovery(rule, pair, data):
    p, q = pair
    h = rule.target(torch.from_numpy(q), torch.from_numpy(p)).numpy()
    np.testing.assert_allclose(h, reference_target(rule, p, q), rtol=0, atol=1e-8)
    n = data.draw(st.integers(0, len(q) - 1))
    phi = phi_of(rule, p, q, n)
    if p[n] > 0:
        assert phi == pytest.approx(min(1, h[n] / p[n]), abs=1e-9)
    residual = np.maximum(h - p, 0)
    if phi < 1 - 1e-9 and residual.sum() > 1e-9:
        np.testing.assert_allclose(g_of(rule, p, q, n), residual / residual.sum(), rtol=0, atol=1e-6)
    if not rule.leaves_support:
        assert (phi > 0) <= (q[n] > 0)
        assert not h[q == 0].any()
    assert not g_of(rule, p, q, n)[q == 0].any()


@whole_row
@settings(max_examples=20, deadline=None)
@given(distributions(), st.data())
def test_without_draft_probabilities_the_target_is_that_of_a_one_hot_draft(rule, pair, data):
    _, q = pair
    n = data.draw(st.integers(0, len(q) - 1))
    one_hot = np.eye(len(q))[n]
    h = reference_target(rule, one_hot, q)
    if q[n] == 0 and not rule.leaves_support:
        h = q
    assert phi_of(rule, None, q, n) == pytest.approx(h[n], abs=1e-9)
    if h[n] < 1 - 1e-9:
        others = np.where(np.arange(len(q)) == n, 0, q)
        np.testing.assert_allclose(g_of(rule, None, q, n), others / others.sum(), rtol=0, atol=1e-9)
    drafted = torch.tensor([[n]])
    assert rule.divergence(drafted, rows(q), None).item() == pytest.approx(kl(h, q), abs=1e-7)


@whole_row
@settings(max_examples=20, deadline=None)
@given(distributions(), st.data())
def test_divergence_is_that_of_the_target(rule, pair, data):
    p, q = pair
    n = data.draw(st.integers(0, len(q) - 1))
    found = rule.divergence(torch.tensor([[n]]), rows(q), rows(p)).item()
    assert found == pytest.approx(kl(reference_target(rule, p, q), q), abs=1e-6)


@pytest.mark.parametrize("multiplier", [0.1, 0.7, 2.0, 8.0])
@settings(max_examples=25, deadline=None)
@given(distributions(smallest=1e-9), st.integers(0, 2**31))
def test_optimal_fulfils_its_optimality_conditions(multiplier, pair, seed):
    p, q = pair
    h = Optimal(multiplier).target(torch.from_numpy(q), torch.from_numpy(p)).numpy()
    raised = np.log(h / q)
    # One constant where h > p, larger by the multiplier where h < p, and between the two where h = p.
    surplus, deficit = h > p * (1 + 1e-9), h < p * (1 - 1e-9)
    bottom = raised[surplus].mean() if surplus.any() else raised.min()
    assert np.abs(raised[surplus] - bottom).max(initial=0) < 1e-7
    assert np.abs(raised[deficit] - bottom - multiplier).max(initial=0) < (1e-7 if surplus.any() else math.inf)
    assert (raised >= bottom - 1e-7).all() and (raised <= bottom + multiplier + 1e-7).all()

    def objective(x):
        return np.minimum(p, x).sum() - kl(x, q) / multiplier

    # The problem is concave, so this is the best there is. Nothing near it or far from it does better.
    best = objective(h)
    generator = np.random.default_rng(seed)
    for other in (p, q, *generator.dirichlet(np.ones(len(q)), 5)):
        for step in (1e-3, 0.1, 1.0):
            assert objective((1 - step) * h + step * other) <= best + 1e-9


def test_optimal_is_the_cheapest_at_its_acceptance():
    # Cactus and the ensemble at the acceptance of `optimal` emit something further from the verifier.
    generator = torch.Generator().manual_seed(0)
    q = (4 * torch.randn(200, 200, generator=generator, dtype=torch.float64)).softmax(-1)
    p = (q.log() + 1.5 * torch.randn(200, 200, generator=generator, dtype=torch.float64)).softmax(-1)

    def point(rule):
        emitted = effective_distribution(p, q, rule)
        return torch.minimum(p, emitted).sum(-1).mean().item(), (emitted * (emitted / q).log()).sum(-1).mean().item()

    curve = [point(Optimal(x)) for x in np.linspace(0.05, 2, 40)]
    for rule in (Ensemble(0.4), Ensemble(0.7)):
        accepted, divergence = point(rule)
        assert np.interp(accepted, *zip(*curve, strict=True)) < 0.95 * divergence


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("multiplier", [0.0, 0.05, 0.5, 2.0, 10.0, 50.0])
def test_the_normalizer_converges(multiplier, dtype):
    generator = torch.Generator().manual_seed(0)
    z = 4 * torch.randn(400, 300, generator=generator, dtype=torch.float64)
    kept = torch.where(z >= z.topk(20).values[:, -1:], z, -torch.inf)
    noise = torch.randn(400, 300, generator=generator, dtype=torch.float64)
    few = torch.where(torch.arange(300) < 4, z, -torch.inf)
    pairs = [(z, z + 1.5 * noise), (z, -z), (kept, kept + noise), (kept, z + noise), (few, -few), (z, z), (kept, -z)]
    ratio = torch.tensor(multiplier, dtype=dtype).exp()
    for scores, draft_scores in pairs:
        q, p = scores.softmax(-1).to(dtype), draft_scores.softmax(-1).nan_to_num().to(dtype)
        scale = normalizer(q, p, ratio)
        assert bool((scale >= (1 - 1e-6) / ratio).all()) and bool((scale <= 1).all())
        total = p.clamp(min=scale * q, max=scale * ratio * q).sum(-1)
        assert (total - 1).abs().max() < (1e-9 if dtype == torch.float64 else 1e-5)


# Rules with a threshold.


def reference_acceptance(rule, q):
    if isinstance(rule, Typical):
        return q > min(rule.posterior_threshold, rule.posterior_alpha * math.exp(-entr(q).sum()))
    return np.array([(q > x).sum() < rule.k for x in q]) & (q > 0)


def reference_recovery(rule, p, q):
    if isinstance(rule, Typical):
        return q if rule.recovery_from == "sample" else np.eye(len(q))[q.argmax()]
    cut = np.where(reference_acceptance(rule, q), q, 0)
    residual = np.maximum(cut / cut.sum() - p, 0)
    return residual / residual.sum() if residual.sum() > 0 else cut / cut.sum()


@threshold
@settings(max_examples=25, deadline=None)
@given(distributions(), st.data())
def test_threshold_acceptance_and_recovery(rule, pair, data):
    p, q = pair
    n = data.draw(st.integers(0, len(q) - 1))
    # Not a tie but for the last digit.
    assume(not ((np.diff(np.sort(q)) > 0) & (np.diff(np.sort(q)) < 1e-12)).any())
    accepted = bool(reference_acceptance(rule, q)[n])
    for draft in (p, None):
        assert phi_of(rule, draft, q, n) == accepted
        if not accepted:
            expected = reference_recovery(rule, np.eye(len(q))[n] if draft is None else p, q)
            if draft is not None and isinstance(rule, TopK) and p[n] < 1e-9:
                continue
            np.testing.assert_allclose(g_of(rule, draft, q, n), expected, rtol=0, atol=1e-6)
    # Given the drafted token, h is one-hot on it, or the recovery.
    h = np.eye(len(q))[n] if accepted else reference_recovery(rule, np.eye(len(q))[n], q)
    assert rule.divergence(torch.tensor([[n]]), rows(q), None).item() == pytest.approx(kl(h, q), abs=1e-9)


def test_typical_is_the_criterion_of_medusa():
    # evaluate_posterior of Medusa, written out: entropy with 1e-5 inside the logarithm, and `>`.
    generator = torch.Generator().manual_seed(0)
    logits = 3 * torch.randn(50, 4, 60, generator=generator)
    candidates = logits.softmax(-1).topk(6).indices[..., torch.arange(4) + 2].diagonal(dim1=-2, dim2=-1)
    posterior = torch.softmax(logits, dim=-1)
    candidates_prob = posterior.gather(-1, candidates[..., None])[..., 0]
    posterior_entropy = -torch.sum(posterior * torch.log(posterior + 1e-5), dim=-1)
    bound = torch.minimum(torch.ones_like(posterior_entropy) * 0.09, torch.exp(-posterior_entropy) * 0.3)
    expected = candidates_prob > bound
    assert 0.2 < expected.double().mean() < 0.8
    found = Typical().acceptance_probability(candidates, Rows(logits), None)
    assert torch.equal(found.bool(), expected)


def test_top_k_keeps_ties_and_never_what_the_verifier_excludes():
    q = torch.tensor([[[0.4, 0.2, 0.2, 0.2, 0.0]]]).expand(1, 5, 5)
    drafted = torch.arange(5)[None]
    assert TopK(2).acceptance_probability(drafted, Rows.from_probs(q), None).tolist() == [[1, 1, 1, 1, 0]]
    assert TopK(1).acceptance_probability(drafted, Rows.from_probs(q), None).tolist() == [[1, 0, 0, 0, 0]]
    assert TopK(99).acceptance_probability(drafted, Rows.from_probs(q), None).tolist() == [[1, 1, 1, 1, 0]]


# All of them.


@every_rule
@settings(max_examples=12, deadline=None)
@given(distributions())
def test_the_effective_distribution_equals_the_definition(rule, pair):
    p, q = (torch.from_numpy(x) for x in pair)
    fast = effective_distribution(p, q, rule)
    torch.testing.assert_close(fast, effective_distribution(p, q, rule, method="definition"), rtol=0, atol=1e-10)
    assert abs(fast.sum().item() - 1) < 1e-10
    if not rule.leaves_support:
        assert not fast[q == 0].any()


@every_rule
def test_the_effective_distribution_of_many_rows(rule):
    generator = torch.Generator().manual_seed(0)
    p, q = (3 * torch.randn(2, 3, 60, generator=generator) for _ in range(2))
    p, q = p.softmax(-1), q.softmax(-1)
    p[0, 0], q[0, 1, 40:] = q[0, 0], 0.0
    emitted = effective_distribution(p, q / q.sum(-1, keepdim=True), rule)
    by_definition = effective_distribution(p, q / q.sum(-1, keepdim=True), rule, method="definition")
    assert emitted.shape == (2, 3, 60)
    assert torch.allclose(emitted, by_definition, rtol=0, atol=1e-10)


@pytest.mark.parametrize(
    "rule", [Ensemble(1.0), Optimal(0.0), *(rule_class(0.0) for rule_class in F)], ids=lambda rule: type(rule).__name__
)
@settings(max_examples=20, deadline=None)
@given(distributions())
def test_lossless_settings_emit_the_verifier(rule, pair):
    assert rule.is_lossless
    emitted = effective_distribution(*(torch.from_numpy(x) for x in pair), rule)
    np.testing.assert_allclose(emitted.numpy(), pair[1], rtol=0, atol=1e-10)


@pytest.mark.parametrize("side", ["verifier", "draft"])
@pytest.mark.parametrize("bad", [[math.nan, 0.0], [math.inf, 0.0], [-math.inf, -math.inf], [0.0, math.nan]])
@pytest.mark.parametrize("rule", ALL.values(), ids=ALL)
def test_a_row_that_is_no_distribution_is_never_accepted(rule, bad, side):
    scores = {"verifier": torch.zeros(1, 2, 2), "draft": torch.zeros(1, 2, 2)}
    scores[side] = torch.tensor([bad, bad])[None]
    phi = rule.acceptance_probability(torch.tensor([[0, 1]]), Rows(scores["verifier"]), Rows(scores["draft"]))
    assert not bool((phi > 0).any())


@every_rule
def test_a_verifier_with_one_token_left(rule):
    alone = torch.tensor([[[-torch.inf, 3.0, -torch.inf]]])
    for draft in (Rows(torch.zeros(1, 1, 3)), None):
        for n in range(3):
            drafted = torch.tensor([[n]])
            phi = rule.acceptance_probability(drafted, Rows(alone), draft)
            if not rule.leaves_support:
                assert phi == (n == 1)
            probs = None if draft is None else torch.full((1, 3), 1 / 3)
            weights = rule.recovery_weights(drafted[0], alone[0].softmax(-1), probs)
            assert weights.argmax() == 1 and weights.count_nonzero() == 1


@pytest.mark.parametrize(
    "make",
    [lambda x: Ensemble(x / 4), lambda x: Optimal(x), lambda x: Typical(x / 8, x), *F],
    ids=["ensemble", "optimal", "typical", *(rule_class.__name__ for rule_class in F)],
)
def test_one_parameter_per_sequence(make):
    parameters = [0.1, 0.6, 3.0]
    per_row = make(torch.tensor(parameters))
    assert per_row.batch_size == 3 and not per_row.is_lossless
    generator = torch.Generator().manual_seed(0)
    p, q = (torch.randn(3, 4, 6, generator=generator) for _ in range(2))
    drafted = torch.randint(6, (3, 4), generator=generator)
    last = drafted[:, -1], q[:, -1].softmax(-1), p[:, -1].softmax(-1)
    phi = per_row.acceptance_probability(drafted, Rows(q), Rows(p))
    divergence = per_row.divergence(drafted, Rows(q), Rows(p))
    weights = per_row.recovery_weights(*last)
    for row, parameter in enumerate(parameters):
        one = slice(row, row + 1)
        alone = make(parameter)
        arguments = drafted[one], Rows(q[one]), Rows(p[one])
        torch.testing.assert_close(phi[one], alone.acceptance_probability(*arguments))
        torch.testing.assert_close(divergence[one], alone.divergence(*arguments))
        torch.testing.assert_close(weights[one], alone.recovery_weights(*(x[one] for x in last)))
    kept = torch.tensor([2, 0])
    fewer = per_row.select(kept)
    torch.testing.assert_close(fewer.acceptance_probability(drafted[kept], Rows(q[kept]), Rows(p[kept])), phi[kept])


@every_rule
@pytest.mark.parametrize("draft_vocab", [6, 12])
def test_vocabularies_padded_differently(rule, draft_vocab):
    generator = torch.Generator().manual_seed(0)
    verifier = 2 * torch.randn(200, 5, 9, generator=generator)
    draft = 2 * torch.randn(200, 4, draft_vocab, generator=generator)
    tokens = torch.randint(6, (200, 4), generator=generator)
    outcome = verify(tokens, verifier, draft, rule, generator=torch.Generator().manual_seed(1))
    assert int(outcome.next_token.max()) < 9 and not bool(outcome.invalid.any())
    assert bool(outcome.divergence.isfinite().all())
    if draft_vocab < 9:
        padded = torch.nn.functional.pad(draft, (0, 3), value=-torch.inf)
        same = verify(tokens, verifier, padded, rule, generator=torch.Generator().manual_seed(1))
        assert torch.equal(outcome.accepted, same.accepted) and torch.equal(outcome.next_token, same.next_token)


class Waits(Cactus):
    def gamma(self, q_n):
        return q_n * q_n.sum().item()


def test_nothing_waits_for_the_device():
    # A tensor without data: whatever asked for a value of it would fail.
    tokens = torch.zeros(2, 3, dtype=torch.long, device="meta")
    verifier, draft = torch.zeros(2, 4, 50, device="meta"), torch.zeros(2, 3, 50, device="meta")
    own = FDivergence(0.1, lambda t: (t - 1) ** 2)
    rules = [*WHOLE_ROW.values(), *THRESHOLD.values(), *FAMILY.values(), own, Cactus(0.5), CactusExact(0.5)]
    for rule in rules:
        for scores in (draft, None):
            outcome = verify(tokens, verifier, scores, rule, certify=True)
            assert outcome.next_token.is_meta and outcome.certificate.shape == (2, 3)
    for rule in (Speculative(), *WHOLE_ROW.values()):
        assert verify_block(tokens, verifier, draft, rule).next_token.is_meta
    with pytest.raises(RuntimeError, match="meta"):
        verify(tokens, verifier, draft, Waits(0.5))


def test_measuring_is_optional():
    tokens, scores = torch.zeros(1, 2, dtype=torch.long), torch.zeros(1, 3, 4)
    assert verify(tokens, scores, scores[:, :2], Optimal(1.0), measure=False).divergence is None
    assert verify(tokens, scores, scores[:, :2], Optimal(1.0)).divergence.shape == (1, 2)


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: Ensemble(1.2), ValueError, "weight must be between 0 and 1"),
        (lambda: Ensemble(-0.1), ValueError, "weight must be between 0 and 1"),
        (lambda: Ensemble("half"), TypeError, "weight must be a number"),
        (lambda: Ensemble(0.5, 1), TypeError, "within_support must be True or False"),
        (lambda: Ensemble(torch.tensor([0.5, 2.0])), ValueError, "every weight must be between 0 and 1"),
        (lambda: Optimal(-1.0), ValueError, "multiplier must be at least 0"),
        (lambda: Optimal(math.nan), ValueError, "multiplier must be at least 0"),
        (lambda: Typical(1.5), ValueError, "posterior_threshold must be between 0 and 1"),
        (lambda: Typical(0.1, -1), ValueError, "posterior_alpha must be at least 0"),
        (lambda: Typical(recovery_from="best"), ValueError, "one of 'sample', 'argmax', got 'best'"),
        (lambda: TopK(0), ValueError, "k must be at least 1"),
        (lambda: TopK(2.0), TypeError, "k must be a whole number"),
        (lambda: TopK(True), TypeError, "k must be a whole number"),
        *(
            (lambda rule_class=rule_class: rule_class(-0.1), ValueError, "delta must be at least 0")
            for rule_class in F
        ),
    ],
)
def test_parameter_errors(make, error, message):
    with pytest.raises(error, match=message):
        make()


def test_only_an_unrestricted_mixture_leaves_the_support():
    leaving = [rule for rule in [*WHOLE_ROW.values(), *THRESHOLD.values(), *FAMILY.values()] if rule.leaves_support]
    assert leaving == [WHOLE_ROW["ensemble-0"], WHOLE_ROW["ensemble-0.4"]]
    assert not Ensemble(1.0).leaves_support and not Speculative().leaves_support
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert effective_distribution(torch.tensor([0.5, 0.5]), torch.tensor([1.0, 0.0]), Ensemble(0.5))[1] == 0.25
