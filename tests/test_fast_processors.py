"""Logits processors in the fast engine: each position as if it had been reached token by token (cases 12 to 14)."""

import copy
import functools

import pytest
import torch
from transformers import LogitsProcessor, TemperatureLogitsWarper

import tiny_models
from fast_calls import IGNORE_GREEDY, drafts, each_draft, fast, new_tokens, plain, plain_alone
from transformers_cactus import Cactus, CactusExact, Lenience, Speculative

pytestmark = pytest.mark.filterwarnings(IGNORE_GREEDY)

UNEVEN = tiny_models.prompts([7, 3, 5])
EVEN = tiny_models.prompts([7, 7])


@functools.cache
def models():
    return tiny_models.pair("llama")


@functools.cache
def text():
    return plain_alone(models()[0], UNEVEN)


class Banner(LogitsProcessor):
    """A user's own: bans the tokens just behind each of the last three of the prefix, which it must see in full."""

    def __call__(self, input_ids, scores):
        scores = scores.clone()
        for row, ids in enumerate(input_ids.tolist()):
            scores[row, [(token * 7 + len(ids)) % 97 for token in ids[-3:]]] = -torch.inf
            scores[row, ids[: len(ids) // 2]] -= 2.0
        return scores


def allowed(_, ids):
    """A grammar: an even token follows an odd one and the other way round."""
    return list(range((int(ids[-1]) + 1) % 2 + 2, 97, 2))


PROCESSORS = {
    "repetition penalty": {"repetition_penalty": 1.8},
    "no repeated n-gram": {"no_repeat_ngram_size": 2},
    "prefix function": {"prefix_allowed_tokens_fn": allowed},
    "the user's own": {"logits_processor": [Banner()]},
    "in the user's order": {"repetition_penalty": 1.3, "logits_processor": [Banner(), TemperatureLogitsWarper(0.5)]},
    "length penalty": {"exponential_decay_length_penalty": (3, 1.5), "eos_token_id": 5, "pad_token_id": 0},
    "suppressed": {"suppress_tokens": list(range(2, 40)), "begin_suppress_tokens": list(range(40, 60))},
    "forced": {"forced_eos_token_id": 9},
}


@each_draft("other")
@pytest.mark.parametrize("name", PROCESSORS)
def test_case_12_uneven_rows_equal_each_row_alone(name, kind):
    options = PROCESSORS[name]
    expected = plain_alone(models()[0], UNEVEN, **options)
    assert expected != text(), "the processor changes nothing"
    output = fast(models()[0], UNEVEN, **drafts(*models())[kind], **options)
    assert new_tokens(output, UNEVEN) == expected


@pytest.mark.parametrize("kind", ["same", "other"])
def test_case_12_bad_words(kind):
    # Of one token and of two: the second is banned only behind the first.
    first, second = text()[0][:2]
    options = {"bad_words_ids": [[text()[1][3]], [first, second]]}
    expected = plain_alone(models()[0], UNEVEN, **options)
    assert expected[0][0] == first and expected[0][1] != second
    output = fast(models()[0], UNEVEN, **drafts(*models())[kind], **options)
    assert new_tokens(output, UNEVEN) == expected


@pytest.mark.parametrize("inputs", [UNEVEN, EVEN], ids=["uneven", "even"])
def test_case_12_prefix_function_is_told_the_row(inputs):
    # The last row ends first, and the others keep their numbers.
    seen = set()

    def by_row(row, ids):
        seen.add(row)
        return range(10 + 20 * row, 30 + 20 * row)

    eos = range(10 + 20 * (len(inputs["input_ids"]) - 1), 18 + 20 * (len(inputs["input_ids"]) - 1))
    options = {"prefix_allowed_tokens_fn": by_row, "eos_token_id": list(eos), "pad_token_id": 0}
    expected = plain(models()[0], inputs, **options)
    output = fast(models()[0], inputs, assistant_model=models()[1], **options)
    assert torch.equal(output.sequences, expected.sequences)
    assert seen == set(range(len(inputs["input_ids"])))


@pytest.mark.parametrize("inputs", [UNEVEN, EVEN], ids=["uneven", "even"])
@pytest.mark.parametrize(
    "options", [{"encoder_repetition_penalty": 3.0}, {"encoder_no_repeat_ngram_size": 1}], ids=lambda o: next(iter(o))
)
def test_case_12_processors_that_remember_the_prompts(options, inputs):
    # Rows leave the batch at different times; each goes on with its own prompt.
    full = plain_alone(models()[0], inputs, **options)
    eos = [full[0][4], full[1][9]]
    options = options | {"eos_token_id": eos, "pad_token_id": 0}
    expected = plain_alone(models()[0], inputs, **options)
    output = fast(models()[0], inputs, assistant_model=models()[1], **options)
    assert new_tokens(output, inputs) == expected


RULES = [Speculative(), Cactus(0.0), Cactus(0.75), CactusExact(2.0), Lenience(4.0), Cactus(float("inf"))]


@pytest.mark.parametrize("rule", RULES, ids=str)
def test_case_13_banned_tokens_are_never_emitted(rule):
    # The draft prefers what the verifier bans: its weights are the verifier's, and the ban is the user's processor,
    # which a draft does not follow.
    verifier, draft = models()[0], copy.deepcopy(models()[0])
    banned = list(range(0, 97, 2))

    class Ban(LogitsProcessor):
        def __call__(self, input_ids, scores):
            scores = scores.clone()
            scores[:, banned] = -torch.inf
            return scores

    torch.manual_seed(0)
    inputs = tiny_models.prompts([7, 3] * 16)
    output = fast(verifier, inputs, assistant_model=draft, do_sample=True, cactus_rule=rule, logits_processor=[Ban()])
    emitted = {token for row in new_tokens(output, inputs) for token in row}
    assert emitted.isdisjoint(banned) and len(emitted) > 20
    assert output.acceptance.accepted < 0.8 * output.acceptance.drafted, "the draft has hardly met the ban"


@pytest.mark.parametrize("rule", RULES, ids=str)
@each_draft("other")
def test_case_13_truncation_of_the_verifier_holds(rule, kind):
    # The two models keep different tokens, each its own best ones.
    torch.manual_seed(0)
    inputs = tiny_models.prompts([7, 3] * 4)
    options = {"top_k": 5, "min_p": 0.02, "top_p": 0.9}
    output = fast(
        models()[0],
        inputs,
        **drafts(*models())[kind],
        do_sample=True,
        cactus_rule=rule,
        output_scores=True,
        **options,
    )
    for step, scores in enumerate(output.scores):
        chosen = scores.gather(1, output.sequences[:, max(7, 3) + step, None])
        assert torch.isfinite(chosen).all()
        assert int(torch.isfinite(scores).sum(-1).max()) <= 5


class Counting(LogitsProcessor):
    """Keeps state: bans a token depending on how often it was called."""

    def __init__(self):
        self.lengths = []

    def __call__(self, input_ids, scores):
        self.lengths.append(input_ids.shape[1])
        return scores


@each_draft("other")
def test_case_14_calls_of_a_processor(kind):
    # As documented: called for every drafted position, in order, so also behind a rejection; not for the draft.
    counting = Counting()
    inputs = tiny_models.prompts([7])
    output = fast(models()[0], inputs, **drafts(*models())[kind], logits_processor=[counting])
    expected, start = [], 7
    statistics = output.acceptance
    for drafted, accepted in zip(statistics.drafted_per_round, statistics.accepted_per_round, strict=True):
        expected += range(start, start + drafted + 1)
        start += accepted + 1
    assert counting.lengths == expected


@pytest.mark.parametrize("inputs", [UNEVEN, EVEN], ids=["uneven", "even"])
def test_case_14_state_by_prefix_is_right(inputs):
    # An automaton that derives its state from the prefix, and remembers it by prefix, survives roll-back.
    class Automaton(LogitsProcessor):
        def __init__(self):
            self.states = {}

        def __call__(self, input_ids, scores):
            scores = scores.clone()
            for row, ids in enumerate(map(tuple, input_ids.tolist())):
                self.states[ids] = (self.states.get(ids[:-1], sum(ids[:-1])) + ids[-1]) % 96
                scores[row, self.states[ids] :] = scores[row, self.states[ids] :] - 3.0
            return scores

    expected = plain_alone(models()[0], inputs, logits_processor=[Automaton()])
    output = fast(models()[0], inputs, assistant_model=models()[1], logits_processor=[Automaton()])
    assert new_tokens(output, inputs) == expected
