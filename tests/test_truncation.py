"""Top-k and top-p in one step leave what the two warpers of transformers leave."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import LogitNormalization, TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from transformers_cactus.processing import Processed
from transformers_cactus.truncation import TIES, Truncation, fused


def both(scores: torch.Tensor, k: int, p: float, keep: int = 1) -> tuple[torch.Tensor, torch.Tensor]:
    top_k, top_p = TopKLogitsWarper(k, min_tokens_to_keep=keep), TopPLogitsWarper(p, min_tokens_to_keep=keep)
    kept = Truncation(None, top_k, top_p).truncate(scores)
    warped = top_p(None, top_k(None, scores.clone()))
    return warped if kept is None else Processed(None, kept, scores.shape[-1]).scores, warped


@given(
    seed=st.integers(0, 2**31),
    rows=st.integers(1, 6),
    vocab=st.sampled_from([3, 20, 31, 200, 4096, 5000]),
    k=st.integers(1, 40),
    p=st.floats(0.05, 1.0),
    keep=st.integers(1, 4),
    scale=st.sampled_from([0.1, 1.0, 8.0]),
)
@settings(max_examples=60, deadline=None)
def test_equals_the_two_warpers(seed, rows, vocab, k, p, keep, scale):
    scores = torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed)) * scale
    ours, theirs = both(scores, k, p, keep)
    # Rounding decides where a cumulative probability meets 1 - p to 1e-6: none of these examples does, or both agree.
    differing = (ours.isinf() != theirs.isinf()).sum()
    assert differing <= 1
    if not differing:
        assert torch.equal(ours, theirs)
    else:
        extra = scores[ours.isinf() != theirs.isinf()]
        probs = theirs.softmax(-1)
        assert extra.numel() == 1
        assert (probs.sort(-1).values.cumsum(-1) - (1 - p)).abs().min() < 1e-5


@pytest.mark.parametrize("tied", [2, TIES, TIES + 3])
def test_tokens_tied_with_the_last_one_stay(tied):
    scores = torch.full((1, 100), -5.0)
    scores[0, :tied] = 1.0
    ours, theirs = both(scores, k=1, p=1.0)
    assert torch.equal(ours, theirs)
    assert int(ours.isfinite().sum()) == tied


def test_rows_that_are_mostly_excluded_or_no_distribution():
    scores = torch.full((3, 100), -torch.inf)
    scores[0, 7] = 0.0
    scores[1] = torch.randn(100)
    scores[1, 3] = torch.nan
    scores[2] = torch.randn(100)
    ours, theirs = both(scores, k=5, p=0.9)
    assert torch.equal(ours[0], theirs[0])
    assert torch.equal(ours[2], theirs[2])
    assert bool(ours[1].isnan().any()) == bool(theirs[1].isnan().any())


@pytest.mark.parametrize("warpers", ["temperature, top-k", "top-k", "temperature, top-k, top-p"])
def test_the_list_of_tokens_holds_all_that_are_left(warpers):
    known = {"temperature": TemperatureLogitsWarper(0.6), "top-k": TopKLogitsWarper(9), "top-p": TopPLogitsWarper(0.9)}
    separate = [known[name] for name in warpers.split(", ")]
    (joined,) = fused(list(separate))
    scores = expected = torch.randn(5, 300, generator=torch.Generator().manual_seed(0))
    for warper in separate:
        expected = warper(None, expected)
    assert torch.equal(joined(None, scores), expected)
    kept = joined.truncate(scores)
    tokens, values = kept.tokens, kept.scores
    assert tokens.shape == (5, 9 + TIES)
    torch.testing.assert_close(values, expected.gather(-1, tokens))
    for row in range(5):
        left = set(expected[row].isfinite().nonzero()[:, 0].tolist())
        assert left <= set(tokens[row].tolist()) and len(set(tokens[row].tolist())) == 9 + TIES


def test_only_neighbours_in_this_order_are_joined():
    temperature, normal = TemperatureLogitsWarper(0.5), LogitNormalization()
    top_k, top_p = TopKLogitsWarper(5), TopPLogitsWarper(0.9)
    joined = fused([temperature, top_k, top_p, normal])
    assert [type(x) for x in joined] == [Truncation, LogitNormalization]
    assert (joined[0].temperature, joined[0].top_k, joined[0].top_p) == (temperature, top_k, top_p)
    assert [type(x) for x in fused([top_p, top_k])] == [TopPLogitsWarper, Truncation]
    assert [type(x) for x in fused([top_k, temperature, top_p])] == [
        Truncation,
        TemperatureLogitsWarper,
        TopPLogitsWarper,
    ]
    assert [type(x) for x in fused([top_k, top_p, top_p])] == [Truncation, TopPLogitsWarper]
    strange = TopPLogitsWarper(0.9, filter_value=-1e4)
    assert fused([top_k, strange])[1] is strange
