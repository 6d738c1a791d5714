"""Make a draft model for a verifier: generate data with it, distil a few of its layers, measure the acceptance.

    python examples/distill_draft.py chats --data data --shards 8
    python examples/distill_draft.py chats --data data --shards 12 --prompts examples/distill/prompts.txt
    python examples/distill_draft.py answers --data data --shards 30
    python examples/distill_draft.py train --data data --out draft --tokens 2000000
    python examples/distill_draft.py evaluate --data data --draft draft
    python examples/distill_draft.py train-feature-draft --data data --start draft --out feature-draft
    transformers-cactus demo --draft draft

Every command continues where it was interrupted. Without `--verifier` the verifier is SmolLM2-135M-Instruct; any
Llama-like model goes (`--verifier Qwen/Qwen2.5-7B-Instruct`), on the GPU if there is one. A verifier without a chat
template, or a domain of your own, takes texts instead of chats:

    python examples/distill_draft.py texts my_corpus.txt --verifier my-model --data data

More data helps more than more passes over the same data: keep an eye on the held-out numbers. Shards that appear while
a run goes on join it at its next pass, and `--tokens` may be raised later: the run then goes on from its checkpoint at
the learning rate that the longer plan asks for.
"""

from pathlib import Path
from typing import Annotated

import torch
import typer
from distill.answers import batches_of_one_length, passages_of, write_answers
from distill.chats import write_chats
from distill.draft import build_draft
from distill.evaluation import evaluate as measure
from distill.feature_draft import FeatureTrainer, build_feature_draft
from distill.made_up_prompts import made_up_prompts
from distill.objective import frequent_tokens
from distill.shards import load_groups, load_shards, save_shard, shard_files, shard_path
from distill.texts import label_texts, read_texts
from distill.training import Plan, Trainer
from rich.console import Console
from rich.table import Table
from tqdm import tqdm

from transformers_cactus.demo import pack_linear_layers, pick_arithmetic
from transformers_cactus.demo.pair import load_pair, load_verifier
from transformers_cactus.demo.shared_draft import save_shared_draft

app = typer.Typer(no_args_is_help=True, pretty_exceptions_enable=False, help="Make a draft model for a verifier.")
defaults = Plan(tokens=0)

Verifier = Annotated[str | None, typer.Option(help="Name or folder; SmolLM2-135M-Instruct by default.")]
Data = Annotated[Path, typer.Option(help="Folder of shards.")]
Rows = Annotated[int, typer.Option(help="Rows per shard.")]
Length = Annotated[int, typer.Option(help="Tokens per row.")]
Threads = Annotated[int | None, typer.Option(help="CPU threads to use.")]


@app.command()
def chats(
    data: Data,
    shards: Annotated[int, typer.Option(help="How many shards the folder is to hold.")] = 10,
    verifier: Verifier = None,
    rows: Rows = 96,
    length: Length = 320,
    worker: Annotated[int, typer.Option(help="Which of the workers this is, from 0.")] = 0,
    workers: Annotated[int, typer.Option(help="Processes that share the shards between them.")] = 1,
    prompts: Annotated[Path | None, typer.Option(help="File of first user turns, one a line; else made up.")] = None,
    seed: int = 1000,
    threads: Threads = None,
) -> None:
    """Let the verifier write chats with itself."""
    asked = prompts.read_text(encoding="utf-8").splitlines() if prompts else []
    model, tokenizer = ready(verifier, threads)
    if model.device.type == "cpu" and pick_arithmetic().packed:
        pack_linear_layers(model)
    for number in tqdm(range(worker, shards, workers), unit="shard"):
        if not shard_path(data, number).exists():
            labelled = write_chats(model, tokenizer, rows=rows, length=length, seed=seed + number, prompts=asked)
            save_shard(labelled, shard_path(data, number))


@app.command()
def answers(
    data: Data,
    shards: Annotated[
        int, typer.Option(help="How many shards the folder is to hold; those of `chats` count too.")
    ] = 30,
    verifier: Verifier = None,
    rows: Rows = 128,
    new_tokens: Annotated[int, typer.Option(help="Tokens of each answer.")] = 64,
    seed: int = 77,
    threads: Threads = None,
) -> None:
    """Let the verifier answer made-up questions, tasks in code and arithmetic, summaries, lists and stories."""
    model, tokenizer = ready(verifier, threads)
    passages = passages_of(load_shards(shard_files(data)[:1]), tokenizer)
    if model.device.type == "cpu" and pick_arithmetic().packed:
        pack_linear_layers(model)
    prompts = made_up_prompts(shards * rows * 3 // 2, seed, passages)
    batches = batches_of_one_length(prompts, tokenizer, rows, seed)
    for number, batch in zip(tqdm(range(shards), unit="shard"), batches, strict=False):
        if not shard_path(data, number).exists():
            save_shard(write_answers(model, batch, new_tokens, seed + number), shard_path(data, number))


@app.command()
def texts(
    source: Annotated[str, typer.Argument(help="A .txt file, or a dataset by folder or name.")],
    data: Data,
    shards: Annotated[int, typer.Option(help="At most this many shards.")] = 10,
    verifier: Verifier = None,
    split: str = "train",
    column: Annotated[str, typer.Option(help="Column of texts, or of lists of messages.")] = "text",
    rows: Rows = 96,
    length: Length = 320,
    threads: Threads = None,
) -> None:
    """Label existing texts with the verifier."""
    model, tokenizer = ready(verifier, threads)
    found = read_texts(source, split=split, column=column, tokenizer=tokenizer)
    labelled = label_texts(model, tokenizer, found, rows=rows, length=length)
    for number, shard in zip(tqdm(range(shards), unit="shard"), labelled, strict=False):
        if not shard_path(data, number).exists():
            save_shard(shard(), shard_path(data, number))
    shard_files(data)


@app.command()
def train(
    data: Data,
    out: Annotated[Path, typer.Option(help="Folder for the draft and the checkpoint of the run.")],
    tokens: Annotated[int, typer.Option(help="Training tokens in all, repeats included.")] = 2_000_000,
    verifier: Verifier = None,
    layers: Annotated[str, typer.Option(help="The verifier's layers that the draft starts from.")] = "0,1",
    warm_up: Annotated[int, typer.Option(help="Tokens until the full learning rate.")] = defaults.warm_up,
    decay: Annotated[int, typer.Option(help="Tokens of decay to zero at the end.")] = defaults.decay,
    batch: Annotated[int, typer.Option(help="Rows per step.")] = defaults.batch,
    lr: Annotated[float, typer.Option(help="Learning rate.")] = defaults.lr,
    vocabulary: Annotated[int, typer.Option(help="How many frequent tokens are always scored.")] = defaults.vocabulary,
    acceptance_weight: Annotated[
        float, typer.Option(help="Weight of the rejection probability beside the KL.")
    ] = defaults.acceptance_weight,
    held_out: Annotated[int, typer.Option(help="First shards that are not trained on.")] = defaults.held_out,
    output_tokens: Annotated[
        int, typer.Option(help="Let the draft propose the most frequent tokens only, this many: faster; 0 for all.")
    ] = 0,
    seed: int = 0,
    threads: Threads = None,
) -> None:
    """Distil the verifier into a few of its layers."""
    model, tokenizer = ready(verifier, threads)
    draft = build_draft(model, [int(layer) for layer in layers.split(",")])
    plan = Plan(
        tokens=tokens,
        warm_up=warm_up,
        decay=decay,
        batch=batch,
        lr=lr,
        vocabulary=vocabulary,
        acceptance_weight=acceptance_weight,
        held_out=held_out,
        seed=seed,
    )
    Trainer(draft, data, out / "checkpoint.pt", plan).run()
    proposed = None
    if output_tokens:
        proposed = frequent_tokens(load_groups(shard_files(data)), output_tokens, model.config.vocab_size)
    save_shared_draft(draft, out, proposed)
    tokenizer.save_pretrained(out)


@app.command()
def train_feature_draft(
    data: Data,
    out: Annotated[Path, typer.Option(help="Folder for the draft and the checkpoint of the run.")],
    start: Annotated[str | None, typer.Option(help="The plain draft that it begins as; the shipped one.")] = None,
    tokens: Annotated[int, typer.Option(help="Training tokens in all, repeats included.")] = 1_000_000,
    verifier: Verifier = None,
    read: Annotated[str | None, typer.Option(help="The verifier's layers to read; by default four of them.")] = None,
    batch: Annotated[int, typer.Option(help="Rows per step.")] = defaults.batch,
    lr: Annotated[float, typer.Option(help="Learning rate, falling to 0.")] = 5e-4,
    output_tokens: Annotated[int, typer.Option(help="How many frequent tokens it can propose.")] = 16_384,
    held_out: Annotated[int, typer.Option(help="First shards that are not trained on.")] = defaults.held_out,
    seed: int = 0,
    threads: Threads = None,
) -> None:
    """Teach a draft to read the verifier's hidden states."""
    if threads:
        torch.set_num_threads(threads)
    large, plain, tokenizer = load_pair(verifier, start, dtype=torch.float32)
    depth = large.config.num_hidden_layers
    layers = [int(layer) for layer in read.split(",")] if read else [depth * k // 4 - 1 for k in (1, 2, 3, 4)]
    groups = load_groups(shard_files(data))
    draft = build_feature_draft(plain, frequent_tokens(groups, output_tokens, large.config.vocab_size), layers)
    plan = Plan(tokens=tokens, decay=tokens, batch=batch, lr=lr, held_out=held_out, seed=seed)
    FeatureTrainer(large, draft, data, out / "checkpoint.pt", plan).run()
    draft.eval().to(torch.bfloat16).save_pretrained(out)
    tokenizer.save_pretrained(out)


@app.command()
def evaluate(
    data: Data,
    draft: Annotated[str | None, typer.Option(help="Name or folder; the shipped draft by default.")] = None,
    verifier: Verifier = None,
    held_out: Annotated[int, typer.Option(help="How many of the first shards to use.")] = defaults.held_out,
    threads: Threads = None,
) -> None:
    """Acceptance and divergence of a draft on held-out shards."""
    if threads:
        torch.set_num_threads(threads)
    pair = load_pair(verifier, draft, dtype=torch.float32)
    table = Table("held out", "value")
    for name, value in measure(pair.draft, load_shards(shard_files(data)[:held_out])).items():
        table.add_row(name, f"{value:.4g}")
    Console().print(table)


def ready(verifier: str | None, threads: int | None):
    """The verifier in the precision to train in, and its tokenizer."""
    if threads:
        torch.set_num_threads(threads)
    return load_verifier(verifier, dtype=torch.float32)


if __name__ == "__main__":
    app()
