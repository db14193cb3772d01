"""Settings as TOML: read with the errors that name file and line, written to be read again."""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rtx_distributed.config.names import section_classes, settings
from rtx_distributed.config.settings import Config
from rtx_distributed.errors import ConfigError


def read_toml(path: Path) -> dict[str, Any]:
    """The tables of a TOML file. Errors: ``ConfigError`` naming the file and the place in it."""
    try:
        raw = path.read_bytes()
    except FileNotFoundError:
        raise ConfigError(f"configuration file `{path}` does not exist") from None
    except IsADirectoryError:
        raise ConfigError(f"configuration file `{path}` is a folder; name a .toml file") from None
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else str(error)
        raise ConfigError(f"configuration file `{path}` cannot be read: {reason}") from None
    try:
        text = raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = raw.count(b"\n", 0, error.start) + 1
        raise ConfigError(
            f"configuration file `{path}`, line {line}: byte {error.start} "
            f"(0x{raw[error.start]:02x}) is not UTF-8; save the file as UTF-8"
        ) from None
    try:
        return tomllib.loads(text)
    except (tomllib.TOMLDecodeError, RecursionError) as error:
        raise ConfigError(_syntax_error(path, text, str(error))) from None


def to_toml(config: Config, *, explain: Mapping[str, str] | None = None) -> str:
    """All settings as TOML; one that is automatic stands as a comment.

    ``explain`` maps keys to origins (``LoadedConfig.origins``) and adds to every setting a comment
    with its description, its default and where its value came from.
    """
    lines: list[str] = []
    section = ""
    for key, setting in settings().items():
        if setting.section != section:
            section = setting.section
            lines += ["", f"[{section}]"]
            if explain is not None:
                lines.append(f"# {section_classes()[section].__doc__}")
        part: Any = getattr(config, section) if section else config
        value = getattr(part, setting.name)
        if explain is not None:
            default = "automatic" if setting.default is None else _value(setting.default)
            lines += [
                "",
                f"# {setting.description}",
                f"# {setting.kind}; default: {default}; from: {explain.get(key, 'default')}",
            ]
        lines.append(
            f"# {setting.name} =   (automatic)"
            if value is None
            else f"{setting.name} = {_value(value)}"
        )
    return "\n".join(lines).strip() + "\n"


def _value(value: object) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int | float):
        return repr(value)
    if isinstance(value, tuple):
        return f"[{', '.join(_value(item) for item in value)}]"
    # A JSON string is a TOML string, but for the one control character that JSON lets stand.
    return json.dumps(str(value), ensure_ascii=False).replace("\x7f", "\\u007f")


def _syntax_error(path: Path, text: str, message: str) -> str:
    place = re.search(r" \(at line (\d+), column (\d+)\)$", message)
    if place:
        line, column = int(place[1]), int(place[2])
        what = f"{message[: place.start()]} at column {column}"
    else:
        line = text.count("\n") + 1
        what = message
    source = text.splitlines()[line - 1 : line]
    shown = f": {source[0].strip()}" if source and source[0].strip() else ""
    return f"configuration file `{path}`, line {line}: {what}{shown}"
