"""What a forked worker does around the entry: connect, call, report."""

from __future__ import annotations

import atexit
import contextlib
import faulthandler
import importlib
import multiprocessing.util
import os
import socket
import sys
import threading
import warnings
from collections.abc import Callable
from typing import Any, TextIO

import msgspec

from rtx_distributed.elastic.board import Board
from rtx_distributed.elastic.control import Control, Dismissed
from rtx_distributed.elastic.spawn import SpawnRequest, settle, unblock_signals
from rtx_distributed.elastic.tail import LAST_WORDS
from rtx_distributed.errors import NonFiniteError, RankError, RtxError, UsageError


def run_worker(request: SpawnRequest, descriptor: int, board_descriptor: int) -> int:
    """The body of the forked process: calls the entry and returns the process's exit code.

    An exception of the entry, `SystemExit` included, is reported as a fault. An entry that returns
    is done, whether it has said so by `Control.done` or not.
    """
    settle(request, keep={descriptor, board_descriptor})
    board = Board.open(board_descriptor)
    os.close(board_descriptor)
    faulthandler.enable()
    control = Control.connect(
        socket.socket(fileno=descriptor),
        token=request.token,
        worker=request.worker,
        supervised=True,
        board=board,
        elastic=request.elastic,
        founder=request.founder,
        seat=request.seat,
        fired=request.fired,
    )
    unblock_signals()
    with _warnings_reported(control):
        code = _call(control, request)
    control.close()
    _finish_interpreter()
    return code


def _call(control: Control, request: SpawnRequest) -> int:
    try:
        entry = load_entry(request.entry)
        entry(control, msgspec.msgpack.decode(request.payload))
        control.done()
    except Dismissed as leaving:
        sys.stderr.write(f"{leaving}\n")
    except BaseException as error:
        # The full story goes to this worker's log; the console shows one line of it.
        sys.stdout.flush()
        sys.stderr.write(LAST_WORDS)
        sys.stderr.flush()
        sys.excepthook(type(error), error, error.__traceback__)
        if isinstance(error, SystemExit):
            code = error.code if error.code is not None else 0
            error = RankError(f"left by `sys.exit({code!r})` before the work was done")
        control.fault(
            error,
            fatal=isinstance(error, UsageError | NonFiniteError),
            device_lost=loses_device(error),
        )
        return error.exit_code if isinstance(error, RtxError) else 1
    return 0


_DEVICE_ERRORS = ("AcceleratorError", "CUDA error:", "HIP error:", "device-side assert")


def loses_device(error: BaseException) -> bool:
    """Whether ``error``, or what it came from, says that the device takes no more work from this
    process: such errors stick, so it cannot go on. Out of memory is none."""
    seen: BaseException | None = error
    while seen is not None:
        text = f"{type(seen).__name__}: {seen}"
        if any(sign in text for sign in _DEVICE_ERRORS) and "out of memory" not in text:
            return True
        seen = seen.__cause__ or seen.__context__
    return False


def load_entry(name: str) -> Callable[[Control, Any], None]:
    """The function behind ``module:function``.

    Raises:
        ImportError: no such module.
        AttributeError: no such function in it.
    """
    module, _, function = name.partition(":")
    entry: Callable[[Control, Any], None] = getattr(importlib.import_module(module), function)
    return entry


@contextlib.contextmanager
def _warnings_reported(control: Control) -> Any:
    """Shows Python's warnings on the console too, where each text appears once with its rank."""
    show = warnings.showwarning

    def report(
        message: Warning | str,
        category: type[Warning],
        filename: str,
        lineno: int,
        file: TextIO | None = None,
        line: str | None = None,
    ) -> None:
        show(message, category, filename, lineno, file, line)
        control.warn(f"{category.__name__}: {message}")

    warnings.showwarning = report
    try:
        yield
    finally:
        warnings.showwarning = show


def _finish_interpreter() -> None:
    """What the interpreter does at its end; the process itself ends without unwinding into the
    warm parent's frames below."""
    threading._shutdown()  # type: ignore[attr-defined]
    multiprocessing.util._exit_function()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
