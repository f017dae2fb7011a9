"""Speed of the analysis at scale: ingest and aggregate.

Writes a study of 10 million step records and 1 million requests into a temporary folder (every cell
links the same raw files), runs the aggregate command on it in a process of its own, at three sizes,
and sets it against pandas.read_json(lines=True) merely parsing the files.
"""

import argparse
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace

import pandas as pd

from benchmarks import run_alone
from benchmarks.analysis_study import BLOCKS, CONFIGS, write_study
from connector_tax.machine import machine


def scale(steps: int, requests: int) -> None:
    """Time the aggregate command on a quarter, a half and the whole of the records."""
    cells = len(CONFIGS) * BLOCKS
    print(f"ingest and aggregate, {cells} cells")
    print("  step records    requests     raw MB    wall s    CPU s   peak MB   us/record")
    whole: SimpleNamespace | None = None
    for part in (4, 2, 1):
        with tempfile.TemporaryDirectory(prefix="connector-tax-bench-") as folder:
            study, raw_mb = write_study(
                Path(folder), steps // part // cells, requests // part // cells
            )
            used = run_aggregate(study)
            if part == 1:
                pandas_s = pandas_baseline(study) * cells
                whole = used
        records = (steps + requests) // part
        print(
            f"  {steps // part:12,} {requests // part:11,} {raw_mb:10,.0f} {used.wall_s:9.2f}"
            f" {used.cpu_s:8.2f} {used.peak_mb:9.0f} {1e6 * used.wall_s / records:11.2f}"
        )
    assert whole is not None
    print(f"  pandas.read_json(lines=True), parsing alone: {pandas_s:.1f} s, scaled from one cell")
    print(f"  ratio {pandas_s / whole.wall_s:.1f}   (wanted: under 60 s and 2,000 MB)")


def run_aggregate(study: Path) -> SimpleNamespace:
    """Run the aggregate command; its wall and CPU seconds and its peak resident size in MiB."""
    code = (
        "import resource, sys; from connector_tax.analysis.aggregate import main;"
        f"status = main(['--study', {str(study)!r}]);"
        "print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss); sys.exit(status)"
    )
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    start = time.perf_counter()
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    wall_s = time.perf_counter() - start
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu_s = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    peak_mb = int(done.stdout.split()[-1]) / 1024
    return SimpleNamespace(wall_s=wall_s, cpu_s=cpu_s, peak_mb=peak_mb)


def pandas_baseline(study: Path) -> float:
    """Seconds pandas needs to parse the raw files of one cell."""
    folder = study.parent / "runs" / "plain" / "block0" / "A" / "r100"
    start = time.perf_counter()
    for kind in ("requests", "engine_step"):
        pd.read_json(folder / f"{kind}_A_r100.jsonl", lines=True)
    return time.perf_counter() - start


def main(argv: Sequence[str] | None = None) -> int:
    """Print the benchmark tables of the analysis."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.analysis", description=main.__doc__)
    parser.add_argument("--steps", type=int, default=10_000_000, help="step records")
    parser.add_argument("--requests", type=int, default=1_000_000, help="requests")
    arguments = parser.parse_args(argv)
    print(machine("polars", "numpy"))
    scale(arguments.steps, arguments.requests)
    return 0


if __name__ == "__main__":
    sys.exit(run_alone(main))
