"""Two other packages for speculative decoding on models of transformers, where they are installed.

    pip install --no-deps flashspec==0.3.1 economize==0.3.2

Both get the same two model objects as all other systems. What was found about them is in docs/benchmarks.md.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from transformers_cactus import Sampling
from transformers_cactus.demo import Pair


class Written(NamedTuple):
    """What a peer says of its call."""

    tokens: int
    """How many it wrote."""
    accepted_length: float
    """Drafted tokens accepted per round."""


Generate = Callable[[dict[str, Tensor], int], Written]


def available(pair: Pair, sampling: Sampling, block: int, batch: int) -> dict[str, Generate]:
    """The peers that are installed and can sample this way, by name.

    flashspec's loop for models of transformers takes one sequence and applies the temperature only, overlooking its
    own `top_p` option, so it runs without truncation only.
    """
    found: dict[str, Generate] = {}
    if find_spec("flashspec") and batch == 1 and sampling.top_k == 0 and sampling.top_p == 1:
        found["flashspec, defaults"] = _flashspec(pair, sampling, block, "auto")
        found[f"flashspec, draft model only, block {block}"] = _flashspec(pair, sampling, block, "bandit")
    if find_spec("economize"):
        found[f"economize, rejection, block {block}"] = _economize(pair, sampling, block)
    return found


def _flashspec(pair: Pair, sampling: Sampling, block: int, strategy: str) -> Generate:
    """With its default strategy (prompt look-up beside a draft of 2 tokens), or with the draft model alone."""
    from flashspec import BanditConfig, FlashSpecConfig, SamplingConfig, SpeculativeEngine
    from flashspec.engine import HuggingFaceDrafter, TargetModel

    device, dtype = pair.verifier.device, pair.verifier.dtype
    settings = SamplingConfig(temperature=sampling.temperature, gamma=block)
    config = FlashSpecConfig(
        device=str(device), drafter_strategy=strategy, bandit=BanditConfig(n_arms=1), sampling=settings
    )
    drafter = HuggingFaceDrafter("draft", device, dtype, temperature=sampling.temperature, model=pair.draft)
    engine = SpeculativeEngine(config, [drafter], TargetModel("verifier", device, dtype, model=pair.verifier))

    def generate(inputs: dict[str, Tensor], new_tokens: int) -> Written:
        result = engine.generate(inputs["input_ids"], max_new_tokens=new_tokens)
        rounds = [step.accepted for step in result.arm_steps]
        return Written(result.n_tokens_generated, sum(rounds) / len(rounds))

    return generate


def _economize(pair: Pair, sampling: Sampling, block: int) -> Generate:
    """Its two-model drafter, on a draft that is loaded already, with its lossless sampling verifier.

    Its `generate` cannot be called with transformers 5.24: it refuses the `cache` that transformers prepares. Its own
    `decode_batch` can, with prompts of different lengths.
    """
    import economize
    from economize.arch import adapter_for
    from economize.core.config import TechniqueConfig
    from economize.core.technique import TECHNIQUES, Capability, Technique
    from economize.runtime import LayerRunner
    from economize.techniques.draft_model import DraftModelDrafter

    @dataclass(frozen=True)
    class GivenDraftConfig(TechniqueConfig):
        technique: ClassVar[str] = "given_draft"

    class GivenDraft(Technique):
        """`economize.techniques.draft_model` takes the name of a draft only."""

        name = GivenDraftConfig.technique
        config_class = GivenDraftConfig
        capabilities = Capability.DRAFTER

        def drafter(self, runner: Any) -> DraftModelDrafter:
            return DraftModelDrafter(LayerRunner(adapter_for(pair.draft)), self.adapter.vocab_size)

    TECHNIQUES.register(GivenDraft.name, GivenDraft, override=True)
    decoding = economize.DecodeConfig(cycle_length=block + 1, verifier="rejection")
    model = economize.apply(pair.verifier, GivenDraftConfig(), decoding=decoding)
    selector = _Selector(sampling)

    def generate(inputs: dict[str, Tensor], new_tokens: int) -> Written:
        rows = zip(inputs["input_ids"], inputs["attention_mask"].bool(), strict=True)
        found = model.decode_batch([row[mask] for row, mask in rows], new_tokens, selector=selector)
        tokens = sum(result.tokens.numel() for result in found)
        return Written(tokens, statistics.fmean(result.mean_accepted for result in found))

    return generate


class _Selector:
    """Sampling with temperature, top-k and top-p, as economize asks for it; its own sampler has no top-k."""

    greedy = False

    def __init__(self, sampling: Sampling):
        self.sampling = sampling

    def distributions(self, logits: Tensor) -> Tensor:
        """Probabilities of every row, `[..., vocab]`."""
        return self.sampling.probabilities(logits.reshape(-1, logits.shape[-1])).reshape(logits.shape)

    def distribution(self, logits: Tensor, history: Tensor) -> Tensor:
        """Probabilities of one row, `[vocab]`."""
        return self.distributions(logits[None])[0]

    def select_many(self, logits: Tensor) -> Tensor:
        """A token of every row, `[rows]`."""
        return torch.multinomial(self.distributions(logits), 1)[:, 0]

    def __call__(self, logits: Tensor, history: Tensor) -> int:
        """A token of one row."""
        return int(self.select_many(logits[None])[0])
