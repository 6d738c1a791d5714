"""What the stock engine's processor emits at one position, in thousands of draws, against the effective distribution.

A text through the stock loop costs a forward per round, so that `test_distribution.py` draws few; the processor alone
draws many. Thresholds as in `chi_square.py`.
"""

import pytest
import torch

import chi_square
from transformers_cactus import (
    Cactus,
    CactusExact,
    CactusLogitsProcessor,
    Lenience,
    Speculative,
    effective_distribution,
)

DRAWS = 3000
PREFIX = torch.tensor([[3, 1]])
SCORES = torch.tensor([1.0, 2.0, -0.5, 0.3, 0.0, -1.5])
NEGATED = -SCORES


def draw(rule, draft_scores):
    """Tokens that the processor selects, the drafted ones sampled from the draft."""
    generator = torch.Generator().manual_seed(11)
    drafted = torch.multinomial(draft_scores.softmax(-1), DRAWS, replacement=True, generator=generator)
    processor = CactusLogitsProcessor(rule)
    selected = []
    with torch.random.fork_rng():
        torch.manual_seed(12)
        for token in drafted:
            sequence = torch.cat([PREFIX, token.view(1, 1)], dim=1)
            processor.begin_round(sequence, draft_scores[None, None], PREFIX.shape[1])
            selected.append(int(processor(PREFIX, SCORES[None]).argmax()))
    return selected


def law(rule, draft_scores):
    emitted = effective_distribution(draft_scores.double().softmax(-1), SCORES.double().softmax(-1), rule)
    return dict(enumerate((emitted / emitted.sum()).tolist()))


@pytest.mark.parametrize("rule", [Speculative(), Cactus(0.5), CactusExact(0.5), Lenience(3.0)], ids=str)
def test_a_position_has_the_exact_law(rule):
    assert chi_square.p_value(draw(rule, NEGATED), law(rule, NEGATED)) > chi_square.ALPHA


@pytest.mark.parametrize("rule", [Speculative(), Cactus(0.5)], ids=str)
def test_one_random_number_for_both_decisions_is_noticed(rule, monkeypatch):
    original = torch.rand
    monkeypatch.setattr(torch, "rand", lambda *shape, **options: original(shape[0], 1, **options).expand(shape))
    assert chi_square.p_value(draw(rule, NEGATED), law(rule, NEGATED)) < chi_square.ALPHA


def test_the_law_of_another_rule_is_noticed():
    assert chi_square.p_value(draw(Cactus(0.5), NEGATED), law(Speculative(), NEGATED)) < chi_square.ALPHA
