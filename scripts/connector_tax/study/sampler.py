"""The driver's end of the /metrics sampler, a process of its own (`study.scraper`), so that parsing
never delays the load generator.
"""

import json
import subprocess
import sys
from collections.abc import Collection
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from connector_tax.study.guard import die_with_parent

SCRAPER_MODULE = "connector_tax.study.scraper"


class SamplerError(Exception):
    """The sampler process ended while it was needed; what it printed says why."""


class MetricsSampler:
    """The driver's end of the sampler process; a context manager.

    Args:
        url: the server's root.
        interval_s: from one scrape to the next.
        cpus: the logical CPUs the sampler stays on; empty: wherever its parent may run.
    """

    def __init__(self, url: str, interval_s: float, cpus: Collection[int]) -> None:
        self._command = [sys.executable, "-m", SCRAPER_MODULE, url, str(interval_s)]
        self._command += map(str, cpus)

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
