"""The driver's end of the /metrics sampler, a process of its own (`study.scraper`), so that parsing
never delays the load generator.
"""

from collections.abc import Collection
from pathlib import Path
from typing import cast

from connector_tax.artifacts.cell_records import ScrapeLine
from connector_tax.study.child import CommandChild

SCRAPER_MODULE = "connector_tax.study.scraper"


class MetricsSampler(CommandChild):
    """The driver's end of the sampler process; a context manager.

    Args:
        url: the server's root.
        interval_s: from one scrape to the next, on average.
        cpus: the logical CPUs the sampler stays on; empty: wherever its parent may run.
    """

    def __init__(self, url: str, interval_s: float, cpus: Collection[int]) -> None:
        super().__init__(SCRAPER_MODULE, [url, str(interval_s), *map(str, cpus)])

    def open(self, path: Path, seed: str) -> ScrapeLine:
        """Start a cell's file with a first scrape; that scrape's record.

        The times from one scrape to the next are drawn from `seed`.
        """
        return cast(ScrapeLine, self.ask("open", path=str(path), seed=seed))

    def peek(self) -> ScrapeLine:
        """One more scrape, now; its record."""
        return cast(ScrapeLine, self.ask("peek"))

    def close(self) -> ScrapeLine:
        """A last scrape with its raw text, then end the cell's file; the scrape's record."""
        return cast(ScrapeLine, self.ask("close"))
