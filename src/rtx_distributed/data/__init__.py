"""Which samples a step works on, and where they come from.

``order`` and ``plan`` are pure; sources become one array of tokens (``open_dataset``); a user's own
data are taken over by ``adapt``; ``SlotLoader`` turns slots into batches. The names that need torch
are loaded on first use, so that importing this room does not load it.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from rtx_distributed.data.order import (
    ORDER_VERSION,
    GivenOrder,
    Order,
    SampleOrder,
    StreamOrder,
    permute,
)
from rtx_distributed.data.plan import (
    BatchPlan,
    Slot,
    contiguous_share,
    evaluation_slots,
    slot_seed,
)
from rtx_distributed.data.sources import DataSettings, OpenedData, open_dataset
from rtx_distributed.data.tokenfiles import TokenIndex, TokenWriter
from rtx_distributed.data.tokens import TokenArray, TokenDataset

if TYPE_CHECKING:
    from rtx_distributed.data.loader import SlotLoader
    from rtx_distributed.data.mapdata import MapData
    from rtx_distributed.data.streamdata import StreamData
    from rtx_distributed.data.userdata import UserData, adapt

_WITH_TORCH = {
    "MapData": "mapdata",
    "SlotLoader": "loader",
    "StreamData": "streamdata",
    "UserData": "userdata",
    "adapt": "userdata",
}

__all__ = [
    "ORDER_VERSION",
    "BatchPlan",
    "DataSettings",
    "GivenOrder",
    "MapData",
    "OpenedData",
    "Order",
    "SampleOrder",
    "Slot",
    "SlotLoader",
    "StreamData",
    "StreamOrder",
    "TokenArray",
    "TokenDataset",
    "TokenIndex",
    "TokenWriter",
    "UserData",
    "adapt",
    "contiguous_share",
    "evaluation_slots",
    "open_dataset",
    "permute",
    "slot_seed",
]


def __getattr__(name: str) -> Any:
    if name in _WITH_TORCH:
        return getattr(import_module(f"rtx_distributed.data.{_WITH_TORCH[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
