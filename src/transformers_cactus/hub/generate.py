"""What transformers runs for a repository with a `custom_generate` folder: Cactus without an installation."""

from __future__ import annotations

from typing import Any
from weakref import WeakKeyDictionary

from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.utils import has_file

from ..integration import generate_for_repository

DRAFT_FOLDER = "draft"
"""Where a repository may keep a draft for its model."""


def generate(*args: Any, model: PreTrainedModel, **kwargs: Any) -> Any:
    """`model.generate` with the `cactus_*` options.

    Args:
        *args, **kwargs: What `model.generate` takes, and the `cactus_*` options. Without a draft among them, the one
            in the folder `draft` of the model's own repository is used, if there is one.
        model (`PreTrainedModel`): The verifier.

    Returns:
        What `model.generate` returns, with `acceptance` in it where it is no bare tensor.
    """
    return generate_for_repository(model, lambda: _bundled_draft(model), *args, **kwargs)


_drafts: WeakKeyDictionary[PreTrainedModel, PreTrainedModel | None] = WeakKeyDictionary()


def _bundled_draft(model: PreTrainedModel) -> PreTrainedModel | None:
    if model not in _drafts:
        _drafts[model] = _load_draft(model)
    draft = _drafts[model]
    return None if draft is None else draft.to(model.device)


def _load_draft(model: PreTrainedModel) -> PreTrainedModel | None:
    name, revision = model.name_or_path, getattr(model.config, "_commit_hash", None)
    if not name or not has_file(name, f"{DRAFT_FOLDER}/config.json", revision=revision):
        return None
    return AutoModelForCausalLM.from_pretrained(
        name, subfolder=DRAFT_FOLDER, revision=revision or "main", dtype=model.dtype
    ).eval()
