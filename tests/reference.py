"""What assisted generation with an acceptance rule must emit, by exact enumeration in float64.

Written from the mathematics, and sharing no code with the package. A generated text is the outcome of rounds; a round
that starts after `t` of `T` tokens drafts `min(block, T - t - 1)` of them, so that its extra token fits. The drafted
position then emits the draft's token or a recovered one, which ends the round, and after a wholly accepted block the
verifier itself emits one. So the law of a token depends on where in its round it stands, and the enumeration is over
prefixes together with that place.
"""

import copy
import itertools
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from scipy.special import xlogy

Text = tuple[int, ...]
Outcome = tuple[Text, tuple[str, ...]]
"""Generated tokens, and where each came from: lossless, delta, recovered, bonus or plain."""


@dataclass(frozen=True)
class Sampling:
    """Temperature, then top-k, then top-p, as `generate` orders them."""

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0

    def distribution(self, logits: np.ndarray, times: int = 1) -> np.ndarray:
        """The distribution that is sampled from.

        Args:
            logits: `[vocab]`, raw logits.
            times: how often it is all applied. transformers warps a draft twice.
        """
        for _ in range(times):
            probabilities = self._distribution(logits)
            logits = np.log(probabilities, out=np.full_like(probabilities, -np.inf), where=probabilities > 0)
        return probabilities

    def _distribution(self, logits: np.ndarray) -> np.ndarray:
        scaled = logits / self.temperature
        order = np.argsort(-scaled)
        kept = order[: self.top_k] if self.top_k else order
        probabilities = np.zeros_like(scaled)
        probabilities[kept] = np.exp(scaled[kept] - scaled.max())
        probabilities /= probabilities.sum()
        if self.top_p < 1:
            # The fewest most probable tokens that reach top_p together.
            before = np.cumsum(probabilities[order]) - probabilities[order]
            probabilities[order[before >= self.top_p]] = 0
            probabilities /= probabilities.sum()
        return probabilities


def raised(q: np.ndarray, rule: str, budget: float) -> np.ndarray:
    """The probability to which each token would be raised if it were drafted, `[vocab]`."""
    if rule == "speculative":
        return q
    if rule == "cactus":
        return np.minimum(q + np.sqrt(2 * budget * q * (1 - q)), 1)
    if rule == "lenience":
        return np.minimum(budget * q, 1)
    assert rule == "cactus-exact"
    return largest_within_budget(q, budget)


def largest_within_budget(q: np.ndarray, budget: float) -> np.ndarray:
    """The largest gamma in `[q, 1]` that costs a divergence of at most the budget, by bisection."""
    if budget == 0:
        return q
    result = np.where(q > 0, 1.0, 0.0)
    # Everywhere else even gamma = 1 is within the budget, or the verifier excludes the token.
    inner = (q > 0) & (q < 1) & (budget < -np.log(np.maximum(q, 1e-300)))
    low, high = q[inner], np.ones(inner.sum())
    for _ in range(60):
        middle = (low + high) / 2
        spent = xlogy(middle, middle / q[inner]) + xlogy(1 - middle, (1 - middle) / (1 - q[inner]))
        low, high = np.where(spent <= budget, middle, low), np.where(spent <= budget, high, middle)
    result[inner] = low
    return result


def drafted_position(p: np.ndarray, q: np.ndarray, rule: str, budget: float) -> dict[str, np.ndarray]:
    """What one drafted position emits.

    Args:
        p: `[vocab]`, the draft's distribution, one-hot for a draft without probabilities.
        q: `[vocab]`, the verifier's.
        rule: its name.
        budget: delta, or the factor of lenience.

    Returns:
        By origin (lossless, delta, recovered), the probability of emitting each token that way, `[vocab]`.
    """
    gamma = raised(q, rule, budget)
    accepted = np.minimum(p, gamma)
    lossless = np.minimum(p, q)
    recovered = np.zeros_like(q)
    for n in np.flatnonzero(p - accepted > 1e-14):
        h = q * (1 - gamma[n]) / (1 - q[n])
        h[n] = gamma[n]
        residual = np.maximum(h - p, 0)
        recovered += (p[n] - accepted[n]) * residual / residual.sum()
    return {"lossless": lossless, "delta": accepted - lossless, "recovered": recovered}


def look_up(text: Text, tokens: int, latest: bool) -> Text:
    """The draft of prompt look-up: what followed an earlier occurrence of the last two tokens, or else of the last.

    Args:
        text: prompt and generated tokens.
        tokens: how many to draft at most.
        latest: whether the latest occurrence counts, or the first.
    """
    for size in (2, 1):
        starts = [start for start in range(len(text) - size) if text[start : start + size] == text[-size:]]
        if starts:
            start = starts[-1 if latest else 0] + size
            return text[start : start + tokens]
    return ()


class Distributions:
    """A model's distribution after every prefix, `distributions[prefix]` with the generated tokens as prefix.

    Args:
        model: a causal language model; a float64 copy of it is run, in one forward, without a cache.
        prompt: the prompt.
        new_tokens: how many tokens will be generated.
        sampling: what is done to its logits.
        times: how often it is done.
    """

    def __init__(self, model: Any, prompt: Text, new_tokens: int, sampling: Sampling, times: int = 1):
        vocab = model.config.vocab_size
        endings = list(itertools.product(range(vocab), repeat=new_tokens - 1))
        texts = torch.tensor([prompt + ending for ending in endings])
        with torch.no_grad():
            logits = copy.deepcopy(model).double()(texts, use_cache=False).logits[:, len(prompt) - 1 :].numpy()
        self._by_prefix: dict[Text, np.ndarray] = {}
        for row, ending in enumerate(endings):
            for length in range(new_tokens):
                if ending[:length] not in self._by_prefix:
                    self._by_prefix[ending[:length]] = sampling.distribution(logits[row, length], times)

    def __getitem__(self, prefix: Text) -> np.ndarray:
        return self._by_prefix[prefix]


Drafter = Callable[[Text], list[Callable[[Text], np.ndarray]]]
"""Given the generated tokens at the start of a round, the distribution of each drafted token given its own prefix."""


def model_drafter(draft: Distributions, block: int, new_tokens: int) -> Drafter:
    """A draft model that proposes `block` tokens, fewer near the end: one token is the verifier's."""
    return lambda prefix: [draft.__getitem__] * min(block, new_tokens - len(prefix) - 1)


def look_up_drafter(prompt: Text, block: int, new_tokens: int, vocab: int, engine: str) -> Drafter:
    """Prompt look-up: every drafted token has probability 1.

    transformers takes the first occurrence, and cuts its block only where one token is left: its loop drops what is
    accepted beyond the end. The fast engine takes the latest, and cuts its block so that one more token fits.
    """

    def draft(prefix: Text) -> list[Callable[[Text], np.ndarray]]:
        room = new_tokens - len(prefix) - 1
        count = min(block, room) if engine == "fast" or room == 0 else block
        found = look_up(prompt + prefix, count, latest=engine == "fast")
        return [lambda _, token=token: np.eye(vocab)[token] for token in found]

    return draft


def exact_law(
    verifier: Distributions, drafter: Drafter, new_tokens: int, rule: str, budget: float = 0.0
) -> dict[Outcome, float]:
    """The joint law of the generated tokens and their origins.

    Args:
        verifier: the verifier's distributions.
        drafter: what is drafted.
        new_tokens: how many tokens are generated.
        rule: "speculative", "cactus", "cactus-exact" or "lenience".
        budget: delta, or the factor of lenience.
    """
    finished: dict[Outcome, float] = defaultdict(float)
    # Outcomes so far that a round starts from, by length: a round only makes them longer.
    starts: list[dict[Outcome, float]] = [defaultdict(float) for _ in range(new_tokens)]
    starts[0][(), ()] = 1.0

    def add(ended: bool, outcome: Outcome, mass: float, in_round: dict[Outcome, float]) -> None:
        length = len(outcome[0])
        target = finished if length == new_tokens else starts[length] if ended else in_round
        target[outcome] += mass

    # By the prefix and the draft's distribution: the same position comes up with many histories.
    emitted_at: dict[tuple[Text, bytes], dict[str, np.ndarray]] = {}

    for waiting in starts:
        for (start, start_origins), start_mass in waiting.items():
            drafted = drafter(start)
            alive: dict[Outcome, float] = {(start, start_origins): start_mass}
            for distribution in drafted:
                longer: dict[Outcome, float] = defaultdict(float)
                for (text, origins), mass in alive.items():
                    p = distribution(text)
                    key = text, p.tobytes()
                    if key not in emitted_at:
                        emitted_at[key] = drafted_position(p, verifier[text], rule, budget)
                    for origin, probabilities in emitted_at[key].items():
                        for token in np.flatnonzero(probabilities > 0):
                            outcome = (*text, int(token)), (*origins, origin)
                            add(origin == "recovered", outcome, mass * probabilities[token], longer)
                alive = longer
            extra = "bonus" if drafted else "plain"
            for (text, origins), mass in alive.items():
                for token in np.flatnonzero(verifier[text]):
                    outcome = (*text, int(token)), (*origins, extra)
                    add(True, outcome, mass * verifier[text][token], {})
    return dict(finished)


def verifier_law(verifier: Distributions, new_tokens: int) -> dict[Text, float]:
    """The joint law of tokens that the verifier generates alone."""
    law: dict[Text, float] = {(): 1.0}
    for _ in range(new_tokens):
        law = {
            (*text, int(token)): mass * verifier[text][token]
            for text, mass in law.items()
            for token in np.flatnonzero(verifier[text])
        }
    return law


def seen_as(law: Mapping[Outcome, float], view: Callable[[Outcome], Any]) -> dict[Any, float]:
    """The law of a function of the outcome."""
    seen: dict[Any, float] = defaultdict(float)
    for outcome, probability in law.items():
        seen[view(outcome)] += probability
    return dict(seen)
