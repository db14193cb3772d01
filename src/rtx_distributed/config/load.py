"""From defaults, file, environment and command line to one configuration that knows where each
value came from."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rtx_distributed.config.arguments import read_arguments
from rtx_distributed.config.files import read_toml
from rtx_distributed.config.names import canonical, section_classes, settings, unknown_setting
from rtx_distributed.config.problems import SettingsError, show_value, with_origins
from rtx_distributed.config.settings import Config
from rtx_distributed.errors import ConfigError

ENV_PREFIX = "RTXD_"
COMMAND_LINE = "command line"


@dataclass(frozen=True, slots=True)
class LoadedConfig:
    """A configuration, and for every setting (by key, as ``train.lr``) where its value came from:
    ``default``, ``file PATH``, ``environment RTXD_...`` or ``command line``."""

    config: Config
    origins: dict[str, str]


def load(
    args: Sequence[str] = (), *, environ: Mapping[str, str], config_file: Path | None = None
) -> LoadedConfig:
    """Default < file < environment < command line; ``args`` holds settings only.

    The environment is not read through pydantic-settings, which reads ``os.environ`` itself and
    passes over unknown names in silence.

    Errors: ``ConfigError`` for what cannot be read, unknown names, wrong values, and values that do
    not fit each other.
    """
    arguments = read_arguments(args)
    if arguments.positional:
        raise ConfigError(f"unexpected argument `{arguments.positional[0]}`")
    values: dict[str, Any] = {}
    origins = dict.fromkeys(settings(), "default")
    problems: list[str] = []
    if config_file is not None:
        from_file, wrong = _flatten(read_toml(config_file))
        problems += [f"{config_file}: {problem}" for problem in wrong]
        values.update(from_file)
        origins.update(dict.fromkeys(from_file, f"file {config_file}"))
    from_environment, names, wrong = _from_environment(environ)
    problems += wrong
    values.update(from_environment)
    origins.update(names)
    values.update(arguments.values)
    origins.update(dict.fromkeys(arguments.values, COMMAND_LINE))
    if problems:
        raise SettingsError(problems)
    try:
        config = Config(**_nested(values))
    except SettingsError as error:
        found = [with_origins(problem, origins=origins) for problem in error.problems]
        raise SettingsError(found) from None
    return LoadedConfig(config, origins)


def replace(config: Config, changes: Mapping[str, Any]) -> Config:
    """``config`` with some settings (by key) changed, all checks done again."""
    flat: dict[str, Any] = {}
    for key, setting in settings().items():
        part: Any = getattr(config, setting.section) if setting.section else config
        flat[key] = getattr(part, setting.name)
    for key, value in changes.items():
        known = canonical(key)
        if known is None:
            raise ConfigError(unknown_setting(key))
        flat[known] = value
    return Config(**_nested(flat))


def _nested(values: Mapping[str, Any]) -> dict[str, Any]:
    nested: dict[str, Any] = {}
    for key, value in values.items():
        setting = settings()[key]
        if setting.optional and isinstance(value, str) and value.lower() == "none":
            value = None  # TOML and the command line have no other word for it
        if setting.section:
            nested.setdefault(setting.section, {})[setting.name] = value
        else:
            nested[key] = value
    return nested


def _flatten(tables: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """A TOML file's settings by key, and what is wrong with its names."""
    values: dict[str, Any] = {}
    problems: list[str] = []

    def visit(name: str, value: object) -> None:
        key = canonical(name)
        plain = name.replace("-", "_")
        if key is not None:
            values[key] = value
        elif plain in section_classes() and not isinstance(value, dict):
            problems.append(f"`{name}` = {show_value(value)}: it is a section; write `[{name}]`")
        else:
            problems.append(unknown_setting(name))

    for name, value in tables.items():
        if isinstance(value, dict) and canonical(name) is None:
            if not value and name.replace("-", "_") not in section_classes():
                problems.append(unknown_setting(name))
            for inner, item in value.items():
                visit(f"{name}.{inner}", item)
        else:
            visit(name, value)
    return values, problems


def _from_environment(
    environ: Mapping[str, str],
) -> tuple[dict[str, str], dict[str, str], list[str]]:
    """Values and origins by key from ``RTXD_SECTION__FIELD``, and what is wrong with the names."""
    values: dict[str, str] = {}
    origins: dict[str, str] = {}
    problems: list[str] = []
    for variable in sorted(name for name in environ if name.startswith(ENV_PREFIX)):
        spelled = variable.removeprefix(ENV_PREFIX).lower().replace("__", ".", 1)
        key = canonical(spelled)
        if key is None:
            problems.append(f"environment variable `{variable}`: {_unknown_variable(spelled)}")
        elif not environ[variable]:
            problems.append(f"environment variable `{variable}` is empty: give a value or unset it")
        else:
            values[key] = environ[variable]
            origins[key] = f"environment {variable}"
    return values, origins, problems


def _unknown_variable(spelled: str) -> str:
    for section in section_classes():
        key = f"{section}.{spelled.removeprefix(f'{section}_')}"
        if spelled.startswith(f"{section}_") and canonical(key):
            variable = ENV_PREFIX + key.replace(".", "__").upper()
            return f"unknown; did you mean `{variable}` (two underscores after the section)?"
    return unknown_setting(spelled)
