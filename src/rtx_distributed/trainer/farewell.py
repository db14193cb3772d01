"""The last lines of a run on the console; imports no torch."""

from __future__ import annotations

import os
import shlex
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rtx_distributed.metrics import Console, make_console


def show_farewell(
    code: int,
    summary: dict[str, Any],
    *,
    again: Sequence[str] = (),
    console: Console | None = None,
    title: str = "run",
) -> None:
    """Summary table and the line that resumes or extends the run; nothing after a failure.

    Args:
        again: arguments of the ``rtxd`` command that goes on with the run; none where there is no
            such command.
        title: what has ended.
    """
    if code not in (0, 3):
        return
    console = console or make_console(sys.stderr)
    line = shlex.join([_rtxd(sys.argv[0]), *again]) if again else "start the script again"
    extends = bool(again) and again[0] == "train"
    step = int(summary.get("step", 0))
    if summary.get("ending") == "already":
        console.note(
            f"this run has finished: {step} steps are done"
            + (f". To go on: {line} --train.steps {step * 2 or 1}" if extends else "")
        )
    elif summary.get("lines"):
        lines = [(str(key), str(value)) for key, value in summary["lines"]]
        if summary.get("checkpoint"):
            lines.append(("checkpoint", str(summary["checkpoint"])))
        if summary.get("checkpoint") and code == 3:
            lines.append(("to resume", line))
        elif summary.get("checkpoint") and extends:
            lines.append(("to extend", f"{line} --train.steps {step * 2}"))
        console.summary(f"{title}: {'stopped' if code == 3 else 'done'}", lines)
    elif code == 3:
        console.note(f"stopped after step {step}; to resume: {line}")
    console.close()


def exit_code_of(summary: dict[str, Any]) -> int:
    """0 at the end of a run; stopped by a signal, 3 after a good checkpoint and 1 without."""
    if not summary.get("stopped"):
        return 0
    return 3 if summary.get("checkpoint") else 1


def _rtxd(started_as: str) -> str:
    """``rtxd`` as it can be typed here: by its path where the environment is not activated."""
    found = shutil.which("rtxd")
    known = found is not None and os.path.realpath(found) == os.path.realpath(started_as)
    if known or Path(started_as).name != "rtxd":
        return "rtxd"
    return started_as
