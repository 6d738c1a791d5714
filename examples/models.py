"""What the examples share: the models to run, from the command line."""

import argparse

import transformers_cactus  # noqa: F401 - says at once if the package is missing
from transformers_cactus.demo import Pair, load_pair


def pair_from_command_line(description: str) -> Pair:
    """The verifier, draft and tokenizer that `--verifier` and `--draft` name; without them, a small pair.

    Args:
        description (`str`): For `--help`.
    """
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--verifier", help="a large model, by name or folder (default: SmolLM2-135M-Instruct)")
    parser.add_argument("--draft", help="a small model with the same tokenizer (default: the one made for it)")
    names = parser.parse_args()
    if (names.verifier is None) != (names.draft is None):
        parser.error("--verifier and --draft go together")
    return load_pair(names.verifier, names.draft)


SAMPLING = {"do_sample": True, "temperature": 0.6, "top_k": 20, "top_p": 0.95}
"""The settings of the paper's experiments."""
