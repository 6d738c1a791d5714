"""Conversations: each turn feeds only what is new to either model, and the answers are those of one long prompt."""

import copy

import pytest
import torch
from transformers import GenerationConfig

import tiny_models
import tiny_tokenizers
import transformers_cactus
from fast_calls import IGNORE_GREEDY, noisy_copy
from transformers_cactus import Conversation
from transformers_cactus._compat import cache_argument

pytestmark = pytest.mark.filterwarnings(IGNORE_GREEDY)
TURNS = ["abc de", "fgh", "the cat sat."]
# Letters only: of the tiny tokenizer's tokens, these are what its text is read as again.
LETTERS = {"suppress_tokens": [0, 1, 2, *range(31, tiny_models.VOCAB)]}
GREEDY = {"do_sample": False, "max_new_tokens": 12, "num_assistant_tokens": 4, "cactus_rule": "speculative", **LETTERS}


TEMPLATE = (
    "{% for m in messages %}{{ 'a' if m['role'] == 'assistant' }}{{ m['content'] }}.{% endfor %}"
    "{{ 'a' if add_generation_prompt }}"
)


def chat_tokenizer(template=TEMPLATE):
    tokenizer = tiny_tokenizers.build()
    tokenizer.chat_template = template
    return tokenizer


@pytest.fixture
def models():
    verifier = tiny_models.build("llama")
    return verifier, noisy_copy(verifier)


def counted(model):
    """Counts the tokens that a model is fed, call by call."""
    counts = []
    model.register_forward_pre_hook(
        lambda module, args, kwargs: counts.append(kwargs["input_ids"].shape[1]), with_kwargs=True
    )
    return counts


def plain_answer(verifier, tokenizer, messages):
    inputs = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=True, return_tensors="pt")
    output = verifier.generate(**inputs, do_sample=False, max_new_tokens=12, **LETTERS)
    return tokenizer.decode(output[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True)


@pytest.mark.parametrize("engine", ["fast", "stock"])
def test_answers_are_those_of_the_whole_history(models, engine):
    verifier, draft = models
    conversation = Conversation(verifier, draft, chat_tokenizer(), system="s")
    for turn, text in enumerate(TURNS):
        expected = plain_answer(
            verifier, conversation.tokenizer, [*conversation.messages, {"role": "user", "content": text}]
        )
        reply = conversation.send(text, cactus_engine=engine, **GREEDY)
        assert reply.text == expected and conversation.messages[-1] == {"role": "assistant", "content": expected}
        assert reply.acceptance.emitted == 12
        assert (reply.remembered_tokens > 0) == (engine == "fast" and turn > 0)
    assert [message["role"] for message in conversation.messages] == ["system", *["user", "assistant"] * 3]


def test_only_new_tokens_are_fed(models):
    verifier, draft = models
    conversation = Conversation(verifier, draft, chat_tokenizer())
    to_verifier, to_draft = counted(verifier), counted(draft)
    first = conversation.send(TURNS[0], **GREEDY)
    assert to_verifier[0] >= first.prompt_tokens and to_draft[0] == first.prompt_tokens
    for text in TURNS[1:]:
        to_verifier.clear()
        to_draft.clear()
        before = len(conversation._read)
        reply = conversation.send(text, **GREEDY)
        new = reply.prompt_tokens - before
        assert reply.remembered_tokens == before - 1  # the last token of an answer has not been fed yet
        assert to_verifier[0] == new + 1 + reply.acceptance.drafted_per_round[0]
        assert new <= to_draft[0] <= new + 2
        assert reply.acceptance.accepted > 0


def test_lossless_and_remembered_where_nothing_is_said(models):
    conversation = Conversation(*models, chat_tokenizer())
    options = {"do_sample": True, "max_new_tokens": 6, **LETTERS}
    first, second = (conversation.send(text, **options) for text in TURNS[:2])
    assert first.acceptance.total_divergence == 0 and first.acceptance.emitted > 0
    assert second.remembered_tokens > 0
    off = conversation.send(TURNS[0], cactus_delta=None, **options)
    assert off.acceptance is None and off.text == conversation.messages[-1]["content"]
    greedy = conversation.send(TURNS[1], **GREEDY)
    asked = chat_tokenizer().apply_chat_template(
        conversation.messages[:-1], add_generation_prompt=True, return_dict=True, return_tensors="pt"
    )
    plain = models[0].generate(**asked, do_sample=False, max_new_tokens=12, **LETTERS)
    assert torch.equal(greedy.output.sequences, plain)


def test_a_template_that_rewrites_history(models):
    # Like those that drop the reasoning of earlier answers.
    template = (
        "{% for m in messages %}{{ m['content'][:3] if m['role'] == 'assistant' else m['content'] }}.{% endfor %}"
    )
    verifier, draft = models
    conversation = Conversation(verifier, draft, chat_tokenizer(template))
    remembered = []
    for text in TURNS:
        expected = plain_answer(
            verifier, conversation.tokenizer, [*conversation.messages, {"role": "user", "content": text}]
        )
        reply = conversation.send(text, **GREEDY)
        assert reply.text == expected
        remembered.append(reply.remembered_tokens)
    assert remembered[0] == 0 < remembered[1] < remembered[2]


def test_an_error_leaves_the_conversation_as_it_was(models):
    conversation = Conversation(*models, chat_tokenizer())
    conversation.send(TURNS[0], **GREEDY)
    before = copy.deepcopy(conversation.messages)
    with pytest.raises(ValueError, match="at least 0"):
        conversation.send(TURNS[1], do_sample=True, cactus_delta=-1)
    assert conversation.messages == before
    reply = conversation.send(TURNS[1], **GREEDY)
    assert reply.text == plain_answer(models[0], conversation.tokenizer, conversation.messages[:-1])


def test_an_answer_without_cactus(models):
    conversation = Conversation(*models, chat_tokenizer())
    options = {"do_sample": False, "max_new_tokens": 4, **LETTERS}
    for text in TURNS[:2]:
        reply = conversation.send(text, **options, cactus_delta=None)
        assert reply.acceptance is None and reply.text == conversation.messages[-1]["content"]


@pytest.mark.parametrize(
    ("text", "options", "error", "message"),
    [
        ("a", {"return_dict_in_generate": False}, ValueError, "leave out return_dict_in_generate=False"),
        ("a", {"num_return_sequences": 2}, ValueError, "num_return_sequences must be 1, got 2"),
        (
            "a",
            {"generation_config": GenerationConfig(do_sample=True, num_return_sequences=2)},
            ValueError,
            "must be 1, got 2",
        ),
        (None, {}, TypeError, "what the user says must be a string, got NoneType"),
        ([{"role": "user", "content": "a"}], {}, TypeError, "must be a string, got list: one message"),
    ],
)
def test_what_cannot_be_sent(models, text, options, error, message):
    conversation = Conversation(*models, chat_tokenizer())
    with pytest.raises(error, match=message):
        conversation.send(text, **GREEDY | options)
    assert conversation.messages == []
    with pytest.raises(TypeError, match="the system message must be a string, got int"):
        Conversation(*models, chat_tokenizer(), system=3)


def test_clear_and_prompt_lookup(models):
    verifier, _ = models
    conversation = Conversation(verifier, None, chat_tokenizer(), system="s")
    first = conversation.send(TURNS[0], prompt_lookup_num_tokens=3, **GREEDY)
    conversation.send(TURNS[1], prompt_lookup_num_tokens=3, **GREEDY)
    conversation.clear()
    assert conversation.messages == [{"role": "system", "content": "s"}]
    again = conversation.send(TURNS[0], prompt_lookup_num_tokens=3, **GREEDY)
    assert again.text == first.text and again.remembered_tokens == 0
    with pytest.raises(ValueError, match="chat template"):
        Conversation(verifier, None, tiny_tokenizers.build())


def test_a_draft_goes_on_only_from_its_own_memory(models):
    verifier, draft = models
    other = tiny_models.build("llama", seed=5, hidden=32, layers=2)
    inputs = tiny_models.prompts([7])
    options = {"do_sample": False, "cactus_rule": "speculative", "return_dict_in_generate": True, "max_new_tokens": 8}
    options["num_assistant_tokens"] = 4
    start = transformers_cactus.generate(verifier, **inputs, assistant_model=draft, **options)
    expected = verifier.generate(start.sequences, do_sample=False, max_new_tokens=8)
    name = cache_argument(verifier)
    for model in (other, draft):
        fed = counted(model)
        given = {name: copy.deepcopy(start[name])}
        output = transformers_cactus.generate(verifier, start.sequences, assistant_model=model, **given, **options)
        assert torch.equal(output.sequences, expected)
        assert fed[0] == (15 if model is other else 15 - start[name].draft.cache.get_seq_length())
    assert start[name].draft.cache.get_seq_length() >= 13
