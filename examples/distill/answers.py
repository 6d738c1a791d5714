"""Answers of the verifier to given prompts, many prompts of one length at a time."""

import random
from collections import defaultdict
from collections.abc import Iterator, Sequence

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from .chats import ANSWER_SETTINGS, POOL, end_tokens, preallocated_cache, sample
from .shards import ANSWER, FORCED, TOP, Rows


def passages_of(rows: Rows, tokenizer: PreTrainedTokenizerBase, *, shortest: int = 120, tokens: int = 90) -> list[str]:
    """Beginnings of the answers in some rows, whole sentences of at least `shortest` characters."""
    found = []
    for ids, role in zip(rows.ids, rows.role, strict=True):
        text = tokenizer.decode(ids[role == ANSWER][:tokens], skip_special_tokens=True).replace("\n", " ").strip()
        end = text.rfind(". ")
        if end > shortest:
            found.append(text[: end + 1])
    return found


def batches_of_one_length(
    prompts: Sequence[str], tokenizer: PreTrainedTokenizerBase, rows: int, seed: int
) -> Iterator[torch.Tensor]:
    """The prompts through the chat template, `[rows, length]`, in random order.

    What is longer than the shortest of its batch loses tokens before the template's last part; prompts that fill no
    batch are left out.
    """
    template = tokenizer.apply_chat_template(
        [{"role": "user", "content": "X"}], add_generation_prompt=True, tokenize=False
    )
    ending = tokenizer(template.rpartition("X")[2], add_special_tokens=False).input_ids
    by_length: dict[int, list[list[int]]] = defaultdict(list)
    for prompt in prompts:
        chat = [{"role": "user", "content": prompt}]
        ids = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=True)["input_ids"]
        by_length[len(ids)].append(ids)
    batches, waiting = [], []
    for _, group in sorted(by_length.items()):
        waiting += group
        while len(waiting) >= rows:
            batch, waiting = waiting[:rows], waiting[rows:]
            length = len(batch[0])
            batches.append([ids if len(ids) == length else ids[: length - len(ending)] + ending for ids in batch])
    random.Random(seed).shuffle(batches)
    yield from map(torch.tensor, batches)


@torch.inference_mode()
def write_answers(model: PreTrainedModel, prompts: torch.Tensor, new_tokens: int, seed: int) -> Rows:
    """Rows of prompt and answer with the verifier's own log-probabilities of the answer.

    Args:
        model: The verifier.
        prompts: `[rows, length]`.
        new_tokens: Tokens of each answer; what follows an end of sequence does not count.
        seed: Of the sampling.
    """
    rows, length = prompts.shape
    generator, ends = torch.Generator().manual_seed(seed), torch.tensor(end_tokens(model))
    result = Rows.empty(rows, length + new_tokens)
    result.ids[:, :length] = prompts
    result.role[:, length - 1 :] = ANSWER
    result.setting = (torch.arange(rows) % len(ANSWER_SETTINGS)).to(torch.int8)
    settings = torch.tensor(ANSWER_SETTINGS)[result.setting.long()]
    cache, finished = preallocated_cache(model, length + new_tokens), torch.zeros(rows, dtype=torch.bool)
    fed = prompts
    for place in range(length - 1, length + new_tokens):
        logits = model(fed.to(model.device), past_key_values=cache, use_cache=True, logits_to_keep=1).logits[:, -1]
        top, ids = (x.cpu() for x in logits.float().log_softmax(-1).topk(POOL, dim=-1))
        result.top_ids[:, place], result.top_logp[:, place] = ids[:, :TOP], top[:, :TOP]
        result.role[finished, place] = FORCED
        if place + 1 < length + new_tokens:
            fed = ids.gather(1, sample(top, settings, generator))
            finished |= torch.isin(fed[:, 0], ends)
            result.ids[:, place + 1] = fed[:, 0]
    return result
