"""Where the fast engine ends a row: as if every condition had been checked after every token (cases 1 to 5)."""

import functools

import pytest
import tokenizers
import torch
import transformers
from transformers import (
    EosTokenCriteria,
    MinLengthLogitsProcessor,
    MinNewTokensLengthLogitsProcessor,
    StoppingCriteria,
)

import tiny_models
from fast_calls import IGNORE_GREEDY, drafts, each_draft, fast, new_tokens, plain, plain_alone, rows_alone

pytestmark = pytest.mark.filterwarnings(IGNORE_GREEDY)

INPUTS = tiny_models.prompts([7])
WIDTH = 7


@functools.cache
def models():
    return tiny_models.pair("llama")


@functools.cache
def text():
    """Plain greedy text, 24 tokens."""
    return new_tokens(plain(models()[0], INPUTS), INPUTS)[0]


def firsts():
    """Every place of the text whose token has not occurred before: where that token as EOS ends it."""
    return [place for place in range(11) if text().index(text()[place]) == place]


def draft(kind):
    return drafts(*models())[kind]


def test_places_lie_everywhere_in_a_block():
    # A check on the tests below: with a draft that is always right, rounds end behind the tokens 6 and 13.
    assert {place % 7 for place in firsts()} >= {0, 2, 3, 6} and 96 not in text(), firsts()


@each_draft("same", "look-up")
def test_case_1_nothing_follows_an_eos(kind):
    options = draft(kind)
    for place in firsts():
        # As one id and as a list, by turns.
        eos = [96, text()[place]] if place % 2 else text()[place]
        output = fast(models()[0], INPUTS, **options, eos_token_id=eos, output_scores=True)
        assert output.sequences[0, WIDTH:].tolist() == text()[: place + 1]
        assert len(output.scores) == len(output.acceptance.origins) == place + 1


def test_case_1_eos_in_a_batch():
    # Rows end at different places in the same round, and the output is padded behind them as transformers pads it.
    inputs = tiny_models.prompts([7, 4, 9])
    full = new_tokens(plain(models()[0], inputs), inputs)
    eos = [row[place] for row, place in zip(full, (2, 4, 9), strict=True)]
    expected = plain(models()[0], inputs, eos_token_id=eos, pad_token_id=0)
    output = fast(models()[0], inputs, **draft("same"), eos_token_id=eos, pad_token_id=0)
    assert torch.equal(output.sequences, expected.sequences)
    assert len({len(row.origins) for row in output.acceptance.sequences}) > 1


def test_case_1_eos_criterion_of_the_users_own():
    criterion = EosTokenCriteria(eos_token_id=text()[3])
    output = fast(models()[0], INPUTS, **draft("same"), stopping_criteria=[criterion])
    assert output.sequences[0, WIDTH:].tolist() == text()[: text().index(text()[3]) + 1]


def letters():
    """A tokenizer of one token per printable character, and the two special ones."""
    vocabulary = {"<pad>": 0, "<s>": 1} | {chr(32 + index): 2 + index for index in range(95)}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.decoder = tokenizers.decoders.Fuse()
    return transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", bos_token="<s>")


@each_draft("same", "look-up")
def test_case_2_stop_strings(kind):
    tokenizer = letters()
    written = [tokenizer.decode([token]) for token in text()]
    options = draft(kind)
    # Of one to three tokens: within a block, and, ending at the tokens 6 to 8, across two.
    for place, size in [(0, 1), (3, 2), (4, 3), (6, 2), (7, 2), (8, 3), (13, 1)]:
        string = "".join(written[place + 1 - size : place + 1])
        expected = plain(models()[0], INPUTS, stop_strings=[string, "no such text"], tokenizer=tokenizer)
        output = fast(models()[0], INPUTS, **options, stop_strings=[string, "no such text"], tokenizer=tokenizer)
        assert torch.equal(output.sequences, expected.sequences)
        assert output.sequences.shape[1] <= WIDTH + place + 1


class Recorded(StoppingCriteria):
    """A user's criterion, written down as it is called."""

    def __init__(self, ends):
        self.ends = ends
        self.calls = []

    def __call__(self, input_ids, scores, **kwargs):
        self.calls += input_ids.tolist()
        return self.ends(self, input_ids)


def per_row(flags):
    return torch.tensor(flags, dtype=torch.bool)


CRITERIA = {
    "last token": lambda _, ids: per_row([row[-1] == text()[4] for row in ids.tolist()]),
    "length": lambda _, ids: per_row([ids.shape[1] >= WIDTH + 9] * len(ids)),
    "number of calls": lambda self, ids: per_row([len(self.calls) >= 11] * len(ids)),
    "one flag": lambda _, ids: torch.tensor(ids.shape[1] >= WIDTH + 3),
    "a plain bool": lambda _, ids: ids.shape[1] >= WIDTH + 5,
}


@each_draft("same", "look-up")
@pytest.mark.parametrize("criterion", CRITERIA)
def test_case_3_criteria_of_the_users_own(kind, criterion):
    ours, theirs = Recorded(CRITERIA[criterion]), Recorded(CRITERIA[criterion])
    expected = plain(models()[0], INPUTS, stopping_criteria=[theirs])
    output = fast(models()[0], INPUTS, **draft(kind), stopping_criteria=[ours])
    assert torch.equal(output.sequences, expected.sequences)
    assert output.sequences.shape[1] < WIDTH + 24
    # Called for every token, in order, with the row up to that token, and not once more.
    assert ours.calls == theirs.calls


def test_case_3_criterion_with_a_flag_per_row_in_a_batch():
    inputs = tiny_models.prompts([7, 4, 9])
    last = {row[place] for row, place in zip(plain_alone(models()[0], inputs), (2, 5, 8), strict=True)}

    def ends(_, ids):
        return per_row([row[-1] in last for row in ids.tolist()])

    expected = [
        new_tokens(plain(models()[0], row, stopping_criteria=[Recorded(ends)]), row)[0] for row in rows_alone(inputs)
    ]
    output = fast(models()[0], inputs, **draft("same"), stopping_criteria=[Recorded(ends)])
    assert new_tokens(output, inputs) == expected
    assert max(map(len, expected)) < 24


def test_case_3_criteria_read_scores():
    seen = []

    class Confident(StoppingCriteria):
        def __call__(self, input_ids, scores, **kwargs):
            seen.append(len(scores))
            return per_row([scores[-1].softmax(-1).max() > 0.9])

    expected = plain(models()[0], INPUTS, stopping_criteria=[Confident()], output_scores=True)
    counts = list(seen)
    seen.clear()
    output = fast(models()[0], INPUTS, **draft("same"), stopping_criteria=[Confident()], output_scores=True)
    assert torch.equal(output.sequences, expected.sequences)
    assert seen == counts == list(range(1, len(counts) + 1))


@each_draft("same", "look-up")
def test_case_4_never_longer_than_allowed(kind):
    for limit in (1, 2, 3, 7):
        output = fast(models()[0], INPUTS, **draft(kind), max_new_tokens=limit)
        assert output.sequences[0, WIDTH:].tolist() == text()[:limit]
    output = fast(models()[0], INPUTS, **draft(kind), max_length=WIDTH + 1)
    assert output.sequences[0, WIDTH:].tolist() == text()[:1]


def test_case_4_limits_in_a_padded_batch():
    # `max_length` counts a row's padding, as in plain `generate`.
    inputs = tiny_models.prompts([7, 3])
    expected = plain(models()[0], inputs, max_length=11)
    output = fast(models()[0], inputs, **draft("other"), max_length=11)
    assert torch.equal(output.sequences, expected.sequences)


def test_case_4_no_time_means_one_token():
    output = fast(models()[0], INPUTS, **draft("same"), max_time=0.0)
    assert output.sequences[0, WIDTH:].tolist() == text()[:1]


@each_draft("same", "look-up")
def test_case_5_eos_is_banned_up_to_the_minimum(kind):
    # EOS turns up early unless it is banned; the minimum lies in the middle of a block.
    eos = text()[2]
    minimums = [
        {"min_new_tokens": 9},
        {"min_length": WIDTH + 10},
        {"logits_processor": [MinLengthLogitsProcessor(WIDTH + 4, eos)]},
        {"logits_processor": [MinNewTokensLengthLogitsProcessor(WIDTH, 12, eos)]},
    ]
    for minimum in minimums:
        expected = plain(models()[0], INPUTS, eos_token_id=eos, **minimum)
        output = fast(models()[0], INPUTS, **draft(kind), eos_token_id=eos, **minimum)
        assert torch.equal(output.sequences, expected.sequences)
        assert output.sequences.shape[1] > WIDTH + 4 - 1


def test_case_5_minimums_in_a_padded_batch():
    inputs = tiny_models.prompts([7, 3, 5])
    full = new_tokens(plain(models()[0], inputs), inputs)
    eos = [row[1] for row in full]
    for minimum in ({"min_new_tokens": 9}, {"min_length": 15}):
        expected = plain(models()[0], inputs, eos_token_id=eos, pad_token_id=0, **minimum)
        output = fast(models()[0], inputs, **draft("other"), eos_token_id=eos, pad_token_id=0, **minimum)
        assert torch.equal(output.sequences, expected.sequences)
