"""The options of `transformers-cactus generate`."""

from __future__ import annotations

from pathlib import Path
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
    Engine,
    EngineChoice,
    JsonFile,
    Parameters,
    RuleChoice,
    Verification,
    Verifier,
    check_writable,
)

EPILOG = (
    "Examples:\n\n"
    "transformers-cactus generate --prompt 'Write a haiku.' --delta 0.75 --stats\n\n"
    "transformers-cactus generate --verifier Qwen/Qwen2.5-7B-Instruct --draft Qwen/Qwen2.5-0.5B-Instruct "
    "--delta 0.75 --num-assistant-tokens 5 < question.txt\n\n"
    "transformers-cactus generate --prompt 'Write a haiku.' --rule typical --parameter posterior_threshold=0.05 "
    "--certificate --stats\n\n"
    "transformers-cactus generate --verifier gpt2 --prompt-lookup-num-tokens 10 --no-chat --prompt-file log.txt"
)


def generate(
    verifier: Verifier = None,
    draft: Annotated[
        str | None,
        typer.Option(
            help="The small model that drafts: a name or a folder. Default: none; with the default verifier, its own.",
            rich_help_panel=MODELS,
        ),
    ] = None,
    trust_remote_code: Annotated[
        bool, typer.Option("--trust-remote-code", help="Run code that comes with a model.", rich_help_panel=MODELS)
    ] = False,
    prompt: Annotated[
        str | None,
        typer.Option(help="Without it and --prompt-file, standard input is read.", rich_help_panel=TEXT),
    ] = None,
    prompt_file: Annotated[
        Path | None,
        typer.Option(exists=True, dir_okay=False, help="A text file with the prompt.", rich_help_panel=TEXT),
    ] = None,
    chat: Annotated[
        bool | None,
        typer.Option(
            "--chat/--no-chat",
            help="Whether to wrap the prompt in the chat template. Default: if the tokenizer has one.",
            rich_help_panel=TEXT,
        ),
    ] = None,
    system: Annotated[str | None, typer.Option(help="System message of the chat.", rich_help_panel=TEXT)] = None,
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Length at most.", rich_help_panel=TEXT)] = 256,
    min_new_tokens: Annotated[int | None, typer.Option(min=0, help="Length at least.", rich_help_panel=TEXT)] = None,
    stop_string: Annotated[
        list[str] | None, typer.Option(help="Stop after this text; repeat for more.", rich_help_panel=TEXT)
    ] = None,
    do_sample: Annotated[
        bool | None,
        typer.Option(
            "--do-sample/--no-do-sample",
            help="Sample, or take the most probable token. Default: sample if --delta, a rule that needs it or an "
            "option of this group is given, else what the model's generation config says.",
            rich_help_panel=SAMPLING,
        ),
    ] = None,
    temperature: Annotated[
        float | None,
        typer.Option(min=0.0, help="0 takes the most probable token.", rich_help_panel=SAMPLING),
    ] = None,
    top_k: Annotated[int | None, typer.Option(min=0, help="0 for all tokens.", rich_help_panel=SAMPLING)] = None,
    top_p: Annotated[float | None, typer.Option(min=0.0, max=1.0, help="1 for all.", rich_help_panel=SAMPLING)] = None,
    min_p: Annotated[
        float | None,
        typer.Option(min=0.0, max=1.0, help="Least share of the best token's probability.", rich_help_panel=SAMPLING),
    ] = None,
    repetition_penalty: Annotated[
        float | None, typer.Option(help="Above 1 discourages repetition.", rich_help_panel=SAMPLING)
    ] = None,
    seed: Annotated[
        int | None,
        typer.Option(
            min=0, help="Same seed, same text, in constant blocks. Default: random.", rich_help_panel=SAMPLING
        ),
    ] = None,
    delta: Annotated[
        float | None,
        typer.Option(
            help="Budget in nats for each drafted token; spend it together with --top-k or --top-p, which keep "
            "unlikely tokens out. Default: 0, which is lossless speculative sampling.",
            rich_help_panel=CACTUS,
        ),
    ] = None,
    rule: RuleChoice = None,
    parameter: Parameters = None,
    budget: Annotated[
        float | None,
        typer.Option(
            help="Nats that the text may really spend in all, for a rule with --delta. Default: no limit.",
            rich_help_panel=CACTUS,
        ),
    ] = None,
    budget_window: Annotated[
        int | None,
        typer.Option(help="Tokens that --budget is for, each time anew. Default: all.", rich_help_panel=CACTUS),
    ] = None,
    verification: Annotated[
        Verification,
        typer.Option(
            help="block judges drafted tokens together: for speculative, ensemble and optimal.",
            rich_help_panel=CACTUS,
        ),
    ] = Verification.TOKEN,
    num_assistant_tokens: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Tokens drafted in a round. Default: as many as pay on this machine; with --seed 4; in "
            "transformers' own loop its default.",
            rich_help_panel=CACTUS,
        ),
    ] = None,
    prompt_lookup_num_tokens: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Draft this many tokens from what was said before: beside a draft, or without one.",
            rich_help_panel=CACTUS,
        ),
    ] = None,
    dtype: Annotated[
        Dtype, typer.Option(help="Number format of the models; auto is the models' own.", rich_help_panel=RUNNING)
    ] = Dtype.AUTO,
    device: Device = None,
    engine: EngineChoice = Engine.AUTO,
    attn_implementation: Annotated[
        str | None, typer.Option(help="Such as sdpa or flash_attention_2.", rich_help_panel=RUNNING)
    ] = None,
    stats: Annotated[
        bool, typer.Option("--stats", help="Print acceptance and speed to standard error.", rich_help_panel=REPORT)
    ] = False,
    certificate: Annotated[
        bool,
        typer.Option(
            "--certificate", help="Report what the tokens were really drawn from, too.", rich_help_panel=REPORT
        ),
    ] = False,
    json_file: JsonFile = None,
) -> None:
    """Generate text from a prompt, to standard output.

    With a draft and no --delta, the text has exactly the verifier's distribution.
    """
    with one_line():
        from .generate_run import Request, check_options, run_generate
        from .models import dtype_named
        from .prompt import read_prompt
        from .rule_parameters import with_flags

        given: dict[str, Any] = {
            "max_new_tokens": max_new_tokens,
            "min_new_tokens": min_new_tokens,
            "stop_strings": stop_string or None,
            "do_sample": do_sample,
            "temperature": temperature,
            "top_k": top_k,
            "top_p": top_p,
            "min_p": min_p,
            "repetition_penalty": repetition_penalty,
            "cactus_budget": budget,
            "cactus_budget_window": budget_window,
            "cactus_verification": None if verification is Verification.TOKEN else verification.value,
            "cactus_certificate": certificate or None,
            "cactus_engine": None if engine is Engine.AUTO else engine.value,
            "num_assistant_tokens": num_assistant_tokens,
            "prompt_lookup_num_tokens": prompt_lookup_num_tokens,
        }
        try:
            if certificate and not stats and json_file is None:
                raise ValueError("--certificate is for a report: give --stats or --json FILE beside it.")
            if chat is False and system is not None:
                raise ValueError("--system is for the chat template: leave out --no-chat, or put it into the prompt.")
            words = (parameter or []) + ([] if delta is None else [f"delta={delta}"])
            choice = None if rule is None else rule.value
            options = check_options({k: v for k, v in given.items() if v is not None}, choice, words, draft, verifier)
            text = read_prompt(prompt, prompt_file)
        except (TypeError, ValueError) as error:
            raise usage_error(with_flags(str(error))) from error
        check_writable(json_file)
        request = Request(
            prompt=text,
            verifier=verifier,
            draft=draft,
            loading={
                "dtype": dtype_named(dtype.value),
                "device": device,
                "attn_implementation": attn_implementation,
                "trust_remote_code": trust_remote_code,
            },
            chat=chat,
            system=system,
            seed=seed,
            stats=stats,
            json_file=json_file,
        )
        run_generate(request, options)
