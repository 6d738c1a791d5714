"""Schedules for `delta` and running budgets: their law by enumeration, and that a budget is never exceeded.

Samples have a fixed seed and are compared in the views of `test_distribution.py`, with its false-alarm rate.
"""

import functools
import math

import numpy as np
import pytest
import torch

import chi_square
import tiny_models
import transformers_cactus
import transformers_cactus.rows
from reference import Sampling, drafted_position, exact_law, model_drafter, seen_as
from test_distribution import VIEWS, distributions, draft_model, outcomes_of, verifier_model
from transformers_cactus import Cactus, CactusExact, DeltaBetween, Optimal, Speculative, TotalVariation

PROMPT = (1, 2, 3)
VOCAB, NEW = 8, 3
GENEROUS = 2.0


def call(engine, rows, *, seed=2026, **options):
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return transformers_cactus.generate(
            verifier_model(VOCAB),
            **{"inputs": torch.tensor([PROMPT] * rows), "assistant_model": draft_model("negated", VOCAB)}
            | {"num_assistant_tokens": 2, "num_assistant_tokens_schedule": "constant", "max_new_tokens": NEW}
            | {"assistant_confidence_threshold": 0.0, "do_sample": True, "top_k": 0, "cactus_engine": engine}
            | {"return_dict_in_generate": True, "cactus_delta": GENEROUS}
            | options,
        )


def both(times):
    return (
        distributions(verifier_model(VOCAB), PROMPT, NEW, Sampling()),
        distributions(draft_model("negated", VOCAB), PROMPT, NEW, Sampling(), times),
    )


def law(of_text, rule="cactus"):
    """The exact law where the budget of a position depends on the generated tokens before it."""
    verifier, draft = both(1)
    return exact_law(verifier, model_drafter(draft, 2, NEW), NEW, rule, of_text)


def fits(outcomes, expected):
    return min(chi_square.p_value(map(view, outcomes), seen_as(expected, view)) for view in VIEWS.values())


# Schedules.


def by_parity(generated):
    """Strict at the start and behind even tokens, generous behind odd ones."""
    return GENEROUS if generated and generated[-1] % 2 else 0.1


def test_a_schedule_has_the_exact_law():
    outcomes = outcomes_of(call("fast", 4000, cactus_delta=by_parity), len(PROMPT))
    assert fits(outcomes, law(by_parity)) > chi_square.ALPHA
    # A fixed delta, and the schedule a token late, are told apart.
    assert fits(outcomes, law(lambda _: GENEROUS)) < chi_square.ALPHA
    assert fits(outcomes, law(lambda text: by_parity(text[:-1]))) < chi_square.ALPHA


def test_a_schedule_has_the_exact_law_in_the_stock_engine():
    calls = (call("stock", 1, seed=seed, cactus_delta=by_parity) for seed in range(150))
    outcomes = [outcomes_of(output, len(PROMPT))[0] for output in calls]
    assert fits(outcomes, law(by_parity)) > chi_square.ALPHA
    assert fits(outcomes, law(lambda _: GENEROUS)) < chi_square.ALPHA


@pytest.mark.parametrize("engine", ["fast", "stock"])
@pytest.mark.parametrize("rule", ["cactus", "cactus-exact", "total-variation", "jensen-shannon"])
def test_a_constant_schedule_is_the_number(engine, rule):
    number = call(engine, 1, cactus_rule=rule, cactus_delta=0.3)
    schedule = call(engine, 1, cactus_rule=rule, cactus_delta=lambda _: 0.3)
    assert torch.equal(number.sequences, schedule.sequences)
    assert number.acceptance.divergence == pytest.approx(schedule.acceptance.divergence, abs=1e-6)


def test_a_schedule_sees_each_rows_generated_tokens():
    verifier, draft = tiny_models.pair("llama")
    inputs = tiny_models.prompts([7, 3, 5])
    seen = []

    def schedule(generated):
        seen.append(tuple(generated))
        return 0.5

    torch.manual_seed(0)
    output = transformers_cactus.generate(
        verifier, **inputs, assistant_model=draft, do_sample=True, max_new_tokens=12, cactus_delta=schedule
    )
    texts = [tuple(row) for row in output[:, 7:].tolist()]
    # Every drafted position of what was emitted was asked about, and nothing but texts with a drafted tail.
    assert () in seen and all(len(text) < 12 for text in seen)
    for text in texts:
        assert sum(text[: len(prefix)] == prefix for prefix in seen if prefix) >= 3


def test_delta_between_two_marks():
    schedule = DeltaBetween(opening=7, closing=8, inside=0.5, outside=0.1)
    cases = {(): 0.1, (1, 2): 0.1, (7,): 0.5, (1, 7, 3): 0.5, (7, 3, 8): 0.1, (7, 8, 7): 0.5, (8,): 0.1}
    assert {text: schedule(list(text)) for text in cases} == cases
    thinking = DeltaBetween(7, 8, 0.5, starts_inside=True)
    assert (thinking([]), thinking([3]), thinking([3, 8, 1])) == (0.5, 0.5, 0.0)
    with pytest.raises(ValueError, match="inside must be at least 0"):
        DeltaBetween(7, 8, -1.0)
    with pytest.raises(ValueError, match="opening and closing are both token 0"):
        DeltaBetween(0, 0, 0.5)
    with pytest.raises(ValueError, match="opening must be a token id, at least 0, got -1"):
        DeltaBetween(-1, 8, 0.5)
    with pytest.raises(TypeError, match=r"opening must be a token id, got '<think>': tokenizer.convert_tokens_to_ids"):
        DeltaBetween("<think>", "</think>", 0.5)
    output = call("fast", 200, cactus_delta=DeltaBetween(opening=2, closing=5, inside=GENEROUS))
    for text, row in zip(output.sequences[:, 3:].tolist(), output.acceptance.sequences, strict=True):
        for at, spent in enumerate(row.divergence):
            inside = [token for token in text[:at] if token in (2, 5)][-1:] == [2]
            assert inside or spent == 0
    assert output.acceptance.total_divergence > 0


# Budgets.


def kl(x, y):
    return float(np.where(x > 0, x * np.log(np.maximum(x, 1e-300) / y), 0).sum())


@functools.cache
def affordable(prefix, left, rule):
    """The largest delta whose emitted distribution stays within what is left, and what it spends, by bisection."""
    verifier, draft = both(1)

    def spent(delta):
        return kl(sum(drafted_position(draft[prefix], verifier[prefix], rule, delta).values()), verifier[prefix])

    if spent(GENEROUS) <= left:
        return GENEROUS, spent(GENEROUS)
    low, high = 0.0, GENEROUS
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if spent(middle) <= left else (low, middle)
    return low, left


def budget_law(budget, rule):
    """The exact law under a running budget: all positions but the last are drafted, so it follows from the text."""

    def of_text(text):
        left = budget
        for at in range(len(text)):
            left -= affordable(text[:at], left, rule)[1]
        return affordable(text, left, rule)[0] if left > 1e-3 * budget else 0.0

    return law(of_text, rule)


@pytest.mark.parametrize("rule", ["cactus", pytest.param("cactus-exact", marks=pytest.mark.slow)])
# Cut at the first position, at the second, and nowhere.
@pytest.mark.parametrize("budget", [0.3, 1.5, 50.0])
def test_a_budget_has_the_exact_law(rule, budget):
    output = call("fast", 4000, cactus_rule=rule, cactus_budget=budget, cactus_certificate=True)
    outcomes = outcomes_of(output, len(PROMPT))
    assert fits(outcomes, budget_law(budget, rule)) > chi_square.ALPHA
    other = 1.5 if budget != 1.5 else 0.3
    assert fits(outcomes, budget_law(other, rule)) < chi_square.ALPHA
    # What is recorded is what that law spends.
    for (text, _), row in list(zip(outcomes, output.acceptance.sequences, strict=True))[:200]:
        first = affordable((), budget, rule)[1]
        second = affordable(text[:1], budget - first, rule)[1] if budget - first > 1e-3 * budget else 0.0
        assert row.certificate == pytest.approx([first, second, 0.0], rel=1e-3, abs=1e-6)


def spending(engine, rows, budget, *, new_tokens=40, **options):
    verifier, draft = tiny_models.pair("llama")
    inputs = tiny_models.prompts([7, 3, 5][:rows])
    torch.manual_seed(0)
    return transformers_cactus.generate(
        verifier,
        **inputs,
        **{"assistant_model": draft, "do_sample": True, "top_k": 0, "max_new_tokens": new_tokens}
        | {"return_dict_in_generate": True, "cactus_engine": engine, "cactus_budget": budget}
        | {"cactus_certificate": True, "cactus_delta": 0.5, "num_assistant_tokens": 4}
        | options,
    )


@pytest.mark.parametrize(
    ("engine", "rows", "options"),
    [
        ("fast", 3, {}),
        ("fast", 3, {"cactus_delta": math.inf}),
        ("fast", 3, {"cactus_rule": "total-variation"}),
        ("stock", 1, {}),
        pytest.param("stock", 1, {"cactus_delta": math.inf}, marks=pytest.mark.slow),
    ],
)
def test_a_budget_is_never_exceeded_and_used(engine, rows, options):
    free = spending(engine, rows, math.inf, **options)
    budget = min(sum(row.certificate) for row in free.acceptance.sequences) / 3
    output = spending(engine, rows, budget, **options)
    for row in output.acceptance.sequences:
        assert 0.98 * budget < sum(row.certificate) <= budget + 1e-9
        assert row.certificate[-1] == 0
    certified = np.cumsum(output.acceptance.sequences[0].certificate)
    # Spent early, then nothing: the rest of the text is lossless.
    assert certified[len(certified) // 2] > 0.5 * budget


def test_one_budget_per_prompt_and_rows_that_leave():
    budgets = [0.5, 0.0, 4.0]
    output = spending("fast", 3, budgets, eos_token_id=list(range(20, 26)), pad_token_id=0)
    for row, budget in zip(output.acceptance.sequences, budgets, strict=True):
        assert sum(row.certificate) <= budget + 1e-9
    assert sum(output.acceptance.sequences[1].certificate) == 0
    twice = spending("fast", 3, torch.tensor(budgets), num_return_sequences=2, new_tokens=20)
    for row, budget in zip(twice.acceptance.sequences, np.repeat(budgets, 2), strict=True):
        assert sum(row.certificate) <= budget + 1e-9
    with pytest.warns(UserWarning, match="one after another"):
        apart = spending("stock", 3, budgets, new_tokens=12)
    for row, budget in zip(apart.acceptance.sequences, budgets, strict=True):
        assert sum(row.certificate) <= budget + 1e-9


def windows(certificate, size):
    """The sums of what the tokens of each window spend."""
    return [sum(certificate[at : at + size]) for at in range(0, len(certificate), size)]


@pytest.mark.parametrize(
    ("engine", "rows", "size", "options"),
    [
        # Blocks of 4: windows that are longer, and shorter.
        ("fast", 3, 7, {}),
        ("fast", 3, 2, {}),
        ("fast", 1, 7, {"cactus_delta": math.inf}),
        ("fast", 2, 7, {"num_return_sequences": 2, "cactus_rule": "total-variation"}),
        ("stock", 1, 2, {}),
        ("stock", 2, 7, {}),
    ],
)
@pytest.mark.filterwarnings("ignore:.*one after another:UserWarning")
def test_a_budget_for_a_window_is_never_exceeded_and_used_again(engine, rows, size, options):
    budget = 0.2
    whole, output = (
        spending(engine, rows, budget, num_assistant_tokens=4, **options | window)
        for window in ({}, {"cactus_budget_window": size})
    )
    for row in output.acceptance.sequences:
        spent = windows(row.certificate, size)
        assert max(spent) <= budget + 1e-9
        # Every window spends, and all but the last, whose final token is never drafted, spend most of it.
        assert sum(nats > 0.5 * budget for nats in spent[:-1]) > 0.6 * len(spent[:-1])
    assert output.acceptance.total_certificate > 2 * whole.acceptance.total_certificate


def test_a_block_across_two_windows_is_charged_to_both():
    output = spending("fast", 3, 0.2, num_assistant_tokens=4, cactus_budget_window=7, num_return_sequences=3)
    crossing = 0
    for row in output.acceptance.sequences:
        start = 0
        for drafted, accepted in zip(row.drafted_per_round, row.accepted_per_round, strict=True):
            edge = -(-start // 7) * 7
            if start < edge < start + min(accepted + 1, drafted):
                # What one window has spent is not what the other one lacks: the block goes on with a fresh budget.
                before, behind = row.certificate[edge - 7 : edge], row.certificate[edge : start + accepted + 1]
                crossing += sum(before) > 0.199 and sum(behind) > 0.01
            start += accepted + 1
    assert crossing >= 3


def window_law(budget, rule, size):
    """As `budget_law`, with the budget afresh in every window."""

    def of_text(text):
        left = budget
        for at in range(len(text)):
            left = (budget if at % size == 0 else left) - affordable(
                text[:at], budget if at % size == 0 else left, rule
            )[1]
        left = budget if len(text) % size == 0 else left
        return affordable(text, left, rule)[0] if left > 1e-3 * budget else 0.0

    return law(of_text, rule)


def test_a_budget_for_a_window_has_the_exact_law():
    output = call("fast", 4000, cactus_budget=0.3, cactus_budget_window=1, cactus_certificate=True)
    outcomes = outcomes_of(output, len(PROMPT))
    assert fits(outcomes, window_law(0.3, "cactus", 1)) > chi_square.ALPHA
    assert fits(outcomes, budget_law(0.3, "cactus")) < chi_square.ALPHA
    for (text, _), row in list(zip(outcomes, output.acceptance.sequences, strict=True))[:200]:
        expected = [affordable(text[:at], 0.3, "cactus")[1] for at in range(2)]
        assert row.certificate == pytest.approx([*expected, 0.0], rel=1e-3, abs=1e-6)


def test_a_window_as_long_as_the_text_is_no_window():
    plain, windowed = (spending("fast", 3, 0.5, **window) for window in ({}, {"cactus_budget_window": 40}))
    assert torch.equal(plain.sequences, windowed.sequences) and plain.acceptance == windowed.acceptance


def test_rows_that_leave_take_their_windows_along():
    budgets = [0.05, 0.3, 0.0]
    output = spending(
        "fast", 3, budgets, cactus_budget_window=5, eos_token_id=list(range(20, 26)), pad_token_id=0, new_tokens=60
    )
    assert len({len(row.certificate) for row in output.acceptance.sequences}) > 1
    for row, budget in zip(output.acceptance.sequences, budgets, strict=True):
        assert max(windows(row.certificate, 5)) <= budget + 1e-9


def test_no_budget_left_is_lossless_and_no_limit_changes_nothing():
    for budget, delta in ((0.0, 0.0), (math.inf, GENEROUS)):
        limited, plain = call("fast", 50, cactus_budget=budget), call("fast", 50, cactus_delta=delta)
        assert torch.equal(limited.sequences, plain.sequences)


def test_a_budget_without_a_report_and_without_draft_probabilities():
    tokens = call("fast", 300, cactus_budget=0.3, return_dict_in_generate=False)
    assert torch.equal(tokens, call("fast", 300, cactus_budget=0.3).sequences)
    output = spending("fast", 3, 0.7, assistant_model=None, prompt_lookup_num_tokens=3, cactus_delta=3.0)
    for row in output.acceptance.sequences:
        assert sum(row.certificate) <= 0.7 + 1e-9
    assert output.acceptance.total_certificate > 0.7


def test_a_budget_together_with_a_schedule():
    output = spending("fast", 3, 1.0, cactus_delta=lambda generated: 0.0 if len(generated) < 10 else 0.5)
    for row in output.acceptance.sequences:
        assert sum(row.certificate[:10]) == 0 < sum(row.certificate) <= 1 + 1e-9


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"cactus_budget": -1.0}, ValueError, "cactus_budget must be at least 0"),
        ({"cactus_budget": "1"}, TypeError, "cactus_budget must be a number"),
        ({"cactus_budget": [1.0, 2.0]}, ValueError, "2 numbers, the call has 1 prompt:"),
        (
            {"cactus_budget": 1.0, "cactus_budget_window": 0},
            ValueError,
            "cactus_budget_window must be at least 1 token",
        ),
        ({"cactus_budget": 1.0, "cactus_budget_window": 9.5}, TypeError, "must be a whole number of tokens, got 9.5"),
        (
            {"cactus_budget": 1.0, "cactus_budget_window": True},
            TypeError,
            "must be a whole number of tokens, got True",
        ),
        ({"cactus_budget_window": 100}, ValueError, "and there is none: pass cactus_budget beside it"),
        ({"cactus_budget": 1.0, "cactus_rule": Optimal(1.0)}, ValueError, "has no delta"),
        ({"cactus_budget": 1.0, "cactus_rule": Speculative()}, ValueError, "has no delta"),
        ({"cactus_budget": 1.0, "cactus_rule": Cactus(0.0), "cactus_verification": "block"}, ValueError, "leave out"),
        ({"cactus_delta": lambda _: -1.0}, ValueError, "what the schedule cactus_delta returns must be at least 0"),
        ({"cactus_delta": lambda _: "much"}, TypeError, "what the schedule cactus_delta returns must be a number"),
        ({"cactus_delta": lambda _: torch.ones(2)}, TypeError, r"must be one number, got a tensor of shape \[2\]"),
        ({"cactus_delta": int}, TypeError, "cactus_delta=<class 'int'> is called with the list of the token ids"),
        (
            {"cactus_delta": lambda: 0.5},
            TypeError,
            "must return a budget, but failed: .* takes 0 positional arguments",
        ),
        ({"cactus_delta": lambda x: -1.0 if x else 0.5}, ValueError, "what the schedule cactus_delta returns"),
        ({"cactus_delta": lambda _: 0.0, "cactus_verification": "block"}, ValueError, "leave out"),
    ],
)
def test_what_is_refused(options, error, message):
    if isinstance(options.get("cactus_rule"), transformers_cactus.AcceptanceRule):
        base = {"assistant_model": draft_model("negated", VOCAB), "do_sample": True, "max_new_tokens": NEW}
        with pytest.raises(error, match=message):
            transformers_cactus.generate(verifier_model(VOCAB), torch.tensor([PROMPT]), **base, **options)
    else:
        with pytest.raises(error, match=message):
            call("fast", 1, **options)


def test_options_that_need_a_rule():
    base = {"assistant_model": draft_model("negated", VOCAB), "do_sample": True, "max_new_tokens": NEW}
    for option in ({"cactus_budget": 1.0}, {"cactus_certificate": True}, {"cactus_verification": "block"}):
        with pytest.raises(ValueError, match="needs a rule: pass cactus_delta or cactus_rule"):
            transformers_cactus.generate(verifier_model(VOCAB), torch.tensor([PROMPT]), **base, **option)


def test_budgets_per_position_are_those_of_the_positions():
    generator = torch.Generator().manual_seed(0)
    q, p = (torch.randn(3, 4, 9, generator=generator) for _ in range(2))
    tokens = torch.randint(9, (3, 4), generator=generator)
    deltas = torch.rand(3, 4, generator=generator)
    rows = transformers_cactus.rows.Rows
    for rule_class in (Cactus, CactusExact, TotalVariation):
        rule = rule_class(0.0).with_deltas(deltas)
        phi = rule.acceptance_probability(tokens, rows(q), rows(p))
        for position in range(4):
            alone = rule_class(deltas[:, position])
            one = slice(position, position + 1)
            expected = alone.acceptance_probability(tokens[:, one], rows(q[:, one]), rows(p[:, one]))
            torch.testing.assert_close(phi[:, one], expected)
            found = rule.at(torch.full((3,), position))
            arguments = tokens[:, position], q[:, position].softmax(-1), p[:, position].softmax(-1)
            torch.testing.assert_close(found.recovery_weights(*arguments), alone.recovery_weights(*arguments))
