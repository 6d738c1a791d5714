"""A Python environment that has what this one has, except this package."""

import os
import site
import subprocess
import sys
import venv
from pathlib import Path
from typing import Any

TESTS = Path(__file__).parent


def build(folder: Path) -> Path:
    """Make a virtual environment in which `import transformers_cactus` fails, and return its interpreter.

    Its path has this environment's packages, but not what `.pth` files add to them, as editable installs do.
    """
    venv.create(folder, with_pip=False)
    python = folder / "bin" / "python"
    (packages,) = folder.glob("lib/python*/site-packages")
    (packages / "shared.pth").write_text("\n".join(site.getsitepackages()))
    probe = subprocess.run(
        [python, "-E", "-c", "import transformers_cactus"], capture_output=True, text=True, check=False
    )
    assert "No module named 'transformers_cactus'" in probe.stderr, probe.stderr
    return python


def run(python: Path, script: str, cache: Path, *arguments: Any, **environment: str) -> str:
    """Run a script of this folder, without a network unless `environment` says so, and return what it prints."""
    variables = {k: v for k, v in os.environ.items() if not k.startswith(("HF_", "PYTHONPATH"))}
    variables |= {"HF_HOME": str(cache), "PYTHONPATH": str(TESTS), "OMP_NUM_THREADS": "1"}
    variables |= environment or {"HF_HUB_OFFLINE": "1"}
    command = [str(python), str(TESTS / script), *map(str, arguments)]
    result = subprocess.run(command, env=variables, capture_output=True, text=True, check=False)
    if result.returncode:
        sys.stderr.write(result.stdout + result.stderr)
        raise AssertionError(f"{script} failed: {result.stderr.strip().splitlines()[-1]}")
    return result.stdout
