"""`cactus_*` options in a `generation_config.json`: writing them, and what cannot be written."""

from __future__ import annotations

import copy
import os
from pathlib import Path
from typing import Any

from transformers import GenerationConfig


def save_options(folder: str | os.PathLike[str], config: GenerationConfig, **entries: Any) -> Path:
    """Writes a configuration with further entries into a folder, so that loading it brings all of them back.

    Args:
        folder (`str` or path): A model's folder.
        config (`GenerationConfig`): Everything else that the file says. It is left as it is.
        **entries: The options, and whatever belongs to them.

    Returns:
        `Path`: The file.
    """
    config = copy.deepcopy(config)
    config.update(**entries, allow_custom_entries=True)
    # Of a config that says it was made from a model's config, transformers reads known entries only.
    config._from_model_config = False
    config.save_pretrained(folder)
    return Path(folder) / "generation_config.json"


class Unsavable:
    """A value that JSON does not have: transformers writes `null` for a dataclass, and that would mean off."""

    def to_dict(self) -> dict[str, str]:
        """What transformers puts in the object's place where it prints or writes a configuration that holds it.

        Printing has to work, so writing does too; whoever loads what was written hears that it is no option.
        """
        return {
            "cannot be loaded": f"{self} is no number, name or list. Set the rule by its name and its parameters as "
            "options, or pass it in the call."
        }
