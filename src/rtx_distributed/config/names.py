"""The table of all settings, made from the classes, and what to say about names not in it."""

from __future__ import annotations

import types
import typing
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal

from rtx_distributed.config.problems import closest
from rtx_distributed.config.settings import Config
from rtx_distributed.config.types import Section

ALIASES = {"train.learning_rate": "train.lr"}

# Names of features that are planned and not built. They are as unknown as any other name; only
# the message is another one, for no spelling of theirs would work.
NOT_AVAILABLE_SECTIONS = frozenset({"parallel", "balance"})
NOT_AVAILABLE = frozenset(
    {
        "comm.compression",
        "coordinator",
        "metrics.prometheus_port",
        "node_rank",
        "nodes",
        "token_file",
    }
)


@dataclass(frozen=True, slots=True)
class Setting:
    """One setting. ``key`` is ``section.name``, or ``name`` alone at the top level."""

    key: str
    section: str
    name: str
    default: Any
    description: str
    kind: str
    """What a value looks like: ``true|false``, ``NUMBER``, or the choices."""
    optional: bool
    """``none`` is a value: automatic."""
    boolean: bool


@cache
def settings() -> dict[str, Setting]:
    """All settings by key, in the order in which they are shown: top level first."""
    found: dict[str, Setting] = {}
    sections = section_classes()
    classes: dict[str, type[Section]] = {"": Config, **sections}
    for section, model in classes.items():
        for name, field in model.model_fields.items():
            if not section and name in sections:
                continue
            key = f"{section}.{name}" if section else name
            kinds = [kind for kind in _alternatives(field.annotation) if kind is not type(None)]
            found[key] = Setting(
                key=key,
                section=section,
                name=name,
                default=field.default,
                description=field.description or "",
                kind=_kind(kinds[0]),
                optional=type(None) in _alternatives(field.annotation),
                boolean=kinds[0] is bool,
            )
    return found


@cache
def section_classes() -> dict[str, type[Section]]:
    """The class of each section, in the order in which they are shown."""
    found: dict[str, type[Section]] = {}
    for name, field in Config.model_fields.items():
        kind: Any = field.annotation
        if isinstance(kind, type) and issubclass(kind, Section):
            found[name] = kind
    return found


def canonical(key: str) -> str | None:
    """The key of the setting that ``key`` spells (hyphens, aliases), None if there is none."""
    key = key.replace("-", "_")
    key = ALIASES.get(key, key)
    return key if key in settings() else None


def unknown_setting(key: str) -> str:
    """What to say about a name that is no setting: where it belongs, or what it is close to."""
    plain = key.replace("-", "_")
    section, _, name = plain.rpartition(".")
    if plain in NOT_AVAILABLE or plain.partition(".")[0] in NOT_AVAILABLE_SECTIONS:
        return f"unknown setting `{key}`: it is not available in this version; leave it out"
    if plain in section_classes():
        example = next(k for k in settings() if k.startswith(f"{plain}."))
        return f"`{key}` is a section, not a setting: name one of its settings, as in `{example}`"
    if section and section not in section_classes():
        guess = closest(section, section_classes())
        if guess and canonical(f"{guess}.{name}"):
            return f"unknown setting `{key}`: did you mean `{guess}.{name}`?"
    homes = [known for known in _spellings() if known.rpartition(".")[2] == name]
    if homes:
        return f"unknown setting `{key}`: {_belongs(name, homes)}"
    inside = [known.name for known in settings().values() if known.section == section]
    near = closest(name, [*inside, *_names(ALIASES, section)])
    guess = f"{section}.{near}" if near and section else near or _closest_name(name)
    if guess:
        return f"unknown setting `{key}`: did you mean `{guess}`?"
    if section in section_classes():
        return f"unknown setting `{key}`: section `{section}` has {', '.join(inside)}"
    return (
        f"unknown setting `{key}`: the sections are {', '.join(section_classes())}; "
        f"`rtxd config show` prints all settings"
    )


def _belongs(name: str, homes: list[str]) -> str:
    places = [
        f"to section `{home.rpartition('.')[0]}`: write `{home}`"
        if "." in home
        else f"at the top level: write `{home}`"
        for home in homes
    ]
    return f"`{name}` belongs {', or '.join(places)}"


def _names(keys: Iterable[str], section: str) -> list[str]:
    return [key.rpartition(".")[2] for key in keys if key.rpartition(".")[0] == section]


def _spellings() -> list[str]:
    return [*settings(), *ALIASES]


def _closest_name(name: str) -> str | None:
    """The setting, in whatever section, whose own name is closest."""
    by_name = {known.rpartition(".")[2]: known for known in reversed(_spellings())}
    guess = closest(name, by_name)
    return by_name[guess] if guess else None


def _alternatives(annotation: Any) -> tuple[Any, ...]:
    if typing.get_origin(annotation) in (typing.Union, types.UnionType):
        return tuple(_bare(part) for part in typing.get_args(annotation))
    return (_bare(annotation),)


def _bare(annotation: Any) -> Any:
    """Without the ``Annotated`` around it."""
    if typing.get_origin(annotation) is typing.Annotated:
        return typing.get_args(annotation)[0]
    return annotation


def _kind(annotation: Any) -> str:
    if typing.get_origin(annotation) is Literal:
        return "|".join(typing.get_args(annotation))
    if typing.get_origin(annotation) is tuple:
        return "NUMBER,NUMBER"
    return {bool: "true|false", int: "N", float: "NUMBER", str: "TEXT"}.get(annotation, "PATH")
