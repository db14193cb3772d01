"""Slurm's short form of host names: ``node[01-03,7],login2`` and the like."""

from __future__ import annotations

import itertools
import re

from rtx_distributed.errors import ClusterError

_MOST_HOSTS = 65536


def expand_nodelist(text: str) -> list[str]:
    """The hosts of a Slurm node list, in its order. Leading zeros stay; several brackets in one
    name multiply, the last one running fastest.

    Errors: ``ClusterError`` for a list that is malformed or names more than 65,536 hosts.
    """
    hosts: list[str] = []
    for part in _split(text):
        pieces = [_choices(piece, text) for piece in re.split(r"(\[[^\[\]]*\])", part) if piece]
        hosts += ["".join(names) for names in itertools.product(*pieces)]
        if len(hosts) > _MOST_HOSTS:
            raise ClusterError(f"node list `{text}` names more than {_MOST_HOSTS} hosts")
    return hosts


def _split(text: str) -> list[str]:
    """At the commas outside brackets."""
    parts = [part.strip() for part in re.split(r",(?![^\[]*\])", text.strip())]
    if not all(parts) or any(
        not re.fullmatch(r"[^\[\]]*(\[[^\[\]]+\][^\[\]]*)*", p) for p in parts
    ):
        raise ClusterError(f"node list `{text}` is malformed; it looks like `node[01-03,7],login2`")
    return parts


def _choices(piece: str, text: str) -> list[str]:
    if not piece.startswith("["):
        return [piece]
    names: list[str] = []
    for entry in piece[1:-1].split(","):
        found = re.fullmatch(r"(\d+)(?:-(\d+))?", entry.strip())
        if not found:
            raise ClusterError(f"node list `{text}` is malformed at `{entry}`: no number or range")
        first, last = found[1], found[2] or found[1]
        if int(last) < int(first):
            raise ClusterError(f"node list `{text}`: the range `{entry}` runs backwards")
        if int(last) - int(first) >= _MOST_HOSTS:
            raise ClusterError(f"node list `{text}` names more than {_MOST_HOSTS} hosts")
        names += [str(number).zfill(len(first)) for number in range(int(first), int(last) + 1)]
    return names
