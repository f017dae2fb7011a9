"""Scrape /metrics while a cell is open (1 Hz in the design), in a separate process, and append one
record per scrape to the cell's metrics file (docs/artifacts.md).

A scrape takes CPU time of the server. At a fixed interval it could stay in phase with the arrivals
in one launch and out of phase in the next, so intervals are random (docs/decisions.md, "The study's
own scrapes").

Histogram buckets and `*_created` series are left out of `values`; the first and last scrape of a
cell keep the raw text, which holds everything.
"""

import json
import sys
import time
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import TextIO, cast

import httpx

from connector_tax.artifacts.cell_records import ScrapeLine
from connector_tax.artifacts.checks import SCRAPE_GAPS
from connector_tax.seeds import named_generator
from connector_tax.study.child import CommandChild, serve
from connector_tax.study.endpoint import Endpoint

# ---- the driver's end

SCRAPER_MODULE = "connector_tax.study.scraper"


class MetricsSampler(CommandChild):
    """The driver's interface to the sampler process; a context manager.

    Args:
        interval_s: mean interval of scrapes.
        cpus: the logical CPUs the sampler stays on; empty for all of its parent's.
        yields: scrape only while no other process wants the CPU; False if others always want it.
    """

    def __init__(
        self,
        endpoint: Endpoint,
        interval_s: float,
        cpus: Collection[int],
        *,
        yields: bool = True,
    ) -> None:
        access = json.dumps(endpoint.access)
        arguments = [endpoint.url, access, str(interval_s), str(int(yields)), *map(str, cpus)]
        super().__init__(SCRAPER_MODULE, arguments)

    def open(self, path: Path, seed: str) -> ScrapeLine:
        """Start a cell's file with a scrape, and return the scrape; `seed` draws the intervals."""
        return cast(ScrapeLine, self.ask("open", path=str(path), seed=seed))

    def peek(self) -> ScrapeLine:
        """Make an extra scrape now, and return the record."""
        return cast(ScrapeLine, self.ask("peek"))

    def close(self) -> ScrapeLine:
        """Scrape a last time with the raw text, end the cell's file, and return the record."""
        return cast(ScrapeLine, self.ask("close"))


# ---- the process

TIMEOUT_S = 5.0


def parse_metrics(text: str) -> dict[str, float]:
    """Return `{name{label="value",...}: number}` of a Prometheus text exposition, labels sorted by
    name.

    Histogram buckets and series' creation times are left out.

    Raises:
        ValueError: the text is not a Prometheus exposition.
    """
    # Imported late: the driver starts its server first.
    from prometheus_client.parser import text_string_to_metric_families

    values: dict[str, float] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            if sample.name.endswith(("_bucket", "_created")):
                continue
            labels = ",".join(f'{k}="{v}"' for k, v in sorted(sample.labels.items()))
            values[f"{sample.name}{{{labels}}}" if labels else sample.name] = sample.value
    return values


class Scraper:
    """The task of the scraping process; one file is open at a time."""

    def __init__(self, endpoint: Endpoint, interval_s: float) -> None:
        self._http = endpoint.client(TIMEOUT_S)
        # Without compression, which would take the server's CPU.
        self._http.headers["Accept-Encoding"] = "identity"
        self._interval_ns = int(interval_s * 1e9)
        self._file: TextIO | None = None
        self.due_ns: int | None = None

    def open(self, path: str, seed: str) -> ScrapeLine:
        """Begin a cell's file with a first scrape."""
        self._file = Path(path).open("w", encoding="utf-8")  # noqa: SIM115 - closed by `close`
        self._gaps = named_generator(seed)
        first = self._scrape(raw=True)
        self._wait_from(first["t_ns"])
        return first

    def work(self) -> None:
        """Scrape /metrics at the due time, and draw the next due time."""
        assert self.due_ns is not None
        self._scrape()
        self._wait_from(self.due_ns)

    def peek(self) -> ScrapeLine:
        """Make an extra scrape now."""
        return self._scrape()

    def close(self) -> ScrapeLine:
        """End the cell's file with a last scrape."""
        self.due_ns = None
        last = self._scrape(raw=True)
        assert self._file is not None
        self._file.close()
        return last

    def _wait_from(self, origin_ns: int) -> None:
        self.due_ns = origin_ns + int(self._interval_ns * self._gaps.uniform(*SCRAPE_GAPS))

    def _scrape(self, *, raw: bool = False) -> ScrapeLine:
        """Append a scrape to the file, with its text if `raw`; return it without the text."""
        started = time.monotonic_ns()
        record: ScrapeLine = {"t_ns": started, "ok": False, "scrape_ms": None, "values": {}}
        text: dict[str, str] = {}
        try:
            answer = self._http.get("/metrics")
            if answer.status_code != httpx.codes.OK:
                raise ValueError(f"/metrics answered {answer.status_code} {answer.reason_phrase}")
            page = answer.content.decode()
            record["values"] = parse_metrics(page)
            record["ok"] = True
            text = {"raw": page} if raw else {}
        except (httpx.HTTPError, ValueError) as error:
            record["error"] = f"{type(error).__name__}: {error}"
        record["scrape_ms"] = round((time.monotonic_ns() - started) / 1e6, 3)
        assert self._file is not None
        self._file.write(json.dumps({**record, **text}) + "\n")
        self._file.flush()
        return record


def main(argv: Sequence[str] | None = None) -> int:
    """Serve the commands of `MetricsSampler`.

    Args:
        argv: URL; access as JSON; mean interval in s; 1 to yield the CPU, or 0; then CPUs.
    """
    url, access, interval_s, yields, *cpus = argv if argv is not None else sys.argv[1:]
    endpoint = Endpoint(url, json.loads(access))
    return serve(
        "metrics sampler",
        list(map(int, cpus)),
        lambda: Scraper(endpoint, float(interval_s)),
        yields=yields == "1",
    )


if __name__ == "__main__":
    sys.exit(main())
