"""Collectives: one interface, one file per backend, and the bucketed gradient reduction."""

from __future__ import annotations

from rtx_distributed.comm.communicator import Communicator, Handle, ReduceOp
from rtx_distributed.comm.fake import FakeCommunicator, FakeWorld
from rtx_distributed.comm.form import Rendezvous, choose_backend, form, meeting_store
from rtx_distributed.comm.local import LocalCommunicator
from rtx_distributed.comm.reducer import BucketReducer, ReduceTiming

__all__ = [
    "BucketReducer",
    "Communicator",
    "FakeCommunicator",
    "FakeWorld",
    "Handle",
    "LocalCommunicator",
    "ReduceOp",
    "ReduceTiming",
    "Rendezvous",
    "choose_backend",
    "form",
    "meeting_store",
]
