"""Peak memory of a worker beside what it has to hold: weights, gradients, optimizer, activations.

    python benchmarks/memory.py [--preset 124m] [--json F]

Starts ``rtxd train`` and reads the run's own summary: the peak of each worker beyond an empty
worker, over the prediction for one micro-batch. Load of the machine does not disturb it. Small
presets miss the target, since what every worker needs (communication buffers, libraries' own
state, the interpreter's objects of the run) does not shrink with the model.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import tempfile
from pathlib import Path

import measure

TARGET = 1.1


def command(preset: str, workers: int, micro_batch: int, folder: Path) -> list[str]:
    return [
        measure.rtxd(),
        "train",
        "--model.preset",
        preset,
        "--workers",
        str(workers),
        "--run.device",
        "cpu",
        "--train.steps",
        "3",
        "--train.micro_batch",
        str(micro_batch),
        "--train.global_batch",
        str(micro_batch * workers),
        "--eval.samples",
        str(workers),
        "--eval.every",
        "0",
        "--run.dir",
        str(folder),
    ]


def figures(output: str) -> dict[str, object]:
    """Predicted and measured bytes out of the summary's line, and their ratio by rank."""
    line = next((x for x in output.splitlines() if "memory of the run" in x), "")
    predicted = re.search(r"predicted ([\d,.]+) MiB", line)
    measured = re.search(r"measured ([\d,. ]+) MiB by rank", line)
    shared = re.search(r"and ([\d,.]+) MiB of libraries", line)
    if predicted is None or measured is None:
        raise SystemExit(f"the run gave no summary of its memory:\n{output}")
    whole = _number(predicted[1])
    by_rank = [_number(text) for text in measured[1].split(", ")]
    return {
        "predicted_mib": whole,
        "measured_mib": by_rank,
        "shared_files_mib": _number(shared[1]) if shared else None,
        "ratio": [value / whole for value in by_rank],
        "line": line.strip(),
    }


def _number(text: str) -> float:
    return float(text.replace(",", ""))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--preset", default="124m")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--micro-batch", type=int, default=1)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="rtxd-memory-") as temporary:
        run = Path(temporary) / "run"
        line = command(options.preset, options.workers, options.micro_batch, run)
        done = subprocess.run(line, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        if done.returncode:
            raise SystemExit(done.stdout)
        found = figures(done.stdout)
        rows = [json.loads(row) for row in (run / "metrics.jsonl").read_text().splitlines()]
    print(found["line"])
    ratios = found["ratio"]
    assert isinstance(ratios, list)
    for rank, ratio in enumerate(ratios):
        print(
            f"rank {rank}: {ratio:.3f} of the prediction  [{measure.verdict(ratio, most=TARGET)}]"
        )
    raw = {"metrics": rows, "output": done.stdout}
    measure.write_json(
        options.json, measure.report("memory", figures=found, raw=raw, command=" ".join(line))
    )


if __name__ == "__main__":
    main()
