"""The command line, on tiny random models with a tokenizer of single characters."""

import io
import json
import os
import subprocess
import sys

import pytest
import torch
from rich.console import Console
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast
from typer.testing import CliRunner

import tiny_models
import transformers_cactus.cli
from transformers_cactus import Origin, __version__, configuration
from transformers_cactus.cli.answer import AnswerStreamer, legend
from transformers_cactus.cli.app import app
from transformers_cactus.cli.generate_run import check_options
from transformers_cactus.cli.measure import Measured, System
from transformers_cactus.cli.options import Rule, Verification
from transformers_cactus.configuration import RULES, build_rule
from transformers_cactus.paths import looks_like_path
from transformers_cactus.pieces import TextPieces

CHARACTERS = [chr(code) for code in range(32, 127)]
TEMPLATE = "{% for message in messages %}{{ message.role }}: {{ message.content }} {% endfor %}"


def character_tokenizer(characters=CHARACTERS, template=TEMPLATE):
    vocabulary = {token: index for index, token in enumerate(["<pad>", "<s>", *characters])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", bos_token="<s>", chat_template=template
    )


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Folders of a verifier, a draft, and a draft with another tokenizer, by name."""
    verifier, draft = tiny_models.pair("llama")
    root = tmp_path_factory.mktemp("models")
    for name, model, tokenizer in (
        ("verifier", verifier, character_tokenizer()),
        ("draft", draft, character_tokenizer()),
        ("foreign", draft, character_tokenizer(CHARACTERS[::-1])),
    ):
        model.save_pretrained(root / name)
        tokenizer.save_pretrained(root / name)
    tiny_models.build("t5").save_pretrained(root / "t5")
    character_tokenizer(template=None).save_pretrained(root / "t5")
    return {name: str(root / name) for name in ("verifier", "draft", "foreign", "t5")}


@pytest.fixture
def invoke(monkeypatch):
    """Runs the command line in this process."""
    monkeypatch.setenv("COLUMNS", "100")
    return lambda *arguments, **options: CliRunner().invoke(app, [str(a) for a in arguments], **options)


@pytest.mark.parametrize("command", [[], ["demo"], ["generate"]])
def test_help_is_complete(invoke, command):
    result = invoke(*command, "--help")
    assert result.exit_code == 0
    assert "Examples:" in result.output
    assert "transformers-cactus demo" in result.output or "transformers-cactus generate" in result.output


def test_version(invoke):
    result = invoke("--version")
    assert result.exit_code == 0
    assert result.output.startswith(f"transformers-cactus {__version__} (transformers ")


def test_missing_extra_is_explained(monkeypatch):
    monkeypatch.setattr(transformers_cactus.cli, "find_spec", lambda name: None)
    with pytest.raises(SystemExit, match=r"needs typer and rich: pip install 'transformers-cactus\[demo\]'"):
        transformers_cactus.cli.main()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["generate", "--prompt", "Hi", "--delta", "-1"], "delta must be at least 0"),
        (["generate", "--prompt", "Hi", "--delta", "nan"], "delta must be"),
        (["generate", "--prompt", "Hi", "--rule", "lenience"], "needs --parameter factor"),
        (["generate", "--prompt", "Hi", "--rule", "top-k", "--parameter", "top_k=0"], "k must be at least 1 token"),
        (["generate", "--prompt", "Hi", "--rule", "top-k", "--parameter", "k=3"], "no parameter 'k'; it has: top_k"),
        (["generate", "--prompt", "Hi", "--rule", "top-k", "--delta", "1"], "top-k has no parameter 'delta'"),
        (["generate", "--prompt", "Hi", "--delta", "1", "--parameter", "delta=2"], "delta is given twice"),
        (["generate", "--prompt", "Hi", "--delta", "1", "--budget", "-1"], "--budget must be at least 0"),
        (["generate", "--prompt", "Hi", "--delta", "1", "--budget-window", "9"], "pass --budget beside it"),
        (["generate", "--prompt", "Hi", "--rule", "speculative", "--budget", "1"], "has no delta"),
        (
            ["generate", "--prompt", "Hi", "--delta", "1", "--verification", "block"],
            "weighs a whole block",
        ),
        (["generate", "--prompt", "Hi", "--delta", "1", "--certificate"], "give --stats or --json FILE"),
        (["generate", "--prompt", "Hi", "--verifier", "x", "--budget", "1"], "needs something that drafts"),
        (
            ["generate", "--prompt", "Hi", "--rule", "speculative", "--verification", "block", "--engine", "stock"],
            "fast",
        ),
        (["generate", "--prompt", "Hi", "--verifier", "x", "--delta", "1"], "needs something that drafts"),
        (
            [
                "generate",
                "--prompt",
                "Hi",
                "--verifier",
                "x",
                "--prompt-lookup-num-tokens",
                "3",
                "--num-assistant-tokens",
                "2",
            ],
            "--num-assistant-tokens is for a draft",
        ),
        (["generate", "--prompt", "Hi", "--no-chat", "--system", "s"], "--system is for the chat template"),
        (["generate", "--verifier", "x"], "the prompt is empty"),
        (["generate", "--prompt", "Hi", "--prompt-file", __file__], "not both"),
        (["generate", "--prompt", "Hi", "--json", "/no/such/folder/x.json"], "no such folder"),
        (["demo", "--delta", "-1"], "--delta must be above 0"),
        (["demo", "--delta", "nan"], "--delta must be above 0"),
        (["demo", "--temperature", "0"], "--temperature must be above 0"),
        (["demo", "--prompt", "Hi", "--prompts", "2"], "not both"),
    ],
)
def test_wrong_options_are_one_line_before_anything_is_loaded(invoke, arguments, message):
    result = invoke(*arguments)
    assert result.exit_code == 2
    assert message in result.stderr
    assert result.stderr.startswith("error: ") and result.stderr.count("\n") == 1
    assert result.stdout == ""


@pytest.mark.parametrize("command", ["demo", "generate"])
@pytest.mark.parametrize("side", ["verifier", "draft"])
def test_unknown_models_are_one_line(invoke, folders, command, side):
    named = {"verifier": folders["verifier"], "draft": folders["draft"]} | {side: "./no-such-model"}
    result = invoke(command, "--prompt", "Hi", "--verifier", named["verifier"], "--draft", named["draft"])
    assert result.exit_code == 1
    assert result.stderr.startswith(f"error: cannot load the {side}") and result.stderr.count("\n") == 1


@pytest.mark.parametrize(
    ("name", "is_path"),
    [
        ("gpt2", False),
        ("Qwen/Qwen3-8B", False),
        ("prompts.jsonl", True),
        ("/models/a", True),
        ("./a", True),
        ("a/b/c", True),
        ("here/missing", True),
    ],
)
def test_what_looks_like_a_path_is_not_asked_for_on_the_hub(tmp_path, monkeypatch, name, is_path):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "here").mkdir()
    assert looks_like_path(name) is is_path


def test_unknown_device_is_one_line(invoke, folders):
    result = invoke("generate", "--prompt", "Hi", "--verifier", folders["verifier"], "--device", "abacus")
    assert result.exit_code == 1
    assert result.stderr.startswith("error: cannot use the device 'abacus'") and result.stderr.count("\n") == 1


def test_generate_with_a_draft(invoke, folders, tmp_path):
    file = tmp_path / "numbers.json"
    arguments = ["generate", "--verifier", folders["verifier"], "--draft", folders["draft"], "--delta", "0.75"]
    arguments += ["--num-assistant-tokens", "3", "--max-new-tokens", "12", "--seed", "3", "--stats", "--json", file]
    result = invoke(*arguments, "--prompt", "Hi")
    assert result.exit_code == 0, result.stderr
    numbers = json.loads(file.read_text())
    assert result.stdout == numbers["text"] + "\n"
    assert "12 tokens in" in result.stderr and "tokens/s" in result.stderr
    assert numbers["tokens"] == numbers["acceptance"]["emitted"] == 12
    assert sum(numbers["acceptance"]["origins"].values()) == 12
    assert numbers["settings"]["do_sample"] and numbers["settings"]["cactus_delta"] == 0.75
    assert invoke(*arguments, input="Hi\n").stdout == result.stdout, "a prompt from standard input is the same prompt"


def test_a_seed_makes_blocks_constant(invoke, folders, tmp_path):
    file = tmp_path / "numbers.json"
    arguments = ["generate", "--verifier", folders["verifier"], "--draft", folders["draft"], "--delta", "0.75"]
    arguments += ["--max-new-tokens", "12", "--json", file, "--prompt", "Hi"]
    for seed, schedule in ((["--seed", "3"], "constant"), ([], None)):
        assert invoke(*arguments, *seed).exit_code == 0
        assert json.loads(file.read_text())["settings"].get("num_assistant_tokens_schedule") == schedule


PARAMETERS_OF_RULES = {
    "chi-square": ["--delta", "0.5"],
    "ensemble": ["--parameter", "ensemble_weight=0.5", "--parameter", "within_support=true"],
    "lenience": ["--parameter", "factor=2"],
    "optimal": ["--parameter", "multiplier=1.5"],
    "top-k": ["--parameter", "top_k=3"],
    "typical": ["--parameter", "posterior_threshold=0.05", "--parameter", "recovery_from=argmax"],
}


@pytest.mark.parametrize("rule", [choice.value for choice in Rule])
def test_every_rule_has_its_name_and_parameters(rule):
    given = [words for words in PARAMETERS_OF_RULES.get(rule, []) if not words.startswith("--")]
    words = [f"delta={word}" if "=" not in word else word for word in given]
    built = build_rule({k: v for k, v in check_options({}, rule, words, "draft", "verifier").items() if "cactus" in k})
    assert type(built) is RULES[rule]
    for word in words:
        name, value = word.split("=")
        assert str(getattr(built, configuration.PARAMETERS[f"cactus_{name}"])).lower() == value


def test_all_rules_and_parameters_are_on_the_command_line(invoke):
    assert [rule.value for rule in Rule] == list(RULES)
    assert [way.value for way in Verification] == list(configuration.VERIFICATIONS)
    text = " ".join(invoke("generate", "--help").output.replace("│", " ").split())
    for option in configuration.PARAMETERS:
        assert option.removeprefix("cactus_") in text


@pytest.mark.parametrize("rule", ["chi-square", "optimal", "typical"])
def test_generate_with_other_rules_a_budget_and_a_certificate(invoke, folders, tmp_path, rule):
    file = tmp_path / "numbers.json"
    arguments = ["generate", "--verifier", folders["verifier"], "--draft", folders["draft"], "--prompt", "Hi"]
    arguments += ["--max-new-tokens", "12", "--seed", "3", "--certificate", "--json", file, "--rule", rule]
    arguments += PARAMETERS_OF_RULES[rule]
    result = invoke(*arguments)
    assert result.exit_code == 0, result.stderr
    free = json.loads(file.read_text())
    assert free["settings"]["cactus_rule"] == rule and free["settings"]["do_sample"]
    assert free["acceptance"]["certificate_per_token"] > 0
    if rule == "chi-square":
        budget = 3 * free["acceptance"]["certificate_per_token"]
        assert invoke(*arguments, "--budget", budget).exit_code == 0
        assert 0 < json.loads(file.read_text())["acceptance"]["certificate_per_token"] <= budget / 12 + 1e-9
        assert invoke(*arguments, "--budget", budget / 3, "--budget-window", 2, "--stats").exit_code == 0
        assert json.loads(file.read_text())["acceptance"]["certificate_per_token"] <= budget / 6 + 1e-9


def test_generate_judges_blocks_together(invoke, folders):
    arguments = ["generate", "--verifier", folders["verifier"], "--draft", folders["draft"], "--prompt", "Hi"]
    arguments += ["--max-new-tokens", "40", "--seed", "3", "--top-k", "0", "--rule", "speculative"]
    texts = [invoke(*arguments, "--verification", way) for way in ("token", "block")]
    assert [text.exit_code for text in texts] == [0, 0] and texts[0].stdout != texts[1].stdout


def test_generate_takes_the_chat_template_unless_told_otherwise(invoke, folders, tmp_path):
    file = tmp_path / "prompt.txt"
    file.write_text("user: Hi ")
    arguments = ["generate", "--verifier", folders["verifier"], "--no-do-sample", "--max-new-tokens", "8"]
    chat = invoke(*arguments, "--prompt", "Hi")
    assert chat.exit_code == 0, chat.stderr
    assert invoke(*arguments, "--no-chat", "--prompt-file", file).stdout == chat.stdout
    assert invoke(*arguments, "--no-chat", "--prompt", "Hi").stdout != chat.stdout
    assert invoke(*arguments, "--prompt", "Hi", "--system", "Be brief.").stdout != chat.stdout


DRAFTS = [
    ["--prompt-lookup-num-tokens", "3"],
    ["--draft", "draft"],
    ["--draft", "draft", "--prompt-lookup-num-tokens", "3"],
    ["--draft", "draft", "--engine", "stock"],
    ["--draft", "foreign"],
]


@pytest.mark.parametrize("draft", DRAFTS, ids=" ".join)
def test_greedy_text_is_the_verifiers_own(invoke, folders, draft):
    arguments = ["generate", "--verifier", folders["verifier"], "--prompt", "abcabcabc", "--temperature", "0"]
    arguments += ["--max-new-tokens", "10"]
    alone = invoke(*arguments)
    drafted = invoke(*arguments, *(folders.get(name, name) for name in draft), "--stats")
    assert alone.exit_code == drafted.exit_code == 0, drafted.stderr
    assert drafted.stdout == alone.stdout
    assert "10 tokens in" in drafted.stderr


def test_generate_with_an_encoder_decoder(invoke, folders, tmp_path):
    file = tmp_path / "numbers.json"
    arguments = ["--prompt", "Hi", "--prompt-lookup-num-tokens", "2", "--max-new-tokens", "6", "--json", file]
    result = invoke("generate", "--verifier", folders["t5"], *arguments)
    assert result.exit_code == 0, result.stderr
    assert json.loads(file.read_text())["tokens"] == 6


def test_generate_stops_after_a_stop_string(invoke, folders):
    arguments = ["generate", "--verifier", folders["verifier"], "--draft", folders["draft"], "--temperature", "0"]
    arguments += ["--prompt", "Hi", "--max-new-tokens", "12"]
    text = invoke(*arguments).stdout.rstrip("\n")
    stopped = invoke(*arguments, "--stop-string", text[4:6])
    assert stopped.stdout.rstrip("\n") == text[: text.index(text[4:6]) + 2]


def test_warnings_are_one_line(invoke, folders):
    arguments = ["--draft", folders["draft"], "--delta", "0.5", "--no-do-sample", "--max-new-tokens", "4"]
    result = invoke("generate", "--verifier", folders["verifier"], "--prompt", "Hi", *arguments)
    assert result.exit_code == 0
    assert result.stderr.startswith("warning: ") and result.stderr.count("\n") == 1


def test_demo(invoke, folders, tmp_path):
    file = tmp_path / "numbers.json"
    arguments = ["--verifier", folders["verifier"], "--draft", folders["draft"], "--dtype", "float32"]
    arguments += ["--prompts", "2", "--passes", "2", "--max-new-tokens", "9", "--delta", "0.5", "--json", file]
    result = invoke("demo", *arguments)
    assert result.exit_code == 0, result.stderr
    assert "\x1b" not in result.stdout
    for text in ("verifier alone", "lossless (delta 0)", "Cactus, delta 0.5", "speed ratio", "9 tokens, by where"):
        assert text in result.stdout

    numbers = json.loads(file.read_text())
    assert numbers.keys() == {"command", "machine", "versions", "settings", "answer", "results"}
    assert numbers["versions"]["transformers-cactus"] == __version__
    assert numbers["settings"]["temperature"] == 0.6 and numbers["settings"]["dtype"] == "float32"
    assert numbers["answer"]["text"] in result.stdout
    alone, lossless, cactus = numbers["results"]
    assert [alone["delta"], lossless["delta"], cactus["delta"]] == [None, 0, 0.5]
    assert alone["ratio"] == 1 and "rounds" not in alone
    for row in (lossless, cactus):
        assert row["tokens"] == row["emitted"] == 2 * 2 * 9
        assert row["mean_accepted_length"] == row["accepted"] / row["rounds"]
        assert len(row["tokens_per_second_of_each_pass"]) == 2
    assert lossless["divergence_per_token"] == 0 < cactus["divergence_per_token"]
    assert lossless["origins"]["delta"] == 0


def test_in_a_pipe(folders):
    command = [sys.executable, "-c", "from transformers_cactus.cli import main; main()", "generate", "--stats"]
    command += ["--verifier", folders["verifier"], "--draft", folders["draft"], "--max-new-tokens", "6"]
    finished = subprocess.run(
        command, input="Hi", capture_output=True, text=True, timeout=300, env=os.environ | {"OMP_NUM_THREADS": "1"}
    )
    assert finished.returncode == 0, finished.stderr
    assert len(finished.stdout) == 7 and finished.stdout.endswith("\n")
    assert "\x1b" not in finished.stdout + finished.stderr
    assert finished.stderr.startswith("6 tokens in ") and finished.stderr.count("\n") == 1


def test_interrupting_is_no_traceback(invoke, monkeypatch):
    def interrupt(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr("transformers_cactus.cli.generate_run.load_models", interrupt)
    result = invoke("generate", "--prompt", "Hi")
    assert result.exit_code == 130
    assert result.stderr == "\ninterrupted\n"


@pytest.mark.parametrize("origins_first", [True, False])
def test_answers_are_coloured_by_origin(origins_first):
    console = Console(force_terminal=True, width=60, color_system="standard", record=True, file=io.StringIO())
    tokenizer = character_tokenizer()
    origins = [Origin.LOSSLESS, Origin.DELTA, Origin.RECOVERED]
    with AnswerStreamer(tokenizer, console) as streamer:
        streamer.put(torch.tensor([[5, 6]]))  # the prompt
        for step in (streamer.put_origins, streamer.put) if origins_first else (streamer.put, streamer.put_origins):
            step(origins if step == streamer.put_origins else tokenizer("abc", return_tensors="pt").input_ids)
        streamer.end()
    console.print(legend(origins))
    text = console.export_text(styles=True)
    assert "\x1b[32ma\x1b[0m\x1b[1;35mb\x1b[0m\x1b[4;31mc\x1b[0m" in text
    assert "33%" in text and "thanks to the relaxed rule" in text and "fully kept block" not in text


def test_pieces_join_to_the_text_and_keep_characters_whole():
    class Bytes:
        def decode(self, tokens, **_):
            return bytes(tokens).decode(errors="replace")

    pieces = TextPieces(Bytes())
    text = "né 🌵!"
    parts = [pieces.push(byte) for byte in text.encode()]
    assert "".join(parts) == text
    assert parts[1:3] == ["", "é"]


def test_ratios_compare_within_a_pass():
    baseline = Measured(System(None), tokens=[10, 10, 10], seconds=[1.0, 10.0, 1.0])
    faster = Measured(System(1.0), tokens=[10, 10, 10], seconds=[0.5, 5.0, 1.0])
    assert faster.ratio(baseline) == 2.0
    assert faster.tokens_per_second == 10.0


@pytest.mark.parametrize("engine", ["fast", "stock"])
def test_origins_come_while_the_answer_is_streamed(folders, engine, monkeypatch):
    from transformers_cactus.cli.measure import Settings, run
    from transformers_cactus.cli.prompt import encode
    from transformers_cactus.demo import load_pair

    pair = load_pair(folders["verifier"], folders["draft"], dtype=torch.float32)
    calls = []
    streamer = AnswerStreamer(pair.tokenizer, Console(file=io.StringIO()))
    monkeypatch.setattr(streamer, "put_origins", lambda new: (calls.append(len(new)), streamer.origins.extend(new)))
    settings = Settings(
        max_new_tokens=20, num_assistant_tokens=3, temperature=1.0, top_k=0, top_p=1.0, seed=0, engine=engine
    )
    _, _, acceptance = run(pair, encode(pair.tokenizer, "Hi"), System(2.0), settings, 0, streamer=streamer)
    assert streamer.origins == acceptance.origins
    assert len(calls) == acceptance.rounds
