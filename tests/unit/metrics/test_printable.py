"""What a terminal would obey is not shown to it."""

from __future__ import annotations

from rtx_distributed.metrics.printable import printable


def test_control_characters_are_replaced() -> None:
    text = "a\tb\n\x1bH\x05\x7f\x9b1mé漢\r"
    assert printable(text) == "a\tb\n\ufffdH\ufffd\ufffd\ufffd1mé漢\ufffd"
