"""Exporting a repository with the models that the command line names."""

from __future__ import annotations

from pathlib import Path

import torch

from ..demo.shared_draft import shares_embeddings
from ..hub import export_hub
from .models import dtype_named, load_models, quiet_transformers


def run_export(
    folder: Path, verifier: str | None, draft: str | None, *, delta: float, dtype: str, name: str | None
) -> list[Path]:
    """Writes the repository.

    Args:
        folder (`Path`): Where to.
        verifier (`str` or `None`): Name or folder of the verifier to include.
        draft (`str` or `None`): Name or folder of its draft.
        delta (`float`): `cactus_delta` in the verifier's generation config.
        dtype (`str`): Of both models, such as "bfloat16", or "auto".
        name (`str` or `None`): The repository's name in its model card.

    Returns:
        `list[Path]`: The files, relative to `folder`.

    Raises:
        OSError, ValueError: If the models cannot be loaded or do not belong together, or the folder is not empty.
    """
    if verifier is None or draft is None:
        return export_hub(folder, delta=delta, name=name)
    with quiet_transformers():
        models = load_models(verifier, draft, dtype=dtype_named(dtype), device=torch.device("cpu"))
        assert models.draft is not None
        if shares_embeddings(models.draft.config):
            raise ValueError("this draft has no embedding of its own and runs with this package only.")
        if models.draft_tokenizer is not None:
            raise ValueError("the draft has another tokenizer than the verifier: a repository's draft needs the same.")
        return export_hub(
            folder, verifier=models.verifier, draft=models.draft, tokenizer=models.tokenizer, delta=delta, name=name
        )
