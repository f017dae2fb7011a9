"""What a long run keeps: benchmarks/memory.py has how much that is."""

import tracemalloc
from array import array
from pathlib import Path

import numpy as np

from connector_tax.loadgen import RequestRecord
from connector_tax.loadgen.summary import PENDING_BYTES, RecordSink, _quantiles


def test_records_reach_the_file_before_they_fill_the_memory(tmp_path: Path) -> None:
    """Also where results come faster than lines are made, and it is never time to show progress."""
    path = tmp_path / "out.jsonl"
    sink = RecordSink(path)
    reads = array("q", range(10_000)).tobytes()
    taken = 0
    while taken * 50_000 < 3 * PENDING_BYTES:
        sink.take(RequestRecord(request_id="r", seq=taken, t_intended_ns=0, raw_reads=reads))
        taken += 1
    assert path.stat().st_size > PENDING_BYTES
    sink.close()
    assert path.read_bytes().count(b"\n") == taken


def test_percentiles_of_many_gaps_take_no_memory_for_intervals_that_nobody_asks_for() -> None:
    gaps = np.arange(1_000_000, dtype=np.float32)
    tracemalloc.start()
    row = _quantiles("ITL", gaps)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert (row["p50"], row["p99_interval"]) == (499_999.5, None)
    assert peak < gaps.nbytes / 10
