"""Verification over the kept tokens only: the decisions, and the law, of verification over the vocabulary."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import transformers_cactus.decoding
from reference import Sampling
from test_distribution import Case, does_not_fit, draw, fits, law, verifier_model
from transformers_cactus import Cactus, CactusExact, Lenience, Speculative, few_numbers, token_by_token, verify
from transformers_cactus.processing import Processed
from transformers_cactus.restriction import verify_kept
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
    inside = torch.arange(block) < lengths[:, None]
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

    def by_token(probs):
        return {token: share for token, share in enumerate(probs[0].tolist()) if share > 0}

    drafted = {token.item(): 1.0} if p is None else by_token(p)
    gamma = rule.gamma(q.gather(-1, token[:, None])).item()
    weights = few_numbers._recovery(by_token(q), drafted, token.item(), gamma)
    found = torch.zeros(12, dtype=torch.float64)
    found[list(weights)] = torch.tensor(list(weights.values()), dtype=torch.float64)
    torch.testing.assert_close(found / found.sum(), expected / expected.sum(), rtol=1e-9, atol=1e-9)


def test_a_draft_that_is_no_distribution_is_reported():
    verifier_scores, kept = truncated(torch.randn(1, 2, 12, generator=torch.Generator().manual_seed(0)), 4)
    draft_scores = torch.full((1, 1, 12), torch.nan)
    drafted = verifier_scores[:, :1].argmin(-1)
    outcome = verify_kept(drafted, kept, Processed(draft_scores), Speculative())
    with pytest.raises(FloatingPointError, match="draft's scores for sequence 0 at position 0"):
        outcome.raise_if_invalid()


@pytest.fixture(params=["tensors", "python numbers"])
def restricted(monkeypatch, request):
    """The rules of the calls that were verified over the kept tokens only."""
    seen = []
    # Of the verification, and of drafting.
    limit = 0 if request.param == "tensors" else 10**9
    monkeypatch.setattr(few_numbers, "MOST", limit)
    monkeypatch.setattr(token_by_token, "FEW", limit)

    def spy(tokens, kept, draft_scores, rule, **kwargs):
        seen.append(rule)
        return verify_kept(tokens, kept, draft_scores, rule, **kwargs)

    monkeypatch.setattr(transformers_cactus.decoding, "verify_kept", spy)
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
