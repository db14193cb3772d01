"""Building the index of a text file of 1 GB: the memory it takes, and the start after it.

    python benchmarks/index.py [--megabytes 1000] [--json F]

Each start is a process of its own. Memory is what the process owns (RssAnon), sampled while the
index is built, above what it owned before. The file and the index lie in a temporary folder.
"""

from __future__ import annotations

import argparse
import json
import random
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import measure

MOST_MEMORY_MB = 200.0
MOST_SECONDS = 1.0


def write_text(path: Path, *, megabytes: int) -> None:
    """Lines of random words, another 8 MB block shuffled for each block of the file."""
    generator = random.Random(0)
    words = ["".join(generator.choices("abcdefghijklmnop", k=7)) for _ in range(4096)]
    lines = [" ".join(generator.choices(words, k=12)) + "\n" for _ in range(80_000)]
    written = 0
    with path.open("w") as file:
        while written < megabytes * 10**6:
            generator.shuffle(lines)
            written += file.write("".join(lines))


def open_once(path: Path, cache: Path) -> dict[str, float]:
    """In a fresh process: opens the data and tells how long that took and what it needed."""
    from rtx_distributed.config import DataConfig
    from rtx_distributed.data.sources import open_dataset

    base = measure.status_kib("self", "RssAnon")
    most = base
    over = threading.Event()

    def watch() -> None:
        nonlocal most
        while not over.wait(0.01):
            most = max(most, measure.status_kib("self", "RssAnon"))

    watcher = threading.Thread(target=watch)
    watcher.start()
    start = time.perf_counter()
    opened = open_dataset(
        DataConfig(path=path, cache_dir=cache), sequence_length=1024, eval_samples=256
    )
    seconds = time.perf_counter() - start
    over.set()
    watcher.join()
    return {
        "seconds": seconds,
        "above_start_kib": most - base,
        "start_kib": base,
        "windows": len(opened.train),
    }


def start(path: Path, cache: Path) -> dict[str, float]:
    line = [sys.executable, __file__, "--open", str(path), str(cache)]
    done = subprocess.run(line, stdout=subprocess.PIPE, text=True, check=True)
    found: dict[str, float] = json.loads(done.stdout)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--megabytes", type=int, default=1000)
    parser.add_argument("--open", nargs=2, type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    if options.open:
        print(json.dumps(open_once(*options.open)))
        return
    with tempfile.TemporaryDirectory(prefix="rtxd-index-") as temporary:
        path, cache = Path(temporary) / "corpus.txt", Path(temporary) / "cache"
        write_text(path, megabytes=options.megabytes)
        size = path.stat().st_size
        first = start(path, cache)
        later = [start(path, cache) for _ in range(5)]
    memory = first["above_start_kib"] * 1024 / 1e6
    seconds = measure.spread([x["seconds"] for x in later])
    print(f"{size / 1e9:.2f} GB of text, {first['windows']:,.0f} windows")
    print(
        f"first start: {first['seconds']:.1f} s, {first['above_start_kib']:,.0f} KB above the "
        f"{first['start_kib']:,.0f} KB before  [{measure.verdict(memory, most=MOST_MEMORY_MB)} MB]"
    )
    print(f"later starts: {seconds} s  [{measure.verdict(seconds.median, most=MOST_SECONDS)}]")
    figures = {
        "file_bytes": size,
        "first_seconds": first["seconds"],
        "memory_above_start_mb": memory,
        "later_seconds": seconds.plain(),
    }
    raw = {"first": first, "later": later}
    measure.write_json(options.json, measure.report("index", figures=figures, raw=raw))


if __name__ == "__main__":
    main()
