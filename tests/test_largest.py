"""The largest scores of rows are those that `topk` finds."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from transformers_cactus.largest import GROUPS, largest


def same_as_topk(scores: torch.Tensor, count: int) -> None:
    values, places = (torch.tensor(found).view(len(scores), count) for found in largest(scores, count))
    expected = scores.topk(count).values
    assert torch.equal(values.nan_to_num(9e9), expected.nan_to_num(9e9))
    assert torch.equal(values.nan_to_num(9e9), scores.gather(-1, places).nan_to_num(9e9))
    assert all(len(set(row)) == count for row in places.tolist())


@given(
    seed=st.integers(0, 2**31),
    rows=st.integers(1, 4),
    vocab=st.sampled_from([40, 100, 8192, 49_152]) | st.integers(41, 60_000),
    count=st.integers(1, 40),
    levels=st.sampled_from([0, 3, 50]),
    excluded=st.sampled_from([0.0, 0.8, 0.999]),
)
@settings(max_examples=60, deadline=None)
def test_the_largest_scores_are_found_wherever_they_are(seed, rows, vocab, count, levels, excluded):
    generator = torch.Generator().manual_seed(seed)
    scores = torch.randn(rows, vocab, generator=generator)
    if levels:
        scores = (scores * levels).round() / levels
    scores[torch.rand(rows, vocab, generator=generator) < excluded] = -torch.inf
    same_as_topk(scores, count)


@pytest.mark.parametrize("misleading", [-torch.inf, -9.0, 9.0, torch.inf, torch.nan])
def test_scores_of_which_half_are_like_nothing_else(misleading):
    scores = torch.randn(3, 5000, generator=torch.Generator().manual_seed(1))
    scores[1, ::2] = misleading
    same_as_topk(scores, 28)


def test_all_of_the_largest_in_one_group():
    scores = torch.randn(1, 20 * GROUPS, generator=torch.Generator().manual_seed(1))
    scores[0, 3::GROUPS] += 20
    same_as_topk(scores, 9)
    same_as_topk(scores, 28)


@pytest.mark.parametrize("count", [1, GROUPS // 4, GROUPS // 4 + 1])
@pytest.mark.parametrize("vocab", [4 * GROUPS - 1, 4 * GROUPS, 5 * GROUPS - 1])
def test_at_the_sizes_from_which_on_it_is_another_way(vocab, count):
    same_as_topk(torch.randn(2, vocab, generator=torch.Generator().manual_seed(1)), count)


@pytest.mark.parametrize("place", [0, 5, -1])
@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_what_is_no_score_is_seen_wherever_it_is(place, value):
    scores = torch.randn(2, 5000, generator=torch.Generator().manual_seed(1))
    scores[1, place] = value
    values, _ = largest(scores, 28)
    assert not values[1][0] < torch.inf
    same_as_topk(scores, 28)
