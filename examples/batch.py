"""A batch of prompts of different lengths, each with a budget of its own.

python examples/batch.py
python examples/batch.py --verifier Qwen/Qwen3-8B --draft Qwen/Qwen3-0.6B
"""

from models import SAMPLING, pair_from_command_line

import transformers_cactus

QUESTIONS = ["What is a cactus?", "Why do leaves fall in autumn, and what does the tree gain?", "Name three rivers."]
DELTAS = [0.0, 0.25, 0.75]

verifier, draft, tokenizer = pair_from_command_line(__doc__)
tokenizer.padding_side = "left"
chats = [[{"role": "user", "content": question}] for question in QUESTIONS]
batch = tokenizer.apply_chat_template(
    chats, add_generation_prompt=True, padding=True, return_dict=True, return_tensors="pt"
).to(verifier.device)

output = transformers_cactus.generate(
    verifier,
    **batch,
    **SAMPLING,
    max_new_tokens=40,
    assistant_model=draft,
    cactus_delta=DELTAS,
    return_dict_in_generate=True,
)

new = output.sequences[:, batch["input_ids"].shape[1] :]
answers = tokenizer.batch_decode(new, skip_special_tokens=True)
for question, delta, answer, row in zip(QUESTIONS, DELTAS, answers, output.acceptance.sequences, strict=True):
    accepted, rounds = sum(row.accepted_per_round), len(row.accepted_per_round)
    nats = sum(row.divergence) / len(row.origins)
    print(f"--- {question} (delta {delta})\n{answer}")
    print(f"({len(row.origins)} tokens, accepted length {accepted / rounds:.2f}, {nats:.3f} nats a token)\n")
