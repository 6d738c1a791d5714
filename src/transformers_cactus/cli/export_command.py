"""`transformers-cactus export-hub`: a `custom_generate` repository for the Hub."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from .failures import one_line, usage_error
from .options import MODELS, RUNNING, Dtype

HUB = "Hub"

EPILOG = (
    "Examples:\n\n"
    "transformers-cactus export-hub cactus --push-to-hub me/cactus\n\n"
    "transformers-cactus export-hub pair --verifier Qwen/Qwen2.5-1.5B-Instruct --draft Qwen/Qwen2.5-0.5B-Instruct"
)


def export_hub(
    folder: Annotated[Path, typer.Argument(file_okay=False, help="Where to write it: a new or empty folder.")],
    verifier: Annotated[
        str | None,
        typer.Option(help="A model to include, a name or a folder; needs --draft.", rich_help_panel=MODELS),
    ] = None,
    draft: Annotated[
        str | None,
        typer.Option(help="The draft to include, with the verifier's tokenizer.", rich_help_panel=MODELS),
    ] = None,
    delta: Annotated[
        float, typer.Option(help="cactus_delta of an included model and of the examples.", rich_help_panel=MODELS)
    ] = 0.5,
    dtype: Annotated[
        Dtype | None,
        typer.Option(help="Number format of an included pair. Default: the models' own.", rich_help_panel=RUNNING),
    ] = None,
    push_to_hub: Annotated[
        str | None, typer.Option(metavar="USER/NAME", help="Upload it to this repository.", rich_help_panel=HUB)
    ] = None,
    private: Annotated[
        bool, typer.Option("--private", help="Make a new repository private.", rich_help_panel=HUB)
    ] = False,
) -> None:
    """Write a repository with which transformers runs Cactus, without this package."""
    if (verifier is None) != (draft is None):
        raise usage_error("--verifier and --draft go together.")
    if dtype is not None and verifier is None:
        raise usage_error("--dtype is of an included pair: name --verifier and --draft.")
    if private and push_to_hub is None:
        raise usage_error("--private needs --push-to-hub.")
    with one_line():
        from .export_run import run_export

        files = run_export(folder, verifier, draft, delta=delta, dtype=(dtype or Dtype.AUTO).value, name=push_to_hub)
        typer.echo(f"wrote {len(files)} files to {folder}")
        if push_to_hub is not None:
            from ..hub import push_to_hub as upload

            typer.echo(f"uploaded: {upload(folder, push_to_hub, private=private)}")
