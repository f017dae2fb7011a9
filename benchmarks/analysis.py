"""Speed of the analysis: the bootstrap, and ingest and aggregate at scale.

`bootstrap` times the intervals of a design of 8 configurations x 9 shapes against the plain loop
that builds each resample. `scale` writes a study of 10 million step records and 1 million requests
into a temporary folder (every cell links the same raw files), runs the aggregate command on it in
a process of its own, at three sizes, and sets it against pandas.read_json(lines=True) merely
parsing the files.
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
from typing import Any

import numpy as np
import pandas as pd

from benchmarks import run_alone
from benchmarks.analysis_study import (
    BLOCKS,
    CONFIGS,
    RESAMPLES,
    STATISTICS,
    write_study,
)
from connector_tax.analysis.effects import TaxTable
from connector_tax.analysis.measure import Requests
from connector_tax.analysis.samples import chunk_seconds, sample_launch
from connector_tax.artifacts.metrics import LATENCY_METRICS, METRICS
from connector_tax.artifacts.names import CellKey
from connector_tax.artifacts.study_file import Study
from connector_tax.machine import machine


def synthetic_requests(rng: np.random.Generator, n: int) -> Requests:
    """n lognormal requests, evenly spaced over 60 s."""
    ttft, tpot = (base * np.exp(rng.normal(0, 0.3, n)) for base in (50.0, 8.0))
    return Requests(
        ttft_ms=ttft,
        ttft_from_send_ms=ttft,
        tpot_ms=tpot,
        e2e_ms=ttft + 63 * tpot,
        since_warmup_s=np.arange(n) * 60 / n,
        window_s=60.0,
        arrivals=n,
        failed=0,
        dropped=0,
    )


def bootstrap(blocks: int, n: int) -> None:
    """Time sampling and all intervals of 8 configurations x 9 shapes."""
    rng = np.random.default_rng(1)
    shapes = [f"{i}x{o}" for i in (512, 4096, 32768) for o in (64, 256, 1024)]
    keys = [
        CellKey(config, block, "B", shape)
        for config in CONFIGS[:8]
        for block in range(blocks)
        for shape in shapes
    ]
    requests = {key: synthetic_requests(rng, n) for key in keys}
    start = time.perf_counter()
    chunk_s = chunk_seconds(requests, STATISTICS["chunk_s"])
    samples = {
        key: sample_launch(r, RESAMPLES, chunk_s[key.phase, key.cell], 1, key)
        for key, r in requests.items()
    }
    sampled_s = time.perf_counter() - start
    order = [
        {"config": config, "block": block} for block in range(blocks) for config in CONFIGS[:8]
    ]
    document: Any = {
        "blocks": blocks,
        "seed": 1,
        "config": {"statistics": STATISTICS},
        "run_order": {"B": order},
    }
    table = TaxTable(Study(Path(), document), [], samples, {})
    for config in CONFIGS[1:8]:
        for shape in shapes:
            for metric in METRICS:
                table.tax(config, "B", shape, metric)
    total_s = time.perf_counter() - start
    some = requests[keys[0]]
    start = time.perf_counter()
    for _ in range(RESAMPLES // 10):
        chosen = rng.integers(0, n, n)
        for metric in METRICS:
            of = LATENCY_METRICS[metric]
            np.percentile(getattr(some, of.latency)[chosen], of.percent)
    loop_s = (time.perf_counter() - start) * 10 * len(keys)
    print(f"bootstrap, 8 configurations x 9 shapes x {RESAMPLES} resamples")
    print(f"  {blocks} blocks, {n} requests a cell, {len(METRICS)} metrics, one thread")
    print(f"  sampling {sampled_s:7.2f} s   intervals {total_s - sampled_s:6.2f} s")
    print(f"  total    {total_s:7.2f} s   (wanted: under 30 s)")
    print(f"  loop     {loop_s:7.2f} s   resample by resample, scaled from 1 cell x 200 resamples")
    print(f"  ratio    {loop_s / total_s:7.1f}")


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
    parser.add_argument("what", choices=["bootstrap", "scale", "all"])
    parser.add_argument("--blocks", type=int, default=3, help="launches of each configuration")
    parser.add_argument("--per-cell", type=int, default=240, help="requests in a bootstrap cell")
    parser.add_argument("--steps", type=int, default=10_000_000, help="step records (scale)")
    parser.add_argument("--requests", type=int, default=1_000_000, help="requests (scale)")
    arguments = parser.parse_args(argv)
    print(machine("polars", "numpy"))
    if arguments.what in ("bootstrap", "all"):
        bootstrap(arguments.blocks, arguments.per_cell)
    if arguments.what in ("scale", "all"):
        scale(arguments.steps, arguments.requests)
    return 0


if __name__ == "__main__":
    sys.exit(run_alone(main))
