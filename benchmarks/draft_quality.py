"""How good is a draft? Acceptance, accepted length and divergence of a model pair, for several budgets `delta`.

    python benchmarks/draft_quality.py
    python benchmarks/draft_quality.py --chats 48 --json quality.json
    python benchmarks/draft_quality.py --verifier Qwen/Qwen2.5-7B-Instruct --draft Qwen/Qwen2.5-0.5B-Instruct

The verifier first writes its own chats from a seed: a user turn (temperature 1, top-p 0.95), then the answer under the
settings being measured. Then both models read each chat once, which gives their distributions `p` (draft) and `q`
(verifier) at every position of every answer, after temperature, top-k and top-p. From these, exactly:

- lossless: mean of `sum(min(p, q))`, the chance that speculative sampling keeps a drafted token;
- acceptance: mean of `sum(p * phi)`, the same for Cactus at that `delta`;
- AL at block m: accepted drafted tokens per round, the token after them not counted. A round that starts at position t
  accepts `sum over i < m of the product of the acceptances at t ... t + i`; the mean over all t with m positions left.
  The text of all these rounds is the verifier's, and every t counts once, while real rounds start more often where
  the last one failed: an estimate that is a little too high for weak drafts, close enough to compare drafts by;
- KL: mean of `KL(h_alg || q)` in nats, `h_alg` the distribution that a drafted position really emits. The whole
  vocabulary without truncation is expensive: there the mean is over `--kl-positions` random positions.
"""

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated

import torch
import transformers
import typer
from rich.console import Console
from rich.table import Table
from tqdm import tqdm
from transformers import (
    LogitsProcessorList,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from transformers_cactus import Cactus, effective_distribution
from transformers_cactus.demo import Pair, load_pair
from transformers_cactus.demo.packed_linear import can_pack

DELTAS = (0.0, 0.1, 0.25, 0.5, 0.75, 1.0)
BLOCKS = (4, 8)
SETTINGS = {
    "T 0.6, top-k 20, top-p 0.95": {"temperature": 0.6, "top_k": 20, "top_p": 0.95},
    "T 1": {"temperature": 1.0, "top_k": 0, "top_p": 1.0},
}


@dataclass
class Quality:
    """What was measured for one `delta`."""

    delta: float
    acceptance: float
    accepted_length: dict[int, float]
    kl: float


def main(
    verifier: Annotated[str | None, typer.Option(help="Name or folder; the shipped pair by default.")] = None,
    draft: Annotated[str | None, typer.Option(help="Name or folder; the shipped pair by default.")] = None,
    chats: Annotated[int, typer.Option(help="Chats per sampling setting.")] = 32,
    length: Annotated[int, typer.Option(help="At most this many tokens per answer.")] = 96,
    kl_positions: Annotated[int, typer.Option(help="Positions for the KL without truncation.")] = 100,
    seed: int = 20_000,
    cache: Annotated[Path | None, typer.Option(help="File to keep the written chats in.")] = None,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write the results here.")] = None,
) -> None:
    """Measure a draft on chats that its verifier writes."""
    pair = load_pair(verifier, draft, dtype=torch.float32, packed=can_pack())
    texts = read_or_write(pair, chats, length, seed, cache)
    results = {}
    for name, setting in SETTINGS.items():
        rows = [positions(pair, *chat, setting) for chat in tqdm(texts[name], desc=name, unit="chat")]
        lossless = torch.cat([torch.minimum(p, q).sum(-1) for p, q in rows])
        table = [measure(rows, delta, kl_positions, seed) for delta in tqdm(DELTAS, desc=name, unit="delta")]
        results[name] = {"positions": len(lossless), "lossless": lossless.mean().item(), "deltas": table}
        show(name, results[name])
    if json_file:
        facts = {"torch": torch.__version__, "transformers": transformers.__version__, "seed": seed, "chats": chats}
        json_file.write_text(json.dumps({**facts, "results": results}, indent=1, default=asdict) + "\n")


Chat = tuple[list[int], int]  # token ids, and where the answer begins


def read_or_write(pair: Pair, chats: int, length: int, seed: int, cache: Path | None) -> dict[str, list[Chat]]:
    """The chats to measure on, by setting; kept in a file between runs if one is given."""
    request = {"chats": chats, "length": length, "seed": seed, "verifier": pair.verifier.name_or_path}
    if cache and cache.exists():
        stored = json.loads(cache.read_text())
        if stored["request"] == request:
            return stored["chats"]
    texts = {
        name: write_chats(pair.verifier, pair.tokenizer, chats, length, seed, setting)
        for name, setting in SETTINGS.items()
    }
    if cache:
        cache.write_text(json.dumps({"request": request, "chats": texts}))
    return texts


def write_chats(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, count: int, length: int, seed: int, setting: dict
) -> list[Chat]:
    """Let the verifier write user turns, and then answer them."""
    mark = "SENTINELXX"
    template = tokenizer.apply_chat_template(
        [{"role": "user", "content": mark}], tokenize=False, add_generation_prompt=True
    )
    opening, to_answer = (tokenizer(x, add_special_tokens=False).input_ids for x in template.split(mark))
    torch.manual_seed(seed)
    asked = complete(model, [opening] * count, 64, {"temperature": 1.0, "top_k": 0, "top_p": 0.95})
    prompts = [opening + turn + to_answer for turn in asked]
    answers = complete(model, prompts, length, setting)
    return [(prompt + answer, len(prompt)) for prompt, answer in zip(prompts, answers, strict=True) if answer]


def complete(model: PreTrainedModel, prompts: list[list[int]], length: int, setting: dict) -> list[list[int]]:
    """Sampled continuations without the token that ends them; prompts are padded on the left."""
    pad, width = model.generation_config.pad_token_id, max(map(len, prompts))
    ids = torch.tensor([[pad] * (width - len(prompt)) + prompt for prompt in prompts], device=model.device)
    mask = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts], device=model.device)
    output = model.generate(ids, attention_mask=mask, do_sample=True, max_new_tokens=length, **setting)
    ends = model.generation_config.eos_token_id
    ends = ends if isinstance(ends, list) else [ends]
    return [upto(row, ends) for row in output[:, width:].tolist()]


def upto(ids: list[int], ends: list[int]) -> list[int]:
    return ids[: next((i for i, token in enumerate(ids) if token in ends), len(ids))]


@torch.inference_mode()
def positions(pair: Pair, ids: list[int], begin: int, setting: dict) -> tuple[torch.Tensor, torch.Tensor]:
    """`p` and `q` `[answer, vocab]` at the answer of one chat, on the tokens that either gives a probability."""
    warpers = LogitsProcessorList([TemperatureLogitsWarper(setting["temperature"])])
    if setting["top_k"]:
        warpers.append(TopKLogitsWarper(setting["top_k"]))
    if setting["top_p"] < 1:
        warpers.append(TopPLogitsWarper(setting["top_p"]))
    batch = torch.tensor([ids], device=pair.verifier.device)
    logits = [model(batch).logits[0, begin - 1 : -1].float() for model in (pair.draft, pair.verifier)]
    vocab = min(x.shape[-1] for x in logits)
    p, q = (warpers(batch, x[:, :vocab]).softmax(-1).cpu() for x in logits)
    if not setting["top_k"]:
        return p, q
    used = torch.maximum(p, q).topk(2 * setting["top_k"], dim=-1).indices
    return p.gather(-1, used), q.gather(-1, used)


def measure(rows: list[tuple[torch.Tensor, torch.Tensor]], delta: float, kl_positions: int, seed: int) -> Quality:
    """All numbers for one budget."""
    rule = Cactus(delta)
    accepted = [torch.minimum(p, rule.gamma(q)).sum(-1).double() for p, q in rows]
    lengths = {block: torch.cat([expected_lengths(row, block) for row in accepted]).mean().item() for block in BLOCKS}
    kl = torch.cat([divergence(p, q, rule) for p, q in sampled(rows, kl_positions, seed)]).mean().item()
    return Quality(delta, torch.cat(accepted).mean().item(), lengths, kl)


def expected_lengths(acceptance: torch.Tensor, block: int) -> torch.Tensor:
    """Expected accepted length of the rounds starting at each position that has a whole block left."""
    if len(acceptance) < block:
        return acceptance.new_zeros(0)
    return acceptance.unfold(0, block, 1).cumprod(-1).sum(-1)


def sampled(
    rows: list[tuple[torch.Tensor, torch.Tensor]], count: int, seed: int
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """All positions if they are narrow, else a random few of them, the same at every call."""
    total = sum(len(p) for p, _ in rows)
    narrow = rows[0][0].shape[-1] < 1000
    chosen = torch.ones(total, dtype=torch.bool)
    if not narrow and total > count:
        chosen = torch.zeros(total, dtype=torch.bool)
        chosen[torch.randperm(total, generator=torch.Generator().manual_seed(seed))[:count]] = True
    for (p, q), keep in zip(rows, chosen.split([len(p) for p, _ in rows]), strict=True):
        yield p[keep], q[keep]


def divergence(p: torch.Tensor, q: torch.Tensor, rule: Cactus) -> torch.Tensor:
    """`KL(h_alg || q)` per position; tokens of no probability count nothing."""
    h = effective_distribution(p, q, rule)
    q = q.double() / q.double().sum(-1, keepdim=True)
    return torch.where(h > 0, h * (h / q).log(), 0.0).sum(-1)


def show(name: str, result: dict) -> None:
    title = f"{name}: lossless acceptance {result['lossless']:.3f} over {result['positions']:,} positions"
    table = Table("delta", "acceptance", *(f"AL, block {block}" for block in BLOCKS), "KL(h_alg || q)", title=title)
    for row in result["deltas"]:
        lengths = [f"{value:.2f}" for value in row.accepted_length.values()]
        table.add_row(f"{row.delta:g}", f"{row.acceptance:.3f}", *lengths, f"{row.kl:.4f}")
    Console().print(table)


if __name__ == "__main__":
    typer.run(main)
