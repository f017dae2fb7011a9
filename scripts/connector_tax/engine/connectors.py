"""Add connector taxes: the exactly known costs of a configuration above the plain engine."""

import asyncio
import contextlib
import os
import sys
import time
from dataclasses import dataclass
from typing import Annotated

from connector_tax.artifacts.study_records import Fraction, NonNegative, meta
from connector_tax.linux import die_with_parent, ignore_warning

_BURN_PERIOD_S = 0.02


@dataclass(frozen=True)
class ConnectorTax:
    """The taxes of one configuration, in us per step unless named otherwise."""

    build_meta_us: NonNegative  #: in every schedule()
    get_finished_us: NonNegative  #: in every step
    start_load_kv_us: NonNegative  #: in every step, in the worker
    admission_us_per_request: NonNegative  #: in the step that admits it, as part of build_meta
    #: per cached block of the prefix cache, for a walk over its keys (H5)
    build_meta_us_per_cached_block: NonNegative
    kv_capacity_fraction: Fraction  #: remaining share of the KV blocks
    #: share of one core that a progress thread uses, CPU time over wall time; less on a busy core
    background_cpu: Annotated[float, meta(ge=0, le=0.9)]


def taxes_of_step(
    tax: ConnectorTax | None, cached_blocks: int, admitted: int
) -> tuple[float, float, float]:
    """Return build_meta, get_finished and start_load_kv (us) of a step that admits `admitted`
    requests.
    """
    if tax is None:
        return 0.0, 0.0, 0.0
    build_meta = (
        tax.build_meta_us
        + tax.build_meta_us_per_cached_block * cached_blocks
        + tax.admission_us_per_request * admitted
    )
    return build_meta, tax.get_finished_us, tax.start_load_kv_us


class BackgroundCpu:
    """A child process that uses a share of one core, as a connector's progress thread does."""

    def __init__(self, share: float) -> None:
        self._share = share
        self._process: asyncio.subprocess.Process | None = None

    async def start(self) -> None:
        """Start the child process and wait until it runs; a share of zero starts nothing.

        Raises:
            RuntimeError: the child ended before it began.
        """
        if self._share <= 0:
            return
        self._process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "connector_tax.engine.connectors"),
            *(str(self._share), str(os.getpid())),
            stdout=asyncio.subprocess.PIPE,
        )
        assert self._process.stdout is not None
        if not await self._process.stdout.readline():
            status = await self._process.wait()
            raise RuntimeError(f"the background load ended with status {status} before it began")

    async def stop(self) -> None:
        if self._process is not None and self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                self._process.kill()
            await self._process.wait()


def _burn(share: float) -> None:
    """Use `share` of each period as CPU time, including the cost of sleeping and waking."""
    target = time.process_time()
    end = time.monotonic()
    while True:
        end = max(end, time.monotonic()) + _BURN_PERIOD_S
        target += share * _BURN_PERIOD_S
        while (spent := time.process_time()) < target and time.monotonic() < end:
            pass
        # CPU time that a busy machine did not grant is not made up later.
        target = min(target, spent)
        time.sleep(max(0.0, end - time.monotonic()))


if __name__ == "__main__":
    die_with_parent(int(sys.argv[2]))
    ignore_warning()
    print("burning", flush=True)
    _burn(float(sys.argv[1]))
