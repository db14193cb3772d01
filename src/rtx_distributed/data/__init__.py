"""Which samples a step works on, and where they come from.

``order`` and ``plan`` are pure; sources become one array of tokens (``open_dataset``). What needs
torch stands in the submodules ``loader`` and ``mapdata``, so that importing this room does not
load it.
"""

from __future__ import annotations

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

__all__ = [
    "ORDER_VERSION",
    "BatchPlan",
    "DataSettings",
    "GivenOrder",
    "OpenedData",
    "Order",
    "SampleOrder",
    "Slot",
    "StreamOrder",
    "TokenArray",
    "TokenDataset",
    "TokenIndex",
    "TokenWriter",
    "contiguous_share",
    "evaluation_slots",
    "open_dataset",
    "permute",
    "slot_seed",
]
