"""Training data on disk: one safetensors file per shard of equally long rows, labelled by the verifier.

| tensor | shape | what |
|---|---|---|
| `ids` | `[rows, length]` int32 | the tokens |
| `role` | `[rows, length]` int8 | what the position *predicts*: forced template token, user turn or answer |
| `top_ids` | `[rows, length, k]` int32 | the verifier's `k` most probable next tokens, most probable first |
| `top_logp` | `[rows, length, k]` float16 | their log-probabilities at temperature 1, without truncation |
| `setting` | `[rows]` int8 | index of the sampling settings that the row's answers were written with |
"""

import os
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

FORCED, USER, ANSWER = 0, 1, 2
TOP = 48


@dataclass
class Rows:
    """Some labelled rows; indexing gives a batch of them."""

    ids: torch.Tensor
    role: torch.Tensor
    top_ids: torch.Tensor
    top_logp: torch.Tensor
    setting: torch.Tensor

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, rows: torch.Tensor | slice) -> "Rows":
        return Rows(*(getattr(self, field.name)[rows] for field in fields(self)))

    @classmethod
    def empty(cls, rows: int, length: int) -> "Rows":
        """Rows of zeros, to be filled in."""
        return cls(
            ids=torch.zeros(rows, length, dtype=torch.int32),
            role=torch.zeros(rows, length, dtype=torch.int8),
            top_ids=torch.zeros(rows, length, TOP, dtype=torch.int32),
            top_logp=torch.zeros(rows, length, TOP, dtype=torch.float16),
            setting=torch.zeros(rows, dtype=torch.int8),
        )


def shard_path(folder: Path, number: int) -> Path:
    return folder / f"{number:04d}.safetensors"


def save_shard(rows: Rows, path: Path) -> None:
    """Write a shard so that a reader never sees half of it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_suffix(".tmp")
    save_file({field.name: getattr(rows, field.name).contiguous() for field in fields(rows)}, unfinished)
    os.replace(unfinished, path)


def shard_files(folder: Path) -> list[Path]:
    """The shards of a folder in order; an error if there is none."""
    files = sorted(folder.glob("[0-9]*.safetensors"))
    if not files:
        raise FileNotFoundError(f"no shards in {folder}: make some with the `chats` or the `texts` command")
    return files


def load_shards(files: Sequence[Path]) -> Rows:
    """Read shards of one row length into memory."""
    groups = load_groups(files)
    if len(groups) > 1:
        lengths = sorted(group.ids.shape[1] for group in groups)
        raise ValueError(f"these shards have rows of different lengths, {lengths}, and cannot be read as one")
    return groups[0]


def load_groups(files: Sequence[Path]) -> list[Rows]:
    """Read shards into memory, those with rows of one length together."""
    by_length: dict[int, list[dict[str, torch.Tensor]]] = defaultdict(list)
    for file in files:
        shard = load_file(file)
        by_length[shard["ids"].shape[1]].append(shard)
    return [
        Rows(*(torch.cat([shard[field.name] for shard in shards]) for field in fields(Rows)))
        for shards in by_length.values()
    ]
