"""Requests to a run over its socket: who is served, who is refused, and what the client says."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import stat
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rtx_distributed.elastic import requests
from rtx_distributed.elastic.folder import Holder, RunLock, read_holder
from rtx_distributed.elastic.messages import HEADER, MalformedFrame
from rtx_distributed.elastic.processes import read_stat
from rtx_distributed.elastic.requests import Answer, RequestServer, Scale, ask
from rtx_distributed.errors import ConfigError, RtxError, RunFolderError


def agree(request: Scale) -> Answer:
    return Answer(True, f"{request.workers} workers")


@contextlib.asynccontextmanager
async def serving(
    run: Path, handle: requests.Handler = agree, **options: Any
) -> AsyncIterator[tuple[RequestServer, Path]]:
    """A run that takes requests. The socket is removed, and the lock let go of, at the end."""
    mistakes: list[dict[str, Any]] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: mistakes.append(context))
    lock = RunLock(run)
    server = RequestServer(handle, **options)
    try:
        path = await server.start()
        lock.publish(path)
        yield server, path
    finally:
        await server.close()
        await server.close()
        lock.release()
    assert not path.parent.exists()
    assert mistakes == []  # in a supervisor each would end the run


async def asked(run: Path, workers: int = 3, *, timeout_s: float = 10.0) -> Answer:
    return await asyncio.to_thread(ask, run, Scale(workers), timeout_s=timeout_s)


def run_async(body: Callable[[], Awaitable[None]]) -> None:
    async def main() -> None:
        await body()

    asyncio.run(main())


async def exchange(path: Path, data: bytes, *, end: bool = True) -> Answer:
    """Sends ``data`` and returns the answer, whatever kind of client this makes us."""
    reader, writer = await asyncio.open_unix_connection(path)
    writer.write(data)
    if end:
        writer.write_eof()
    try:
        (length,) = HEADER.unpack(await reader.readexactly(HEADER.size))
        return msgspec.msgpack.decode(await reader.readexactly(length), type=Answer)
    finally:
        writer.close()


def frame(content: object) -> bytes:
    body = msgspec.msgpack.encode(content)
    return HEADER.pack(len(body)) + body


def scale_frame(protocol: object = 1, **request: object) -> bytes:
    return frame({"protocol": protocol, "request": {"kind": "scale", "workers": 3, **request}})


def test_a_request_is_answered_by_a_plain_and_by_an_async_handler(tmp_path: Path) -> None:
    async def later(request: Scale) -> Answer:
        await asyncio.sleep(0)
        return Answer(False, f"not {request.workers}: at most 2")

    async def body() -> None:
        async with serving(tmp_path) as (server, path):
            assert await asked(tmp_path, 3) == Answer(True, "3 workers")
            assert await asked(tmp_path, 1) == Answer(True, "1 workers")
            assert await exchange(path, scale_frame()) == Answer(True, "3 workers")
            assert server.rejects == 0
        async with serving(tmp_path, later):
            assert await asked(tmp_path, 3) == Answer(False, "not 3: at most 2")

    run_async(body)


def test_only_this_user_gets_at_the_socket(tmp_path: Path) -> None:
    async def body() -> None:
        async with serving(tmp_path) as (_, path):
            mode = path.parent.stat()
            assert stat.S_IMODE(mode.st_mode) == 0o700
            assert mode.st_uid == os.geteuid()
            holder = read_holder(tmp_path)
            assert holder is not None
            assert holder.socket == str(path)

    run_async(body)


@pytest.mark.parametrize(("uid", "served"), [(os.geteuid(), True), (0, True), (12345, False)])
def test_the_kernels_word_on_who_asks_decides(tmp_path: Path, uid: int, served: bool) -> None:
    heard: list[str] = []

    async def body() -> None:
        async with serving(
            tmp_path, on_reject=heard.append, credentials=lambda connection: (1, uid)
        ) as (server, _):
            answer = await asked(tmp_path)
            assert answer.ok is served
            assert server.rejects == len(heard) == (not served)

    run_async(body)
    if not served:
        assert heard == [f"a request of user 12345; the run is of user {os.geteuid()}"]


def test_the_kernel_names_the_other_end() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        assert requests.peer(ours) == (os.getpid(), os.geteuid())


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"", "a request that ends too early"),
        (b"\0\0", "a request that ends too early"),
        (HEADER.pack(5) + b"abc", "a request that ends too early"),
        (HEADER.pack(0), "an empty frame"),
        (HEADER.pack(4097), "a frame of 4097 bytes; at most 4096 are allowed"),
        (b"GET / HTTP/1.1\r\n\r\n" * 100_000, "a frame of 1195725856 bytes; at most 4096"),
        (HEADER.pack(3) + b"\xc1\xc1\xc1", "3 bytes that are no request"),
        (frame([1, 2]), "no request: Expected `object`, got `array`"),
        (frame({"protocol": 1}), "missing required field `request`"),
        (frame({"protocol": 1, "request": 7}), "no request: Expected `object`, got `int`"),
        (scale_frame(protocol="1"), "no request: Expected `int`, got `str`"),
        (scale_frame(protocol=2), "a request in protocol 2; the run speaks 1"),
        (scale_frame(kind="shrink"), "no request: Invalid value 'shrink'"),
        (scale_frame(workers=0), "no request: Expected `int` >= 1"),
        (scale_frame(workers="3"), "no request: Expected `int`, got `str`"),
        (HEADER.pack(2000) + b"\x91" * 2000, "2000 bytes that are no request"),
    ],
)  # fmt: skip
def test_what_is_no_request_is_refused_and_the_next_one_served(
    tmp_path: Path, data: bytes, reason: str
) -> None:
    async def body() -> None:
        async with serving(tmp_path) as (server, path):
            with contextlib.suppress(ConnectionError):  # the flood may be cut off
                answer = await exchange(path, data)
                assert not answer.ok
                assert answer.text.startswith("refused: ")
                assert reason in answer.text
            assert server.rejects == 1
            assert (await asked(tmp_path)).ok

    run_async(body)


@given(data=st.binary(max_size=200) | st.binary(max_size=64).map(
    lambda body: HEADER.pack(len(body)) + body
))  # fmt: skip
def test_no_bytes_raise_anything_but_a_refusal(data: bytes) -> None:
    async def body() -> None:
        reader = asyncio.StreamReader()
        reader.feed_data(data)
        reader.feed_eof()
        with contextlib.suppress(MalformedFrame, asyncio.IncompleteReadError):
            assert isinstance(await requests._read(reader), Scale)

    run_async(body)


def test_slow_clients_and_too_many_are_turned_away(tmp_path: Path) -> None:
    async def body() -> None:
        async with serving(tmp_path, slow_s=0.05) as (server, path):
            answer = await exchange(path, b"\0\0", end=False)
            assert answer == Answer(False, "refused: no request within 0.05 s")
            assert server.rejects == 1
        async with serving(tmp_path, slow_s=60.0) as (server, path):
            silent = [await asyncio.open_unix_connection(path) for _ in range(16)]
            assert await asked(tmp_path) == Answer(False, "refused: more than 16 requests at once")
            silent.pop()[1].close()
            while server.rejects < 2:  # its end is noticed
                await asyncio.sleep(0.001)
            assert (await asked(tmp_path)).ok
            for _, writer in silent:
                writer.close()

    run_async(body)


def test_what_goes_wrong_in_the_handler_is_the_answer(tmp_path: Path) -> None:
    wrong: dict[int, Callable[[], Answer]] = {}

    def handle(request: Scale) -> Answer:
        return wrong[request.workers]()

    def fail(error: Exception) -> Callable[[], Answer]:
        def body() -> Answer:
            raise error

        return body

    wrong[1] = fail(RtxError("no more devices"))
    wrong[2] = fail(ZeroDivisionError("by zero"))
    wrong[3] = lambda: Answer(True, f"a name: \udcff {'x' * 100_000}")

    async def body() -> None:
        async with serving(tmp_path, handle) as (server, _):
            assert await asked(tmp_path, 1) == Answer(False, "no more devices")
            failed = "the request failed: ZeroDivisionError: by zero"
            assert await asked(tmp_path, 2) == Answer(False, failed)
            assert (await asked(tmp_path, 3)).text.startswith("a name: \\udcff xxx")
            assert server.rejects == 0

    run_async(body)


def test_a_client_that_leaves_and_a_server_that_closes_end_nothing_else(tmp_path: Path) -> None:
    async def body() -> None:
        asked_for, answer = asyncio.Event(), asyncio.Event()

        async def handle(request: Scale) -> Answer:
            asked_for.set()
            await answer.wait()
            return Answer(True, "late")

        async with serving(tmp_path, handle) as (_, path):
            _, writer = await asyncio.open_unix_connection(path)
            writer.write(scale_frame())
            await asked_for.wait()
            writer.transport.abort()
            answer.set()
            assert (await asked(tmp_path)).text == "late"
            answer.clear()
            asked_for.clear()
            waiting = asyncio.create_task(asked(tmp_path))
            await asked_for.wait()
        with pytest.raises(RtxError, match="gave no answer") as caught:
            await waiting
        assert caught.value.exit_code == 1

    run_async(body)


def test_a_long_temporary_folder_is_passed_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    long = tmp_path / ("x" * 120)
    long.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(long))

    async def body() -> None:
        async with serving(tmp_path) as (_, path):
            assert path.parent.parent == Path("/tmp")
            assert (await asked(tmp_path)).ok

    run_async(body)


@pytest.fixture
def other() -> Iterator[int]:
    """The pid of another living process."""
    process = subprocess.Popen(["sleep", "60"])
    yield process.pid
    process.kill()
    process.wait(timeout=10)


def lock(run: Path, pid: int, **changes: Any) -> None:
    found = read_stat(pid)
    assert found is not None
    holder = Holder(pid, socket.gethostname(), time.time(), found.start_ticks)
    (run / ".lock").write_bytes(msgspec.json.encode(msgspec.structs.replace(holder, **changes)))


def refused(run: Path, kind: type[RtxError], *, timeout_s: float = 10.0) -> str:
    with pytest.raises(kind) as caught:
        ask(run, Scale(2), timeout_s=timeout_s)
    assert caught.value.exit_code == (1 if kind is RtxError else 2)
    return str(caught.value)


def test_no_run_to_ask(tmp_path: Path, other: int) -> None:
    assert "does not exist" in refused(tmp_path / "no", RunFolderError)
    assert "nothing is running" in refused(tmp_path, RunFolderError)
    lock(tmp_path, other, host="elsewhere")
    assert "`elsewhere`" in (text := refused(tmp_path, RunFolderError))
    assert text.endswith("ask it there")
    lock(tmp_path, other, start_ticks=1)
    assert f"pid {other}, which started it, has ended" in refused(tmp_path, RunFolderError)


def test_a_run_that_takes_no_requests(tmp_path: Path, other: int) -> None:
    lock(tmp_path, other)
    old = msgspec.json.decode((tmp_path / ".lock").read_bytes())
    del old["socket"]  # as an earlier version wrote it
    (tmp_path / ".lock").write_bytes(msgspec.json.encode(old))
    text = refused(tmp_path, ConfigError)
    assert f"(pid {other}) takes no requests" in text
    assert "torchrun" in text


@pytest.mark.parametrize("path", ["/nonexistent/s", "", "x\0y", "/tmp/" + "y" * 200])
def test_a_socket_that_is_not_there(tmp_path: Path, other: int, path: str) -> None:
    lock(tmp_path, other, socket=path)
    assert "cannot be reached" in refused(tmp_path, RunFolderError)


def test_another_process_in_the_runs_place_is_told_nothing(tmp_path: Path, other: int) -> None:
    async def body() -> None:
        async with serving(tmp_path) as (server, path):
            fake = tmp_path / "fake"
            fake.mkdir()
            lock(fake, other, socket=str(path))
            text = await asyncio.to_thread(refused, fake, RunFolderError)
            assert f"pid {os.getpid()} listens in its place" in text
            while server.rejects == 0:
                await asyncio.sleep(0.001)

    run_async(body)


def test_a_run_that_does_not_answer(tmp_path: Path) -> None:
    with tempfile.TemporaryDirectory(dir="/tmp") as folder, socket.socket(socket.AF_UNIX) as deaf:
        deaf.bind(f"{folder}/s")
        deaf.listen(1)
        lock(tmp_path, os.getpid(), socket=f"{folder}/s")
        text = refused(tmp_path, RtxError, timeout_s=0.1)
    assert text == f"pid {os.getpid()} did not answer within 0.1 s"


def test_no_torch_is_imported() -> None:
    code = (
        "import sys, rtx_distributed.cli.scale, rtx_distributed.cli.top\n"
        "assert 'torch' not in sys.modules and 'rich' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
