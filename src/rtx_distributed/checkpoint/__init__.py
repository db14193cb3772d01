"""Checkpoints: a manifest, chunks that follow tensor shapes, plain safetensors files.

``write`` and ``read`` import torch and are imported from their modules; all else does without.
"""

from __future__ import annotations

from rtx_distributed.checkpoint.disk import DISK, Disk
from rtx_distributed.checkpoint.export import export
from rtx_distributed.checkpoint.layout import (
    Chunk,
    TensorSpec,
    assign,
    chunks_of,
    grid,
    model_fingerprint,
)
from rtx_distributed.checkpoint.manifest import (
    ChunkReport,
    Header,
    Manifest,
    ShardReport,
    is_weight,
    optimizer_name,
    read_manifest,
)
from rtx_distributed.checkpoint.publish import drop, publish
from rtx_distributed.checkpoint.retention import Entry, to_delete
from rtx_distributed.checkpoint.store import (
    FOLDER,
    Candidate,
    Choice,
    apply_retention,
    candidates,
    collect_garbage,
    newest_valid,
    parse_step,
    preflight,
    remove_checkpoint,
    shard_name,
    step_name,
    temporary_name,
    unfinished,
)
from rtx_distributed.checkpoint.verify import Problem, verify

__all__ = [
    "DISK",
    "FOLDER",
    "Candidate",
    "Choice",
    "Chunk",
    "ChunkReport",
    "Disk",
    "Entry",
    "Header",
    "Manifest",
    "Problem",
    "ShardReport",
    "TensorSpec",
    "apply_retention",
    "assign",
    "candidates",
    "chunks_of",
    "collect_garbage",
    "drop",
    "export",
    "grid",
    "is_weight",
    "model_fingerprint",
    "newest_valid",
    "optimizer_name",
    "parse_step",
    "preflight",
    "publish",
    "read_manifest",
    "remove_checkpoint",
    "shard_name",
    "step_name",
    "temporary_name",
    "to_delete",
    "unfinished",
    "verify",
]
