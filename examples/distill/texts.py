"""Existing text as training data: packed into rows, then labelled by one forward of the verifier."""

from collections.abc import Iterable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from .shards import ANSWER, TOP, Rows


def read_texts(source: str, *, split: str, column: str, tokenizer: PreTrainedTokenizerBase) -> Iterator[str]:
    """Texts from a `.txt` file (paragraphs), or from a dataset by name or folder.

    A column of strings is taken as it is, one of messages is rendered with the tokenizer's chat template.
    """
    if Path(source).is_file():
        yield from (text for text in Path(source).read_text(encoding="utf-8").split("\n\n") if text.strip())
        return
    import datasets

    saved = (Path(source) / "dataset_info.json").exists() or (Path(source) / "dataset_dict.json").exists()
    data = datasets.load_from_disk(source) if saved else datasets.load_dataset(source, split=split, streaming=True)
    if isinstance(data, datasets.DatasetDict):
        data = data[split]
    for record in data:
        if column not in record:
            raise ValueError(f"no column {column!r} in {source}; there are: {', '.join(record)}")
        yield render(record[column], tokenizer)


def render(value: Any, tokenizer: PreTrainedTokenizerBase) -> str:
    """A text, or a list of messages as one."""
    if isinstance(value, str):
        return value
    return tokenizer.apply_chat_template(value, tokenize=False)


def pack(texts: Iterable[str], tokenizer: PreTrainedTokenizerBase, length: int) -> Iterator[list[int]]:
    """Rows of exactly `length` tokens, texts separated by the end-of-sequence token; a last short row is dropped."""
    buffer: list[int] = []
    for text in texts:
        buffer += tokenizer(text, add_special_tokens=False).input_ids
        if tokenizer.eos_token_id is not None:
            buffer.append(tokenizer.eos_token_id)
        while len(buffer) >= length:
            yield buffer[:length]
            buffer = buffer[length:]


@torch.inference_mode()
def label(model: PreTrainedModel, rows: list[list[int]], *, batch: int = 4) -> Rows:
    """The verifier's most probable next tokens at every position."""
    result = Rows.empty(len(rows), len(rows[0]))
    result.ids[:], result.role[:] = torch.tensor(rows), ANSWER
    for start in range(0, len(rows), batch):
        part = slice(start, start + batch)
        log_probs = model(result.ids[part].long().to(model.device)).logits.float().log_softmax(-1)
        top, ids = log_probs.topk(TOP, dim=-1)
        result.top_ids[part], result.top_logp[part] = ids.cpu(), top.cpu()
    return result


def label_texts(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, texts: Iterable[str], *, rows: int, length: int
) -> Iterator[Any]:
    """One function per shard that labels it when called, so that shards that exist already cost nothing."""
    packed = pack(texts, tokenizer, length)
    while shard := list(islice(packed, rows)):
        yield lambda shard=shard: label(model, shard)
