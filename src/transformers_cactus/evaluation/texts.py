"""The verifier's own text: what positions are read from."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from transformers import PreTrainedModel

from .. import _compat
from .sampling import Sampling

BATCH = 16
"""Prompts that are continued at once."""


class Text(NamedTuple):
    """A prompt and what follows it."""

    ids: list[int]
    """Token ids of both."""
    begin: int
    """Where the answer begins, at least 1."""


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Seeds torch inside the block, and leaves the random state of the caller as it was."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        yield


def write_answers(
    model: PreTrainedModel, prompts: Sequence[Sequence[int]], sampling: Sampling, max_new_tokens: int, seed: int
) -> list[Text]:
    """Lets a model continue prompts on its own.

    Args:
        model (`PreTrainedModel`): The verifier.
        prompts (`Sequence[Sequence[int]]`): Token ids, at least one each.
        sampling ([`Sampling`]): How it samples.
        max_new_tokens (`int`): Length at most.
        seed (`int`): Same seed, same texts.

    Returns:
        `list[Text]`: One for each prompt; the token that ends an answer belongs to it.
    """
    texts: list[Text] = []
    with seeded(seed):
        for start in range(0, len(prompts), BATCH):
            batch = prompts[start : start + BATCH]
            answers = _continued(model, batch, {**sampling.options, "max_new_tokens": max_new_tokens})
            texts += [Text([*prompt, *answer], len(prompt)) for prompt, answer in zip(batch, answers, strict=True)]
    return texts


def padded(model: PreTrainedModel, prompts: Sequence[Sequence[int]]) -> dict[str, Any]:
    """Prompts of different lengths as arguments of `generate`.

    Args:
        model (`PreTrainedModel`): Which generates.
        prompts (`Sequence[Sequence[int]]`): Token ids.

    Returns:
        `dict`: `inputs` and `attention_mask` `[prompts, longest]`, padded on the left, and `pad_token_id`.
    """
    pad = model.generation_config.pad_token_id
    pad = pad if pad is not None else (end_tokens(model) or [0])[0]
    width = max(map(len, prompts))
    rows = [[pad] * (width - len(prompt)) + list(prompt) for prompt in prompts]
    mask = [[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts]
    ids, seen = (torch.tensor(values, device=_compat.input_device(model)) for values in (rows, mask))
    return {"inputs": ids, "attention_mask": seen, "pad_token_id": pad}


def _continued(model: PreTrainedModel, prompts: Sequence[Sequence[int]], options: dict[str, Any]) -> list[list[int]]:
    inputs = padded(model, prompts)
    output = model.generate(**inputs, **options)
    ends = end_tokens(model)
    return [_to_the_end(row, ends) for row in output[:, inputs["inputs"].shape[1] :].tolist()]


def end_tokens(model: PreTrainedModel) -> list[int]:
    """The tokens that end the model's texts; none where its generation config names none."""
    ends = model.generation_config.eos_token_id
    return [] if ends is None else list(ends) if isinstance(ends, (list, tuple)) else [int(ends)]


def _to_the_end(ids: list[int], ends: list[int]) -> list[int]:
    return ids[: next((i + 1 for i, token in enumerate(ids) if token in ends), len(ids))]
