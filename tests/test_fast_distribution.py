"""What the rows of one call of the fast engine emit, against the exact law of each row alone.

`test_distribution.py` compares thousands of equal rows with the law; here rows differ in prompt, padding and budget,
and blocks go up to 8. See there for the thresholds.
"""

import functools

import numpy as np
import pytest
import torch
from scipy import stats

import chi_square
import transformers_cactus
from reference import Sampling, exact_law, model_drafter, seen_as
from test_distribution import Case, distributions, draft_model, sample, verifier_model

ROWS = 6000
CASE = Case("cactus", 0.5)
PROMPTS = [(1, 2, 3), (5, 1, 2, 5, 1), (4,)]
FIRST_THREE = {
    "first token": lambda outcome: outcome[0][0],
    "second token": lambda outcome: outcome[0][1],
    "third token": lambda outcome: outcome[0][2],
    "text": lambda outcome: outcome[0][:3],
    "text and origins": lambda outcome: (outcome[0][:3], outcome[1][:3]),
}


@functools.cache
def law(prompt, block, new_tokens, budget, rule="cactus"):
    """The law of a row alone; at budget 0 that of lossless speculative sampling."""
    verifier, draft = (
        distributions(model, prompt, new_tokens, Sampling())
        for model in (verifier_model(8), draft_model("negated", 8))
    )
    return exact_law(verifier, model_drafter(draft, block, new_tokens), new_tokens, rule, budget)


def draw(inputs, new_tokens, block, **options):
    """Texts and origins of each row of one call."""
    with torch.random.fork_rng():
        torch.manual_seed(2027)
        output = transformers_cactus.generate(
            verifier_model(8),
            **inputs,
            assistant_model=draft_model("negated", 8),
            num_assistant_tokens=block,
            max_new_tokens=new_tokens,
            do_sample=True,
            top_k=0,
            return_dict_in_generate=True,
            cactus_engine="fast",
            **options,
        )
    texts = output.sequences[:, -new_tokens:].tolist()
    origins = [[origin.value for origin in row.origins] for row in output.acceptance.sequences]
    return [(tuple(text), tuple(origin)) for text, origin in zip(texts, origins, strict=True)]


def p_values(outcomes, expected):
    return {
        name: chi_square.p_value(map(view, outcomes), seen_as(expected, view)) for name, view in FIRST_THREE.items()
    }


def fits(outcomes, expected):
    values = p_values(outcomes, expected)
    assert min(values.values()) > chi_square.ALPHA, values


def does_not_fit(outcomes, expected):
    values = p_values(outcomes, expected)
    assert min(values.values()) < chi_square.ALPHA, values


@pytest.mark.parametrize("block", [1, 2, 3, 5, 8])
def test_block_lengths(block):
    # The first three tokens of a long text: to them a block of 3 is as good as any longer one.
    inputs = {"inputs": torch.tensor([PROMPTS[0]])}
    outcomes = draw(inputs, max(block, 3) + 2, block, num_return_sequences=ROWS, cactus_delta=0.5)
    fits(outcomes, law(PROMPTS[0], min(block, 3), 4, 0.5))
    does_not_fit(outcomes, law(PROMPTS[0], 3 if block == 1 else 1, 4, 0.5))


@pytest.mark.parametrize("budget", [0.0, 0.5])
def test_rows_of_different_prompts(budget):
    # Left-padded side by side. Rows of a round have different lengths and different numbers of tokens left.
    width = max(map(len, PROMPTS))
    ids = torch.tensor([[0] * (width - len(prompt)) + list(prompt) for prompt in PROMPTS]).repeat(ROWS // 3, 1)
    mask = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in PROMPTS]).repeat(ROWS // 3, 1)
    outcomes = draw({"input_ids": ids, "attention_mask": mask}, 4, 3, cactus_delta=budget)
    for row, prompt in enumerate(PROMPTS):
        fits(outcomes[row::3], law(prompt, 3, 4, budget))
        does_not_fit(outcomes[row::3], law(PROMPTS[row - 1], 3, 4, budget))


@pytest.mark.parametrize("rule", ["cactus", "cactus-exact"])
def test_budgets_of_rows(rule):
    budgets = [0.0, 0.5, 2.0]
    inputs = {"inputs": torch.tensor([PROMPTS[0]] * ROWS)}
    outcomes = draw(inputs, 4, 2, cactus_delta=budgets * (ROWS // 3), cactus_rule=rule)
    for row, budget in enumerate(budgets):
        fits(outcomes[row::3], law(PROMPTS[0], 2, 4, budget, rule))
        does_not_fit(outcomes[row::3], law(PROMPTS[0], 2, 4, budgets[row - 1], rule))


@pytest.mark.slow
@pytest.mark.parametrize("case", [Case("speculative"), Case("cactus", 0.5), Case("lenience", 3.0)], ids=str)
def test_both_engines_have_one_law(case):
    fast, stock = (
        [text for text, _ in sample(case, engine, {"fast": 10_000, "stock": 1500}[engine])]
        for engine in ("fast", "stock")
    )
    for view in (lambda text: text[0], lambda text: text[1], lambda text: text[2], lambda text: text[:2]):
        seen = sorted({*map(view, fast), *map(view, stock)})
        counts = np.array([[list(map(view, texts)).count(one) for one in seen] for texts in (fast, stock)])
        counts = counts[:, counts.sum(0) >= 40]
        assert counts.shape[1] > 2
        assert stats.chi2_contingency(counts).pvalue > chi_square.ALPHA
