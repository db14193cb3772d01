"""One suite for every communicator: Gloo over processes, and the fake over threads.

The oracle is float64 arithmetic over the ranks' numbers as their dtype holds them.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch

from rtx_distributed.comm import Communicator, LocalCommunicator
from rtx_distributed.comm.c10d import connect_store
from rtx_distributed.comm.gloo import GlooCommunicator
from rtx_distributed.errors import CommError
from tests.support import system
from tests.support.training import CPU, form_gloo, on_fake_ranks
from tests.support.world import WorldContext, run_world

FLOATS = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
DTYPES = (*FLOATS, torch.int32, torch.int64, torch.uint8)
SIZES = (0, 1, 2, 3, 7, 64, 1021, 4099)

Check = Callable[[Communicator], Any]


def gloo(
    context: WorldContext, prefix: str = "g0", *, generation: int = 0, timeout_s: float = 20
) -> GlooCommunicator:
    """Gloo itself, also for a world of one."""
    return GlooCommunicator(
        connect_store(context.store_host, context.store_port, prefix, timeout_s=timeout_s),
        rank=context.rank,
        world_size=context.world_size,
        generation=generation,
        timeout_s=timeout_s,
        loopback=True,
    )


def on_gloo_ranks(world_size: int, check: Check) -> list[Any]:
    def rank_main(context: WorldContext) -> Any:
        communicator = gloo(context)
        result = check(communicator)
        communicator.close()
        return result

    return run_world(rank_main, world_size)


WORLDS: dict[str, Callable[[int, Check], list[Any]]] = {
    "gloo": on_gloo_ranks,
    "fake": on_fake_ranks,
}
every_world = pytest.mark.parametrize(
    ("kind", "world_size"),
    [(kind, size) for kind in WORLDS for size in (1, 2, 3, 4)],
)


def numbers(rank: int, size: int, dtype: torch.dtype) -> torch.Tensor:
    """What a rank holds: small enough that no integer sum of four wraps, odd enough that float
    sums round."""
    generator = torch.Generator().manual_seed(1000 * rank + size)
    if dtype.is_floating_point:
        return torch.randn(size, generator=generator, dtype=torch.float64).to(dtype)
    low = 0 if dtype == torch.uint8 else -50
    return torch.randint(low, 60, (size,), generator=generator).to(dtype)


def assert_near(got: torch.Tensor, exact: torch.Tensor, *, terms: int) -> None:
    """Within the rounding of ``terms`` additions of numbers no greater than 8."""
    if not got.is_floating_point():
        assert got.tolist() == exact.tolist()
        return
    unit = torch.finfo(got.dtype).eps
    allowed = terms * unit * 8 * terms
    worst = (got.double() - exact).abs().max().item() if got.numel() else 0.0
    assert worst <= allowed, f"{got.dtype}: off by {worst}, allowed {allowed}"


def check_all_reduce(communicator: Communicator) -> list[bytes]:
    """The results' bits, to be compared between ranks."""
    world, found = communicator.world_size, []
    for dtype in DTYPES:
        for size in SIZES:
            parts = [numbers(rank, size, dtype).double() for rank in range(world)]
            for op in ("sum", "min", "max"):
                mine = numbers(communicator.rank, size, dtype)
                communicator.all_reduce(mine, op=op).wait()
                stacked = torch.stack(parts)
                if op == "sum":
                    assert_near(mine, stacked.sum(0), terms=world)
                else:
                    exact = stacked.amin(0) if op == "min" else stacked.amax(0)
                    assert mine.double().tolist() == exact.tolist()
                found.append(mine.view(torch.uint8).numpy().tobytes())
    return found


@every_world
def test_all_reduce_of_every_dtype_is_right_and_bit_identical(kind: str, world_size: int) -> None:
    first, *others = WORLDS[kind](world_size, check_all_reduce)
    assert len(first) == len(DTYPES) * len(SIZES) * 3
    assert all(other == first for other in others)


def check_movement(communicator: Communicator) -> None:
    world, rank = communicator.world_size, communicator.rank
    for dtype in DTYPES:
        for size in SIZES:
            for root in range(world):
                mine = numbers(rank, size, dtype)
                communicator.broadcast(mine, root=root).wait()
                assert torch.equal(mine, numbers(root, size, dtype))
            output = torch.full((world * size,), 9, dtype=dtype)
            communicator.all_gather(output, numbers(rank, size, dtype)).wait()
            assert torch.equal(output, torch.cat([numbers(r, size, dtype) for r in range(world)]))
            whole = [numbers(r, world * size, dtype) for r in range(world)]
            piece = torch.full((size,), 9, dtype=dtype)
            communicator.reduce_scatter(piece, whole[rank].clone()).wait()
            exact = torch.stack([w.double() for w in whole]).sum(0)
            assert_near(piece, exact[rank * size : (rank + 1) * size], terms=world)


@every_world
def test_broadcast_gather_and_scatter_of_every_dtype(kind: str, world_size: int) -> None:
    WORLDS[kind](world_size, check_movement)


def check_shapes_and_views(communicator: Communicator) -> None:
    world, rank = communicator.world_size, communicator.rank
    matrix = torch.full((3, 5), float(rank + 1))
    communicator.all_reduce(matrix).wait()
    assert torch.equal(matrix, torch.full((3, 5), world * (world + 1) / 2))
    flat = torch.arange(10.0)
    communicator.all_reduce(flat[2:5]).wait()  # a piece of a bucket: nothing around it changes
    assert flat.tolist() == [0, 1, 2 * world, 3 * world, 4 * world, 5, 6, 7, 8, 9]
    rows = torch.empty(world * 2, 3)
    communicator.all_gather(rows, torch.full((2, 3), float(rank))).wait()
    assert rows[:, 0].tolist() == [float(r) for r in range(world) for _ in range(2)]
    piece = torch.empty(2, 3)
    communicator.reduce_scatter(piece, torch.arange(world * 6.0).view(world * 2, 3)).wait()
    start = rank * 6
    assert piece.flatten().tolist() == [world * v for v in range(start, start + 6)]


@every_world
def test_shapes_and_views(kind: str, world_size: int) -> None:
    WORLDS[kind](world_size, check_shapes_and_views)


def check_nan(communicator: Communicator) -> list[float]:
    """One rank's NaN and infinities reach all, in every place of a ring."""
    world, rank = communicator.world_size, communicator.rank
    for dtype in FLOATS:
        for size in (1, 5, 1021):
            for culprit in range(world):
                for place in {0, size // 2, size - 1}:
                    mine = torch.ones(size, dtype=dtype)
                    if rank == culprit:
                        mine[place] = float("nan")
                    communicator.all_reduce(mine).wait()
                    bad = mine.isnan()
                    assert bad[place]
                    assert int(bad.sum()) == 1
                    assert (mine[~bad] == world).all()
    infinite = torch.tensor([float("inf"), float("inf") if rank == 0 else -float("inf")])
    communicator.all_reduce(infinite).wait()
    return [float(v) for v in infinite.nan_to_num(nan=-1.0, posinf=1.0)]


@every_world
def test_nan_passes_through(kind: str, world_size: int) -> None:
    expected = [1.0, 1.0 if world_size == 1 else -1.0]
    assert WORLDS[kind](world_size, check_nan) == [expected] * world_size


def check_async(communicator: Communicator) -> None:
    """Twenty under way at once, waited for in the reverse order, one of them twice."""
    world, rank = communicator.world_size, communicator.rank
    tensors = [torch.full((101 + i,), float(rank + i)) for i in range(20)]
    handles = [communicator.all_reduce(tensor, async_op=True) for tensor in tensors]
    for handle in reversed(handles):
        handle.wait()
    handles[3].wait()
    ranks = world * (world - 1) / 2
    for i, tensor in enumerate(tensors):
        assert (tensor == ranks + world * i).all()
    communicator.barrier()
    assert communicator.sum_scalars([0.1, float(rank)], device=CPU) == [
        pytest.approx(0.1 * world, rel=1e-15),
        ranks,
    ]


@every_world
def test_handles_of_collectives_under_way(kind: str, world_size: int) -> None:
    WORLDS[kind](world_size, check_async)


def check_wrapping(communicator: Communicator) -> list[int]:
    """The vote needs sums modulo 2**64."""
    words = torch.tensor([2**62, -(2**63), 2**63 - 1])
    communicator.all_reduce(words).wait()
    return [int(v) for v in words]


@pytest.mark.parametrize("kind", WORLDS)
def test_int64_sums_wrap(kind: str) -> None:
    expected = [(3 * v + 2**63) % 2**64 - 2**63 for v in (2**62, -(2**63), 2**63 - 1)]
    assert WORLDS[kind](3, check_wrapping) == [expected] * 3


def test_messages_between_two_ranks() -> None:
    def check(communicator: Communicator) -> list[float] | None:
        rank = communicator.rank
        if rank == 0:
            communicator.send(torch.arange(3.0), to=2, tag=5).wait()
            return None
        if rank == 2:
            into = torch.zeros(3)
            communicator.recv(into, source=0, tag=5).wait()
            return into.tolist()
        return None

    assert on_gloo_ranks(3, check) == [None, None, [0.0, 1.0, 2.0]]


def test_a_world_of_one_has_nobody_to_write_to() -> None:
    one = LocalCommunicator()
    with pytest.raises(CommError, match="send to rank 1: this world has one rank"):
        one.send(torch.ones(1), to=1)
    with pytest.raises(CommError, match="receive from rank 1: this world has one rank"):
        one.recv(torch.ones(1), source=1)


def waits(communicator: Communicator, name: str) -> None:
    """A collective that does not end while a peer is stopped."""
    world = communicator.world_size
    if name == "all_reduce":
        communicator.all_reduce(torch.ones(1000))
    elif name == "async all_reduce":
        communicator.all_reduce(torch.ones(1000), async_op=True).wait()
    elif name == "broadcast":
        communicator.broadcast(torch.ones(1000), root=world - 1)
    elif name == "all_gather":
        communicator.all_gather(torch.ones(world * 10), torch.ones(10))
    elif name == "reduce_scatter":
        communicator.reduce_scatter(torch.ones(10), torch.ones(world * 10))
    elif name == "receive":
        communicator.recv(torch.ones(10), source=world - 1).wait()
    else:
        communicator.barrier()


@pytest.mark.parametrize(
    "name",
    [
        "all_reduce",
        "async all_reduce",
        "broadcast",
        "all_gather",
        "reduce_scatter",
        "receive",
        "barrier",
    ],
)
def test_abort_frees_those_who_wait_for_a_stopped_peer(name: str) -> None:
    """The last of three ranks is stopped; the others' control thread calls abort()."""

    def rank_main(context: WorldContext) -> tuple[str, float]:
        communicator = gloo(context)
        communicator.barrier()
        store = context.store()
        if context.rank == context.world_size - 1:
            store.set("pid", str(os.getpid()))
            while True:
                time.sleep(0.01)
        if context.rank == 0:
            pid = int(store.get("pid"))
            os.kill(pid, signal.SIGSTOP)
            assert system.wait_until(lambda: "state T" in system.describe(pid), limit_s=5)
            store.set("stopped", "yes")
        store.get("stopped")
        called: list[float] = []

        def control() -> None:
            time.sleep(0.3)  # the main thread waits by then
            called.append(time.monotonic())
            communicator.abort()

        thread = threading.Thread(target=control)
        thread.start()
        text = "nothing raised"
        try:
            waits(communicator, name)
        except CommError as error:
            text = str(error)
        delay = time.monotonic() - called[0]
        thread.join()
        communicator.abort()  # again: harmless
        # All survivors are out before the peer ends: its death would free them, too.
        store.set(f"out-{context.rank}", "yes")
        if context.rank == 0:
            store.get("out-1")
            os.kill(pid, signal.SIGKILL)
        return text, delay

    first, second, _ = run_world(rank_main, 3, expect_killed=[2], timeout=30)
    for rank, (text, delay) in enumerate([first, second]):
        operation = {"async all_reduce": "all_reduce", "barrier": "all_reduce"}.get(name, name)
        assert text.startswith(operation), text
        assert f"on rank {rank} of 3 (gloo) failed: " in text
        assert delay < 2.0


def test_a_killed_peer_is_an_error_that_names_operation_and_rank() -> None:
    def rank_main(context: WorldContext) -> str:
        communicator = gloo(context)
        communicator.barrier()
        if context.rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        try:
            communicator.all_reduce(torch.ones(7))
        except CommError as error:
            return str(error)
        return "nothing raised"

    text, _ = run_world(rank_main, 2, expect_killed=[1], timeout=30)
    assert text.startswith("all_reduce of 7 torch.float32 on rank 0 of 2 (gloo) failed: ")


def test_a_peer_that_does_not_come_is_an_error_within_the_time_limit() -> None:
    def rank_main(context: WorldContext) -> str:
        if context.rank == 1:
            return "stayed away"
        try:
            gloo(context, timeout_s=1)
        except CommError as error:
            return str(error)
        return "nothing raised"

    text, _ = run_world(rank_main, 2, timeout=30)
    assert text.startswith("gloo could not form generation 0 on rank 0 of 2: ")


def test_abort_leaves_other_sockets_alone() -> None:
    """Also one that has come to carry the number of a socket that gloo has closed."""

    def rank_main(context: WorldContext) -> tuple[bool, bool]:
        import socket

        store = context.store()
        first = gloo(context)
        first.barrier()
        numbers_before = {number for number, _ in first._sockets}
        first._group = None  # gloo closes its sockets; what is opened next gets their numbers
        left, right = socket.socketpair()
        server = socket.create_server(("127.0.0.1", 0))
        clients = [socket.create_connection(server.getsockname()) for _ in range(8)]
        accepted = [server.accept()[0] for _ in clients]
        reused = any(c.fileno() in numbers_before for c in (*clients, *accepted))
        first.abort()
        for client, peer in zip(clients, accepted, strict=True):
            client.sendall(b"x")
            assert peer.recv(1) == b"x"
        left.sendall(b"y")
        alive = right.recv(1) == b"y"
        store.set(f"here-{context.rank}", "yes")
        store.get(f"here-{1 - context.rank}")
        for sock in (left, right, server, *clients, *accepted):
            sock.close()
        return reused, alive

    results = run_world(rank_main, 2)
    assert [alive for _, alive in results] == [True, True]
    assert [reused for reused, _ in results] == [True, True]


@pytest.mark.soak
def test_twenty_generations_leave_no_descriptor_and_no_thread() -> None:
    def rank_main(context: WorldContext) -> tuple[list[int], list[int], list[float]]:
        descriptors, threads, sums = [], [], []
        for generation in range(20):
            communicator = form_gloo(context, f"g{generation}", generation=generation)
            total = torch.ones(1000) * generation
            communicator.all_reduce(total).wait()
            sums.append(float(total[0]))
            assert communicator.generation == generation
            if generation % 2:
                communicator.barrier()
                communicator.abort()  # as after a fault
            communicator.close()
            del communicator
            system.wait_until(lambda: not system.threads(), limit_s=2)
            descriptors.append(len(os.listdir("/proc/self/fd")))
            threads.append(len(system.threads()))
        return descriptors, threads, sums

    for descriptors, threads, sums in run_world(rank_main, 3, timeout=60):
        assert sums == [3.0 * generation for generation in range(20)]
        assert descriptors[-1] <= descriptors[1], descriptors
        assert threads[-1] <= threads[1], threads
