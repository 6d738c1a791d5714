"""A draft model as a drafter."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ._compat import input_device
from ._compat import vocab_size as vocab_size_of
from .cache import DraftMemory, RaggedCache
from .compiled import CompiledForward
from .drafting import Block
from .inputs import ForwardInputs, prefill
from .processing import BlockProcessor
from .sequences import Sequences
from .token_by_token import TokenByTokenDrafter
from .transfer import on_device, padded_rows


class ModelDrafter(TokenByTokenDrafter):
    """A draft model, run token by token on a cache of its own.

    Args:
        model (`PreTrainedModel`): The draft. It may have another dtype and device than the verifier.
        processor ([`BlockProcessor`]): See [`TokenByTokenDrafter`].
        vocab_size (`int`): The verifier's. Tokens beyond it are never drafted.
        prompts (`torch.LongTensor` of shape `[batch, longest]`): Left-aligned prompts.
        lengths (`list[int]`): Their lengths.
        compiled ([`CompiledForward`], *optional*): Runs the steps, of one token or two, where they are compiled.
        **how: See [`TokenByTokenDrafter`].
    """

    def __init__(
        self,
        model: Any,
        processor: BlockProcessor,
        vocab_size: int,
        prompts: Tensor,
        lengths: Sequence[int],
        *,
        compiled: CompiledForward | None = None,
        **how: Any,
    ):
        super().__init__(processor, vocab_size, **how)
        self.model = model
        self.forward_inputs = ForwardInputs(model)
        self.known_tokens = vocab_size_of(model)
        self.compiled = compiled
        self.device = input_device(model)
        self.cache = RaggedCache(len(prompts), device=self.device)
        self._prompts: tuple[Tensor, list[int]] | None = (prompts, list(lengths))
        self._unfed: Tensor | None = None
        self._unfed_rows: list[bool] = []

    def propose(self, sequences: Sequences, count: int) -> Block:
        """See [`Drafter.propose`]."""
        block = super().propose(sequences, count)
        self._unfed = block.tokens[:, -1:]
        return block

    def _first_logits(self, sequences: Sequences) -> Tensor:
        lengths = sequences.lengths()
        if self._prompts is not None:
            prompts, known = self._prompts
            self._prompts = None
            if known != lengths:
                prompts = torch.tensor(padded_rows(sequences.tokens))
            return self._feed_prompts(prompts, lengths)
        assert self.cache.rows.counts is not None
        unseen = [length - seen for length, seen in zip(lengths, self.cache.rows.counts, strict=True)]
        if unseen == [2 if unfed else 1 for unfed in self._unfed_rows]:
            return self._feed_last(sequences.last)
        # The verifier went on alone for some rounds.
        missed = [row[-count:] for row, count in zip(sequences.tokens, unseen, strict=True)]
        return self._feed_rows(torch.tensor(padded_rows(missed)), unseen)

    def _next_logits(self, tokens: Tensor) -> Tensor:
        return self._feed(tokens)

    def _feed_prompts(self, prompts: Tensor, lengths: list[int]) -> Tensor:
        if min(lengths) == max(lengths):
            return self._feed(prompts[:, self.cache.get_seq_length() :])
        ends = on_device(lengths, self.device)
        prompts = self._known(prompts)
        prefill(self.model, self.cache, prompts, ends, past_limit=True)
        return self._feed(prompts.gather(1, ends[:, None] - 1))

    def _feed_last(self, last: Tensor) -> Tensor:
        """Feeds each row's last token, behind its last drafted one where that was accepted."""
        if not any(self._unfed_rows):
            return self._feed(last[:, None])
        assert self._unfed is not None
        behind = on_device(self._unfed_rows, last.device).bool()
        # Rows that lack one token only end in padding, which is not committed.
        pair = torch.cat([torch.where(behind[:, None], self._unfed, last[:, None]), last[:, None]], dim=1)
        return self._feed_rows(pair, [2 if unfed else 1 for unfed in self._unfed_rows])

    def _feed_rows(self, tokens: Tensor, counts: list[int]) -> Tensor:
        """Feeds the first tokens of each row."""
        logits = self._logits(tokens)
        self.cache.commit(counts)
        last = on_device([count - 1 for count in counts], self.device)
        return logits[torch.arange(len(counts), device=self.device), last, None]

    def _feed(self, tokens: Tensor) -> Tensor:
        logits = self._logits(tokens, logits_to_keep=1)
        # Where the model had no choice it computed the others too.
        logits = logits if logits.shape[1] == 1 else logits[:, -1:]
        self.cache.commit(tokens.shape[1])
        return logits

    def _logits(self, tokens: Tensor, logits_to_keep: int | None = None) -> Tensor:
        known = self._known(tokens)
        # A row that has no positions left is fed like the others: its block is empty.
        if self.compiled is not None:
            return self.compiled(self.cache, known, logits_to_keep, past_limit=True)
        return self.model(**self.forward_inputs(self.cache, known, logits_to_keep, past_limit=True)).logits

    def _known(self, tokens: Tensor) -> Tensor:
        """Tokens on the draft's device; those that only the verifier's vocabulary has are read as another one."""
        known = self.known_tokens
        return (tokens.clamp(max=known - 1) if known < self.vocab_size else tokens).to(self.device)

    def commit(self, accepted: Sequence[int]) -> None:
        """See [`Drafter.commit`]."""
        # The last drafted token was never fed. Of the others, those behind a rejection go.
        removed = [self._fed - min(count, self._fed) for count in accepted]
        if any(removed):
            self.cache.roll_back(removed)
        self._unfed_rows = [count == self._fed + 1 for count in accepted]

    def keep(self, kept: Sequence[int]) -> None:
        """See [`Drafter.keep`]."""
        if self._prompts is not None:
            prompts, lengths = self._prompts
            self._prompts = prompts[list(kept)], [lengths[row] for row in kept]
        self.cache.keep_rows(list(kept))
        if self._unfed is not None:
            self._unfed = self._unfed[torch.tensor(list(kept), device=self._unfed.device)]
        self._unfed_rows = [self._unfed_rows[row] for row in kept] if self._unfed_rows else []

    def resume(self, cache: RaggedCache) -> None:
        """See [`Drafter.resume`]."""
        assert self._prompts is not None
        prompts, lengths = self._prompts
        memory = cache.draft
        if memory is None or memory.model() is not self.model or memory.cache.batch_size != len(prompts):
            return
        # The caller may have rolled the verifier's cache back. The last token is fed for its logits.
        known = memory.cache.get_seq_length()
        extra = known - min(known, cache.get_seq_length(), min(lengths) - 1)
        self.cache = memory.cache
        self.cache.roll_back(extra)

    def memory(self) -> DraftMemory:
        """See [`Drafter.memory`]."""
        return DraftMemory(weakref.ref(self.model), self.cache)
