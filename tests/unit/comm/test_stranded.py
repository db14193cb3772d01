"""A collective that cannot be ended is given up, and its tensors are not used again."""

from __future__ import annotations

import time

import pytest
import torch

from rtx_distributed.comm import LocalCommunicator, gloo
from rtx_distributed.comm.reducer import BucketReducer


class LostSend:
    """A work object of Gloo's that waits for a send of which nobody will ever hear."""

    ended = False

    def wait(self, *limit: object) -> None:
        time.sleep(0.01)
        raise RuntimeError("Operation timed out!")

    def is_completed(self) -> bool:
        return self.ended


def test_after_an_abort_a_lost_send_is_given_up_and_its_group_kept_until_it_ends() -> None:
    communicator = gloo.GlooCommunicator.__new__(gloo.GlooCommunicator)
    communicator._sockets, communicator._aborted_at = [], None
    communicator._group = group = object()
    work, tensor = LostSend(), torch.zeros(3)
    assert communicator.stranded is False
    communicator.abort()
    with pytest.raises(RuntimeError, match="given up"):
        communicator._await(work, tensor)
    assert communicator.stranded is True
    communicator.close()
    assert (group, work, tensor) in [(g, w, t) for g, w, t in gloo._stranded if w is work]
    work.ended = True
    communicator.close()
    assert not [one for one in gloo._stranded if one[1] is work]


def test_a_reducer_leaves_the_tensors_of_a_stranded_collective_behind() -> None:
    model = torch.nn.Linear(2, 3)
    stranded = LocalCommunicator()
    stranded.stranded = True
    reducer = BucketReducer(list(model.named_parameters()), stranded)
    old = reducer.flats()
    reducer.rebind(LocalCommunicator())
    (new,) = reducer.flats()
    assert new.data_ptr() != old[0].data_ptr()
    reducer.begin()
    reducer.arm()
    model(torch.ones(1, 2)).sum().backward()
    reducer.flush()
    reducer.wait()
    assert new.tolist() == [1.0] * 9  # three biases, six weights with inputs of 1
    assert old[0].tolist() == [0.0] * 9
    same = reducer.flats()[0].data_ptr()
    reducer.rebind(LocalCommunicator())
    assert reducer.flats()[0].data_ptr() == same
    reducer.close()
