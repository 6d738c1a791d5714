"""The layers that make the demo's models fast: packed weights, and an output layer over some of the vocabulary."""

import pytest
import torch
from torch import nn

import transformers_cactus
from tiny_models import build
from transformers_cactus.demo import pack_linear_layers
from transformers_cactus.demo.packed_linear import PackedLinear
from transformers_cactus.demo.subset_output import SubsetOutput


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
