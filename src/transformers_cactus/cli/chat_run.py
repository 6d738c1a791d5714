"""`transformers-cactus chat`: the loop of questions, answers and commands."""

from __future__ import annotations

import difflib
import itertools
import json
import shlex
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from rich.console import Console
from transformers import TextStreamer, set_seed

from ..conversation import Conversation, Reply
from ..outputs import AcceptanceStatistics
from ..parameters import counted
from .answer import AnswerStreamer, legend
from .chat_settings import ChatRule
from .interrupt import stop_on_interrupt
from .machine import describe_versions
from .models import Models, load_models, pick_device, quiet_transformers, shipped_draft
from .report import acceptance_numbers

PROMPT = "> "
LEAVING = ("/exit", "/quit")


@dataclass
class Turn:
    """An answer, how it was asked for, and what it took."""

    reply: Reply
    rule: str
    seconds: float
    stopped: bool

    @property
    def acceptance(self) -> AcceptanceStatistics:
        """The answer's statistics: a chat always has a rule."""
        statistics = self.reply.acceptance
        assert statistics is not None
        return statistics

    def __str__(self) -> str:
        speed = self.acceptance.emitted / self.seconds
        read = counted(self.reply.prompt_tokens, "prompt token") + " read"
        if self.reply.remembered_tokens:
            new = self.reply.prompt_tokens - self.reply.remembered_tokens
            read = f"{new} of {self.reply.prompt_tokens} prompt tokens read, the others remembered"
        return f"{self.acceptance}, {speed:.1f} tokens/s, {self.rule}; {read}"


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
        seed (`int`, *optional*): What the random state was set to, to be saved with the chat.
    """

    models: Models
    rule: ChatRule
    options: dict[str, Any]
    console: Console
    system: str | None = None
    coloured: bool = False
    seed: int | None = None
    turns: list[Turn] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.conversation = Conversation(self.models.verifier, self.models.draft, self.models.tokenizer, self.system)
        if self.models.draft_tokenizer is not None:
            self.options |= {"tokenizer": self.models.tokenizer, "assistant_tokenizer": self.models.draft_tokenizer}

    def run(self, read: Callable[[], str]) -> None:
        """Answers until the input ends, or `/exit`. Two slashes begin a text that begins with one.

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
            if line in LEAVING:
                return
            try:
                if line.startswith("/") and not line.startswith("//"):
                    self._command(line)
                elif line:
                    self._answer(line[1:] if line.startswith("/") else line)
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
        # As a shell reads words: a file name with spaces may stand in quotation marks.
        name, *words = shlex.split(line[1:]) or [""]
        if name not in COMMANDS:
            nearest = difflib.get_close_matches(name, COMMANDS, n=1)
            meant = f", did you mean /{nearest[0]}?" if nearest else ": see /help; // sends a text that begins with /"
            raise ValueError(f"no command /{name}{meant}")
        command = COMMANDS[name]
        if command.most_words is not None and len(words) > command.most_words:
            takes = "nothing" if not command.most_words else f"one {command.word}"
            raise ValueError(f"/{name} takes {takes}, got {shlex.join(words)}")
        command.run(self, words)

    def _help(self, words: list[str]) -> None:
        for command in COMMANDS.values():
            self._say(command.usage)

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
        self.console.print(legend(self.turns[-1].acceptance.origins))
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
        if not words:
            raise ValueError("/save takes one file name")
        file = Path(words[0])
        if file.exists():
            free = (file.with_stem(f"{file.stem}-{number}") for number in itertools.count(2))
            other = next(name for name in free if not name.exists())
            raise ValueError(f"{file} exists and is not overwritten: /save {shlex.quote(str(other))}")
        content = {
            "versions": describe_versions(),
            "seed": self.seed,
            "options": {"num_assistant_tokens": None}
            | {name: value for name, value in self.options.items() if isinstance(value, (int, float, str))},
            "messages": self.conversation.messages,
            "answers": [
                {
                    "rule": turn.rule,
                    "seconds": turn.seconds,
                    "stopped": turn.stopped,
                    "prompt_tokens": turn.reply.prompt_tokens,
                    "remembered_tokens": turn.reply.remembered_tokens,
                    "acceptance": acceptance_numbers(turn.acceptance),
                }
                for turn in self.turns
            ],
        }
        file.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
        self._say(f"saved to {file}")

    def _say(self, text: str) -> None:
        self.console.print(text, style="dim", markup=False, highlight=False, soft_wrap=True)


class Command(NamedTuple):
    """What a line that begins with a slash does."""

    usage: str
    """A line for `/help`."""
    run: Callable[[Chat, list[str]], None]
    most_words: int | None = 0
    """How many words it takes behind its name; `None` for any number."""
    word: str = ""
    """What such a word is."""


COMMANDS = {
    "delta": Command(
        "/delta 0.5     set the budget in nats (0 is lossless); without a number, show the rule",
        Chat._delta,
        1,
        "number",
    ),
    "rule": Command(
        "/rule NAME     set the acceptance rule, with its parameters: /rule lenience factor=2", Chat._rule, None
    ),
    "stats": Command("/stats         what the last answer's tokens were and cost", Chat._stats),
    "colours": Command("/colours       switch the colours of tokens by origin on or off", Chat._colours),
    "save": Command(
        "/save FILE     write the conversation and its numbers as JSON to a new file", Chat._save, 1, "file name"
    ),
    "clear": Command("/clear         start again", Chat._clear),
    "help": Command(
        "/help          this; //text sends /text, Ctrl-C stops an answer, Ctrl-D, /exit or /quit leaves", Chat._help
    ),
}
"""The commands by name."""


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
    if draft is None and verifier is None:
        draft = shipped_draft()
    with quiet_transformers():
        models = load_models(verifier, draft, **loading | {"device": pick_device(loading["device"])})
        if models.verifier.config.is_encoder_decoder:
            raise ValueError(f"{type(models.verifier).__name__} is an encoder-decoder model and cannot chat.")
        if seed is not None:
            set_seed(seed)
        console = Console(highlight=False)
        chat = Chat(models, rule, options, console, system, coloured, seed)
        chat._say(f"{rule}; /help lists the commands")
        if console.is_terminal:
            import readline  # noqa: F401 - gives input() a history and an editable line
        chat.run(lambda: input(PROMPT if console.is_terminal else ""))


def _together(turns: list[Turn]) -> str:
    statistics = AcceptanceStatistics([one for turn in turns for one in turn.acceptance.sequences])
    return f"{statistics}, {statistics.emitted / sum(turn.seconds for turn in turns):.1f} tokens/s"
