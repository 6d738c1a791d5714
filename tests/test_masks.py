"""Masks of ragged rows, position by position."""

import pytest
import torch

import tiny_models
from transformers_cactus.masks import ragged_masks

POSITIONS = torch.tensor([[9, 10, 11], [2, 3, 4]])
KEYS = 14


def expected(see: object) -> torch.Tensor:
    rows = [[[see(query, key) for key in range(KEYS)] for query in row] for row in POSITIONS.tolist()]  # type: ignore
    return torch.tensor(rows)[:, None]


FULL = expected(lambda query, key: key <= query)
SLIDING = expected(lambda query, key: query - tiny_models.WINDOW < key <= query)
CHUNKED = expected(lambda query, key: key <= query and key // tiny_models.WINDOW == query // tiny_models.WINDOW)


@pytest.mark.parametrize(("name", "mask"), [("llama", FULL), ("mistral", SLIDING), ("phi3", SLIDING)])
def test_one_kind_of_layer_gives_one_mask(name: str, mask: torch.Tensor) -> None:
    assert torch.equal(ragged_masks(tiny_models.build(name), POSITIONS, KEYS), mask)


@pytest.mark.parametrize(
    ("name", "masks"),
    [
        ("gemma3", {"full_attention": FULL, "sliding_attention": SLIDING}),
        ("llama4", {"full_attention": FULL, "chunked_attention": CHUNKED}),
    ],
)
def test_several_kinds_of_layer_give_a_dict(name: str, masks: dict[str, torch.Tensor]) -> None:
    built = ragged_masks(tiny_models.build(name), POSITIONS, KEYS)
    assert built.keys() == masks.keys()
    assert all(torch.equal(built[kind], masks[kind]) for kind in masks)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_eager_masks_are_added_to_scores(dtype: torch.dtype) -> None:
    model = tiny_models.build("llama", attention="eager").to(dtype)
    mask = ragged_masks(model, POSITIONS, KEYS)
    assert mask.dtype == dtype
    assert torch.equal(mask == 0, FULL)
    assert (mask[~FULL] == torch.finfo(dtype).min).all()
