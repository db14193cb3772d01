"""Runs the supervisor as the process that a test starts: ``driver.py JSON``."""

from __future__ import annotations

import json
import os
import shutil
import sys
from pathlib import Path

from rtx_distributed.elastic import Job, run
from rtx_distributed.elastic.messages import ShardWritten
from rtx_distributed.errors import RtxError
from rtx_distributed.metrics import PlainConsole


class FolderPublisher:
    """Renames the attempt; what the checkpoint room adds is tested there."""

    def __init__(self, run_dir: Path) -> None:
        self._folder = run_dir / "checkpoints"

    def publish(self, step: int, folder: Path, shards: list[ShardWritten]) -> Path:
        place = self._folder / f"step-{step:08d}"
        folder.rename(place)
        return place

    def clean(self) -> None:
        for left in self._folder.glob(".tmp-*"):
            shutil.rmtree(left)

    def discard(self, folder: Path) -> None:
        shutil.rmtree(folder, ignore_errors=True)

    def discard_older(self, generation: int) -> None:
        pass

    def set_aside(self, step: int) -> list[Path]:
        return []

    def newest(self) -> Path | None:
        return max(self._folder.glob("step-*"), default=None)


def main() -> None:
    settings = json.loads(sys.argv[1])
    run_dir = Path(settings["run_dir"])
    payload = {"run_dir": str(run_dir), "supervisor": os.getpid()} | settings.pop("payload", {})
    settings["run_dir"] = run_dir
    settings["entry"] = "supervisor_entries:" + settings.get("entry", "train")
    settings.setdefault("preload", ("json",))
    settings.setdefault("store", False)
    job = Job(**settings, payload=payload, publisher=FolderPublisher(run_dir))
    console = PlainConsole(sys.stdout)
    try:
        code = run(job, console=console)
        console.close()
    except RtxError as error:
        print(f"error: {error}")
        code = error.exit_code
    sys.exit(code)


if __name__ == "__main__":
    main()
