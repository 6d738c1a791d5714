"""Acceptance rules: what makes a verifier keep a drafted token, and what is sampled when it does not.

Glossary, after the paper (its Algorithm 1) and for every module of this package:

- `p`, `q`: the draft's and the verifier's distribution at a position, after all logits processors;
- `n`: the drafted token, sampled from `p`;
- `h`: the target distribution that the rule puts in the verifier's place;
- `gamma`: `h_n`, the raised probability of the drafted token;
- `phi`: the probability with which `n` is accepted, `min(1, h_n / p_n)`;
- `g`: the recovery distribution, sampled from after a rejection, proportional to `max(h - p, 0)`.

A draft without probabilities (prompt look-up, a greedy draft) is passed as `None`: its `p` is one-hot on `n`, so
`phi = gamma` and `g` is `h` without `n`.
"""

from __future__ import annotations

import copy
import dataclasses
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor
from typing_extensions import override

from .budget import closed_form_gamma, closed_form_gamma_of, exact_gamma, two_point_kl
from .parameters import check_parameter, per_sequence
from .rows import Rows
from .saving import Unsavable

RuleT = TypeVar("RuleT", bound="AcceptanceRule")
BudgetRuleT = TypeVar("BudgetRuleT", bound="BudgetRule")


class AcceptanceRule(ABC, Unsavable):
    """An acceptance probability `phi` and a recovery distribution `g`: all that speculative sampling needs to know.

    A rule is an immutable value. Its numeric parameters may be tensors of shape `[batch]`, one value per sequence.
    """

    @abstractmethod
    def acceptance_probability(self, tokens: Tensor, verifier: Rows, draft: Rows | None) -> Tensor:
        """`phi` of every drafted token.

        Args:
            tokens (`torch.LongTensor` of shape `[batch, block]`): The drafted tokens.
            verifier (`Rows` of shape `[batch, block, vocab]`): `q` at their positions.
            draft (`Rows` of shape `[batch, block, vocab]` or `None`): `p` at their positions.

        Returns:
            `torch.Tensor` of shape `[batch, block]`, in [0, 1]; NaN where `q` or `p` is no distribution.
        """

    @abstractmethod
    def recovery_weights(self, tokens: Tensor, verifier_probs: Tensor, draft_probs: Tensor | None) -> Tensor:
        """`g` at one position per sequence, where the drafted token was rejected.

        Args:
            tokens (`torch.LongTensor` of shape `[batch]`): The rejected tokens.
            verifier_probs (`torch.Tensor` of shape `[batch, vocab]`): `q`.
            draft_probs (`torch.Tensor` of shape `[batch, vocab]` or `None`): `p`.

        Returns:
            `torch.Tensor` of shape `[batch, vocab]`: Weights proportional to `g`, all at least 0, never all 0, and 0
            wherever `q` is 0.
        """

    @abstractmethod
    def divergence(self, tokens: Tensor, verifier: Rows, draft: Rows | None) -> Tensor:
        """`KL(h || q)` in nats at every position, `[batch, block]`. Arguments as in `acceptance_probability`."""

    def target(self, verifier_probs: Tensor, draft_probs: Tensor) -> Tensor | None:
        """`h`, for rules whose `h` does not depend on the drafted token; `None` for the others.

        Args:
            verifier_probs (`torch.Tensor` of shape `[batch, ..., vocab]`): `q`.
            draft_probs (`torch.Tensor` of shape `[batch, ..., vocab]`): `p`. May sum to less than 1, where the draft
                gives the rest to tokens that the verifier lacks.

        Returns:
            `torch.Tensor` of shape `[batch, ..., vocab]`, which sums to 1 along the last dimension.
        """
        return None

    def at(self: RuleT, positions: Tensor) -> RuleT:
        """The same rule at one position of each sequence's block, for [`BudgetRule.with_deltas`].

        Args:
            positions (`torch.LongTensor` of shape `[batch]`): The positions.
        """
        return self

    @property
    def is_lossless(self) -> bool:
        """Whether the rule is known to emit the verifier's own distribution, so that nothing is given up by it."""
        return False

    @property
    def leaves_support(self) -> bool:
        """Whether the rule can emit a token to which the verifier gives probability 0."""
        return False

    @property
    def batch_size(self) -> int | None:
        """Number of sequences that the parameters are for, or `None` where they hold for any."""
        return next((len(value) for value in self._per_sequence_parameters().values()), None)

    def select(self: RuleT, rows: Tensor) -> RuleT:
        """The same rule for some of the sequences, where a parameter has one value per sequence.

        Args:
            rows (`torch.LongTensor` of shape `[kept]`): Indices of the sequences that are kept.
        """
        per_sequence = self._per_sequence_parameters()
        if not per_sequence:
            return self
        kept = {name: value[rows.to(value.device)] for name, value in per_sequence.items()}
        return dataclasses.replace(self, **kept)  # type: ignore[type-var]

    def _per_sequence_parameters(self) -> dict[str, Tensor]:
        names: list[str] = [field.name for field in dataclasses.fields(self)] if dataclasses.is_dataclass(self) else []
        values: dict[str, Any] = {name: getattr(self, name) for name in names}
        return {name: value for name, value in values.items() if isinstance(value, Tensor) and value.ndim}


class GammaRule(AcceptanceRule):
    """A rule that raises the drafted token to `gamma(q_n)` and scales all other tokens alike.

    `phi = min(1, gamma / p_n)` reads one probability of each model; only the recovery reads a row. A subclass says
    what `gamma` is.
    """

    @abstractmethod
    def gamma(self, q_n: Tensor) -> Tensor:
        """The raised probability of tokens that the verifier gives `q_n`.

        Args:
            q_n (`torch.Tensor` of shape `[batch]` or `[batch, block]`): Probabilities in [0, 1].

        Returns:
            `torch.Tensor` like `q_n`, in [q_n, 1]; 0 where `q_n` is 0, so that what the verifier excludes stays out.
        """

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        # Who says another gamma must not inherit a short cut to the old one.
        if "gamma" in vars(cls) and "gamma_of" not in vars(cls):
            cls.gamma_of = GammaRule.gamma_of  # type: ignore[method-assign]

    def gamma_of(self, q_n: float) -> float:
        """`gamma` of one probability, for a rule whose parameters hold for all sequences. In float64."""
        return self.gamma(torch.tensor([q_n], dtype=torch.float64)).item()

    def scale_of_others(self, q_n: Tensor) -> Tensor:
        """What all other tokens are multiplied by, like `q_n`: `(1 - gamma) / (1 - q_n)`, and 0 where `q_n` is 1."""
        return ((1 - self.gamma(q_n)) / (1 - q_n)).masked_fill_(q_n >= 1, 0.0)

    @override
    def acceptance_probability(self, tokens: Tensor, verifier: Rows, draft: Rows | None) -> Tensor:
        gamma = self.gamma(verifier.log_prob(tokens).exp())
        if draft is None:
            return gamma
        # In logarithms, for p_n that underflow. gamma = 0 rejects, even where p_n is 0 too.
        ratio = (gamma.log() - draft.log_prob(tokens)).clamp(max=0).exp()
        return ratio.masked_fill_(gamma == 0, 0.0)

    @override
    def recovery_weights(self, tokens: Tensor, verifier_probs: Tensor, draft_probs: Tensor | None) -> Tensor:
        token = tokens[:, None]
        scale = self.scale_of_others(verifier_probs.gather(-1, token))
        # The drafted token was rejected, so gamma < p_n and its own residual is 0.
        others = (verifier_probs * scale).scatter(-1, token, 0.0)
        residual = others if draft_probs is None else (others - draft_probs).clamp_(min=0)
        # Numerically empty residuals (h = p up to rounding, or h one-hot) fall back to h without the rejected token,
        # or to that token where the verifier allows no other.
        unscaled = verifier_probs.scatter(-1, token, 0.0)
        fallback = torch.where(unscaled.sum(-1, keepdim=True) > 0, unscaled, verifier_probs)
        return torch.where(residual.sum(-1, keepdim=True) > 0, residual, fallback)

    @override
    def divergence(self, tokens: Tensor, verifier: Rows, draft: Rows | None) -> Tensor:
        q_n = verifier.log_prob(tokens).exp()
        return two_point_kl(self.gamma(q_n), q_n)


@dataclass(frozen=True)
class Speculative(GammaRule):
    """Lossless speculative sampling, `gamma = q_n` (Leviathan et al. 2023; Chen et al. 2023)."""

    @property
    @override
    def is_lossless(self) -> bool:
        return True

    @override
    def gamma(self, q_n: Tensor) -> Tensor:
        return q_n

    @override
    def gamma_of(self, q_n: float) -> float:
        return q_n

    @override
    def target(self, verifier_probs: Tensor, draft_probs: Tensor) -> Tensor:
        return verifier_probs


@dataclass(frozen=True, eq=False)
class BudgetRule(GammaRule):
    """A rule whose `gamma` follows from a budget for a divergence of `h` from `q`.

    Args:
        delta (`float` or `torch.Tensor` of shape `[batch]`): The budget, at least 0. 0 is lossless.

    Raises:
        ValueError: If `delta` is negative or NaN.
        TypeError: If `delta` is no number.
    """

    delta: float | Tensor

    def __post_init__(self) -> None:
        check_parameter("delta", self.delta, unit="a budget")

    def with_deltas(self: BudgetRuleT, deltas: Tensor) -> BudgetRuleT:
        """The same rule with other budgets, which are taken as they are: checking them would wait for the device.

        Args:
            deltas (`torch.Tensor` of shape `[batch]` or `[batch, block]`): Budgets, the latter for each position.
        """
        rule = copy.copy(self)
        object.__setattr__(rule, "delta", deltas)
        return rule

    @override
    def at(self: BudgetRuleT, positions: Tensor) -> BudgetRuleT:
        if isinstance(self.delta, Tensor) and self.delta.ndim > 1:
            return self.with_deltas(self.delta.gather(1, positions[:, None])[:, 0])
        return self

    @property
    @override
    def is_lossless(self) -> bool:
        return not isinstance(self.delta, Tensor) and self.delta == 0


@dataclass(frozen=True, eq=False)
class Cactus(BudgetRule):
    """The paper's rule: `gamma = min(q_n + sqrt(2 * delta * q_n * (1 - q_n)), 1)` (Corollary 5).

    Args:
        delta (`float` or `torch.Tensor` of shape `[batch]`):
            Budget for `KL(h || q)` at a drafted position, in nats, at least 0. 0 is lossless. Kept wherever
            `gamma <= 0.5` (Corollary 6), exceeded up to twofold above; `CactusExact` keeps it everywhere.

    Raises:
        ValueError: If `delta` is negative or NaN.
        TypeError: If `delta` is no number.
    """

    @override
    def gamma(self, q_n: Tensor) -> Tensor:
        return closed_form_gamma(q_n, per_sequence(self.delta, q_n))

    @override
    def gamma_of(self, q_n: float) -> float:
        return closed_form_gamma_of(q_n, float(self.delta))


@dataclass(frozen=True, eq=False)
class CactusExact(BudgetRule):
    """Cactus with the exact root: the largest `gamma` with `KL(h || q) <= delta` (Theorem 2 for the KL divergence).

    Args:
        delta (`float` or `torch.Tensor` of shape `[batch]`):
            Budget for `KL(h || q)` at a drafted position, in nats, at least 0. 0 is lossless. Never exceeded.

    Raises:
        ValueError: If `delta` is negative or NaN.
        TypeError: If `delta` is no number.
    """

    @override
    def gamma(self, q_n: Tensor) -> Tensor:
        return exact_gamma(q_n, per_sequence(self.delta, q_n))


@dataclass(frozen=True, eq=False)
class Lenience(GammaRule):
    """The common multiplicative relaxation, `gamma = min(factor * q_n, 1)` (Leviathan et al. 2023, appendix A.5).

    Args:
        factor (`float` or `torch.Tensor` of shape `[batch]`): At least 1, which is lossless.

    Raises:
        ValueError: If `factor` is below 1 or NaN.
        TypeError: If `factor` is no number.
    """

    factor: float | Tensor

    def __post_init__(self) -> None:
        check_parameter("factor", self.factor, minimum=1.0, unit="a multiple of the verifier's probability")

    @property
    @override
    def is_lossless(self) -> bool:
        return not isinstance(self.factor, Tensor) and self.factor == 1

    @override
    def gamma(self, q_n: Tensor) -> Tensor:
        raised = (per_sequence(self.factor, q_n) * q_n).clamp(max=1)
        return torch.where((q_n <= 0) | (q_n >= 1), q_n, raised)


def gamma_star(q_n: Tensor | float, delta: Tensor | float, rule: str = "cactus") -> Any:
    """The raised probability of a drafted token, for a budget.

    Args:
        q_n (`torch.Tensor` or `float`): The verifier's probability of the drafted token, in [0, 1].
        delta (`torch.Tensor` or `float`): Budget in nats, at least 0, broadcast against `q_n`.
        rule (`str`, *optional*, defaults to `"cactus"`): `"cactus"` for the paper's closed form, `"cactus-exact"` for
            the exact root, `"speculative"` for `q_n` itself.

    Returns:
        A `torch.Tensor` in the broadcast shape, or a `float` where both arguments are numbers.

    Raises:
        ValueError: For a probability outside [0, 1], a bad budget or an unknown rule.

    Example:
        >>> from transformers_cactus import gamma_star
        >>> round(gamma_star(0.1, 0.5), 6)
        0.4
    """
    solvers = {"cactus": closed_form_gamma, "cactus-exact": exact_gamma, "speculative": lambda q, _: q}
    if rule not in solvers:
        raise ValueError(f"gamma_star knows the rules {', '.join(sorted(solvers))}, got rule={rule!r}.")
    check_parameter("delta", delta, unit="a budget in nats", per_sequence=False)
    numbers = not isinstance(q_n, Tensor) and not isinstance(delta, Tensor)
    probability = q_n if isinstance(q_n, Tensor) else torch.tensor(q_n, dtype=torch.float64)
    if not bool(((probability >= 0) & (probability <= 1)).all()):
        raise ValueError("q_n must hold probabilities in [0, 1].")
    if isinstance(delta, Tensor):
        delta = delta.to(probability.device)
        probability, delta = torch.broadcast_tensors(probability, delta)
    gamma = solvers[rule](probability.to(torch.promote_types(probability.dtype, torch.float32)), delta)
    return gamma.item() if numbers else gamma
