"""Words for what pydantic found: the setting in backticks, its value, the rule it breaks."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from rtx_distributed.errors import ConfigError, RtxError

if TYPE_CHECKING:
    from pydantic import ValidationError
    from pydantic_core import ErrorDetails

_RULES = {
    "int_parsing": "must be a whole number",
    "int_type": "must be a whole number",
    "int_from_float": "must be a whole number",
    "int_parsing_size": "is too large",
    "float_parsing": "must be a number",
    "float_type": "must be a number",
    "bool_parsing": "must be true or false",
    "bool_type": "must be true or false",
    "string_type": "must be a text",
    "path_type": "must be a path",
    "finite_number": "must be a finite number",
    "model_type": "is a section, not a value",
    "model_attributes_type": "is a section, not a value",
    "dict_type": "is a section, not a value",
}


class SettingsError(ConfigError):
    """Several problems in one message, and each by itself in ``problems``."""

    def __init__(self, problems: Sequence[str]) -> None:
        self.problems = tuple(dict.fromkeys(problems))
        lines = "".join(f"\n  - {problem}" for problem in self.problems)
        many = f"{len(self.problems)} problems with the settings:{lines}"
        super().__init__(self.problems[0] if len(self.problems) == 1 else many)

    def __reduce__(self) -> tuple[type[SettingsError], tuple[tuple[str, ...]]]:
        return SettingsError, (self.problems,)  # by default it would be made from the message


def describe_errors(error: ValidationError, *, section: str) -> list[str]:
    """All that is wrong with the values of ``section``, each with the setting in backticks."""
    found = [_describe(details, section=section) for details in error.errors(include_url=False)]
    return [problem for problems in found for problem in problems]


def show_value(value: object) -> str:
    """A value as in TOML, cut where it is long."""
    if isinstance(value, bool):
        return "true" if value else "false"
    text = f'"{value}"' if isinstance(value, str) else str(value)
    return text if len(text) <= 80 else f"{text[:77]}..."


def closest(name: str, known: Iterable[str]) -> str | None:
    """The known name that ``name`` was probably meant to be."""
    found = difflib.get_close_matches(name, list(known), n=1, cutoff=0.6)
    return found[0] if found else None


def with_origins(problem: str, *, origins: Mapping[str, str]) -> str:
    """``problem`` with the place where each setting that it names was set."""
    named = dict.fromkeys(re.findall(r"`([a-z_.]+)` = ", problem))
    places = {key: origins[key] for key in named if origins.get(key, "default") != "default"}
    if len(places) <= 1:
        return "".join([problem, *(f" (from: {place})" for place in places.values())])
    return f"{problem} ({', '.join(f'`{key}` from: {places[key]}' for key in places)})"


def _describe(details: ErrorDetails, *, section: str) -> list[str]:
    context: dict[str, Any] = details.get("ctx", {})
    cause = context.get("error")
    if isinstance(cause, SettingsError):
        return list(cause.problems)
    if isinstance(cause, RtxError):
        return [str(cause)]
    names = [section] if section else []
    # A pair's second number is named by its place; the key before it is the setting.
    names += [str(part) for part in details["loc"] if isinstance(part, str)]
    if details["type"] == "extra_forbidden":
        # Down here because the table of names is made from the classes that import this module.
        from rtx_distributed.config.names import unknown_setting

        return [unknown_setting(".".join(names))]
    rule = _rule(details, context)
    return [f"`{'.'.join(names)}` = {show_value(details['input'])}: {rule}"]


def _rule(details: ErrorDetails, context: dict[str, Any]) -> str:
    kind = details["type"]
    if kind == "literal_error":
        choices = str(context["expected"]).replace("'", "").replace(" or ", ", ").split(", ")
        guess = closest(str(details["input"]), choices)
        hint = f" (did you mean `{guess}`?)" if guess else ""
        return f"must be one of {', '.join(choices)}{hint}"
    if kind == "value_error":
        return str(context["error"])
    if kind == "greater_than_equal":
        return f"must be at least {context['ge']:g}"
    if kind == "greater_than":
        return f"must be greater than {context['gt']:g}"
    if kind == "less_than":
        return f"must be less than {context['lt']:g}"
    if kind == "less_than_equal":
        return f"must be at most {context['le']}"
    if kind in {"missing", "too_long", "tuple_type"}:
        return "must be two numbers, as in 0.9,0.95"
    return _RULES.get(kind, details["msg"])
