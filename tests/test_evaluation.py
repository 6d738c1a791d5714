"""Teacher-forced positions, rounds along them, and sums over texts with their intervals."""

import itertools
import json

import numpy as np
import pytest
import torch

import tiny_models
from test_cli import character_tokenizer
from transformers_cactus import Cactus, Ensemble, Optimal, Speculative, effective_distribution
from transformers_cactus.configuration import RULES
from transformers_cactus.evaluation import Sampling, read_prompts, write_prompts
from transformers_cactus.evaluation.estimates import ratio, resampling, summarize
from transformers_cactus.evaluation.grid import LOSSLESS, cells_for
from transformers_cactus.evaluation.measures import acceptance_at, choose_positions, measure
from transformers_cactus.evaluation.positions import Positions, read_positions
from transformers_cactus.evaluation.rounds import expected_rounds
from transformers_cactus.evaluation.sampling import PAPER, PLAIN, check_no_other_processors
from transformers_cactus.evaluation.store import Store
from transformers_cactus.evaluation.texts import Text, write_answers


@pytest.fixture(scope="module")
def pair():
    return tiny_models.pair("llama")


def text_of(model, length=9, seed=0):
    (text,) = write_answers(model, [[5, 6, 7, 8]], PAPER, length, seed)
    return text


# Positions.


@pytest.mark.parametrize("sampling", [PAPER, PLAIN, Sampling(0.8, 0, 0.7)], ids=str)
def test_positions_are_what_generate_samples_from(pair, sampling):
    verifier, _ = pair
    ids = torch.tensor([[5, 6, 7, 8]])
    torch.manual_seed(1)
    output = verifier.generate(
        ids, **sampling.options, max_new_tokens=9, output_scores=True, output_logits=True, return_dict_in_generate=True
    )
    text = Text(output.sequences[0].tolist(), 4)
    found = read_positions(*pair, text, sampling)
    expected = torch.cat(output.scores).softmax(-1).double()
    assert found.verifier.dtype == torch.float64 and found.verifier.shape[0] == 9
    # Which token a column is for does not matter; that all that count are there does.
    columns = found.verifier.shape[1]
    assert columns < 97 if sampling.top_k or sampling.top_p < 1 else columns == 97
    torch.testing.assert_close(
        found.verifier.sort(-1, descending=True).values,
        expected.sort(-1, descending=True).values[:, :columns],
        atol=1e-5,
        rtol=1e-4,
    )
    own = torch.cat(output.logits).log_softmax(-1).gather(-1, output.sequences[0, 4:, None])[:, 0]
    torch.testing.assert_close(found.log_probs, own, atol=1e-4, rtol=1e-4)


def test_columns_of_both_models_are_the_same_tokens(pair):
    text = text_of(pair[0])
    cut, whole = read_positions(*pair, text, Sampling(1.0, 5, 1.0)), read_positions(*pair, text, PLAIN)
    p, q = (
        torch.where(x >= x.topk(5).values[:, -1:], x, 0).div(x.topk(5).values.sum(-1, keepdim=True))
        for x in (whole.draft, whole.verifier)
    )
    torch.testing.assert_close(
        torch.minimum(cut.draft, cut.verifier).sum(-1), torch.minimum(p, q).sum(-1), atol=1e-6, rtol=1e-5
    )
    assert torch.minimum(p, q).sum() > 0.1


def test_a_draft_with_a_larger_vocabulary_keeps_the_mass_that_the_verifier_lacks(pair):
    verifier, _ = pair
    config = tiny_models.ALL["llama"].config(32, 2)
    config.vocab_size = 120
    torch.manual_seed(0)
    draft = type(verifier)(config).eval()
    found = read_positions(verifier, draft, text_of(verifier), PLAIN)
    assert found.draft.shape == found.verifier.shape == (9, 120)
    torch.testing.assert_close(found.draft.sum(-1), torch.ones(9, dtype=torch.float64), atol=1e-5, rtol=0)
    assert (found.verifier[:, 97:] == 0).all() and (found.draft[:, 97:].sum(-1) > 0).all()


def test_numbers_that_are_none_are_named(pair):
    verifier, draft = pair
    broken = tiny_models.build("llama", seed=3)
    broken.lm_head.weight.data[4] = torch.nan
    with pytest.raises(FloatingPointError, match="verifier's logits"):
        read_positions(broken, draft, text_of(verifier), PAPER)


def test_texts_depend_on_the_seed_only_and_leave_the_random_state(pair):
    verifier, _ = pair
    before = torch.get_rng_state()
    first, again, other = (text_of(verifier, seed=seed) for seed in (3, 3, 4))
    assert torch.equal(torch.get_rng_state(), before)
    assert first == again != other and first.begin == 4 and len(first.ids) == 13


def test_texts_end_with_the_token_that_ends_them(pair):
    verifier = tiny_models.build("llama")
    answers = write_answers(verifier, [[5, 6, 7]] * 40, PLAIN, 20, seed=0)
    ending = answers[0].ids[10]
    verifier.generation_config.eos_token_id = ending
    verifier.generation_config.pad_token_id = 0
    texts = write_answers(verifier, [[5, 6, 7]] * 40, PLAIN, 20, seed=0)
    answers = [text.ids[text.begin :] for text in texts]
    assert answers[0][-1] == ending and len(answers[0]) < 20
    assert all(ending not in answer[:-1] for answer in answers)


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        ({"temperature": 0.0}, ValueError),
        ({"temperature": float("nan")}, ValueError),
        ({"top_k": -1}, ValueError),
        ({"top_k": 2.0}, TypeError),
        ({"top_p": 0.0}, ValueError),
        ({"top_p": 1.1}, ValueError),
    ],
)
def test_sampling_settings_are_checked(arguments, error):
    with pytest.raises(error):
        Sampling(**arguments)


def test_other_processors_are_refused():
    model = tiny_models.build("llama")
    check_no_other_processors(model)
    model.generation_config.repetition_penalty = 1.1
    with pytest.raises(ValueError, match="has repetition_penalty"):
        check_no_other_processors(model)


# Rounds.


def enumerated_rounds(acceptance, block):
    """The same law from every sequence of outcomes, by walking through its rounds."""
    started, drafted = np.zeros(len(acceptance)), np.zeros(len(acceptance))
    for outcomes in itertools.product([True, False], repeat=len(acceptance)):
        weight = np.prod([a if kept else 1 - a for a, kept in zip(acceptance, outcomes, strict=True)])
        position = 0
        while position < len(acceptance):
            started[position] += weight
            for _ in range(block):
                if position == len(acceptance):
                    break
                drafted[position] += weight
                position += 1
                if not outcomes[position - 1]:
                    break
            else:
                position += 1
    return started, drafted


@pytest.mark.parametrize("block", [1, 2, 3, 9])
def test_rounds_follow_one_another(block):
    acceptance = np.random.default_rng(0).uniform(size=8)
    acceptance[2:4] = 0.0, 1.0
    found = expected_rounds(acceptance, block)
    started, drafted = enumerated_rounds(acceptance, block)
    np.testing.assert_allclose(found.started, started, atol=1e-12)
    np.testing.assert_allclose(found.drafted, drafted, atol=1e-12)


def test_certain_rounds():
    always = expected_rounds(np.ones(10), 4)
    assert always.started.tolist() == [1, 0, 0, 0, 0] * 2 and always.drafted.tolist() == [1, 1, 1, 1, 0] * 2
    never = expected_rounds(np.zeros(3), 4)
    assert never.started.tolist() == never.drafted.tolist() == [1, 1, 1]


# Sums and estimates.


def random_positions(count=12, vocab=8, seed=0, hole=False):
    generator = np.random.default_rng(seed)
    p, q = (torch.from_numpy(generator.dirichlet(np.full(vocab, 0.5), size=count)) for _ in range(2))
    if hole:
        q[:, 0] = 0
        q = q / q.sum(-1, keepdim=True)
    return Positions(p, q, torch.zeros(count))


@pytest.mark.parametrize("rule", [Cactus(0.4), Optimal(1.0), Speculative()], ids=repr)
def test_sums_are_those_of_the_emitted_distribution(rule):
    positions = random_positions()
    p, q = positions.draft, positions.verifier
    chosen = torch.arange(12) % 3 == 0
    for where, used in ((None, torch.ones(12, dtype=torch.bool)), (chosen, chosen)):
        sums = measure(positions, rule, [2], where)
        h = effective_distribution(p, q, rule)
        kl = (h * (h / q).log()).sum(-1)
        acceptance = acceptance_at(p, q, rule)
        rounds = expected_rounds(acceptance.numpy(), 2)
        assert sums["positions"] == 12 and sums["measured"] == used.sum()
        assert sums["accepted"] == pytest.approx(acceptance.sum().item())
        assert sums["kl"] == pytest.approx(kl[used].sum().item(), abs=1e-9)
        assert sums["spent@2"] == pytest.approx((kl * torch.from_numpy(rounds.drafted))[used].sum().item(), abs=1e-9)
        assert sums["kept@2"] + sums["rejected@2"] == pytest.approx(rounds.drafted.sum())
        assert sums["outside"] == 0


def test_mass_outside_the_verifiers_support_is_counted():
    sums = measure(random_positions(hole=True), Ensemble(0.5), [2])
    assert sums["outside"] == 12 and np.isinf(sums["kl"]) and np.isinf(sums["spent@2"])
    assert measure(random_positions(hole=True), Ensemble(0.5, within_support=True), [2])["outside"] == 0


@pytest.mark.parametrize("cell", cells_for(PLAIN, RULES), ids=lambda cell: cell.label)
def test_cheap_acceptance_is_the_acceptance(cell):
    positions = random_positions(hole=True)
    found = acceptance_at(positions.draft, positions.verifier, cell.rule).sum().item()
    assert found == pytest.approx(measure(positions, cell.rule, [2])["accepted"], abs=1e-8)


def test_every_rule_gets_more_acceptance_along_its_cells():
    positions = random_positions(200, 30)
    cells = cells_for(PLAIN, RULES)
    assert cells[0] == LOSSLESS
    for _, group in itertools.groupby(cells[1:], key=lambda cell: cell.name):
        accepted = [measure(positions, cell.rule, [2])["accepted"] for cell in group]
        assert len(accepted) >= 5 and all(a < b for a, b in itertools.pairwise(accepted))


def test_rules_are_chosen_by_name():
    def names(*arguments):
        return {cell.name for cell in cells_for(*arguments)}

    assert {name.partition(",")[0] for name in names(PLAIN, RULES)} == RULES.keys() - {"speculative"} | {"lossless"}
    assert names(PLAIN, RULES) - names(PAPER) == {"chi-square"}
    assert names(PAPER) - names(PLAIN) == {"jensen-shannon", "reverse-kl"}
    assert names(PLAIN, ["reverse-kl", "ensemble"]) == {
        "lossless",
        "cactus",
        "reverse-kl",
        "ensemble",
        "ensemble, within support",
    }
    chi_square = [cell.rule for cell in cells_for(PLAIN, ["chi-square"]) if cell.name == "chi-square"]
    cactus = [cell.rule for cell in cells_for(PLAIN) if cell.name == "cactus"]
    q_n = torch.linspace(0, 1, 11)
    for one, other in zip(chi_square, cactus, strict=True):
        torch.testing.assert_close(one.gamma(q_n), other.gamma(q_n))


def test_chosen_positions():
    chosen = choose_positions([5, 10, 3], 7, seed=0)
    assert [len(part) for part in chosen] == [5, 10, 3] and sum(int(part.sum()) for part in chosen) == 7
    assert choose_positions([5, 2], 7, seed=0) == choose_positions([5, 2], None, seed=0) == [None, None]


def test_intervals_are_those_of_the_mean():
    generator = np.random.default_rng(0)
    values, sizes = generator.normal(3, 1, size=400), np.ones(400)
    found = ratio(resampling(400), values, sizes)
    assert found.value == pytest.approx(values.mean())
    half = 1.96 * values.std() / 20
    assert (found.high - found.low) / 2 == pytest.approx(half, rel=0.15)
    assert found.low < found.value < found.high


def test_infinite_and_unknown_numbers_stay_so():
    weights = resampling(3)
    assert ratio(weights, np.array([1, np.inf, 2]), np.ones(3)) == (np.inf,) * 3
    assert all(np.isnan(part) for part in ratio(weights, np.zeros(3), np.zeros(3)))


def test_ratios_to_lossless_are_of_the_same_texts():
    rows = [measure(random_positions(seed=seed), Speculative(), [3]) for seed in range(6)]
    numbers = summarize(rows, [3], resampling(6), rows)
    assert numbers["rejected_ratio@3"] == (1, 1, 1)
    assert numbers["kl"].value == pytest.approx(0, abs=1e-9) and 0 < numbers["acceptance"].value < 1


# Prompts.


def test_prompts_from_files(tmp_path):
    tokenizer = character_tokenizer()
    as_read = [tokenizer.decode(ids) for ids in read_prompts(write(tmp_path / "a.txt", "one\n\ntwo\n"), tokenizer, 2)]
    assert as_read == ["user: one ", "user: two "]
    lines = [
        "plain",
        {"prompt": "one", "text": "other"},
        {"messages": [{"role": "user", "content": "one"}, {"role": "assistant", "content": "two"}]},
        {"question": "two"},
    ]
    file = write(tmp_path / "a.jsonl", "\n".join(json.dumps(line) for line in lines))
    texts = [tokenizer.decode(ids) for ids in read_prompts(file, tokenizer, 4)]
    assert texts == ["user: plain ", "user: one ", "user: one ", "user: two "]


def write(file, text):
    file.write_text(text)
    return str(file)


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("a.txt", "one\n", "has 1 prompt, 2 are asked for"),
        ("a.jsonl", '{"prompt": "one"}\n{"answer": "two"}\n', "entry 2 of .* has no prompt"),
        ("a.jsonl", '{"prompt": "one"}\n{"prompt"\n', "line 2 of .* is no JSON"),
    ],
)
def test_files_without_prompts_are_refused(tmp_path, name, text, message):
    with pytest.raises(ValueError, match=message):
        read_prompts(write(tmp_path / name, text), character_tokenizer(), 2)


@pytest.mark.slow
def test_prompts_from_a_data_set(tmp_path):
    datasets = pytest.importorskip("datasets")
    folder = tmp_path / "set"
    folder.mkdir()
    datasets.Dataset.from_dict({"instruction": ["one", "two", "three"]}).to_parquet(str(folder / "train.parquet"))
    tokenizer = character_tokenizer()
    prompts = read_prompts(str(folder), tokenizer, 2)
    assert [tokenizer.decode(ids) for ids in prompts] == ["user: one ", "user: two "]


def test_the_verifier_writes_prompts(pair):
    verifier, _ = pair
    tokenizer = character_tokenizer()
    prompts = write_prompts(verifier, tokenizer, 3, seed=1)
    assert prompts == write_prompts(verifier, tokenizer, 3, seed=1) and len({tuple(ids) for ids in prompts}) == 3
    opening = tokenizer("user: ", add_special_tokens=False).input_ids
    assert all(ids[: len(opening)] == opening and len(ids) == len(opening) + 64 + 1 for ids in prompts)
    bare = character_tokenizer(template=None)
    assert {ids[0] for ids in write_prompts(verifier, bare, 2)} == {bare.bos_token_id}


# The store.


def test_a_store_goes_on_where_it_stopped(tmp_path):
    file = tmp_path / "progress.jsonl"
    store = Store(file, {"seed": 1})
    assert store.get("a", lambda: [1.5, float("inf")]) == [1.5, float("inf")] and "b" not in store
    with file.open("a") as cut:
        cut.write('{"part": "b", "val')
    store = Store(file, {"seed": 1})
    assert store.get("a", pytest.fail) == [1.5, float("inf")] and "b" not in store
    store.get("b", lambda: 2)
    assert Store(file, {"seed": 1}).get("b", pytest.fail) == 2
    with pytest.raises(ValueError, match="another measurement"):
        Store(file, {"seed": 2})
