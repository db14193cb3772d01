"""The worker's end: signals, and what happens when nobody hears it."""

from __future__ import annotations

import os
import signal
import socket

import pytest

from rtx_distributed.elastic import Control
from rtx_distributed.elastic import messages as m
from rtx_distributed.errors import CommError


def test_r36_a_signal_is_a_request_and_the_handlers_come_back() -> None:
    before = signal.getsignal(signal.SIGUSR1)
    ours, theirs = socket.socketpair()
    control = Control.connect(ours, token="", worker=9)
    try:
        os.kill(os.getpid(), signal.SIGUSR1)
        assert control.stop_requested
        child = os.fork()
        if child == 0:  # as a loader worker: the signal is its parent's to report
            ignored = signal.getsignal(signal.SIGTERM) == signal.SIG_IGN
            os._exit(0 if ignored else 1)
        assert os.waitpid(child, 0)[1] == 0
        os.kill(os.getpid(), signal.SIGINT)
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)
    finally:
        theirs.close()
        control.close()
    assert signal.getsignal(signal.SIGUSR1) == before


def test_a_signal_is_told_to_the_recorder() -> None:
    ours, theirs = socket.socketpair()
    control = Control.connect(ours, token="t", worker=9)
    try:
        os.kill(os.getpid(), signal.SIGHUP)
        theirs.settimeout(10)
        reader, bodies = m.FrameReader(), list[bytes]()
        while len(bodies) < 2:
            bodies += reader.feed(theirs.recv(4096))
        assert m.decode_hello(bodies[0]).token == "t"
        assert m.decode_from_worker(bodies[1]) == m.Signalled(signal.SIGHUP)
    finally:
        theirs.close()
        control.close()


def test_a_recorder_that_goes_ends_the_waiting() -> None:
    ours, theirs = socket.socketpair()
    control = Control.connect(ours, token="", worker=0, handle_signals=False)
    theirs.close()
    try:
        with pytest.raises(CommError, match="the connection to the recorder ended"):
            control.generation()
    finally:
        control.close()
