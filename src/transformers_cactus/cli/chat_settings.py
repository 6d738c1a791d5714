"""The acceptance rule of a chat, which its commands change between answers."""

from __future__ import annotations

from typing import Any

from ..configuration import RULES, build_rule, parameters_of
from .rule_parameters import read_parameters

DEFAULT_DELTA = 0.25


class ChatRule:
    """The rule and its parameters.

    Args:
        delta (`float`): The budget in nats of the first rule, `cactus`.

    Raises:
        ValueError: If the budget is out of range.
    """

    def __init__(self, delta: float = DEFAULT_DELTA):
        self.options: dict[str, Any] = {}
        self._delta = delta
        self._take({"cactus_rule": "cactus", "cactus_delta": delta})

    def set_delta(self, text: str) -> None:
        """Sets the budget.

        Raises:
            TypeError, ValueError: If it is no number or out of range, or the rule has none.
        """
        rule = self.options["cactus_rule"]
        if "cactus_delta" not in parameters_of(rule):
            raise ValueError(f"the rule {rule} has no delta. With one: /rule cactus")
        options = self.options | read_parameters(rule, [f"delta={text}"])
        self._take(options)
        self._delta = options["cactus_delta"]

    def set_rule(self, words: list[str]) -> None:
        """Sets the rule by name, with its parameters as `name=value`; `delta` is kept where it has one.

        Raises:
            TypeError, ValueError: If there is no such rule or parameter, or one is missing or out of range.
        """
        if not words or words[0] not in RULES:
            raise ValueError(f"/rule takes one of {', '.join(RULES)}")
        options: dict[str, Any] = {"cactus_rule": words[0]}
        if "cactus_delta" in parameters_of(words[0]):
            options["cactus_delta"] = self._delta
        options |= read_parameters(words[0], words[1:])
        self._take(options)
        self._delta = options.get("cactus_delta", self._delta)

    def _take(self, options: dict[str, Any]) -> None:
        build_rule(options)
        self.options = options

    def __str__(self) -> str:
        return str(build_rule(self.options))
