"""Run by test_hub.py in an environment without this package: `custom_generate=` with a repository of code."""

import sys
from importlib.util import find_spec

import pytest
import torch
from transformers import GenerationConfig

import tiny_models

assert find_spec("transformers_cactus") is None
repository = sys.argv[1]
verifier, draft = tiny_models.pair("llama")
inputs = tiny_models.prompts([7])
repo = {"custom_generate": repository, "trust_remote_code": True}
options = {"assistant_model": draft, "do_sample": True, "max_new_tokens": 12, "return_dict_in_generate": True}

with pytest.raises(ValueError, match="trust_remote_code"):
    verifier.generate(**inputs, **repo | {"trust_remote_code": False}, cactus_delta=0.75, **options)
with pytest.raises(TypeError, match="Did you mean 'cactus_delta'"):
    verifier.generate(**inputs, **repo, cactus_detla=0.75, **options)
with pytest.raises(ValueError, match="need a draft to verify"):
    verifier.generate(**inputs, **repo, cactus_delta=0.75, max_new_tokens=3)

torch.manual_seed(0)
output = verifier.generate(**inputs, **repo, cactus_delta=0.75, num_assistant_tokens=4, **options)
assert output.acceptance.emitted == 12 and output.acceptance.accepted > 0

config = GenerationConfig(cactus_rule="optimal", cactus_multiplier=2.0, do_sample=True, max_new_tokens=4)
verifier.generate(**inputs, **repo, assistant_model=draft, generation_config=config)

batch = tiny_models.prompts([7, 4])
rows = verifier.generate(**batch, **repo, cactus_rule="speculative", **options | {"do_sample": False}).sequences
alone = verifier.generate(**inputs, do_sample=False, max_new_tokens=12)
assert torch.equal(rows[:1], alone)

whisper, small = tiny_models.pair("whisper")
spoken = tiny_models.generate_inputs("whisper")
whisper.generate(**spoken, **repo, assistant_model=small, do_sample=True, cactus_delta=0.5, max_new_tokens=4)

print(output.sequences[0].tolist())
