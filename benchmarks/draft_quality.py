"""How good is a draft? Acceptance, accepted length and divergence of a model pair, for several budgets `delta`.

    python -m benchmarks.draft_quality
    python -m benchmarks.draft_quality --chats 48 --json quality.json
    python -m benchmarks.draft_quality --verifier Qwen/Qwen2.5-7B-Instruct --draft Qwen/Qwen2.5-0.5B-Instruct

The verifier first writes its own chats from a seed: a user turn (temperature 1, top-p 0.95), then the answer under the
settings being measured. Then both models read each chat once, which gives their distributions `p` (draft) and `q`
(verifier) at every position of every answer, after temperature, top-k and top-p. From these, exactly:

- lossless: mean of `sum(min(p, q))`, the chance that speculative sampling keeps a drafted token;
- acceptance: mean of `sum(p * phi)`, the same for Cactus at that `delta`;
- AL at block m: expected accepted drafted tokens per round, the token after them not counted, where rounds follow one
  another along the verifier's text;
- KL: mean of `KL(h_alg || q)` in nats, `h_alg` the distribution that a drafted position really emits. The whole
  vocabulary without truncation is expensive: there the mean is over `--kl-positions` random positions.

`transformers-cactus sweep` measures the same for all rules, and `transformers-cactus calibrate` finds a `delta`.
"""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from tqdm import tqdm

from transformers_cactus import Cactus
from transformers_cactus.demo import Pair, load_pair
from transformers_cactus.evaluation import Sampling, write_prompts
from transformers_cactus.evaluation.estimates import Estimate, resampling, summarize
from transformers_cactus.evaluation.measures import Sums, choose_positions, measure
from transformers_cactus.evaluation.positions import read_positions
from transformers_cactus.evaluation.sampling import PAPER, PLAIN
from transformers_cactus.evaluation.texts import Text, write_answers

from .common import machine, machine_line, table, write_json

DELTAS = (0.0, 0.1, 0.25, 0.5, 0.75, 1.0)
BLOCKS = (4, 8)
SETTINGS = {"T 0.6, top-k 20, top-p 0.95": PAPER, "T 1": PLAIN}


def main(
    verifier: Annotated[str | None, typer.Option(help="Name or folder; the shipped pair by default.")] = None,
    draft: Annotated[str | None, typer.Option(help="Name or folder; the shipped pair by default.")] = None,
    chats: Annotated[int, typer.Option(min=2, help="Chats per sampling setting.")] = 32,
    length: Annotated[int, typer.Option(min=1, help="At most this many tokens per answer.")] = 96,
    kl_positions: Annotated[int, typer.Option(min=1, help="Positions for the KL without truncation.")] = 100,
    seed: int = 20_000,
    cache: Annotated[Path | None, typer.Option(help="File to keep the written chats in.")] = None,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write the results here.")] = None,
) -> None:
    """Measure a draft on chats that its verifier writes."""
    pair = load_pair(verifier, draft, dtype=torch.float32)
    texts = read_or_write(pair, chats, length, seed, cache)
    results = {}
    for name, sampling in SETTINGS.items():
        chosen = choose_positions(
            [len(text.ids) - text.begin for text in texts[name]], kl_positions if sampling == PLAIN else None, seed
        )
        sums: list[list[Sums]] = [[] for _ in DELTAS]
        for text, where in zip(tqdm(texts[name], desc=name, unit="chat"), chosen, strict=True):
            positions = read_positions(pair.verifier, pair.draft, text, sampling)
            for row, delta in zip(sums, DELTAS, strict=True):
                row.append(measure(positions, Cactus(delta), BLOCKS, where))
        results[name] = show(name, sampling, sums)
    facts = machine(pair.verifier.device)
    print(machine_line(facts))
    write_json(json_file, {"machine": facts, "seed": seed, "chats": chats, "results": results})


def read_or_write(pair: Pair, chats: int, length: int, seed: int, cache: Path | None) -> dict[str, list[Text]]:
    """The chats to measure on, by setting; kept in a file between runs if one is given."""
    request = {"chats": chats, "length": length, "seed": seed, "verifier": pair.verifier.name_or_path}
    if cache and cache.exists():
        stored = json.loads(cache.read_text())
        if stored["request"] == request:
            return {name: [Text(*chat) for chat in texts] for name, texts in stored["chats"].items()}
    prompts = write_prompts(pair.verifier, pair.tokenizer, chats, seed)
    texts = {
        name: write_answers(pair.verifier, prompts, sampling, length, seed) for name, sampling in SETTINGS.items()
    }
    if cache:
        cache.write_text(json.dumps({"request": request, "chats": texts}))
    return texts


def show(name: str, sampling: Sampling, sums: Sequence[Sequence[Sums]]) -> dict[str, Any]:
    """Prints the table of one setting, and returns its numbers."""
    weights = resampling(len(sums[0]))
    found: list[Mapping[str, Estimate]] = [summarize(row, BLOCKS, weights) for row in sums]
    count = int(sum(text["positions"] for text in sums[0]))
    lossless = found[0]["acceptance"].value
    header = ["delta", "acceptance", *(f"AL, block {block}" for block in BLOCKS), "KL(h_alg‖q)"]
    rows = [
        [f"{delta:g}", f"{numbers['acceptance'].value:.3f}"]
        + [f"{numbers[f'accepted_length@{block}'].value:.2f}" for block in BLOCKS]
        + [f"{numbers['kl'].value:.4f}"]
        for delta, numbers in zip(DELTAS, found, strict=True)
    ]
    print(f"\n{name}: lossless acceptance {lossless:.3f} over {count:,} positions\n\n{table(header, rows)}")
    deltas = [
        {
            "delta": delta,
            "acceptance": numbers["acceptance"].value,
            "accepted_length": {block: numbers[f"accepted_length@{block}"].value for block in BLOCKS},
            "kl": numbers["kl"].value,
        }
        for delta, numbers in zip(DELTAS, found, strict=True)
    ]
    return {"sampling": str(sampling), "positions": count, "lossless": lossless, "deltas": deltas}


if __name__ == "__main__":
    typer.run(main)
