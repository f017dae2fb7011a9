"""The engine's worker process: it answers in step order, and its end is noticed and named."""

import asyncio
import os
import signal
import time
from collections.abc import Awaitable, Callable
from dataclasses import replace

import psutil
import pytest

from connector_tax.engine.device import StepDevice, WorkerDied
from connector_tax.engine.model import StepClock, StepCost

COST = StepCost(100.0, 500.0, 1.0, 2.0, 0.0, 0.0, 0.0)


def run(body: Callable[[StepDevice, list[WorkerDied]], Awaitable[None]]) -> None:
    """Start a device, run `body`, stop; no task and no child process may be left over."""

    async def main() -> None:
        deaths: list[WorkerDied] = []
        device = StepDevice(COST, 1, 0.0, deaths.append)
        await device.start()
        try:
            await asyncio.wait_for(body(device, deaths), 20)
        finally:
            await asyncio.wait_for(device.stop(), 20)
        assert not psutil.Process().children()
        assert asyncio.all_tasks() == {asyncio.current_task()}

    asyncio.run(main())


def test_a_step_takes_its_cost_and_its_taxes() -> None:
    async def body(device: StepDevice, deaths: list[WorkerDied]) -> None:
        clock = StepClock(COST, 1)
        for shape in ((64, 0, 0), (0, 3, 200)):
            start = time.monotonic_ns()
            host_us, device_us = clock.draw_us(*shape)
            device_start, deadline = await device.spend(start, 50.0, 25.0, *shape)
            assert device_start - start == round((host_us + 50) * 1000)
            assert deadline - device_start == round((device_us + 25) * 1000)
        assert deaths == []

    run(body)


@pytest.mark.parametrize("idle", [True, False])
def test_a_worker_that_dies_is_reported_once(idle: bool) -> None:
    async def body(device: StepDevice, deaths: list[WorkerDied]) -> None:
        (worker,) = psutil.Process().children()
        start = time.monotonic_ns() + 60_000_000_000
        step = None if idle else asyncio.create_task(device.spend(start, 0.0, 0.0, 1, 0, 0))
        await asyncio.sleep(0)
        worker.send_signal(signal.SIGKILL)
        while not deaths:
            await asyncio.sleep(0.01)
        for call in (step, device.spend(start, 0.0, 0.0, 1, 0, 0)):
            if call is not None:
                with pytest.raises(WorkerDied, match=f"{worker.pid} ended unexpectedly"):
                    await call
        await device.stop()
        assert len(deaths) == 1

    run(body)


def test_a_worker_that_cannot_start_or_does_not_stop_is_named_and_ended() -> None:
    async def main() -> None:
        deaths: list[WorkerDied] = []
        bad = replace(COST, launch_offset_rel_sd="none")  # type: ignore[arg-type]
        device = StepDevice(bad, 1, 0.0, deaths.append)
        with pytest.raises(WorkerDied, match="ended unexpectedly"):
            await device.start()
        await device.stop()
        device = StepDevice(COST, 1, 0.0, deaths.append)
        await device.start()
        os.kill(psutil.Process().children()[0].pid, signal.SIGSTOP)
        await asyncio.wait_for(device.stop(), 20)
        assert deaths == []
        assert not psutil.Process().children()

    asyncio.run(main())
