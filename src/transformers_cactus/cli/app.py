"""The command line: its commands and `--version`."""

from __future__ import annotations

from typing import Annotated

import typer

from . import calibrate_command, chat_command, demo_command, export_command, generate_command, sweep_command

app = typer.Typer(
    name="transformers-cactus",
    help="Faster text generation for Hugging Face transformers: constrained acceptance speculative sampling (Cactus).",
    epilog="Examples:\n\ntransformers-cactus demo\n\ntransformers-cactus generate --prompt 'Hello!' --delta 0.75",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


def _show_version(wanted: bool) -> None:
    if wanted:
        from .machine import describe_versions

        versions = describe_versions()
        others = ", ".join(f"{name} {versions[name]}" for name in ("transformers", "torch", "python"))
        typer.echo(f"transformers-cactus {versions['transformers-cactus']} ({others})")
        raise typer.Exit


@app.callback()
def _common(
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Show the versions and leave.")
    ] = False,
) -> None:
    pass


app.command(epilog=demo_command.EPILOG)(demo_command.demo)
app.command(epilog=generate_command.EPILOG)(generate_command.generate)
app.command(epilog=export_command.EPILOG)(export_command.export_hub)
app.command(epilog=chat_command.EPILOG)(chat_command.chat)
app.command(epilog=calibrate_command.EPILOG)(calibrate_command.calibrate)
app.command(epilog=sweep_command.EPILOG)(sweep_command.sweep)
