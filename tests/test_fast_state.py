"""What a call of the fast engine leaves behind: nothing, also after an exception (cases 23 to 26)."""

import copy
import functools

import pytest
import torch
from transformers import GenerationConfig, LogitsProcessor, StoppingCriteria
from transformers.generation.streamers import BaseStreamer

import tiny_models
import transformers_cactus
from fast_calls import IGNORE_GREEDY, drafts, fast, new_tokens, noisy_copy, plain, plain_alone, rows_alone

pytestmark = pytest.mark.filterwarnings(IGNORE_GREEDY)

INPUTS = tiny_models.prompts([7, 4])
ONE = tiny_models.prompts([7])


@functools.cache
def models():
    return tiny_models.pair("llama")


@pytest.fixture
def fresh():
    """Both models with configs of their own."""
    copies = []
    for model in models():
        copied = copy.copy(model)
        copied.generation_config = copy.deepcopy(model.generation_config)
        copies.append(copied)
    return copies


def state(*models):
    """Everything on a model that a call could change."""
    return [
        (
            model.config.to_dict(),
            model.generation_config.to_dict(),
            model.__dict__.get("generate"),
            model.training,
            {name for name in model.__dict__ if not name.startswith("_")},
            [len(module._forward_hooks) for module in model.modules()],
        )
        for model in models
    ]


@pytest.mark.parametrize("schedule", ["constant", "heuristic", "heuristic_transient", "adaptive"])
def test_case_23_configs_stay_as_they_are(fresh, schedule):
    verifier, draft = fresh
    draft.generation_config.num_assistant_tokens_schedule = schedule
    draft.generation_config.num_assistant_tokens = 5
    draft.generation_config.assistant_confidence_threshold = 0.3
    verifier.generation_config.cactus_delta = 0.5
    before = copy.deepcopy(state(verifier, draft))
    config = GenerationConfig(do_sample=True, max_new_tokens=12, prompt_lookup_num_tokens=None, cactus_engine="fast")
    config_before = config.to_dict()
    transformers_cactus.generate(verifier, **INPUTS, assistant_model=draft, generation_config=config)
    fast(verifier, INPUTS, prompt_lookup_num_tokens=4, cactus_delta=0.5)
    assert state(verifier, draft) == before
    assert config.to_dict() == config_before


def drafted(output):
    return output.acceptance.drafted_per_round


def test_case_24_block_length_of_the_call_and_of_the_drafts_config(fresh):
    verifier, _ = fresh
    same = copy.deepcopy(verifier)

    def first_block(**options):
        options = {"num_assistant_tokens": None, "assistant_confidence_threshold": None} | options
        return drafted(fast(verifier, ONE, **options))[0]

    assert first_block(assistant_model=same, num_assistant_tokens=3) == 3
    same.generation_config.num_assistant_tokens = 7
    assert first_block(assistant_model=same) == 7
    assert first_block(assistant_model=same, num_assistant_tokens=3) == 3
    assert first_block(assistant_model=same, generation_config=GenerationConfig(num_assistant_tokens=2)) == 2


def confidence(model, inputs, quantile):
    """A threshold below which this part of the model's greedy tokens is, and no token is by rounding."""
    scores = torch.stack(plain(model, inputs, output_scores=True).scores)
    top = scores.softmax(-1).amax(-1).flatten().sort().values
    place = int(quantile * len(top))
    return float((top[place] + top[place + 1]) / 2)


@pytest.mark.parametrize("of_draft", [True, False])
def test_case_24_confidence_threshold(fresh, of_draft):
    # A block ends behind the first token that its draft was unsure of.
    verifier, _ = fresh
    draft = copy.deepcopy(verifier)
    threshold = confidence(verifier, INPUTS, 0.3)
    options = {"assistant_confidence_threshold": threshold}
    if of_draft:
        draft.generation_config.assistant_confidence_threshold = threshold
        options = {"assistant_confidence_threshold": None}
    output = fast(verifier, INPUTS, assistant_model=draft, output_scores=True, **options)
    assert new_tokens(output, INPUTS) == plain_alone(verifier, INPUTS)
    sure = [(scores.softmax(-1).amax(-1) >= threshold).tolist() for scores in output.scores]
    for row, statistics in enumerate(output.acceptance.sequences):
        place = 0
        for count, accepted in zip(statistics.drafted_per_round, statistics.accepted_per_round, strict=True):
            if place + 7 < 24:
                unsure = [step for step in range(6) if not sure[place + step][row]]
                assert count == min([step + 1 for step in unsure] + [6])
            assert accepted == min(count, 24 - place)
            place += accepted + 1
    assert len(set(drafted(output))) > 2


def test_case_24_sampled_text_with_a_confidence_threshold_is_in_order():
    verifier, draft = models()
    torch.manual_seed(0)
    output = fast(verifier, INPUTS, assistant_model=draft, do_sample=True, assistant_confidence_threshold=0.2)
    assert output.acceptance.emitted == 48 and len(set(drafted(output))) > 2


@pytest.mark.parametrize("schedule", ["heuristic", "heuristic_transient"])
def test_case_24_schedule(fresh, schedule):
    verifier, other = fresh
    options = {"num_assistant_tokens_schedule": schedule, "num_assistant_tokens": 2, "max_new_tokens": 40}
    # 2 longer after each fully accepted block: 2 + 1, 4 + 1, 6 + 1, 8 + 1, 10 + 1, and the 5 that are left.
    same = copy.deepcopy(verifier)
    assert drafted(fast(verifier, ONE, assistant_model=same, **options)) == [2, 4, 6, 8, 10, 4]
    # 1 shorter after a rejection, and never below 1. The next call starts anew.
    statistics = fast(verifier, ONE, assistant_model=other, **options).acceptance
    size = 2
    for count, accepted in zip(statistics.drafted_per_round[:-2], statistics.accepted_per_round, strict=False):
        assert count == size
        size = size + 2 if accepted == count else max(1, size - 1)
    assert 1 in statistics.drafted_per_round


def test_case_24_schedule_in_a_batch_of_rows_far_apart():
    # Blocks grow while one row, unsure, advances by a token or two: the others come to their end in a long block.
    verifier, _ = models()
    draft = copy.deepcopy(verifier)
    inputs = tiny_models.prompts([7, 4, 9, 5])
    output = fast(
        verifier,
        inputs,
        assistant_model=draft,
        num_assistant_tokens_schedule="heuristic",
        assistant_confidence_threshold=confidence(verifier, inputs, 0.1),
        max_new_tokens=60,
    )
    assert new_tokens(output, inputs) == plain_alone(verifier, inputs, max_new_tokens=60)
    assert max(drafted(output)) > 12


def test_a_schedule_is_each_sequences_own():
    verifier, _ = models()
    draft = noisy_copy(verifier)
    inputs = tiny_models.prompts([7, 4, 9, 5])
    options = {"assistant_model": draft, "num_assistant_tokens_schedule": "heuristic", "max_new_tokens": 60}
    rows = fast(verifier, inputs, **options).acceptance.sequences
    alone = [fast(verifier, row, **options).acceptance.sequences[0] for row in rows_alone(inputs)]
    assert [row.drafted_per_round for row in rows] == [row.drafted_per_round for row in alone]
    assert len({tuple(row.drafted_per_round) for row in rows}) == 4


@pytest.mark.parametrize("kind", ["other", "look-up"])
def test_case_25_seeds(kind):
    verifier, draft = models()
    options = drafts(verifier, draft)[kind]

    def run(seed):
        torch.manual_seed(seed)
        return fast(verifier, INPUTS, **options, do_sample=True, cactus_delta=0.5, top_k=0)

    first, again, other = run(3), run(3), run(4)
    assert torch.equal(first.sequences, again.sequences) and first.acceptance == again.acceptance
    assert not torch.equal(first.sequences, other.sequences)


class Fails(Exception):
    """What the tests below raise."""


class FailingProcessor(LogitsProcessor):
    def __call__(self, input_ids, scores):
        if input_ids.shape[1] >= 10:
            raise Fails
        return scores


class FailingCriterion(StoppingCriteria):
    def __call__(self, input_ids, scores, **kwargs):
        if input_ids.shape[1] >= 10:
            raise Fails
        return torch.zeros(len(input_ids), dtype=torch.bool)


class FailingStreamer(BaseStreamer):
    def __init__(self):
        self.count = 0

    def put(self, value):
        self.count += 1
        if self.count > 4:
            raise Fails

    def end(self):
        raise AssertionError("the text did not end")


def failing_forward(model):
    calls = []

    def hook(*_):
        calls.append(1)
        if len(calls) > 2:
            raise Fails

    return model.register_forward_pre_hook(hook)


@pytest.mark.parametrize("where", ["verifier", "draft", "processor", "criterion", "streamer"])
@pytest.mark.parametrize("enabled", [False, True])
def test_case_26_after_an_exception_everything_is_as_before(fresh, where, enabled):
    verifier, draft = fresh
    if enabled:
        transformers_cactus.enable(verifier)
    expected = fast(verifier, ONE, assistant_model=draft).sequences
    before = copy.copy(state(verifier, draft))
    options = {
        "processor": {"logits_processor": [FailingProcessor()]},
        "criterion": {"stopping_criteria": [FailingCriterion()]},
        "streamer": {"streamer": FailingStreamer()},
    }.get(where, {})
    hook = failing_forward({"verifier": verifier, "draft": draft}[where]) if where in ("verifier", "draft") else None
    try:
        with pytest.raises(Fails):
            fast(verifier, ONE, assistant_model=draft, num_assistant_tokens_schedule="heuristic", **options)
    finally:
        if hook is not None:
            hook.remove()
    assert state(verifier, draft) == before
    assert torch.equal(fast(verifier, ONE, assistant_model=draft).sequences, expected)
