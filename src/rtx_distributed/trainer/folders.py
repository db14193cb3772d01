"""The run folder: found, made, probed, and taken away again where nothing came of it."""

from __future__ import annotations

import contextlib
import os
import shutil
import time
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from rtx_distributed.checkpoint.store import candidates
from rtx_distributed.config import Config, replace, to_toml
from rtx_distributed.elastic.runfiles import Sink
from rtx_distributed.errors import RunFolderError

_SPARE_BYTES = 1 << 20


@dataclass(slots=True)
class Claim:
    """A run folder in hand; ``exit_code`` is to be set when the run has ended."""

    folder: Path
    exit_code: int = 2


@contextlib.contextmanager
def claimed_folder(config: Config, *, name: str) -> Iterator[Claim]:
    """:func:`claim_folder`, and a new folder is removed again if nothing came of the run.

    Raises:
        RunFolderError: see there.
    """
    made = config.run.dir is None or not config.run.dir.exists()
    claim = Claim(claim_folder(config, name=name))
    try:
        yield claim
    finally:
        if made and not _worth_keeping(claim):
            shutil.rmtree(claim.folder, ignore_errors=True)
            if config.run.dir is None:
                with contextlib.suppress(OSError):  # other runs are in it
                    claim.folder.parent.rmdir()


def claim_folder(config: Config, *, name: str) -> Path:
    """The run folder: the one that is set, else a new one under ``runs/``.

    Raises:
        RunFolderError: not writable, full, or not empty where ``run.resume`` is never.
    """
    folder = config.run.dir
    made = folder is None or not folder.exists()
    if folder is None:
        folder = _new_folder(name)
    elif config.run.resume == "never" and folder.is_dir():
        left = sorted(path.name for path in folder.iterdir() if path.name != ".lock")
        if left:
            raise RunFolderError(
                f"`run.resume` is never, but `{folder}` is not empty (it holds {left[0]}); give "
                "another `run.dir`, or `--run.resume auto` to go on with it"
            )
    try:
        _probe(folder)
    except RunFolderError:
        if made:
            with contextlib.suppress(OSError):
                folder.rmdir()
        raise
    return folder


def _worth_keeping(claim: Claim) -> bool:
    """A start that failed before its first step leaves nothing that anybody needs, but for the
    logs of a failure that isn't told in full on the console."""
    folder, rows = claim.folder, claim.folder / "metrics.jsonl"
    return (
        any((folder / "checkpoints").glob("*"))
        or (rows.exists() and rows.stat().st_size > 0)
        or (
            claim.exit_code != 2
            and any(path.stat().st_size for path in folder.glob("logs/worker-*.log"))
        )
    )


def _new_folder(name: str) -> Path:
    stamp = time.strftime("%Y%m%d-%H%M%S", time.gmtime())
    base = Path("runs") / f"{stamp}-{name}"
    for suffix in range(1000):
        folder = base if suffix == 0 else base.with_name(f"{base.name}-{suffix}")
        try:
            folder.mkdir(parents=True)
        except FileExistsError:
            continue
        except OSError as error:
            raise RunFolderError(
                f"the run folder `{folder}` cannot be made: {error.strerror}; give another one "
                "by `--run.dir`"
            ) from error
        return folder
    raise RunFolderError(f"`{base}` and 999 others exist; give a folder by `--run.dir`")


def _probe(folder: Path) -> None:
    """Writes and renames a file of 1 MiB: a full or read-only disk is known before the start."""
    probe = folder / f".probe-{os.getpid()}"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with probe.open("wb") as file:
            file.write(bytes(_SPARE_BYTES))
            file.flush()
            os.fsync(file.fileno())
        probe.rename(probe.with_suffix(".ok"))
        probe.with_suffix(".ok").unlink()
    except OSError as error:
        for path in (probe, probe.with_suffix(".ok")):
            with contextlib.suppress(OSError):
                path.unlink()
        raise RunFolderError(
            f"the run folder `{folder}` cannot be written: {error.strerror}; free space, or give "
            "another one by `--run.dir`"
        ) from error


def run_id_of(folder: Path) -> str:
    """The run's identity: that of its checkpoints, else a new one."""
    for candidate in candidates(folder):
        if candidate.run_id is not None:
            return candidate.run_id
    return uuid.uuid4().hex


def sink_opener(config: Config, folder: Path) -> Callable[[int], Sink] | None:
    """Opens TensorBoard files in the run folder, where ``metrics.tensorboard`` asks for them.

    Raises:
        ConfigError: the package is missing.
    """
    if not config.metrics.tensorboard:
        return None
    from rtx_distributed.metrics.tensorboard import TensorBoardSink

    TensorBoardSink.check_installed()
    return lambda first_step: TensorBoardSink(folder / "tensorboard", first_step=first_step)


def saved_config(config: Config, folder: Path) -> str:
    """The text of ``config.toml``: what goes on with the run in ``folder``, from any place."""
    return to_toml(replace(config, {"run.dir": str(folder.absolute()), "run.resume": "auto"}))
