"""The exceptions of the library. A message is complete as it stands: what was set or found (in
backticks), which rule it breaks, with the numbers, and the ways out. The console prints it alone;
a traceback needs ``--debug``.

    RtxError                    exit code 1
    |-- UsageError              (also a ValueError) exit code 2: the user's input
    |   |-- ConfigError         unknown key, wrong type, arithmetic that does not work out
    |   |-- DataError           no data, empty file, not UTF-8, token outside the vocabulary
    |   |-- ClusterError        the launcher's variables contradict each other or the settings
    |   |-- RunFolderError      in use, not writable, of another run
    |   `-- ResumeError         the checkpoint is of another model, data or setting
    |-- CheckpointError         a broken or missing checkpoint, a failed write
    |-- CommError               a collective failed; says nothing about who is to blame
    `-- RankError               a failure on one rank: rank, host, generation, step, phase
        |-- LoaderWorkerError   a data loader's worker process died
        |-- DeviceMemoryError   out of memory
        `-- NonFiniteError      a non-finite gradient where the setting says stop
"""

from __future__ import annotations

from dataclasses import dataclass


class RtxError(Exception):
    """Base of all errors of the library."""

    exit_code = 1


class UsageError(RtxError, ValueError):
    """The user's input is at fault; exit code 2."""

    exit_code = 2


class ConfigError(UsageError):
    """A setting that does not exist, has the wrong type, or does not fit the others."""


class DataError(UsageError):
    """Training data that is missing, empty, malformed or does not fit the model."""


class ClusterError(UsageError):
    """The launcher's environment variables contradict each other or the settings."""


class RunFolderError(UsageError):
    """The run folder is in use, not writable, or belongs to something else."""


class ResumeError(UsageError):
    """The run folder's checkpoint is of another model, data or fixed setting."""


class CheckpointError(RtxError):
    """A checkpoint could not be written, or does not verify."""


class CommError(RtxError):
    """A collective failed. The culprit is often another rank; nothing is inferred from it."""


@dataclass(frozen=True, slots=True)
class Where:
    """Where in a run something happened. ``step`` counts from 0; ``phase`` is one of
    start, meeting, body, data, forward, backward, reduce, vote, optimizer, evaluation, checkpoint,
    end."""

    rank: int
    host: str
    generation: int
    step: int
    phase: str

    def __str__(self) -> str:
        return (
            f"rank {self.rank} on {self.host}, generation {self.generation}, "
            f"step {self.step}, phase {self.phase}"
        )


class RankError(RtxError):
    """A failure on one rank, with the place in the run."""

    def __init__(self, message: str, *, where: Where | None = None) -> None:
        super().__init__(message)
        self.where = where


class LoaderWorkerError(RankError):
    """A data loader's worker process died."""


class DeviceMemoryError(RankError):
    """Out of memory; the message says what to lower."""


class NonFiniteError(RankError):
    """A non-finite gradient, where ``train.nonfinite`` says stop."""
