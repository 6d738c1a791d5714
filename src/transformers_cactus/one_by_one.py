"""A batch as one call per sequence, for models and drafts that cannot run rows of different lengths together."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from transformers.utils import ModelOutput

from .acceptance import AcceptanceRule
from .configuration import delta_plan
from .decoding import rule_for_batch
from .outputs import AcceptanceStatistics
from .settings import CallSettings


def run_one_by_one(setting: CallSettings, rule: AcceptanceRule, single: Callable[..., Any]) -> Any:
    """Runs each sequence of a call on its own and puts the results together as `generate` pads them.

    Args:
        setting ([`CallSettings`]): The call.
        rule ([`AcceptanceRule`]): The acceptance rule.
        single (callable): Runs a call of one sequence, given its settings and rule.

    Returns:
        `torch.LongTensor` of shape `[batch, longest]`, or the first sequence's output with the sequences and scores of
        all and their statistics, and without a cache.

    Raises:
        ValueError: If an input or a parameter of the rule does not have one entry per sequence.
    """
    size, repeats = setting.batch_size, setting["num_return_sequences"] or 1
    rule_for_batch(rule, size * repeats, repeats)
    delta_plan(rule, setting.options, size)
    outputs, widths = [], []
    for row in range(size):
        call, padding = _row(setting, row, size)
        for _ in range(repeats):
            row_setting = CallSettings(setting.model, call, setting.options.of_prompt(row))
            outputs.append(single(row_setting, rule.select(torch.tensor([row]))))
            widths.append(padding)
    pad = setting["pad_token_id"]
    fill = 0 if pad is None else int(pad)
    sequences = [output if isinstance(output, Tensor) else output.sequences for output in outputs]
    joined = _padded(sequences, widths, fill)
    if isinstance(outputs[0], Tensor):
        return joined
    return _joined(outputs, joined)


def _row(setting: CallSettings, row: int, size: int) -> tuple[dict[str, Any], int]:
    """The arguments of one sequence's call, and the padding taken off its left side."""
    call = {name: _entry(name, value, row, size) for name, value in setting.call.items()}
    call["num_return_sequences"] = 1
    mask, name = call.get("attention_mask"), "inputs" if call.get("inputs") is not None else "input_ids"
    if mask is None or setting.model.config.is_encoder_decoder or bool(mask.all()) or call.get(name) is None:
        return call, 0
    seen = mask[0].bool()
    call[name], call["attention_mask"] = call[name][:, seen], mask[:, seen]
    removed = int((~seen).sum())
    if setting["max_new_tokens"] is None and setting["max_length"] is not None:
        call["max_length"] = setting["max_length"] - removed
    return call, removed


def _entry(name: str, value: Any, row: int, size: int) -> Any:
    if not isinstance(value, Tensor) or not value.ndim:
        return value
    if value.shape[0] != size:
        raise ValueError(
            f"{name} has {value.shape[0]} entries for {size} sequences, so it cannot be split: call generate() once "
            "for each sequence."
        )
    return value[row : row + 1]


def _padded(sequences: list[Tensor], padding: list[int], fill: int) -> Tensor:
    shifted = [
        torch.nn.functional.pad(ids, (left, 0), value=fill) for ids, left in zip(sequences, padding, strict=True)
    ]
    longest = max(ids.shape[1] for ids in shifted)
    return torch.cat([torch.nn.functional.pad(ids, (0, longest - ids.shape[1]), value=fill) for ids in shifted])


def _joined(outputs: list[ModelOutput], sequences: Tensor) -> ModelOutput:
    fields: dict[str, Any] = {"sequences": sequences}
    for name in ("scores", "logits"):
        rows: list[Any] = [getattr(output, name, None) for output in outputs]
        if rows[0] is not None:
            longest = max(map(len, rows))
            nothing = torch.zeros_like(rows[0][0])
            fields[name] = tuple(
                torch.cat([row[step] if step < len(row) else nothing for row in rows]) for step in range(longest)
            )
    joined = type(outputs[0])(**fields)
    joined["acceptance"] = AcceptanceStatistics(
        [sequence for output in outputs for sequence in output["acceptance"].sequences]
    )
    return joined
