"""A rule's parameters as words of the form `name=value`, on the command line and in a chat."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from ..configuration import PARAMETERS, parameters_of

OWN_OPTIONS = frozenset({"cactus_delta"})
"""Parameters of rules that the command line has an option for; all others go through `--parameter`."""


def read_parameters(rule: str, words: Sequence[str]) -> dict[str, Any]:
    """The options of `generate` that set a rule's parameters.

    Args:
        rule (`str`): The rule's name.
        words (`Sequence[str]`): Such as `factor=2`; the name is the option's without `cactus_`.

    Returns:
        `dict`: By option, a number, `True`, `False` or text: whether the parameter may have it is for the rule to say.

    Raises:
        ValueError: If the rule has no such parameter, or one is given twice.
    """
    takes = parameters_of(rule)
    options: dict[str, Any] = {}
    for word in words:
        name, _, value = word.partition("=")
        option = f"cactus_{name}"
        if option not in takes:
            known = ", ".join(option.removeprefix("cactus_") for option in takes) or "none"
            raise ValueError(f"{rule} has no parameter {name!r}; it has: {known}")
        if option in options:
            raise ValueError(f"{name} is given twice")
        options[option] = _value(value)
    return options


def with_flags(message: str) -> str:
    """A message about options of `generate`, for those who know the command line's."""

    def flag(match: re.Match[str]) -> str:
        option, name = match.group(0), match.group(1)
        by_parameter = option in PARAMETERS and option not in OWN_OPTIONS
        return f"--parameter {name}" if by_parameter else f"--{name.replace('_', '-')}"

    return re.sub(r"\bcactus_(\w+)", flag, message)


def _value(text: str) -> float | int | bool | str:
    if text.lower() in ("true", "false"):
        return text.lower() == "true"
    try:
        return int(text) if text.strip().isdecimal() else float(text)
    except ValueError:
        return text
