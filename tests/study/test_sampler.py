"""The /metrics sampler against a real server: when it scrapes, and what it keeps."""

import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import pairwise
from pathlib import Path

import pytest

from connector_tax.files import read_jsonl
from connector_tax.study.scraper import MetricsSampler

PAGE = b"# TYPE vllm:num_requests_waiting gauge\nvllm:num_requests_waiting 3\n"
INTERVAL_S = 0.3
SCRAPES = 17


class _Metrics(BaseHTTPRequestHandler):
    enough = threading.Event()
    answered = 0

    def do_GET(self) -> None:
        self.send_response(200)
        self.send_header("Content-Length", str(len(PAGE)))
        self.end_headers()
        self.wfile.write(PAGE)
        type(self).answered += 1
        if self.answered >= SCRAPES:
            self.enough.set()

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def url() -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Metrics)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()
    thread.join()


def test_scrapes_keep_no_step_with_regular_arrivals(url: str, tmp_path: Path) -> None:
    log = tmp_path / "metrics.jsonl"
    with MetricsSampler(url, INTERVAL_S, ()) as sampler:
        began = time.monotonic()
        sampler.open(log, "7/arrivals/block0/A/r8/scrapes")
        assert _Metrics.enough.wait(60)
        took = time.monotonic() - began
        sampler.close()
    records = list(read_jsonl(log))
    assert all(record["values"] == {"vllm:num_requests_waiting": 3.0} for record in records)
    assert [i for i, record in enumerate(records) if "raw" in record] == [0, len(records) - 1]
    # The last one is made when the cell closes.
    gaps = [(b["t_ns"] - a["t_ns"]) / 1e9 / INTERVAL_S for a, b in pairwise(records[:-1])]
    assert min(gaps) < 0.75
    assert max(gaps) > 1.25
    # They are as many as at a fixed interval.
    assert took / (SCRAPES - 1) > 0.7 * INTERVAL_S
