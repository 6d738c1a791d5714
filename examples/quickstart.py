"""Three ways to generate with Cactus.

python examples/quickstart.py
python examples/quickstart.py --verifier Qwen/Qwen3-8B --draft Qwen/Qwen3-0.6B
"""

from models import SAMPLING, pair_from_command_line
from transformers import GenerationConfig

import transformers_cactus

# Any two models with one tokenizer will do: AutoModelForCausalLM.from_pretrained(...) and AutoTokenizer as usual.
verifier, draft, tokenizer = pair_from_command_line(__doc__)

messages = [{"role": "user", "content": "Give me three tips for learning to cook."}]
inputs = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=True, return_tensors="pt")
inputs = inputs.to(verifier.device)
sampling = {**SAMPLING, "max_new_tokens": 60}


def show(title, output):
    text = tokenizer.decode(output.sequences[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
    print(f"--- {title}\n{text}\n({output.acceptance})\n")


# 1. Enable Cactus on a model: its own generate() takes the options.
transformers_cactus.enable(verifier)
output = verifier.generate(
    **inputs, **sampling, assistant_model=draft, cactus_delta=0.75, return_dict_in_generate=True
)
show("model.generate after enable(model)", output)
transformers_cactus.disable(verifier)

# 2. Or leave the model as it is and call our generate(). With delta 0 nothing is lost: speculative sampling.
output = transformers_cactus.generate(
    verifier, **inputs, **sampling, assistant_model=draft, cactus_delta=0, return_dict_in_generate=True
)
show("transformers_cactus.generate, lossless", output)

# 3. Or put the options on a generation config, where save_pretrained keeps them.
config = GenerationConfig(**sampling, cactus_delta=0.75, cactus_rule="cactus-exact", return_dict_in_generate=True)
with transformers_cactus.enabled(verifier):
    output = verifier.generate(**inputs, generation_config=config, assistant_model=draft)
show("options on the GenerationConfig", output)
