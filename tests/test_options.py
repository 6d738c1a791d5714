"""The `cactus_*` options of a call: where they may stand, and what is refused before any model runs."""

import copy
import json
import math
import warnings

import numpy as np
import pytest
import torch
import transformers
from transformers import GenerationConfig

import tiny_models
import transformers_cactus
from transformers_cactus import (
    Cactus,
    CactusExact,
    ChiSquare,
    Ensemble,
    JensenShannon,
    Lenience,
    Optimal,
    Origin,
    ReverseKL,
    Speculative,
    SquaredHellinger,
    TopK,
    TotalVariation,
    Typical,
)

PROMPT = torch.tensor([[5, 17, 33, 8, 64, 21]])
COMMON = {
    "inputs": PROMPT,
    "attention_mask": torch.ones_like(PROMPT),
    "max_new_tokens": 12,
    "do_sample": True,
    "top_k": 0,
    "num_assistant_tokens": 4,  # else the clock has a part in the text
    "return_dict_in_generate": True,
}


@pytest.fixture(scope="module")
def models():
    return tiny_models.pair("llama")


@pytest.fixture
def verifier(models):
    """The verifier with a generation config of its own, as calls may not change the shared one's."""
    model = copy.copy(models[0])
    model.generation_config = copy.deepcopy(model.generation_config)
    return model


@pytest.fixture
def draft(models):
    return models[1]


@pytest.fixture
def must_not_run(models):
    def fail(*_):
        raise AssertionError("a model ran")

    hooks = [model.register_forward_pre_hook(fail) for model in models]
    yield
    for hook in hooks:
        hook.remove()


def run(model, seed=0, **kwargs):
    torch.manual_seed(seed)
    return transformers_cactus.generate(model, **COMMON | kwargs)


def same(one, other):
    return torch.equal(one.sequences, other.sequences) and one.acceptance == other.acceptance


@pytest.mark.parametrize(
    ("options", "rule"),
    [
        ({"cactus_delta": 0}, Speculative()),
        ({"cactus_delta": 0.75}, Cactus(0.75)),
        ({"cactus_delta": 0.75, "cactus_rule": "cactus"}, Cactus(0.75)),
        ({"cactus_delta": 0.75, "cactus_rule": "cactus-exact"}, CactusExact(0.75)),
        ({"cactus_factor": 3.0, "cactus_rule": "lenience"}, Lenience(3.0)),
        ({"cactus_rule": "speculative"}, Speculative()),
        ({"cactus_delta": [0.75]}, Cactus(0.75)),
        ({"cactus_delta": torch.tensor([0.75])}, Cactus(0.75)),
        ({"cactus_rule": "chi-square", "cactus_delta": 0.5}, ChiSquare(0.5)),
        ({"cactus_rule": "total-variation", "cactus_delta": 0.2}, TotalVariation(0.2)),
        ({"cactus_rule": "reverse-kl", "cactus_delta": 0.5}, ReverseKL(0.5)),
        ({"cactus_rule": "squared-hellinger", "cactus_delta": 0.1}, SquaredHellinger(0.1)),
        ({"cactus_rule": "jensen-shannon", "cactus_delta": 0.1}, JensenShannon(0.1)),
        ({"cactus_rule": "typical"}, Typical()),
        (
            {
                "cactus_rule": "typical",
                "cactus_posterior_threshold": 0.01,
                "cactus_posterior_alpha": 0.1,
                "cactus_recovery_from": "argmax",
            },
            Typical(0.01, 0.1, "argmax"),
        ),
        ({"cactus_rule": "top-k", "cactus_top_k": 30}, TopK(30)),
        (
            {"cactus_rule": "ensemble", "cactus_ensemble_weight": 0.4, "cactus_within_support": True},
            Ensemble(0.4, within_support=True),
        ),
        ({"cactus_rule": "optimal", "cactus_multiplier": [2.0]}, Optimal(2.0)),
    ],
)
@pytest.mark.parametrize("engine", ["auto", "stock"])
def test_options_and_rule_objects_are_the_same(verifier, draft, options, rule, engine):
    by_options = run(verifier, assistant_model=draft, cactus_engine=engine, **options)
    by_object = run(verifier, assistant_model=draft, cactus_engine=engine, cactus_rule=rule)
    assert torch.equal(by_options.sequences, by_object.sequences)
    assert by_options.acceptance.origins == by_object.acceptance.origins
    assert by_options.acceptance.divergence == pytest.approx(by_object.acceptance.divergence, abs=1e-6)


def test_the_rule_decides(verifier, draft):
    # A check on the test above: options that were ignored would agree as well.
    deltas = [run(verifier, assistant_model=draft, cactus_delta=delta).acceptance for delta in (0, 0.75, math.inf)]
    assert [acceptance.total_divergence > 0 for acceptance in deltas] == [False, True, True]
    assert deltas[0].accepted < deltas[2].accepted == deltas[2].drafted
    assert Origin.DELTA not in deltas[0].origins and Origin.RECOVERED not in deltas[2].origins


def test_options_on_a_generation_config_survive_saving(verifier, draft, tmp_path):
    expected = run(verifier, assistant_model=draft, cactus_delta=0.5, cactus_rule="cactus-exact")
    config = GenerationConfig(cactus_delta=0.5, cactus_rule="cactus-exact", max_new_tokens=12, do_sample=True)
    config.save_pretrained(tmp_path)
    assert json.loads((tmp_path / "generation_config.json").read_text())["cactus_delta"] == 0.5
    loaded = GenerationConfig.from_pretrained(tmp_path)
    assert same(expected, run(verifier, assistant_model=draft, generation_config=loaded))
    verifier.generation_config = loaded
    assert same(expected, run(verifier, assistant_model=draft))
    verifier.save_pretrained(tmp_path)
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    assert same(expected, run(again, assistant_model=draft))


def test_a_budget_on_a_generation_config_survives_saving(verifier, draft, tmp_path):
    options = {"cactus_delta": 0.5, "cactus_budget": 0.2, "cactus_budget_window": 3, "cactus_certificate": True}
    GenerationConfig(**options, max_new_tokens=12, do_sample=True).save_pretrained(tmp_path)
    loaded = GenerationConfig.from_pretrained(tmp_path)
    windowed = run(verifier, assistant_model=draft, **options)
    assert same(windowed, run(verifier, assistant_model=draft, generation_config=loaded))
    whole = run(verifier, assistant_model=draft, generation_config=loaded, cactus_budget_window=None)
    assert whole.acceptance.total_certificate <= 0.2 + 1e-9 < windowed.acceptance.total_certificate


def test_an_argument_goes_before_the_given_config_before_the_models_own(verifier, draft):
    def delta(value):
        return run(verifier, assistant_model=draft, cactus_rule=Cactus(value))

    small, middle, large = delta(0.1), delta(1.0), delta(math.inf)
    assert not same(small, middle) and not same(middle, large)
    verifier.generation_config.cactus_delta = 0.1
    assert same(small, run(verifier, assistant_model=draft))
    config = GenerationConfig(cactus_delta=1.0)
    assert same(middle, run(verifier, assistant_model=draft, generation_config=config))
    assert same(large, run(verifier, assistant_model=draft, generation_config=config, cactus_delta=math.inf))
    # A config that does not mention an option leaves the model's own in force.
    assert same(small, run(verifier, assistant_model=draft, generation_config=GenerationConfig(temperature=1.0)))


def test_none_turns_off_what_the_config_says(verifier, draft):
    verifier.generation_config.cactus_delta = 1.0
    output = run(verifier, assistant_model=draft, cactus_delta=None)
    assert "acceptance" not in output
    plain = copy.deepcopy(COMMON)
    torch.manual_seed(0)
    assert torch.equal(output.sequences, verifier.generate(**plain, assistant_model=draft).sequences)


def test_none_leaves_the_rule_of_the_same_call(verifier, draft):
    expected = run(verifier, assistant_model=draft, cactus_rule="optimal", cactus_multiplier=2.0)
    verifier.generation_config.cactus_delta = 1.0
    given = {"cactus_delta": None, "cactus_rule": "optimal", "cactus_multiplier": 2.0}
    assert same(expected, run(verifier, assistant_model=draft, **given))
    by_config = GenerationConfig(**given)
    assert same(expected, run(verifier, assistant_model=draft, generation_config=by_config))
    # A call's own None is about what the configs say, their rules included.
    assert "acceptance" not in run(verifier, assistant_model=draft, generation_config=by_config, cactus_delta=None)
    unset = {"cactus_rule": None, "cactus_budget": None, "cactus_certificate": False}
    assert "acceptance" not in run(verifier, assistant_model=draft, cactus_delta=None, **unset)


def test_turning_off_the_budget_turns_off_the_configs_window(verifier, draft):
    expected = run(verifier, assistant_model=draft, cactus_delta=0.5)
    config = GenerationConfig(cactus_delta=0.5, cactus_budget=0.01, cactus_budget_window=4)
    assert not same(expected, run(verifier, assistant_model=draft, generation_config=config))
    assert same(expected, run(verifier, assistant_model=draft, generation_config=config, cactus_budget=None))
    with pytest.raises(ValueError, match="there is none"):
        run(verifier, assistant_model=draft, cactus_delta=0.5, cactus_budget=None, cactus_budget_window=4)


NO_MODEL_RUNS = [
    ("no draft", {"cactus_delta": 0.75}, ValueError, "assistant_model=.*prompt_lookup_num_tokens"),
    ("negative", {"cactus_delta": -0.1}, ValueError, "delta must be at least 0.*-0.1"),
    ("nan", {"cactus_delta": math.nan}, ValueError, "delta must be at least 0.*nan"),
    ("string", {"cactus_delta": "0.75"}, TypeError, "delta must be a number.*'0.75'"),
    ("bool", {"cactus_delta": True}, TypeError, "delta must be a number.*True"),
    ("negative in a list", {"cactus_delta": [0.1, -1.0]}, ValueError, r"cactus_delta: every delta .*got 0\.1, -1\.$"),
    ("no schedule", {"cactus_delta": int}, TypeError, "cactus_delta=<class 'int'> is called with the list"),
    ("no streamer", {"cactus_delta": 0.5, "streamer": 5}, TypeError, r"streamer must be .* put\(\) .*, got int"),
    (
        "another cache",
        {"cactus_delta": 0.5, "past_key_values": "x"},
        TypeError,
        "past_key_values must be a cache.*got str",
    ),
    ("unknown rule", {"cactus_delta": 0.5, "cactus_rule": "catcus"}, ValueError, "Did you mean 'cactus'"),
    ("rule of another type", {"cactus_delta": 0.5, "cactus_rule": 3}, ValueError, "cactus_rule must be one of"),
    ("a rule's class", {"cactus_rule": Cactus}, ValueError, "cactus_rule must be one of"),
    ("unknown option", {"cactus_dleta": 0.5}, TypeError, "'cactus_dleta'. Did you mean 'cactus_delta'"),
    ("unknown option unset", {"cactus_rul": None}, TypeError, "Did you mean 'cactus_rule'"),
    ("no factor", {"cactus_rule": "lenience"}, ValueError, "needs cactus_factor"),
    (
        "small factor",
        {"cactus_rule": "lenience", "cactus_factor": 0.5},
        ValueError,
        "cactus_factor: factor must be at least 1",
    ),
    ("no multiplier", {"cactus_rule": "optimal"}, ValueError, "needs cactus_multiplier"),
    ("no weight", {"cactus_rule": "ensemble"}, ValueError, "needs cactus_ensemble_weight"),
    (
        "large weight",
        {"cactus_rule": "ensemble", "cactus_ensemble_weight": 2},
        ValueError,
        "cactus_ensemble_weight: weight",
    ),
    ("no k", {"cactus_rule": "top-k"}, ValueError, "needs cactus_top_k"),
    ("many k", {"cactus_rule": "top-k", "cactus_top_k": [3]}, TypeError, r"cactus_top_k: k must be .*, got \[3\]\."),
    (
        "off and a budget",
        {"cactus_delta": None, "cactus_budget": 1.0},
        ValueError,
        "cactus_delta=None turns Cactus off, and cactus_budget beside it",
    ),
    (
        "off and more",
        {"cactus_delta": None, "cactus_certificate": True, "cactus_verification": "block"},
        ValueError,
        "cactus_certificate, cactus_verification beside it",
    ),
    ("off and on", {"cactus_delta": None, "cactus_rule": "cactus"}, ValueError, "needs cactus_delta"),
    (
        "recovery",
        {"cactus_rule": "typical", "cactus_recovery_from": "mode"},
        ValueError,
        "cactus_recovery_from: .*'argmax'",
    ),
    ("threshold", {"cactus_rule": "typical", "cactus_posterior_threshold": 9}, ValueError, "cactus_post.*: post"),
    ("no delta", {"cactus_rule": "cactus-exact"}, ValueError, "needs cactus_delta"),
    ("both", {"cactus_rule": Cactus(0.5), "cactus_delta": 0.5}, ValueError, "already carries its parameters"),
    ("beams", {"cactus_delta": 0.5, "num_beams": 3}, ValueError, "num_beams=1, got 3"),
    ("no cache", {"cactus_delta": 0.5, "use_cache": False}, ValueError, "use_cache=False"),
    ("two loops", {"cactus_delta": 0.5, "custom_generate": lambda **_: 0}, ValueError, "custom_generate"),
    ("two rules", {"cactus_delta": 0.5, "assistant_ensemble_weight": 0.5}, ValueError, "assistant_ensemble_weight"),
    ("stop strings", {"cactus_delta": 0.5, "stop_strings": ["a"]}, ValueError, "need tokenizer="),
    ("embeddings", {"cactus_delta": 0.5, "inputs": None, "inputs_embeds": torch.zeros(1, 6, 48)}, ValueError, "ids"),
]


@pytest.mark.parametrize(
    ("options", "error", "message"), [c[1:] for c in NO_MODEL_RUNS], ids=[c[0] for c in NO_MODEL_RUNS]
)
@pytest.mark.usefixtures("must_not_run")
def test_errors_come_before_any_model_runs(verifier, draft, options, error, message):
    given = {} if message.startswith("assistant_model") else {"assistant_model": draft}
    with pytest.raises(error, match=message):
        run(verifier, **given, **options)
    with pytest.raises(error, match=message), transformers_cactus.enabled(verifier):
        verifier.generate(**COMMON | given | options)


@pytest.mark.parametrize(
    ("entries", "error", "message"),
    [
        ({"cactus_delta": -1.0}, ValueError, "delta must be at least 0"),
        ({"cactus_delta": 0.5, "cactus_rule": "lenien"}, ValueError, "Did you mean 'lenience'"),
        ({"cactus_detla": 0.5}, TypeError, "generation_config entry 'cactus_detla'. Did you mean 'cactus_delta'"),
    ],
)
@pytest.mark.usefixtures("must_not_run")
def test_errors_in_a_generation_config(verifier, draft, entries, error, message):
    with pytest.raises(error, match=message):
        run(verifier, assistant_model=draft, generation_config=GenerationConfig(**entries))
    verifier.generation_config = GenerationConfig(**entries)
    with pytest.raises(error, match=message):
        run(verifier, assistant_model=draft)


@pytest.mark.usefixtures("must_not_run")
def test_settings_on_the_config_are_checked_too(verifier, draft):
    for name, value in {"num_beams": 4, "use_cache": False, "assistant_ensemble_weight": 0.3}.items():
        with pytest.raises(ValueError, match=name):
            run(verifier, assistant_model=draft, cactus_delta=0.5, generation_config=GenerationConfig(**{name: value}))


@pytest.mark.usefixtures("must_not_run")
def test_vocabularies_that_no_padding_explains(verifier, draft):
    config = copy.deepcopy(draft.config)
    config.vocab_size += 1025
    other = transformers.AutoModelForCausalLM.from_config(config)
    with pytest.raises(ValueError, match=r"97 entries and the draft's 1122.*assistant_tokenizer"):
        run(verifier, assistant_model=other, cactus_delta=0.5)


def only_warning(recorded):
    messages = [str(w.message) for w in recorded if "cactus" in str(w.message).lower()]
    assert len(messages) == 1, messages
    return messages[0]


@pytest.mark.parametrize("engine", ["auto", "stock"])
def test_one_warning_where_sampling_is_off(verifier, draft, engine):
    with pytest.warns(UserWarning) as recorded:
        run(verifier, assistant_model=draft, cactus_delta=0.75, do_sample=False, cactus_engine=engine)
    assert "no effect without sampling" in only_warning(recorded)


def test_one_warning_for_an_option_that_the_rule_does_not_take(verifier, draft):
    with pytest.warns(UserWarning) as recorded:
        run(verifier, assistant_model=draft, cactus_rule="speculative", cactus_delta=0.75)
    assert only_warning(recorded) == "cactus_delta has no effect with cactus_rule='speculative'."


@pytest.mark.parametrize("engine", ["fast", "stock"])
def test_a_schedule_for_a_rule_without_delta_is_such_an_option_too(verifier, draft, engine):
    options = {"assistant_model": draft, "cactus_engine": engine, "cactus_rule": "typical"}
    with pytest.warns(UserWarning) as recorded:
        output = run(verifier, **options, cactus_delta=lambda generated: 0.5)
    assert only_warning(recorded) == "cactus_delta has no effect with cactus_rule='typical'."
    assert same(output, run(verifier, **options))


@pytest.mark.parametrize("engine", ["auto", "stock"])
def test_a_mixture_says_that_it_leaves_the_support(verifier, draft, engine):
    options = {"assistant_model": draft, "cactus_rule": "ensemble", "cactus_ensemble_weight": 0.5}
    with pytest.warns(UserWarning) as recorded:
        run(verifier, **options, cactus_engine=engine)
    assert "can emit tokens that the verifier excludes" in only_warning(recorded)
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        run(verifier, **options, cactus_within_support=True, cactus_engine=engine)


def test_one_warning_where_the_models_config_meets_a_call_without_a_draft(verifier):
    verifier.generation_config.cactus_delta = 0.75
    with pytest.warns(UserWarning) as recorded:
        output = run(verifier)
    assert "no draft" in only_warning(recorded)
    assert output.sequences.shape == (1, 18) and "acceptance" not in output
    # The config of this very call asks for it in so many words: an error, as with an argument.
    with pytest.raises(ValueError, match="need a draft"):
        run(verifier, generation_config=GenerationConfig(cactus_delta=0.75))


@pytest.mark.parametrize("engine", ["auto", "stock"])
def test_a_call_in_order_does_not_warn(verifier, draft, engine):
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        run(verifier, assistant_model=draft, cactus_delta=0.75, cactus_engine=engine)
        look_up = {"prompt_lookup_num_tokens": 3, "num_assistant_tokens": None}
        run(verifier, **look_up, cactus_delta=0.75, cactus_engine=engine)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"num_assistant_tokens": 0}, ValueError, "num_assistant_tokens must be a whole number of at least 1"),
        ({"num_assistant_tokens": 2.5}, ValueError, "num_assistant_tokens must be a whole number of at least 1"),
        ({"assistant_confidence_threshold": 2}, ValueError, "assistant_confidence_threshold must be between 0 and 1"),
        (
            {"assistant_confidence_threshold": "x"},
            TypeError,
            "assistant_confidence_threshold must be a number, between",
        ),
        ({"assistant_early_exit": 1}, ValueError, "several .assistant_early_exit, assistant_model."),
        ({"prompt_lookup_num_tokens": 0}, ValueError, "prompt_lookup_num_tokens must be a whole number of at least 1"),
        ({"assistant_model": "gpt2"}, TypeError, "assistant_model must be a model, got str"),
        ({"cactus_delta": ["0.5"]}, TypeError, "with one for each prompt"),
        ({"cactus_delta": [[0.5]]}, TypeError, "with one for each prompt"),
        ({"cactus_delta": [True]}, TypeError, "with one for each prompt"),
    ],
)
def test_bad_drafts_and_lists(verifier, draft, options, error, message):
    with pytest.raises(error, match=message):
        run(verifier, **({"assistant_model": draft, "cactus_delta": 0.5} | options))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"prompt_lookup_num_tokens": -1}, "prompt_lookup_num_tokens must be a whole number of at least 1"),
        ({"assistant_early_exit": 99}, "must be a layer from 1 to 2"),
    ],
)
def test_bad_drafts_without_a_model(verifier, options, message):
    with pytest.raises(ValueError, match=message):
        run(verifier, cactus_delta=0.5, **options)


@pytest.mark.parametrize("delta", [np.float32(0.5), np.int64(1), np.array([0.5])])
def test_numpy_numbers_are_numbers(verifier, draft, delta):
    run(verifier, assistant_model=draft, cactus_delta=delta)


def test_a_warning_points_at_the_callers_line(verifier, draft):
    with pytest.warns(UserWarning, match="no effect without sampling") as seen:
        transformers_cactus.generate(
            verifier, **COMMON | {"do_sample": False}, assistant_model=draft, cactus_delta=0.5
        )
    assert [warning.filename for warning in seen if "no effect" in str(warning.message)] == [__file__]


def test_options_without_a_rule_are_an_error(verifier, draft):
    with pytest.raises(ValueError, match="cactus_engine needs a rule"):
        transformers_cactus.generate(verifier, **COMMON, assistant_model=draft, cactus_engine="fast")


def test_a_rules_name_as_an_option_is_recognised(verifier, draft):
    with pytest.raises(TypeError, match=r"'cactus_lenience'. Did you mean cactus_rule='lenience'\?"):
        transformers_cactus.generate(verifier, **COMMON, assistant_model=draft, cactus_lenience=2.0)


@pytest.mark.parametrize("call", [transformers_cactus.generate, transformers_cactus.enable])
@pytest.mark.parametrize(("model", "named"), [("gpt2", "str"), (transformers.LlamaForCausalLM, "the class Llama")])
def test_what_is_no_model_is_named(call, model, named):
    with pytest.raises(TypeError, match=f"needs a model that has generate.*got {named}"):
        call(model)
