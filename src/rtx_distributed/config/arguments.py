"""The command line as settings: ``--section.name value``, ``--section.name=value``.

Not pydantic-settings' own source: that knows neither hyphens for underscores, nor "the last one
counts" for pairs, nor where a value came from, and its words for an unknown name do not help.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

from rtx_distributed.config.names import canonical, settings, unknown_setting
from rtx_distributed.config.problems import SettingsError, closest

_TRUTH = frozenset({"true", "false", "yes", "no", "on", "off", "t", "f", "y", "n", "1", "0"})


@dataclass(frozen=True, slots=True)
class Arguments:
    """A command line, taken apart. ``values`` and ``switches`` are by canonical name; of a name
    given twice the last counts. ``positional`` holds the rest, in order."""

    values: dict[str, str] = field(default_factory=dict)
    options: dict[str, str] = field(default_factory=dict)
    switches: frozenset[str] = frozenset()
    positional: tuple[str, ...] = ()


def read_arguments(
    args: Sequence[str],
    *,
    switches: Collection[str] = (),
    options: Collection[str] = (),
    stop_at_positional: bool = False,
) -> Arguments:
    """Takes ``args`` apart.

    ``switches`` and ``options`` are a verb's own names (without dashes), which are no settings.
    With ``stop_at_positional`` all from the first positional argument on belongs to it.
    A switch of a boolean setting may stand without value: ``--debug``.

    Errors: ``ConfigError`` with all unknown names and missing values.
    """
    values: dict[str, str] = {}
    own: dict[str, str] = {}
    seen: set[str] = set()
    positional: list[str] = []
    problems: list[str] = []
    rest = list(args)
    while rest:
        arg = rest.pop(0)
        if not _is_utf8(arg):
            problems.append(f"argument {arg!a} is not valid UTF-8")
            continue
        if arg == "--":
            positional += rest
            break
        if arg in {"-h", "--help"}:
            arg = "--help"
        elif not arg.startswith("-") or arg == "-":
            positional.append(arg)
            if stop_at_positional:
                positional += rest
                break
            continue
        name, equals, value = arg.removeprefix("--").partition("=")
        plain = name.replace("-", "_")
        if plain in switches and not equals:
            seen.add(plain)
            continue
        key = plain if plain in options else canonical(name)
        if key is None or not arg.startswith("--"):
            problems.append(_unknown(arg.partition("=")[0], switches=switches, options=options))
            # Its value, if any, is no positional argument: one mistake, one message.
            if not equals and rest and not rest[0].startswith("--"):
                rest.pop(0)
            continue
        if not equals:
            taken = _take_value(key, rest)
            if taken is None:
                problems.append(f"`--{name}` needs a value")
                continue
            value = taken
        if not value:
            problems.append(f"`--{name}` has an empty value")
        elif not _is_utf8(value):
            problems.append(f"`--{name}` {value!a} is not valid UTF-8")
        (own if key in options else values)[key] = value
    if problems:
        raise SettingsError(problems)
    return Arguments(values, own, frozenset(seen), tuple(positional))


def _take_value(key: str, rest: list[str]) -> str | None:
    """The next argument, if it can be the value of ``key``; a lone minus starts a number."""
    setting = settings().get(key)
    bare = setting is not None and setting.boolean
    if not rest or rest[0].startswith("--"):
        return "true" if bare else None
    if bare and rest[0].lower() not in _TRUTH and rest[0].endswith((".toml", ".py")):
        return "true"
    return rest.pop(0)


def _unknown(arg: str, *, switches: Collection[str], options: Collection[str]) -> str:
    if not arg.startswith("--"):
        return f"unknown option `{arg}`: options start with two dashes"
    name = arg.removeprefix("--")
    # A verb's own names are close to hand: a typing error in one of them is looked up there too.
    own = closest(name.replace("-", "_"), [*switches, *options])
    if own and "." not in name:
        return f"unknown option `{arg}`: did you mean `--{own.replace('_', '-')}`?"
    return unknown_setting(name)


def _is_utf8(text: str) -> bool:
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        return False
    return True
