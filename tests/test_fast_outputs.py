"""What the fast engine hands back: scores, streams, statistics, and a cache to go on from (cases 27 and 28)."""

import copy
import functools

import pytest
import torch
from transformers import TextIteratorStreamer, TextStreamer
from transformers.generation.streamers import BaseStreamer

import tiny_models
from fast_calls import IGNORE_GREEDY, drafts, each_draft, fast, new_tokens, plain
from test_fast_stopping import letters
from transformers_cactus import Origin

pytestmark = pytest.mark.filterwarnings(IGNORE_GREEDY)

ONE = tiny_models.prompts([7])
UNEVEN = tiny_models.prompts([7, 4, 9])


@functools.cache
def models(name="llama"):
    return tiny_models.pair(name)


@each_draft("same", "look-up")
@pytest.mark.parametrize("options", [{}, {"temperature": 0.7, "repetition_penalty": 1.5}], ids=["raw", "processed"])
def test_case_27_scores_and_logits_with_an_eos_inside_a_block(kind, options):
    verifier = models()[0]
    text = new_tokens(plain(verifier, ONE, **options), ONE)[0]
    eos = next(token for place, token in enumerate(text) if place >= 9 and token not in text[:place])
    wanted = {"output_scores": True, "output_logits": True, "eos_token_id": eos, **options}
    expected = plain(verifier, ONE, **wanted)
    output = fast(verifier, ONE, **drafts(*models())[kind], **wanted)
    assert torch.equal(output.sequences, expected.sequences)
    for name in ("scores", "logits"):
        ours, theirs = getattr(output, name), getattr(expected, name)
        assert len(ours) == len(theirs) == output.sequences.shape[1] - 7
        torch.testing.assert_close(torch.stack(ours), torch.stack(theirs), atol=1e-4, rtol=1e-4)
    # Processors do not write into the logits.
    assert (options == {}) == all(map(torch.equal, output.scores, output.logits))


def test_case_27_scores_of_a_batch_whose_rows_end_apart():
    verifier, draft = models()
    full = new_tokens(plain(verifier, UNEVEN), UNEVEN)
    wanted = {"output_scores": True, "output_logits": True, "eos_token_id": full[1][3], "pad_token_id": 0}
    expected = plain(verifier, UNEVEN, **wanted)
    output = fast(verifier, UNEVEN, assistant_model=draft, **wanted)
    assert len(output.scores) == len(output.logits) == len(expected.scores)
    for row, statistics in enumerate(output.acceptance.sequences):
        length = len(statistics.origins)
        for name in ("scores", "logits"):
            ours = torch.stack([scores[row] for scores in getattr(output, name)[:length]])
            theirs = torch.stack([scores[row] for scores in getattr(expected, name)[:length]])
            torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=1e-4)
    assert min(len(row.origins) for row in output.acceptance.sequences) < 24


def test_case_27_scores_of_sampled_text_are_the_verifiers_own():
    # Not the raised distribution that a budget samples from: what plain `generate` computes for the same text.
    verifier, draft = models()
    torch.manual_seed(0)
    output = fast(verifier, ONE, assistant_model=draft, do_sample=True, top_k=0, cactus_delta=1.0, output_scores=True)
    logits = verifier(output.sequences).logits[0, 6:-1]
    torch.testing.assert_close(torch.cat(output.scores), logits, atol=1e-4, rtol=1e-4)
    assert Origin.DELTA in output.acceptance.origins


class Recorder(BaseStreamer):
    """A streamer of the user's own."""

    def __init__(self):
        self.sent = []
        self.ends = 0

    def put(self, value):
        assert not self.ends
        self.sent.append(value.clone())

    def end(self):
        self.ends += 1


@each_draft("same", "look-up")
@pytest.mark.parametrize("ended", [False, True])
def test_case_28_a_streamer_gets_what_plain_generate_sends(kind, ended):
    verifier = models()[0]
    options = {"eos_token_id": new_tokens(plain(verifier, ONE), ONE)[0][9]} if ended else {}
    ours, theirs = Recorder(), Recorder()
    plain(verifier, ONE, streamer=theirs, **options)
    output = fast(verifier, ONE, **drafts(*models())[kind], streamer=ours, **options)
    assert ours.ends == theirs.ends == 1
    assert [value.tolist() for value in ours.sent] == [value.tolist() for value in theirs.sent]
    assert torch.cat([value.flatten() for value in ours.sent]).tolist() == output.sequences[0].tolist()


def test_case_28_streamers_of_transformers(capsys):
    verifier, draft = models()
    tokenizer = letters()
    output = fast(verifier, ONE, assistant_model=draft, streamer=TextStreamer(tokenizer, skip_prompt=True))
    text = tokenizer.decode(output.sequences[0, 7:])
    assert capsys.readouterr().out.rstrip("\n") == text
    iterator = TextIteratorStreamer(tokenizer, skip_prompt=True)
    fast(verifier, ONE, assistant_model=draft, streamer=iterator)
    pieces = list(iterator)
    assert "".join(pieces) == text and len(pieces) > 5


@pytest.mark.parametrize("do_sample", [False, True])
@each_draft("same", "look-up")
def test_statistics_agree_with_the_text(kind, do_sample):
    verifier = models()[0]
    full = new_tokens(plain(verifier, UNEVEN), UNEVEN)
    torch.manual_seed(0)
    options = {"do_sample": True, "cactus_delta": 0.5} if do_sample else {"eos_token_id": full[0][4]}
    output = fast(verifier, UNEVEN, **drafts(*models())[kind], **options, pad_token_id=0)
    total = output.acceptance
    for row in total.sequences:
        extra = [origin not in (Origin.LOSSLESS, Origin.DELTA) for origin in row.origins]
        assert len(row.origins) == len(row.divergence) <= 24
        assert len(row.drafted_per_round) == len(row.accepted_per_round)
        assert all(0 <= a <= d <= 6 for a, d in zip(row.accepted_per_round, row.drafted_per_round, strict=True))
        # Each round's accepted tokens and then one more, which only the last round may lack.
        expected = [flag for accepted in row.accepted_per_round for flag in [False] * accepted + [True]]
        assert extra in (expected, expected[:-1])
        own = [v for v, o in zip(row.divergence, row.origins, strict=True) if o in (Origin.BONUS, Origin.PLAIN)]
        assert not any(own)
    assert total.emitted == sum(len(row.origins) for row in total.sequences)
    assert total.accepted == sum(o in (Origin.LOSSLESS, Origin.DELTA) for o in total.origins)
    assert total.mean_accepted_length == total.accepted / total.rounds
    if do_sample and kind != "look-up":
        assert total.total_divergence > 0
    if not do_sample:
        assert total.total_divergence == 0 and Origin.DELTA not in total.origins


@pytest.mark.parametrize(
    ("name", "ended_inside_a_block"),
    [
        ("llama", False),
        ("gemma3", True),
        *(pytest.param(name, True, marks=pytest.mark.slow) for name in ("llama", "gpt2", "mistral")),
    ],
)
def test_the_returned_cache_goes_on(name, ended_inside_a_block):
    verifier, draft = models(name)
    full = plain(verifier, ONE, max_new_tokens=40).sequences
    same = copy.deepcopy(verifier)
    length = 10 if ended_inside_a_block else 14

    def first():
        stop = {"stopping_criteria": [lambda ids, scores: torch.tensor([ids.shape[1] >= 7 + length])]}
        stop = stop if ended_inside_a_block else {"max_new_tokens": length}
        output = fast(verifier, ONE, assistant_model=same, **stop)
        assert torch.equal(output.sequences, full[:, : 7 + length])
        cache = {"cache": output.cache} if "cache" in output else {"past_key_values": output.past_key_values}
        ids = output.sequences
        return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}, cache

    rest = 40 - length
    for options in ({"assistant_model": draft}, {"prompt_lookup_num_tokens": 4}):
        inputs, cache = first()
        fed = []
        hook = verifier.register_forward_pre_hook(
            lambda _, args, kwargs, fed=fed: fed.append(kwargs["input_ids"].shape[1]), with_kwargs=True
        )
        try:
            output = fast(verifier, inputs, **cache, **options, max_new_tokens=rest)
        finally:
            hook.remove()
        assert torch.equal(output.sequences, full)
        # What the cache holds is not computed again.
        assert fed[0] <= 7
    inputs, cache = first()
    assert torch.equal(plain(verifier, inputs, **cache, max_new_tokens=rest).sequences, full)
    inputs, cache = first()
    output = fast(verifier, inputs, **cache, assistant_model=draft, max_new_tokens=rest, cactus_engine="stock")
    assert torch.equal(output.sequences, full)


def test_a_cache_of_plain_generate_goes_on():
    verifier, draft = models()
    begun = plain(verifier, ONE, max_new_tokens=10)
    full = plain(verifier, ONE, max_new_tokens=24)
    cache = {"cache": begun.cache} if "cache" in begun else {"past_key_values": begun.past_key_values}
    inputs = {"input_ids": begun.sequences, "attention_mask": torch.ones_like(begun.sequences)}
    output = fast(verifier, inputs, **cache, assistant_model=draft, max_new_tokens=14, cactus_engine="auto")
    assert torch.equal(output.sequences, full.sequences)


@pytest.mark.parametrize("prompts", [[3], [20, 20]], ids=["shorter", "batch"])
def test_a_cache_of_other_sequences_is_refused(prompts):
    verifier, draft = models()
    output = fast(verifier, ONE, assistant_model=draft, max_new_tokens=8)
    cache = {"cache": output.cache} if "cache" in output else {"past_key_values": output.past_key_values}
    with pytest.raises(ValueError, match=r"the given cache holds 1\d tokens of 1 sequences"):
        fast(verifier, tiny_models.prompts(prompts), **cache, assistant_model=draft, max_new_tokens=8)
