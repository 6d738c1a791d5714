"""The options of `transformers-cactus chat`."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from .failures import one_line, usage_error
from .options import (
    CACTUS,
    MODELS,
    REPORT,
    RUNNING,
    SAMPLING,
    TEXT,
    Device,
    Dtype,
    Parameters,
    RuleChoice,
    Verifier,
)

EPILOG = (
    "Examples:\n\n"
    "transformers-cactus chat --colours\n\n"
    "transformers-cactus chat --verifier Qwen/Qwen3-8B --draft Qwen/Qwen3-0.6B --delta 0.5"
)


def chat(
    verifier: Verifier = None,
    draft: Annotated[
        str | None,
        typer.Option(help="The small model that drafts: a name or a folder.", rich_help_panel=MODELS),
    ] = None,
    trust_remote_code: Annotated[
        bool, typer.Option("--trust-remote-code", help="Run code that comes with a model.", rich_help_panel=MODELS)
    ] = False,
    system: Annotated[str | None, typer.Option(help="System message.", rich_help_panel=TEXT)] = None,
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Length of an answer.", rich_help_panel=TEXT)] = 512,
    temperature: Annotated[float, typer.Option(help="Above 0.", rich_help_panel=SAMPLING)] = 0.6,
    top_k: Annotated[int, typer.Option(min=0, help="0 for all tokens.", rich_help_panel=SAMPLING)] = 20,
    top_p: Annotated[float, typer.Option(min=0.0, max=1.0, help="1 for all.", rich_help_panel=SAMPLING)] = 0.95,
    seed: Annotated[
        int | None,
        typer.Option(
            min=0, help="Same seed, same chat, in constant blocks. Default: random.", rich_help_panel=SAMPLING
        ),
    ] = None,
    delta: Annotated[
        float | None,
        typer.Option(help="Budget in nats to start with; 0 is lossless. Default: 0.25.", rich_help_panel=CACTUS),
    ] = None,
    rule: RuleChoice = None,
    parameter: Parameters = None,
    num_assistant_tokens: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Tokens drafted in a round. Default: as many as pay on this machine; with --seed 4.",
            rich_help_panel=CACTUS,
        ),
    ] = None,
    prompt_lookup_num_tokens: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Draft this many tokens from the chat itself: beside a draft, or without one.",
            rich_help_panel=CACTUS,
        ),
    ] = None,
    dtype: Annotated[Dtype, typer.Option(help="Number format of the models.", rich_help_panel=RUNNING)] = Dtype.AUTO,
    device: Device = None,
    colours: Annotated[
        bool, typer.Option("--colours", help="Show where each token came from.", rich_help_panel=REPORT)
    ] = False,
) -> None:
    """Chat with a model. Both models keep what they have read, so each turn feeds only what is new.

    /help lists the commands; Ctrl-C stops an answer.
    """
    with one_line():
        from .chat_run import run_chat
        from .chat_settings import ChatRule
        from .models import dtype_named
        from .rule_parameters import with_flags

        if verifier is not None and draft is None and prompt_lookup_num_tokens is None:
            raise usage_error("name a --draft with the verifier's tokenizer, or give --prompt-lookup-num-tokens 10.")
        if not temperature > 0:
            raise usage_error(f"--temperature must be above 0, got {temperature}.")
        try:
            chosen = ChatRule()
            words = (parameter or []) + ([] if delta is None else [f"delta={delta}"])
            chosen.set_rule(["cactus" if rule is None else rule.value, *words])
        except (TypeError, ValueError) as error:
            raise usage_error(with_flags(str(error))) from error
        options: dict[str, Any] = {
            "do_sample": True,
            "max_new_tokens": max_new_tokens,
            "temperature": temperature,
            "top_k": top_k,
            "top_p": top_p,
        }
        if num_assistant_tokens is not None:
            options |= {
                "num_assistant_tokens": num_assistant_tokens,
                "num_assistant_tokens_schedule": "constant",
                "assistant_confidence_threshold": 0.0,
            }
        elif seed is not None and (draft is not None or verifier is None):
            options["num_assistant_tokens_schedule"] = "constant"
        if prompt_lookup_num_tokens is not None:
            options["prompt_lookup_num_tokens"] = prompt_lookup_num_tokens
        run_chat(
            verifier=verifier,
            draft=draft,
            loading={
                "dtype": dtype_named(dtype.value),
                "device": device,
                "trust_remote_code": trust_remote_code,
            },
            options=options,
            rule=chosen,
            system=system,
            seed=seed,
            coloured=colours,
        )
