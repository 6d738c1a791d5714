"""From the options to the model's input."""

from __future__ import annotations

import sys
from pathlib import Path

from transformers import BatchEncoding, PreTrainedTokenizerBase


def read_prompt(prompt: str | None, file: Path | None) -> str:
    """The prompt from the option, the file, or else standard input.

    Raises:
        ValueError: If there is none, or more than one.
    """
    if prompt is not None and file is not None:
        raise ValueError("give --prompt or --prompt-file, not both.")
    if prompt is None and file is None and sys.stdin.isatty():
        raise ValueError("no prompt: give --prompt or --prompt-file, or pipe one in.")
    if prompt is None:
        data = sys.stdin.buffer.read() if file is None else file.read_bytes()
        try:
            prompt = data.decode("utf-8").removesuffix("\n")
        except UnicodeDecodeError as error:
            raise ValueError(f"{file or 'standard input'} is not UTF-8 text ({error.reason}).") from error
    if not prompt:
        raise ValueError("the prompt is empty: give --prompt or --prompt-file, or pipe one in.")
    return prompt


def encode(
    tokenizer: PreTrainedTokenizerBase, prompt: str, *, chat: bool | None = None, system: str | None = None
) -> BatchEncoding:
    """The prompt's `input_ids` and `attention_mask`, of shape `[1, length]`.

    Args:
        tokenizer (`PreTrainedTokenizerBase`): The verifier's.
        prompt (`str`): A text, or what the user says in a chat.
        chat (`bool`, *optional*): Whether to wrap the prompt in the chat template. By default if there is one.
        system (`str`, *optional*): System message of the chat.

    Raises:
        ValueError: If a chat is asked for and the tokenizer has no template for it.
    """
    has_template = getattr(tokenizer, "chat_template", None) is not None
    if (chat or system is not None) and not has_template:
        raise ValueError("this model's tokenizer has no chat template: leave out --chat and --system.")
    if has_template if chat is None else chat:
        messages = [{"role": "user", "content": prompt}]
        if system is not None:
            messages.insert(0, {"role": "system", "content": system})
        encoded = tokenizer.apply_chat_template(
            messages, add_generation_prompt=True, return_dict=True, return_tensors="pt"
        )
    else:
        encoded = tokenizer(prompt, return_tensors="pt")
    # Some tokenizers return token types too, which decoder-only models do not take.
    return BatchEncoding({name: encoded[name] for name in ("input_ids", "attention_mask")})
