"""Text that is safe to show on a terminal."""

from __future__ import annotations


def printable(text: str) -> str:
    """``text`` without what a terminal would obey: control characters but newline and tab are
    shown as the replacement character."""
    return "".join(
        char if char in "\n\t" or not (ord(char) < 32 or 127 <= ord(char) < 160) else "\ufffd"
        for char in text
    )
