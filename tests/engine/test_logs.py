"""The step log and the truth log on a disk that takes no more: said, and no line torn."""

import asyncio
import contextlib
import json
import resource
from pathlib import Path

import psutil
import pytest

from connector_tax.engine.logs import LineLog, LogError
from tests.engine.serving import Launched, launched

LIMIT = 2000  # bytes; a record of the step log has about 280


def whole_lines(path: Path) -> list[object]:
    """The records of a log; an error if its last line is torn."""
    data = path.read_bytes()
    assert data.endswith(b"\n")
    return [json.loads(line) for line in data.splitlines()]


def limit_files(server: Launched, size: int) -> None:
    """Writes beyond `size` bytes of any file are cut short, then refused, as on a full disk."""
    psutil.Process(server.process.pid).rlimit(resource.RLIMIT_FSIZE, (size, size))


@pytest.mark.parametrize("log", ["step.scheduler.jsonl", "truth.jsonl"])
def test_a_log_that_cannot_be_written_ends_the_launch_and_is_named(
    tmp_path: Path, log: str
) -> None:
    steps = log.startswith("step")
    with launched(tmp_path, step_log=steps) as server:
        limit_files(server, LIMIT)
        # Steps fill their log during the request, its truth is written at its end.
        with contextlib.suppress(ConnectionResetError):
            list(server.raw(max_tokens=5000 if steps else 200))
        assert server.process.wait(10) == 1
    assert any(f"{tmp_path / log}: " in line for line in server.stderr), server.stderr
    assert "Traceback" not in "".join(server.stderr)
    assert whole_lines(tmp_path / log)


def test_a_log_that_fails_at_its_end_raises(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    before = resource.getrlimit(resource.RLIMIT_FSIZE)

    async def main() -> None:
        failures: list[LogError] = []
        log = LineLog(path, failures.append)
        for i in range(50):
            log.write({"i": i, "text": "x" * 90})
        resource.setrlimit(resource.RLIMIT_FSIZE, (LIMIT, before[1]))
        try:
            with pytest.raises(LogError, match=r"log\.jsonl: .*File too large"):
                log.close()
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, before)
        assert not failures

    asyncio.run(main())
    records = whole_lines(path)
    assert records == [{"i": i, "text": "x" * 90} for i in range(len(records))]
    assert 0 < len(records) < 50
