"""The layers that make the demo's models fast: packed and 8-bit weights, output over some of the vocabulary."""

import copy

import pytest
import torch
from torch import nn

import transformers_cactus
from tiny_models import build
from transformers_cactus.cache import RaggedCache
from transformers_cactus.demo import pack_linear_layers, quantize_linear_layers
from transformers_cactus.demo.int8_layers import Int8LlamaLayer
from transformers_cactus.demo.int8_linear import MOST_ROWS, Int8Linear, quantize
from transformers_cactus.demo.packed_linear import PackedLinear
from transformers_cactus.demo.replacing import is_linear, replace_modules
from transformers_cactus.inputs import forward_inputs
from transformers_cactus.subset_output import SubsetOutput


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("rows", [(1,), (5,), (2, 7), (1, 1, 3)])
def test_packed_linear_computes_what_linear_computes(rows: tuple[int, ...], bias: bool):
    torch.manual_seed(0)
    linear, hidden = nn.Linear(48, 80, bias=bias), torch.randn(*rows, 48)
    with torch.no_grad():
        torch.testing.assert_close(PackedLinear(linear)(hidden), linear(hidden))


def test_packing_keeps_weights_ties_and_greedy_text():
    model = build("llama", layers=2)
    prompt, names = torch.arange(3, 12)[None], set(model.state_dict())
    before = model.generate(prompt, do_sample=False, max_new_tokens=20, pad_token_id=0)
    embedding = model.get_input_embeddings().weight.data_ptr()
    tied = model.get_output_embeddings().weight.data_ptr() == embedding
    pack_linear_layers(model)
    assert sum(isinstance(module, PackedLinear) for module in model.modules()) == 2 * 7 + 1
    assert set(model.state_dict()) == names
    assert (model.get_output_embeddings().weight.data_ptr() == embedding) is tied
    assert torch.equal(model.generate(prompt, do_sample=False, max_new_tokens=20, pad_token_id=0), before)


def test_only_float32_on_a_processor_can_be_packed():
    with pytest.raises(ValueError, match=r"only float32 on a processor .* torch.bfloat16 on cpu"):
        pack_linear_layers(build("llama").bfloat16())


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("rows", [(1,), (3,), (2, 7), (1, 1, 3), (MOST_ROWS + 1,)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_int8_linear_multiplies_its_rounded_weight(rows: tuple[int, ...], bias: bool, dtype: torch.dtype):
    torch.manual_seed(0)
    linear, hidden = nn.Linear(64, 80, bias=bias).to(dtype), torch.randn(*rows, 64).to(dtype)
    quantized = Int8Linear(linear)
    rounded = quantized.weight.double() * quantized.scales.double()[:, None]
    # Half a step of rounding.
    assert ((rounded - linear.weight.double()).abs() <= quantized.scales.double()[:, None] * 0.51).all()
    expected = hidden.double() @ rounded.T + (linear.bias.double() if bias else 0)
    with torch.no_grad():
        found = quantized(hidden)
    assert found.dtype == dtype and found.shape == (*rows, 80)
    torch.testing.assert_close(found.double(), expected, rtol=2e-2, atol=2e-2)


def rounded(**changes: object) -> tuple[nn.Module, nn.Module]:
    """A draft with 8-bit weights; and in transformers' own layers, in float64, what those weights stand for."""
    torch.manual_seed(0)
    draft = build("llama", layers=2)
    if changes:
        draft.config.update(changes)
        draft = type(draft)(draft.config).eval()
    reference = copy.deepcopy(draft).double()
    quantize_linear_layers(draft)

    def dequantized(linear: nn.Linear) -> nn.Linear:
        weight, scales = quantize(linear.weight.float())
        result = copy.deepcopy(linear)
        result.weight = nn.Parameter(weight.double() * scales.double()[:, None])
        return result

    replace_modules(reference, is_linear, dequantized)
    return draft, reference


def assert_close_for_bfloat16(found: torch.Tensor, expected: torch.Tensor) -> None:
    # It has 8 bits, a relative error of 0.002 in each of the dozen roundings that a value goes through.
    assert (found - expected).norm() < 0.025 * expected.norm()


@torch.no_grad()
def test_8_bit_llama_layers_compute_what_transformers_does_with_their_weights():
    draft, reference = rounded()
    ids = torch.randint(3, 90, (3, 10))
    left_padded = torch.ones(3, 10, dtype=torch.long)
    left_padded[1, :4] = 0
    for mask in (None, left_padded):
        expected = reference(ids, attention_mask=mask).logits
        found = draft(ids, attention_mask=mask).logits.double()
        seen = torch.ones(3, 10, dtype=torch.bool) if mask is None else mask.bool()
        assert_close_for_bfloat16(found[seen], expected[seen])


@torch.no_grad()
def test_8_bit_llama_layers_on_a_ragged_cache():
    """Rows of different lengths, fed in pieces, give what each gives alone."""
    draft, reference = rounded()
    ids, counts = torch.randint(3, 90, (2, 12)), [5, 3]
    cache = RaggedCache(2)
    draft(**forward_inputs(draft, cache, ids[:, :5]))
    cache.commit(counts)
    ragged = torch.stack([row[count : count + 2] for row, count in zip(ids, counts, strict=True)])
    found = draft(**forward_inputs(draft, cache, ragged)).logits.double()
    cache.commit(2)
    last = torch.stack([row[count + 2 : count + 3] for row, count in zip(ids, counts, strict=True)])
    found = torch.cat([found, draft(**forward_inputs(draft, cache, last)).logits.double()], dim=1)
    for row, count in enumerate(counts):
        expected = reference(ids[row : row + 1, : count + 3]).logits[0, count:]
        assert_close_for_bfloat16(found[row], expected)


@pytest.mark.parametrize("change", [{"attention_bias": True}, {"mlp_bias": True}, {"hidden_act": "gelu"}])
@torch.no_grad()
def test_other_layers_keep_their_shape(change: dict[str, object]):
    draft, reference = rounded(**change)
    assert not any(isinstance(module, Int8LlamaLayer) for module in draft.modules())
    ids = torch.randint(3, 90, (2, 10))
    assert_close_for_bfloat16(draft(ids).logits.double(), reference(ids).logits)


def test_a_quantized_draft_is_sampled_from_what_it_computes():
    """The verifier's law stays whatever the draft's rounding does; the draft's own text changes a little only."""
    verifier, draft = build("llama", layers=2), build("llama", layers=2)
    quantize_linear_layers(draft)
    assert sum(isinstance(module, Int8LlamaLayer) for module in draft.modules()) == 2
    assert sum(isinstance(module, Int8Linear) for module in draft.modules()) == 2 * 4 + 1
    prompt = torch.arange(3, 12)[None]
    output = transformers_cactus.generate(
        verifier,
        prompt,
        assistant_model=draft,
        do_sample=False,
        max_new_tokens=40,
        num_assistant_tokens=4,
        cactus_rule="speculative",
        return_dict_in_generate=True,
        pad_token_id=0,
    )
    plain = verifier.generate(prompt, do_sample=False, max_new_tokens=40, pad_token_id=0)
    assert torch.equal(output.sequences, plain)
    assert output.acceptance.mean_accepted_length > 1


def test_a_quantized_draft_cannot_be_saved(tmp_path):
    draft = build("llama")
    quantize_linear_layers(draft)
    with pytest.raises(ValueError, match="8-bit weights cannot be saved: save it first"):
        draft.save_pretrained(tmp_path)


@torch.no_grad()
def test_layers_that_the_operator_cannot_multiply_stay_as_they_are():
    model, hidden = nn.Sequential(nn.Linear(36, 64), nn.Linear(64, 12), nn.Linear(12, 8)), torch.randn(3, 36)
    expected = model(hidden)
    quantize_linear_layers(model)
    assert [type(layer) for layer in model] == [nn.Linear, Int8Linear, nn.Linear]
    torch.testing.assert_close(model(hidden), expected, rtol=0.05, atol=0.02)
    quantize_linear_layers(model)  # nothing left to do


def test_packed_layers_are_not_quantized():
    model = build("llama")
    pack_linear_layers(model)
    with pytest.raises(ValueError, match="packed layers cannot be quantized: quantize a draft instead"):
        quantize_linear_layers(model)


def test_only_layers_on_a_processor_are_quantized():
    with pytest.raises(ValueError, match="the draft is on meta"):
        quantize_linear_layers(build("llama").to("meta"))


def test_subset_output_scores_its_tokens_and_excludes_the_others():
    torch.manual_seed(0)
    weight, tokens, hidden = torch.randn(50, 16), torch.tensor([3, 7, 8, 49]), torch.randn(2, 3, 16)
    output = SubsetOutput(weight, tokens)
    logits, full = output(hidden), hidden @ weight.T
    assert logits.shape == (2, 3, 50)
    torch.testing.assert_close(logits[..., tokens], full[..., tokens])
    others = torch.ones(50, dtype=torch.bool)
    others[tokens] = False
    assert (logits[..., others] == -torch.inf).all()
    pack_linear_layers(output)
    torch.testing.assert_close(output(hidden), logits)


def test_a_draft_over_some_tokens_leaves_the_verifier_all_of_them():
    verifier, draft = build("llama", layers=2), build("llama", layers=1)
    draft.set_output_embeddings(SubsetOutput(draft.get_output_embeddings().weight, torch.tensor([5, 6])))
    prompt = torch.arange(3, 12)[None].expand(400, -1)
    torch.manual_seed(0)
    output = transformers_cactus.generate(
        verifier,
        prompt,
        assistant_model=draft,
        cactus_delta=0.0,
        do_sample=True,
        max_new_tokens=2,
        pad_token_id=0,
    )
    q = verifier(prompt[:1]).logits[0, -1].softmax(-1)
    outside = 1 - q[[5, 6]].sum()
    found = (~torch.isin(output[:, 9], torch.tensor([5, 6]))).float().mean()
    assert abs(found - outside) < 4.9 * (outside * (1 - outside) / 400).sqrt()  # false alarms below 1e-6
