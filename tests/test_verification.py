"""Verifying a block: exact cases, and one statistical check of the whole step per rule."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from transformers_cactus import Cactus, CactusExact, Lenience, Speculative, verification, verify
from transformers_cactus.verification import LARGE_ROW, sample

RULES = [Speculative(), Cactus(0.3), CactusExact(0.3), Lenience(2.0)]
every_rule = pytest.mark.parametrize("rule", RULES, ids=repr)


def seeded(seed=0):
    return torch.Generator().manual_seed(seed)


def block(batch=5, length=4, vocab=9, seed=0):
    """Drafted tokens, verifier's and draft's scores."""
    generator = seeded(seed)
    verifier, draft = (2 * torch.randn(batch, length + 1, vocab, generator=generator) for _ in range(2))
    return torch.randint(vocab, (batch, length), generator=generator), verifier, draft[:, :-1]


def equal(one, other):
    """Whether decisions are the same, and divergences up to rounding."""
    return all(
        a is b if a is None else torch.allclose(a, b, atol=1e-6) if a.is_floating_point() else torch.equal(a, b)
        for a, b in zip(one, other, strict=True)
    )


@every_rule
def test_same_generator_state_same_outcome(rule):
    tokens, verifier, draft = block()
    first = verify(tokens, verifier, draft, rule, generator=seeded(3))
    assert equal(first, verify(tokens, verifier, draft, rule, generator=seeded(3)))
    others = [verify(tokens, verifier, draft, rule, generator=seeded(seed)) for seed in range(4, 14)]
    assert not all(equal(first, other) for other in others)
    torch.manual_seed(5)
    once = verify(tokens, verifier, draft, rule)
    torch.manual_seed(5)
    assert equal(once, verify(tokens, verifier, draft, rule))


@every_rule
def test_scores_may_have_any_constant_per_row(rule):
    tokens, verifier, draft = block()
    shifted = verify(tokens, verifier + 32.0, draft.log_softmax(-1), rule, generator=seeded())
    assert equal(verify(tokens, verifier, draft, rule, generator=seeded()), shifted)


def test_draft_and_verifier_alike_are_always_accepted():
    tokens, verifier, _ = block(batch=200)
    outcome = verify(tokens, verifier, verifier[:, :-1], generator=seeded())
    assert outcome.accepted.tolist() == [4] * 200
    assert bool(outcome.accepted_losslessly.all())


def test_first_rejection_ends_the_block():
    # Row i: token 1 is drafted throughout, and certain everywhere but at position i, where token 0 is.
    tokens = torch.ones(5, 4, dtype=torch.long)
    verifier = torch.full((5, 5, 3), -torch.inf)
    verifier[..., 1] = 0.0
    verifier[range(5), range(5)] = torch.tensor([0.0, -torch.inf, -torch.inf])
    outcome = verify(tokens, verifier, torch.zeros(5, 4, 3), Cactus(math.inf), generator=seeded())
    assert outcome.accepted.tolist() == [0, 1, 2, 3, 4]
    assert outcome.next_token.tolist() == [0] * 5
    assert outcome.invalid.tolist() == [0] * 5


@every_rule
def test_greedy_draft_and_greedy_verifier_match_exactly(rule):
    tokens, verifier, _ = block(batch=40, length=5, vocab=2)
    certain = torch.full_like(verifier, -torch.inf).scatter(-1, verifier.argmax(-1, keepdim=True), 0.0)
    outcome = verify(tokens, certain, None, rule, generator=seeded())
    best = verifier.argmax(-1)
    expected = (best[:, :-1] == tokens).long().cumprod(-1).sum(-1)
    assert torch.equal(outcome.accepted, expected)
    assert torch.equal(outcome.next_token, best.gather(-1, expected[:, None])[:, 0])


@every_rule
def test_blocks_of_different_lengths(rule):
    tokens, verifier, _ = block(batch=60, vocab=5)
    lengths = torch.arange(60) % 5
    # Certain to be accepted, so that a block ends by its length.
    draft = verifier[:, :-1].clone()
    beyond = torch.arange(4) >= lengths[:, None]
    draft[beyond], verifier[:, 1:][beyond] = math.nan, math.nan
    tokens = tokens.masked_fill(beyond, -100)
    outcome = verify(tokens, verifier, draft, rule, block_lengths=lengths, generator=seeded())
    assert torch.equal(outcome.accepted, lengths)
    assert not bool(outcome.invalid.any())
    assert not bool(outcome.accepted_losslessly[beyond].any())


def test_the_bonus_token_is_the_verifiers_own():
    tokens, verifier, _ = block(batch=1, vocab=3)
    many = 20_000
    lengths = torch.tensor([2])
    expand = lambda x: x.expand(many, *x.shape[1:])  # noqa: E731
    outcome = verify(
        expand(tokens),
        expand(verifier),
        expand(verifier[:, :-1]),
        Cactus(1.0),
        block_lengths=lengths.expand(many),
        generator=seeded(),
    )
    counts = torch.bincount(outcome.next_token, minlength=3).numpy()
    expected = verifier[0, 2].softmax(-1).double().numpy() * many
    assert stats.chisquare(counts, expected * many / expected.sum()).pvalue > 1e-5


def test_one_budget_per_sequence():
    tokens, verifier, draft = block(batch=300)
    deltas = torch.tensor([0.0, 0.3, math.inf]).repeat(100)
    outcome = verify(tokens, verifier, draft, Cactus(deltas), generator=seeded())
    for delta in (0.0, 0.3, math.inf):
        alone = verify(tokens, verifier, draft, Cactus(delta), generator=seeded())
        rows = deltas == delta
        assert torch.equal(outcome.accepted[rows], alone.accepted[rows])
        assert torch.equal(outcome.next_token[rows], alone.next_token[rows])
    assert outcome.accepted[deltas == math.inf].tolist() == [4] * 100


def test_lossless_flag_is_the_lossless_decision_on_the_same_random_number():
    tokens, verifier, draft = block(batch=300)
    relaxed = verify(tokens, verifier, draft, Cactus(0.3), generator=seeded())
    lossless = verify(tokens, verifier, draft, Speculative(), generator=seeded())
    assert torch.equal(relaxed.accepted_losslessly, lossless.accepted_losslessly)
    assert torch.equal(relaxed.accepted_losslessly.long().cumprod(-1).sum(-1), lossless.accepted)
    assert bool((relaxed.accepted >= lossless.accepted).all()) and bool((relaxed.accepted > lossless.accepted).any())


@every_rule
@pytest.mark.parametrize("draft_vocab", [6, 12])
def test_vocabularies_padded_differently(rule, draft_vocab):
    tokens, verifier, draft = block(batch=200, vocab=9)
    tokens = tokens % 6
    if draft_vocab < 9:
        narrow = draft[..., :draft_vocab]
        same = draft.clone()
        same[..., draft_vocab:] = -torch.inf
        assert equal(
            verify(tokens, verifier, narrow, rule, generator=seeded()),
            verify(tokens, verifier, same, rule, generator=seeded()),
        )
        # The verifier's own mass beyond the draft's vocabulary stays reachable.
        assert int(verify(tokens, verifier, narrow, rule, generator=seeded()).next_token.max()) >= draft_vocab
    else:
        wide = torch.cat([draft, torch.full((200, 4, 3), -torch.inf)], dim=-1)
        assert equal(
            verify(tokens, verifier, wide, rule, generator=seeded()),
            verify(tokens, verifier, draft, rule, generator=seeded()),
        )
        # Mass of the draft on tokens that the verifier lacks covers nothing of the verifier's.
        wide[..., 9:] = 3.0
        outcome = verify(tokens, verifier, wide, rule, generator=seeded())
        assert int(outcome.next_token.max()) < 9 and not bool(outcome.invalid.any())


@every_rule
def test_an_empty_block_samples_the_verifier(rule):
    verifier = torch.tensor([[[-torch.inf, 0.0, -torch.inf]], [[0.0, -torch.inf, -torch.inf]]])
    for draft in (None, torch.zeros(2, 0, 3)):
        outcome = verify(torch.zeros(2, 0, dtype=torch.long), verifier, draft, rule)
        assert outcome.accepted.tolist() == [0, 0] and outcome.next_token.tolist() == [1, 0]
        assert outcome.accepted_losslessly.shape == (2, 0)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@every_rule
def test_half_precision_scores_are_read_in_float32(rule, dtype):
    tokens, verifier, draft = block()
    verifier, draft = verifier.to(dtype), draft.to(dtype)
    half = verify(tokens, verifier, draft, rule, generator=seeded())
    assert equal(half, verify(tokens, verifier.float(), draft.float(), rule, generator=seeded()))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(
    "weights",
    [
        [0, 1, 0, 2, 0],
        [0, 0, 0, 0, 1],
        [1, 0, 0, 0, 0],
        [0, 1e-30, 0, 1, 0],
        [1, 0, 0, 0, 1e-30],
        [0, 1e-40, 2e-40, 0, 0],
    ],
)
def test_sampling_never_returns_a_token_of_weight_zero(weights, dtype):
    weights = torch.tensor(weights, dtype=dtype)
    tiny = torch.finfo(torch.float32).smallest_normal
    grid = torch.cat([torch.linspace(0, 1, 1001), torch.tensor([tiny, 2**-24, 1e-7, 1 - 2**-24, 1 - 1e-6])])
    tokens = sample(weights.expand(len(grid), -1), grid)  # 1 itself cannot be drawn, but rounding might reach it
    assert bool((weights[tokens] > 0).all())


def test_sampling_inverts_the_cumulative_sum():
    weights = torch.tensor([[1.0, 0.0, 2.0, 1.0]])
    uniforms = torch.tensor([0.0, 0.2499, 0.2501, 0.5, 0.7499, 0.7501, 0.9999])
    assert sample(weights.expand(7, -1), uniforms).tolist() == [0, 0, 2, 2, 2, 3, 3]
    assert sample(1e-3 * weights.expand(7, -1), uniforms).tolist() == [0, 0, 2, 2, 2, 3, 3]


BAD_ROWS = {
    "nan": [math.nan, 0.0, 0.0],
    "some-nan": [0.0, 0.0, math.nan],
    "inf": [math.inf, 0.0, 0.0],
    "two-inf": [0.0, math.inf, math.inf],
    "empty": [-math.inf] * 3,
}


@every_rule
@pytest.mark.parametrize("bad", BAD_ROWS.values(), ids=BAD_ROWS)
@pytest.mark.parametrize(("side", "position"), [(1, 0), (1, 2), (1, 3), (2, 0), (2, 2)])
def test_a_row_that_is_no_distribution_is_flagged_and_leaves_the_others_alone(rule, bad, side, position):
    verifier = torch.randn(3, 4, 3, generator=seeded())
    draft = verifier[:, :-1].clone()  # alike: accepted up to the bad row
    tokens = torch.tensor([[0, 1, 2]] * 3)
    healthy = verify(tokens, verifier, draft, rule, generator=seeded())
    (verifier if side == 1 else draft)[1, position] = torch.tensor(bad)
    outcome = verify(tokens, verifier, draft, rule, generator=seeded())
    assert outcome.accepted.tolist() == [3, position, 3]
    assert outcome.invalid.tolist() == [0, side, 0]
    assert outcome.next_token[[0, 2]].tolist() == healthy.next_token[[0, 2]].tolist()
    assert 0 <= outcome.next_token[1] < 3
    name = {1: "verifier", 2: "draft"}[side]
    with pytest.raises(FloatingPointError, match=f"The {name}'s scores for sequence 1 at position {position} "):
        outcome.raise_if_invalid()
    healthy.raise_if_invalid()


@every_rule
def test_a_bad_row_after_the_first_rejection_does_not_matter(rule):
    verifier = torch.zeros(1, 4, 3)
    verifier[0, 0, 0] = -torch.inf
    verifier[0, 1:] = math.nan
    outcome = verify(torch.zeros(1, 3, dtype=torch.long), verifier, torch.zeros(1, 3, 3), rule)
    assert outcome.accepted.tolist() == [0] and outcome.invalid.tolist() == [0]
    assert outcome.next_token.item() in (1, 2)


@every_rule
def test_degenerate_rows_are_sampled_from_their_support(rule):
    # Case 15: one-hot verifier, single finite logit, empty residual, q_n = 1, q_n = 0, beside a healthy row.
    low = -torch.inf
    verifier = torch.tensor([[0.0, low, low], [low, low, -50.0], [0.0, 0.0, low], [9.0, low, low], [0.0, 1.0, 2.0]])
    draft = torch.tensor([[0.0, 0.0, 0.0], [0.0, 0.0, 0.0], [0.0, 0.0, low], [0.0, low, low], [2.0, 1.0, 0.0]])
    tokens = torch.tensor([[1], [0], [0], [0], [0]])
    for seed in range(50):
        outcome = verify(tokens, verifier[:, None].repeat(1, 2, 1), draft[:, None], rule, generator=seeded(seed))
        assert outcome.invalid.tolist() == [0] * 5
        assert outcome.accepted[:4].tolist() == [0, 0, 1, 1]
        assert outcome.next_token[[0, 1, 3]].tolist() == [0, 2, 0]
        assert outcome.next_token[2] < 2
        alone = verify(tokens[4:], verifier[4:, None].repeat(1, 2, 1), draft[4:, None], rule, generator=seeded(seed))
        assert alone.invalid.tolist() == [0]


class OutputSizes(TorchDispatchMode):
    """Records the number of elements of everything that is computed."""

    def __init__(self):
        super().__init__()
        self.sizes = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if not func.is_view:
            self.sizes += [(leaf.numel(), str(func)) for leaf in tree_leaves(result) if isinstance(leaf, torch.Tensor)]
        return result


@every_rule
def test_the_vocabulary_is_touched_at_one_position_per_sequence(rule):
    batch, length, vocab = 2, 7, 1000
    tokens, verifier, draft = block(batch, length, vocab)
    lengths = torch.tensor([7, 3])

    def large(draft_scores):
        with OutputSizes() as recorded:
            verify(tokens, verifier, draft_scores, rule, block_lengths=lengths)
        assert recorded.sizes
        return [size for size, _ in recorded.sizes if size >= batch * vocab]

    # Log-probabilities of the whole block, of which one per position is read: nothing else.
    with OutputSizes() as allowed:
        verifier[:, :-1].log_softmax(-1)
    whole = sum(size > batch * vocab for size, _ in allowed.sizes)
    assert sum(size > batch * vocab for size in large(draft)) <= 2 * whole
    assert sum(size > batch * vocab for size in large(None)) <= whole
    # Without a draft distribution there is no row of the draft, hence fewer rows in all.
    assert len(large(None)) < len(large(draft))


@every_rule
def test_of_a_large_vocabulary_one_position_at_a_time(rule):
    batch, length, vocab = 2, 7, LARGE_ROW
    tokens, verifier, draft = block(batch, length, vocab)
    verifier[:, 3].scatter_(-1, tokens[:, 3:4], -torch.inf)
    with OutputSizes() as recorded:
        outcome = verify(tokens, verifier, draft, rule, generator=seeded())
    assert max(size for size, _ in recorded.sizes) == batch * vocab
    # No position is read behind the last sequence's rejected token.
    judged = int(outcome.accepted.max()) + 1
    assert judged <= 4
    assert sum("_log_softmax" in name for _, name in recorded.sizes) == 2 * judged


@given(
    seed=st.integers(0, 2**31),
    rule=st.sampled_from([*RULES, Cactus(torch.tensor([0.0, 0.1, 1.0]))]),
    length=st.integers(2, 6),
    positions=st.booleans(),
    drafted=st.booleans(),
)
@settings(max_examples=80, deadline=None)
def test_one_position_at_a_time_decides_as_all_at_once(seed, rule, length, positions, drafted):
    tokens, verifier, draft = block(3, length, 5, seed)
    # Close enough for blocks to be accepted in part and whole.
    draft = verifier[:, :-1] + 0.3 * draft if drafted else None
    lengths = torch.randint(length + 1, (3,), generator=seeded(seed))
    if positions and isinstance(rule, Cactus):
        rule = rule.with_deltas(torch.rand(3, length, generator=seeded(seed)))
    outcomes = []
    for large in (1, 2**40):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(verification, "LARGE_ROW", large)
            outcomes.append(verify(tokens, verifier, draft, rule, block_lengths=lengths, generator=seeded(seed)))
    places = torch.arange(length)
    judged = (places <= outcomes[0].accepted[:, None]) & (places < lengths[:, None])
    for name, one, other in zip(outcomes[0]._fields, *outcomes, strict=True):
        if one is not None and one.ndim == 2:
            one, other = one[judged], other[judged]
        assert one is other or torch.allclose(one.double(), other.double(), atol=1e-6), name


def expected_counts(p, q, gamma, many):
    """Expected (accepted, next token) table of a block of one token drawn from `p`, from the formulas."""
    vocab = len(q)
    bonus, recovered = np.zeros(1), np.zeros(vocab)
    for n in range(vocab):
        raised = gamma(q[n])
        phi = min(1, raised / p[n])
        h = q * (1 - raised) / (1 - q[n])
        residual = np.maximum(h - p, 0)
        residual[n] = 0
        bonus += p[n] * phi
        if phi < 1:
            recovered += p[n] * (1 - phi) * residual / residual.sum()
    return many * np.concatenate([bonus * q, recovered])


def exact_gamma_by_bisection(q_n, delta):
    low, high = q_n, 1.0
    for _ in range(60):
        middle = (low + high) / 2
        kl = middle * math.log(middle / q_n) + (1 - middle) * math.log((1 - middle) / (1 - q_n)) if middle < 1 else 99
        low, high = (middle, high) if kl <= delta else (low, middle)
    return low


GAMMAS = {
    "speculative": (Speculative(), lambda x: x),
    "cactus": (Cactus(0.3), lambda x: min(1, x + math.sqrt(0.6 * x * (1 - x)))),
    "cactus-exact": (CactusExact(0.3), lambda x: exact_gamma_by_bisection(x, 0.3)),
    "lenience": (Lenience(2.0), lambda x: min(1, 2 * x)),
}


def p_value(observed, expected):
    keep = expected > 0
    assert not observed[~keep].any()
    return stats.chisquare(observed[keep], expected[keep] * observed.sum() / expected.sum()).pvalue


@pytest.mark.parametrize("name", GAMMAS)
def test_outcomes_follow_the_rule_in_distribution(name):
    """False alarms: one in 10^5 by the threshold, none in practice as the seed is fixed."""
    many, vocab = 60_000, 6
    q = np.array([0.35, 0.25, 0.2, 0.1, 0.07, 0.03])
    p = q[::-1].copy()  # the negated verifier: most tokens are rejected, so the residual is tested
    tokens = torch.multinomial(torch.from_numpy(p), many, replacement=True, generator=seeded(1))[:, None]
    scores = torch.from_numpy(np.log(q)).float().expand(many, 2, vocab)
    draft = torch.from_numpy(np.log(p)).float().expand(many, 1, vocab)
    outcome = verify(tokens, scores, draft, GAMMAS[name][0], generator=seeded(2))
    kind = torch.where(outcome.accepted == 1, outcome.next_token, vocab + outcome.next_token)
    observed = torch.bincount(kind, minlength=2 * vocab).numpy()
    for other, (_, gamma) in GAMMAS.items():
        alarm = p_value(observed, expected_counts(p, q, gamma, many)) < 1e-5
        assert alarm == (other != name)  # power: every other rule's law is told apart
    if name.startswith("cactus"):
        # So is a residual that forgets to scale the other tokens.
        unscaled = expected_counts(p, q, GAMMAS[name][1], many)
        residual = np.maximum(q - p, 0)
        unscaled[vocab:] = unscaled[vocab:].sum() * residual / residual.sum()
        assert p_value(observed, unscaled) < 1e-5


def test_acceptance_and_recovery_use_separate_random_numbers():
    # If they shared one, the recovery token would depend on how narrowly the drafted token was rejected.
    many = 40_000
    q, p = torch.tensor([0.25, 0.25, 0.25, 0.25]), torch.tensor([0.97, 0.01, 0.01, 0.01])
    outcome = verify(
        torch.zeros(many, 1, dtype=torch.long),
        q.log().expand(many, 2, 4),
        p.log().expand(many, 1, 4),
        generator=seeded(),
    )
    rejected = outcome.next_token[outcome.accepted == 0]
    counts = torch.bincount(rejected, minlength=4)[1:].numpy()
    assert stats.chisquare(counts).pvalue > 1e-5
    # The same uniform at both steps would reach u in [phi, 1) only: the first quarter of the inverse CDF never.
    bonus = torch.bincount(outcome.next_token[outcome.accepted == 1], minlength=4).numpy()
    assert stats.chisquare(bonus).pvalue > 1e-5


@pytest.mark.parametrize(
    ("shapes", "message"),
    [
        (((3,), (3, 4, 5), (3, 3, 5), None), "draft_tokens"),
        (((2, 3), (2, 3, 5), (2, 3, 5), None), r"verifier_scores must have the shape \[2, 4, vocab\]"),
        (((2, 3), (2, 4, 5), (2, 4, 5), None), r"draft_scores must have the shape \[2, 3, vocab\]"),
        (((2, 3), (1, 4, 5), (2, 3, 5), None), "verifier_scores"),
        (((2, 3), (2, 4, 5), (2, 3, 5), (3,)), r"block_lengths must have the shape \[2\]"),
    ],
)
def test_shapes_that_do_not_fit(shapes, message):
    tokens, verifier, draft, lengths = (None if shape is None else torch.zeros(shape) for shape in shapes)
    with pytest.raises(ValueError, match=message):
        verify(tokens.long(), verifier, draft, block_lengths=lengths)
