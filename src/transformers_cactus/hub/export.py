"""Writing a `custom_generate` repository, and sending it to the Hub."""

from __future__ import annotations

import importlib.metadata
import os
from pathlib import Path
from string import Template
from typing import Any

from huggingface_hub import HfApi
from packaging.requirements import Requirement
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from .._version import __version__
from ..configuration import build_rule
from ..saving import save_options
from .generate import DRAFT_FOLDER
from .sources import flat_sources

DISTRIBUTION = "transformers-cactus"
NEEDED = ("torch", "transformers")
"""What the exported modules import besides the standard library."""


def export_hub(
    folder: str | os.PathLike[str],
    *,
    verifier: PreTrainedModel | None = None,
    draft: PreTrainedModel | None = None,
    tokenizer: PreTrainedTokenizerBase | None = None,
    delta: float = 0.5,
    name: str | None = None,
) -> list[Path]:
    """Writes a repository with which `generate` takes the `cactus_*` options, without this package installed.

    Args:
        folder (`str` or path): Where to; made if need be, and it must be empty.
        verifier (`PreTrainedModel`, *optional*): A model to include. Loaded from the folder with
            `trust_remote_code=True`, its own `generate` runs Cactus.
        draft (`PreTrainedModel`, *optional*): A draft to include beside the verifier, used where a call has none.
        tokenizer (`PreTrainedTokenizerBase`, *optional*): Theirs. All three are given, or none.
        delta (`float`, *optional*, defaults to 0.5): `cactus_delta` in the `generation_config.json` of an included
            verifier, in nats.
        name (`str`, *optional*): The repository's name in the usage examples of its model card.

    Returns:
        `list[Path]`: The files, relative to `folder`.

    Raises:
        FileExistsError: If there is something in the folder.
        ValueError: If only a part of a pair is given, or `delta` is out of range.
    """
    folder = Path(folder)
    parts = [part is not None for part in (verifier, draft, tokenizer)]
    if any(parts) and not all(parts):
        raise ValueError("a pair is a verifier, a draft and their tokenizer: give all three, or none.")
    build_rule({"cactus_delta": delta})
    if folder.exists() and any(folder.iterdir()):
        raise FileExistsError(f"{folder} is not empty: name a new folder.")
    code = folder / "custom_generate"
    code.mkdir(parents=True)
    for file, text in flat_sources().items():
        (code / file).write_text(text, encoding="utf-8")
    metadata = importlib.metadata.distribution(DISTRIBUTION)
    (code / "requirements.txt").write_text(_requirements(metadata), encoding="utf-8")
    (folder / "LICENSE").write_text(metadata.read_text("licenses/LICENSE") or "", encoding="utf-8")
    if verifier is not None and draft is not None and tokenizer is not None:
        _save_pair(folder, verifier, draft, tokenizer, delta)
    card = _card(name or folder.resolve().name, pair=all(parts), delta=delta)
    (folder / "README.md").write_text(card, encoding="utf-8")
    return sorted(file.relative_to(folder) for file in folder.rglob("*") if file.is_file())


def push_to_hub(folder: str | os.PathLike[str], name: str, *, private: bool = False) -> str:
    """Uploads an exported folder, with the credentials that `hf auth login` keeps.

    Args:
        folder (`str` or path): What [`export_hub`] wrote.
        name (`str`): The repository, `user/name`; made if need be.
        private (`bool`, *optional*, defaults to `False`): Whether a new repository is private.

    Returns:
        `str`: The address of the commit.
    """
    api = HfApi(library_name=DISTRIBUTION, library_version=__version__)
    api.create_repo(name, private=private, exist_ok=True)
    message = f"{DISTRIBUTION} {__version__}"
    return str(api.upload_folder(repo_id=name, folder_path=Path(folder), commit_message=message).commit_url)


def _save_pair(
    folder: Path, verifier: PreTrainedModel, draft: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, delta: float
) -> None:
    verifier.save_pretrained(folder)
    save_options(folder, verifier.generation_config, cactus_delta=delta)
    draft.save_pretrained(folder / DRAFT_FOLDER)
    tokenizer.save_pretrained(folder)


def _requirements(metadata: importlib.metadata.Distribution) -> str:
    declared = [Requirement(line) for line in metadata.requires or []]
    # transformers checks what comes first in a line, so the lower bound does.
    lines = [
        needed.name + ",".join(sorted(map(str, needed.specifier), reverse=True))
        for needed in declared
        if needed.name in NEEDED and not needed.marker
    ]
    return "\n".join(sorted(lines)) + "\n"


def _card(name: str, *, pair: bool, delta: float) -> str:
    template = Path(__file__).with_name("card.md").read_text(encoding="utf-8")
    usage = Path(__file__).with_name("usage_pair.md" if pair else "usage_code.md").read_text(encoding="utf-8")
    values: dict[str, Any] = {"name": name, "version": __version__, "delta": delta}
    return Template(template).substitute(values, usage=Template(usage).substitute(values))
