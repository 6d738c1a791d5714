"""Degenerate and broken distributions in the fast engine (cases 15 and 16)."""

import copy
import functools
import math

import pytest
import torch
from transformers import LogitsProcessor

import tiny_models
from fast_calls import IGNORE_GREEDY, drafts, each_draft, fast, new_tokens, plain_alone
from transformers_cactus import Cactus, CactusExact, Lenience, Speculative

pytestmark = pytest.mark.filterwarnings(IGNORE_GREEDY)

INPUTS = tiny_models.prompts([7, 3, 5])


@functools.cache
def models():
    return tiny_models.pair("llama")


class OneToken(LogitsProcessor):
    """Leaves rows whose last token is even a single token, the most probable one."""

    def __call__(self, input_ids, scores):
        single = torch.full_like(scores, -torch.inf).scatter(1, scores.argmax(1, keepdim=True), 0.0)
        return torch.where(input_ids[:, -1:] % 2 == 0, single, scores)


RULES = [Speculative(), Cactus(0.75), Cactus(math.inf), CactusExact(1e-9), CactusExact(50.0), Lenience(1e6)]


@pytest.mark.parametrize("rule", RULES, ids=str)
@each_draft("other")
def test_case_15_rows_with_a_single_token(rule, kind):
    torch.manual_seed(0)
    output = fast(
        models()[0],
        INPUTS,
        **drafts(*models())[kind],
        do_sample=True,
        cactus_rule=rule,
        logits_processor=[OneToken()],
        output_scores=True,
    )
    singles = 0
    for step, scores in enumerate(output.scores):
        for row, token in enumerate(output.sequences[:, 7 + step].tolist()):
            possible = torch.isfinite(scores[row])
            assert possible[token]
            singles += int(possible.sum() == 1)
    assert singles > 10
    assert all(math.isfinite(value) and value >= 0 for value in output.acceptance.divergence)


@pytest.mark.parametrize("rule", RULES, ids=str)
def test_case_15_one_hot_verifier_is_greedy(rule):
    output = fast(models()[0], INPUTS, assistant_model=models()[1], do_sample=True, top_k=1, cactus_rule=rule)
    assert new_tokens(output, INPUTS) == plain_alone(models()[0], INPUTS)


def test_case_15_temperature_close_to_zero():
    options = {"do_sample": True, "temperature": 1e-4, "top_k": 0, "cactus_delta": 0.75}
    output = fast(models()[0], INPUTS, assistant_model=models()[1], **options)
    assert new_tokens(output, INPUTS) == plain_alone(models()[0], INPUTS)


class Break(LogitsProcessor):
    """Fills one row's scores with a value once that row has grown long enough."""

    def __init__(self, value, prompt, length):
        self.value, self.prompt, self.length = value, prompt, length

    def __call__(self, input_ids, scores):
        scores = scores.clone()
        for row, ids in enumerate(input_ids.tolist()):
            if self.prompt == ids[: len(self.prompt)] and len(ids) >= self.length:
                scores[row] = self.value
        return scores


@pytest.mark.parametrize("value", [math.nan, -math.inf, math.inf], ids=str)
@pytest.mark.parametrize("do_sample", [True, False])
def test_case_16_broken_verifier_is_named(value, do_sample):
    # The third sequence, at its token 3: position 3 of the first block, since nothing is rejected before.
    prompt = INPUTS["input_ids"][2, 2:].tolist()
    with pytest.raises(FloatingPointError, match=r"verifier's scores for sequence 2 at position 3 "):
        fast(
            models()[0],
            INPUTS,
            assistant_model=copy.deepcopy(models()[0]),
            do_sample=do_sample,
            top_k=0,
            logits_processor=[Break(value, prompt, 8)],
        )


def test_case_16_the_sequence_is_named_as_the_caller_counts():
    # The first row has left the batch when the third breaks.
    texts = plain_alone(models()[0], INPUTS)
    eos = next(t for t in texts[0] if t not in texts[2] and t not in texts[1])
    ended = texts[0].index(eos)
    prompt = INPUTS["input_ids"][2, 2:].tolist()
    length = 5 + 7 * (ended // 7 + 1) + 2
    with pytest.raises(FloatingPointError, match=r"verifier's scores for sequence 2 "):
        fast(
            models()[0],
            INPUTS,
            assistant_model=copy.deepcopy(models()[0]),
            eos_token_id=eos,
            pad_token_id=0,
            logits_processor=[Break(math.nan, prompt, length)],
        )


def test_case_16_broken_draft_is_named():
    draft = copy.deepcopy(models()[0])
    draft.lm_head.weight.data[11] = math.nan
    with pytest.raises(FloatingPointError, match=r"draft's scores for sequence 0 at position 0 "):
        fast(models()[0], INPUTS, assistant_model=draft, do_sample=True, top_k=0)


@pytest.mark.parametrize("value", [math.nan, math.inf], ids=str)
def test_case_16_broken_draft_does_not_change_greedy_text(value):
    draft = copy.deepcopy(models()[0])
    draft.lm_head.weight.data[11] = value
    try:
        output = fast(models()[0], INPUTS, assistant_model=draft)
    except FloatingPointError as error:
        assert "draft" in str(error)
    else:
        assert new_tokens(output, INPUTS) == plain_alone(models()[0], INPUTS)
