"""transformers' text-generation pipeline with Cactus, over a data set.

python examples/pipeline.py
python examples/pipeline.py --verifier Qwen/Qwen3-8B --draft Qwen/Qwen3-0.6B
"""

from datasets import Dataset
from models import SAMPLING, pair_from_command_line
from transformers.pipelines.pt_utils import KeyDataset

import transformers_cactus

verifier, draft, tokenizer = pair_from_command_line(__doc__)
tokenizer.padding_side = "left"

# Names instead of models work too, as in transformers.pipeline.
pipe = transformers_cactus.pipeline(
    "text-generation", model=verifier, tokenizer=tokenizer, assistant_model=draft, cactus_delta=0.25
)

chats = Dataset.from_dict(
    {"chat": [[{"role": "user", "content": f"Describe a {thing} in one sentence."}] for thing in ("cactus", "fox")]}
)
for (answer,) in pipe(KeyDataset(chats, "chat"), batch_size=2, **SAMPLING, max_new_tokens=30):
    print("---", answer["generated_text"][-1]["content"])

# Options of a call win over those of the pipeline.
(answer,) = pipe("A cactus is", **SAMPLING, max_new_tokens=20, cactus_delta=0.75)
print("---", answer["generated_text"])
