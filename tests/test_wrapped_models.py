"""Models inside wrappers: adapters, compiled, offloaded, quantised, in inference mode, in threads."""

import copy
import threading

import accelerate
import peft
import pytest
import torch
import transformers
from optimum import quanto
from packaging.version import Version

import tiny_models
import transformers_cactus
from fast_calls import IGNORE_GREEDY, noisy_copy
from transformers_cactus import without_adapter
from transformers_cactus.configuration import RunOptions
from transformers_cactus.engines import why_not_fast
from transformers_cactus.settings import CallSettings

pytestmark = [
    pytest.mark.filterwarnings(IGNORE_GREEDY),
    pytest.mark.filterwarnings("ignore:.*is deprecated:FutureWarning"),
    pytest.mark.filterwarnings("ignore:.*is deprecated:DeprecationWarning"),
]
INPUTS = tiny_models.prompts([7])
NEW = 16
SAMPLED = {"do_sample": True, "max_new_tokens": NEW, "cactus_delta": 0.75, "cactus_engine": "fast"}
SAMPLED["num_assistant_tokens"] = 4


@pytest.fixture(scope="module")
def verifier():
    return tiny_models.build("llama")


@pytest.fixture(scope="module")
def draft(verifier):
    return noisy_copy(verifier)


def sampled(model, draft, **options):
    torch.manual_seed(0)
    call = {**INPUTS, "assistant_model": draft, "return_dict_in_generate": True, **SAMPLED, **options}
    return transformers_cactus.generate(model, **call)


def greedy(model, draft, **options):
    return sampled(model, draft, do_sample=False, **options)


def plain(model):
    return model.generate(**INPUTS, do_sample=False, max_new_tokens=NEW)


def check(wrapped, draft, like=None):
    """A wrapped model, in the fast engine: its own greedy text, and with sampling what the bare model samples."""
    output = greedy(wrapped, draft)
    assert torch.equal(output.sequences, plain(wrapped))
    assert output.acceptance.accepted > 0
    if like is not None:
        assert torch.equal(sampled(wrapped, draft).sequences, sampled(like, draft).sequences)


def lora(**options):
    config = peft.LoraConfig(r=4, lora_alpha=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM", **options)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return peft.get_peft_model(tiny_models.build("llama"), config).eval()


@pytest.fixture
def adapted():
    return lora(init_lora_weights=False)


def test_adapter_on_the_verifier(adapted, verifier, draft):
    check(adapted, draft)
    assert not torch.equal(plain(adapted), plain(verifier))
    with transformers_cactus.enabled(adapted):
        torch.manual_seed(0)
        output = adapted.generate(**INPUTS, assistant_model=draft, return_dict_in_generate=True, **SAMPLED)
    assert torch.equal(output.sequences, sampled(adapted, draft).sequences)
    assert "generate" not in adapted.__dict__


def test_adapter_on_the_draft(adapted, verifier):
    check(verifier, adapted)


def test_draft_without_the_adapter(adapted, verifier):
    trainable = {name: p.requires_grad for name, p in adapted.named_parameters()}
    base = without_adapter(adapted)
    check(adapted, base)
    with torch.no_grad():
        ids = INPUTS["input_ids"]
        torch.testing.assert_close(base(ids).logits, verifier(ids).logits)
        assert not torch.allclose(adapted(ids).logits, verifier(ids).logits, atol=0.1)
        with adapted.disable_adapter():
            base(ids)
            torch.testing.assert_close(adapted(ids).logits, verifier(ids).logits)
    assert {name: p.requires_grad for name, p in adapted.named_parameters()} == trainable
    assert {id(p) for p in base.parameters()} == {id(p) for p in adapted.parameters()}


def test_an_adapter_that_changes_nothing_rejects_nothing():
    adapted = lora()
    output = sampled(adapted, without_adapter(adapted), cactus_delta=0.0)
    assert output.acceptance.accepted == output.acceptance.drafted > 0


def test_no_adapter_to_switch_off(adapted, verifier):
    with pytest.raises(ValueError, match="no adapter layers"):
        without_adapter(verifier)
    adapted.merge_adapter()
    with pytest.raises(ValueError, match="merged"):
        without_adapter(adapted)


@pytest.mark.skipif(
    Version(transformers.__version__) < Version("5.24"), reason="older loops lose count of PEFT's virtual tokens"
)
def test_virtual_tokens_run_in_the_stock_engine(draft):
    config = peft.PromptTuningConfig(num_virtual_tokens=3, task_type="CAUSAL_LM")
    with torch.random.fork_rng():
        torch.manual_seed(0)
        tuned = peft.get_peft_model(tiny_models.build("llama"), config).eval()
    with pytest.raises(ValueError, match="cactus_engine='fast' cannot run"):
        greedy(tuned, draft)
    output = greedy(tuned, draft, cactus_engine="auto")
    assert torch.equal(output.sequences, plain(tuned))


@pytest.mark.slow
def test_compiled_forward():
    verifier = tiny_models.build("llama", layers=1)
    compiled = copy.deepcopy(verifier)
    compiled.forward = torch.compile(compiled.forward, backend="eager", dynamic=True)
    check(compiled, noisy_copy(verifier), like=verifier)


def test_a_compiled_draft_is_a_draft(verifier, draft):
    # Whose truth value raises: nothing may ask for it.
    call = {**INPUTS, "assistant_model": torch.compile(copy.deepcopy(draft), backend="eager")}
    with pytest.raises(TypeError, match="len"):
        bool(call["assistant_model"])
    setting = CallSettings(verifier, call, RunOptions())
    setting.check()
    assert why_not_fast(setting) is None and not setting.copies


@pytest.mark.slow
def test_compiled_module(verifier, draft):
    module = torch.compile(copy.deepcopy(verifier), backend="eager", dynamic=True)
    check(module, draft, like=verifier)
    with transformers_cactus.enabled(module):
        torch.manual_seed(0)
        rows = module.generate(**INPUTS, assistant_model=draft, **SAMPLED)
    assert torch.equal(rows, sampled(verifier, draft).sequences)
    assert "generate" not in module._orig_mod.__dict__
    small = torch.compile(copy.deepcopy(draft), backend="eager", dynamic=True)
    check(verifier, small)


def test_offloaded_and_dispatched(verifier, draft):
    offloaded = accelerate.cpu_offload(copy.deepcopy(verifier), execution_device="cpu")
    assert next(offloaded.parameters()).device.type == "meta"
    check(offloaded, draft, like=verifier)
    dispatched = accelerate.dispatch_model(copy.deepcopy(verifier), {"": "cpu"}, force_hooks=True)
    check(dispatched, draft, like=verifier)
    check(verifier, accelerate.cpu_offload(copy.deepcopy(draft), execution_device="cpu"), like=verifier)


def test_quantised(verifier, draft):
    quantised, small = copy.deepcopy(verifier), copy.deepcopy(draft)
    for model in (quantised, small):
        quanto.quantize(model, weights=quanto.qint8)
        quanto.freeze(model)
    check(quantised, draft)
    check(verifier, small)


def test_inference_mode(verifier, draft):
    with torch.inference_mode():
        check(verifier, draft, like=verifier)
        inside = sampled(verifier, draft)
    assert torch.equal(inside.sequences, sampled(verifier, draft).sequences)


@pytest.mark.parametrize("models", [1, 2])
@pytest.mark.parametrize("engine", ["fast", "stock"])
def test_threads(verifier, draft, models, engine):
    verifiers = [copy.deepcopy(verifier) for _ in range(models)] * (2 // models)
    prompts = [tiny_models.prompts([length], seed=length) for length in (7, 11)]
    options = {"assistant_model": draft, "cactus_engine": engine, "cactus_delta": 0.5, "max_new_tokens": 40}
    results: list[list] = [[], []]

    def work(index):
        for _ in range(3):
            results[index].append(verifiers[index].generate(**prompts[index], do_sample=False, **options))

    for model in verifiers:
        transformers_cactus.enable(model)
    threads = [threading.Thread(target=work, args=(index,)) for index in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for index, outputs in enumerate(results):
        expected = verifier.generate(**prompts[index], do_sample=False, max_new_tokens=40)
        assert len(outputs) == 3 and all(torch.equal(output, expected) for output in outputs)
