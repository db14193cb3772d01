"""Runs the checks and prints them: a table on a terminal, lines elsewhere."""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path

from rtx_distributed.doctor import checks, facts
from rtx_distributed.doctor.checks import Check
from rtx_distributed.topology import usable_cores

_COLOURS = {"ok": "green", "warn": "yellow", "fail": "red", "unknown": "magenta"}


def run_checks(environ: Mapping[str, str]) -> list[Check]:
    """All checks of this machine, in the order in which they are shown."""
    torch = facts.torch_facts()
    host = socket.gethostname()
    return [
        checks.check_python(sys.version_info[:3]),
        checks.check_torch(torch),
        checks.check_devices(facts.device_facts(), torch),
        checks.check_visible_devices(environ),
        checks.check_host_name(host, facts.resolve_host(host)),
        checks.check_loopback(facts.loopback_error()),
        checks.check_shared_memory(facts.space(Path("/dev/shm"))),
        checks.check_limits(facts.limits()),
        checks.check_cores(usable_cores(), os.cpu_count()),
        checks.check_memory(facts.free_memory()),
        checks.check_launcher(environ),
    ]


def exit_code(found: Iterable[Check]) -> int:
    """1 where a check failed, else 0."""
    return int(any(check.verdict == "fail" for check in found))


def doctor() -> int:
    """Prints the checks of this machine and returns the exit code."""
    found = run_checks(os.environ)
    if sys.stdout.isatty():
        _print_table(found)
    else:
        print("\n".join(lines(found)))
    return exit_code(found)


def lines(found: Iterable[Check]) -> list[str]:
    """The checks as plain text, one line each."""
    return [
        f"{check.verdict:<8}{check.name}: {check.found}"
        + (f" -> {check.next_step}" if check.next_step else "")
        for check in found
    ]


def _print_table(found: Iterable[Check]) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table("check", "verdict", "found", "next step")
    for check in found:
        verdict = Text(check.verdict, style=_COLOURS[check.verdict])
        # Text, since what was found may hold brackets, which rich would read as markup.
        table.add_row(Text(check.name), verdict, Text(check.found), Text(check.next_step))
    Console().print(table)
