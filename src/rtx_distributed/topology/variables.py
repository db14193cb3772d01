"""The launcher's variables, read with errors that name them."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from rtx_distributed.errors import ClusterError


@dataclass(frozen=True, slots=True)
class Master:
    """Where rank 0 listens, as far as it is known."""

    addr: str | None
    port: int | None


@dataclass(frozen=True, slots=True)
class Variables:
    """Environment variables, none of them empty, with the checks that name them."""

    variables: Mapping[str, str]

    def has(self, name: str) -> bool:
        return name in self.variables

    def integer(self, name: str) -> int | None:
        text = self.variables.get(name)
        if text is None:
            return None
        if not re.fullmatch(r"\s*\d{1,10}\s*", text, re.ASCII):
            raise ClusterError(f"`{name}` = {text!r}: must be a whole number >= 0")
        return int(text)

    def required(self, name: str, *, beside: str) -> int:
        value = self.integer(name)
        if value is None:
            raise ClusterError(
                f"`{beside}` = {self.variables[beside]} is set and `{name}` is not: the launcher's "
                f"variables must all reach the process; set it, or unset `{beside}`"
            )
        return value

    def first(self, *names: str) -> str | None:
        """The first of the names that is set."""
        return next((name for name in names if name in self.variables), None)

    def below(self, name: str, limit: str) -> None:
        """Both set: the one must be below the other."""
        value, bound = self.integer(name), self.integer(limit)
        if value is not None and bound is not None and value >= bound:
            raise ClusterError(
                f"`{name}` = {value} contradicts `{limit}` = {bound}: it must be below it"
            )

    def at_most(self, name: str, limit: str) -> None:
        value, bound = self.integer(name), self.integer(limit)
        if value is not None and bound is not None and value > bound:
            raise ClusterError(
                f"`{name}` = {value} contradicts `{limit}` = {bound}: it cannot be greater"
            )

    def agree(self, name: str, other: str, *, way_out: str) -> None:
        value, expected = self.integer(name), self.integer(other)
        if value is not None and expected is not None and value != expected:
            raise ClusterError(f"`{name}` = {value} contradicts `{other}` = {expected}: {way_out}")

    def master(self, *, default_addr: str | None, default_port: int | None) -> Master:
        """``MASTER_ADDR`` and ``MASTER_PORT`` where set, else what the launcher implies."""
        port = self.integer("MASTER_PORT")
        if port is not None and not 1 <= port <= 65535:
            raise ClusterError(f"`MASTER_PORT` = {port}: must be between 1 and 65535")
        return Master(
            self.variables.get("MASTER_ADDR", default_addr), default_port if port is None else port
        )
