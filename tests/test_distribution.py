"""What `generate` emits, against the exact law (`reference.py`), for every rule, kind of draft and sampling setting.

Samples are drawn with a fixed seed and compared in several views (`VIEWS`), each with the threshold
`chi_square.ALPHA`: a sample of the right law fails a test with a probability below 1e-4 (see `chi_square.py`). The
same samples must fail against the laws of other rules. Those power checks look at the tokens only, not at the
reported origins.
"""

import copy
import functools
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch
import transformers

import chi_square
import transformers_cactus
from reference import (
    Distributions,
    Outcome,
    Sampling,
    drafted_position,
    exact_law,
    look_up_drafter,
    model_drafter,
    seen_as,
    verifier_law,
)
from transformers_cactus import Cactus, CactusExact, Lenience, Speculative, effective_distribution

pytestmark = pytest.mark.filterwarnings("ignore:.*can emit tokens that the verifier excludes:UserWarning")

SAMPLES = {"stock": 150, "fast": 3000}
"""Texts of a sample. The stock engine makes one per call, in about 25 ms of processor time."""

MANY_SAMPLES = {"stock": 1500, "fast": 100_000}
"""Texts of a sample in slow tests."""

ROWS = {"stock": 1, "fast": 3000}
"""Texts of a call, at most."""

ENGINES = ["stock", "fast"]
"""Engines that the tests run over."""

SEED = 2026
PROMPT = (1, 2, 3)
REPEATING_PROMPT = (5, 1, 2, 5, 1)
PLAIN = Sampling()

TOKEN_VIEWS = {
    "first token": lambda outcome: outcome[0][0],
    "second token": lambda outcome: outcome[0][1],
    "third token": lambda outcome: outcome[0][2],
    "first two tokens": lambda outcome: outcome[0][:2],
    "text": lambda outcome: outcome[0],
}
"""Functions of an outcome whose laws are compared: the joint law sees everything, a marginal sees it sharply."""

ORIGIN_VIEWS = {
    "origins": lambda outcome: outcome[1],
    "first token and its origin": lambda outcome: (outcome[0][0], outcome[1][0]),
    "second token and its origin": lambda outcome: (outcome[0][1], outcome[1][1]),
}
"""The same with the reported origins of the tokens."""

VIEWS = TOKEN_VIEWS | ORIGIN_VIEWS


OPTION = {
    "lenience": "cactus_factor",
    "ensemble": "cactus_ensemble_weight",
    "ensemble-within": "cactus_ensemble_weight",
    "optimal": "cactus_multiplier",
    "top-k": "cactus_top_k",
    "typical": "cactus_posterior_threshold",
    "typical-argmax": "cactus_posterior_threshold",
}
"""By rule, the option that takes its parameter, where that is not `cactus_delta`."""

VARIANT = {
    "ensemble-within": {"cactus_rule": "ensemble", "cactus_within_support": True},
    "typical-argmax": {"cactus_rule": "typical", "cactus_recovery_from": "argmax"},
}
"""Options of rules that `generate` has under another name."""


@dataclass(frozen=True)
class Case:
    """A call of `generate`, as far as its law depends on it."""

    rule: str
    budget: float = 0.0
    """`cactus_delta`, or the option in `OPTION`."""
    draft: str = "negated"
    """A kind of `draft_model`, or "look-up"."""
    block: int = 2
    vocab: int = 8
    new_tokens: int = 3
    sampling: Sampling = PLAIN

    def __str__(self) -> str:
        warped = "" if self.sampling == PLAIN else "-warped"
        return f"{self.rule}-{self.budget:g}-{self.draft}-{self.block}of{self.new_tokens}-vocab{self.vocab}{warped}"

    @property
    def prompt(self) -> tuple[int, ...]:
        return REPEATING_PROMPT if self.draft == "look-up" else PROMPT

    def options(self) -> dict[str, Any]:
        """The options of the call."""
        options: dict[str, Any] = {
            "do_sample": True,
            "max_new_tokens": self.new_tokens,
            "temperature": self.sampling.temperature,
            "top_k": self.sampling.top_k,
            "top_p": self.sampling.top_p,
            "cactus_rule": self.rule,
        }
        if self.rule != "speculative":
            options[OPTION.get(self.rule, "cactus_delta")] = self.budget
        options |= VARIANT.get(self.rule, {})
        if self.draft == "look-up":
            return options | {"prompt_lookup_num_tokens": self.block}
        return options | {
            "assistant_model": draft_model(self.draft, self.vocab),
            "num_assistant_tokens": self.block,
            "num_assistant_tokens_schedule": "constant",
            "assistant_confidence_threshold": 0.0,
        }

    def options_with(self, rule: transformers_cactus.AcceptanceRule) -> dict[str, Any]:
        """The options of the call with a rule object in the place of the rule."""
        options = {name: value for name, value in self.options().items() if not name.startswith("cactus_")}
        return options | {"cactus_rule": rule}


def tiny_llama(vocab: int, *, seed: int, layers: int) -> Any:
    """A Llama whose next-token distributions are far from uniform and differ from prefix to prefix."""
    config = transformers.LlamaConfig(
        vocab_size=vocab,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=layers,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=32,
        initializer_range=0.3,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
    )
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return transformers.LlamaForCausalLM(config).eval()


@functools.cache
def verifier_model(vocab: int) -> Any:
    return tiny_llama(vocab, seed=0, layers=2)


@functools.cache
def draft_model(kind: str, vocab: int) -> Any:
    """A draft of one kind.

    Args:
        kind: "other" is another model. "negated" is the verifier with its output matrix negated: it likes best what
            the verifier likes least, so that most of its tokens are rejected. "swapped" is the verifier with two
            tokens exchanged, its favourite and its least likely one: what is rejected is then nearly always the same
            token, and only one other is right in its place. "contrary" is the verifier with the outputs of two tokens
            negated, its second favourite and its least likely one: the shape of the residual then depends on delta.
        vocab: size of the vocabulary.
    """
    if kind == "other":
        return tiny_llama(vocab, seed=1, layers=1)
    draft = copy.deepcopy(verifier_model(vocab))
    weight = draft.lm_head.weight.data
    with torch.no_grad():
        ranking = draft(torch.tensor([PROMPT])).logits[0, -1].argsort(descending=True).tolist()
    if kind == "negated":
        weight.neg_()
    elif kind == "swapped":
        weight[[ranking[0], ranking[-1]]] = weight[[ranking[-1], ranking[0]]]
    else:
        assert kind == "contrary"
        weight[[ranking[1], ranking[-1]]] *= -1
    return draft


def outcomes_of(output: Any, prompt_length: int) -> list[Outcome]:
    """The generated tokens and their origins of each row."""
    texts = output.sequences[:, prompt_length:].tolist()
    return [
        (tuple(text), tuple(origin.value for origin in statistics.origins))
        for text, statistics in zip(texts, output.acceptance.sequences, strict=True)
    ]


def draw(n: int, engine: str, verifier: Any, prompt: tuple[int, ...], **options: Any) -> list[Outcome]:
    """Generate texts through the public entry point, in as many calls as it takes.

    Args:
        n: how many.
        engine: which engine.
        verifier: the verifier.
        prompt: the prompt of them all.
        **options: of the call.
    """
    outcomes: list[Outcome] = []
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with torch.random.fork_rng():
            torch.manual_seed(SEED)
            while len(outcomes) < n:
                input_ids = torch.tensor([prompt] * min(ROWS[engine], n - len(outcomes)))
                output = transformers_cactus.generate(
                    verifier, input_ids=input_ids, cactus_engine=engine, return_dict_in_generate=True, **options
                )
                outcomes += outcomes_of(output, len(prompt))
    finally:
        torch.set_num_threads(threads)
    return outcomes


@functools.cache
def sample(case: Case, engine: str, n: int) -> list[Outcome]:
    """A sample, drawn once for all tests that look at it."""
    return draw(n, engine, verifier_model(case.vocab), case.prompt, **case.options())


@functools.cache
def distributions(
    model: Any, prompt: tuple[int, ...], new_tokens: int, sampling: Sampling, times: int = 1
) -> Distributions:
    return Distributions(model, prompt, new_tokens, sampling, times)


def verifier_of(case: Case) -> Distributions:
    return distributions(verifier_model(case.vocab), case.prompt, case.new_tokens, case.sampling)


@functools.cache
def law(case: Case, engine: str, prompt: tuple[int, ...] | None = None) -> dict[Outcome, float]:
    """The exact law of a case. Engines differ in what they draft, and in nothing else."""
    prompt = prompt or case.prompt
    if case.draft == "look-up":
        drafter = look_up_drafter(prompt, case.block, case.new_tokens, case.vocab, engine)
    else:
        # transformers warps a draft twice.
        times = {"stock": 2, "fast": 1}[engine]
        model = draft_model(case.draft, case.vocab)
        draft = distributions(model, prompt, case.new_tokens, case.sampling, times)
        drafter = model_drafter(draft, case.block, case.new_tokens)
    verifier = distributions(verifier_model(case.vocab), prompt, case.new_tokens, case.sampling)
    return exact_law(verifier, drafter, case.new_tokens, case.rule, case.budget)


def p_values(outcomes: list[Outcome], expected: dict[Outcome, float], views: dict[str, Any]) -> dict[str, float]:
    return {name: chi_square.p_value(map(view, outcomes), seen_as(expected, view)) for name, view in views.items()}


def fits(outcomes: list[Outcome], expected: dict[Outcome, float]) -> None:
    """Fail unless a sample looks as if it were from the expected law, origins included."""
    values = p_values(outcomes, expected, VIEWS)
    assert min(values.values()) > chi_square.ALPHA, values


def does_not_fit(outcomes: list[Outcome], expected: dict[Outcome, float]) -> None:
    """Fail unless the tokens of a sample are visibly not from the expected law."""
    values = p_values(outcomes, expected, TOKEN_VIEWS)
    assert min(values.values()) < chi_square.ALPHA, values


EACH_RULE = [Case("speculative"), Case("cactus", 0.5), Case("cactus-exact", 0.5), Case("lenience", 3.0)]
"""One case per rule, with the negated verifier as the draft."""

WARPED = Case("cactus-exact", 0.3, "other", block=3, new_tokens=4, sampling=Sampling(1.3, top_k=6, top_p=0.95))
LOOK_UP = Case("lenience", 3.0, "look-up", new_tokens=4)
SWAPPED = Case("cactus", 0.5, "swapped", block=3, new_tokens=4)
CONTRARY = Case("cactus", 1.0, "contrary")
LOSSLESS, CACTUS, EXACT, LENIENCE = EACH_RULE

CUT = Sampling(top_k=5)
OPTIMAL = Case("optimal", 3.0)
ENSEMBLE = Case("ensemble", 0.5, sampling=CUT)
WITHIN = Case("ensemble-within", 0.5, sampling=CUT)
TYPICAL = Case("typical", 0.2, "other")
ARGMAX = Case("typical-argmax", 0.2, "other")
TOP_K = Case("top-k", 3, "other")
CHI_SQUARE = Case("chi-square", 0.5)
TOTAL_VARIATION = Case("total-variation", 0.3)
REVERSE_KL = Case("reverse-kl", 0.4)
HELLINGER = Case("squared-hellinger", 0.05)
JENSEN_SHANNON = Case("jensen-shannon", 0.1)
OTHER_RULES = [
    OPTIMAL,
    ENSEMBLE,
    WITHIN,
    TYPICAL,
    ARGMAX,
    TOP_K,
    CHI_SQUARE,
    TOTAL_VARIATION,
    REVERSE_KL,
    HELLINGER,
    JENSEN_SHANNON,
]
"""One case per rule that is not the paper's."""

QUICK = {
    "stock": [LOSSLESS, CACTUS, OPTIMAL, TYPICAL, WARPED, LOOK_UP],
    "fast": [*EACH_RULE, *OTHER_RULES, WARPED, LOOK_UP, SWAPPED, CONTRARY],
}
"""By engine, every rule and every kind of draft."""

LONG = [
    *OTHER_RULES,
    *(
        Case(rule, budget, "look-up", new_tokens=4)
        for rule, budget in (("optimal", 1.0), ("typical", 0.2), ("top-k", 3))
    ),
    Case("ensemble-within", 0.3, "look-up", new_tokens=4),
    Case("optimal", 0.7, "other", block=3, new_tokens=4, sampling=Sampling(0.6, top_k=6, top_p=0.95)),
    EXACT,
    LENIENCE,
    Case("cactus", 0.0),
    Case("cactus-exact", 0.0),
    Case("cactus", 0.1),
    Case("cactus", 2.0, "other", block=1),
    SWAPPED,
    CONTRARY,
    Case("cactus", 0.5, "negated", block=3, new_tokens=4),
    Case("cactus-exact", 0.25, "look-up", new_tokens=4),
    Case("cactus-exact", 0.5, "swapped", vocab=32, block=1),
    Case("lenience", 1.5, "other", vocab=16),
    Case("speculative", 0.0, "swapped", sampling=Sampling(0.7, top_p=0.9)),
    Case("cactus", 0.75, "negated", sampling=Sampling(2.0, top_k=5)),
    Case("lenience", 2.0, "other", block=1, sampling=Sampling(0.6, top_k=6, top_p=0.95)),
    Case("cactus", 0.5, "look-up", block=3, new_tokens=4, sampling=Sampling(1.5, top_k=5)),
    Case("speculative", 0.0, "look-up"),
]

over_engines = pytest.mark.parametrize("engine", ENGINES)


@pytest.mark.parametrize(("engine", "case"), [(engine, case) for engine in ENGINES for case in QUICK[engine]], ids=str)
def test_texts_and_origins_have_the_exact_law(engine, case):
    fits(sample(case, engine, SAMPLES[engine]), law(case, engine))


@pytest.mark.slow
@over_engines
@pytest.mark.parametrize("case", LONG, ids=str)
def test_many_texts_and_origins_have_the_exact_law(case, engine):
    fits(sample(case, engine, MANY_SAMPLES[engine]), law(case, engine))


TOLD_APART = {
    "stock": [
        (LOSSLESS, CACTUS),
        (LOSSLESS, EXACT),
        (CACTUS, LOSSLESS),
        (LOOK_UP, replace(LOOK_UP, rule="speculative")),
        (OPTIMAL, replace(OPTIMAL, rule="speculative")),
    ],
    "fast": [
        *((case, other) for case in EACH_RULE for other in EACH_RULE if case != other),
        *((case, replace(case, rule="speculative")) for case in OTHER_RULES),
        (ENSEMBLE, WITHIN),
        (WITHIN, ENSEMBLE),
        (TYPICAL, ARGMAX),
        (ARGMAX, TYPICAL),
        (TOP_K, replace(TOP_K, budget=4)),
        (OPTIMAL, replace(OPTIMAL, budget=0.5)),
        (TOTAL_VARIATION, replace(TOTAL_VARIATION, budget=0.15)),
        (HELLINGER, REVERSE_KL),
        (JENSEN_SHANNON, CHI_SQUARE),
        (WARPED, replace(WARPED, rule="speculative")),
        (WARPED, replace(WARPED, block=1)),
        (LOOK_UP, replace(LOOK_UP, rule="cactus-exact", budget=0.3)),
        (LOOK_UP, replace(LOOK_UP, block=1)),
        (SWAPPED, replace(SWAPPED, budget=0.3)),
    ],
}
"""By engine, pairs that a sample of it tells apart with a probability above 0.999."""


@pytest.mark.parametrize(
    ("engine", "case", "other"), [(engine, *pair) for engine in ENGINES for pair in TOLD_APART[engine]], ids=str
)
def test_texts_of_one_rule_do_not_pass_for_those_of_another(engine, case, other):
    does_not_fit(sample(case, engine, SAMPLES[engine]), law(other, engine))


@pytest.mark.skipif(not hasattr(transformers.GenerationConfig(), "assistant_ensemble_weight"), reason="newer releases")
def test_ensemble_has_the_law_of_transformers_own():
    # Both against the exact law: the rule above, and transformers' option here.
    options = {name: value for name, value in ENSEMBLE.options().items() if not name.startswith("cactus_")}
    draft = copy.deepcopy(options.pop("assistant_model"))
    for name in ("num_assistant_tokens", "num_assistant_tokens_schedule", "assistant_confidence_threshold"):
        setattr(draft.generation_config, name, options.pop(name))
    verifier = verifier_model(ENSEMBLE.vocab)
    texts = []
    with torch.random.fork_rng():
        torch.manual_seed(SEED)
        for _ in range(SAMPLES["stock"]):
            output = verifier.generate(
                torch.tensor([PROMPT]), assistant_model=draft, assistant_ensemble_weight=ENSEMBLE.budget, **options
            )
            texts.append(((*output[0, len(PROMPT) :].tolist(),), ()))
    values = p_values(texts, law(ENSEMBLE, "stock"), TOKEN_VIEWS)
    assert min(values.values()) > chi_square.ALPHA, values
    does_not_fit(texts, law(replace(ENSEMBLE, rule="speculative"), "stock"))


@pytest.mark.parametrize(("engine", "n"), [("fast", 3000), pytest.param("stock", 1500, marks=pytest.mark.slow)])
def test_a_wrong_residual_is_noticed(engine, n):
    def outcomes(rule):
        return draw(n, engine, verifier_model(8), PROMPT, **SWAPPED.options_with(rule))

    fits(outcomes(Cactus(0.5)), law(SWAPPED, engine))
    does_not_fit(outcomes(VerifierAsResidual(0.5)), law(SWAPPED, engine))


class VerifierAsResidual(Cactus):
    """Wrong: recovers from the verifier's distribution instead of the residual."""

    def recovery_weights(self, tokens, verifier_probs, draft_probs):
        return verifier_probs


def test_a_residual_that_ignores_delta_is_noticed():
    def outcomes(rule):
        return draw(9000, "fast", verifier_model(8), PROMPT, **CONTRARY.options_with(rule))

    fits(outcomes(Cactus(1.0)), law(CONTRARY, "fast"))
    does_not_fit(outcomes(UnscaledResidual(1.0)), law(CONTRARY, "fast"))


class UnscaledResidual(Cactus):
    """Wrong: recovers from the lossless residual, as if no token had been raised."""

    def recovery_weights(self, tokens, verifier_probs, draft_probs):
        return Speculative().recovery_weights(tokens, verifier_probs, draft_probs)


def test_rows_of_a_batch_have_the_law_that_they_would_have_alone():
    prompts, budgets = [(1, 2, 3), (4, 0, 6, 6, 1)], [0.1, 1.0]
    rows = SAMPLES["fast"]
    input_ids = torch.tensor([[0, 0, *prompts[0]], prompts[1]]).repeat(rows, 1)
    attention_mask = torch.tensor([[0, 0, 1, 1, 1], [1, 1, 1, 1, 1]]).repeat(rows, 1)
    options = CACTUS.options() | {"cactus_delta": budgets * rows}
    with torch.random.fork_rng():
        torch.manual_seed(SEED)
        output = transformers_cactus.generate(
            verifier_model(8),
            input_ids=input_ids,
            attention_mask=attention_mask,
            cactus_engine="fast",
            return_dict_in_generate=True,
            **options,
        )
    outcomes = outcomes_of(output, 5)
    for row, (prompt, budget) in enumerate(zip(prompts, budgets, strict=True)):
        fits(outcomes[row::2], law(replace(CACTUS, budget=budget), "fast", prompt))


@pytest.mark.slow
@over_engines
def test_many_texts_at_delta_zero_are_the_verifiers_own(engine):
    case = Case("cactus", 0.0)
    outcomes = sample(case, engine, MANY_SAMPLES[engine])
    own = verifier_law(verifier_of(case), case.new_tokens)
    assert chi_square.p_value((text for text, _ in outcomes), own) > chi_square.ALPHA


# The tests' own tools.


@over_engines
@pytest.mark.parametrize("case", [LOSSLESS, replace(CACTUS, budget=0.0), replace(WARPED, budget=0.0)], ids=str)
def test_reference_without_a_budget_is_the_verifiers_own_law(case, engine):
    own = verifier_law(verifier_of(case), case.new_tokens)
    texts = seen_as(law(case, engine), TOKEN_VIEWS["text"])
    assert texts.keys() == own.keys()
    assert max(abs(texts[text] - own[text]) for text in own) < 1e-12


@pytest.mark.parametrize(
    ("rule", "name", "budget"),
    [
        (Speculative(), "speculative", 0.0),
        (Cactus(0.3), "cactus", 0.3),
        (CactusExact(0.3), "cactus-exact", 0.3),
        (Lenience(2.5), "lenience", 2.5),
    ],
    ids=str,
)
@pytest.mark.parametrize("method", ["definition", "sorted"])
def test_reference_position_is_the_effective_distribution(rule, name, budget, method):
    generator = np.random.default_rng(SEED)
    p, q = generator.dirichlet(np.full(12, 0.3), size=(2, 50))
    q[:10, :4] = 0
    q /= q.sum(-1, keepdims=True)
    emitted = effective_distribution(torch.from_numpy(p), torch.from_numpy(q), rule, method=method).numpy()
    expected = [sum(drafted_position(*pair, name, budget).values()) for pair in zip(p, q, strict=True)]
    np.testing.assert_allclose(emitted, expected, atol=1e-9)


def test_chi_square_is_calibrated():
    generator = np.random.default_rng(SEED)
    texts = dict(enumerate(seen_as(law(CACTUS, "stock"), TOKEN_VIEWS["text"]).values()))
    counts = generator.multinomial(300, list(texts.values()), size=500)
    values = [chi_square.p_value(np.repeat(np.arange(len(row)), row), texts) for row in counts]
    # Six binomial standard deviations.
    assert abs(np.mean(np.array(values) < 0.1) - 0.1) < 0.081
    assert abs(np.mean(np.array(values) > 0.5) - 0.5) < 0.135


def test_chi_square_rejects_what_cannot_happen():
    assert chi_square.p_value([0] * 50 + [1] * 50, {0: 0.5, 1: 0.5}) == 1.0
    assert chi_square.p_value([0] * 50 + [1] * 49 + [2], {0: 0.5, 1: 0.5}) == 0.0
    assert chi_square.p_value([0] * 50 + [1] * 49 + [2], {0: 0.5, 1: 0.5, 2: 0.0}) == 0.0
    assert chi_square.p_value([0] * 75 + [1] * 25, {0: 0.5, 1: 0.5}) == pytest.approx(5.733e-7, rel=1e-3)


def test_small_bins_are_merged_until_each_group_is_large_enough():
    expected = np.array([50.0, 1.0, 7.0, 3.0, 12.0, 4.0, 6.0])
    group = chi_square.merge_small_bins(expected, 8.0)
    assert np.unique(group).tolist() == [0, 1, 2, 3]
    assert np.bincount(group, expected).min() >= 8.0
