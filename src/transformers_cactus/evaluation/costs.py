"""What the limit of a speed-up depends on: how long the forwards of a pair take."""

from __future__ import annotations

import statistics
import time
from typing import NamedTuple

import torch
from transformers import PreTrainedModel

from ..cache import RaggedCache
from ..inputs import forward_inputs


class Costs(NamedTuple):
    """Times of forwards behind a context, medians."""

    verifier_step: float
    """Seconds of the verifier's forward over one token, `V(1)`."""
    verifier_block: float
    """Its forward over a block and the token after it, in units of `V(1)`: `v`."""
    draft_step: float
    """The draft's forward over one token, in units of `V(1)`: `c`."""

    def speedup(self, accepted_length: float, block: int) -> float:
        """Tokens per second over those of the verifier alone, if everything besides the forwards took no time.

        Args:
            accepted_length (`float`): Drafted tokens accepted per round, the extra token not counted.
            block (`int`): Tokens drafted per round, as measured.
        """
        return (accepted_length + 1) / (self.verifier_block + block * self.draft_step)


@torch.no_grad()
def measure_costs(
    verifier: PreTrainedModel, draft: PreTrainedModel, block: int, context: int = 100, repetitions: int = 15
) -> Costs:
    """Times the forwards of a round, in turns.

    Args:
        verifier (`PreTrainedModel`): The large model, of a kind that the fast engine runs.
        draft (`PreTrainedModel`): The small one.
        block (`int`): Tokens drafted per round.
        context (`int`, *optional*, defaults to 100): Tokens before them.
        repetitions (`int`, *optional*, defaults to 15): How often.

    Returns:
        [`Costs`].
    """
    smallest = min(model.config.get_text_config().vocab_size for model in (verifier, draft))
    ids = torch.randint(smallest, (1, context), generator=torch.Generator().manual_seed(0)).to(verifier.device)
    sizes = ((verifier, 1), (verifier, block + 1), (draft, 1))
    caches = {}
    for model in (verifier, draft):
        caches[model] = RaggedCache(1, device=model.device, capacity=context + block + 1)
        model(**forward_inputs(model, caches[model], ids))
        caches[model].commit(context)
    timings: list[list[float]] = [[] for _ in sizes]
    for _ in range(repetitions):
        for seconds, (model, count) in zip(timings, sizes, strict=True):
            _wait_for(model)
            started = time.perf_counter()
            model(**forward_inputs(model, caches[model], ids[:, :count]))
            _wait_for(model)
            seconds.append(time.perf_counter() - started)
    step, over_block, draft_step = map(statistics.median, timings)
    return Costs(step, over_block / step, draft_step / step)


def _wait_for(model: PreTrainedModel) -> None:
    if model.device.type == "cuda":
        torch.cuda.synchronize(model.device)
