"""The stock engine on every kind of model and draft, in transformers' own assisted decoding loop."""

import copy
import math

import pytest
import torch
import transformers

import tiny_models
import tiny_tokenizers
import transformers_cactus
from transformers_cactus import Origin

NEW = 14
# Large weights make some probabilities underflow to 0 at temperature 1, and such tokens are never accepted.
FLAT = {"do_sample": True, "temperature": 8.0, "top_k": 0}

ARCHITECTURES = ["llama", "mistral", "gemma2", "gemma3", "mixtral", "t5", "whisper", "llava"]
DRAFTS = ["model", "same", "lookup", "early-exit"]
NO_EARLY_EXIT = {"t5", "whisper", "llava"}


def run(model, seed=0, **kwargs):
    torch.manual_seed(seed)
    options = {"max_new_tokens": NEW, "return_dict_in_generate": True, "cactus_engine": "stock"}
    return transformers_cactus.generate(model, **options | kwargs)


def drafting(kind, verifier, draft):
    with_model = {"num_assistant_tokens": 5, "assistant_confidence_threshold": 0.0}
    return {
        "model": {"assistant_model": draft} | with_model,
        "same": {"assistant_model": copy.deepcopy(verifier)} | with_model,
        "lookup": {"prompt_lookup_num_tokens": 4},
        "early-exit": {"assistant_early_exit": 1},
    }[kind]


def plain_greedy(model, **kwargs):
    return model.generate(max_new_tokens=NEW, do_sample=False, return_dict_in_generate=True, **kwargs).sequences


def check_statistics(acceptance, new_tokens):
    """The definitions of the fields, and how they hang together."""
    drafted, accepted = acceptance.drafted_per_round, acceptance.accepted_per_round
    assert len(drafted) == len(accepted) == acceptance.rounds
    assert all(0 <= a <= d for a, d in zip(accepted, drafted, strict=True))
    assert acceptance.drafted == sum(drafted) and acceptance.accepted == sum(accepted)
    assert acceptance.mean_accepted_length == pytest.approx(sum(accepted) / len(accepted))
    assert acceptance.emitted == new_tokens == len(acceptance.origins) == len(acceptance.divergence)
    kinds = acceptance.origins
    assert kinds.count(Origin.LOSSLESS) + kinds.count(Origin.DELTA) == acceptance.accepted
    # Every round but a last one that was cut short ends in a token that was not drafted.
    assert acceptance.rounds - 1 <= acceptance.emitted - acceptance.accepted <= acceptance.rounds
    assert kinds.count(Origin.PLAIN) <= drafted.count(0)
    for kind, value in zip(kinds, acceptance.divergence, strict=True):
        assert value >= 0 and (value == 0 or kind not in (Origin.BONUS, Origin.PLAIN))
    assert acceptance.total_divergence == pytest.approx(sum(acceptance.divergence))
    line = str(acceptance)
    assert "\n" not in line
    for number in (new_tokens, acceptance.rounds, acceptance.accepted, acceptance.drafted):
        assert str(number) in line


@pytest.fixture(scope="module", params=ARCHITECTURES)
def pair(request):
    verifier, draft = tiny_models.pair(request.param)
    inputs = tiny_models.generate_inputs(request.param)
    if "input_ids" in inputs:
        inputs["input_ids"][:, -6:] = torch.tensor([5, 6, 7, 5, 6, 7])  # for look-up to find something
    return request.param, verifier, draft, inputs, plain_greedy(verifier, **inputs)


@pytest.mark.parametrize("kind", DRAFTS)
@pytest.mark.filterwarnings("ignore:.*no effect without sampling")
def test_every_architecture_and_draft(pair, kind):
    name, verifier, draft, inputs, expected = pair
    given = inputs | drafting(kind, verifier, draft)
    if kind == "early-exit" and name in NO_EARLY_EXIT:
        with pytest.raises(ValueError, match="assistant_early_exit needs a decoder-only"):
            run(verifier, cactus_delta=0.0, **given)
        return
    greedy = run(verifier, cactus_delta=0.0, do_sample=False, **given)
    assert torch.equal(greedy.sequences, expected)
    check_statistics(greedy.acceptance, NEW)
    assert greedy.acceptance.total_divergence == 0

    sampled = run(verifier, cactus_delta=math.inf, **FLAT, **given)
    acceptance = sampled.acceptance
    check_statistics(acceptance, NEW)
    assert Origin.RECOVERED not in acceptance.origins
    assert acceptance.accepted > 0 or (kind == "lookup" and name in ("t5", "whisper"))
    lossless = run(verifier, cactus_delta=0.0, **FLAT, **given).acceptance
    check_statistics(lossless, NEW)
    assert Origin.DELTA not in lossless.origins and lossless.total_divergence == 0


def widened(model, size):
    """The model with its vocabulary padded to `size`, and some probability on the new entries."""
    model = copy.deepcopy(model)
    with torch.random.fork_rng():
        torch.manual_seed(3)
        model.resize_token_embeddings(size, mean_resizing=False)
        torch.nn.init.normal_(model.lm_head.weight[tiny_models.VOCAB :].data, std=0.5)
        torch.nn.init.normal_(model.get_input_embeddings().weight[tiny_models.VOCAB :].data, std=0.5)
    return model


@pytest.mark.parametrize("wide", ["verifier", "draft"])
@pytest.mark.parametrize("kind", ["model", "same"])
@pytest.mark.filterwarnings("ignore:.*no effect without sampling")
def test_case_6_vocabularies_padded_differently(wide, kind):
    verifier, draft = tiny_models.pair("llama")
    draft = copy.deepcopy(verifier) if kind == "same" else draft
    verifier, draft = (widened(verifier, 160), draft) if wide == "verifier" else (verifier, widened(draft, 160))
    inputs = tiny_models.prompts([7])
    given = inputs | drafting("model", verifier, draft)
    greedy = run(verifier, cactus_delta=0.0, do_sample=False, **given)
    expected = plain_greedy(verifier, **inputs)
    assert torch.equal(greedy.sequences, expected)
    if wide == "verifier":
        assert expected.max() >= tiny_models.VOCAB  # otherwise the test would not show anything
    sampled = run(verifier, cactus_delta=math.inf, **FLAT, **given)
    # Ids that the verifier lacks are never drafted; what only the verifier has stays reachable.
    assert sampled.acceptance.accepted == sampled.acceptance.drafted > 0
    assert sampled.sequences.max() < verifier.config.vocab_size
    seen = {int(run(verifier, seed=s, cactus_delta=0.0, **FLAT, **given).sequences.max()) for s in range(6)}
    assert (max(seen) >= tiny_models.VOCAB) == (wide == "verifier")


@pytest.mark.filterwarnings("ignore:.*no effect without sampling")
def test_different_tokenizers():
    verifier, draft = tiny_models.pair("llama")
    tokenizer, other = tiny_tokenizers.build(["th", "er", "in"]), tiny_tokenizers.build(["an", "th", "ou"], size=97)
    inputs = {"input_ids": tokenizer("the inner man ran over the other thing.", return_tensors="pt").input_ids}
    given = inputs | {"assistant_model": draft, "tokenizer": tokenizer, "assistant_tokenizer": other}
    untouched = plain_greedy(draft, **inputs)
    greedy = run(verifier, cactus_delta=0.0, do_sample=False, **given)
    assert torch.equal(greedy.sequences, plain_greedy(verifier, **inputs))
    check_statistics(greedy.acceptance, NEW)
    for _ in range(2):  # the library replaces the draft's embeddings for good; the second call must find its own again
        sampled = run(verifier, cactus_delta=math.inf, **FLAT, **given)
        check_statistics(sampled.acceptance, NEW)
        assert sampled.acceptance.accepted == sampled.acceptance.drafted > 0
        assert torch.equal(plain_greedy(draft, **inputs), untouched)


def test_case_8_a_draft_with_a_short_context():
    verifier = tiny_models.build("gpt2")
    config = copy.deepcopy(verifier.config)
    config.n_positions, config.n_layer = 20, 1
    draft = transformers.AutoModelForCausalLM.from_config(config).eval()
    inputs = tiny_models.prompts([9])
    with pytest.warns(UserWarning, match="draft model takes 20 tokens at most") as recorded:
        output = run(verifier, cactus_delta=0.5, **FLAT, **inputs | drafting("model", verifier, draft))
    assert sum("at most" in str(w.message) for w in recorded) == 1
    check_statistics(output.acceptance, NEW)
    drafted = output.acceptance.drafted_per_round
    assert drafted[0] == 5 and drafted[-1] == 0
    with pytest.warns(UserWarning, match="no effect"):
        greedy = run(verifier, cactus_delta=0.5, do_sample=False, **inputs | drafting("model", verifier, draft))
    assert torch.equal(greedy.sequences, plain_greedy(verifier, **inputs))


@pytest.mark.parametrize(
    ("of_verifier", "of_draft"),
    [(torch.float32, torch.bfloat16), (torch.bfloat16, torch.float32), (torch.float16, torch.float16)],
)
def test_case_9_models_of_different_dtypes(of_verifier, of_draft):
    verifier, draft = tiny_models.pair("llama")
    given = tiny_models.prompts([7]) | drafting("model", verifier, draft.to(of_draft))
    output = run(verifier.to(of_verifier), cactus_delta=math.inf, output_scores=True, **FLAT, **given)
    assert output.acceptance.accepted == output.acceptance.drafted > 0
    assert all(scores.dtype == torch.float32 for scores in output.scores)


@pytest.mark.parametrize("name", ["mamba", "qwen3_next"])
@pytest.mark.parametrize("side", ["verifier", "draft"])
def test_case_11_recurrent_models_are_refused(name, side):
    recurrent, other = tiny_models.build(name), tiny_models.build("llama")
    verifier, draft = (recurrent, other) if side == "verifier" else (other, recurrent)
    with pytest.raises(ValueError, match=f"the {side} .* keeps a recurrent state"):
        run(verifier, cactus_delta=0.5, assistant_model=draft, **tiny_models.prompts([5]))


@pytest.mark.filterwarnings("ignore:.*no effect without sampling")
def test_case_21_embeddings_beside_ids():
    verifier, draft = tiny_models.pair("llama")
    inputs = tiny_models.prompts([7])
    inputs["inputs_embeds"] = verifier.get_input_embeddings()(inputs["input_ids"]).detach().flip(1)
    expected = plain_greedy(verifier, **inputs)
    assert not torch.equal(expected, plain_greedy(verifier, **tiny_models.prompts([7])))
    for kind in DRAFTS:
        output = run(verifier, cactus_delta=0.5, do_sample=False, **inputs | drafting(kind, verifier, draft))
        assert torch.equal(output.sequences, expected)


@pytest.mark.filterwarnings("ignore:.*no effect without sampling")
def test_case_22_a_static_cache():
    verifier, draft = tiny_models.pair("llama")
    inputs = tiny_models.prompts([7])
    given = inputs | drafting("same", verifier, draft) | {"cache_implementation": "static"}
    if tuple(map(int, transformers.__version__.split(".")[:2])) <= (5, 17):
        with pytest.raises(ValueError, match="Static cache"):
            run(verifier, cactus_delta=0.5, do_sample=False, **given)
        return
    output = run(verifier, cactus_delta=0.5, do_sample=False, **given)
    assert torch.equal(output.sequences, plain_greedy(verifier, **inputs))
    assert output.acceptance.accepted > 0


def test_case_29_speech_pipeline_with_a_draft():
    # Whisper decides about sampling itself: a temperature above 0 samples, 0 does not.
    verifier, draft = tiny_models.pair("whisper")
    inputs = tiny_models.generate_inputs("whisper")
    given = inputs | drafting("model", verifier, draft) | {"cactus_delta": math.inf, "top_k": 0}
    assert run(verifier, temperature=8.0, **given).acceptance.accepted > 0
    with pytest.warns(UserWarning, match="temperature above 0"):
        run(verifier, temperature=0.0, **given)
