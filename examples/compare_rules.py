"""Acceptance rules side by side: what each accepts, and what that costs in divergence from the verifier.

python examples/compare_rules.py
python examples/compare_rules.py --verifier Qwen/Qwen3-8B --draft Qwen/Qwen3-0.6B
"""

import torch
from models import SAMPLING, pair_from_command_line
from rich.console import Console
from rich.table import Table

import transformers_cactus
from transformers_cactus import Cactus, CactusExact, Lenience, Optimal, Speculative, Typical

# A number for each that accepts about as much: what it costs is then what tells them apart.
RULES = [Speculative(), Cactus(0.5), CactusExact(0.5), Lenience(2.0), Optimal(1.0), Typical()]
QUESTIONS = ["What is a cactus?", "Write a short poem about rain."]

verifier, draft, tokenizer = pair_from_command_line(__doc__)
tokenizer.padding_side = "left"
chats = [[{"role": "user", "content": question}] for question in QUESTIONS]
batch = tokenizer.apply_chat_template(
    chats, add_generation_prompt=True, padding=True, return_dict=True, return_tensors="pt"
).to(verifier.device)

table = Table("rule", "accepted", "accepted length", "nats a token", title="small sample: raise the number of tokens")
for rule in RULES:
    torch.manual_seed(0)
    output = transformers_cactus.generate(
        verifier,
        **batch,
        **SAMPLING,
        max_new_tokens=24,
        assistant_model=draft,
        cactus_rule=rule,
        cactus_certificate=True,  # the divergence of what was really drawn, not of the rule's target
        return_dict_in_generate=True,
    )
    numbers = output.acceptance
    spent = sum(sum(one.certificate) for one in numbers.sequences) / numbers.emitted
    share = numbers.accepted / numbers.drafted
    table.add_row(type(rule).__name__, f"{share:.0%}", f"{numbers.mean_accepted_length:.2f}", f"{spent:.3f}")
Console().print(table)
