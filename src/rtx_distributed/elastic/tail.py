"""Copies a growing file to a stream as it grows."""

from __future__ import annotations

import asyncio
import codecs
import contextlib
from pathlib import Path
from typing import TextIO

_PERIOD_S = 0.05
_CHUNK = 1 << 16


class Tail:
    """What is appended to ``path``, from its start, goes to ``stream``."""

    def __init__(self, path: Path, stream: TextIO) -> None:
        self._path = path
        self._stream = stream
        self._offset = 0
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

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
            while data := file.read(_CHUNK):
                self._offset += len(data)
                self._stream.write(self._decoder.decode(data))
            self._stream.flush()
