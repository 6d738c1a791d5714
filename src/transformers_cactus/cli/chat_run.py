"""`transformers-cactus chat`: the loop of questions, answers and commands."""

from __future__ import annotations

import difflib
import json
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console
from transformers import TextStreamer, set_seed

from ..conversation import Conversation, Reply
from ..outputs import AcceptanceStatistics
from .answer import AnswerStreamer, legend
from .chat_settings import ChatRule
from .interrupt import stop_on_interrupt
from .machine import describe_versions
from .models import Models, load_models, pick_device, quiet_transformers, shipped_draft
from .report import acceptance_numbers

PROMPT = "> "


@dataclass
class Turn:
    """An answer, how it was asked for, and what it took."""

    reply: Reply
    rule: str
    seconds: float
    stopped: bool

    def __str__(self) -> str:
        new = self.reply.prompt_tokens - self.reply.remembered_tokens
        speed = self.reply.acceptance.emitted / self.seconds
        return (
            f"{self.reply.acceptance}, {speed:.1f} tokens/s, {self.rule}; {new} of {self.reply.prompt_tokens} prompt "
            "tokens read, the others remembered"
        )


@dataclass
class Chat:
    """A chat on a terminal.

    Args:
        models ([`Models`]): What answers.
        rule ([`ChatRule`]): The rule to start with.
        options (`dict`): Sampling and length, for `generate`.
        console (`Console`): Where to write.
        system (`str`, *optional*): System message.
        coloured (`bool`, *optional*, defaults to `False`): Whether tokens have the colour of their origin.
    """

    models: Models
    rule: ChatRule
    options: dict[str, Any]
    console: Console
    system: str | None = None
    coloured: bool = False
    turns: list[Turn] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.conversation = Conversation(self.models.verifier, self.models.draft, self.models.tokenizer, self.system)
        if self.models.draft_tokenizer is not None:
            self.options |= {"tokenizer": self.models.tokenizer, "assistant_tokenizer": self.models.draft_tokenizer}

    def run(self, read: Callable[[], str]) -> None:
        """Answers until the input ends, or `/exit`.

        Args:
            read (callable): Returns the next line; raises `EOFError` at the end, `KeyboardInterrupt` on Ctrl-C.
        """
        while True:
            try:
                line = read().strip()
            except EOFError:
                return
            except KeyboardInterrupt:
                self._say("\nCtrl-D or /exit leaves")
                continue
            if line == "/exit":
                return
            try:
                if line.startswith("/"):
                    self._command(line)
                elif line:
                    self._answer(line)
            except (ValueError, TypeError, OSError, FloatingPointError) as error:
                self._say(f"error: {error}")

    def _answer(self, text: str) -> None:
        tokenizer = self.models.tokenizer
        coloured = AnswerStreamer(tokenizer, self.console) if self.coloured else None
        plain = TextStreamer(tokenizer, skip_prompt=True, skip_special_tokens=True)
        start = time.perf_counter()
        with stop_on_interrupt() as stop, coloured or nullcontext():
            reply = self.conversation.send(
                text, streamer=coloured or plain, stopping_criteria=[stop], **self.options, **self.rule.options
            )
        self.turns.append(Turn(reply, str(self.rule), time.perf_counter() - start, stop.requested))
        if stop.requested:
            self._say("(stopped)")

    def _command(self, line: str) -> None:
        name, *words = line[1:].split()
        if name not in COMMANDS:
            nearest = difflib.get_close_matches(name, COMMANDS, n=1)
            raise ValueError(f"no command /{name}" + (f", did you mean /{nearest[0]}?" if nearest else ": see /help"))
        COMMANDS[name][1](self, words)

    def _help(self, words: list[str]) -> None:
        for usage, _ in COMMANDS.values():
            self._say(usage)

    def _delta(self, words: list[str]) -> None:
        if words:
            self.rule.set_delta(words[0])
        self._say(str(self.rule))

    def _rule(self, words: list[str]) -> None:
        if words:
            self.rule.set_rule(words)
        self._say(str(self.rule))

    def _stats(self, words: list[str]) -> None:
        if not self.turns:
            raise ValueError("nothing was answered yet")
        self._say(str(self.turns[-1]))
        self.console.print(legend(self.turns[-1].reply.acceptance.origins))
        if len(self.turns) > 1:
            self._say(f"all answers: {_together(self.turns)}")

    def _colours(self, words: list[str]) -> None:
        self.coloured = not self.coloured
        self._say("tokens have the colour of their origin: see /stats" if self.coloured else "no colours")

    def _clear(self, words: list[str]) -> None:
        self.conversation.clear()
        self.turns.clear()
        self._say("forgotten")

    def _save(self, words: list[str]) -> None:
        if len(words) != 1:
            raise ValueError("/save takes one file name")
        content = {
            "versions": describe_versions(),
            "options": {name: value for name, value in self.options.items() if isinstance(value, (int, float, str))},
            "messages": self.conversation.messages,
            "answers": [
                {
                    "rule": turn.rule,
                    "seconds": turn.seconds,
                    "stopped": turn.stopped,
                    "prompt_tokens": turn.reply.prompt_tokens,
                    "remembered_tokens": turn.reply.remembered_tokens,
                    "acceptance": acceptance_numbers(turn.reply.acceptance),
                }
                for turn in self.turns
            ],
        }
        Path(words[0]).write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
        self._say(f"saved to {words[0]}")

    def _say(self, text: str) -> None:
        self.console.print(text, style="dim", markup=False, highlight=False, soft_wrap=True)


COMMANDS: dict[str, tuple[str, Callable[[Chat, list[str]], None]]] = {
    "delta": ("/delta 0.5     set the budget in nats (0 is lossless); without a number, show the rule", Chat._delta),
    "rule": ("/rule NAME     set the acceptance rule, with its parameters: /rule lenience factor=2", Chat._rule),
    "stats": ("/stats         what the last answer's tokens were and cost", Chat._stats),
    "colours": ("/colours       switch the colours of tokens by origin on or off", Chat._colours),
    "save": ("/save FILE     write the conversation and its numbers as JSON", Chat._save),
    "clear": ("/clear         start again", Chat._clear),
    "help": ("/help          this; Ctrl-C stops an answer, Ctrl-D or /exit leaves", Chat._help),
}


def run_chat(
    *,
    verifier: str | None,
    draft: str | None,
    loading: dict[str, Any],
    options: dict[str, Any],
    rule: ChatRule,
    system: str | None,
    seed: int | None,
    coloured: bool,
) -> None:
    """Loads the models and chats on standard input and output.

    Args:
        verifier (`str` or `None`): Name or folder. `None` stands for the demo's pair.
        draft (`str` or `None`): Name or folder.
        loading (`dict`): Arguments of `load_models`, with the device by name.
        options (`dict`): Sampling and length, for `generate`.
        rule ([`ChatRule`]): The rule to start with.
        system (`str` or `None`): System message.
        seed (`int` or `None`): Of the first answer.
        coloured (`bool`): Whether to colour tokens from the start.

    Raises:
        OSError, ValueError: If the models cannot be loaded, or cannot chat.
    """
    if draft is None and verifier is None and "prompt_lookup_num_tokens" not in options:
        draft = shipped_draft()
    with quiet_transformers():
        models = load_models(verifier, draft, **loading | {"device": pick_device(loading["device"])})
        if models.verifier.config.is_encoder_decoder:
            raise ValueError(f"{type(models.verifier).__name__} is an encoder-decoder model and cannot chat.")
        if seed is not None:
            set_seed(seed)
        console = Console(highlight=False)
        chat = Chat(models, rule, options, console, system, coloured)
        chat._say(f"{rule}; /help lists the commands")
        if console.is_terminal:
            import readline  # noqa: F401 - gives input() a history and an editable line
        chat.run(lambda: input(PROMPT if console.is_terminal else ""))


def _together(turns: list[Turn]) -> str:
    statistics = AcceptanceStatistics([one for turn in turns for one in turn.reply.acceptance.sequences])
    return f"{statistics}, {statistics.emitted / sum(turn.seconds for turn in turns):.1f} tokens/s"
