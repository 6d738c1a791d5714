"""What has gone wrong for people with speculative decoding, in the stock engine. Numbers as in the list of cases."""

import copy
import math

import pytest
import torch
from transformers import LogitsProcessor, MinLengthLogitsProcessor, StoppingCriteria
from transformers.generation.streamers import BaseStreamer

import tiny_models
import tiny_tokenizers
import transformers_cactus
from transformers_cactus import Cactus, CactusExact, Lenience, Speculative

PROMPT = tiny_models.prompts([7])
LENGTH = 7
UNSET = object()
"""Leaves out one of the defaults below."""
# In long blocks that are all accepted, stopping conditions fall into the middle.
BLOCK = {"num_assistant_tokens": 6, "assistant_confidence_threshold": 0.0}
pytestmark = pytest.mark.filterwarnings("ignore:.*no effect without sampling")


@pytest.fixture(scope="module")
def verifier():
    return tiny_models.build("llama")


@pytest.fixture(scope="module")
def twin(verifier):
    return copy.deepcopy(verifier)


@pytest.fixture(scope="module")
def draft():
    return tiny_models.build("llama", seed=1, hidden=32, layers=2)


@pytest.fixture(scope="module")
def text(verifier):
    """What the verifier writes on its own: prompt and 20 tokens."""
    return verifier.generate(**PROMPT, max_new_tokens=20, do_sample=False)[0].tolist()


def greedy(verifier, draft, **kwargs):
    options = PROMPT | BLOCK | {"do_sample": False, "cactus_delta": 0.75, "max_new_tokens": 20} | kwargs
    options = {name: value for name, value in options.items() if value is not UNSET}
    output = transformers_cactus.generate(
        verifier, **options, assistant_model=draft, cactus_engine="stock", return_dict_in_generate=True
    )
    assert output.acceptance.emitted == output.sequences.shape[1] - LENGTH
    return output


def sampled(verifier, draft, seed=0, **kwargs):
    torch.manual_seed(seed)
    return greedy(verifier, draft, **{"do_sample": True, "top_k": 0} | kwargs)


def ids(output):
    return output.sequences[0].tolist()


class Stream(BaseStreamer):
    """Collects what is streamed; the prompt comes first, as from plain `generate`."""

    def __init__(self):
        self.ids, self.ends = [], 0

    def put(self, value):
        assert not self.ends
        self.ids += value.reshape(-1).tolist()

    def end(self):
        self.ends += 1


@pytest.mark.parametrize("sampling", [False, True])
@pytest.mark.parametrize("as_list", [False, True])
def test_case_1_eos_in_the_middle_of_a_block(verifier, twin, text, as_list, sampling):
    run = sampled if sampling else greedy
    full = ids(run(verifier, twin))
    for position in (LENGTH + 2, LENGTH + 8):
        eos = full[position]
        first = full.index(eos, LENGTH)
        stream = Stream()
        kwargs = {"eos_token_id": [eos, 96] if as_list else eos, "pad_token_id": 0, "output_scores": True}
        output = run(verifier, twin, streamer=stream, **kwargs)
        if not sampling:
            assert ids(output) == full[: first + 1]
        assert eos not in ids(output)[LENGTH:-1]
        assert stream.ids == ids(output) and stream.ends == 1
        assert len(output.scores) == len(ids(output)) - LENGTH
        # The cache holds everything but the last token, as in plain generation.
        assert output.cache.get_seq_length() == len(ids(output)) - 1


@pytest.mark.parametrize("drafting", ["model", "lookup"])
@pytest.mark.parametrize(("start", "size"), [(3, 1), (4, 3), (6, 3), (9, 2)])
def test_case_2_stop_strings(verifier, twin, text, drafting, start, size):
    # Blocks of 6 and an extra token end after 7, 14, ... new tokens: strings inside a block and across two.
    tokenizer = tiny_tokenizers.build(size=97)
    string = tokenizer.decode(text[LENGTH + start : LENGTH + start + size])
    plain = verifier.generate(**PROMPT, max_new_tokens=20, do_sample=False, stop_strings=[string], tokenizer=tokenizer)
    kwargs = {"stop_strings": [string], "tokenizer": tokenizer}
    if drafting == "model":
        output = greedy(verifier, twin, **kwargs)
    else:
        output = greedy(verifier, None, prompt_lookup_num_tokens=5, **kwargs)
    assert ids(output) == plain[0].tolist()
    assert len(ids(output)) < len(text)


class LastTokenIs(StoppingCriteria):
    def __init__(self, token):
        self.token = token

    def __call__(self, input_ids, scores, **kwargs):
        return input_ids[:, -1] == self.token


class LengthIs(StoppingCriteria):
    def __init__(self, length):
        self.length = length

    def __call__(self, input_ids, scores, **kwargs):
        return torch.full((input_ids.shape[0],), input_ids.shape[1] >= self.length)


class Counting(StoppingCriteria):
    def __init__(self):
        self.lengths = []

    def __call__(self, input_ids, scores, **kwargs):
        self.lengths.append(input_ids.shape[1])
        return torch.zeros(input_ids.shape[0], dtype=torch.bool)


def test_case_3_stopping_criteria_are_asked_after_every_token(verifier, twin, draft, text):
    for drafts in (twin, draft):
        for stop in range(LENGTH + 1, LENGTH + 12):
            if drafts is twin or stop < LENGTH + 3:
                assert ids(greedy(verifier, drafts, stopping_criteria=[LengthIs(stop)])) == text[:stop]
        token = text[LENGTH + 4]
        expected = text[: text.index(token, LENGTH) + 1]
        assert ids(greedy(verifier, drafts, stopping_criteria=[LastTokenIs(token)])) == expected
        counting = Counting()
        greedy(verifier, drafts, stopping_criteria=[counting])
        assert counting.lengths == list(range(LENGTH + 1, LENGTH + 21))


def test_case_4_never_longer_than_asked(verifier, twin, draft, text):
    for drafts in (twin, draft):
        for new in (1, 2, 3, 7, 8):
            assert ids(greedy(verifier, drafts, max_new_tokens=new)) == text[: LENGTH + new]
        assert ids(greedy(verifier, drafts, max_new_tokens=None, max_length=LENGTH + 1)) == text[: LENGTH + 1]
    lookup = greedy(verifier, None, prompt_lookup_num_tokens=6, max_new_tokens=2)
    assert ids(lookup) == text[: LENGTH + 2]


@pytest.mark.parametrize("how", ["min_new_tokens", "min_length", "processor"])
def test_case_5_minimum_length(verifier, twin, text, how):
    eos = text[LENGTH + 1]
    kwargs = {
        "min_new_tokens": {"min_new_tokens": 5},
        "min_length": {"min_length": LENGTH + 5},
        "processor": {"logits_processor": [MinLengthLogitsProcessor(LENGTH + 5, eos)]},
    }[how]
    common = {"eos_token_id": eos, "pad_token_id": 0, "max_new_tokens": 20, "do_sample": False}
    plain = verifier.generate(**PROMPT, **common, **copy.deepcopy(kwargs))[0].tolist()
    assert plain[: LENGTH + 2] != text[: LENGTH + 2]
    assert ids(greedy(verifier, twin, **common, **kwargs)) == plain
    for seed in range(5):
        output = ids(sampled(verifier, twin, seed, **common | {"do_sample": True}, **kwargs))
        assert eos not in output[LENGTH : LENGTH + 5]


def test_case_10_the_drafts_own_config_does_not_bend_the_result(verifier, draft, text):
    odd = copy.deepcopy(draft)
    odd.generation_config.update(temperature=0.3, repetition_penalty=3.0, eos_token_id=text[LENGTH], do_sample=True)
    assert ids(greedy(verifier, odd)) == text
    output = sampled(verifier, odd, cactus_delta=math.inf, temperature=8.0)
    assert output.acceptance.accepted == output.acceptance.drafted > 0


@pytest.mark.parametrize(
    "kwargs",
    [
        {"repetition_penalty": 1.8},
        {"no_repeat_ngram_size": 1},
        {"bad_words_ids": [[t] for t in range(3, 60)] + [[70, 71]]},
        {"prefix_allowed_tokens_fn": lambda _, ids: [(int(ids[-1]) * 7 + k) % 90 + 3 for k in range(4)]},
        {"suppress_tokens": list(range(40))},
    ],
    ids=lambda kwargs: next(iter(kwargs)),
)
def test_case_12_processors_see_each_positions_prefix(verifier, twin, draft, kwargs):
    plain = verifier.generate(**PROMPT, max_new_tokens=20, do_sample=False, **kwargs)[0].tolist()
    for drafts in (twin, draft):
        assert ids(greedy(verifier, drafts, **kwargs)) == plain


EVERY_RULE = [Speculative(), Cactus(0.75), Cactus(math.inf), CactusExact(2.0), Lenience(50.0)]
EXCLUSIONS = [{"top_k": 3}, {"top_p": 0.4}, {"min_p": 0.5}, {"bad_words_ids": [[t] for t in range(50)]}]


@pytest.mark.parametrize("rule", EVERY_RULE, ids=repr)
@pytest.mark.parametrize("exclusion", EXCLUSIONS, ids=lambda exclusion: next(iter(exclusion)))
def test_case_13_what_the_verifier_excludes_is_never_emitted(verifier, draft, rule, exclusion):
    kwargs = exclusion | {"temperature": 3.0, "output_scores": True, "cactus_rule": rule, "cactus_delta": UNSET}
    for output in (
        sampled(verifier, draft, **kwargs),
        sampled(verifier, None, prompt_lookup_num_tokens=4, **kwargs),
    ):
        new = output.sequences[0, LENGTH:]
        assert len(output.scores) == len(new) == 20
        assert all(scores[0, token] > -math.inf for scores, token in zip(output.scores, new, strict=True))


def test_case_14_a_processor_with_a_state_sees_drafted_tokens(verifier, twin, draft):
    # It cannot be rolled back. With every draft accepted it sees each position once, in order, as plain generation
    # shows them; after a rejection it has seen positions that were dropped, which is documented.
    class Recording(LogitsProcessor):
        def __init__(self):
            self.lengths = []

        def __call__(self, input_ids, scores):
            self.lengths.append(input_ids.shape[1])
            return scores

    rejecting = Recording()
    greedy(verifier, draft, logits_processor=[rejecting])
    new_tokens = range(LENGTH, LENGTH + 20)
    assert set(new_tokens) <= set(rejecting.lengths) and len(rejecting.lengths) > 20


@pytest.mark.parametrize("value", [math.nan, -math.inf, math.inf])
@pytest.mark.parametrize("side", ["verifier", "draft"])
def test_case_16_scores_that_are_no_distribution(verifier, draft, side, value):
    class Spoil(LogitsProcessor):
        def __call__(self, input_ids, scores):
            return torch.full_like(scores, value) if input_ids.shape[1] == LENGTH + 9 else scores

    if side == "verifier":
        # The draft gets the processors as well, so it must not draft there: look-up.
        with pytest.raises(FloatingPointError, match="The verifier's scores for sequence 0 at position"):
            sampled(verifier, None, prompt_lookup_num_tokens=2, logits_processor=[Spoil()])
    else:
        broken = copy.deepcopy(draft)
        broken.register_forward_hook(lambda _, __, output: setattr(output, "logits", output.logits * 0 + value))
        # transformers samples the draft itself, and refuses first.
        with pytest.raises((FloatingPointError, RuntimeError), match=r"draft|probability tensor"):
            sampled(verifier, broken)


def test_case_24_draft_settings_of_the_call_are_used(verifier, twin, draft):
    for block in (1, 3, 9):
        assert greedy(verifier, twin, num_assistant_tokens=block).acceptance.drafted_per_round[0] == block
    unsure = greedy(verifier, draft, assistant_confidence_threshold=0.999999).acceptance
    assert unsure.drafted < greedy(verifier, draft).acceptance.drafted


@pytest.mark.parametrize("kwargs", [{}, {"temperature": 2.0, "top_p": 0.9}])
def test_case_25_same_seed_same_text(verifier, draft, kwargs):
    first = ids(sampled(verifier, draft, 1, **kwargs))
    assert first == ids(sampled(verifier, draft, 1, **kwargs))
    assert any(first != ids(sampled(verifier, draft, seed, **kwargs)) for seed in range(2, 6))


@pytest.mark.parametrize("drafting", ["model", "lookup"])
def test_case_27_scores_and_logits_are_the_verifiers_own(verifier, draft, drafting):
    kwargs = {"temperature": 1.7, "output_scores": True, "output_logits": True}
    if drafting == "model":
        output = sampled(verifier, draft, **kwargs)
    else:
        output = sampled(verifier, None, prompt_lookup_num_tokens=4, **kwargs)
    with torch.no_grad():
        logits = verifier(output.sequences).logits[0, LENGTH - 1 : -1]
    assert output.acceptance.total_divergence > 0 or drafting == "lookup"
    assert torch.allclose(torch.cat(output.logits), logits, atol=1e-4)
    assert torch.allclose(torch.cat(output.scores), logits / 1.7, atol=1e-4)


@pytest.mark.parametrize("sampling", [False, True])
def test_case_28_the_stream_is_the_returned_text(verifier, twin, draft, sampling):
    run = sampled if sampling else greedy
    for drafts in (twin, draft):
        stream = Stream()
        output = run(verifier, drafts, streamer=stream)
        assert stream.ids == ids(output) and stream.ends == 1


def test_a_tensor_comes_back_without_return_dict(verifier, draft):
    torch.manual_seed(0)
    bare = transformers_cactus.generate(
        verifier,
        **PROMPT | BLOCK,
        do_sample=True,
        top_k=0,
        max_new_tokens=20,
        cactus_delta=0.75,
        assistant_model=draft,
        cactus_engine="stock",
    )
    assert isinstance(bare, torch.Tensor)
    assert torch.equal(bare, sampled(verifier, draft).sequences)


@pytest.mark.filterwarnings("ignore:.*one after another:UserWarning")
def test_a_batch_runs_one_after_another(verifier, draft):
    inputs = tiny_models.prompts([5, 7])
    rows = [{name: value[row : row + 1] for name, value in inputs.items()} for row in (0, 1)]
    alone = [verifier.generate(**row, do_sample=False, max_new_tokens=20) for row in rows]
    options = BLOCK | {"do_sample": False, "max_new_tokens": 20, "cactus_delta": 0.75, "cactus_engine": "stock"}
    ours = transformers_cactus.generate(verifier, **inputs, **options, assistant_model=draft)
    assert torch.equal(ours, torch.cat(alone))
