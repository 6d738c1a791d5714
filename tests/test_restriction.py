"""Verification over the kept tokens only: the decisions, and the law, of verification over the vocabulary."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

import transformers_cactus.decoding
from reference import Sampling
from test_distribution import Case, does_not_fit, draw, fits, law, verifier_model
from transformers_cactus import Cactus, CactusExact, Lenience, Speculative, few_numbers, token_by_token, verify
from transformers_cactus.processing import BlockProcessor, Processed
from transformers_cactus.restriction import verify_kept
from transformers_cactus.sequences import Sequences
from transformers_cactus.truncation import Kept, Truncation

RULES = [Speculative(), Cactus(0.5), CactusExact(0.5), Lenience(2.0)]
TRUNCATED = Sampling(1.2, top_k=4, top_p=0.97)
CASES = [
    Case("speculative", 0.0, "negated", vocab=16, sampling=TRUNCATED),
    Case("cactus", 0.5, "other", vocab=16, sampling=TRUNCATED),
    Case("cactus-exact", 0.5, "swapped", vocab=16, sampling=Sampling(1.0, top_k=4)),
    Case("lenience", 3.0, "other", vocab=16, sampling=TRUNCATED),
    Case("cactus", 0.5, "look-up", block=3, new_tokens=4, vocab=16, sampling=TRUNCATED),
]


def truncated(scores: torch.Tensor, k: int) -> tuple[torch.Tensor, Kept]:
    """Scores with all but the `k` largest of a row excluded, and those."""
    values, tokens = scores.topk(k, dim=-1)
    return torch.full_like(scores, -torch.inf).scatter_(-1, tokens, values), Kept(tokens, values)


@given(
    seed=st.integers(0, 2**31),
    rule=st.sampled_from(RULES),
    k=st.integers(1, 6),
    block=st.integers(1, 4),
    kind=st.sampled_from(["scores", "few scores", "no probabilities"]),
    # In Python numbers and in tensors; `certify` is for tensors only.
    batch=st.sampled_from([6, 40]),
    certify=st.booleans(),
)
@settings(max_examples=160, deadline=None)
def test_decides_as_over_the_whole_vocabulary(seed, rule, k, block, kind, batch, certify):
    source = torch.Generator().manual_seed(seed)
    vocab = 12
    verifier_scores, kept = truncated(2 * torch.randn(batch, block + 1, vocab, generator=source), k)
    # Truncated otherwise, so that it also proposes what the verifier excludes.
    draft_scores, draft_kept = truncated(2 * torch.randn(batch, block, vocab, generator=source), k + 3)
    drafted = torch.distributions.Categorical(logits=draft_scores).sample()
    lengths = torch.randint(block + 1, (batch,), generator=source)
    draft = {
        "scores": Processed(draft_scores + 3),
        "few scores": Processed(None, draft_kept, vocab),
        "no probabilities": None,
    }[kind]

    def random():
        return torch.Generator().manual_seed(seed + 1)

    common = {"block_lengths": lengths, "certify": certify}
    dense = None if draft is None else draft.scores
    whole = verify(drafted, verifier_scores, dense, rule, generator=random(), **common)
    few = verify_kept(
        drafted,
        kept,
        draft,
        rule,
        generator=random(),
        **common,
    )
    assert torch.equal(few.accepted, whole.accepted)
    # What lies behind a rejected token means nothing.
    inside = (torch.arange(block) < lengths[:, None]) & (torch.arange(block) <= few.accepted[:, None])
    assert torch.equal(few.accepted_losslessly[inside], whole.accepted_losslessly[inside])
    torch.testing.assert_close(few.divergence[inside], whole.divergence[inside])
    if certify:
        torch.testing.assert_close(few.certificate[inside], whole.certificate[inside], atol=2e-6, rtol=1e-5)
    assert not few.invalid.any()
    allowed = verifier_scores[torch.arange(batch), few.accepted].isfinite()
    assert allowed.gather(1, few.next_token[:, None]).all()


@given(
    seed=st.integers(0, 2**31),
    rule=st.sampled_from([*RULES, Cactus(0.05), Lenience(1.1)]),
    k=st.integers(1, 6),
    kind=st.sampled_from(["another draft", "the verifier itself", "no probabilities"]),
)
@settings(max_examples=200, deadline=None)
def test_recovers_from_the_weights_of_the_whole_vocabulary(seed, rule, k, kind):
    source = torch.Generator().manual_seed(seed)
    scores, _ = truncated(2 * torch.randn(1, 12, generator=source, dtype=torch.float64), k)
    others, _ = truncated(2 * torch.randn(1, 12, generator=source, dtype=torch.float64), k + 3)
    q = scores.softmax(-1)
    p = {"another draft": others.softmax(-1), "the verifier itself": q, "no probabilities": None}[kind]
    token = torch.multinomial(q if p is None else p, 1, generator=source)[:, 0]
    expected = rule.recovery_weights(token, q, p)[0]

    def listed(probs):
        tokens = probs[0].nonzero()[:, 0]
        return tokens.tolist(), (3 * probs[0, tokens]).tolist()  # weights are known up to a factor

    tokens, weights = listed(q)
    # As `decide` has it: without a difference in rounding, of which a residual would be made.
    gamma = rule.gamma_of(few_numbers._share(token.item(), tokens, weights, sum(weights)))
    left = few_numbers._recovery(token.item(), tokens, weights, None if p is None else listed(p), gamma)
    found = torch.zeros(12, dtype=torch.float64)
    found[tokens] = torch.tensor(left, dtype=torch.float64)
    torch.testing.assert_close(found / found.sum(), expected / expected.sum(), rtol=1e-9, atol=1e-9)


def test_a_draft_that_is_no_distribution_is_reported():
    verifier_scores, kept = truncated(torch.randn(1, 2, 12, generator=torch.Generator().manual_seed(0)), 4)
    draft_scores = torch.full((1, 1, 12), torch.nan)
    drafted = verifier_scores[:, :1].argmin(-1)
    outcome = verify_kept(drafted, kept, Processed(draft_scores), Speculative())
    with pytest.raises(FloatingPointError, match="draft's scores for sequence 0 at position 0"):
        outcome.raise_if_invalid()


@given(
    seed=st.integers(0, 2**31),
    rule=st.sampled_from(RULES),
    k=st.integers(1, 6),
    # Of tied tokens, any may be those that top-p cuts off: so without it where there are ties.
    p=st.sampled_from([0.5, 0.9, None]),
    has_probabilities=st.booleans(),
)
@settings(max_examples=100, deadline=None)
def test_positions_truncated_on_demand_decide_as_all_of_them_do(seed, rule, k, p, has_probabilities):
    source = torch.Generator().manual_seed(seed)
    batch, block, vocab = 5, 3, 30
    scores = 2 * torch.randn(batch, block + 1, vocab, generator=source)
    warpers = [TemperatureLogitsWarper(0.7), TopKLogitsWarper(k)]
    if p is None:
        # So many ties that the warpers themselves have to say what is left.
        scores = scores.round()
    else:
        warpers.append(TopPLogitsWarper(p))
    processor = BlockProcessor(warpers)
    rows = Sequences(torch.zeros(batch, 1, dtype=torch.long), [0] * batch, 8)
    draft = truncated(2 * torch.randn(batch, block, vocab, generator=source), k + 3)[1] if has_probabilities else None
    whole = processor(scores.clone(), rows).scores
    drafted = torch.randint(vocab, (batch, block), generator=source)
    drafted = torch.where(torch.rand(batch, block, generator=source) < 0.8, whole[:, :-1].argmax(-1), drafted).tolist()
    lengths = torch.randint(1, block + 1, (batch,), generator=source).tolist()
    uniforms = torch.rand(batch * (block + 1), generator=source).tolist()

    few = processor.on_demand(scores.clone(), rows, few_numbers.MOST)
    every = Kept(*reversed(whole.sort(dim=-1, descending=True)))
    found, expected = (
        few_numbers.decide(drafted, lengths, kept, draft, lambda row, place, q_n: rule.gamma_of(q_n), uniforms)
        for kept in (few, every)
    )
    assert found.accepted == expected.accepted
    assert found.accepted_losslessly == expected.accepted_losslessly
    assert found.invalid == expected.invalid == [0] * batch
    torch.testing.assert_close(torch.tensor(found.divergence), torch.tensor(expected.divergence), rtol=1e-4, atol=1e-6)
    if p is not None:
        # Tied tokens come in another order.
        assert found.next_token == expected.next_token
    assert not torch.isinf(whole[range(batch), found.accepted, found.next_token]).any()


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_a_position_that_is_no_distribution_is_reported_where_it_is_looked_at(bad):
    processor = BlockProcessor([TopKLogitsWarper(4)])
    scores = torch.randn(1, 3, 30, generator=torch.Generator().manual_seed(0))
    scores[0, 1] = bad
    rows = Sequences(torch.zeros(1, 1, dtype=torch.long), [0], 8)
    drafted = scores[:, :2].argmax(-1).tolist()

    def decided(uniforms):
        kept = processor.on_demand(scores, rows, few_numbers.MOST)
        return few_numbers.decide(drafted, [2], kept, None, lambda row, place, q_n: q_n, uniforms)

    # Accepted, so that the next position is looked at; rejected, so that it is not.
    assert (decided([0.0, 0.5, 0.5]).invalid, decided([0.0, 0.5, 0.5]).accepted) == ([1], [1])
    assert (decided([0.9999, 0.5, 0.5]).invalid, decided([0.9999, 0.5, 0.5]).accepted) == ([0], [0])


@pytest.fixture(params=["tensors", "python numbers", "on demand"])
def restricted(monkeypatch, request):
    """The verifications over the kept tokens only."""
    seen = []
    # Of the verification, of drafting, and of positions that are truncated on demand.
    monkeypatch.setattr(few_numbers, "MOST", 0 if request.param == "tensors" else 10**9)
    monkeypatch.setattr(token_by_token, "FEW", 0 if request.param == "tensors" else 10**9)
    monkeypatch.setattr(transformers_cactus.decoding, "MOST", 10**9 if request.param == "on demand" else 0)

    def spy(called):
        def call(*args, **kwargs):
            seen.append(called)
            return called(*args, **kwargs)

        return call

    name = "decide" if request.param == "on demand" else "verify_kept"
    monkeypatch.setattr(transformers_cactus.decoding, name, spy(getattr(transformers_cactus.decoding, name)))
    return seen


@pytest.mark.parametrize("case", CASES, ids=str)
def test_truncated_texts_have_the_exact_law(case, restricted):
    outcomes = draw(3000, "fast", verifier_model(case.vocab), case.prompt, **case.options())
    assert restricted
    fits(outcomes, law(case, "fast"))


def test_truncated_texts_of_one_rule_do_not_pass_for_those_of_another(restricted):
    case = CASES[1]
    outcomes = draw(3000, "fast", verifier_model(case.vocab), case.prompt, **case.options())
    assert restricted
    does_not_fit(outcomes, law(replace(case, rule="speculative"), "fast"))


def test_a_block_of_which_one_position_fell_back_to_the_warpers_has_the_exact_law(monkeypatch, restricted):
    # As where many tokens tie: the draft's few tokens are then not known for the whole block.
    truncate, calls = Truncation.truncate, iter(range(10**6))
    monkeypatch.setattr(
        Truncation, "truncate", lambda self, scores: None if next(calls) % 4 == 1 else truncate(self, scores)
    )
    case = Case("cactus", 0.5, "other", block=3, new_tokens=4, vocab=16, sampling=TRUNCATED)
    outcomes = draw(3000, "fast", verifier_model(case.vocab), case.prompt, **case.options())
    assert restricted
    fits(outcomes, law(case, "fast"))
