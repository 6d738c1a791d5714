"""What the benchmarks share: models, prompts, the time inside forwards, peak memory, medians and tables."""

from __future__ import annotations

import argparse
import ctypes
import datetime
import json
import statistics
import time
import warnings
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import psutil
import torch
import transformers
from torch.utils.hooks import RemovableHandle
from transformers import PreTrainedModel

from transformers_cactus.cli.machine import describe_machine, describe_versions
from transformers_cactus.demo import Arithmetic, Pair, load_pair, pick_arithmetic

PROMPTS = Path(__file__).parent / "prompts.json"
Machine = dict[str, Any]


class Spread(NamedTuple):
    """The middle of some measurements."""

    median: float
    low: float
    """The first quartile."""
    high: float
    """The third."""

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        """Of at least one number."""
        if len(values) == 1:
            return cls(values[0], values[0], values[0])
        low, _, high = statistics.quantiles(values, n=4, method="inclusive")
        return cls(statistics.median(values), low, high)

    def show(self, digits: int) -> str:
        """The median with the quartiles in brackets."""
        return f"{self.median:.{digits}f} ({self.low:.{digits}f}–{self.high:.{digits}f})"


class ForwardTimer:
    """Seconds of every forward of some models inside a `with`, by the name that each is given here.

    On a GPU, the time on its stream from before the first kernel until after the last.
    """

    def __init__(self, **models: PreTrainedModel):
        self._models = models
        self._marks: dict[str, list[tuple[Any, Any]]] = {name: [] for name in models}
        self._hooks: list[RemovableHandle] = []

    def __enter__(self) -> ForwardTimer:
        for name, model in self._models.items():
            self._watch(model, self._marks[name])
        return self

    def __exit__(self, *_: object) -> None:
        for hook in self._hooks:
            hook.remove()

    def _watch(self, model: PreTrainedModel, marks: list[tuple[Any, Any]]) -> None:
        started: list[Any] = []
        self._hooks += [
            model.register_forward_pre_hook(lambda module, *_: started.append(_mark(module)), with_kwargs=True),
            model.register_forward_hook(lambda module, *_: marks.append((started.pop(), _mark(module)))),
        ]

    def seconds(self, name: str) -> list[float]:
        """Of each forward; none of a model that is not watched. Waits for the device."""
        return [_elapsed(start, end) for start, end in self._marks.get(name, [])]


def _mark(model: PreTrainedModel) -> Any:
    if model.device.type != "cuda":
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def _elapsed(start: Any, end: Any) -> float:
    if isinstance(start, float):
        return end - start
    end.synchronize()
    return start.elapsed_time(end) / 1e3


def wait_for(device: torch.device) -> None:
    """Waits until the device has done what it was given."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


class PeakMemory:
    """Most memory during some calls, above what there was before.

    On a GPU what PyTorch allocated there, elsewhere the resident memory of the process, whose peak Linux keeps and
    lets one reset. Memory that an earlier call gave back is returned to the system first.
    """

    def __init__(self, device: torch.device):
        self.device = device
        self._before = 0

    def start(self) -> None:
        """Begins."""
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.device)
            self._before = torch.cuda.memory_allocated(self.device)
            return
        trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
        if trim is not None:
            trim(0)
        clear = Path("/proc/self/clear_refs")
        if clear.exists():
            clear.write_text("5")
        self._before = psutil.Process().memory_info().rss

    def stop(self) -> float | None:
        """MiB since `start`; `None` where the system does not keep the peak."""
        if self.device.type == "cuda":
            return (torch.cuda.max_memory_allocated(self.device) - self._before) / 2**20
        status = Path("/proc/self/status")
        if not status.exists():
            return None
        line = next(line for line in status.read_text().splitlines() if line.startswith("VmHWM:"))
        return max(0.0, int(line.split()[1]) / 2**10 - self._before / 2**20)


def add_model_options(parser: argparse.ArgumentParser) -> None:
    """Which pair, and how it computes."""
    parser.add_argument("--verifier", help="name or folder; by default the real pair of the demo")
    parser.add_argument("--draft", help="name or folder")
    parser.add_argument("--dtype", choices=["float32", "bfloat16", "float16"], help="by default what is fastest here")
    parser.add_argument("--packed", action="store_true", help="float32 with packed weights")
    parser.add_argument("--int8-draft", action="store_true", help="the draft's linear layers with 8-bit weights")


def load(arguments: argparse.Namespace) -> tuple[Pair, Arithmetic]:
    """The pair that `add_model_options` asks for, without an end-of-sequence token, so that all texts have one length.

    Keeps transformers' advice out of the output, and says what the models compute in.
    """
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    warnings.filterwarnings("ignore", category=FutureWarning)
    if arguments.dtype or arguments.packed or arguments.int8_draft:
        dtype = getattr(torch, arguments.dtype or "float32")
        arithmetic = Arithmetic(dtype, arguments.packed, arguments.int8_draft)
    else:
        arithmetic = pick_arithmetic("cuda" if torch.cuda.is_available() else "cpu")
    pair = load_pair(arguments.verifier, arguments.draft, **arithmetic._asdict())
    for model in (pair.verifier, pair.draft):
        model.generation_config.eos_token_id = None
        model.config.eos_token_id = None
    pair.tokenizer.padding_side = "left"
    return pair, arithmetic


def batches_of_prompts(pair: Pair, batch: int) -> list[dict[str, torch.Tensor]]:
    """The fixed prompts through the chat template, `batch` at a time and left-padded; as many batches as prompts.

    Batch `i` begins with prompt `i`.
    """
    texts = [entry["text"] for entry in json.loads(PROMPTS.read_text(encoding="utf-8"))["prompts"]]
    chats = [[{"role": "user", "content": text}] for text in texts]
    return [
        dict(
            pair.tokenizer.apply_chat_template(
                [chats[(first + row) % len(chats)] for row in range(batch)],
                add_generation_prompt=True,
                padding=True,
                return_dict=True,
                return_tensors="pt",
            ).to(pair.verifier.device)
        )
        for first in range(len(chats))
    ]


def machine(device: torch.device, **more: str) -> Machine:
    """What a measurement was made on, with which versions, and when."""
    return {
        **describe_machine(device),
        **more,
        **describe_versions(),
        "date": datetime.date.today().isoformat(),
    }


def machine_line(found: Machine) -> str:
    """The same as one line."""
    versions = ("transformers-cactus", "transformers", "torch", "python")
    hardware = f"{found['processor']}, {found['cpus']} processors, {found['threads']} threads, {found['device']}"
    parts = [hardware, *(found[name] for name in ("arithmetic", "attention") if name in found)]
    return ", ".join([*parts, *(f"{name} {found[name]}" for name in versions), found["date"]])


def table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A Markdown table, the first column to the left and numbers to the right."""
    lines = [header, ["---", *["---:"] * (len(header) - 1)], *rows]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def write_json(file: Path | None, document: dict[str, Any]) -> None:
    """Writes what was measured, if a file is given."""
    if file is not None:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
