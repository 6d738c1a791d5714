"""The recipe in examples/: its objective is what it says, and a run learns, stops and goes on."""

import sys
from pathlib import Path

import pytest
import torch

from test_conversation import chat_tokenizer
from test_distribution import tiny_llama
from test_feature_draft import Reference, feature_draft
from tiny_models import VOCAB, build

sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))

from distill.answers import batches_of_one_length, write_answers
from distill.draft import build_draft
from distill.evaluation import evaluate
from distill.feature_draft import FeatureTrainer, Passes, build_feature_draft
from distill.made_up_prompts import made_up_prompts
from distill.objective import Objective
from distill.shards import ANSWER, Rows, save_shard, shard_path
from distill.texts import label, pack
from distill.training import Plan, Trainer


@pytest.fixture
def verifier():
    model = build("llama", hidden=32, layers=4)
    model.requires_grad_(False)
    return model


@pytest.fixture
def rows(verifier) -> Rows:
    return label(verifier, torch.randint(3, VOCAB, (8, 16), generator=torch.Generator().manual_seed(0)).tolist())


def test_labels_are_the_verifiers_most_probable_tokens(verifier, rows: Rows):
    log_probs = verifier(rows.ids.long()).logits.log_softmax(-1)
    torch.testing.assert_close(log_probs.gather(-1, rows.top_ids.long()), rows.top_logp.float(), rtol=1e-2, atol=1e-2)
    assert (rows.top_ids[..., 0] == log_probs.argmax(-1)).all() and (rows.role == ANSWER).all()


def test_objective_is_zero_for_the_verifier_itself(verifier, rows: Rows):
    hidden = verifier.base_model(input_ids=rows.ids.long()).last_hidden_state
    objective = Objective(verifier.get_output_embeddings(), torch.arange(VOCAB))
    parts = objective(hidden, rows, torch.Generator().manual_seed(0))
    assert parts["kl"].abs() < 1e-3
    assert evaluate(verifier, rows)["acceptance at T=1"] > 0.9


def test_sampled_tokens_stand_for_the_rest_of_the_vocabulary(verifier, rows: Rows):
    hidden = build_draft(verifier, (0, 1)).base_model(input_ids=rows.ids.long()).last_hidden_state
    output, generator = verifier.get_output_embeddings(), torch.Generator().manual_seed(0)
    exact = Objective(output, torch.arange(VOCAB))(hidden, rows, generator)["kl"].item()
    guess = Objective(output, torch.arange(VOCAB // 2), sampled=20)
    guesses = [guess(hidden, rows, generator)["kl"].item() for _ in range(50)]
    assert sum(guesses) / len(guesses) == pytest.approx(exact, rel=0.1)


def test_a_run_learns_and_goes_on_where_it_was(verifier, rows: Rows, tmp_path: Path):
    for number in range(2):
        save_shard(rows, shard_path(tmp_path, number))

    def trainer(tokens: int, name: str) -> Trainer:
        plan = Plan(tokens=tokens, warm_up=16, decay=0, batch=2, lr=5e-3, vocabulary=VOCAB, evaluate_every=0)
        torch.manual_seed(0)
        return Trainer(build_draft(verifier, (0, 1)), tmp_path, tmp_path / f"{name}.pt", plan)

    whole = trainer(640, "whole")
    before = evaluate(whole.draft, rows)["KL at T=1"]
    whole.run()
    assert evaluate(whole.draft, rows)["KL at T=1"] < before - 0.1

    trainer(320, "halves").run()
    resumed = trainer(640, "halves")
    assert resumed.done == 320
    resumed.run()
    assert resumed.done == whole.done == 640


def test_texts_are_packed_without_gaps():
    class Letters:
        eos_token_id = 0

        def __call__(self, text: str, **_):
            return type("Encoding", (), {"input_ids": [ord(letter) for letter in text]})

    assert list(pack(["ab", "cde"], Letters(), 3)) == [[97, 98, 0], [99, 100, 101]]


def test_passes_are_what_a_draft_computes_within_a_block(verifier):
    draft = feature_draft(verifier, layers=2, read=(0, 2)).double()
    verifier = verifier.double()
    reference, text = Reference(verifier, draft), tuple(range(5, 14))
    ids = torch.tensor([text])
    states = verifier.base_model(ids, output_hidden_states=True).hidden_states
    passes = Passes(draft, verifier.get_input_embeddings())(ids, [states[1], states[3]], 4)
    for number, hidden in enumerate(passes):
        for place in range(number, len(text)):
            expected = reference.logits(text[: place + 1], place - number)
            torch.testing.assert_close(draft.logits(hidden[0, place]), expected)


def test_a_feature_draft_begins_as_the_plain_one_and_learns(verifier, rows: Rows, tmp_path: Path):
    for number in range(2):
        save_shard(rows, shard_path(tmp_path, number))
    plain = build_draft(verifier, (0, 1))
    # Tied to the embedding, as the recipe needs it.
    plain.set_output_embeddings(torch.nn.Linear(*reversed(plain.get_input_embeddings().weight.shape), bias=False))
    plain.get_output_embeddings().weight = plain.get_input_embeddings().weight
    draft = build_feature_draft(plain, torch.arange(VOCAB), (0, 2, 3))
    plan = Plan(tokens=1280, warm_up=16, decay=0, batch=2, lr=5e-3, evaluate_every=0)
    trainer = FeatureTrainer(verifier, draft, tmp_path, tmp_path / "run.pt", plan)
    ids = rows.ids.long()
    expected = plain(ids).logits
    for hidden in trainer.passes(ids, trainer.hidden_states(rows), 3):
        torch.testing.assert_close(draft.logits(hidden), expected)
    before = trainer.losses(rows)["loss"].item()
    trainer.run()
    assert trainer.losses(rows)["loss"].item() < before - 0.3
    assert set(trainer.results(rows)) == {f"acceptance of token {place}" for place in (1, 2, 3, 4)}


def test_shards_of_different_lengths_are_trained_on_together(verifier, rows: Rows, tmp_path: Path):
    longer = label(verifier, torch.randint(3, VOCAB, (8, 32), generator=torch.Generator().manual_seed(1)).tolist())
    for number, shard in enumerate((rows, rows, longer)):
        save_shard(shard, shard_path(tmp_path, number))
    plan = Plan(tokens=320, batch=2, vocabulary=VOCAB, evaluate_every=0)
    trainer = Trainer(build_draft(verifier, (0, 1)), tmp_path, tmp_path / "run.pt", plan)
    batches = iter(trainer.batches)
    shapes = [tuple(next(batches).ids.shape) for _ in range(6)]
    assert sorted(shapes) == [(2, 32)] * 4 + [(4, 16)] * 2
    trainer.run()
    assert trainer.done >= 320


def test_answers_are_labelled_up_to_their_end():
    verifier, tokenizer = tiny_llama(300, seed=0, layers=2), chat_tokenizer()
    verifier.generation_config.eos_token_id = 7
    prompts = made_up_prompts(60, 3, ["It rained. Nobody minded.", "The tree is old. It is tall."])
    assert len(set(prompts)) > 40
    batches = list(batches_of_one_length(prompts, tokenizer, 6, seed=0))
    assert batches and all(batch.shape[0] == 6 for batch in batches)
    batch = batches[0] % 300
    written = write_answers(verifier, batch, 12, seed=0)
    length = batch.shape[1]
    assert torch.equal(written.ids[:, :length].long(), batch)
    log_probs = verifier(written.ids.long()).logits.log_softmax(-1)
    for row in range(6):
        ends = [place for place in range(length, length + 12) if written.ids[row, place] == 7]
        last = ends[0] if ends else length + 12
        assert (written.role[row] == ANSWER).nonzero()[:, 0].tolist() == list(range(length - 1, last))
        place = length - 1
        top = written.top_ids[row, place].long()
        torch.testing.assert_close(
            log_probs[row, place, top], written.top_logp[row, place].float(), rtol=1e-2, atol=1e-2
        )
