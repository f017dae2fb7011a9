"""The /metrics sampler: a process of its own, so that parsing never delays the load generator.

It takes commands as JSON lines on standard input and answers each with one JSON line. While a cell
is open it scrapes on absolute deadlines (1 Hz in the design) and appends one record per scrape to
the cell's metrics file (CONTRACTS.md, `metrics`). Histogram buckets and `*_created` series are left
out of `values`; the first and last scrape of a cell keep the raw text, which holds everything.
"""

import json
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import httpx
from prometheus_client.parser import text_string_to_metric_families

from connector_tax.study.guard import die_with_parent


class SamplerError(Exception):
    """The sampler process ended while it was needed; what it printed says why."""


def parse_metrics(text: str) -> dict[str, float]:
    """`{name{label="value",...}: number}` of a Prometheus text exposition, labels sorted by name.

    Raises:
        ValueError: the text is not a Prometheus exposition.
    """
    values: dict[str, float] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            if sample.name.endswith(("_bucket", "_created")):
                continue
            labels = ",".join(f'{k}="{v}"' for k, v in sorted(sample.labels.items()))
            values[f"{sample.name}{{{labels}}}" if labels else sample.name] = sample.value
    return values


class _Scraper:
    """Serves the command loop and the periodic scrapes; one file is open at a time."""

    def __init__(self, url: str, interval_s: float) -> None:
        self._client = httpx.Client(trust_env=False, timeout=5.0)
        self._url = f"{url}/metrics"
        self._interval_ns = int(interval_s * 1e9)
        self._lock = threading.Lock()
        self._file: Any = None
        self._closing = threading.Event()
        self._thread: threading.Thread | None = None

    def scrape(self, *, raw: bool) -> dict[str, Any]:
        started = time.monotonic_ns()
        record: dict[str, Any] = {"t_ns": started, "ok": False, "scrape_ms": None, "values": {}}
        try:
            response = self._client.get(self._url)
            response.raise_for_status()
            record["values"] = parse_metrics(response.text)
            record["ok"] = True
            if raw:
                record["raw"] = response.text
        except (httpx.HTTPError, ValueError) as error:
            record["error"] = f"{type(error).__name__}: {error}"
        record["scrape_ms"] = round((time.monotonic_ns() - started) / 1e6, 3)
        with self._lock:
            if self._file is not None:
                self._file.write(json.dumps(record) + "\n")
                self._file.flush()
        return record

    def open(self, path: str) -> dict[str, Any]:
        self._file = Path(path).open("w", encoding="utf-8")  # noqa: SIM115 - closed by `close`
        first = self.scrape(raw=True)
        self._closing.clear()
        self._thread = threading.Thread(target=self._run, args=(first["t_ns"],), daemon=True)
        self._thread.start()
        return first

    def _run(self, origin_ns: int) -> None:
        due = origin_ns
        while True:
            due += self._interval_ns
            if self._closing.wait(max(0.0, (due - time.monotonic_ns()) / 1e9)):
                return
            self.scrape(raw=False)

    def close(self) -> dict[str, Any]:
        assert self._thread is not None
        self._closing.set()
        self._thread.join()
        last = self.scrape(raw=True)
        with self._lock:
            self._file.close()
            self._file = None
        return last


def _serve(url: str, interval_s: float) -> None:
    scraper = _Scraper(url, interval_s)
    for line in sys.stdin:
        command = json.loads(line)
        if command["do"] == "open":
            answer = scraper.open(command["path"])
        elif command["do"] == "peek":
            answer = scraper.scrape(raw=False)
        else:
            answer = scraper.close()
        answer.pop("raw", None)
        print(json.dumps(answer), flush=True)


class MetricsSampler:
    """The driver's end of the sampler process; a context manager."""

    def __init__(self, url: str, interval_s: float) -> None:
        self._command = [sys.executable, "-m", __name__, url, str(interval_s)]

    def __enter__(self) -> Self:
        self._process = subprocess.Popen(
            self._command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            preexec_fn=die_with_parent,
        )
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()

    def open(self, path: Path) -> dict[str, Any]:
        """Start a cell's file with a first scrape; that scrape's record."""
        return self._ask({"do": "open", "path": str(path)})

    def peek(self) -> dict[str, Any]:
        """One more scrape, now; its record."""
        return self._ask({"do": "peek"})

    def close(self) -> dict[str, Any]:
        """A last scrape with its raw text, then end the cell's file; the scrape's record."""
        return self._ask({"do": "close"})

    def _ask(self, command: dict[str, str]) -> dict[str, Any]:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(command) + "\n")
        self._process.stdin.flush()
        line = self._process.stdout.readline()
        if not line:
            raise SamplerError(f"the metrics sampler ended with status {self._process.wait()}")
        answer: dict[str, Any] = json.loads(line)
        return answer


def main(argv: Sequence[str] | None = None) -> int:
    """Serve commands for the server at argv[0], scraping every argv[1] seconds."""
    url, interval_s = argv if argv is not None else sys.argv[1:]
    try:
        _serve(url, float(interval_s))
    except OSError as error:
        print(f"metrics sampler: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
