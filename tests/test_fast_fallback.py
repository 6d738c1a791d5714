"""What the fast engine cannot run: one message and right results elsewhere, or one clear refusal (cases 11 and 22)."""

import functools

import pytest
import torch
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

import tiny_models
from fast_calls import IGNORE_GREEDY, fast, new_tokens, plain_alone

pytestmark = pytest.mark.filterwarnings(IGNORE_GREEDY)

NEW_TOKENS = 12
INPUTS = tiny_models.prompts([3, 9, 5])
ONE = tiny_models.prompts([7])

# An attention implementation that the package knows nothing about, as flash attention is to it: no masks per row.
AttentionInterface.register("unknown_attention", sdpa_attention_forward)
AttentionMaskInterface.register("unknown_attention", sdpa_mask)


@functools.cache
def models(name):
    if name == "unknown_attention":
        return tiny_models.pair("llama", "unknown_attention")
    return tiny_models.pair(name)


def one_message(recorded, part):
    messages = [str(w.message) for w in recorded if issubclass(w.category, UserWarning)]
    about = [message for message in messages if "without sampling" not in message]
    assert len(about) == 1 and part in about[0] and "one after another" in about[0], messages


def draft_options(name, kind):
    look_up = {"prompt_lookup_num_tokens": 4, "num_assistant_tokens": None, "assistant_confidence_threshold": None}
    return {"assistant_model": models(name)[1]} if kind == "model" else look_up


@pytest.mark.parametrize("kind", ["model", "look-up"])
@pytest.mark.parametrize(
    ("name", "reason"), [("bloom", "ALiBi"), ("falcon_alibi", "ALiBi"), ("unknown_attention", "unknown_attention")]
)
def test_rows_one_after_another(name, reason, kind):
    verifier, options = models(name)[0], draft_options(name, kind)
    expected = plain_alone(verifier, INPUTS, max_new_tokens=NEW_TOKENS)
    with pytest.warns(UserWarning) as recorded:
        output = fast(verifier, INPUTS, **options, max_new_tokens=NEW_TOKENS, cactus_engine="auto", output_scores=True)
    one_message(recorded, reason)
    assert new_tokens(output, INPUTS) == expected
    assert [len(row.origins) for row in output.acceptance.sequences] == [NEW_TOKENS] * 3
    assert len(output.scores) == NEW_TOKENS and output.scores[0].shape == (3, 97)
    with pytest.raises(ValueError, match=rf"cactus_engine='fast' cannot run this call\. .*{reason}"):
        fast(verifier, INPUTS, **options)


@pytest.mark.parametrize("name", ["bloom", "falcon_alibi", "unknown_attention"])
def test_one_row_needs_no_message(name):
    output = fast(models(name)[0], ONE, assistant_model=models(name)[1], cactus_engine="auto")
    assert new_tokens(output, ONE) == plain_alone(models(name)[0], ONE)


def test_sampled_rows_one_after_another():
    options = {"do_sample": True, "num_return_sequences": 2, "cactus_delta": [0.0, 0.5, 2.0], "cactus_engine": "auto"}
    torch.manual_seed(0)
    with pytest.warns(UserWarning, match="The 6 sequences run one after another"):
        output = fast(models("bloom")[0], INPUTS, assistant_model=models("bloom")[1], **options)
    assert output.sequences.shape == (6, 9 + 24)
    divergence = [sum(row.divergence) for row in output.acceptance.sequences]
    assert divergence[:2] == [0, 0] and min(divergence[2:]) > 0
    assert not torch.equal(output.sequences[2], output.sequences[3])


@pytest.mark.filterwarnings("ignore:.*one after another:UserWarning")
@pytest.mark.parametrize("deltas", [[0.5], [0.5, 0.5], [0.5] * 4], ids=len)
def test_wrong_number_of_budgets_for_rows_one_after_another(deltas):
    def fail(*_):
        raise AssertionError("a model ran")

    hooks = [model.register_forward_pre_hook(fail) for model in models("bloom")]
    try:
        with pytest.raises(ValueError, match=rf"parameters for {len(deltas)} prompts?, the call has 3"):
            fast(
                models("bloom")[0],
                INPUTS,
                assistant_model=models("bloom")[1],
                do_sample=True,
                cactus_delta=deltas,
                cactus_engine="auto",
            )
    finally:
        for hook in hooks:
            hook.remove()


@pytest.mark.filterwarnings("ignore:.*one after another:UserWarning")
@pytest.mark.parametrize("inputs", [ONE, INPUTS], ids=["one", "batch"])
@pytest.mark.parametrize("draft", ["bloom", "falcon_alibi"])
def test_case_11_drafts_that_cannot_be_ragged(draft, inputs):
    verifier = models("llama")[0]
    output = fast(verifier, inputs, assistant_model=models(draft)[1], max_new_tokens=NEW_TOKENS, cactus_engine="auto")
    assert new_tokens(output, inputs) == plain_alone(verifier, inputs, max_new_tokens=NEW_TOKENS)


@pytest.mark.parametrize("engine", ["auto", "fast", "stock"])
@pytest.mark.parametrize("inputs", [ONE, INPUTS], ids=["one", "batch"])
@pytest.mark.parametrize("name", ["mamba", "qwen3_next"])
def test_case_11_recurrent_verifiers_are_refused(name, inputs, engine):
    # transformers cannot run them assisted either: their state cannot be rolled back.
    with pytest.raises(ValueError, match=r"(state|assisted)"):
        fast(models(name)[0], inputs, assistant_model=models("llama")[1], cactus_engine=engine)


@pytest.mark.filterwarnings("ignore:.*one after another:UserWarning")
@pytest.mark.parametrize("name", ["mamba", "qwen3_next"])
def test_case_11_recurrent_drafts(name):
    # Right, or one clear refusal. (A stock candidate generator rolls the draft's cache back.)
    verifier = models("llama")[0]
    try:
        output = fast(verifier, INPUTS, assistant_model=models(name)[1], cactus_engine="auto")
    except ValueError as error:
        assert "state" in str(error)
    else:
        assert new_tokens(output, INPUTS) == plain_alone(verifier, INPUTS)


@pytest.mark.filterwarnings("ignore:.*one after another:UserWarning")
@pytest.mark.parametrize("implementation", ["static", "dynamic"])
@pytest.mark.parametrize("inputs", [ONE, INPUTS], ids=["one", "batch"])
def test_case_22_cache_implementations(implementation, inputs):
    verifier, draft = models("llama")
    try:
        output = fast(
            verifier,
            inputs,
            assistant_model=draft,
            max_new_tokens=NEW_TOKENS,
            cache_implementation=implementation,
            cactus_engine="auto",
        )
    except ValueError as error:
        assert "cache" in str(error) and implementation == "static"
    else:
        assert new_tokens(output, inputs) == plain_alone(verifier, inputs, max_new_tokens=NEW_TOKENS)


def test_case_22_without_a_cache():
    with pytest.raises(ValueError, match="use_cache"):
        fast(models("llama")[0], ONE, assistant_model=models("llama")[1], use_cache=False)


def test_case_21_embeddings_beside_ids():
    verifier, draft = models("llama")
    embeddings = verifier.get_input_embeddings()(ONE["input_ids"])
    output = fast(verifier, ONE | {"inputs_embeds": embeddings}, assistant_model=draft, cactus_engine="auto")
    assert new_tokens(output, ONE) == plain_alone(verifier, ONE)
    with pytest.raises(ValueError, match="inputs_embeds"):
        fast(verifier, ONE | {"inputs_embeds": embeddings}, assistant_model=draft)


@pytest.mark.parametrize("name", ["output_attentions", "output_hidden_states"])
def test_what_is_left_to_the_stock_loop(name):
    verifier, draft = tiny_models.pair("llama", "eager")
    output = fast(verifier, ONE, assistant_model=draft, **{name: True}, cactus_engine="auto")
    assert new_tokens(output, ONE) == plain_alone(verifier, ONE)
    assert output[name.removeprefix("output_")]
    with pytest.raises(ValueError, match=name):
        fast(verifier, ONE, assistant_model=draft, **{name: True})
