"""Copies a growing file to a stream as it grows."""

from __future__ import annotations

import asyncio
import codecs
import contextlib
from pathlib import Path
from typing import TextIO

_PERIOD_S = 0.05
_CHUNK = 1 << 16


LAST_WORDS = "--- rtxd: the error that ended this worker\n"
"""Stands in a worker's log before the traceback of the error that it reports."""


class Tail:
    """What is appended to ``path``, from its start, goes to ``stream``, up to the worker's last
    words: its error is shown by the supervisor, once."""

    def __init__(self, path: Path, stream: TextIO) -> None:
        self._path = path
        self._stream = stream
        self._offset = 0
        self._ended = False
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def move_to(self, path: Path) -> None:
        """Goes on with what is appended to ``path`` from now on."""
        if path == self._path:
            return
        self.drain()
        self._path = path
        self._offset = path.stat().st_size if path.exists() else 0
        self._ended = False
        self._decoder.reset()

    async def follow(self) -> None:
        """Copies until cancelled."""
        while True:
            self.drain()
            await asyncio.sleep(_PERIOD_S)

    def drain(self) -> None:
        """Copies what is there now. A reader that has gone away ends nothing."""
        try:
            file = self._path.open("rb")
        except FileNotFoundError:
            return
        with file, contextlib.suppress(OSError):
            file.seek(self._offset)
            while not self._ended and (data := file.read(_CHUNK)):
                end = data.find(LAST_WORDS.encode())
                if end >= 0:
                    data, self._ended = data[:end], True
                elif len(data) == _CHUNK:
                    data = data[: data.rfind(b"\n") + 1] or data  # last words are a whole line
                    file.seek(self._offset + len(data))
                self._offset += len(data)
                self._stream.write(self._decoder.decode(data))
            self._stream.flush()
