"""The adaptive block length: what it reaches against every constant one, and that it leaves the law alone."""

import copy
import random
import statistics
import time

import pytest
import torch

import tiny_models
import transformers_cactus
import transformers_cactus.decoding
from fast_calls import IGNORE_GREEDY, fast, new_tokens, noisy_copy, plain_alone
from test_fast_distribution import does_not_fit, draw, fits, law
from transformers_cactus.adaptive_length import AdaptiveLength
from transformers_cactus.configuration import RunOptions
from transformers_cactus.experience import TRY_AFTER, Experience, experience_of
from transformers_cactus.round_times import RoundTimes
from transformers_cactus.settings import CallSettings

LOSSLESS = "Speculative() False False"
"""What the lossless calls here have their experience under."""

LONGEST = 16
TOKENS = 2500
REGIMES = {
    # Mean probability of a drafted token; seconds of a draft step, of what the first drafted token adds to the
    # verifier's forward of one second, and of what each one adds.
    "good draft": (0.75, 0.1, 0.0, 0.02),
    "good draft, dear block": (0.75, 0.1, 0.4, 0.05),
    "very good and cheap draft": (0.9, 0.03, 0.02, 0.01),
    "poor draft": (0.2, 0.1, 0.1, 0.05),
    "expensive draft": (0.7, 0.6, 0.1, 0.05),
    "useless draft": (0.05, 0.3, 0.5, 0.1),
}


def tokens_per_second(regime, seed, *, constant=None, adaptive=None, certain=False):
    """One sequence of a simulated pair: a drafted token is accepted with a probability that its draft's tells."""
    mean, draft, first, more = regime
    source, clock, emitted = random.Random(seed), 0.0, 0
    while emitted < TOKENS:
        wanted = constant if adaptive is None else adaptive.next()[0]
        probabilities = []
        for _ in range(wanted):
            sure = mean if certain else max(source.betavariate(1.2 * mean / (1 - mean), 1.2), 0.02)
            probabilities.append(sure)
            full = len(probabilities) == wanted
            asked = adaptive is not None and adaptive.reads_probabilities and not full
            if asked and not adaptive.goes_on([[p] for p in probabilities]):
                break
        flags = [source.random() < (p if certain else 0.15 + 0.85 * p) for p in probabilities]
        accepted = flags.index(False) if False in flags else len(flags)
        drafted = len(probabilities)
        seconds = 1 + (first if drafted else 0) + (more + draft) * drafted
        seconds *= 1 + source.gauss(0, 0.03)
        clock, emitted = clock + seconds, emitted + accepted + 1
        if adaptive is not None:
            adaptive.update([drafted], [accepted], seconds)
    return emitted / clock


@pytest.mark.parametrize("certain", [True, False], ids=["equal tokens", "easy and hard tokens"])
@pytest.mark.parametrize("reads", [True, False], ids=["within the round", "between rounds"])
@pytest.mark.parametrize("regime", REGIMES.values(), ids=list(REGIMES))
def test_within_5_percent_of_the_best_constant_length(regime, reads, certain):
    def mean(**policy):
        return statistics.fmean(tokens_per_second(regime, seed, certain=certain, **policy) for seed in range(2))

    best = max(mean(constant=length) for length in range(LONGEST + 1))
    found = statistics.fmean(
        tokens_per_second(
            regime,
            seed,
            certain=certain,
            adaptive=AdaptiveLength(LONGEST, 1, Experience(), reads_probabilities=reads),
        )
        for seed in range(2)
    )
    assert found > 0.95 * best
    # A constant length of 0 is the verifier alone.
    assert best >= mean(constant=0) and found > 0.95 * mean(constant=0)


def rounds(adaptive, count, acceptance, source):
    """The lengths of some rounds in which a drafted token takes half of what the verifier does."""
    lengths = []
    for _ in range(count):
        length = adaptive.next()[0]
        flags = [source.random() < acceptance for _ in range(length)]
        accepted = flags.index(False) if False in flags else length
        adaptive.update([length], [accepted], 1 + 0.5 * length)
        lengths.append(length)
    return lengths


def test_a_draft_that_got_better_is_found_again():
    adaptive, source = AdaptiveLength(8, 1, Experience(), reads_probabilities=False), random.Random(0)
    poor = rounds(adaptive, 600, 0.1, source)
    # Tried at growing intervals, for two rounds each.
    assert 0.95 < poor[100:].count(0) / 500 < 1
    good = rounds(adaptive, 2 * TRY_AFTER[1], 0.95, source)
    assert good[-100:].count(0) < 5


class Stalled(AdaptiveLength):
    """On a machine that does something else during one of the first rounds."""

    def __init__(self, stalled):
        super().__init__(LONGEST, 1, Experience(), reads_probabilities=True)
        self.stalled, self.seen = stalled, 0

    def update(self, drafted, accepted, seconds):
        super().update(drafted, accepted, seconds + 30 * (self.seen == self.stalled))
        self.seen += 1


@pytest.mark.parametrize("stalled", range(10))
@pytest.mark.parametrize("regime", ["good draft", "expensive draft"])
def test_a_stall_while_it_learns_is_overcome(regime, stalled):
    # One stall of 30 s; the clock of the simulation leaves it out.
    best = max(tokens_per_second(REGIMES[regime], 0, constant=length) for length in range(LONGEST + 1))
    assert tokens_per_second(REGIMES[regime], 0, adaptive=Stalled(stalled)) > 0.95 * best


def test_a_length_seen_once_does_not_turn_the_line():
    times = RoundTimes()
    for length in (1, 2, 3) * 5:
        times.add(length, 1 + 0.1 * length)
    times.add(8, 50.0)
    assert times.line() == pytest.approx((1, 0.1))


def test_one_length_is_taken_for_a_block_at_the_price_of_a_token():
    times = RoundTimes()
    times.add(4, 3.0)
    assert times.line() == pytest.approx((3 / 1.4, 0.3 / 1.4))  # a draft of a tenth
    times.add(0, 1.0)
    assert times.line() == pytest.approx((1, 0.5))
    times.add(0, 9.0)  # of two, the lower one
    assert times.of(0) == 1.0


def test_hopeless_is_what_does_not_pay_even_if_everything_is_accepted():
    times = RoundTimes()
    times.add(0, 1.0)
    times.add(4, 5.5)
    assert not times.hopeless  # one block may have been stalled
    times.add(2, 3.1)
    assert times.hopeless
    times.add(1, 1.9)
    assert not times.hopeless


def test_short_calls_try_a_poor_draft_as_rarely_as_a_long_one():
    experience, source, short = Experience(), random.Random(0), []
    for _ in range(30):
        adaptive = AdaptiveLength(8, 1, experience, reads_probabilities=False)
        short += rounds(adaptive, 20, 0.1, source)
    long = rounds(AdaptiveLength(8, 1, Experience(), reads_probabilities=False), 600, 0.1, random.Random(0))
    tried = [sum(length > 0 for length in found[200:]) for found in (short, long)]
    assert 0 < tried[0] <= tried[1] <= 12


@pytest.mark.parametrize("acceptance", [0.2, 1.0])
def test_tries_whose_draft_has_to_read_the_prompt_are_rarer(acceptance):
    """Short calls with a draft as slow as the verifier, which takes eight times that for each prompt."""
    experience, source, clock, emitted = Experience(), random.Random(0), 0.0, 0
    for _ in range(12):
        adaptive = AdaptiveLength(LONGEST, 1, experience, reads_probabilities=False)
        read, left = False, 32
        while left > 0:
            length = min(adaptive.next()[0], left - 1)
            flags = [source.random() < acceptance for _ in range(length)]
            accepted = flags.index(False) if False in flags else length
            seconds = 1 + 1.1 * length + (8 if length and not read else 0)
            read = read or length > 0
            adaptive.update([length], [accepted], seconds)
            clock, left, emitted = clock + seconds, left - accepted - 1, emitted + accepted + 1
    assert emitted / clock > 0.95


def test_short_calls_go_on_from_what_earlier_ones_have_learned():
    verifier, draft = tiny_models.pair("llama")
    inputs = tiny_models.prompts([7])
    common = {"assistant_model": noisy_copy(verifier), "num_assistant_tokens_schedule": "adaptive"}
    before = experience_of(verifier, common["assistant_model"], LOSSLESS).rounds
    assert before == 0 and experience_of(verifier, draft, LOSSLESS).rounds == 0
    seen = []
    for _ in range(2):
        fast(verifier, inputs, do_sample=True, max_new_tokens=20, **common)
        seen.append(experience_of(verifier, common["assistant_model"], LOSSLESS).rounds)
    assert 0 < seen[0] < seen[1]


def test_each_rule_has_an_experience_of_its_own():
    verifier, draft = tiny_models.build("llama"), tiny_models.build("llama", layers=1)
    adaptive = {"assistant_model": draft, "num_assistant_tokens_schedule": "adaptive", "do_sample": True}
    for options in ({"cactus_delta": 0.5}, {"cactus_delta": 0.5, "prompt_lookup_num_tokens": 4}):
        fast(verifier, tiny_models.prompts([7]), max_new_tokens=20, **adaptive, **options)
    assert experience_of(verifier, draft, LOSSLESS).rounds == 0
    assert all(
        experience_of(verifier, draft, f"Cactus(delta=0.5) {copies} False").rounds > 0 for copies in (False, True)
    )


def test_texts_too_short_to_learn_from():
    # Of two tokens the first round may draft one, and is not timed; the second has no room for a draft.
    verifier, other = tiny_models.pair("llama")
    draft, schedule = copy.deepcopy(other), {"num_assistant_tokens_schedule": "adaptive"}
    for new in [2] * 12 + [20]:
        fast(verifier, tiny_models.prompts([7]), assistant_model=draft, do_sample=True, max_new_tokens=new, **schedule)
    experience = experience_of(verifier, draft, LOSSLESS)
    assert experience.rounds > 12 and experience.times[1].knows_drafting


@pytest.mark.filterwarnings(IGNORE_GREEDY)
@pytest.mark.parametrize("name", ["llama", "gemma3", "gpt2"])
def test_greedy_texts_are_the_verifiers_own(name):
    verifier, _ = tiny_models.pair(name)
    inputs = tiny_models.prompts([7, 4, 9])
    schedule = {"num_assistant_tokens_schedule": "adaptive"}
    output = fast(verifier, inputs, assistant_model=noisy_copy(verifier), max_new_tokens=40, **schedule)
    assert new_tokens(output, inputs) == plain_alone(verifier, inputs, max_new_tokens=40)


@pytest.fixture
def erratic(monkeypatch):
    """A clock of which nobody can make sense, and the lengths that came of it."""
    source, seen, now = random.Random(5), set(), [0.0]

    def clock():
        now[0] += source.choice([0.01, 0.1, 1.0])
        return now[0]

    class Watched(AdaptiveLength):
        def update(self, drafted, accepted, seconds):
            seen.add(max(drafted))
            super().update(drafted, accepted, seconds)

    monkeypatch.setattr(transformers_cactus.decoding.time, "perf_counter", clock)
    monkeypatch.setattr(transformers_cactus.decoding, "AdaptiveLength", Watched)
    monkeypatch.setattr(transformers_cactus.decoding, "experience_of", lambda *_: Experience())
    return seen


PROMPT = (1, 2, 3)


def texts(delta, **options):
    inputs = {"input_ids": torch.tensor([PROMPT] * 6000), "attention_mask": torch.ones(6000, 3, dtype=torch.long)}
    return draw(inputs, 12, 6, cactus_delta=delta, num_assistant_tokens_schedule="adaptive", **options)


def test_lossless_texts_keep_the_verifiers_law(erratic):
    # False alarms: see chi_square.ALPHA. Twelve tokens, of which the first three are compared, make a dozen rounds.
    outcomes = [(text, ("",) * 3) for text, _ in texts(0.0)]
    assert len(erratic) > 2
    expected = law(PROMPT, 1, 3, 0.0, "speculative")
    fits(outcomes, expected_texts(expected))


def test_relaxed_texts_are_told_from_lossless_ones(erratic):
    outcomes = [(text, ("",) * 3) for text, _ in texts(0.75)]
    does_not_fit(outcomes, expected_texts(law(PROMPT, 1, 3, 0.0, "speculative")))


def expected_texts(expected):
    """A law without the origins, which depend on the block length."""
    result = {}
    for (text, _), probability in expected.items():
        key = (text, ("",) * 3)
        result[key] = result.get(key, 0.0) + probability
    return result


def first_block(**options):
    """What is drafted in a call's first round: nothing with the adaptive schedule, which learns about the models."""
    verifier, other = tiny_models.pair("llama")
    call = {"do_sample": True, "max_new_tokens": 8, "cactus_delta": 0.5, "return_dict_in_generate": True} | options
    draft = call.pop("assistant_model", None) or copy.deepcopy(other)
    output = transformers_cactus.generate(verifier, **tiny_models.prompts([7]), assistant_model=draft, **call)
    return output.acceptance.drafted_per_round[0]


def test_blocks_are_adaptive_where_nobody_says_how_long_they_are():
    assert first_block() == 0
    assert first_block(num_assistant_tokens_schedule="adaptive", num_assistant_tokens=3) == 0
    assert first_block(num_assistant_tokens=3) == 3
    assert first_block(num_assistant_tokens_schedule="constant") == 4
    assert first_block(num_assistant_tokens_schedule="heuristic") == 4
    assert first_block(assistant_confidence_threshold=0.0) == 4
    steered = copy.deepcopy(tiny_models.pair("llama")[1])
    steered.generation_config.num_assistant_tokens = 2
    assert first_block(assistant_model=steered) == 2


def test_the_verifiers_config_says_how_long_blocks_are_too():
    verifier, draft = (copy.deepcopy(model) for model in tiny_models.pair("llama"))
    verifier.generation_config.num_assistant_tokens = 3
    draft.generation_config.num_assistant_tokens = 2
    call = {**tiny_models.prompts([7]), "assistant_model": draft, "do_sample": True, "max_new_tokens": 8}
    call |= {"cactus_delta": 0.5, "return_dict_in_generate": True, "assistant_confidence_threshold": 0.0}
    for engine in ("fast", "stock"):
        output = transformers_cactus.generate(verifier, **call, cactus_engine=engine)
        assert output.acceptance.drafted_per_round[0] == 3


@pytest.mark.parametrize("value", [-2, 0, 2.7, True, "x"])
@pytest.mark.parametrize("whose", [0, 1], ids=["verifier", "draft"])
def test_a_config_with_a_wrong_block_length_is_refused(whose, value):
    models = [copy.deepcopy(model) for model in tiny_models.pair("llama")]
    models[whose].generation_config.num_assistant_tokens = value
    with pytest.raises(ValueError, match=f"num_assistant_tokens must be a whole number of at least 1, got {value!r}"):
        transformers_cactus.generate(
            models[0], **tiny_models.prompts([7]), assistant_model=models[1], cactus_delta=0.5, max_new_tokens=4
        )


def test_prompt_look_up_alone_says_what_it_ignores():
    verifier, _ = tiny_models.pair("llama")
    call = {**tiny_models.prompts([7]), "prompt_lookup_num_tokens": 3, "max_new_tokens": 4, "cactus_delta": 0.5}
    with pytest.warns(UserWarning, match="no effect without assistant_model: num_assistant_tokens. prompt_lookup_num"):
        transformers_cactus.generate(verifier, **call, do_sample=True, num_assistant_tokens=2)
    with pytest.raises(ValueError, match="num_assistant_tokens_schedule must be one of"):
        transformers_cactus.generate(verifier, **call, num_assistant_tokens_schedule="foo")


def test_blocks_are_constant_where_the_clock_may_have_no_part():
    torch.use_deterministic_algorithms(True)
    try:
        assert first_block() == 4
    finally:
        torch.use_deterministic_algorithms(False)
    verifier, draft = tiny_models.pair("llama")
    compiled = RunOptions(compile=True)
    assert CallSettings(verifier, {"assistant_model": draft}, RunOptions()).schedule == "adaptive"
    assert CallSettings(verifier, {"assistant_model": draft}, compiled).schedule == "constant"


@pytest.mark.parametrize("split", ["verifier", "draft"])
def test_processes_that_share_a_model_have_constant_blocks(split):
    models = dict(zip(("verifier", "draft"), map(copy.copy, tiny_models.pair("llama")), strict=True))
    models[split]._tp_size = 2
    call = {"assistant_model": models["draft"]}
    assert CallSettings(models["verifier"], call, RunOptions()).schedule == "constant"
    asked = {"num_assistant_tokens_schedule": "adaptive", "input_ids": torch.tensor([[1, 2]])}
    with pytest.raises(ValueError, match=f"the {split} is split over processes that have to run the same forwards"):
        transformers_cactus.generate(models["verifier"], **call, **asked, cactus_delta=0.5, max_new_tokens=4)


def test_an_unknown_schedule_is_refused():
    verifier, draft = tiny_models.pair("llama")
    with pytest.raises(ValueError, match=r"num_assistant_tokens_schedule must be one of 'constant', .*'adaptive'"):
        fast(verifier, tiny_models.prompts([7]), assistant_model=draft, num_assistant_tokens_schedule="adaptve")


def test_the_stock_engine_says_that_it_does_not_adapt():
    verifier, draft = tiny_models.pair("llama")
    with pytest.warns(UserWarning, match="'adaptive' works in the fast engine only"):
        transformers_cactus.generate(
            verifier,
            **tiny_models.prompts([7]),
            assistant_model=draft,
            do_sample=True,
            max_new_tokens=8,
            cactus_delta=0.5,
            cactus_engine="stock",
            num_assistant_tokens_schedule="adaptive",
        )


def test_rounds_are_timed_from_one_transfer_to_the_next():
    started = time.perf_counter()
    verifier, draft = tiny_models.pair("llama")
    draft = noisy_copy(draft)
    fast(
        verifier,
        tiny_models.prompts([7]),
        assistant_model=draft,
        do_sample=True,
        max_new_tokens=30,
        num_assistant_tokens_schedule="adaptive",
    )
    (times,) = experience_of(verifier, draft, LOSSLESS).times.values()
    assert 0 < sum(sum(seen) for seen in times._seconds.values()) < time.perf_counter() - started
