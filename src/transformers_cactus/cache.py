"""A key-value cache for batches whose rows have different lengths and are rolled back by different amounts.

Every row is left-aligned: the token at position `t` of a row has its key and value at index `t` of that row's buffer.
A forward over `k` tokens writes behind each row's length, `commit` says how many of them stay, and what lies behind a
row's length is hidden by the masks of `masks` until it is overwritten.

    cache = RaggedCache(batch_size=4, device=model.device)
    outputs = model(**forward_inputs(model, cache, tokens))  # tokens [4, k]
    cache.commit([2, 0, 1, 2])
"""

import weakref
from collections.abc import Sequence
from functools import partial
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin

from .transfer import on_device

_SMALLEST_CAPACITY: Final = 64


class RowLengths:
    """How far each row of a batch is filled, on the host as far as it was told, and on the device.

    Attributes:
        batch_size: number of rows.
        counts: the length of each row, or None while the host does not know them.
        longest: the longest length, or an upper bound of it while `counts` is None.
        pending: number of tokens fed to the last forward, until they are committed.
        automatic: whether all tokens of a forward are committed, without being told to.
        targets: for the duration of a forward of fixed shape, where it writes in each row of the buffers,
            `[buffer_rows, tokens]`; else None. See `compiled`.
        fixed: whether the buffers have been in such a forward, and should keep their shape when rows leave.
    """

    def __init__(self, batch_size: int, device: torch.device | str) -> None:
        self.device = torch.device(device)
        self.batch_size = batch_size
        self.pending = 0
        self.automatic = False
        self.targets: Tensor | None = None
        self.fixed = False
        self._slots: dict[tuple[int, int, int, torch.device], Tensor] = {}
        self._lengths: Tensor | None = None
        self._counted = torch.empty(1, 0, dtype=torch.long)
        self._know([0] * batch_size)

    @property
    def lengths(self) -> Tensor:
        """Committed tokens of each row, `[batch]`, on the device. Made when asked for: equal rows need none."""
        if self._lengths is None:
            assert self.counts is not None
            self._lengths = on_device(self.counts, self.device)
        return self._lengths

    @property
    def level(self) -> bool:
        """Whether the host knows that all rows have the length `longest`."""
        return self._level

    @property
    def filled(self) -> int:
        """The longest length, with what a forward has fed and nobody has to commit."""
        return self.longest + (self.pending if self.automatic else 0)

    def settle(self) -> None:
        """Commit what the last forward has fed, where nobody else does."""
        if self.automatic and self.pending:
            self.move(self.pending, 1)

    def positions(self, tokens: int) -> Tensor:
        """Return the positions of the next tokens of each row, `[batch, tokens]`."""
        if self.level:
            end = self.longest + tokens
            if end > self._counted.shape[1]:
                self._counted = torch.arange(max(2 * end, _SMALLEST_CAPACITY), device=self.device)[None]
            positions = self._counted.narrow(1, self.longest, tokens)
            return positions if self.batch_size == 1 else positions.expand(self.batch_size, -1)
        return self.lengths[:, None] + torch.arange(tokens, device=self.device)

    def slots(self, tokens: int, heads: int, capacity: int, device: torch.device) -> Tensor:
        """Return where the next tokens go in a buffer `[batch, heads, capacity, ...]` flattened to its first axis.

        The result, `[batch * heads * tokens]`, is the same for all layers of one shape and kept until a commit.
        """
        key = (tokens, heads, capacity, device)
        if key not in self._slots:
            first = torch.arange(self.batch_size * heads, device=device) * capacity
            positions = self.positions(tokens).to(device)
            self._slots[key] = (first.view(-1, heads, 1) + positions[:, None, :]).flatten()
        return self._slots[key]

    def move(self, step: int | Sequence[int] | Tensor, sign: int) -> None:
        """Add `sign * step` to the lengths; the host does not look into a tensor."""
        if isinstance(step, int):
            step = [step] * self.batch_size
        if isinstance(step, Tensor):
            self._know(None, self.longest + (self.pending if sign > 0 else 0), self.lengths + sign * step)
        else:
            self._check(step, sign)
            if self.counts is None:
                moved = self.lengths + sign * on_device(step, self.device)
                self._know(None, self.longest + (self.pending if sign > 0 else 0), moved)
            else:
                self._know([length + sign * count for length, count in zip(self.counts, step, strict=True)])
        self.pending = 0

    def select(self, rows: Tensor) -> None:
        """Keep the given rows, in the given order."""
        self.batch_size = len(rows)
        if self.counts is None:
            self._know(None, self.longest, self.lengths[rows.to(self.device)])
        else:
            self._know([self.counts[row] for row in rows.tolist()])

    def clear(self) -> None:
        """Empty all rows."""
        self.pending = 0
        self._know([0] * self.batch_size)

    def tell(self, counts: Sequence[int]) -> None:
        """Tell the host the true lengths, after moves without `counts`."""
        self._know(list(counts))

    def _check(self, counts: Sequence[int], sign: int) -> None:
        if len(counts) != self.batch_size:
            raise ValueError(f"{len(counts)} counts were given for {self.batch_size} rows.")
        limits = [self.pending] * len(counts) if sign > 0 else self.counts
        if limits is not None and any(not 0 <= count <= limit for count, limit in zip(counts, limits, strict=True)):
            what = "commit" if sign > 0 else "roll back"
            raise ValueError(f"Cannot {what} {list(counts)} tokens: the rows have {limits}.")

    def _know(self, counts: list[int] | None, longest: int = 0, lengths: Tensor | None = None) -> None:
        self.counts, self._lengths = counts, lengths
        self.longest = longest if counts is None else max(counts, default=0)
        self._level = counts is not None and min(counts, default=0) == self.longest
        self._slots.clear()


class RaggedLayer(CacheLayerMixin):
    """Keys and values of one attention layer, in buffers `[batch, heads, capacity, head_dim]`.

    `keys` and `values` stay None: a model that reads them directly, past `update`, must fail rather than take the
    slots behind a row's length for tokens.
    """

    is_sliding = False
    is_croppable = True

    def __init__(self, rows: RowLengths, capacity: int = 0) -> None:
        super().__init__()
        self.rows = rows
        self.initial_capacity = capacity

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Take shape, dtype and device from the first keys and values."""
        self.device, self.dtype = key_states.device, key_states.dtype
        self.key_buffer = key_states.new_zeros(*key_states.shape[:2], 0, key_states.shape[3])
        self.value_buffer = value_states.new_zeros(*value_states.shape[:2], 0, value_states.shape[3])
        self.is_initialized = True

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Write `k` new keys and values behind the length of each row.

        Args:
            key_states: `[batch, heads, k, key_dim]`.
            value_states: `[batch, heads, k, value_dim]`.
            *args: not used.
            **kwargs: not used.

        Returns:
            Keys and values, `[batch, heads, longest + k, ...]`: views of the buffers. In a forward of fixed shape the
            buffers themselves.
        """
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        rows, tokens = self.rows, key_states.shape[2]
        if rows.targets is not None:
            return self._update_at(rows.targets.to(key_states.device), key_states, value_states)
        start, end = rows.longest, rows.longest + tokens
        if end > self.key_buffer.shape[2]:
            self.reserve(max(end, 2 * self.key_buffer.shape[2], self.initial_capacity, _SMALLEST_CAPACITY))
        # Buffers of fixed shape may have more rows than the batch still has.
        keys, values = self.key_buffer[: rows.batch_size], self.value_buffer[: rows.batch_size]
        if rows.level:
            keys[:, :, start:end] = key_states
            values[:, :, start:end] = value_states
        else:
            slots = rows.slots(tokens, key_states.shape[1], self.key_buffer.shape[2], self.device)
            _scatter(keys, slots, key_states)
            _scatter(values, slots, value_states)
        rows.pending = tokens
        return keys[:, :, :end], values[:, :, :end]

    def _update_at(self, targets: Tensor, key_states: Tensor, value_states: Tensor) -> tuple[Tensor, Tensor]:
        # Nothing here depends on a number that changes between forwards: each would be another graph.
        row = torch.arange(targets.shape[0], device=targets.device)[:, None]
        self.key_buffer[row, :, targets] = key_states.transpose(1, 2)
        self.value_buffer[row, :, targets] = value_states.transpose(1, 2)
        return self.key_buffer, self.value_buffer

    def reserve(self, capacity: int) -> None:
        """Let the buffers hold at least `capacity` tokens per row."""
        if capacity > self.key_buffer.shape[2]:
            self.key_buffer = _grow(self.key_buffer, capacity)
            self.value_buffer = _grow(self.value_buffer, capacity)

    def select(self, rows: Tensor) -> None:
        """Keep the given rows, in the given order. Buffers of fixed shape keep theirs until half of it is unused."""
        if not self.is_initialized:
            return
        rows, held = rows.to(self.device), self.key_buffer.shape[0]
        if self.rows.fixed and held // 2 < len(rows) <= held:
            for buffer in (self.key_buffer, self.value_buffer):
                buffer[: len(rows)] = buffer[rows]
        else:
            self.key_buffer, self.value_buffer = self.key_buffer[rows], self.value_buffer[rows]

    def get_seq_length(self) -> int:
        """Return the longest length, or an upper bound of it."""
        if self.rows.targets is not None:
            # Some models ask although they are given positions, and a graph is for one answer.
            return self.key_buffer.shape[2] - self.rows.targets.shape[1]
        return self.rows.filled

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Return how many keys `update` returns, and the position of the first."""
        return self.get_seq_length() + query_length, 0

    def get_max_length(self) -> int:
        """Return -1: the buffers grow."""
        return -1

    def reset(self) -> None:
        """Forget the buffers."""
        self.is_initialized = False


def _scatter(buffer: Tensor, slots: Tensor, states: Tensor) -> None:
    width = buffer.shape[3]
    buffer.view(-1, width).index_copy_(0, slots, states.reshape(-1, width))


def _grow(buffer: Tensor, capacity: int) -> Tensor:
    # Zeros, because attention multiplies what lies behind a short row by 0, and 0 times NaN is NaN.
    grown = buffer.new_zeros(*buffer.shape[:2], capacity, buffer.shape[3])
    grown[:, :, : buffer.shape[2]] = buffer
    return grown


class DraftMemory(NamedTuple):
    """A draft model's cache, kept with the verifier's, so that a call that goes on from there feeds neither twice."""

    model: "weakref.ref[Any]"
    """The draft model. A weak reference: a copy of the cache must not copy the model."""
    cache: "RaggedCache"
    """Its cache, for a prefix of the rows."""
    features: Tensor | None = None
    """Of a feature draft: what it reads the next tokens with, `[batch, tokens, hidden]`, from the verifier's hidden
    states."""


class RaggedCache(Cache):
    """The cache of a decoder-only model for a batch of rows of different lengths.

    Args:
        batch_size: number of rows.
        device: where `lengths` lives: that of the input ids.
        capacity: tokens to allocate at the first update; the buffers double when they are full.
    """

    draft: "DraftMemory | None" = None
    """What the draft model of the call that returned this cache has in its own cache."""

    def __init__(self, batch_size: int, *, device: torch.device | str = "cpu", capacity: int = 0) -> None:
        self.rows = RowLengths(batch_size, device)
        super().__init__(layer_class_to_replicate=partial(RaggedLayer, self.rows, capacity))

    @property
    def automatic(self) -> bool:
        """Whether every token of a forward stays, as in caches of transformers, and nobody has to commit it.

        So is a cache that has been handed to a caller, who may go on with plain `generate`.
        """
        return self.rows.automatic

    @automatic.setter
    def automatic(self, value: bool) -> None:
        self.rows.settle()
        self.rows.automatic = value

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Write new keys and values of one layer; see `RaggedLayer.update`."""
        if layer_idx == 0:
            self.rows.settle()
        return super().update(key_states, value_states, layer_idx, *args, **kwargs)

    @property
    def lengths(self) -> Tensor:
        """Committed tokens of each row, `[batch]`, on the device."""
        return self.rows.lengths

    @property
    def is_filled(self) -> bool:
        """Whether a forward has given the buffers their number of layers, heads and dimensions."""
        return bool(self.layers) and all(layer.is_initialized for layer in self.layers)

    @property
    def buffer_shape(self) -> tuple[int, int]:
        """Rows and tokens that there are buffers for, in a cache that is filled. The batch's rows come first."""
        rows, _, capacity, _ = self.layers[0].key_buffer.shape
        return rows, capacity

    def fix(self, capacity: int) -> None:
        """Give the buffers a shape that they keep: at least `capacity` tokens per row, and the rows that they have."""
        self.rows.fixed = True
        for layer in self.layers:
            layer.reserve(capacity)

    @property
    def batch_size(self) -> int:
        """Number of rows."""
        return self.rows.batch_size

    def commit(self, kept: int | Sequence[int] | Tensor) -> None:
        """Keep the first tokens of the last forward, and roll back the others.

        Nothing here waits for the device. After a tensor the host knows only an upper bound of the lengths: reads
        become longer than needed, and equal rows lose their fast path.

        Args:
            kept: how many tokens: one number for all rows, a number for each row, or those as a tensor `[batch]`.
        """
        self.rows.move(kept, 1)

    def roll_back(self, removed: int | Sequence[int] | Tensor) -> None:
        """Remove the last committed tokens of each row.

        Args:
            removed: how many tokens, as in `commit`.
        """
        self.rows.move(removed, -1)

    def keep_rows(self, rows: Tensor | Sequence[int]) -> None:
        """Keep only the given rows, in the given order, and free the memory of the others.

        Args:
            rows: row numbers, `[kept_rows]`; a number may occur more than once.
        """
        self.rows.settle()
        rows = torch.as_tensor(rows, dtype=torch.long)
        self.rows.select(rows)
        for layer in self.layers:
            layer.select(rows)

    def repeat_rows(self, repeats: int) -> None:
        """Repeat each row, copies side by side as in `Tensor.repeat_interleave`."""
        self.keep_rows(torch.arange(self.batch_size).repeat_interleave(repeats))

    batch_select_indices = keep_rows
    reorder_cache = keep_rows
    batch_repeat_interleave = repeat_rows

    def crop(self, tokens_to_remove: int) -> None:
        """Remove `-tokens_to_remove` committed tokens from each row, as caches of transformers do."""
        self.rows.settle()
        self.roll_back(-tokens_to_remove)

    def reset(self) -> None:
        """Start again with empty rows."""
        super().reset()
        self.rows.clear()
