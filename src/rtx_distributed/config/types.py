"""Value types of the settings: what pydantic accepts, minus what it would accept in silence.

``True`` is no number, ``nan`` and ``inf`` are no settings, an empty text is no path. Whole numbers
may be written as ``1e4``; pairs as ``0.9,0.95``.
"""

from __future__ import annotations

import math
import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

from rtx_distributed.config.problems import SettingsError, describe_errors


def _integer(value: object) -> object:
    if isinstance(value, bool):
        raise ValueError("must be a whole number")
    if isinstance(value, str) and ("e" in value or "E" in value):
        try:
            number = float(value)
        except ValueError:
            return value
        return int(number) if number.is_integer() else value
    return value


def _number(value: object) -> object:
    if isinstance(value, bool):
        raise ValueError("must be a number")
    try:
        finite = math.isfinite(float(value))  # type: ignore[arg-type]
    except (TypeError, ValueError, OverflowError):
        return value  # pydantic says what it is instead
    if not finite:
        raise ValueError("must be a finite number")
    return value


def _path(value: object) -> object:
    if not isinstance(value, str | os.PathLike):
        raise ValueError("must be a path")
    if not os.fspath(value):
        raise ValueError("must not be empty")
    if "\0" in str(value):
        raise ValueError("must not hold a null character")
    return Path(value).expanduser() if str(value).startswith("~") else value


def _text(value: object) -> object:
    if isinstance(value, str) and not value:
        raise ValueError("must not be empty")
    return value


def _pair(value: object) -> object:
    if isinstance(value, str):
        parts = [part.strip() for part in value.strip().strip("[]()").split(",")]
        if len(parts) != 2:
            raise ValueError("must be two numbers, as in 0.9,0.95")
        return parts
    return value


Integer = Annotated[int, BeforeValidator(_integer)]
Count = Annotated[int, BeforeValidator(_integer), Field(ge=1)]
CountOrZero = Annotated[int, BeforeValidator(_integer), Field(ge=0)]
Number = Annotated[float, BeforeValidator(_number)]
Positive = Annotated[float, BeforeValidator(_number), Field(gt=0)]
NotNegative = Annotated[float, BeforeValidator(_number), Field(ge=0)]
Fraction = Annotated[float, BeforeValidator(_number), Field(ge=0, lt=1)]
FilePath = Annotated[Path, BeforeValidator(_path)]
Text = Annotated[str, BeforeValidator(_text)]
Pair = Annotated[tuple[Fraction, Fraction], BeforeValidator(_pair)]


class Section(BaseModel):
    """Base of all configuration classes: frozen, no unknown names, errors of our tree."""

    model_config = ConfigDict(extra="forbid", frozen=True, validate_default=False)

    SECTION: ClassVar[str] = ""
    """Name of the section in TOML; empty for the whole."""

    if not TYPE_CHECKING:  # the type checker keeps the signature made from the fields

        def __init__(self, **values: Any) -> None:
            try:
                super().__init__(**values)
            except ValidationError as error:
                raise SettingsError(describe_errors(error, section=type(self).SECTION)) from None
