"""From the command to the first committed step, memory of the supervisor, and ``rtxd --help``.

    python benchmarks/start.py [--json F]

The first of the starts builds the index of the default corpus anew, the others find it.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import tempfile
import time
from pathlib import Path

import measure

MOST_SECONDS = 10.0
MOST_SUPERVISOR_MB = 80.0
MOST_HELP_SECONDS = 0.5
LIMIT_S = 120.0


def one_start(folder: Path, cache: Path, *, workers: int) -> dict[str, float]:
    """Starts a run, waits for its first commit and the supervisor's figure, and stops it."""
    line = [measure.rtxd(), "train", "--workers", str(workers), "--run.device", "cpu"]
    line += ["--train.steps", "400", "--run.dir", str(folder), "--data.cache_dir", str(cache)]
    began = time.time()
    process = subprocess.Popen(line, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        first = _first_commit(folder / "metrics.jsonl", began)
        time.sleep(2.0)  # what it needs while a run goes on
        peak = measure.status_kib(process.pid, "VmHWM")
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(LIMIT_S)
    return {"seconds": first - began, "supervisor_peak_kib": peak, "exit_code": process.returncode}


def _first_commit(path: Path, began: float) -> float:
    while time.time() < began + LIMIT_S:
        if path.exists():
            text = path.read_text()
            if "\n" in text:
                return float(json.loads(text.splitlines()[0])["time"])
        time.sleep(0.02)
    raise SystemExit(f"no step was committed within {LIMIT_S:g} s")


def help_seconds() -> float:
    start = time.perf_counter()
    subprocess.run([measure.rtxd(), "--help"], stdout=subprocess.DEVNULL, check=True)
    return time.perf_counter() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--starts", type=int, default=4)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    starts = []
    with tempfile.TemporaryDirectory(prefix="rtxd-start-") as temporary:
        for number in range(options.starts):
            before = measure.cpu_times(os.getpid())
            found = one_start(
                Path(temporary) / f"run-{number}",
                Path(temporary) / "cache",
                workers=options.workers,
            )
            found["foreign"] = before.foreign_share_until(measure.cpu_times(os.getpid()))
            starts.append(found)
            print(
                f"first commit after {found['seconds']:.2f} s, supervisor "
                f"{found['supervisor_peak_kib'] * 1024 / 1e6:.1f} MB"
            )
    helps = [help_seconds() for _ in range(10)]
    seconds = measure.spread([s["seconds"] for s in starts])
    memory = measure.spread([s["supervisor_peak_kib"] * 1024 / 1e6 for s in starts])
    asked = measure.spread(helps)
    print(f"first commit, s: {seconds}  [{measure.verdict(seconds.high, most=MOST_SECONDS)}]")
    print(f"supervisor, MB: {memory}  [{measure.verdict(memory.high, most=MOST_SUPERVISOR_MB)}]")
    print(f"rtxd --help, s: {asked}  [{measure.verdict(asked.median, most=MOST_HELP_SECONDS)}]")
    figures = {
        "first_commit_seconds": seconds.plain(),
        "supervisor_megabytes": memory.plain(),
        "help_seconds": asked.plain(),
    }
    raw = {"starts": starts, "help": helps}
    measure.write_json(options.json, measure.report("start", figures=figures, raw=raw))


if __name__ == "__main__":
    main()
