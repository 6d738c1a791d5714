"""Run by test_hub.py in an environment without this package: a repository with a verifier and a draft in it."""

import copy
import sys
import warnings
from importlib.util import find_spec

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, TextStreamer, pipeline

assert find_spec("transformers_cactus") is None
repository = sys.argv[1]
warnings.filterwarnings("ignore", "Cactus.*has no effect without sampling")
tokenizer = AutoTokenizer.from_pretrained(repository)
model = AutoModelForCausalLM.from_pretrained(repository, trust_remote_code=True)
plain = AutoModelForCausalLM.from_pretrained(repository)
inputs = tokenizer("abc de", return_tensors="pt")
ids = inputs["input_ids"]
options = {"max_new_tokens": 12, "return_dict_in_generate": True}

torch.manual_seed(0)
output = model.generate(ids, do_sample=True, num_assistant_tokens=4, **options)
assert output.acceptance.emitted == 12 and output.acceptance.accepted > 0
assert output.acceptance.total_divergence > 0
lossless = model.generate(ids, do_sample=True, cactus_delta=0.0, **options)
assert lossless.acceptance.total_divergence == 0
assert "acceptance" not in model.generate(ids, do_sample=True, cactus_delta=None, **options)
assert "acceptance" not in plain.generate(ids, do_sample=True, **options)
assert torch.equal(model.generate(ids, max_new_tokens=12), plain.generate(ids, max_new_tokens=12))

# As `transformers serve` calls it.
config = copy.deepcopy(model.generation_config)
config.update(do_sample=True, max_new_tokens=12, return_dict_in_generate=True)
served = model.generate(**inputs, streamer=TextStreamer(tokenizer), generation_config=config, tokenizer=tokenizer)
assert served.acceptance.emitted == 12

pipe = pipeline("text-generation", repository, trust_remote_code=True, device="cpu")
answers = pipe(["abc", "de."], batch_size=2, max_new_tokens=5, min_new_tokens=5)
assert answers[0][0]["generated_text"].startswith("abc")

print(output.sequences[0].tolist())
