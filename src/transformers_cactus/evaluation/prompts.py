"""Prompts to measure on: from a file or a data set, or written by the verifier itself."""

from __future__ import annotations

import json
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ..parameters import counted
from ..paths import looks_like_path
from .sampling import Sampling
from .texts import end_tokens, write_answers

FIELDS = ("prompt", "messages", "question", "instruction", "text")
"""Where the prompt of an entry is looked for, in this order."""

MARK = "SENTINELXX"
TURN_TOKENS = 64
TURN_SAMPLING = Sampling(1.0, 0, 0.95)


def write_prompts(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, count: int, seed: int = 0
) -> list[list[int]]:
    """Lets the verifier write its own prompts: user turns behind its chat template, or the beginnings of texts.

    Args:
        model (`PreTrainedModel`): The verifier.
        tokenizer (`PreTrainedTokenizerBase`): Its tokenizer.
        count (`int`): How many.
        seed (`int`, *optional*, defaults to 0): Same seed, same prompts.

    Returns:
        `list[list[int]]`: Token ids, at temperature 1 and top-p 0.95, of 64 written tokens at most.

    Raises:
        ValueError: If the tokenizer has neither a usable chat template nor a token to begin a text with.
    """
    opening, closing = _frame(tokenizer)
    texts = write_answers(model, [opening] * count, TURN_SAMPLING, TURN_TOKENS, seed)
    ends = end_tokens(model)
    return [[token for i, token in enumerate(t.ids) if i < t.begin or token not in ends] + closing for t in texts]


def _frame(tokenizer: PreTrainedTokenizerBase) -> tuple[list[int], list[int]]:
    """What stands before and behind a user's turn."""
    if getattr(tokenizer, "chat_template", None) is not None:
        messages = [{"role": "user", "content": MARK}]
        frame = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True).split(MARK)
        if len(frame) != 2:
            raise ValueError("the chat template does not show a user's turn once and unchanged: give prompts.")
        opening, closing = (tokenizer(part, add_special_tokens=False).input_ids for part in frame)
        return opening, closing
    first = tokenizer.bos_token_id if tokenizer.bos_token_id is not None else tokenizer.eos_token_id
    if first is None:
        raise ValueError("the tokenizer has no chat template and no token to begin a text with: give prompts.")
    return [first], []


def check_source(source: str, count: int | None) -> None:
    """Raises for a source from which prompts cannot be read. What is no local file is not looked at.

    Args:
        source (`str`): As in [`read_prompts`].
        count (`int` or `None`): How many are asked for; `None` if any number of at least two will do.

    Raises:
        ValueError: If there are fewer entries, or a line is no JSON.
        OSError, ImportError: If the source cannot be read.
    """
    if not Path(source).is_file():
        _check_name(source)
        return
    found = sum(1 for _ in _entries(source, ""))
    if count is not None and found < count:
        raise ValueError(f"{source} has {counted(found, 'prompt')}, {count} are asked for.")
    if found < 2:
        raise ValueError(f"{source} has {counted(found, 'prompt')}: an interval takes at least two.")


def read_prompts(
    source: str, tokenizer: PreTrainedTokenizerBase, count: int, *, split: str = "train", or_fewer: bool = False
) -> list[list[int]]:
    """Reads prompts and wraps them in the chat template, if there is one.

    Args:
        source (`str`): A file of JSON lines (`.jsonl`, `.json`), a text file with one prompt a line, or the name of a
            data set for `datasets.load_dataset`. An entry is a string, or has its prompt under `prompt`, `messages`
            (a chat, up to its last user turn), `question`, `instruction` or `text`.
        tokenizer (`PreTrainedTokenizerBase`): The verifier's.
        count (`int`): The first so many entries are taken.
        split (`str`, *optional*, defaults to `"train"`): Of a data set.
        or_fewer (`bool`, *optional*, defaults to `False`): Whether all entries will do where there are fewer.

    Returns:
        `list[list[int]]`: Token ids.

    Raises:
        ValueError: If there are fewer entries, or one has no prompt.
        OSError, ImportError: If the source cannot be read.
    """
    entries = _entries(source, split)
    prompts = []
    for number, entry in zip(range(1, count + 1), entries, strict=False):
        content = _content(entry)
        if not content:
            raise ValueError(f"entry {number} of {source} has no prompt: none of {', '.join(FIELDS)} is filled.")
        prompts.append(_encoded(tokenizer, content))
    if len(prompts) < count and not or_fewer:
        raise ValueError(f"{source} has {counted(len(prompts), 'prompt')}, {count} are asked for.")
    return prompts


def _entries(source: str, split: str) -> Iterator[Any]:
    file = Path(source)
    if file.is_file():
        lines = (line for line in file.read_text(encoding="utf-8").splitlines() if line.strip())
        if file.suffix not in (".jsonl", ".json"):
            return iter(lines)
        return (_parsed(line, number, source) for number, line in enumerate(lines, 1))
    _check_name(source)
    import datasets

    return iter(datasets.load_dataset(source, split=split, streaming=True))


def _check_name(source: str) -> None:
    """Raises for a name that no data set can have, or where no data set can be read."""
    if looks_like_path(source) and not Path(source).exists():
        raise FileNotFoundError(f"no such file: {source}")
    if find_spec("datasets") is None:
        raise ImportError(f"{source} is no file, and reading a data set needs: pip install datasets")


def _parsed(line: str, number: int, source: str) -> Any:
    try:
        return json.loads(line)
    except json.JSONDecodeError as error:
        raise ValueError(f"line {number} of {source} is no JSON ({error.msg}).") from error


def _content(entry: Any) -> str | list[dict[str, str]] | None:
    if isinstance(entry, str):
        return entry
    if not isinstance(entry, dict):
        return None
    found: Any = next((entry[field] for field in FIELDS if entry.get(field)), None)
    if isinstance(found, list):
        turns = [i for i, turn in enumerate(found) if isinstance(turn, dict) and turn.get("role") == "user"]
        return found[: turns[-1] + 1] if turns else None
    return found if isinstance(found, str) else None


def _encoded(tokenizer: PreTrainedTokenizerBase, content: str | list[dict[str, str]]) -> list[int]:
    if getattr(tokenizer, "chat_template", None) is None:
        if not isinstance(content, str):
            raise ValueError("the tokenizer has no chat template for the chats of this source.")
        ids: list[int] = tokenizer(content).input_ids
        return ids
    messages = [{"role": "user", "content": content}] if isinstance(content, str) else content
    encoded = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=True)
    return list(encoded["input_ids"])
