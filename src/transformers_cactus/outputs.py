"""What a call reports about itself: how many drafted tokens were kept, why, and what that cost in divergence."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum

from .parameters import counted


class Origin(str, Enum):
    """Where an emitted token came from."""

    LOSSLESS = "lossless"
    """Drafted, and accepted as lossless speculative sampling would have accepted it."""
    DELTA = "delta"
    """Drafted, and accepted thanks to the relaxed rule only: lossless speculative sampling would have rejected it."""
    RECOVERED = "recovered"
    """Sampled from the recovery distribution after a rejection."""
    BONUS = "bonus"
    """Sampled from the verifier after a fully accepted block."""
    PLAIN = "plain"
    """Sampled from the verifier in a round for which nothing was drafted."""


@dataclass
class SequenceStatistics:
    """The rounds of one generated sequence."""

    drafted_per_round: list[int] = field(default_factory=list)
    """Tokens drafted in each round."""
    accepted_per_round: list[int] = field(default_factory=list)
    """Drafted tokens accepted and emitted in each round (the accepted length), the extra token not counted."""
    origins: list[Origin] = field(default_factory=list)
    """Origin of each emitted token."""
    divergence: list[float] = field(default_factory=list)
    """`KL(h || q)` in nats at each emitted token: 0 where nothing was raised."""
    certificate: list[float] = field(default_factory=list)
    """With `cactus_certificate=True`, the divergence from the verifier of the distribution that each emitted token was
    really drawn from, in nats: `KL(h_alg || q)` at a drafted position, whether its token was accepted or recovered,
    and 0 elsewhere. Its sum, averaged over sequences, is at least the divergence of the law of the whole text from the
    verifier's (docs/certificate.md)."""

    def add_round(
        self,
        drafted: int,
        lossless: list[bool],
        divergence: list[float],
        emitted: int,
        certificate: list[float] | None = None,
    ) -> None:
        """Appends a round.

        Args:
            drafted (`int`): Tokens drafted.
            lossless (`list[bool]`): For each *accepted* drafted token, whether the lossless rule accepts it too.
            divergence (`list[float]`): `KL(h || q)` in nats at each drafted position, at least up to the first
                rejection.
            emitted (`int`): Tokens emitted, fewer than `len(lossless) + 1` where a stopping condition cut the block.
            certificate (`list[float]`, *optional*): `KL(h_alg || q)` in nats at each drafted position, as far as
                `divergence`.
        """
        accepted = min(len(lossless), emitted)
        self.drafted_per_round.append(drafted)
        self.accepted_per_round.append(accepted)
        self.origins += [Origin.LOSSLESS if kept else Origin.DELTA for kept in lossless[:accepted]]
        self.divergence += divergence[:accepted]
        if certificate is not None:
            self.certificate += certificate[: min(emitted, drafted)]
            self.certificate += [0.0] * (emitted - min(emitted, drafted))
        if emitted > accepted:
            rejected = accepted < drafted
            extra = Origin.RECOVERED if rejected else Origin.BONUS if drafted else Origin.PLAIN
            self.origins.append(extra)
            self.divergence.append(divergence[accepted] if rejected else 0.0)


@dataclass
class AcceptanceStatistics:
    """Acceptance statistics of a call, `output.acceptance`.

    Totals are over all sequences; the lists are those of the sequences one after another, `sequences[i]` has those of
    sequence `i`.
    """

    sequences: list[SequenceStatistics]
    """One entry per returned sequence."""

    @property
    def rounds(self) -> int:
        """Rounds, each one forward of the verifier for its sequence."""
        return len(self.drafted_per_round)

    @property
    def drafted(self) -> int:
        """Drafted tokens."""
        return sum(self.drafted_per_round)

    @property
    def accepted(self) -> int:
        """Drafted tokens that were accepted and emitted."""
        return sum(self.accepted_per_round)

    @property
    def emitted(self) -> int:
        """Generated tokens."""
        return len(self.origins)

    @property
    def mean_accepted_length(self) -> float:
        """Accepted drafted tokens per round, the extra token not counted (the paper's AL); 0 without a round."""
        return self.accepted / self.rounds if self.rounds else 0.0

    @property
    def total_divergence(self) -> float:
        """Sum of `divergence`, in nats."""
        return sum(self.divergence)

    @property
    def total_certificate(self) -> float:
        """Sum of `certificate`, in nats."""
        return sum(self.certificate)

    @property
    def drafted_per_round(self) -> list[int]:
        """Tokens drafted in each round."""
        return self._joined(lambda sequence: sequence.drafted_per_round)

    @property
    def accepted_per_round(self) -> list[int]:
        """Drafted tokens accepted in each round."""
        return self._joined(lambda sequence: sequence.accepted_per_round)

    @property
    def origins(self) -> list[Origin]:
        """Origin of each emitted token."""
        return [origin for sequence in self.sequences for origin in sequence.origins]

    @property
    def divergence(self) -> list[float]:
        """`KL(h || q)` in nats at each emitted token."""
        return [value for sequence in self.sequences for value in sequence.divergence]

    @property
    def certificate(self) -> list[float]:
        """`KL` in nats of what each emitted token was drawn from; empty without `cactus_certificate=True`."""
        return [value for sequence in self.sequences for value in sequence.certificate]

    def _joined(self, values: Callable[[SequenceStatistics], list[int]]) -> list[int]:
        return [value for sequence in self.sequences for value in values(sequence)]

    def __str__(self) -> str:
        relaxed = self.origins.count(Origin.DELTA)
        per_token = self.total_divergence / self.emitted if self.emitted else 0.0
        spent = f", really spent {self.total_certificate / self.emitted:.4f}" if self.certificate else ""
        return (
            f"{counted(self.emitted, 'token')} in {counted(self.rounds, 'round')}: {self.accepted} of "
            f"{counted(self.drafted, 'drafted token')} accepted ({relaxed} thanks to the relaxed rule), "
            f"mean accepted length {self.mean_accepted_length:.2f}, divergence {per_token:.4f}{spent} nats a token"
        )
