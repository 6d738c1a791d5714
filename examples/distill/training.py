"""The training loop: a token budget with warm-up, constant rate and decay to zero; checkpoints and resuming."""

import os
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from tqdm import tqdm
from transformers import PreTrainedModel

from transformers_cactus.demo.shared_draft import own_parameters

from .evaluation import evaluate
from .objective import Objective, frequent_tokens
from .shards import Rows, load_groups, load_shards, shard_files


@dataclass
class Plan:
    """Everything that decides how a run goes. All counts are in tokens of training rows, repeats included."""

    tokens: int
    warm_up: int = 20_000
    decay: int = 1_000_000
    batch: int = 4
    lr: float = 2e-3
    weight_decay: float = 0.1
    vocabulary: int = 6144
    sampled: int = 1024
    acceptance_weight: float = 1.0
    held_out: int = 1
    evaluate_every: int = 100_000
    save_every: int = 50_000
    seed: int = 0

    def rate(self, done: int) -> float:
        """Learning rate after `done` tokens, as a share of `lr`."""
        return max(0.0, min(1.0, (done + 1) / self.warm_up, (self.tokens - done) / max(self.decay, 1)))


class Batches:
    """Shuffled batches of a folder's shards; shards that appeared meanwhile join at the next pass."""

    def __init__(self, folder: Path, plan: Plan, generator: torch.Generator):
        self.folder, self.plan, self.generator = folder, plan, generator
        self.files: list[Path] = []
        self.read()

    def read(self) -> None:
        """Load the folder's shards anew if there are more than before."""
        files = shard_files(self.folder)[self.plan.held_out :]
        if not files:
            raise ValueError(f"all shards of {self.folder} are held out: make more data or lower --held-out")
        if files != self.files:
            self.files, self.groups = files, load_groups(files)

    def __iter__(self) -> Iterator[Rows]:
        longest = max(rows.ids.shape[1] for rows in self.groups)
        while True:
            batches = []
            for rows in self.groups:
                # About as many tokens in each batch.
                size = self.plan.batch * longest // rows.ids.shape[1]
                order = torch.randperm(len(rows), generator=self.generator)
                starts = range(0, max(len(order) - size, 0) + 1, size)
                batches += [(rows, order[start : start + size]) for start in starts]
            for number in torch.randperm(len(batches), generator=self.generator).tolist():
                rows, chosen = batches[number]
                yield rows[chosen]
            self.read()


class Trainer:
    """One run: a draft, its data, and where it is written. What is particular to a kind of draft is in the methods
    `parameters`, `begin`, `losses` and `results`.

    Args:
        draft: What `build_draft` returned.
        data: Folder of shards, of which the first `plan.held_out` are never trained on.
        checkpoint: File that is written now and then, and continued from if it is there.
    """

    def __init__(self, draft: PreTrainedModel, data: Path, checkpoint: Path, plan: Plan):
        self.draft, self.plan, self.checkpoint = draft, plan, checkpoint
        self.done = 0
        self.generator = torch.Generator().manual_seed(plan.seed)
        self.trained = self.parameters()
        self.optimiser = torch.optim.AdamW(
            self.trained.values(), lr=plan.lr, betas=(0.9, 0.95), weight_decay=plan.weight_decay
        )
        self.batches = Batches(data, plan, self.generator)
        self.held_out = load_shards(shard_files(data)[: plan.held_out]) if plan.held_out else None
        resumed = checkpoint.exists()
        if resumed:
            self.resume()
        self.begin(resumed)

    def parameters(self) -> dict[str, torch.nn.Parameter]:
        """What is trained, by name."""
        return own_parameters(self.draft)

    def begin(self, resumed: bool) -> None:
        """Prepares the objective, and the draft where it has not been trained yet."""
        plan = self.plan
        frequent = frequent_tokens(self.batches.groups, plan.vocabulary, self.draft.config.vocab_size)
        self.objective = Objective(
            self.draft.get_output_embeddings(),
            frequent,
            sampled=plan.sampled,
            acceptance_weight=plan.acceptance_weight,
        )
        if not resumed:
            self.fit_norm()

    def losses(self, rows: Rows) -> dict[str, torch.Tensor]:
        """`loss`, and what else to show of a batch."""
        hidden = self.draft.base_model(input_ids=rows.ids.long(), use_cache=False).last_hidden_state
        return self.objective(hidden, rows, self.generator)

    def results(self, rows: Rows) -> dict[str, float]:
        """How good the draft is on held-out rows."""
        return evaluate(self.draft, rows)

    @torch.no_grad()
    def fit_norm(self) -> None:
        """Scale the final norm so that the untrained draft is as unsure as it should be.

        It was made for the verifier's last hidden states; after a few layers it makes most logits far too large.
        """
        rows, norm = self.to_device(self.batches.groups[0][slice(0, 4)]), self.draft.base_model.norm.weight
        hidden = self.draft.base_model(input_ids=rows.ids.long(), use_cache=False).last_hidden_state
        scales = [0.75**power for power in range(10)]
        losses = [self.objective(hidden * scale, rows, torch.Generator().manual_seed(0))["loss"] for scale in scales]
        norm.mul_(scales[int(torch.stack(losses).argmin())])

    def resume(self) -> None:
        """Continue from the checkpoint."""
        state = torch.load(self.checkpoint, weights_only=True)
        with torch.no_grad():
            for name, parameter in self.trained.items():
                parameter.copy_(state["draft"][name])
        self.optimiser.load_state_dict(state["optimiser"])
        self.optimiser.param_groups[0]["weight_decay"] = self.plan.weight_decay
        self.generator.set_state(state["generator"])
        self.done = state["done"]

    def save(self) -> None:
        """Write the checkpoint; a crash leaves the previous one."""
        state = {
            "draft": {name: p.detach() for name, p in self.trained.items()},
            "optimiser": self.optimiser.state_dict(),
            "generator": self.generator.get_state(),
            "done": self.done,
        }
        self.checkpoint.parent.mkdir(parents=True, exist_ok=True)
        unfinished = self.checkpoint.with_suffix(".tmp")
        torch.save(state, unfinished)
        os.replace(unfinished, self.checkpoint)

    def run(self) -> None:
        """Train until the token budget is used up; an interrupt saves first."""
        start, began = self.done, time.time()
        try:
            with tqdm(total=self.plan.tokens, initial=start, unit="tok", unit_scale=True, mininterval=10) as bar:
                self.loop(bar)
        finally:
            self.save()
        print(f"{self.done - start:,} tokens in {time.time() - began:.0f} s\n{self.report(None)}", flush=True)

    def loop(self, bar: tqdm) -> None:
        """Step after step, with a checkpoint and a look at the held-out rows now and then."""
        smooth: dict[str, float] = {}
        for rows in self.batches:
            if self.done >= self.plan.tokens:
                return
            for name, value in self.step(rows).items():
                smooth[name] = 0.95 * smooth.get(name, value) + 0.05 * value
            before, self.done = self.done, self.done + rows.ids.numel()
            bar.set_postfix({name: f"{value:.3f}" for name, value in smooth.items()}, refresh=False)
            bar.update(rows.ids.numel())
            if crossed(before, self.done, self.plan.save_every):
                self.save()
            if crossed(before, self.done, self.plan.evaluate_every):
                bar.write(self.report(16))

    def step(self, rows: Rows) -> dict[str, float]:
        """One update of all parameters; returns the parts of the loss."""
        rate = self.plan.lr * self.plan.rate(self.done)
        rows = self.to_device(rows)
        parts = self.losses(rows)
        parts["loss"].backward()
        for group in self.optimiser.param_groups:
            group["lr"] = rate
        torch.nn.utils.clip_grad_norm_(self.trained.values(), 1.0)
        self.optimiser.step()
        self.optimiser.zero_grad()
        return {name: value.item() for name, value in parts.items()}

    def to_device(self, rows: Rows) -> Rows:
        """The batch where the draft is."""
        return Rows(*(value.to(self.draft.device) for value in vars(rows).values()))

    def report(self, rows: int | None) -> str:
        """Tokens so far, and the quality on the first `rows` held-out rows (all by default)."""
        if self.held_out is None:
            return f"{self.done:,} tokens"
        results = self.results(self.held_out[slice(rows)])
        return f"{self.done:,} tokens; held out: " + ", ".join(
            f"{name} {value:.4g}" for name, value in results.items()
        )


def crossed(before: int, after: int, every: int) -> bool:
    """Whether a multiple of `every` lies between two counts."""
    return every > 0 and before // every != after // every
