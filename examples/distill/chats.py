"""Chats that the verifier writes with itself: it takes the user's turn, then the answer, then the user's again."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers import DynamicCache, PreTrainedModel, PreTrainedTokenizerBase
from transformers.cache_utils import DynamicLayer

from .shards import ANSWER, FORCED, TOP, USER, Rows

# Temperature, top-k and top-p of the answers; rows take them in turn. Most are the settings that drafts are judged by.
ANSWER_SETTINGS = ((0.6, 20, 0.95), (0.6, 20, 0.95), (0.6, 20, 0.95), (0.8, 200, 1.0))
USER_SETTINGS = (1.0, 256, 0.95)
POOL = 256  # tokens are sampled from this many most probable ones


@dataclass
class Turns:
    """What a chat template puts around the turns, as token ids.

    Attributes:
        opening: All that comes before the first user turn.
        answer: From the end of a user turn to the begin of the answer.
        user: From the end of an answer to the begin of the next user turn.
    """

    opening: list[int]
    answer: list[int]
    user: list[int]

    @classmethod
    def of(cls, tokenizer: PreTrainedTokenizerBase) -> "Turns":
        """Derived from the template by rendering a marker in place of the turns."""
        if tokenizer.chat_template is None:
            raise ValueError("this tokenizer has no chat template: use the `texts` command instead")
        mark = "SENTINELXX"
        chat = [{"role": role, "content": mark} for role in ("user", "assistant", "user")]
        parts = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True).split(mark)
        if len(parts) != 4:
            raise ValueError("this chat template does not render its turns as they are: use the `texts` command")
        return cls(*(tokenizer(part, add_special_tokens=False).input_ids for part in parts[:3]))


class PreallocatedLayer(DynamicLayer):
    """A cache layer of known final length: writes in place, where the usual one copies itself at every token."""

    def __init__(self, length: int):
        super().__init__()
        self.length, self.used = length, 0

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        """Append new keys and values; returns all so far."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
            shape = (*key_states.shape[:-2], self.length)
            self.all_keys = key_states.new_empty(*shape, key_states.shape[-1])
            self.all_values = value_states.new_empty(*shape, value_states.shape[-1])
        end = self.used + key_states.shape[-2]
        self.all_keys[..., self.used : end, :] = key_states
        self.all_values[..., self.used : end, :] = value_states
        self.used = end
        self.keys, self.values = self.all_keys[..., :end, :], self.all_values[..., :end, :]
        return self.keys, self.values


def preallocated_cache(model: PreTrainedModel, length: int) -> DynamicCache:
    """A cache for `length` tokens; layers other than full attention stay as they are."""
    cache = DynamicCache(config=model.config)
    cache.layers = [PreallocatedLayer(length) if type(layer) is DynamicLayer else layer for layer in cache.layers]
    return cache


def sample(log_probs: torch.Tensor, settings: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """One index per row of descending log-probabilities `[rows, pool]`; settings `[rows, 3]` as above."""
    temperature, top_k, top_p = settings.T[:, :, None]
    rank = torch.arange(log_probs.shape[-1])
    probs = (log_probs / temperature).masked_fill(rank >= top_k, -torch.inf).softmax(-1)
    probs = probs.masked_fill(probs.cumsum(-1) - probs >= top_p, 0.0)
    return torch.multinomial(probs, 1, generator=generator)


@torch.inference_mode()
def write_chats(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    *,
    rows: int,
    length: int,
    seed: int,
    prompts: Sequence[str] = (),
) -> Rows:
    """Rows of chats with the verifier's own log-probabilities, which generating them gives for free.

    Where there are prompts, one of them is the first user turn of each row.
    """
    turns, generator = Turns.of(tokenizer), torch.Generator().manual_seed(seed)
    ends = torch.tensor(sorted({turns.answer[0], turns.user[0], *end_tokens(model)}))
    result = Rows.empty(rows, length)
    result.setting = (torch.arange(rows) % len(ANSWER_SETTINGS)).to(torch.int8)
    answering = torch.full((rows,), bool(prompts))
    to_answer, to_ask = torch.tensor(ANSWER_SETTINGS)[result.setting.long()], torch.tensor(USER_SETTINGS)
    forced = [turns.opening[1:] for _ in range(rows)]
    if prompts:
        chosen = torch.randint(len(prompts), (rows,), generator=generator).tolist()
        asked = [tokenizer(prompts[i], add_special_tokens=False).input_ids for i in chosen]
        forced = [turns.opening[1:] + ids + turns.answer for ids in asked]
    current = torch.full((rows, 1), turns.opening[0])
    cache = preallocated_cache(model, length)
    for t in range(length):
        result.ids[:, t] = current[:, 0]
        logits = model(current.to(model.device), past_key_values=cache, use_cache=True).logits[:, -1].float()
        top, ids = (x.cpu() for x in logits.log_softmax(-1).topk(POOL, dim=-1))
        result.top_ids[:, t], result.top_logp[:, t] = ids[:, :TOP], top[:, :TOP]
        result.role[:, t] = torch.where(answering, ANSWER, USER)
        settings = torch.where(answering[:, None], to_answer, to_ask)
        current = ids.gather(1, sample(top, settings, generator))
        for row in range(rows):
            if forced[row]:
                current[row], result.role[row, t] = forced[row].pop(0), FORCED
            elif current[row] in ends:
                current[row], *forced[row] = turns.user if answering[row] else turns.answer
                answering[row] = ~answering[row]
    return result


def end_tokens(model: PreTrainedModel) -> list[int]:
    """The verifier's end-of-sequence ids."""
    eos = model.generation_config.eos_token_id
    return [] if eos is None else eos if isinstance(eos, list) else [eos]
