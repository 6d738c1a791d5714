"""Calls of the fast engine and of plain `generate`, side by side."""

import copy
from typing import Any

import pytest
import torch

import transformers_cactus
from transformers_cactus.inputs import left_align

BLOCK = 6
"""Drafted tokens per round, unless a test says otherwise."""

IGNORE_GREEDY = "ignore:.*no effect without sampling:UserWarning"
"""Greedy text is the oracle of most tests; that a rule has no effect on it is said in a warning."""


def fast(model: Any, inputs: dict[str, Any], **options: Any) -> Any:
    """Call the fast engine: lossless, greedy, with 24 new tokens and a dict to return, unless `options` say else."""
    defaults: dict[str, Any] = {
        "do_sample": False,
        "num_assistant_tokens": BLOCK,
        "assistant_confidence_threshold": 0.0,
        "return_dict_in_generate": True,
        "cactus_engine": "fast",
    }
    if not {"cactus_delta", "cactus_rule"} & options.keys():
        defaults["cactus_rule"] = "speculative"
    if "max_length" not in options:
        defaults["max_new_tokens"] = 24
    return transformers_cactus.generate(model, **inputs, **defaults | options)


def plain(model: Any, inputs: dict[str, Any], **options: Any) -> Any:
    """Call plain greedy `generate` with the same defaults."""
    defaults: dict[str, Any] = {"do_sample": False, "return_dict_in_generate": True}
    if "max_length" not in options:
        defaults["max_new_tokens"] = 24
    return model.generate(**inputs, **defaults | options)


def rows_alone(inputs: dict[str, torch.Tensor]) -> list[dict[str, torch.Tensor]]:
    """The rows of a padded batch as inputs of their own, without padding."""
    rows, lengths = left_align(**inputs)
    prompts = [row[None, :length] for row, length in zip(rows, lengths.tolist(), strict=True)]
    return [{"input_ids": prompt, "attention_mask": torch.ones_like(prompt)} for prompt in prompts]


def new_tokens(output: Any, inputs: dict[str, torch.Tensor]) -> list[list[int]]:
    """What each row of an output has behind its prompt, without the padding at its end where statistics tell it."""
    rows = output.sequences[:, inputs["input_ids"].shape[1] :].tolist()
    if "acceptance" not in output:
        return rows
    return [row[: len(of_row.origins)] for row, of_row in zip(rows, output.acceptance.sequences, strict=True)]


def plain_alone(model: Any, inputs: dict[str, torch.Tensor], **options: Any) -> list[list[int]]:
    """New tokens of plain greedy `generate`, each row alone."""
    return [new_tokens(plain(model, row, **options), row)[0] for row in rows_alone(inputs)]


def drafts(verifier: Any, other: Any) -> dict[str, dict[str, Any]]:
    """Options for a draft of each kind.

    With "same", a copy of the verifier, every drafted token is accepted; with "other" and "look-up" few are.
    """
    return {
        "same": {"assistant_model": copy.deepcopy(verifier)},
        "other": {"assistant_model": other},
        "look-up": {"prompt_lookup_num_tokens": BLOCK},
    }


def noisy_copy(model: Any, noise: float = 1 / 3) -> Any:
    """A draft that is right some of the time: a copy of the verifier with noise in its output matrix.

    Args:
        model: the verifier.
        noise: its standard deviation, in units of the matrix's own.
    """
    draft = copy.deepcopy(model)
    weight = draft.get_output_embeddings().weight.data
    weight += noise * weight.std() * torch.randn(weight.shape, generator=torch.Generator().manual_seed(0))
    return draft


def each_draft(*quick: str) -> Any:
    """Parametrize a test over the kinds of draft; those that are not named run with the slow tests only."""
    kinds = ("same", "other", "look-up")
    return pytest.mark.parametrize(
        "kind", [kind if kind in quick else pytest.param(kind, marks=pytest.mark.slow) for kind in kinds]
    )
