"""``rtxd config show``, and the help of the verbs that take settings."""

from __future__ import annotations

import shutil
import textwrap
from collections.abc import Mapping
from pathlib import Path

from rtx_distributed.config import load, read_arguments, section_classes, settings, to_toml
from rtx_distributed.errors import ConfigError

HELP = ("--help", "-h")


def show(args: list[str], *, environ: Mapping[str, str]) -> int:
    if any(arg in HELP for arg in args):
        print(
            settings_help(
                "rtxd config show [CONFIG.toml] [--explain] [--section.field value ...]",
                "Prints the settings as TOML to start from.",
                {
                    "--explain": "with every setting's description, default, and where its value "
                    "came from"
                },
            )
        )
        return 0
    config_file, explain, rest = split_config_file(args, switch="explain")
    loaded = load(rest, environ=environ, config_file=config_file)
    print(to_toml(loaded.config, explain=loaded.origins if explain else None), end="")
    return 0


def split_config_file(args: list[str], *, switch: str) -> tuple[Path | None, bool, list[str]]:
    """The one positional argument, whether ``switch`` is there, and the settings as arguments.

    Errors: ``ConfigError``, also for a second positional argument.
    """
    found = read_arguments(args, switches={switch})
    if len(found.positional) > 1:
        raise ConfigError(
            f"unexpected argument `{found.positional[1]}`: one configuration file at most, and "
            f"`{found.positional[0]}` is the first"
        )
    config_file = Path(found.positional[0]) if found.positional else None
    rest = [f"--{key}={value}" for key, value in found.values.items()]
    return config_file, switch in found.switches, rest


def settings_help(usage: str, summary: str, options: Mapping[str, str]) -> str:
    """Every setting with its default and description, by section."""
    width = min(max(shutil.get_terminal_size().columns, 60), 110)
    lines = [f"Usage: {usage}", "", *textwrap.wrap(summary, width), "", "Options:"]
    for option, text in {**options, "-h, --help": "show this"}.items():
        lines += _entry(option, text, width)
    section = None
    for setting in settings().values():
        if setting.section != section:
            section = setting.section
            title = (
                section_classes()[section].__doc__ or "" if section else "Of the run as a whole."
            )
            lines += ["", f"{section or 'settings'}: {title}"]
        default = "automatic" if setting.default is None else _plain(setting.default)
        lines += _entry(
            f"--{setting.key} {setting.kind}", f"{setting.description} (default: {default})", width
        )
    lines += [
        "",
        *textwrap.wrap(
            "Order: default < configuration file < environment (RTXD_SECTION__FIELD) < command "
            "line. `none` sets an automatic setting back to automatic.",
            width,
        ),
    ]
    return "\n".join(lines)


def _entry(head: str, text: str, width: int) -> list[str]:
    body = textwrap.wrap(text, width - 8)
    return [f"  {head}", *(f"        {line}" for line in body)]


def _plain(value: object) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, tuple):
        return ",".join(str(item) for item in value)
    return str(value)
