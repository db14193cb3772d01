"""Small runs of ``rtxd`` for the tests of whole processes: their data, settings and files."""

from __future__ import annotations

import contextlib
import json
import random
import textwrap
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from tests.support import system
from tests.support.processes import Started, start_rtxd

SMALL = (
    *("--model.layers", "1", "--model.hidden", "32", "--model.heads", "2"),
    *("--model.kv_heads", "1", "--model.ffn", "64", "--data.sequence_length", "32"),
)
"""About 17,500 parameters: a step takes milliseconds."""

LIMIT_S = 60.0

# Threads that spin while they wait make a run of milliseconds one of a minute where other programs
# want the same cores.
CALM = {"OMP_WAIT_POLICY": "PASSIVE"}


def write_text(folder: Path, *, characters: int = 9000, seed: int = 0) -> Path:
    """A text file with something to learn in it."""
    words = ["alpha", "beta", "gamma", "delta", "epsilon", "zeta"]
    draw = random.Random(seed)
    path = folder / f"text-{seed}.txt"
    text = " ".join(draw.choice(words) for _ in range(characters // 5))
    path.write_text(text[:characters])
    return path


def write_script(folder: Path, name: str, text: str) -> Path:
    path = folder / name
    path.write_text(textwrap.dedent(text))
    return path


def start_train(
    folder: Path,
    *args: str,
    workers: int,
    run: str | None = "run",
    data: Path | None = None,
    env: Mapping[str, str] | None = None,
    **options: Any,
) -> Started:
    """``rtxd train`` with a small model in ``folder / run`` (None: rtxd's own choice)."""
    data = data or (folder / "text-0.txt")
    if not data.exists():
        data = write_text(folder)
    place = () if run is None else ("--run.dir", str(folder / run))
    return start_rtxd(
        "train",
        *("--workers", str(workers), *SMALL, *place),
        *("--data.path", str(data), "--data.cache_dir", str(folder / "cache")),
        *args,
        folder=folder,
        env=CALM | dict(env or {}),
        **options,
    )


def start_launch(
    folder: Path,
    script: Path,
    *args: str,
    workers: int,
    run: str = "run",
    env: Mapping[str, str] | None = None,
    **options: Any,
) -> Started:
    """``rtxd launch`` of a test's script."""
    return start_rtxd(
        "launch",
        *("--nproc", str(workers), "--run.dir", str(folder / run)),
        *args,
        script,
        folder=folder,
        env=CALM | dict(env or {}),
        **options,
    )


def finish(started: Started, *, limit_s: float = LIMIT_S) -> tuple[int, str]:
    """Exit code and console of a process that ends and leaves nothing."""
    with started:
        code = started.wait(limit_s=limit_s)
        started.assert_none_left()
        return code, started.stdout + started.stderr


def finish_all(*started: Started, limit_s: float = LIMIT_S) -> list[tuple[int, str]]:
    """The same for several that run at the same time."""
    with contextlib.ExitStack() as stack:
        for one in started:
            stack.enter_context(one)
        return [finish(one, limit_s=limit_s) for one in started]


def rows(run: Path, name: str) -> list[dict[str, Any]]:
    """The lines of one of a run's files."""
    return [json.loads(line) for line in (run / name).read_text().splitlines()]


def column(run: Path, name: str) -> list[Any]:
    """One field of all rows of ``metrics.jsonl``."""
    return [row[name] for row in rows(run, "metrics.jsonl")]


def events(run: Path, name: str) -> list[dict[str, Any]]:
    return [row for row in rows(run, "events.jsonl") if row["event"] == name]


def ids_by_step(run: Path) -> dict[int, list[int]]:
    """Sample ids of each step in the order of its slots; no (step, slot) stands twice."""
    found: dict[int, list[int]] = {}
    seen = set()
    for row in rows(run, "samples.jsonl"):
        assert (row["step"], row["slot"]) not in seen
        seen.add((row["step"], row["slot"]))
        found.setdefault(row["step"], []).extend(row["sample_ids"])
    return found


def committed(run: Path, count: int) -> int:
    """How many steps are in the metrics, if they are ``count`` at least, else 0."""
    path = run / "metrics.jsonl"
    lines = path.read_text().count("\n") if path.exists() else 0
    return lines if lines >= count else 0


def wait_until(started: Started, condition: Callable[[], object], *, limit_s: float = 30) -> None:
    """Until ``condition``; fails with the console when the process ends before, or at the limit."""

    def over() -> bool:
        return bool(condition()) or started.exit_code is not None

    system.wait_until(over, limit_s=limit_s)
    assert condition(), (
        f"it did not come (exit code {started.exit_code})\n"
        f"--- stdout\n{started.stdout}\n--- stderr\n{started.stderr}"
    )


def checkpoints(run: Path) -> list[int]:
    """Steps of the run's checkpoints, oldest first."""
    return sorted(int(path.name[5:]) for path in (run / "checkpoints").glob("step-*"))


def journal_starts(run: Path) -> int:
    return sum(row["decision"] == "start" for row in rows(run, "journal.jsonl"))
