"""The batched service: the source's example, then latency and throughput beside mpservice."""

import asyncio
import math
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from importlib import import_module
from importlib.metadata import version
from importlib.util import find_spec
from typing import Any

import numpy as np

from benchmarks import take_turns
from connector_tax.engine.batching import BatchedService
from connector_tax.engine.transformer import VectorTransformer

mpserver: Any = import_module("mpservice.mpserver") if find_spec("mpservice") else None

# The source is an example of a batched service; its seconds, one after the other and at once.
_ITEMS = 880
_SOURCE_S = (90.9173553609944, 0.12375942600192502)
_BATCH = 200
_QUEUE = 32
_WAIT_S = 0.002
_LIGHT_CALLS = 300
_HEAVY_CALLS = 20_000

DoOne = Callable[[int], Awaitable[int]]
AsyncContext = AbstractAsyncContextManager[DoOne]


class Squares(VectorTransformer):
    """The example transformer: squares, after `pause_s * ln(1 + batch size)` seconds."""

    def __init__(self, pause_s: float) -> None:
        self._pause_s = pause_s

    def transform(self, prepared: list[int]) -> list[int]:
        """The squares."""
        if self._pause_s:
            time.sleep(self._pause_s * math.log(len(prepared) + 1))
        return [x * x for x in prepared]


class SquaresWorker(mpserver.Worker if mpserver else object):  # type: ignore[misc]
    """The same for PyPI's `mpservice`, for comparison."""

    def call(self, x: list[int]) -> list[int]:
        """The squares."""
        return [v * v for v in x]


async def _source_example() -> None:
    service = BatchedService(_BATCH, 0.1, _QUEUE)
    await service.start(Squares, {"pause_s": 0.001})
    try:
        data = list(range(_ITEMS))
        begin = time.monotonic()
        batched = await asyncio.gather(*(service.do_one(x) for x in data))
        batched_s = time.monotonic() - begin
        begin = time.monotonic()
        sequential = [await service.do_one(x) for x in data]
        sequential_s = time.monotonic() - begin
    finally:
        await service.stop()
    assert batched == sequential == [x * x for x in data]
    print(f"\n{_ITEMS} squares, batches of {_BATCH}, timeout 0.1 s{'':7}here{'':10}source")
    print(f"  one after the other, s {sequential_s:25.2f} {_SOURCE_S[0]:15.2f}")
    print(f"  all at once, s         {batched_s:25.4f} {_SOURCE_S[1]:15.4f}")
    ratio = sequential_s / batched_s
    print(f"  ratio                  {ratio:25.0f} {_SOURCE_S[0] / _SOURCE_S[1]:15.0f}", flush=True)


@asynccontextmanager
async def _ours(batch_size: int, wait_s: float) -> AsyncIterator[DoOne]:
    service = BatchedService(batch_size, wait_s, _QUEUE)
    await service.start(Squares, {"pause_s": 0.0})
    try:
        yield service.do_one
    finally:
        await service.stop()


@asynccontextmanager
async def _mpservice(batch_size: int, wait_s: float) -> AsyncIterator[DoOne]:
    servlet = mpserver.ProcessServlet(
        SquaresWorker, cpus=[None], batch_size=batch_size, batch_wait_time=wait_s
    )
    async with mpserver.AsyncServer(servlet, capacity=_HEAVY_CALLS) as server:
        yield server.call


async def _light(do_one: DoOne) -> tuple[float, float]:
    """p50 and p99 of what a lone call takes beyond the batch's waiting time, in microseconds."""
    extra = []
    for x in range(_LIGHT_CALLS):
        begin = time.monotonic_ns()
        assert await do_one(x) == x * x
        extra.append((time.monotonic_ns() - begin) / 1e3 - _WAIT_S * 1e6)
    p50, p99 = np.percentile(extra, [50, 99])
    return float(p50), float(p99)


async def _heavy(do_one: DoOne) -> float:
    """Calls answered in a second, all asked at once."""
    begin = time.monotonic()
    results = await asyncio.gather(*(do_one(x) for x in range(_HEAVY_CALLS)))
    assert results == [x * x for x in range(_HEAVY_CALLS)]
    return _HEAVY_CALLS / (time.monotonic() - begin)


async def _measure(
    make: Callable[[int, float], AsyncContext],
) -> tuple[float, float, float]:
    async with make(_BATCH, _WAIT_S) as do_one:
        await do_one(1)
        return (*await _light(do_one), await _heavy(do_one))


async def run(rounds: int) -> None:
    """Print both tables."""
    contenders: dict[str, Callable[[int, float], AsyncContext]] = {"batched service": _ours}
    if mpserver is None:
        print("mpservice is not installed here: no comparison with it")
    else:
        contenders[f"mpservice {version('mpservice')}"] = _mpservice
    rows: dict[str, list[tuple[float, float, float]]] = {name: [] for name in contenders}
    for _ in range(rounds):
        for name, make in contenders.items():
            rows[name].append(await _measure(make))
    print(
        f"\nsquares without a pause, batches of {_BATCH}, timeout {_WAIT_S * 1000:g} ms, median of "
        f"{rounds} rounds in turn\n{'':20}{'a lone call beyond its timeout':>34}"
        f"{f'{_HEAVY_CALLS} calls at once':>24}\n"
        f"{'':20}{'p50 us':>17}{'p99 us':>17}{'calls/s':>24}"
    )
    table = {name: np.median(values, axis=0) for name, values in rows.items()}
    for name, (p50, p99, rate) in table.items():
        print(f"{name:20}{p50:17.0f}{p99:17.0f}{rate:24.0f}")
    if len(table) == 2:
        ours, theirs = table.values()
        ratios = (theirs[0] / ours[0], theirs[1] / ours[1], ours[2] / theirs[2])
        print(f"{'times better':20}{ratios[0]:17.1f}{ratios[1]:17.1f}{ratios[2]:24.1f}")
    await _source_example()


if __name__ == "__main__":
    sys.exit(take_turns("batching", __doc__, run))
