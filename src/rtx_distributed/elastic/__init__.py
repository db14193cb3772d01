"""Elasticity: the supervisor and its workers, membership, and the recorder of a run.

Nothing imported here imports torch.
"""

from __future__ import annotations

from rtx_distributed.elastic.control import Control
from rtx_distributed.elastic.folder import Holder, RunLock, read_holder
from rtx_distributed.elastic.generation import Generation, Member
from rtx_distributed.elastic.job import TORCH_MODULES, Job, Outcome
from rtx_distributed.elastic.messages import CheckpointFailed, CheckpointPublished
from rtx_distributed.elastic.publish import Publisher
from rtx_distributed.elastic.serve import RecorderThread, serve_in_thread
from rtx_distributed.elastic.supervisor import run, supervise

__all__ = [
    "TORCH_MODULES",
    "CheckpointFailed",
    "CheckpointPublished",
    "Control",
    "Generation",
    "Holder",
    "Job",
    "Member",
    "Outcome",
    "Publisher",
    "RecorderThread",
    "RunLock",
    "read_holder",
    "run",
    "serve_in_thread",
    "supervise",
]
