"""A test-only loop over a `RaggedCache`: greedy text in blocks, some of whose drafted tokens are wrong."""

import random
from typing import Any

import torch

from transformers_cactus.cache import RaggedCache
from transformers_cactus.inputs import forward_inputs, left_align, prefill


def plain_greedy(model: Any, inputs: dict[str, torch.Tensor], new_tokens: int) -> list[list[int]]:
    """Return the new tokens of plain `generate`, all rows together."""
    output = model.generate(**inputs, max_new_tokens=new_tokens, do_sample=False)
    return output[:, inputs["input_ids"].shape[1] :].tolist()


def plain_greedy_alone(model: Any, inputs: dict[str, torch.Tensor], new_tokens: int) -> list[list[int]]:
    """Return the new tokens of plain `generate`, each row alone and without padding."""
    rows, lengths = left_align(**inputs)
    prompts = [row[None, :length] for row, length in zip(rows, lengths.tolist(), strict=True)]
    alone = ({"input_ids": prompt, "attention_mask": torch.ones_like(prompt)} for prompt in prompts)
    return [plain_greedy(model, row, new_tokens)[0] for row in alone]


@torch.no_grad()
def ragged_greedy(
    model: Any,
    inputs: dict[str, torch.Tensor],
    new_tokens: int,
    guesses: list[list[int]],
    *,
    seed: int = 0,
    tell_host: bool = True,
) -> list[list[int]]:
    """Return greedy new tokens of each row, decoded in blocks that rows accept unevenly.

    Args:
        model: the model.
        inputs: padded prompts.
        new_tokens: for each row.
        guesses: what to draft for each row; each drafted token is replaced by a random one with probability 0.25.
        seed: of block lengths and wrong tokens.
        tell_host: whether the cache is told the accepted counts on the host.
    """
    dice = random.Random(seed)
    vocabulary = model.config.vocab_size
    rows, lengths = left_align(**inputs)
    cache = RaggedCache(len(rows))
    prefill(model, cache, rows, lengths)
    last = rows.gather(1, lengths[:, None] - 1)[:, 0].tolist()
    texts: list[list[int]] = [[] for _ in last]
    active = list(range(len(last)))
    while active:
        size = dice.randint(0, 6)
        drafted = [
            [token if dice.random() < 0.75 else dice.randrange(vocabulary) for token in guesses[row][start:][:size]]
            for row in active
            for start in [len(texts[row])]
        ]
        # Rows near their end have fewer guesses: padding, never accepted, fills their block.
        block = [
            [last[row], *tokens, *[0] * (size - len(tokens))] for row, tokens in zip(active, drafted, strict=True)
        ]
        logits = model(**forward_inputs(model, cache, torch.tensor(block))).logits
        chosen = logits.argmax(-1).tolist()
        counts = []
        for row, tokens, best in zip(active, drafted, chosen, strict=True):
            matching = next((i for i, token in enumerate(tokens) if token != best[i]), len(tokens))
            counts.append(matching + 1)
            texts[row] += best[: matching + 1]
            last[row] = best[matching]
        cache.commit(counts if tell_host else torch.tensor(counts))
        going = [i for i, row in enumerate(active) if len(texts[row]) < new_tokens]
        if len(going) < len(active):
            active = [active[i] for i in going]
            cache.keep_rows(going)
    return [text[:new_tokens] for text in texts]
