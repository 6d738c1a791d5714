"""`transformers-cactus calibrate`: loads, calibrates, checks, reports."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table
from transformers import GenerationConfig

from ..evaluation import Calibration, Sampling, calibrate, check_calibration
from ..evaluation.estimates import Estimate
from ..saving import save_options
from .evaluation_setup import load, progress_bar, prompts_for
from .machine import describe_machine, describe_versions
from .models import quiet_transformers


@dataclass(frozen=True)
class CalibrateRequest:
    """The options of the command."""

    verifier: str | None
    draft: str | None
    dtype: str
    device: str | None
    data: str | None
    prompts: int | None
    max_new_tokens: int
    targets: dict[str, float | None]
    rule: str
    num_assistant_tokens: int
    sampling: Sampling
    seed: int
    check: bool
    quick: bool
    write: Path | None
    json_file: Path | None

    @property
    def kl_positions(self) -> int | None:
        """Without truncation, a divergence for every budget takes about a second a position."""
        truncated = self.sampling.top_k > 0 or self.sampling.top_p < 1
        return None if truncated else 24 if self.quick else 100


def run_calibrate(request: CalibrateRequest, console: Console) -> None:
    """Loads the pair, finds the delta, checks it, and writes it where it is wanted."""
    with quiet_transformers(), progress_bar(console) as progress:
        progress("loading the models", 0, 1)
        pair = load(request.verifier, request.draft, request.dtype, request.device)
        progress("prompts", 0, 1)
        prompts = prompts_for(pair, request.data, request.prompts, request.quick, request.seed)
        found = calibrate(
            pair.verifier,
            pair.draft,
            prompts,
            target_kl=request.targets["target_kl"],
            target_acceptance=request.targets["target_acceptance"],
            target_speedup=request.targets["target_speedup"],
            rule=request.rule,
            sampling=request.sampling,
            num_assistant_tokens=request.num_assistant_tokens,
            max_new_tokens=request.max_new_tokens,
            kl_positions=request.kl_positions,
            seed=request.seed,
            progress=progress,
        )
        checked = None
        if request.check:
            checked = check_calibration(
                found,
                pair.verifier,
                pair.draft,
                prompts,
                max_new_tokens=request.max_new_tokens,
                seed=request.seed + 1,
                progress=progress,
            )
    console.print(as_table(found, checked))
    console.print(
        f"[dim]On {found.positions:,} positions of {found.texts} texts, {found.sampling}, blocks of "
        f"{found.num_assistant_tokens}. Intervals are of 95 %, over texts. Another pair, sampling setting or block "
        "length has another delta.[/]"
    )
    if request.write is not None:
        file = write_delta(request.write, found)
        settings = ", ".join(f"{name}={value}" for name, value in found.sampling.options.items())
        console.print(f"wrote cactus_delta={found.delta.value:.4g}, and {settings}, for which it holds, to {file}")
    if request.json_file is not None:
        numbers = {
            "command": "calibrate",
            "machine": describe_machine(pair.verifier.device),
            "versions": describe_versions(),
            "settings": _plain(asdict(request)),
            "calibration": asdict(found)
            | {name: value._asdict() for name, value in vars(found).items() if isinstance(value, Estimate)}
            | {"costs": None if found.costs is None else found.costs._asdict()},
            "check": None if checked is None else checked._asdict(),
        }
        request.json_file.write_text(json.dumps(numbers, indent=2) + "\n", encoding="utf-8")


def as_table(found: Calibration, checked: Estimate | None) -> Table:
    """What was found, and how sure that is."""
    table = Table("", "", "95 % interval", box=box.SIMPLE_HEAD, show_header=True, header_style="bold", pad_edge=False)
    rows: dict[str, Estimate] = {
        "delta": found.delta,
        "nats per token": found.kl_per_token,
        "acceptance": found.acceptance,
        "accepted length": found.accepted_length,
        "accepted length, lossless": found.lossless_accepted_length,
    }
    if checked is not None:
        rows["nats per token, in texts generated with it"] = checked
    for name, (value, low, high) in rows.items():
        style = "bold" if name == "delta" else ""
        table.add_row(name, f"{value:.4g}", f"{low:.3g} to {high:.3g}", style=style)
    if found.costs is not None:
        block = found.num_assistant_tokens
        after, before = (
            found.costs.speedup(length.value, block)
            for length in (found.accepted_length, found.lossless_accepted_length)
        )
        table.add_row("speed-up that the forwards allow", f"{after:.2f}", f"lossless {before:.2f}")
        table.add_row(
            "a block in the verifier, a draft step",
            f"{found.costs.verifier_block:.2f}, {found.costs.draft_step:.2f}",
            f"in units of {found.costs.verifier_step * 1e3:.0f} ms, a token in the verifier",
        )
    return table


def write_delta(folder: Path, found: Calibration) -> Path:
    """Puts the rule, its delta and the sampling settings that it was found for into a folder's
    `generation_config.json`, which keeps its other entries.

    Returns:
        `Path`: The file.

    Raises:
        OSError: If the folder holds a configuration that cannot be read.
    """
    there = (folder / "generation_config.json").exists()
    config = GenerationConfig.from_pretrained(folder) if there else GenerationConfig()
    return save_options(
        folder, config, cactus_delta=found.delta.value, cactus_rule=found.rule, **found.sampling.options
    )


def _plain(values: dict[str, Any]) -> dict[str, Any]:
    return {name: str(value) if isinstance(value, Path) else value for name, value in values.items()}
