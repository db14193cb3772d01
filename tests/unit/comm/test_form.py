from __future__ import annotations

import pytest
import torch

from rtx_distributed.comm import LocalCommunicator, Rendezvous, choose_backend, form
from rtx_distributed.errors import CommError, ConfigError
from tests.support.training import CPU


def test_a_cpu_takes_gloo_and_says_why() -> None:
    assert choose_backend("auto", CPU) == ("gloo", "gloo: the workers run on the CPU")
    assert choose_backend("gloo", torch.device("cuda")) == ("gloo", "gloo: set by `comm.backend`")


@pytest.mark.parametrize("name", ["nccl", "rccl"])
def test_device_backends_need_devices(name: str) -> None:
    with pytest.raises(ConfigError, match=f"`comm.backend` is {name}.*run on cpu; use gloo"):
        choose_backend(name, CPU)  # type: ignore[arg-type]


def test_one_member_needs_no_store() -> None:
    meeting = Rendezvous(0, 1, 7, "nowhere.invalid", 1, "g7", one_node=True)
    communicator = form(meeting, backend="gloo", device=CPU, timeout_s=1)
    assert isinstance(communicator, LocalCommunicator)
    assert communicator.generation == 7


def test_a_store_that_is_not_there_is_named() -> None:
    meeting = Rendezvous(0, 2, 0, "127.0.0.1", 1, "g0", one_node=True)
    with pytest.raises(CommError, match=r"cannot reach the store at `127\.0\.0\.1:1`"):
        form(meeting, backend="gloo", device=CPU, timeout_s=0.2)
