"""How often what followed an n-gram before follows it again: the shares that a draft model mixes copies in with.

    python -m benchmarks.copying                # the real pair, answers to the 24 prompts
    python -m benchmarks.copying --new-tokens 64 --answers 4

The verifier answers the prompts of benchmarks/prompts.json. At each position whose last n tokens occurred before in
the prompt or the answer (the longest n up to 4 and the latest occurrence count), the table has the probability that
the verifier gives to the token that followed then, beside what the draft model's own distribution would have accepted
there. `transformers_cactus.copying.HIT_RATES` is near the first of the two.
"""

from __future__ import annotations

import argparse
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from transformers_cactus.copying import LARGEST, SMALLEST
from transformers_cactus.demo import Pair
from transformers_cactus.evaluation.sampling import PAPER
from transformers_cactus.ngrams import NgramIndex

from .common import add_model_options, batches_of_prompts, load, machine, machine_line, table, write_json


@torch.inference_mode()
def positions(pair: Pair, ids: Tensor, first: int) -> list[tuple[int, float, float]]:
    """The positions of a text with an n-gram that occurred before.

    Args:
        pair ([`Pair`]): The models.
        ids (`torch.LongTensor` of shape `[1, length]`): Prompt and answer.
        first (`int`): Where the answer begins.

    Returns:
        `list`: Size of the n-gram, probability of the copied token, acceptance of the draft model.
    """
    verifier, draft = (PAPER.probabilities(model(ids).logits[0].float()) for model in pair[:2])
    accepted = torch.minimum(verifier, draft).sum(-1)
    index, tokens, found = NgramIndex(LARGEST, SMALLEST), ids[0].tolist(), []
    for end in range(first, len(tokens)):
        copied, size = index.following(0, tokens[:end], 1)
        if copied:
            found.append((size, float(verifier[end - 1, copied[0]]), float(accepted[end - 1])))
    return found


def measure(pair: Pair, new_tokens: int, answers: int) -> list[dict[str, Any]]:
    """A row per n-gram size."""
    by_size: dict[int, list[tuple[float, float]]] = defaultdict(list)
    total = 0
    torch.manual_seed(0)
    for inputs in batches_of_prompts(pair, 1):
        start = inputs["input_ids"].shape[1]
        options = {**PAPER.options, "max_new_tokens": new_tokens, "num_return_sequences": answers}
        for ids in pair.verifier.generate(**inputs, **options):
            total += new_tokens
            for size, copied, drafted in positions(pair, ids[None], start):
                by_size[size].append((copied, drafted))
    rows = []
    for size, found in sorted(by_size.items()):
        copied, drafted = torch.tensor(found).mean(0).tolist()
        rows.append({"n": size, "share": len(found) / total, "copied": copied, "drafted": drafted})
    return rows


def main(words: Sequence[str] | None = None) -> None:
    """Parses the command line, measures, prints."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_model_options(parser)
    parser.add_argument("--new-tokens", type=int, default=48)
    parser.add_argument("--answers", type=int, default=2, help="for each prompt")
    parser.add_argument("--json", type=Path, help="also write the numbers to this file")
    arguments = parser.parse_args(words)
    pair, arithmetic = load(arguments)
    rows = measure(pair, arguments.new_tokens, arguments.answers)
    document = {"machine": machine(pair.verifier.device, arithmetic=str(arithmetic)), "rows": rows}
    print(machine_line(document["machine"]))
    header = ["n-gram", "share of positions", "probability of the copy", "acceptance of the draft model"]
    print(
        table(
            header, [[str(row["n"]), *(f"{row[key]:.2f}" for key in ("share", "copied", "drafted"))] for row in rows]
        )
    )
    write_json(arguments.json, document)


if __name__ == "__main__":
    main()
