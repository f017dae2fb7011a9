"""What of the engine's step log a cell keeps."""

from pathlib import Path

from connector_tax.study.server import STEP_LOG_PREFIX, STEP_LOG_PROCESSES
from connector_tax.study.steplog import StepLog


def lines(*stamps: int) -> bytes:
    return b"".join(b'{"t_ns":%d}\n' % stamp for stamp in stamps)


def test_a_cell_takes_the_whole_records_written_since_its_start(tmp_path: Path) -> None:
    scheduler, worker = (tmp_path / f"{STEP_LOG_PREFIX}.{p}.jsonl" for p in STEP_LOG_PROCESSES)
    log = StepLog(tmp_path, "embedded")
    before = lines(1, 2)
    scheduler.write_bytes(before)
    log.mark()
    scheduler.write_bytes(before + lines(8, 10, 9, 12) + b'{"t_ns":13')
    # All of it is from before the first request, and the file was not there at the start.
    worker.write_bytes(lines(8, 9))
    assert log.take(origin_ns=10, drained_ns=0) == lines(10, 9, 12)
    log.remove()
    assert not list(tmp_path.iterdir())
