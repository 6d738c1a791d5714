"""Reading and checking the `cactus_*` options of a call."""

from __future__ import annotations

import dataclasses
import difflib
import numbers
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from .acceptance import AcceptanceRule, BudgetRule, Cactus, CactusExact, Lenience, Speculative
from .advice import advise
from .block_verification import target_rule
from .delta_plan import DeltaPlan, Schedule, scheduled
from .effective import is_quick
from .parameters import check_parameter, counted
from .rules import (
    ChiSquare,
    Ensemble,
    JensenShannon,
    Optimal,
    ReverseKL,
    SquaredHellinger,
    TopK,
    TotalVariation,
    Typical,
)

RULES: dict[str, type[AcceptanceRule]] = {
    "cactus": Cactus,
    "cactus-exact": CactusExact,
    "chi-square": ChiSquare,
    "ensemble": Ensemble,
    "jensen-shannon": JensenShannon,
    "lenience": Lenience,
    "optimal": Optimal,
    "reverse-kl": ReverseKL,
    "speculative": Speculative,
    "squared-hellinger": SquaredHellinger,
    "top-k": TopK,
    "total-variation": TotalVariation,
    "typical": Typical,
}
"""Rules by the name that `cactus_rule` takes."""

PARAMETERS: dict[str, str] = {
    "cactus_delta": "delta",
    "cactus_ensemble_weight": "weight",
    "cactus_factor": "factor",
    "cactus_multiplier": "multiplier",
    "cactus_posterior_alpha": "posterior_alpha",
    "cactus_posterior_threshold": "posterior_threshold",
    "cactus_recovery_from": "recovery_from",
    "cactus_top_k": "k",
    "cactus_within_support": "within_support",
}
"""Options that set a parameter of the rule, and that parameter's name."""

ONE_FOR_ALL = frozenset({"cactus_recovery_from", "cactus_top_k", "cactus_within_support"})
"""Those among them that are the same for all prompts of a call."""

ENGINES = ("auto", "fast", "stock")
"""What `cactus_engine` takes."""

VERIFICATIONS = ("token", "block")
"""What `cactus_verification` takes."""

OPTIONS = (
    "cactus_rule",
    *PARAMETERS,
    "cactus_budget",
    "cactus_budget_window",
    "cactus_engine",
    "cactus_certificate",
    "cactus_verification",
    "cactus_compile",
)
"""Every option."""


@dataclasses.dataclass(frozen=True)
class RunOptions:
    """The options of a call that are not about its rule.

    Raises:
        TypeError, ValueError: If an option has another value than it may have.
    """

    engine: str = "auto"
    """`cactus_engine`."""
    certificate: bool = False
    """`cactus_certificate`."""
    verification: str = "token"
    """`cactus_verification`."""
    compile: bool = False
    """`cactus_compile`."""
    budget: float | Tensor | None = None
    """`cactus_budget`; one number per prompt where it is a tensor."""
    budget_window: int | None = None
    """`cactus_budget_window`."""
    schedule: Schedule | None = None
    """`cactus_delta`, where it is a function of the generated text."""

    def __post_init__(self) -> None:
        if self.budget is not None:
            check_parameter("cactus_budget", self.budget, unit="nats")
        if self.budget_window is not None:
            if isinstance(self.budget_window, bool) or not isinstance(self.budget_window, int):
                raise TypeError(f"cactus_budget_window must be a whole number of tokens, got {self.budget_window!r}.")
            if self.budget_window < 1:
                raise ValueError(f"cactus_budget_window must be at least 1 token, got {self.budget_window}.")
            if self.budget is None:
                raise ValueError(
                    "cactus_budget_window says how many tokens cactus_budget is for, and there is none: pass "
                    "cactus_budget beside it."
                )
        if self.engine not in ENGINES:
            raise ValueError(f"cactus_engine must be one of {', '.join(map(repr, ENGINES))}, got {self.engine!r}.")
        for name in ("certificate", "compile"):
            if not isinstance(getattr(self, name), bool):
                raise TypeError(f"cactus_{name} must be True or False, got {getattr(self, name)!r}.")
        if self.verification not in VERIFICATIONS:
            raise ValueError(
                f"cactus_verification must be one of {', '.join(map(repr, VERIFICATIONS))}, got {self.verification!r}."
            )

    @classmethod
    def of(cls, options: Mapping[str, Any], rule: AcceptanceRule) -> RunOptions:
        """Those among all options, `None` where unset, for a call with this rule."""
        given = {field.name: options.get(f"cactus_{field.name}") for field in dataclasses.fields(cls)}
        # In float64: a limit that is never exceeded is not to be rounded up.
        given["budget"] = _numbers("cactus_budget", given["budget"], torch.float64)
        if callable(options.get("cactus_delta")) and isinstance(rule, BudgetRule):
            given["schedule"] = options["cactus_delta"]
        return cls(**{name: value for name, value in given.items() if value is not None})

    def of_prompt(self, row: int) -> RunOptions:
        """The options for one prompt."""
        if not isinstance(self.budget, Tensor) or not self.budget.ndim:
            return self
        return dataclasses.replace(self, budget=self.budget[row : row + 1])


def pop_options(kwargs: dict[str, Any]) -> dict[str, Any]:
    """Removes the `cactus_*` options from a call's keyword arguments and returns them.

    Raises:
        TypeError: If one of them is unknown; the message has the nearest known name.
    """
    given = {name: kwargs.pop(name) for name in list(kwargs) if name.startswith("cactus_")}
    _check_known(given, "argument")
    return given


def options_of(config: Any) -> dict[str, Any]:
    """The `cactus_*` options that a `GenerationConfig` (or `None`) carries.

    Raises:
        TypeError: If one of them is unknown; the message has the nearest known name.
    """
    given = {} if config is None else {k: v for k, v in vars(config).items() if k.startswith("cactus_")}
    _check_known(given, "generation_config entry")
    return given


def merged(*levels: Mapping[str, Any]) -> dict[str, Any]:
    """Options from several places as one; later places win.

    A place that turns off the budget turns off the window that an earlier one has for it.
    """
    options: dict[str, Any] = {}
    for level in levels:
        if level.get("cactus_budget", ...) is None:
            options.pop("cactus_budget_window", None)
        options |= level
    return options


def resolved(models: Any, config: Any, given: Mapping[str, Any]) -> tuple[dict[str, Any], AcceptanceRule | None]:
    """The `cactus_*` options of a call, and their rule; `None` where a call runs as if nothing were enabled.

    Args:
        models (`GenerationConfig`): The model's own.
        config (`GenerationConfig` or `None`): The call's.
        given (`Mapping`): The options that the call itself has.
    """
    options = merged(options_of(models), options_of(config), given)
    return options, None if is_turned_off(given or options_of(config)) else build_rule(options)


def is_turned_off(given: Mapping[str, Any]) -> bool:
    """Whether a call says `cactus_delta=None` and nothing that needs a rule.

    Args:
        given (`Mapping`): The options that the call itself has.

    Raises:
        ValueError: If it says `None`, gives no rule, and has options that go with one.
    """
    if given.get("cactus_delta", ...) is not None or given.get("cactus_rule") is not None:
        return False
    # Which loop to take is no matter where there is nothing for it to do.
    contrary = [
        name for name, value in given.items() if value is not None and value is not False and name != "cactus_engine"
    ]
    if contrary:
        raise ValueError(
            f"cactus_delta=None turns Cactus off, and {_listed(contrary)} beside it asks for it: give cactus_delta a "
            "number, or name a cactus_rule that has none, or leave the rest out (None where a pipeline has it)."
        )
    return True


def build_rule(options: Mapping[str, Any]) -> AcceptanceRule | None:
    """The acceptance rule that a call's options ask for.

    Args:
        options (`Mapping`): Options with their values, `None` where unset.

    Returns:
        [`AcceptanceRule`] or `None`: `None` where no option is set.

    Raises:
        TypeError, ValueError: If the rule is unknown, or a parameter is missing, of the wrong type or out of range.
    """
    about_run = {f"cactus_{field.name}" for field in dataclasses.fields(RunOptions)}
    unset = (None, False)
    given_for_run = [name for name in about_run - {"cactus_engine"} if all(options.get(name) is not x for x in unset)]
    options = {name: value for name, value in options.items() if value is not None and name not in about_run}
    if not options:
        if given_for_run:
            raise ValueError(f"{_listed(given_for_run)} needs a rule: pass cactus_delta or cactus_rule beside it.")
        return None
    rule = options.pop("cactus_rule", "cactus")
    if isinstance(rule, AcceptanceRule):
        if options:
            raise ValueError(
                f"cactus_rule={rule!r} already carries its parameters; leave out {_listed(options)} or give the "
                "rule by name."
            )
        return rule
    if not isinstance(rule, str) or rule not in RULES:
        nearest = difflib.get_close_matches(str(rule), RULES, n=1)
        hint = f" Did you mean {nearest[0]!r}?" if nearest else ""
        raise ValueError(
            f"cactus_rule must be one of {', '.join(map(repr, RULES))} or a rule object such as Cactus(0.75), got "
            f"{rule!r}.{hint}"
        )
    fields = {field.name: field for field in dataclasses.fields(RULES[rule])}  # type: ignore[arg-type]
    takes = parameters_of(rule)
    missing = {
        option for option, name in takes.items() if fields[name].default is dataclasses.MISSING
    } - options.keys()
    if missing:
        raise ValueError(f"cactus_rule={rule!r} needs {_listed(missing)}.")
    for option in options.keys() - takes.keys():
        advise(f"{option} has no effect with cactus_rule={rule!r}.")
    given = {
        name: options[option] if option in ONE_FOR_ALL else _numbers(option, options[option])
        for option, name in takes.items()
        if option in options
    }
    if "delta" in takes.values() and callable(given["delta"]):
        # Whether it can be called is to be known before anything runs.
        given["delta"] = scheduled(given["delta"], [])
    try:
        return RULES[rule](**given)
    except (TypeError, ValueError) as error:
        # Rules name their own parameter, and name it first.
        named = (o for o, name in takes.items() if str(error).removeprefix("every ").startswith(f"{name} "))
        blamed = next(named, None)
        raise error if blamed is None else type(error)(f"{blamed}: {error}") from None


def parameters_of(rule: str) -> dict[str, str]:
    """The options that set a parameter of the rule of this name, and that parameter's name."""
    fields = {field.name for field in dataclasses.fields(RULES[rule])}  # type: ignore[arg-type]
    return {option: name for option, name in PARAMETERS.items() if name in fields}


def check_together(rule: AcceptanceRule, options: RunOptions) -> None:
    """Raises for options that do not go with the rule."""
    if options.budget is not None and not isinstance(rule, BudgetRule):
        raise ValueError(
            f"cactus_budget cuts delta to what is left, and {rule} has no delta. It goes with 'cactus', "
            "'cactus-exact' and the other rules that take cactus_delta."
        )
    if options.compile and options.engine == "stock":
        raise ValueError(
            "cactus_compile=True compiles the forwards of the fast engine: leave out cactus_engine='stock'."
        )
    if options.verification == "block" and (options.budget is not None or options.schedule is not None):
        raise ValueError(
            "cactus_verification='block' is for rules whose target does not depend on the drafted token: leave out "
            "cactus_budget and a schedule for cactus_delta."
        )
    if options.verification == "block":
        if options.engine == "stock":
            raise ValueError(
                "cactus_verification='block' runs in the fast engine only, not with cactus_engine='stock'."
            )
        target_rule(rule)
        if options.certificate and not rule.is_lossless:
            raise ValueError(
                "cactus_certificate needs cactus_verification='token': in a block that is accepted as a whole, what a "
                "token was drawn from depends on the tokens behind it."
            )
    if options.certificate and not is_quick(rule):
        raise ValueError(
            f"cactus_certificate is not available for {rule}: it is none of this package's kinds of rule (a "
            "GammaRule, or one with a target), and for others the distribution that is emitted takes O(vocab^2)."
        )


def delta_plan(rule: AcceptanceRule, options: RunOptions, prompts: int, repeats: int = 1) -> DeltaPlan | None:
    """The plan for a call's budgets, `None` where the rule's own number is all there is to it.

    Args:
        rule ([`AcceptanceRule`]): The rule, with one parameter per sequence where it has several.
        options ([`RunOptions`]): The call's options.
        prompts (`int`): How many prompts the call has.
        repeats (`int`, *optional*, defaults to 1): Sequences for each prompt.

    Raises:
        ValueError: If there are budgets for another number of prompts.
    """
    if options.schedule is None and options.budget is None:
        return None
    assert isinstance(rule, BudgetRule)
    budget = None
    if options.budget is not None:
        budget = torch.as_tensor(options.budget, dtype=torch.float64).cpu().reshape(-1)
        if len(budget) not in (1, prompts) or (isinstance(options.budget, Tensor) and len(budget) != prompts):
            raise ValueError(
                f"cactus_budget has {counted(len(budget), 'number')}, the call has {counted(prompts, 'prompt')}: give "
                "one number, or one for each prompt (in a pipeline, for each of batch_size)."
            )
        budget = budget.expand(prompts).repeat_interleave(repeats)
    return DeltaPlan(rule, options.schedule, budget, options.budget_window)


def warn_of_greedy(rule: AcceptanceRule) -> None:
    """Says that a rule decides nothing in a call that does not sample; a lossless one asks for nothing else."""
    if rule.is_lossless:
        return
    advise(
        f"{rule} has no effect without sampling: greedy decoding keeps exactly the tokens that the verifier itself "
        "would pick. Pass do_sample=True (for Whisper, a temperature above 0).",
    )


def warn_of_support(rule: AcceptanceRule) -> None:
    """Says that a rule can emit what the verifier excludes."""
    if rule.leaves_support:
        advise(
            f"{rule} can emit tokens that the verifier excludes (by top_k, top_p, bad words ...) and the draft does "
            "not. within_support=True (cactus_within_support) keeps them out.",
        )


def warn_of_context(limit: int) -> None:
    """Says that the draft model has no positions left."""
    advise(
        f"the draft model takes {limit} tokens at most: from there on the verifier goes on alone.",
    )


def _numbers(option: str, value: Any, dtype: torch.dtype = torch.float32) -> Any:
    """A list or NumPy array of numbers as a tensor of one value per prompt; everything else as it is."""
    if isinstance(value, Tensor) or not (isinstance(value, (list, tuple)) or getattr(value, "shape", ()) != ()):
        return value
    for entry in value:
        if isinstance(entry, bool) or not isinstance(entry, numbers.Real):
            raise TypeError(
                f"{option} must be a number, or a list of numbers with one for each prompt, got {value!r}."
            )
    return torch.tensor([float(entry) for entry in value], dtype=dtype)


def _listed(names: Any) -> str:
    return ", ".join(sorted(names))


def _check_known(given: Mapping[str, Any], what: str) -> None:
    for name in given:
        if name not in OPTIONS:
            rule = name.removeprefix("cactus_").replace("_", "-")
            nearest = difflib.get_close_matches(name, OPTIONS, n=1, cutoff=0.0)
            meant = f"cactus_rule={rule!r}" if rule in RULES else repr(nearest[0])
            raise TypeError(f"unknown {what} {name!r}. Did you mean {meant}? Known: {', '.join(OPTIONS)}.")
