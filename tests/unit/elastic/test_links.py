"""A connection that ends badly: what came before its end is heard."""

from __future__ import annotations

import asyncio
import socket

from rtx_distributed.elastic import messages as m
from rtx_distributed.elastic.links import Link


class Heard:
    """Keeps what a link tells."""

    def __init__(self) -> None:
        self.messages: list[m.FromWorker] = []
        self.ends = 0
        self.hellos = 0

    def connected(self, hello: m.Hello, link: Link) -> None:
        self.hellos += 1

    def receive(self, worker: int, message: m.FromWorker) -> None:
        self.messages.append(message)

    def disconnected(self, worker: int, link: Link) -> None:
        self.ends += 1

    def rejected(self, reason: str) -> None:
        raise AssertionError(reason)


def test_last_words_outlive_a_write_that_fails() -> None:
    """A worker says what is about to happen and dies with something unread, which resets its
    connection; a write to it fails before its words were read."""

    async def main() -> Heard:
        heard = Heard()
        link = Link(receiver=heard, token="t", expected=lambda hello: True)
        ours, worker = socket.socketpair()
        await asyncio.get_running_loop().create_connection(lambda: link, sock=ours)
        worker.sendall(m.encode(m.Hello("t", m.PROTOCOL, 7, 1, "here")))
        while not heard.hellos:
            await asyncio.sleep(0.01)
        link.send(m.StopRequested("asked to"))  # lies unread at the worker
        # From here on the event loop does not run until the write has failed.
        worker.sendall(m.encode(m.Injected(3, "kill")))
        worker.close()
        for _ in range(3):
            link.send(m.StopRequested("asked to"))
        await asyncio.wait_for(link.ended.wait(), 5)
        return heard

    heard = asyncio.run(main())
    assert heard.messages == [m.Injected(3, "kill")]
    assert heard.ends == 1
