"""`transformers-cactus chat`: answers, commands, colours, and Ctrl-C."""

import io
import json
import os
import signal
import subprocess
import sys

import pytest
from rich.console import Console
from typer.testing import CliRunner

import tiny_models
from fast_calls import noisy_copy
from test_conversation import LETTERS, chat_tokenizer
from transformers_cactus.cli.app import app
from transformers_cactus.cli.chat_run import Chat
from transformers_cactus.cli.chat_settings import ChatRule
from transformers_cactus.cli.models import Models

OPTIONS = {"do_sample": True, "max_new_tokens": 10, "num_assistant_tokens": 4, **LETTERS}


@pytest.fixture(scope="module")
def models():
    verifier = tiny_models.build("llama")
    return Models(verifier, chat_tokenizer(), noisy_copy(verifier), None)


def talk(models, *lines, terminal=False, **options):
    """Run a chat over these lines of input; return the chat and what it wrote to its console."""
    colours = "truecolor" if terminal else None
    console = Console(file=io.StringIO(), width=80, force_terminal=terminal, color_system=colours)
    chat = Chat(models, ChatRule(0.5), OPTIONS | options, console)
    remaining = iter(lines)

    def read():
        line = next(remaining, EOFError)
        if isinstance(line, type):
            raise line
        return line

    chat.run(read)
    assert next(remaining, None) is None
    return chat, console.file.getvalue()


def test_answers_are_streamed_and_remembered(models, capsys):
    chat, _ = talk(models, "abc", "", "def")
    answers = [message["content"] for message in chat.conversation.messages if message["role"] == "assistant"]
    assert capsys.readouterr().out == "".join(f"{answer}\n" for answer in answers)
    assert [turn.reply.remembered_tokens > 0 for turn in chat.turns] == [False, True]
    assert [turn.rule for turn in chat.turns] == ["Cactus(delta=0.5)"] * 2


def test_delta_and_rule_are_what_the_next_answer_uses(models):
    chat, written = talk(
        models, "/delta 0.75", "abc", "/rule cactus-exact", "abc", "/rule lenience factor=2", "abc", "/rule"
    )
    assert [turn.rule for turn in chat.turns] == [
        "Cactus(delta=0.75)",
        "CactusExact(delta=0.75)",
        "Lenience(factor=2)",
    ]
    assert written.splitlines()[-1] == "Lenience(factor=2)"
    _, written = talk(
        models, "/rule ensemble ensemble_weight=0.5 within_support=true", "/rule typical recovery_from=argmax"
    )
    assert "within_support=True" in written and "recovery_from='argmax'" in written
    chat, _ = talk(models, "/delta 0", "abc")
    assert chat.turns[0].reply.acceptance.total_divergence == 0


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("/delta -1", "at least 0"),
        ("/delta much", "delta must be a number, at least 0 (a budget), got 'much'"),
        ("/rule cactsu", "/rule takes one of cactus,"),
        ("/rule lenience", "needs cactus_factor"),
        ("/rule cactus factor=2", "cactus has no parameter 'factor'; it has: delta"),
        ("/dleta 0.5", "no command /dleta, did you mean /delta?"),
        ("/stats", "nothing was answered yet"),
        ("/save", "/save takes one file name"),
        ("/save /nowhere/at/all", "No such file"),
        ("/save one two", "/save takes one file name, got one two"),
        ("/save 'one", "No closing quotation"),
        ("/delta 1 2", "/delta takes one number, got 1 2"),
        ("/clear x", "/clear takes nothing, got x"),
        ("/stats now", "/stats takes nothing, got now"),
        ("/colours maybe", "/colours takes nothing"),
        ("/help foo", "/help takes nothing"),
        ("/", "no command /: see /help; // sends a text that begins with /"),
    ],
)
def test_wrong_commands_are_explained_and_change_nothing(models, line, message):
    chat, written = talk(models, line)
    assert written.startswith("error: ") and message in written
    assert str(chat.rule) == "Cactus(delta=0.5)" and chat.turns == []
    _, written = talk(models, "/rule speculative", "/delta 0.5")
    assert "the rule speculative has no delta" in written


def test_an_error_in_an_answer_does_not_end_the_chat(models):
    chat, written = talk(models, "abc", "/help", temperature=-1.0)
    assert "error: " in written and "/save FILE" in written and chat.conversation.messages == []


def test_stats_save_and_clear(models, tmp_path):
    file = tmp_path / "chat.json"
    chat, written = talk(models, "abc", "def", "/stats", f"/save {file}", "/clear", "ghi")
    assert "10 tokens in" in written and "prompt tokens read, the others remembered" in written
    assert "all answers: 20 tokens in" in written and "drafted, kept" in written
    saved = json.loads(file.read_text())
    assert [message["role"] for message in saved["messages"]] == ["user", "assistant"] * 2
    assert [answer["acceptance"]["emitted"] for answer in saved["answers"]] == [10, 10]
    assert len(chat.conversation.messages) == 2 and len(chat.turns) == 1


def test_a_text_may_begin_with_a_slash_and_quit_is_exit(models):
    chat, _ = talk(models, "//usr", "abc", "/quit")
    assert [message["content"] for message in chat.conversation.messages[::2]] == ["/usr", "abc"]


def test_a_file_is_saved_with_its_settings_and_not_overwritten(models, tmp_path):
    file = tmp_path / "two words.json"
    _, written = talk(models, f"/save '{file}'", f"/save '{file}'", num_assistant_tokens=3)
    assert f"saved to {file}" in written
    assert f"{file} exists and is not overwritten: /save '{tmp_path / 'two words-2.json'}'" in written
    saved = json.loads(file.read_text())
    assert saved["seed"] is None and saved["options"]["num_assistant_tokens"] == 3 and saved["messages"] == []


def test_stats_count_in_words(models):
    _, written = talk(models, "abc", "/stats", max_new_tokens=1)
    assert "1 token in 1 round: 0 of " in written and "prompt tokens read\n" in written
    assert "remembered" not in written


def test_a_rules_delta_is_kept_for_the_next_rule(models):
    chat, _ = talk(models, "/rule cactus delta=0.3", "/rule typical", "/rule cactus-exact")
    assert str(chat.rule) == "CactusExact(delta=0.3)"


def test_colours_on_request(models):
    _, plain = talk(models, "abc", terminal=True)
    _, coloured = talk(models, "/colours", "abc", terminal=True)
    assert "\x1b[32m" in coloured and "\x1b[32m" not in plain  # green: kept as lossless sampling would


def test_ctrl_c_stops_the_answer_and_not_the_chat(models, capsys):
    class Pressed:
        """A tokenizer that has Ctrl-C pressed while the answer is being decoded."""

        def __init__(self, tokenizer, times):
            self.tokenizer, self.left = tokenizer, times

        def __getattr__(self, name):
            return getattr(self.tokenizer, name)

        def decode(self, *args, **kwargs):
            if self.left:
                self.left -= 1
                os.kill(os.getpid(), signal.SIGINT)
            return self.tokenizer.decode(*args, **kwargs)

    before = signal.getsignal(signal.SIGINT)
    pressed = models._replace(tokenizer=Pressed(models.tokenizer, 1))
    chat, written = talk(pressed, "abc", "def", KeyboardInterrupt, "/stats", max_new_tokens=60)
    assert [turn.stopped for turn in chat.turns] == [True, False] and "(stopped)" in written
    first, second = (turn.reply for turn in chat.turns)
    assert 0 < first.acceptance.emitted < 60 == second.acceptance.emitted
    assert second.remembered_tokens >= first.prompt_tokens + first.acceptance.emitted - 1
    assert chat.conversation.messages[1]["content"] == first.text != ""
    assert "Ctrl-D or /exit leaves" in written
    assert signal.getsignal(signal.SIGINT) is before
    with pytest.raises(KeyboardInterrupt):
        talk(models._replace(tokenizer=Pressed(models.tokenizer, 2)), "abc", max_new_tokens=60)


def test_from_the_command_line(tmp_path):
    for name, model in zip(("verifier", "draft"), tiny_models.pair("llama"), strict=True):
        model.save_pretrained(tmp_path / name)
        chat_tokenizer().save_pretrained(tmp_path / name)
    pair = ["--verifier", str(tmp_path / "verifier"), "--draft", str(tmp_path / "draft")]
    command = [sys.executable, "-c", "from transformers_cactus.cli import main; main()", "chat", *pair]
    command += ["--max-new-tokens", "5", "--seed", "4", "--rule", "lenience", "--parameter", "factor=2"]
    lines = f"abc\n/stats\n/save {tmp_path / 'chat.json'}\n/exit\n"
    finished = subprocess.run(command, input=lines, capture_output=True, text=True, check=False)
    assert finished.returncode == 0, finished.stderr
    assert finished.stdout.startswith("Lenience(factor=2); /help") and "5 tokens in" in finished.stdout
    assert json.loads((tmp_path / "chat.json").read_text())["seed"] == 4
    assert "\x1b" not in finished.stdout and finished.stderr == ""
    runner = CliRunner()
    for wrong in (
        pair[:2],
        [*pair, "--temperature", "0"],
        [*pair, "--delta", "-1"],
        [*pair, "--rule", "top-k"],
        [*pair, "--rule", "top-k", "--parameter", "top_k=3", "--delta", "1"],
    ):
        assert runner.invoke(app, ["chat", *wrong]).exit_code == 2
