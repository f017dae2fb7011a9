"""Injected connector taxes: what a configuration costs beside the plain engine, known exactly.

Source: 002 (hypotheses H1 to H6, step timing); issue 3, point 5.
"""

import asyncio
import contextlib
import os
import sys
import time
from dataclasses import dataclass

from connector_tax.engine.process import die_with_parent

_BURN_PERIOD_S = 0.02


@dataclass(frozen=True)
class ConnectorTax:
    """The taxes of one configuration. Times in microseconds for each step unless named otherwise.

    `build_meta_us_per_cached_block` is the part that grows with the blocks the prefix cache holds
    (H5: walks over the cache's keys). `kv_capacity_fraction` is the share of the KV blocks that is
    left, `background_cpu` the share of one core that a progress thread burns.
    """

    build_meta_us: float
    get_finished_us: float
    start_load_kv_us: float
    admission_us_per_request: float
    build_meta_us_per_cached_block: float
    kv_capacity_fraction: float
    background_cpu: float

    def build_meta(self, cached_blocks: int, admitted: int) -> float:
        """The time of build_meta in a step that admits `admitted` requests, in microseconds."""
        return (
            self.build_meta_us
            + self.build_meta_us_per_cached_block * cached_blocks
            + self.admission_us_per_request * admitted
        )


class BackgroundCpu:
    """A child process that burns a share of one core, as a connector's progress thread does."""

    def __init__(self, share: float) -> None:
        self._share = share
        self._process: asyncio.subprocess.Process | None = None

    async def start(self) -> None:
        """Launch the burner; a share of zero launches nothing."""
        if self._share > 0:
            self._process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", "connector_tax.engine.connectors"),
                *(str(self._share), str(os.getpid())),
            )

    async def stop(self) -> None:
        """End the burner."""
        if self._process is not None and self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                self._process.kill()
            await self._process.wait()


def _burn(share: float) -> None:
    while True:
        begin = time.monotonic()
        while time.monotonic() - begin < share * _BURN_PERIOD_S:
            pass
        time.sleep((1 - share) * _BURN_PERIOD_S)


if __name__ == "__main__":
    die_with_parent(int(sys.argv[2]))
    _burn(float(sys.argv[1]))
