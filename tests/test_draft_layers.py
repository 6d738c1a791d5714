"""The layers that make the demo's models fast: packed and 8-bit weights, output over some of the vocabulary."""

import pytest
import torch
from torch import nn

import transformers_cactus
from tiny_models import build
from transformers_cactus.demo import pack_linear_layers, quantize_linear_layers
from transformers_cactus.demo.int8_linear import MOST_ROWS, Int8Linear
from transformers_cactus.demo.packed_linear import PackedLinear
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


def test_a_quantized_draft_is_sampled_from_what_it_computes():
    """The verifier's law stays whatever the draft's rounding does; the draft's own text changes a little only."""
    verifier, draft = build("llama", layers=2), build("llama", layers=2)
    quantize_linear_layers(draft)
    assert sum(isinstance(module, Int8Linear) for module in draft.modules()) == 2 * 7 + 1
    prompt = torch.arange(3, 12)[None]
    output = transformers_cactus.generate(
        verifier,
        prompt,
        assistant_model=draft,
        do_sample=False,
        max_new_tokens=40,
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
