"""`enable`, `disable`, `enabled`: reversible, untouched calls pass through, and calls leave no trace."""

import copy
import inspect
import threading
import warnings

import pytest
import torch
from transformers import GenerationConfig, GenerationMixin, LogitsProcessor, StoppingCriteria
from transformers.generation.streamers import BaseStreamer

import tiny_models
import transformers_cactus

ORIGINAL = GenerationMixin.generate
PROMPT = torch.tensor([[5, 17, 33, 8, 64, 21]])
OPTIONS = {"do_sample": True, "max_new_tokens": 12, "cactus_delta": 0.75}


@pytest.fixture(autouse=True)
def nothing_stays_enabled():
    yield
    transformers_cactus.disable()
    assert GenerationMixin.generate is ORIGINAL


@pytest.fixture
def models():
    return tiny_models.pair("llama")


def accepts_options(model, draft):
    """Whether `model.generate` takes `cactus_delta`; transformers refuses unknown arguments."""
    try:
        output = model.generate(PROMPT, assistant_model=draft, return_dict_in_generate=True, **OPTIONS)
    except ValueError as error:
        assert "model_kwargs" in str(error)
        return False
    assert output.acceptance.rounds > 0
    return True


def test_one_model(models):
    verifier, draft = models
    other = tiny_models.build("llama", seed=3)
    transformers_cactus.enable(verifier)
    assert accepts_options(verifier, draft)
    assert not accepts_options(other, draft)
    assert "generate" not in other.__dict__ and GenerationMixin.generate is ORIGINAL
    enabled_once = verifier.generate
    transformers_cactus.enable(verifier)
    assert verifier.generate is enabled_once
    transformers_cactus.disable(verifier)
    assert "generate" not in verifier.__dict__
    assert not accepts_options(verifier, draft)
    transformers_cactus.disable(verifier)


def test_every_model(models):
    verifier, draft = models
    transformers_cactus.enable()
    replaced = GenerationMixin.generate
    transformers_cactus.enable()
    assert GenerationMixin.generate is replaced
    assert accepts_options(verifier, draft)
    assert accepts_options(tiny_models.build("qwen2", seed=3), draft)
    transformers_cactus.disable()
    assert GenerationMixin.generate is ORIGINAL
    assert not accepts_options(verifier, draft)


def test_both_at_once_and_in_either_order(models):
    verifier, draft = models
    for first, second in ((None, verifier), (verifier, None)):
        transformers_cactus.enable(first)
        transformers_cactus.enable(second)
        assert accepts_options(verifier, draft)
        transformers_cactus.disable(first)
        assert accepts_options(verifier, draft)
        transformers_cactus.disable(second)
        assert not accepts_options(verifier, draft)
        assert "generate" not in verifier.__dict__ and GenerationMixin.generate is ORIGINAL


@pytest.mark.parametrize("everywhere", [True, False])
def test_with_block(models, everywhere):
    verifier, draft = models
    target = None if everywhere else verifier
    with transformers_cactus.enabled(target) as yielded:
        assert yielded is target
        assert accepts_options(verifier, draft)
    assert not accepts_options(verifier, draft)
    with pytest.raises(KeyError), transformers_cactus.enabled(target):
        raise KeyError
    assert not accepts_options(verifier, draft)
    transformers_cactus.enable(target)
    with transformers_cactus.enabled(target):
        pass
    assert accepts_options(verifier, draft)  # was enabled before the block
    transformers_cactus.disable(target)
    assert "generate" not in verifier.__dict__


@pytest.mark.parametrize("everywhere", [True, False])
def test_calls_without_options_reach_the_original_untouched(models, everywhere, monkeypatch):
    verifier, draft = models
    calls = []

    def spy(self, *args, **kwargs):
        calls.append((self, args, kwargs))
        return "untouched"

    monkeypatch.setattr(GenerationMixin, "generate", spy)
    config = copy.deepcopy(verifier.generation_config)
    kwargs = {"generation_config": config, "assistant_model": draft, "max_new_tokens": 3}
    with transformers_cactus.enabled(None if everywhere else verifier):
        assert verifier.generate(PROMPT, **kwargs) == "untouched"
    ((model, args, passed),) = calls
    assert model is verifier and args[0] is PROMPT and len(args) == 1
    assert passed.keys() == kwargs.keys() and all(passed[name] is kwargs[name] for name in kwargs)


@pytest.mark.parametrize("place", ["call", "config", "draft"])
def test_the_adaptive_schedule_needs_an_option(models, place):
    verifier, draft = models
    schedule = {"num_assistant_tokens_schedule": "adaptive"}
    given = {"call": schedule, "config": {"generation_config": GenerationConfig(**schedule)}, "draft": {}}[place]
    if place == "draft":
        draft.generation_config.num_assistant_tokens_schedule = "adaptive"
    options = {"do_sample": False, "max_new_tokens": 4, **given}
    with transformers_cactus.enabled(verifier):
        with pytest.warns(UserWarning, match="'adaptive' has no effect in transformers' own loop.*cactus_delta=0"):
            verifier.generate(PROMPT, assistant_model=draft, **options)
        with warnings.catch_warnings():
            warnings.simplefilter("error", UserWarning)
            verifier.generate(PROMPT, assistant_model=draft, cactus_delta=0, **options)
            verifier.generate(PROMPT, **options)


def test_generate_works_on_enabled_and_plain_models(models):
    verifier, draft = models

    def run(call):
        torch.manual_seed(0)
        return call(PROMPT, assistant_model=draft, num_assistant_tokens=4, **OPTIONS)

    plain = run(lambda *a, **k: transformers_cactus.generate(verifier, *a, **k))
    with transformers_cactus.enabled(verifier):
        assert torch.equal(plain, run(verifier.generate))
        assert torch.equal(plain, run(lambda *a, **k: transformers_cactus.generate(verifier, *a, **k)))
    with transformers_cactus.enabled(), transformers_cactus.enabled(draft):
        assert torch.equal(plain, run(verifier.generate))
        assert torch.equal(plain, run(lambda *a, **k: transformers_cactus.generate(verifier, *a, **k)))
    torch.manual_seed(0)
    by_name = transformers_cactus.generate(
        verifier, input_ids=PROMPT, assistant_model=draft, num_assistant_tokens=4, **OPTIONS
    )
    assert torch.equal(plain, by_name)


def test_a_copy_of_an_enabled_model_runs_itself(models):
    verifier, draft = models
    with transformers_cactus.enabled(verifier):
        twin = copy.deepcopy(verifier)
        with torch.no_grad():
            twin.lm_head.weight.neg_()
        kwargs = {"max_new_tokens": 5, "do_sample": False}
        through_instance = GenerationMixin.generate(twin, PROMPT, **kwargs)
        # The copy must not speak for the original, whether or not it is enabled itself.
        assert torch.equal(twin.generate(PROMPT, **kwargs), through_instance)
        assert not torch.equal(twin.generate(PROMPT, **kwargs), verifier.generate(PROMPT, **kwargs))
        transformers_cactus.enable(twin)
        assert accepts_options(twin, draft)
    transformers_cactus.disable(twin)
    assert torch.equal(twin.generate(PROMPT, **kwargs), through_instance)


def test_signature_and_name_are_those_of_generate(models):
    verifier, _ = models
    plain = inspect.signature(verifier.generate)
    with transformers_cactus.enabled(verifier):
        assert inspect.signature(verifier.generate) == plain
        assert verifier.generate.__name__ == "generate" and verifier.generate.__doc__ == ORIGINAL.__doc__
    with transformers_cactus.enabled():
        assert inspect.signature(verifier.generate) == plain
        assert inspect.signature(GenerationMixin.generate) == inspect.signature(ORIGINAL)


def test_an_instance_attribute_of_the_library_is_kept(models):
    # `from_pretrained` of a repository with a `custom_generate` folder sets one.
    verifier, draft = models
    calls = []

    def custom(*args, **kwargs):
        calls.append(kwargs)
        return ORIGINAL(verifier, *args, **kwargs)

    verifier.generate = custom
    with transformers_cactus.enabled(verifier):
        verifier.generate(PROMPT, max_new_tokens=2)
        assert len(calls) == 1
        assert accepts_options(verifier, draft) and len(calls) == 2
    assert verifier.generate is custom
    transformers_cactus.generate(verifier, PROMPT, assistant_model=draft, **OPTIONS)
    assert len(calls) == 3 and verifier.generate is custom


def test_only_models_that_generate():
    with pytest.raises(TypeError, match="Linear"):
        transformers_cactus.enable(torch.nn.Linear(2, 2))


class Boom(Exception):
    pass


class FailingProcessor(LogitsProcessor):
    def __call__(self, input_ids, scores):
        raise Boom


class FailingCriterion(StoppingCriteria):
    def __call__(self, input_ids, scores, **kwargs):
        raise Boom


class FailingStreamer(BaseStreamer):
    def put(self, value):
        if value.numel() < PROMPT.numel():
            raise Boom

    def end(self):
        pass


def state(model):
    """Everything of a model that a call could leave a trace in."""
    attributes = {name: id(value) for name, value in model.__dict__.items()}
    hooks = [len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules()]
    return attributes, hooks, model.config.to_dict(), model.generation_config.to_dict(), model.training


def failing_forward(model, after):
    count = iter(range(after + 1))

    def hook(*_):
        if next(count) == after:
            raise Boom

    return model.register_forward_hook(hook)


@pytest.mark.parametrize("engine", ["auto", "stock"])
@pytest.mark.parametrize("schedule", ["constant", "heuristic", "heuristic_transient"])
def test_calls_change_neither_model(models, engine, schedule):
    """Case 23."""
    for model in models:
        model.generation_config.num_assistant_tokens_schedule = schedule
        model.generation_config.num_assistant_tokens = 3
        model.generation_config.assistant_confidence_threshold = 0.1
        model.generation_config.repetition_penalty = 1.1
    verifier, draft = models
    before = [state(model) for model in models]
    config = copy.deepcopy(verifier.generation_config)
    config.max_new_tokens = 20
    given = config.to_dict()
    for kwargs in (
        {"assistant_model": draft},
        {"assistant_model": draft, "num_assistant_tokens": 5, "assistant_confidence_threshold": 0.0},
        {"assistant_model": draft, "generation_config": config},
        {"prompt_lookup_num_tokens": 3},
        {"assistant_early_exit": 1},
    ):
        transformers_cactus.generate(verifier, PROMPT, cactus_engine=engine, **kwargs, **OPTIONS)
        assert [state(model) for model in models] == before
    assert config.to_dict() == given


@pytest.mark.parametrize("engine", ["auto", "stock"])
@pytest.mark.parametrize("culprit", ["verifier", "draft", "processor", "criterion", "streamer"])
def test_an_exception_leaves_no_trace(models, engine, culprit):
    """Case 26."""
    verifier, draft = models
    draft.generation_config.num_assistant_tokens_schedule = "heuristic"
    draft.generation_config.num_assistant_tokens = 3
    before = [state(model) for model in models]
    torch.manual_seed(0)
    expected = transformers_cactus.generate(verifier, PROMPT, assistant_model=draft, cactus_engine=engine, **OPTIONS)
    kwargs, hook = {}, None
    if culprit in ("verifier", "draft"):
        hook = failing_forward(verifier if culprit == "verifier" else draft, after=2)
    elif culprit == "processor":
        kwargs["logits_processor"] = [FailingProcessor()]
    elif culprit == "criterion":
        kwargs["stopping_criteria"] = [FailingCriterion()]
    else:
        kwargs["streamer"] = FailingStreamer()
    with pytest.raises(Boom):
        transformers_cactus.generate(
            verifier, PROMPT, assistant_model=draft, cactus_engine=engine, **OPTIONS, **kwargs
        )
    if hook is not None:
        hook.remove()
    assert [state(model) for model in models] == before
    assert GenerationMixin.generate is ORIGINAL
    torch.manual_seed(0)
    again = transformers_cactus.generate(verifier, PROMPT, assistant_model=draft, cactus_engine=engine, **OPTIONS)
    assert torch.equal(again, expected)


@pytest.mark.parametrize("engine", ["auto", "stock"])
def test_two_threads_on_one_model(models, engine):
    verifier, draft = models
    prompts = [torch.randint(3, 90, (1, 5 + i), generator=torch.Generator().manual_seed(i)) for i in range(4)]
    plain = [verifier.generate(prompt, max_new_tokens=15, do_sample=False) for prompt in prompts]
    # The random state belongs to all threads, so sampling is left with one token.
    sampled = {"do_sample": True, "cactus_delta": 0.75}
    results = [None] * len(prompts)

    def work(i):
        results[i] = transformers_cactus.generate(
            verifier, prompts[i], assistant_model=draft, cactus_engine=engine, max_new_tokens=15, top_k=1, **sampled
        )

    threads = [threading.Thread(target=work, args=(i,)) for i in range(len(prompts))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(torch.equal(result, expected) for result, expected in zip(results, plain, strict=True))
