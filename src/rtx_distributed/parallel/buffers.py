"""Model buffers that training changes (running statistics), kept independent of who computes what.

Each slot starts from the committed buffers. A floating buffer becomes the mean of what the slots
made of it, an integer buffer what slot 0 made of it; both reach every rank by the step's own
reduction, before the vote. Only persistent buffers count: others are derived constants.
"""

from __future__ import annotations

import torch


class SlotBuffers:
    """The persistent buffers of a model over the slots of a step."""

    def __init__(self, model: torch.nn.Module) -> None:
        persistent = {name for name in model.state_dict() if name not in _parameter_names(model)}
        seen: set[torch.Tensor] = set()
        self.names: list[str] = []
        self._live: list[torch.Tensor] = []
        for name, buffer in model.named_buffers():
            if name in persistent and buffer not in seen and not buffer.is_complex():
                seen.add(buffer)
                self.names.append(name)
                self._live.append(buffer)
        self._committed = [buffer.detach().clone() for buffer in self._live]
        self._sums = [torch.zeros_like(b, dtype=torch.float64) for b in self._live]

    @property
    def numel(self) -> int:
        """Elements in all buffers: the length of :meth:`payload`."""
        return sum(buffer.numel() for buffer in self._live)

    def begin(self) -> None:
        for total in self._sums:
            total.zero_()
        self.restore()

    @torch.no_grad()
    def restore(self) -> None:
        """Puts the committed values back, before a slot and after a dropped attempt."""
        for live, committed in zip(self._live, self._committed, strict=True):
            live.copy_(committed)

    @torch.no_grad()
    def collect(self, slot: int) -> None:
        """Takes what slot number ``slot`` of the step made of the buffers.

        Of floating ones the change is summed, so that a buffer that nobody touches keeps its bits
        (the mean of n equal numbers may be off by one in the last place), infinities included.
        """
        for live, committed, total in zip(self._live, self._committed, self._sums, strict=True):
            if live.is_floating_point():
                change = live.double() - committed.double()
                total += torch.where(live == committed, 0.0, change)
            elif slot == 0:
                total.copy_(live)  # exact in float64 up to 2**53

    def payload(self) -> list[torch.Tensor]:
        """This rank's part of the sum over all ranks: float64, one flat tensor per buffer."""
        return [total.flatten() for total in self._sums]

    @torch.no_grad()
    def commit(self, reduced: torch.Tensor, *, slots: int) -> None:
        """Makes the reduced payload [numel] of a step with ``slots`` slots the committed state."""
        offset = 0
        for live, committed in zip(self._live, self._committed, strict=True):
            piece = reduced[offset : offset + live.numel()].view(live.shape)
            offset += live.numel()
            if live.is_floating_point():
                piece = torch.where(piece == 0, committed, committed.double() + piece / slots)
            committed.copy_(piece)
            live.copy_(committed)

    @torch.no_grad()
    def reload(self) -> None:
        """Takes the live values as committed, after a checkpoint was loaded into the model."""
        for live, committed in zip(self._live, self._committed, strict=True):
            committed.copy_(live)


def _parameter_names(model: torch.nn.Module) -> set[str]:
    return {name for name, _ in model.named_parameters(remove_duplicate=False)}
