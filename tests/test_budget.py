"""How far a budget raises a probability, against a bisection in plain Python floats."""

import math

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from transformers_cactus import gamma_star
from transformers_cactus.budget import two_point_kl

PROBABILITIES = st.one_of(
    st.floats(1e-8, 1 - 1e-8),
    st.floats(math.log(1e-8), 0).map(math.exp).map(lambda q: min(q, 1 - 1e-8)),
    st.floats(math.log(1e-8), math.log(0.5)).map(lambda x: 1 - math.exp(x)),
)
BUDGETS = st.one_of(st.floats(0, 20), st.floats(-30, 3).map(lambda x: math.exp(x) if x < 2.9 else 20.0))


def kl(gamma: float, q: float) -> float:
    """KL between the coins `gamma` and `q`, in float64."""
    if gamma == q:
        return 0.0
    tail = 0.0 if gamma == 1 else (1 - gamma) * (math.log1p(-gamma) - math.log1p(-q))
    return gamma * (math.log(gamma) - math.log(q)) + tail


def bisect(q: float, delta: float) -> float:
    """The largest `gamma` in `[q, 1]` within the budget."""
    if delta >= -math.log(q):
        return 1.0
    low, high = q, 1.0
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if kl(middle, q) <= delta else (low, middle)
    return low


def in_float32(x: float) -> float:
    return torch.tensor(x, dtype=torch.float32).item()


@settings(max_examples=120, deadline=None)
@given(st.lists(st.tuples(PROBABILITIES, BUDGETS), min_size=1, max_size=20))
@example([(1e-8, 20.0), (1e-8, 0.0), (1 - 1e-8, 1e-9), (0.5, math.log(2)), (1e-8, 18.42068), (0.9, 0.1)])
def test_exact_root_equals_bisection(pairs):
    pairs = [(in_float32(q), in_float32(delta)) for q, delta in pairs]
    q, delta = torch.tensor(pairs, dtype=torch.float32).unbind(-1)
    gamma = gamma_star(q, delta, rule="cactus-exact")
    assert gamma.dtype == torch.float32
    for found, (q_n, budget) in zip(gamma.double().tolist(), pairs, strict=True):
        if q_n == 1:  # 1 - 1e-8 rounds to 1 in float32
            assert found == 1
            continue
        assert abs(found - bisect(q_n, budget)) < 1e-6
        assert kl(found, q_n) <= budget + 1e-5


@settings(max_examples=150, deadline=None)
@given(PROBABILITIES, BUDGETS)
def test_exact_root_in_float64(q, delta):
    gamma = gamma_star(q, delta, rule="cactus-exact")
    assert q <= gamma <= 1
    assert kl(gamma, q) <= delta + 1e-12
    # The divergence is flat at gamma = q: rounding of 1e-16 in it is one of 1e-8 in the bisection's gamma.
    assert gamma == pytest.approx(bisect(q, delta), abs=1e-7)


@settings(max_examples=150, deadline=None)
@given(PROBABILITIES, st.floats(-1e-3, 1e-3))
def test_exact_root_is_one_exactly_from_minus_log_q_on(q, offset):
    threshold = -math.log(q)
    delta = max(threshold + offset, 0.0)
    certain = gamma_star(q, delta, rule="cactus-exact") == 1
    if abs(delta - threshold) > 1e-12:
        assert certain == (delta > threshold)
    assert gamma_star(q, math.nextafter(threshold, math.inf), rule="cactus-exact") == 1


@settings(max_examples=100, deadline=None)
@given(PROBABILITIES, BUDGETS)
def test_closed_form(q, delta):
    gamma = gamma_star(q, delta)
    assert gamma == pytest.approx(min(q + math.sqrt(2 * delta * q * (1 - q)), 1), rel=1e-12)
    if gamma <= 0.5:
        assert kl(gamma, q) <= delta + 1e-12  # Corollary 6
        # A second-order budget that is kept can only undershoot the exact root.
        assert gamma <= bisect(q, delta) + 1e-9
    elif gamma < 1:
        assert kl(gamma, q) <= 2 * delta + 1e-12


def test_closed_form_is_one_from_the_documented_probability_on():
    for delta in (0.25, 0.75, 1.0):
        threshold = 1 / (1 + 2 * delta)
        assert gamma_star(threshold * (1 + 1e-9), delta) == 1
        assert gamma_star(threshold * (1 - 1e-6), delta) < 1


@pytest.mark.parametrize("rule", ["cactus", "cactus-exact"])
@settings(max_examples=100, deadline=None)
@given(q=PROBABILITIES, deltas=st.lists(BUDGETS, min_size=2, max_size=20))
def test_gamma_grows_with_the_budget_and_stays_in_range(rule, q, deltas):
    budgets = torch.tensor(sorted(deltas))
    probability = torch.tensor(q, dtype=torch.float32)
    gamma = gamma_star(probability, budgets, rule=rule)
    assert gamma.shape == budgets.shape
    assert bool((gamma.diff() >= 0).all())
    assert bool((gamma >= probability).all()) and bool((gamma <= 1).all())


@pytest.mark.parametrize("rule", ["cactus", "cactus-exact"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_degenerate_values(rule, dtype):
    q = torch.tensor([0.0, 0.3, 1.0], dtype=dtype)
    assert torch.equal(gamma_star(q, 0.0, rule=rule), q)
    assert torch.equal(gamma_star(q, math.inf, rule=rule), torch.tensor([0.0, 1.0, 1.0], dtype=dtype))
    middle = gamma_star(q, 0.1, rule=rule)
    assert middle[0] == 0 and middle[2] == 1 and 0.3 < middle[1] < 1
    smallest = torch.tensor([torch.finfo(dtype).tiny], dtype=dtype)
    for delta in (1e-9, 1.0, 700.0):
        raised = gamma_star(smallest, delta, rule=rule)
        assert bool((raised >= smallest).all()) and bool((raised <= 1).all())


def test_exact_root_of_known_values():
    # KL(1/2 || 1/5) = log(2.5) / 2 + log(0.625) / 2 = log(1.25).
    assert gamma_star(0.2, math.log(1.25), rule="cactus-exact") == pytest.approx(0.5, abs=1e-12)
    assert gamma_star(0.1, 0.5) == pytest.approx(0.4, abs=1e-12)
    assert gamma_star(0.1, 0.5, rule="speculative") == 0.1


@pytest.mark.parametrize("rule", ["speculative", "cactus", "cactus-exact"])
def test_number_in_number_out_and_shapes_broadcast(rule):
    assert type(gamma_star(0.25, 1, rule=rule)) is float
    assert type(gamma_star(1, 0, rule=rule)) is float
    q = torch.rand(3, 4)
    assert gamma_star(q, 0.5, rule=rule).shape == (3, 4)
    per_row = torch.tensor([[0.0], [0.5], [2.0]])
    together = gamma_star(q, per_row, rule=rule)
    for row in range(3):
        assert torch.equal(together[row], gamma_star(q[row], per_row[row].item(), rule=rule))
    assert gamma_star(0.25, torch.tensor([0.0, 1.0]), rule=rule).shape == (2,)
    half = gamma_star(torch.tensor([0.25], dtype=torch.bfloat16), 0.5, rule=rule)
    assert half.dtype == torch.float32


@pytest.mark.parametrize(
    ("q", "delta", "rule", "error", "message"),
    [
        (0.5, -0.1, "cactus", ValueError, "delta must be at least 0"),
        (0.5, math.nan, "cactus", ValueError, "delta must be at least 0"),
        (0.5, "1", "cactus", TypeError, "delta must be a number"),
        (0.5, True, "cactus", TypeError, "delta must be a number"),
        (0.5, torch.tensor([0.1, -1.0]), "cactus", ValueError, "every delta"),
        (0.5, torch.tensor([math.nan]), "cactus", ValueError, "every delta"),
        (1.5, 0.1, "cactus", ValueError, r"in \[0, 1\]"),
        (-0.1, 0.1, "cactus", ValueError, r"in \[0, 1\]"),
        (math.nan, 0.1, "cactus", ValueError, r"in \[0, 1\]"),
        (0.5, 0.1, "catcus", ValueError, "catcus"),
    ],
)
def test_errors_name_what_is_wrong(q, delta, rule, error, message):
    with pytest.raises(error, match=message):
        gamma_star(q, delta, rule=rule)


@settings(max_examples=100, deadline=None)
@given(PROBABILITIES, st.floats(0, 1))
def test_two_point_divergence(q, share):
    gamma = q + share * (1 - q)
    value = two_point_kl(torch.tensor(gamma, dtype=torch.float64), torch.tensor(q, dtype=torch.float64)).item()
    assert value == pytest.approx(kl(min(gamma, 1.0), q), rel=1e-9, abs=1e-12)


def test_two_point_divergence_at_the_ends():
    zero, half, one = torch.tensor(0.0), torch.tensor(0.5), torch.tensor(1.0)
    assert two_point_kl(zero, zero) == 0 and two_point_kl(one, one) == 0 and two_point_kl(half, half) == 0
    assert two_point_kl(one, half) == pytest.approx(math.log(2))
    assert two_point_kl(half, zero) == math.inf
