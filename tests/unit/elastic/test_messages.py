"""Frames: bounds, pieces, and bytes that are no message."""

from __future__ import annotations

import contextlib

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rtx_distributed.elastic import messages as m
from rtx_distributed.elastic.generation import Generation, Member
from rtx_distributed.elastic.resolution import Resolution

GENERATION = Generation(3, (Member(7, 0, 99, "a", "cpu"),), "127.0.0.1", 4000, "g3/")


def test_a_frame_is_its_length_and_its_body() -> None:
    frame = m.encode(m.StopRequested("SIGTERM"))
    assert frame[:4] == (len(frame) - 4).to_bytes(4, "big")
    assert m.decode_to_worker(frame[4:]) == m.StopRequested("SIGTERM")


@pytest.mark.parametrize(
    "message",
    [
        m.Announce(GENERATION, Resolution("redo", 7, attempt=1, boundary=2)),
        m.Freeze(3),
        m.AbortGeneration(3),
        m.YieldRequested(3),
        m.CopyRequested(3, ((8, "127.0.0.1:4001"),)),
        m.Settle(3, Resolution("apply", 7)),
        m.Serve(3, 0, 2, ((8, "127.0.0.1:4001"),)),
        m.Dismissed(),
        m.Fired(1, "kill:rank=0,step=4,phase=vote"),
        m.CheckpointPublished(5, "x"),
        m.CheckpointFailed(5, "disk full"),
        m.ResumeReady(5, 2, None),
        m.Abort("another"),
        m.Farewell(),
    ],
)
def test_messages_to_workers_survive_the_wire(message: msgspec.Struct) -> None:
    assert m.decode_to_worker(m.encode(message)[4:]) == message


def test_a_message_of_the_other_direction_is_malformed() -> None:
    with pytest.raises(m.MalformedFrame):
        m.decode_from_worker(m.encode(m.Farewell())[4:])


def test_a_message_without_a_field_is_malformed() -> None:
    body = msgspec.msgpack.encode({"kind": "signalled"})
    with pytest.raises(m.MalformedFrame):
        m.decode_from_worker(body)


def test_a_field_more_is_ignored() -> None:
    body = msgspec.msgpack.encode({"kind": "warn", "text": "a", "later": 1})
    assert m.decode_from_worker(body) == m.Warn("a")


def test_the_longest_frame_passes_and_one_byte_more_does_not() -> None:
    assert m.check_length(m.MAX_FRAME) == 64 * 1024 * 1024
    with pytest.raises(m.OversizedFrame, match="67108865"):
        m.check_length(m.MAX_FRAME + 1)
    with pytest.raises(m.OversizedFrame):
        m.encode(m.Warn("x" * m.MAX_FRAME))


@given(st.lists(st.text(max_size=40), max_size=6), st.integers(1, 7))
@settings(max_examples=60, deadline=None)
def test_frames_are_found_in_any_pieces(texts: list[str], piece: int) -> None:
    stream = b"".join(m.encode(m.Warn(text)) for text in texts)
    reader = m.FrameReader()
    bodies = []
    for start in range(0, len(stream), piece):
        bodies += reader.feed(stream[start : start + piece])
    assert [m.decode_from_worker(body) for body in bodies] == [m.Warn(text) for text in texts]


@given(st.binary(max_size=200))
@settings(max_examples=300, deadline=None)
def test_any_bytes_are_a_message_or_malformed(body: bytes) -> None:
    for decode in (m.decode_hello, m.decode_from_worker, m.decode_to_worker):
        with contextlib.suppress(m.MalformedFrame):
            assert isinstance(decode(body), msgspec.Struct)


@given(st.binary(max_size=64))
@settings(max_examples=100, deadline=None)
def test_any_stream_is_cut_or_refused(stream: bytes) -> None:
    reader = m.FrameReader(bound=32)
    with contextlib.suppress(m.MalformedFrame):
        assert all(0 < len(body) <= 32 for body in reader.feed(stream))
