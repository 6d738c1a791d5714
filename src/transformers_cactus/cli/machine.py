"""What a measurement was made on."""

from __future__ import annotations

import os
import platform
from pathlib import Path
from typing import Any

import torch
import transformers

from .._version import __version__


def describe_machine(device: torch.device) -> dict[str, Any]:
    """Processor, threads and accelerator, as plain values."""
    return {
        "processor": _processor(),
        "cpus": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else device.type,
        "system": f"{platform.system()} {platform.machine()}",
    }


def describe_versions() -> dict[str, str]:
    """Versions of what the numbers depend on."""
    return {
        "transformers-cactus": __version__,
        "transformers": transformers.__version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
    }


def _processor() -> str:
    """The processor's name; `platform` knows only its architecture on Linux."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()
