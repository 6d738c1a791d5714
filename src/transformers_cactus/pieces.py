"""The text of a sequence, token by token."""

from __future__ import annotations

from transformers import PreTrainedTokenizerBase

INCOMPLETE = "\ufffd"


class TextPieces:
    """Turns tokens into the pieces of text that each adds to the tokens before it.

    A token decoded alone would lose its leading space or a part of a character. The bytes of an unfinished character
    are held back and shown with the token that completes it.

    Args:
        tokenizer (`PreTrainedTokenizerBase`): The tokenizer.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase):
        self._tokenizer = tokenizer
        self._tokens: list[int] = []
        self._text = ""

    def push(self, token: int) -> str:
        """The text that this token adds; special tokens add none."""
        self._tokens.append(token)
        text = self._tokenizer.decode(self._tokens, skip_special_tokens=True, clean_up_tokenization_spaces=False)
        if text.endswith(INCOMPLETE):
            return ""
        piece, self._text = text[len(self._text) :], text
        return piece
