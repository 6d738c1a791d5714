"""`cactus_compile=True`: the same text from forwards of fixed shape, each compiled once.

Most tests compile with torch's backend `"eager"`: it traces each forward into one graph, with all checks of what the
graph depends on, and needs no C++ compiler. Tests of what inductor makes of that graph are slow ones, and are skipped
on a machine without a C++ compiler.
"""

import copy
import functools
import gc
import shutil
import subprocess
import sys
import weakref
from pathlib import Path

import pytest
import torch

import tiny_models
import transformers_cactus
from fast_calls import IGNORE_GREEDY, drafts, fast, new_tokens, noisy_copy, plain, plain_alone
from transformers_cactus import compiled
from transformers_cactus.cache import RaggedCache
from transformers_cactus.inputs import forward_inputs, left_align, prefill

pytestmark = pytest.mark.filterwarnings(IGNORE_GREEDY)

DEPRECATED = "ignore:.*past_key_values.*:FutureWarning"

INPUTS = tiny_models.prompts([3, 9])


@pytest.fixture(autouse=True)
def backend(monkeypatch):
    """Compile with the backend that needs no compiler; set to another one in a test."""
    compiled.compiler_error.cache_clear()
    monkeypatch.setattr(compiled, "BACKEND", "eager")
    yield functools.partial(monkeypatch.setattr, compiled, "BACKEND")
    compiled.compiler_error.cache_clear()


@functools.cache
def verifier(name="llama", attention=None):
    # Tracing takes a second per layer. Gemma's second layer is the first with full attention.
    return tiny_models.build(name, layers=2 if name == "gemma3" else 1, attention=attention)


@functools.cache
def noisy():
    return noisy_copy(verifier())


@functools.cache
def other():
    return tiny_models.build("llama", seed=1, hidden=32, layers=1)


def graphs():
    """How many graphs torch has made in this process."""
    return torch._dynamo.utils.counters["stats"]["unique_graphs"]


def shapes(model):
    """Rows, width and capacity of each compiled forward of a model."""
    return set(compiled._graphs.get(model, ()))


def seeded(model, inputs, **options):
    """A sampled call, always with the same random numbers."""
    torch.manual_seed(3)
    return fast(model, inputs, do_sample=True, top_k=0, **{"cactus_delta": 0.5} | options)


def same(output, expected):
    """Whether two outputs have the same text, and the same history."""
    return torch.equal(output.sequences, expected.sequences) and [
        (row.origins, row.drafted_per_round, row.accepted_per_round) for row in output.acceptance.sequences
    ] == [(row.origins, row.drafted_per_round, row.accepted_per_round) for row in expected.acceptance.sequences]


@pytest.mark.parametrize("name", ["llama", pytest.param("qwen3", marks=pytest.mark.slow), "gemma3", "gpt2"])
def test_greedy_text_is_that_of_plain_generate(name):
    draft = noisy() if name == "llama" else other()
    output = fast(verifier(name), INPUTS, assistant_model=draft, cactus_compile=True)
    assert new_tokens(output, INPUTS) == plain_alone(verifier(name), INPUTS)
    assert shapes(verifier(name)) <= {(2, 7, 256), (1, 7, 256)} and (2, 7, 256) in shapes(verifier(name))
    assert shapes(draft) >= {(2, 1, 256)}


@pytest.mark.slow
@pytest.mark.parametrize(("name", "attention"), tiny_models.VARIANTS)
@pytest.mark.filterwarnings("error:.*without being compiled")
def test_every_architecture(name, attention):
    model = tiny_models.build(name, layers=2, attention=attention)
    inputs = tiny_models.prompts([3, 20, 8, 1])
    output = fast(model, inputs, assistant_model=noisy_copy(model), cactus_compile=True, max_new_tokens=60)
    assert new_tokens(output, inputs) == plain_alone(model, inputs, max_new_tokens=60)
    assert shapes(model)


def test_nothing_is_compiled_twice():
    # Prompts, the lengths of rows, what is accepted and who leaves when differ from call to call and round to round.
    calls = [
        {"inputs": tiny_models.prompts(lengths, seed=seed), "cactus_delta": delta}
        for lengths, seed, delta in [([9, 3], 0, 0.5), ([4, 14], 1, 0.0), ([30, 6], 2, 2.0), ([5, 5], 3, 0.5)]
    ]
    for call in calls[:2]:
        seeded(verifier(), assistant_model=noisy(), cactus_compile=True, **call)
    known = shapes(verifier()), shapes(noisy())
    assert {shape[1] for shape in known[0]} == {7} and {shape[1] for shape in known[1]} == {1, 2}
    before = graphs()
    outputs = [seeded(verifier(), assistant_model=noisy(), cactus_compile=True, **call) for call in calls]
    assert (graphs(), shapes(verifier()), shapes(noisy())) == (before, *known)
    assert sum(len(output.acceptance.accepted_per_round) for output in outputs) > 30
    for call, output in zip(calls, outputs, strict=True):
        assert same(output, seeded(verifier(), assistant_model=noisy(), **call))


def test_each_shape_is_one_graph():
    # A guard on anything that changes between forwards would make more than one.
    model, draft, before = tiny_models.build("llama", layers=1), other(), graphs() - len(shapes(other()))
    for seed in range(2):
        inputs = tiny_models.prompts([3, 9], seed=seed)
        fast(model, inputs, assistant_model=draft, cactus_compile=True, max_new_tokens=40)
    assert graphs() - before == len(shapes(model)) + len(shapes(draft))


def test_sampled_sequences_of_one_prompt():
    options = {"assistant_model": noisy(), "num_return_sequences": 2, "eos_token_id": list(range(2, 12))}
    inputs = tiny_models.prompts([6])
    output = seeded(verifier(), inputs, **options, pad_token_id=0, cactus_compile=True)
    assert same(output, seeded(verifier(), inputs, **options, pad_token_id=0))
    assert len({len(row.origins) for row in output.acceptance.sequences}) == 2


def test_what_is_reported_is_that_of_the_plain_forwards():
    options = {"assistant_model": noisy(), "output_scores": True, "output_logits": True, "cactus_certificate": True}
    output, expected = (seeded(verifier(), INPUTS, **options, cactus_compile=flag) for flag in (True, False))
    assert same(output, expected)
    torch.testing.assert_close(torch.stack(output.scores), torch.stack(expected.scores), atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(torch.stack(output.logits), torch.stack(expected.logits), atol=1e-4, rtol=1e-4)
    for row, plain_row in zip(output.acceptance.sequences, expected.acceptance.sequences, strict=True):
        assert row.certificate == pytest.approx(plain_row.certificate, abs=1e-4)


@pytest.mark.filterwarnings(DEPRECATED)
@pytest.mark.parametrize("first", [False, True])
@pytest.mark.parametrize("second", [False, True])
def test_a_cache_goes_on_in_either_kind_of_call(first, second):
    one = tiny_models.prompts([7])
    begun = fast(verifier(), one, assistant_model=noisy(), cactus_compile=first, max_new_tokens=10)
    ids = torch.cat([begun.sequences, torch.tensor([[5, 6, 7]])], dim=1)
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    cache = getattr(begun, "cache", None) or begun.past_key_values
    output = fast(verifier(), inputs, assistant_model=noisy(), past_key_values=cache, cactus_compile=second)
    assert new_tokens(output, inputs) == plain_alone(verifier(), inputs)


@pytest.mark.filterwarnings(DEPRECATED)
def test_a_cache_goes_on_in_plain_generate():
    one = tiny_models.prompts([7])
    begun = fast(verifier(), one, assistant_model=noisy(), cactus_compile=True, max_new_tokens=10)
    inputs = {"input_ids": begun.sequences, "attention_mask": torch.ones_like(begun.sequences)}
    expected = plain_alone(verifier(), inputs)
    cache = getattr(begun, "cache", None) or begun.past_key_values
    assert new_tokens(plain(verifier(), inputs, past_key_values=cache), inputs) == expected


def test_prompt_lookup_has_a_verifier_to_compile():
    output = fast(verifier(), INPUTS, **drafts(verifier(), other())["look-up"], cactus_compile=True)
    assert new_tokens(output, INPUTS) == plain_alone(verifier(), INPUTS)
    assert min(output.acceptance.drafted_per_round) < 6, "blocks must differ in length"
    assert {width for _, width, _ in shapes(verifier())} == {7}


@pytest.mark.parametrize("schedule", [pytest.param("heuristic", marks=pytest.mark.slow), "adaptive"])
def test_schedules(schedule):
    options = {"num_assistant_tokens_schedule": schedule, "num_assistant_tokens": 3, "max_new_tokens": 40}
    output = fast(verifier(), INPUTS, assistant_model=noisy(), cactus_compile=True, **options)
    assert new_tokens(output, INPUTS) == plain_alone(verifier(), INPUTS, max_new_tokens=40)


def test_learned_positions_to_their_end():
    # The padding of the last blocks lies behind the last position that there is.
    inputs = tiny_models.prompts([239, 243])
    model = verifier("gpt2")
    output = fast(model, inputs, assistant_model=other(), cactus_compile=True, max_new_tokens=13)
    assert new_tokens(output, inputs) == plain_alone(model, inputs, max_new_tokens=13)
    assert (2, 7, 512) in shapes(model)


def filled(lengths, capacity=0):
    """A cache that holds prompts of some lengths."""
    rows, row_lengths = left_align(**tiny_models.prompts([length + 1 for length in lengths]))
    cache = RaggedCache(len(rows), capacity=capacity)
    prefill(verifier(), cache, rows, row_lengths)
    return cache


@torch.no_grad()
def test_forwards_return_the_plain_ones_logits():
    forward = compiled.CompiledForward(verifier(), 3, 8, 20)
    cache, expected = filled([4, 11, 6]), filled([4, 11, 6])
    generator = torch.Generator().manual_seed(0)

    def compare(tokens, kept):
        ids = torch.randint(3, 90, (cache.batch_size, tokens), generator=generator)
        logits = forward(cache, ids)
        plain_logits = verifier()(**forward_inputs(verifier(), expected, ids)).logits
        torch.testing.assert_close(logits, plain_logits, atol=1e-4, rtol=1e-4)
        for one in (cache, expected):
            one.commit(kept)

    compare(2, [1, 2, 0])
    compare(3, [3, 1, 2])
    # Wider than the smallest width, then so wide that nothing is compiled.
    compare(5, [0, 5, 2])
    compare(9, [2, 9, 1])
    for one in (cache, expected):
        one.roll_back([1, 3, 0])
        one.keep_rows([2, 0])
    assert cache.buffer_shape == (3, 256) and expected.buffer_shape[0] == 2
    compare(3, [1, 3])
    compare(9, [4, 2])
    for one in (cache, expected):
        one.keep_rows([1])
    assert cache.buffer_shape == (1, 256)
    compare(1, [1])
    assert shapes(verifier()) >= {(3, 3, 256), (3, 6, 256), (1, 3, 256)}


@pytest.mark.slow
@torch.no_grad()
def test_buffers_grow_to_the_next_power_of_two():
    forward = compiled.CompiledForward(verifier(), 1, 1, 0)
    cache, expected = filled([255, 2], capacity=200), filled([255, 2])
    for one in range(3):
        ids = torch.tensor([[one + 5], [one + 9]])
        logits = forward(cache, ids)
        torch.testing.assert_close(logits, verifier()(**forward_inputs(verifier(), expected, ids)).logits)
        cache.commit(1)
        expected.commit(1)
    assert cache.buffer_shape == (2, 512)


@torch.no_grad()
def test_the_time_of_compiling_is_told_once():
    forward = compiled.CompiledForward(tiny_models.build("llama", layers=1), 1, 1, 0)
    cache = RaggedCache(1)
    prefill(forward.model, cache, *left_align(**tiny_models.prompts([4])))
    forward(cache, torch.tensor([[5]]))
    assert forward.take_seconds() > 0
    forward(cache, torch.tensor([[6]]))
    assert forward.take_seconds() == 0


def test_graphs_go_with_their_model():
    model = tiny_models.build("llama", layers=1)
    fast(model, tiny_models.prompts([4]), prompt_lookup_num_tokens=3, cactus_compile=True)
    assert shapes(model)
    seen = weakref.ref(model)
    del model
    gc.collect()
    assert seen() is None


def no_model_runs(*models):
    def fail(*_):
        raise AssertionError("a model ran")

    return [model.register_forward_pre_hook(fail) for model in models]


@pytest.mark.parametrize(
    ("options", "kind", "message"),
    [
        ({"cactus_compile": 1}, TypeError, "cactus_compile must be True or False, got 1"),
        ({"cactus_engine": "stock"}, ValueError, "leave out cactus_engine='stock'"),
        ({"output_attentions": True}, ValueError, "cactus_engine='fast' cannot run this call"),
    ],
)
@pytest.mark.filterwarnings("ignore:.*fast engine only")
def test_what_cannot_be_is_refused(options, kind, message):
    models = copy.copy(verifier()), copy.copy(other())
    hooks = no_model_runs(*models)
    try:
        with pytest.raises(kind, match=message):
            fast(models[0], INPUTS, assistant_model=models[1], **{"cactus_compile": True} | options)
    finally:
        for hook in hooks:
            hook.remove()


def test_a_rule_is_needed():
    with pytest.raises(ValueError, match="cactus_compile needs a rule"):
        transformers_cactus.generate(verifier(), **INPUTS, assistant_model=other(), cactus_compile=True)


def test_the_stock_engine_says_that_it_does_not_compile():
    bloom, draft = (tiny_models.build("bloom", seed=seed, layers=1) for seed in (0, 1))
    one = tiny_models.prompts([5])
    with pytest.warns(UserWarning, match="works in the fast engine only. BloomForCausalLM uses ALiBi"):
        output = fast(bloom, one, assistant_model=draft, cactus_engine="auto", cactus_compile=True)
    assert new_tokens(output, one) == plain_alone(bloom, one)


def test_a_draft_of_transformers_is_not_compiled():
    model, one = tiny_models.build("llama", layers=2), tiny_models.prompts([5])
    with pytest.warns(UserWarning, match="no effect: a draft by assistant_early_exit"):
        output = fast(model, one, assistant_early_exit=1, cactus_compile=True)
    assert new_tokens(output, one) == plain_alone(model, one)
    assert not shapes(model)


def test_a_missing_backend_is_said_before_anything_runs(backend):
    backend("no-such-backend")
    model = tiny_models.build("llama", layers=1)
    with pytest.warns(UserWarning, match="torch.compile does not work here: .*no-such-backend"):
        output = fast(model, INPUTS, assistant_model=other(), cactus_compile=True)
    assert new_tokens(output, INPUTS) == plain_alone(model, INPUTS)
    assert not shapes(model)


def test_a_model_that_cannot_be_compiled_runs_as_it_is():
    model = tiny_models.build("llama", layers=1)
    called = []
    model.register_forward_pre_hook(torch._dynamo.disable(lambda *_: called.append(1)))
    with pytest.warns(UserWarning, match="LlamaForCausalLM runs without being compiled, which failed: ") as caught:
        output = fast(model, INPUTS, assistant_model=other(), cactus_compile=True)
    assert len(caught) == 1 and called
    assert new_tokens(output, INPUTS) == plain_alone(model, INPUTS)
    # In the next call it is known.
    again = fast(model, INPUTS, assistant_model=other(), cactus_compile=True)
    assert torch.equal(again.sequences, output.sequences) and not shapes(model)


NO_COMPILER = """
import tiny_models
from fast_calls import fast
model = tiny_models.build("llama", layers=1)
fast(model, tiny_models.prompts([5]), assistant_model=model, cactus_compile=True)
"""


@pytest.mark.slow
def test_a_missing_compiler_is_said(tmp_path, monkeypatch):
    # Inductor looks for a compiler once per process.
    monkeypatch.setenv("CXX", "no-such-compiler")
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    done = subprocess.run(
        [sys.executable, "-W", "always", "-c", NO_COMPILER],
        cwd=Path(__file__).parent,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    assert "cactus_compile=True has no effect: torch.compile does not work here: InvalidCxxCompiler" in done.stderr


@pytest.mark.slow
@pytest.mark.skipif(not any(map(shutil.which, ("g++", "clang++"))), reason="inductor needs a C++ compiler")
@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_inductor(name, backend):
    backend("inductor")
    model = tiny_models.build(name, layers=2)
    draft = noisy_copy(model)
    output = fast(model, INPUTS, assistant_model=draft, cactus_compile=True)
    assert new_tokens(output, INPUTS) == plain_alone(model, INPUTS)
    assert shapes(model) and shapes(draft)
    before = graphs()
    assert same(
        seeded(model, INPUTS, assistant_model=draft, cactus_compile=True),
        seeded(model, INPUTS, assistant_model=draft),
    )
    # Who leaves when may differ, and bring a shape of its own.
    assert graphs() - before <= 3
