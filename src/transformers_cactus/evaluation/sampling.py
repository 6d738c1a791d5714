"""The sampling settings under which two models are compared."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import (
    LogitsProcessorList,
    PreTrainedModel,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from ..parameters import check_parameter

NEUTRAL = frozenset(
    {
        *("temperature", "top_k", "top_p", "do_sample", "max_length", "max_new_tokens", "use_cache"),
        *("bos_token_id", "eos_token_id", "pad_token_id", "transformers_version", "_from_model_config"),
    }
)
"""Entries of a generation config that are replaced, or that change no distribution."""


@dataclass(frozen=True)
class Sampling:
    """Temperature, top-k and top-p, applied in this order as `generate` does; by default those of the paper.

    Args:
        temperature (`float`, *optional*, defaults to 0.6): Above 0.
        top_k (`int`, *optional*, defaults to 20): 0 for all tokens.
        top_p (`float`, *optional*, defaults to 0.95): In (0, 1]; 1 for all tokens.

    Raises:
        TypeError: If a number is none.
        ValueError: If one is out of range.
    """

    temperature: float = 0.6
    top_k: int = 20
    top_p: float = 0.95

    def __post_init__(self) -> None:
        check_parameter("temperature", self.temperature, unit="divides the logits", per_sequence=False)
        check_parameter("top_p", self.top_p, maximum=1.0, unit="a probability", per_sequence=False)
        if not self.temperature > 0 or not self.top_p > 0:
            raise ValueError(f"temperature and top_p must be above 0, got {self.temperature} and {self.top_p}.")
        if isinstance(self.top_k, bool) or not isinstance(self.top_k, int):
            raise TypeError(f"top_k must be a whole number of tokens, 0 for all, got {self.top_k!r}.")
        if self.top_k < 0:
            raise ValueError(f"top_k must be at least 0, got {self.top_k}.")

    @property
    def options(self) -> dict[str, Any]:
        """The same as arguments of `generate`."""
        return {"do_sample": True, **asdict(self)}

    def probabilities(self, logits: Tensor) -> Tensor:
        """What is sampled from.

        Args:
            logits (`torch.Tensor` of shape `[positions, vocab]`): A model's logits.

        Returns:
            `torch.Tensor` of shape `[positions, vocab]` in float32.
        """
        warpers = LogitsProcessorList([TemperatureLogitsWarper(float(self.temperature))])
        if self.top_k:
            warpers.append(TopKLogitsWarper(self.top_k))
        if self.top_p < 1:
            warpers.append(TopPLogitsWarper(float(self.top_p)))
        no_prefix = torch.empty(len(logits), 0, dtype=torch.long, device=logits.device)
        return warpers(no_prefix, logits.float()).softmax(-1)

    def __str__(self) -> str:
        parts = [f"temperature {self.temperature:g}"]
        parts += [f"top-k {self.top_k}"] if self.top_k else []
        parts += [f"top-p {self.top_p:g}"] if self.top_p < 1 else []
        return ", ".join(parts) if len(parts) > 1 else f"{parts[0]}, no truncation"


PAPER = Sampling()
"""The settings of the paper's experiments."""

PLAIN = Sampling(1.0, 0, 1.0)
"""The models' own distributions."""


def check_no_other_processors(model: PreTrainedModel) -> None:
    """Raises for a model whose generation config changes its distribution in other ways than [`Sampling`] does.

    `generate` would apply them to the texts, and what is measured would be something else than what is generated.

    Args:
        model (`PreTrainedModel`): A verifier or a draft.

    Raises:
        ValueError: With the entries' names.
    """
    given = model.generation_config.to_diff_dict()
    others = sorted(
        name
        for name, value in given.items()
        if value not in (None, False)
        and name not in NEUTRAL
        and not name.startswith(("cactus_", "assistant_", "num_assistant_", "prompt_lookup_", "output_", "return_"))
    )
    if others:
        raise ValueError(
            f"the generation config of {type(model).__name__} has {', '.join(others)}: only temperature, top_k and "
            "top_p are measured. Remove what changes the distribution, or load the models without it."
        )
