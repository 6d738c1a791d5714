"""What a forward of a ragged batch is given: aligned prompts, positions, masks."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ._compat import cache_argument, forward_parameters, text_config
from .cache import RaggedCache
from .masks import ragged_masks


def left_align(input_ids: Tensor, attention_mask: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Move the tokens of each row to its start, in order, whatever side they were padded on.

    Args:
        input_ids: `[batch, length]`.
        attention_mask: 0 at padding, `[batch, length]`; None where there is none.

    Returns:
        The rows, `[batch, longest]`, where columns behind a row's length hold padding, and the lengths, `[batch]`.
    """
    if attention_mask is None:
        return input_ids, torch.full_like(input_ids[:, 0], input_ids.shape[1])
    lengths = attention_mask.long().sum(1)
    order = torch.argsort(attention_mask == 0, dim=1, stable=True)
    return input_ids.gather(1, order)[:, : int(lengths.max())], lengths


class ForwardInputs:
    """The keyword arguments of a model's forwards. What they depend on of the model is looked up once.

    Args:
        model: a model for which `supports_ragged` gives no reason against it.
    """

    def __init__(self, model: Any):
        self.model = model
        self.limit = context_limit(model)
        self.cache_argument = cache_argument(model)
        self.keeps_logits = "logits_to_keep" in forward_parameters(model)

    def __call__(
        self,
        cache: RaggedCache,
        input_ids: Tensor,
        logits_to_keep: int | None = None,
        *,
        past_limit: bool = False,
    ) -> dict[str, Any]:
        """Return the keyword arguments of a forward over the next tokens of each row.

        Args:
            cache: what the rows hold so far.
            input_ids: the next tokens of each row, `[batch, k]`; a row may end in padding that is not committed later.
            logits_to_keep: number of last positions to compute logits for, where the model has a choice; None for all.
            past_limit: whether rows may be longer than a model with learned positions can take. What comes out for
                them means nothing.
        """
        rows, tokens = cache.rows, input_ids.shape[1]
        positions = rows.positions(tokens)
        if self.limit is not None and self.limit < rows.longest + tokens and (past_limit or rows.longest < self.limit):
            # A row near its end is fed the other rows' block length. Its tokens behind the limit are rolled back.
            positions = positions.clamp(max=self.limit - 1)
        # Rows of equal length are what transformers builds masks for, skipping them where attention needs none.
        mask = None if rows.level else ragged_masks(self.model, positions, rows.longest + tokens)
        inputs: dict[str, Any] = {
            "input_ids": input_ids,
            "position_ids": positions,
            "attention_mask": mask,
            self.cache_argument: cache,
            "use_cache": True,
        }
        if logits_to_keep is not None and self.keeps_logits:
            inputs["logits_to_keep"] = logits_to_keep
        return inputs


def forward_inputs(
    model: Any,
    cache: RaggedCache,
    input_ids: Tensor,
    logits_to_keep: int | None = None,
    *,
    past_limit: bool = False,
) -> dict[str, Any]:
    """Return the keyword arguments of one forward: see [`ForwardInputs`]."""
    return ForwardInputs(model)(cache, input_ids, logits_to_keep, past_limit=past_limit)


def logits_and_states(
    model: Any, inputs: dict[str, Any], hidden_states: Sequence[int] = ()
) -> tuple[Tensor, list[Tensor] | None]:
    """Run a forward.

    Args:
        model: the model.
        inputs: from `forward_inputs`.
        hidden_states: which of the model's hidden states to return, by their place in `output_hidden_states`.
            Releases of transformers that cannot leave out the others return all.

    Returns:
        The logits; and the hidden states, None where none were asked for.
    """
    if not hidden_states:
        return model(**inputs).logits, None
    output = model(**inputs, output_hidden_states=list(hidden_states))
    return output.logits, [output.hidden_states[place] for place in hidden_states]


def context_limit(model: Any) -> int | None:
    """Return how many tokens a model with learned positions can take, or None where positions go on."""
    config = text_config(model)
    rotary = getattr(config, "rope_parameters", None) is not None
    return None if rotary else getattr(config, "max_position_embeddings", None)


def prefill(
    model: Any,
    cache: RaggedCache,
    rows: Tensor,
    lengths: Tensor,
    *,
    past_limit: bool = False,
    hidden_states: Sequence[int] = (),
) -> list[Tensor] | None:
    """Fill a cache with all but the last token of each prompt, which the first round feeds with its block.

    Args:
        model: a model for which `supports_ragged` gives no reason against it.
        cache: of the batch size of `rows`. Empty, or else all rows have one length.
        rows: left-aligned prompts, or what the cache does not hold of them, `[batch, longest]`.
        lengths: of these, at least 1, `[batch]`.
        past_limit: see [`ForwardInputs`].
        hidden_states: see `logits_and_states`.

    Returns:
        Those, each `[batch, longest - 1, hidden]`; None where none were asked for or there was nothing to feed.
    """
    if rows.shape[1] < 2:
        return None
    # Padding behind a short prompt is seen by no token before it, so the plain causal mask of equal rows is right.
    inputs = forward_inputs(model, cache, rows[:, :-1], logits_to_keep=1, past_limit=past_limit)
    _, states = logits_and_states(model, inputs, hidden_states)
    cache.commit((lengths - 1).tolist())
    return states
