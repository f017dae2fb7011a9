"""Test a cell's time series: drawn records, and gaps."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from connector_tax.artifacts.folder import CellFolder
from connector_tax.artifacts.names import CellKey
from connector_tax.files import ArtifactError, sha256_file
from connector_tax.report.launches import LaunchReport
from connector_tax.report.series import COLUMNS, CellSeries, series_of

SECOND = 10**9


def _request(seq: int, *, ttft_ms: float, status: str = "ok") -> dict[str, Any]:
    """Return a request that is due at `seq` seconds, with ten tokens 2 ms apart."""
    due = seq * SECOND
    ok = status == "ok"
    first = due + int(ttft_ms * 1e6) if ok else None
    last = first + 18_000_000 if first is not None else None
    return {
        "seq": seq, "status": status, "t_intended_ns": due, "t_send_ns": due,
        "t_first_token_ns": first, "t_last_token_ns": last, "t_done_ns": last,
        "completion_tokens": 10 if ok else None,
    }  # fmt: skip


def _step(t_s: float, tokens: int, us: float) -> dict[str, Any]:
    return {
        "t_ns": int(t_s * SECOND), "step_id": int(10 * t_s), "process": "scheduler",
        "step_duration_us": 1.0, "build_meta_us": None, "get_finished_us": None,
        "start_load_kv_us": None, "prefill_tokens": 0, "decode_tokens": tokens,
        "engine_step_us": us,
    }  # fmt: skip


def _series(root: Path, records: dict[str, list[dict[str, Any]]]) -> CellSeries:
    """Return the series of a cell of 48 s, with parts of a second and a warm-up of 12 s."""
    folder = root / "runs" / "plain" / "block0" / "A" / "r4"
    folder.mkdir(parents=True)
    for kind, lines in records.items():
        text = "".join(json.dumps(line) + "\n" for line in lines)
        (folder / f"{kind}_A_r4.jsonl").write_text(text)
    window = {"t_origin_ns": 0, "t_warmup_end_ns": 12 * SECOND, "t_stop_ns": 48 * SECOND}
    files = {path.name: sha256_file(path) for path in folder.iterdir()}
    record: Any = {"window": window}
    key = CellKey("plain", 0, "A", "r4")
    cell = CellFolder(key, "valid", None, folder, files, record, 4.0, 256, 32)
    unmeasured = CellFolder(key, "missing", "no index.json", folder, {}, None, 8.0, 256, 32)
    (series,) = series_of(LaunchReport("A", "plain", 0, None, [cell, unmeasured]))
    return series


def test_only_recorded_quantities_are_drawn_over_time(tmp_path: Path) -> None:
    scrape = {"ok": True, "values": {
        'vllm:num_requests_waiting{engine="0"}': 3.0, 'vllm:num_requests_waiting{engine="1"}': 1.0,
        'vllm:num_requests_waiting_by_reason{reason="capacity"}': 9.0,
        'vllm:kv_cache_usage_perc{engine="0"}': 0.25, 'vllm:kv_cache_usage_perc{engine="1"}': 0.5,
    }}  # fmt: skip
    series = _series(
        tmp_path / "s",
        {
            "requests": [
                _request(0, ttft_ms=10), _request(1, ttft_ms=20), _request(2, ttft_ms=20),
                _request(5, ttft_ms=0, status="timeout"), _request(20, ttft_ms=5),
            ],
            "metrics": [{"t_ns": SECOND, **scrape}, {"t_ns": 2 * SECOND, "ok": False}],
            "engine_step": [_step(3.0, 4, 5000.0), _step(3.5, 4, 7000.0), _step(9.0, 0, 90.0)],
        },
    )  # fmt: skip
    drawn = dict(zip(COLUMNS, series.drawings, strict=True))
    known = {name: drawing for name, drawing in drawn.items() if drawing is not None}
    # From zero at the bottom, 16, to the largest at the top; nothing between 3 s and 20 s.
    assert known["TTFT, ms"].path == "M0 8h1V0h2M20 12h1"
    assert known["TTFT, ms"].words == "5 to 20"
    assert known["TPOT, ms"].words == "2"
    assert known["waiting"].words == "4"
    assert known["KV blocks used, %"].words == "50"
    assert known["engine step, ms"].path == "M3 0h1"
    assert known["engine step, ms"].words == "6"
    assert (series.warm, series.failed) == (12, "M5.5 16v-16")


def test_requests_in_flight_are_counted_in_the_middle_of_each_interval(tmp_path: Path) -> None:
    slow = [_request(seq, ttft_ms=2600) for seq in range(4)]
    series = _series(tmp_path / "s", {"requests": slow})
    in_flight = series.drawings[COLUMNS.index("in flight")]
    assert in_flight is not None
    # Each is there for 2.618 s: 1, 2, 3, 3, 2, 1, then none.
    assert in_flight.path == "M0 11h1V5h1V0h2V5h1V11h1V16h42"
    assert in_flight.words == "0 to 3"


def test_changed_raw_record_is_refused(tmp_path: Path) -> None:
    root = tmp_path / "s"
    cell = _series(root, {"requests": [_request(0, ttft_ms=10)]}).cell
    file = root / "runs/plain/block0/A/r4/requests_A_r4.jsonl"
    file.write_text(file.read_text().replace("10000000", "20000000"))
    with pytest.raises(ArtifactError, match="sha256"):
        series_of(LaunchReport("A", "plain", 0, None, [replace(cell, _kept={})]))
