"""A run without training: writes a run folder's files, steps of about 10 ms, and replaces a worker
that is killed or stopped, after two steps without it. With ``fatal`` it ends at a loss."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from pathlib import Path

WORLD = 3


def start() -> subprocess.Popen[bytes]:
    return subprocess.Popen(["sleep", "600"])


def is_lost(process: subprocess.Popen[bytes]) -> bool:
    stat = Path(f"/proc/{process.pid}/stat").read_text()
    return process.poll() is not None or stat.rsplit(")", 1)[1].split()[0] == "T"


def main(folder: Path, fatal: bool) -> None:
    folder.mkdir()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(3))
    workers = {number: start() for number in range(WORLD)}
    born, generation, step, missing = WORLD, 1, 0, 0

    def publish() -> None:
        rows = [
            {"worker": n, "rank": 0, "pid": p.pid, "generation": generation}
            for n, p in workers.items()
        ]
        (folder / "new").write_text(json.dumps(rows))
        (folder / "new").replace(folder / "workers.json")

    try:
        publish()
        with (folder / "metrics.jsonl").open("a", buffering=1) as metrics:
            while True:
                time.sleep(0.01)
                lost = [number for number, process in workers.items() if is_lost(process)]
                if lost and fatal:
                    sys.exit(1)
                if lost:
                    for number in lost:
                        process = workers.pop(number)
                        process.kill()
                        process.wait()
                    generation, missing = generation + 1, 2
                    publish()
                elif missing:
                    missing -= 1
                    if not missing:
                        workers[born] = start()
                        born, generation = born + 1, generation + 1
                        publish()
                row = {"step": step, "time": time.time(), "loss": 1.0}
                row |= {"generation": generation, "world_size": len(workers)}
                metrics.write(json.dumps(row) + "\n")
                step += 1
    finally:
        for process in workers.values():
            process.kill()
            process.wait()


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:] == ["fatal"])
