"""Text as it is written: with transformers' own streamer, and with one that also hears where tokens came from.

python examples/streaming.py
python examples/streaming.py --verifier Qwen/Qwen3-8B --draft Qwen/Qwen3-0.6B
"""

from models import SAMPLING, pair_from_command_line
from transformers import TextStreamer

import transformers_cactus
from transformers_cactus import Origin


class WithOrigins(TextStreamer):
    """Marks the tokens that are there thanks to the relaxed rule.

    A round's origins come before its tokens; the prompt comes first of all and has none.
    """

    def __init__(self, tokenizer):
        super().__init__(tokenizer)
        self.origins = []
        self.seen_prompt = False

    def put_origins(self, origins):
        """Hears where the next tokens came from."""
        self.origins += origins

    def put(self, value):
        """Hears the prompt, then one token after another."""
        if not self.seen_prompt:
            self.seen_prompt = True
            return
        text = self.tokenizer.decode(value)
        print(f"[{text}]" if self.origins.pop(0) is Origin.DELTA else text, end="", flush=True)

    def end(self):
        """Hears that the text is complete."""
        print()


verifier, draft, tokenizer = pair_from_command_line(__doc__)
messages = [{"role": "user", "content": "Why is the sky blue?"}]
inputs = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=True, return_tensors="pt")
inputs = inputs.to(verifier.device)

for streamer in (TextStreamer(tokenizer, skip_prompt=True, skip_special_tokens=True), WithOrigins(tokenizer)):
    transformers_cactus.generate(
        verifier,
        **inputs,
        **SAMPLING,
        max_new_tokens=40,
        assistant_model=draft,
        cactus_delta=0.75,
        streamer=streamer,
        return_dict_in_generate=True,  # without it there are no origins
    )
    print()
