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
    return largest_within_budget(q, budget, F_DIVERGENCES[rule])


F_DIVERGENCES: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "cactus-exact": lambda t: xlogy(t, t),
    "chi-square": lambda t: (t - 1) ** 2,
    "total-variation": lambda t: np.abs(t - 1) / 2,
    "reverse-kl": lambda t: -np.log(t),
    "squared-hellinger": lambda t: (np.sqrt(t) - 1) ** 2 / 2,
    "jensen-shannon": lambda t: (xlogy(t, t) - (t + 1) * np.log((t + 1) / 2)) / 2,
}
"""The `f` of rules that keep a budget for `sum of q * f(h / q)`."""


def largest_within_budget(q: np.ndarray, budget: float, f: Callable[[np.ndarray], np.ndarray]) -> np.ndarray:
    """The largest gamma in `[q, 1]` that costs an f-divergence of at most the budget, by bisection."""
    if budget == 0:
        return q
    result = np.where(q > 0, 1.0, 0.0)
    inner = (q > 0) & (q < 1)
    x = q[inner]

    def within(gamma: np.ndarray) -> np.ndarray:
        with np.errstate(divide="ignore"):
            return x * f(gamma / x) + (1 - x) * f((1 - gamma) / (1 - x)) <= budget

    low, high = x, np.ones(len(x))
    for _ in range(60):
        middle = (low + high) / 2
        low, high = np.where(within(middle), middle, low), np.where(within(middle), high, middle)
    result[inner] = np.where(within(np.ones(len(x))), 1.0, low)
    return result


def optimal_target(p: np.ndarray, q: np.ndarray, multiplier: float) -> np.ndarray:
    """`clip(p, q * e^nu, q * e^(nu + multiplier))`, with the `nu` for which it sums to 1, by bisection."""
    low, high = -multiplier, 0.0
    for _ in range(60):
        nu = (low + high) / 2
        small = np.clip(p, q * np.exp(nu), q * np.exp(nu + multiplier)).sum() < 1
        low, high = (nu, high) if small else (low, nu)
    return np.clip(p, q * np.exp(low), q * np.exp(low + multiplier))


def whole_row_rule(p: np.ndarray, q: np.ndarray, rule: str, budget: float) -> tuple[np.ndarray, np.ndarray]:
    """Acceptance probability of each token and the recovery distribution, which does not depend on the token."""
    if rule.startswith("typical"):
        phi = (q > min(budget, 0.3 * np.exp(xlogy(q, q).sum()))).astype(float)
        return phi, np.eye(len(q))[q.argmax()] if rule == "typical-argmax" else q
    if rule == "top-k":
        kept = np.isin(np.arange(len(q)), np.argsort(-q)[: int(budget)]) & (q > 0)
        residual = np.maximum(np.where(kept, q, 0) / q[kept].sum() - p, 0)
        return kept.astype(float), residual / max(residual.sum(), 1e-300)
    if rule == "optimal":
        h = optimal_target(p, q, budget)
    elif rule == "ensemble":
        h = budget * q + (1 - budget) * p
    else:
        assert rule == "ensemble-within"
        inside = np.where(q > 0, p, 0)
        h = budget * q + (1 - budget) * (inside + (1 - inside.sum()) * q)
    residual = np.maximum(h - p, 0)
    return np.minimum(1, np.divide(h, p, out=np.ones_like(h), where=p > 0)), residual / max(residual.sum(), 1e-300)


WHOLE_ROW_RULES = ("typical", "typical-argmax", "top-k", "ensemble", "ensemble-within", "optimal")
"""Rules for `whole_row_rule`."""


def drafted_position(p: np.ndarray, q: np.ndarray, rule: str, budget: float) -> dict[str, np.ndarray]:
    """What one drafted position emits.

    Args:
        p: `[vocab]`, the draft's distribution, one-hot for a draft without probabilities.
        q: `[vocab]`, the verifier's.
        rule: its name.
        budget: delta, or the rule's own parameter.

    Returns:
        By origin (lossless, delta, recovered), the probability of emitting each token that way, `[vocab]`.
    """
    if rule in WHOLE_ROW_RULES:
        phi, recovery = whole_row_rule(p, q, rule, budget)
        lossless = np.minimum(p * phi, np.minimum(p, q))
        recovered = (p * (1 - phi)).sum() * recovery
        return {
            "lossless": lossless,
            "delta": p * phi - lossless,
            "recovered": np.where(recovered > 1e-14, recovered, 0),
        }
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
    verifier: Distributions,
    drafter: Drafter,
    new_tokens: int,
    rule: str,
    budget: float | Callable[[Text], float] = 0.0,
) -> dict[Outcome, float]:
    """The joint law of the generated tokens and their origins.

    Args:
        verifier: the verifier's distributions.
        drafter: what is drafted.
        new_tokens: how many tokens are generated.
        rule: its name.
        budget: delta, or the rule's own parameter; where it is a function, given the tokens before a position.
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
                        emitted_at[key] = drafted_position(
                            p, verifier[text], rule, budget(text) if callable(budget) else budget
                        )
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
