"""Typical acceptance: keep what the verifier finds likely, measured against its entropy."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from typing_extensions import override

from ..parameters import check_parameter, per_sequence
from .threshold import ThresholdRule

RECOVERIES = ("sample", "argmax")
"""What `Typical.recovery_from` takes."""


@dataclass(frozen=True, eq=False)
class Typical(ThresholdRule):
    """Typical acceptance sampling: accept where `q_n > min(posterior_threshold, posterior_alpha * exp(-H(q)))`.

    The criterion of Medusa (Cai et al. 2024), with the entropy `H` in nats; the paper's baseline TAS. The draft's
    probabilities play no part, so there is no lossless setting.

    Args:
        posterior_threshold (`float` or `torch.Tensor` of shape `[batch]`, *optional*, defaults to 0.09):
            A probability, in [0, 1].
        posterior_alpha (`float` or `torch.Tensor` of shape `[batch]`, *optional*, defaults to 0.3):
            Factor of `exp(-H(q))`, at least 0.
        recovery_from (`str`, *optional*, defaults to `"sample"`): After a rejection, `"sample"` samples from `q`;
            `"argmax"` takes the most probable token of `q`, as vLLM's typical acceptance sampler does.

    Raises:
        ValueError: If a parameter is out of range or `recovery_from` is unknown.
        TypeError: If a number is none.
    """

    posterior_threshold: float | Tensor = 0.09
    posterior_alpha: float | Tensor = 0.3
    recovery_from: str = "sample"

    def __post_init__(self) -> None:
        check_parameter("posterior_threshold", self.posterior_threshold, maximum=1.0, unit="a probability")
        check_parameter("posterior_alpha", self.posterior_alpha, unit="a factor of exp(-entropy)")
        if self.recovery_from not in RECOVERIES:
            raise ValueError(
                f"recovery_from must be one of {', '.join(map(repr, RECOVERIES))}, got {self.recovery_from!r}."
            )

    @override
    def accepts(self, q_n: Tensor, verifier_probs: Tensor) -> Tensor:
        entropy = torch.special.entr(verifier_probs).sum(-1, keepdim=True)
        by_entropy = per_sequence(self.posterior_alpha, q_n) * (-entropy).exp()
        cap = torch.as_tensor(per_sequence(self.posterior_threshold, q_n), dtype=q_n.dtype, device=q_n.device)
        return q_n > torch.minimum(by_entropy, cap)

    @override
    def recovery(self, verifier_probs: Tensor, draft_probs: Tensor | None) -> Tensor:
        if self.recovery_from == "sample":
            return verifier_probs
        best = verifier_probs.argmax(-1, keepdim=True)
        return torch.zeros_like(verifier_probs).scatter(-1, best, 1.0)
