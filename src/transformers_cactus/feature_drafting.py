"""A feature draft as a drafter."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from ._compat import input_device
from .cache import DraftMemory, RaggedCache
from .feature_draft import FeatureDraft
from .inputs import ForwardInputs
from .processing import BlockProcessor
from .sequences import Sequences
from .token_by_token import TokenByTokenDrafter
from .transfer import on_device, padded_rows


class FeatureDrafter(TokenByTokenDrafter):
    """A [`FeatureDraft`], run token by token on a cache of its own.

    The cache holds tokens that were read with the verifier's hidden states. Those drafted within a block were read
    with the draft's own: they leave it again, accepted or not, and accepted ones are read anew in the next round.

    Args:
        model ([`FeatureDraft`]): The draft. It may have another dtype and device than the verifier.
        embedding (`torch.nn.Module`): The verifier's.
        processor ([`BlockProcessor`]): See [`TokenByTokenDrafter`].
        vocab_size (`int`): The verifier's.
        batch_size (`int`): Rows.
        **how: See [`TokenByTokenDrafter`].
    """

    def __init__(
        self,
        model: FeatureDraft,
        embedding: torch.nn.Module,
        processor: BlockProcessor,
        vocab_size: int,
        batch_size: int,
        **how: Any,
    ):
        super().__init__(processor, vocab_size, **how)
        self.model = model
        self.forward_inputs = ForwardInputs(model.decoder)
        self.embedding = embedding
        self.device = input_device(model)
        self.hidden_states = [layer + 1 for layer in model.config.target_layer_ids]
        self.cache = RaggedCache(batch_size, device=self.device)
        # Nothing comes before a row's first token.
        self._unread = [(self._nothing(batch_size), [1] * batch_size)]
        self._own: Tensor | None = None

    def _nothing(self, rows: int) -> Tensor:
        weight = self.model.fuse.weight
        return torch.zeros(rows, 1, weight.shape[0], dtype=weight.dtype, device=self.device)

    def read(self, hidden_states: Sequence[Tensor], counts: Sequence[int]) -> None:
        """See [`Drafter.read`]."""
        self._unread.append((self.model.features(hidden_states), list(counts)))

    def _first_logits(self, sequences: Sequences) -> Tensor:
        features, counts = _joined(self._unread)
        self._unread = []
        new = [row[-count:] for row, count in zip(sequences.tokens, counts, strict=True)]
        logits = self._logits(on_device(padded_rows(new), sequences.last.device), features, counts)
        self.cache.commit(counts)
        return logits

    def _next_logits(self, tokens: Tensor) -> Tensor:
        assert self._own is not None
        logits = self._logits(tokens, self._own, [1] * len(tokens))
        self.cache.commit(1)
        return logits

    def _logits(self, tokens: Tensor, features: Tensor, counts: list[int]) -> Tensor:
        """Feeds the first tokens of each row; the logits behind the last of them, `[batch, 1, vocab]`."""
        inputs = self.forward_inputs(self.cache, tokens.to(self.device), past_limit=True)
        del inputs["input_ids"]
        embedded = self.embedding(tokens).to(features.device, features.dtype)
        level = min(counts) == max(counts)
        places = counts[0] - 1 if level else on_device([count - 1 for count in counts], self.device)
        output = self.model(inputs_embeds=embedded, features=features, places=places, **inputs)
        self._own = output.last_hidden_state
        logits: Tensor = output.logits
        return logits

    def commit(self, accepted: Sequence[int]) -> None:
        """See [`Drafter.commit`]."""
        if self._fed:
            self.cache.roll_back([self._fed] * len(accepted))

    def keep(self, kept: Sequence[int]) -> None:
        """See [`Drafter.keep`]."""
        self.cache.keep_rows(list(kept))
        index = on_device(kept, self.device)
        self._unread = [(features[index], [counts[row] for row in kept]) for features, counts in self._unread]

    def resume(self, cache: RaggedCache) -> None:
        """See [`Drafter.resume`]."""
        read, batch = cache.get_seq_length(), self.cache.batch_size
        memory = cache.draft
        if memory is None or memory.model() is not self.model or memory.cache.batch_size != batch:
            # The verifier does not read again what it has in its cache.
            self._unread = [(self._nothing(batch).expand(-1, read + 1, -1), [read + 1] * batch)]
            return
        self.cache, features = memory.cache, memory.features
        assert features is not None
        seen = self.cache.get_seq_length()
        if read < seen:
            # Rolled back by the caller, with the hidden states that the next token would be read with.
            self.cache.roll_back(seen - read)
            features = self._nothing(batch)
        features = features[:, : read - self.cache.get_seq_length() + 1]
        self._unread = [(features, [features.shape[1]] * batch)]

    def memory(self) -> DraftMemory:
        """See [`Drafter.memory`]."""
        features, _ = _joined(self._unread) if self._unread else (self._nothing(self.cache.batch_size), [])
        return DraftMemory(weakref.ref(self.model), self.cache, features)


def _joined(parts: Sequence[tuple[Tensor, list[int]]]) -> tuple[Tensor, list[int]]:
    """Parts of rows, each `[batch, tokens, hidden]` of which the first few count, as one."""
    totals = [sum(counts) for counts in zip(*(counts for _, counts in parts), strict=True)]
    if len(parts) == 1:
        return parts[0][0][:, : max(totals)], totals
    if all(min(counts) == max(counts) for _, counts in parts):
        return torch.cat([features[:, : counts[0]] for features, counts in parts], dim=1), totals
    rows = [torch.cat([features[row, : counts[row]] for features, counts in parts]) for row in range(len(totals))]
    return pad_sequence(rows, batch_first=True), totals
