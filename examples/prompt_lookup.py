"""Drafts without a draft model: what followed the last time the same words occurred.

It pays where the answer repeats the prompt: editing, summaries, questions about a text, code.

python examples/prompt_lookup.py
python examples/prompt_lookup.py --verifier Qwen/Qwen3-8B --draft Qwen/Qwen3-0.6B
"""

from models import SAMPLING, pair_from_command_line

import transformers_cactus

TEXT = (
    "The saguaro is a tree-like cactus that can grow over 12 metres tall. It is native to the Sonoran Desert in "
    "Arizona, to Sonora in Mexico, and to the Whipple Mountains in California. Its flower is the state flower of "
    "Arizona."
)

verifier, _, tokenizer = pair_from_command_line(__doc__)
messages = [{"role": "user", "content": f"Repeat this text and correct its mistakes: {TEXT}"}]
inputs = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=True, return_tensors="pt")
inputs = inputs.to(verifier.device)

for delta in (0.0, 0.5):
    output = transformers_cactus.generate(
        verifier,
        **inputs,
        **SAMPLING,
        max_new_tokens=60,
        prompt_lookup_num_tokens=8,
        cactus_delta=delta,
        return_dict_in_generate=True,
    )
    print(f"--- delta {delta}: {output.acceptance}")
    print(tokenizer.decode(output.sequences[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True), "\n")
