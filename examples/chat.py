"""A conversation in which neither model reads anything twice. For the terminal there is `transformers-cactus chat`.

python examples/chat.py
python examples/chat.py --verifier Qwen/Qwen3-8B --draft Qwen/Qwen3-0.6B
"""

from models import SAMPLING, pair_from_command_line

from transformers_cactus import Conversation

verifier, draft, tokenizer = pair_from_command_line(__doc__)
conversation = Conversation(verifier, draft, tokenizer, system="You answer in one sentence.")

for question in ("What is a cactus?", "Where does it grow?", "How does it get water there?"):
    reply = conversation.send(question, **SAMPLING, max_new_tokens=40, cactus_delta=0.5)
    read = reply.prompt_tokens - reply.remembered_tokens
    print(f"--- {question}\n{reply.text}")
    print(f"(read {read} of {reply.prompt_tokens} prompt tokens; {reply.acceptance})\n")
