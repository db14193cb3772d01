"""Do all ranks start from the same weights?"""

from __future__ import annotations

import hashlib

import torch

from rtx_distributed.errors import ConfigError
from rtx_distributed.parallel import Replicate
from rtx_distributed.trainer.session import Session


def agree_on_weights(session: Session, layout: Replicate) -> None:
    """Makes all ranks' weights those of rank 0, and warns where they were others.

    Raises:
        ConfigError: the models differ in more than their weights.
    """
    if _same(session, layout.model):
        return
    if session.rank == 0:
        session.control.warn(
            "the ranks built different weights; all take those of rank 0. Seed the "
            "initialisation (`torch.manual_seed`) to silence this"
        )
    layout.sync_from_first()
    if not _same(session, layout.model):
        raise ConfigError(
            f"rank {session.rank}: the ranks built different models, in more than their weights; "
            "every rank must run the same code"
        )


def _same(session: Session, model: torch.nn.Module) -> bool:
    digest = float(weights_digest(model))
    extremes = torch.tensor([digest, -digest], dtype=torch.float64, device=session.device)
    session.communicator.all_reduce(extremes, op="max").wait()
    top, bottom = extremes.tolist()
    return bool(top == -bottom)


def weights_digest(model: torch.nn.Module) -> int:
    """A 52-bit hash (exact in float64) over names, shapes, dtypes and bytes of the state dict."""
    digest = hashlib.blake2b(digest_size=8)
    for name, tensor in model.state_dict().items():
        digest.update(f"{name}:{tuple(tensor.shape)}:{tensor.dtype}".encode())
        flat = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
        digest.update(flat.numpy().data)
    return int.from_bytes(digest.digest(), "little") >> 12
