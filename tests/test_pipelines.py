"""transformers' pipelines with Cactus: text, batches, chats, streams, speech, images."""

import datasets
import numpy as np
import pytest
import transformers
from PIL import Image
from transformers import GenerationConfig, TextIteratorStreamer
from transformers.pipelines.pt_utils import KeyDataset

import tiny_models
import tiny_speech
import tiny_tokenizers
import transformers_cactus
from transformers_cactus import engines

PROMPTS = ["abc", "defgh a", "x", "the cat."]
NEW = {"max_new_tokens": 8, "min_new_tokens": 8}


@pytest.fixture
def runs(monkeypatch):
    """The calls that reached one of our loops: (engine, rule, sequences)."""
    seen = []

    def watch(name):
        original = getattr(engines, name)

        def watched(setting, *args, **kwargs):
            rule = next(
                arg for arg in (*args, *kwargs.values()) if isinstance(arg, transformers_cactus.AcceptanceRule)
            )
            seen.append((name, str(rule), setting.sequences))
            return original(setting, *args, **kwargs)

        monkeypatch.setattr(engines, name, watched)

    watch("run_fast")
    watch("run_stock")
    return seen


@pytest.fixture
def pipe():
    verifier, draft = tiny_models.pair("llama")
    tokenizer = tiny_tokenizers.build()
    tokenizer.chat_template = "{% for m in messages %}{{ m['content'] }}.{% endfor %}"
    return transformers_cactus.pipeline(
        "text-generation", model=verifier, tokenizer=tokenizer, assistant_model=draft, device="cpu", cactus_delta=0.25
    )


def test_one_prompt_and_whose_delta_counts(pipe, runs):
    (result,) = pipe("abc", **NEW)
    assert result["generated_text"].startswith("abc") and len(result["generated_text"]) > 3
    (only_new,) = pipe("abc", return_full_text=False, cactus_delta=0.75, **NEW)
    assert not only_new["generated_text"].startswith("abc")
    config = GenerationConfig(cactus_delta=0.5, do_sample=True, **NEW)
    pipe("abc", generation_config=config)
    rules = [rule for _, rule, _ in runs]
    # A pipeline's own defaults are keyword arguments of every call, and these win over a config.
    assert rules == [f"Cactus(delta={delta})" for delta in (0.25, 0.75, 0.25)]
    assert {engine for engine, _, _ in runs} == {"run_fast"}


def test_none_turns_it_off(pipe, runs):
    (result,) = pipe("abc", cactus_delta=None, **NEW)
    assert result["generated_text"].startswith("abc") and runs == []


def test_greedy_text_is_the_verifiers_own(pipe):
    pipe.tokenizer.padding_side = "left"
    options = {"do_sample": False, "return_full_text": False, "batch_size": 4, **NEW}
    plain = transformers.pipeline("text-generation", model=pipe.model, tokenizer=pipe.tokenizer, device="cpu")
    for sides in ("left", "right"):
        pipe.tokenizer.padding_side = sides
        assert pipe(PROMPTS, cactus_delta=0.0, **options) == [plain(p, **options)[0:1] for p in PROMPTS]


@pytest.mark.parametrize("kind", ["list", "generator", "dataset", "streamed dataset"])
def test_batches(pipe, runs, kind):
    rows = datasets.Dataset.from_dict({"text": PROMPTS})
    inputs = {
        "list": PROMPTS,
        "generator": (prompt for prompt in PROMPTS),
        "dataset": KeyDataset(rows, "text"),
        "streamed dataset": (row["text"] for row in rows.to_iterable_dataset()),
    }[kind]
    results = list(pipe(inputs, batch_size=2, **NEW))
    assert [text[0]["generated_text"].startswith(p) for text, p in zip(results, PROMPTS, strict=True)] == [True] * 4
    assert [(engine, sequences) for engine, _, sequences in runs] == [("run_fast", 2)] * 2


def test_chats_and_several_answers(pipe, runs):
    chat = [{"role": "user", "content": "abc"}]
    (result,) = pipe(chat, **NEW)
    assert result["generated_text"][0] == chat[0] and result["generated_text"][1]["role"] == "assistant"
    results = pipe([chat, chat], batch_size=2, num_return_sequences=2, **NEW)
    assert [len(answers) for answers in results] == [2, 2]
    assert [sequences for _, _, sequences in runs] == [1, 4]


def test_streamer(pipe, runs):
    streamer = TextIteratorStreamer(pipe.tokenizer, skip_prompt=True)
    (result,) = pipe("abc", streamer=streamer, return_full_text=False, **NEW)
    pieces = list(streamer)
    assert "".join(pieces) == result["generated_text"] and len(runs) == 1
    with pytest.raises(ValueError, match="a streamer takes one sequence"):
        pipe(PROMPTS, batch_size=2, streamer=streamer, **NEW)


def test_a_draft_with_a_vocabulary_padded_to_another_size(runs):
    # transformers' pipeline then hands over both tokenizers, which are one.
    verifier, _ = tiny_models.pair("llama")
    tokenizer = tiny_tokenizers.build()
    draft = tiny_models.build("llama", seed=1, hidden=32, layers=2)
    draft.resize_token_embeddings(128)
    models = {"model": verifier, "assistant_model": draft, "device": "cpu"}
    tokenizers = {"tokenizer": tokenizer, "assistant_tokenizer": tiny_tokenizers.build()}
    pipe = transformers_cactus.pipeline("text-generation", **models, **tokenizers, cactus_delta=0.5)
    pipe("abc", **NEW)
    assert [engine for engine, _, _ in runs] == ["run_fast"]


def test_wrong_options(pipe):
    with pytest.raises(ValueError, match="at least 0"):
        pipe("abc", cactus_delta=-1.0, **NEW)
    with pytest.raises(TypeError, match="Did you mean 'cactus_delta'"):
        transformers_cactus.pipeline("text-generation", model=pipe.model, tokenizer=pipe.tokenizer, cactus_detla=1.0)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"cactus_delta": -0.25}, ValueError, "cactus_delta: delta must be at least 0"),
        ({"cactus_rule": "lenience"}, ValueError, "needs cactus_factor"),
        ({"cactus_delta": 0.5, "cactus_budget": -1}, ValueError, "cactus_budget must be at least 0"),
        ({"cactus_rule": "typical", "cactus_budget": 1.0}, ValueError, "has no delta"),
    ],
)
def test_options_are_checked_when_the_pipeline_is_made(pipe, options, error, message):
    with pytest.raises(error, match=message):
        transformers_cactus.pipeline("text-generation", model=pipe.model, tokenizer=pipe.tokenizer, **options)


def test_options_that_calls_complete(pipe, runs):
    verifier, draft = tiny_models.pair("llama")
    models = {"model": verifier, "tokenizer": pipe.tokenizer, "assistant_model": draft, "device": "cpu"}
    later = transformers_cactus.pipeline("text-generation", **models, cactus_budget=1.0)
    later("abc", cactus_delta=0.5, **NEW)
    assert runs[-1][1] == "Cactus(delta=0.5)"
    with pytest.raises(ValueError, match=r"2 prompts, the call has 1: .*in a pipeline, for each of batch_size"):
        later(["abc", "de"], cactus_delta=[0.1, 0.2], **NEW)


def test_speech(runs):
    verifier, draft = tiny_models.pair("whisper")
    pipe = transformers_cactus.pipeline(
        "automatic-speech-recognition",
        model=verifier,
        tokenizer=tiny_speech.tokenizer(),
        feature_extractor=tiny_speech.feature_extractor(),
        assistant_model=draft,
        device="cpu",
        cactus_delta=0.25,
    )
    sound = np.random.default_rng(0).standard_normal(16000).astype("float32")
    sampling = {"do_sample": True, "temperature": 0.8, "max_new_tokens": 6}
    with pytest.raises(ValueError, match="num_beams=1, got 5"):
        pipe({"raw": sound, "sampling_rate": 16000}, generate_kwargs=sampling)
    sampling["num_beams"] = 1
    result = pipe({"raw": sound, "sampling_rate": 16000}, generate_kwargs=sampling)
    assert result["text"] and runs and {engine for engine, _, _ in runs} == {"run_stock"}
    with pytest.warns(UserWarning, match="run one after another"):
        results = pipe([sound.copy(), sound.copy()], batch_size=2, generate_kwargs=sampling | {"cactus_delta": 0.5})
    assert all(result["text"] for result in results)
    assert runs[-1][1] == "Cactus(delta=0.5)"


def test_images(runs):
    verifier, draft = tiny_models.pair("llava")
    tokenizer = tiny_tokenizers.build()
    image_token = tokenizer.convert_ids_to_tokens(tiny_models.IMAGE_TOKEN)
    tokenizer.add_special_tokens({"additional_special_tokens": [image_token]})
    image_processor = transformers.CLIPImageProcessorPil(
        size={"shortest_edge": 8}, crop_size={"height": 8, "width": 8}
    )
    processor = transformers.LlavaProcessor(
        image_processor=image_processor,
        tokenizer=tokenizer,
        patch_size=4,
        vision_feature_select_strategy="default",
        image_token=image_token,
        num_additional_image_tokens=1,
    )
    parts = {"model": verifier, "processor": processor, "device": "cpu"}
    with pytest.raises(TypeError, match=r"does not pass assistant_model, cactus_delta on.*generate_kwargs"):
        transformers_cactus.pipeline("image-text-to-text", **parts, assistant_model=draft, cactus_delta=0.5)
    pipe = transformers_cactus.pipeline("image-text-to-text", **parts)
    options = {"assistant_model": draft, "cactus_delta": 0.5, "do_sample": True, **NEW}
    (result,) = pipe(images=Image.new("RGB", (8, 8), "red"), text=f"{image_token}abc", generate_kwargs=options)
    assert len(result["generated_text"]) > len("abc")
    assert runs == [("run_stock", "Cactus(delta=0.5)", 1)]
