"""The last lines of a run on the console; imports no torch."""

from __future__ import annotations

import os
import shlex
import shutil
import sys
from pathlib import Path
from typing import Any

from rtx_distributed.metrics import Console, make_console


def show_farewell(
    code: int, summary: dict[str, Any], folder: Path, *, title: str, console: Console | None = None
) -> None:
    """Summary table and the line that resumes or extends the run; nothing after a failure.

    Args:
        title: "run" for a run that ``rtxd train`` can go on with.
    """
    if code not in (0, 3):
        return
    console = console or make_console(sys.stderr)
    again = f"{_rtxd(sys.argv[0])} train {shlex.quote(str(folder / 'config.toml'))}"
    step = int(summary.get("step", 0))
    if summary.get("ending") == "already":
        console.note(
            f"this run has finished: {step} steps are done. To go on: "
            f"{again} --train.steps {step * 2 or 1}"
        )
    elif summary.get("lines"):
        lines = [(str(key), str(value)) for key, value in summary["lines"]]
        if summary.get("checkpoint"):
            lines.append(("checkpoint", str(summary["checkpoint"])))
        if summary.get("checkpoint") and title == "run":
            if code == 3:
                lines.append(("to resume", again))
            else:
                lines.append(("to extend", f"{again} --train.steps {step * 2}"))
        console.summary(f"{title}: {'stopped' if code == 3 else 'done'}", lines)
    elif code == 3:
        console.note(f"stopped after step {step}; to resume: {again}")
    console.close()


def _rtxd(started_as: str) -> str:
    """``rtxd`` as it can be typed here: by its path where the environment is not activated."""
    found = shutil.which("rtxd")
    known = found is not None and os.path.realpath(found) == os.path.realpath(started_as)
    if known or Path(started_as).name != "rtxd":
        return "rtxd"
    return shlex.quote(started_as)
