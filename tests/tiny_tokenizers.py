"""Tiny tokenizers, built here: characters, or characters with some merged pairs."""

from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast

LETTERS = "abcdefghijklmnopqrstuvwxyz ."


def build(merges: list[str] | None = None, size: int = 97) -> PreTrainedTokenizerFast:
    """Return a byte-pair tokenizer over `LETTERS` whose vocabulary has exactly `size` entries.

    Args:
        merges: pairs of letters that are tokens of their own.
        size: entries; those that no text needs are named `<0>`, `<1>`, …
    """
    merges = merges or []
    tokens = ["<pad>", "<s>", "<unk>", *LETTERS, *merges]
    tokens += [f"<{i}>" for i in range(size - len(tokens))]
    model = models.BPE(
        vocab={token: i for i, token in enumerate(tokens)}, merges=[tuple(pair) for pair in merges], unk_token="<unk>"
    )
    tokenizer = Tokenizer(model)
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", bos_token="<s>", unk_token="<unk>")
