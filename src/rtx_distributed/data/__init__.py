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

__all__ = [
    "ORDER_VERSION",
    "BatchPlan",
    "GivenOrder",
    "Order",
    "SampleOrder",
    "Slot",
    "StreamOrder",
    "contiguous_share",
    "evaluation_slots",
    "permute",
    "slot_seed",
]
