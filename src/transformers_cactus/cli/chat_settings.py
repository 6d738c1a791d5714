"""The acceptance rule of a chat, which its commands change between answers."""

from __future__ import annotations

from typing import Any

from ..configuration import RULES, build_rule, parameters_of

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
            ValueError: If it is no number or out of range, or the rule has none.
        """
        rule = self.options["cactus_rule"]
        if "cactus_delta" not in parameters_of(rule):
            raise ValueError(f"the rule {rule} has no delta. With one: /rule cactus")
        delta = _number(text)
        self._take({**self.options, "cactus_delta": delta})
        self._delta = delta

    def set_rule(self, words: list[str]) -> None:
        """Sets the rule by name, with its parameters as `name=number`; `delta` is kept where it has one.

        Raises:
            ValueError: If there is no such rule or parameter, or one is missing or out of range.
        """
        if not words or words[0] not in RULES:
            raise ValueError(f"/rule takes one of {', '.join(RULES)}")
        options: dict[str, Any] = {"cactus_rule": words[0]}
        takes = parameters_of(words[0])
        if "cactus_delta" in takes:
            options["cactus_delta"] = self._delta
        for word in words[1:]:
            name, _, value = word.partition("=")
            if f"cactus_{name}" not in takes:
                known = ", ".join(option.removeprefix("cactus_") for option in takes) or "none"
                raise ValueError(f"{words[0]} has no parameter {name!r}; it has: {known}")
            options[f"cactus_{name}"] = _number(value)
        self._take(options)

    def _take(self, options: dict[str, Any]) -> None:
        build_rule(options)
        self.options = options

    def __str__(self) -> str:
        return str(build_rule(self.options))


def _number(text: str) -> float | int:
    try:
        return int(text) if text.strip().isdigit() else float(text)
    except ValueError:
        raise ValueError(f"{text!r} is not a number") from None
