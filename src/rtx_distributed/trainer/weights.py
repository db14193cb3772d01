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
    # Shapes first: a broadcast between unlike models would wait for ever, or mix tensors up.
    if not _equal(session, structure_digest(layout.model)):
        raise ConfigError(
            f"rank {session.rank}: the ranks built different models, in more than their weights; "
            "every rank must run the same code"
        )
    if _equal(session, weights_digest(layout.model)):
        return
    if session.rank == 0:
        session.control.warn(
            "the ranks built different weights; all take those of rank 0. Seed the "
            "initialisation (`torch.manual_seed`) to silence this"
        )
    layout.sync_from_first()


def _equal(session: Session, digest: int) -> bool:
    value = float(digest)
    extremes = torch.tensor([value, -value], dtype=torch.float64, device=session.device)
    session.communicator.all_reduce(extremes, op="max").wait()
    top, bottom = extremes.tolist()
    return bool(top == -bottom)


def structure_digest(model: torch.nn.Module) -> int:
    """A 52-bit hash over names, shapes, dtypes, order and training flags of all tensors, also of
    those that are not saved."""
    digest = hashlib.blake2b(digest_size=8)
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        text = f"{name}:{tuple(tensor.shape)}:{tensor.dtype}:{tensor.requires_grad};"
        digest.update(text.encode())
    return int.from_bytes(digest.digest(), "little") >> 12


def weights_digest(model: torch.nn.Module) -> int:
    """A 52-bit hash (exact in float64) over names, shapes, dtypes and bytes of the state dict."""
    digest = hashlib.blake2b(digest_size=8)
    for name, tensor in model.state_dict().items():
        digest.update(f"{name}:{tuple(tensor.shape)}:{tensor.dtype}".encode())
        flat = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
        digest.update(flat.numpy().data)
    return int.from_bytes(digest.digest(), "little") >> 12
