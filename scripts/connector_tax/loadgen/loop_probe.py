"""An event loop's lateness."""

import asyncio
import time

from connector_tax.linux import TimerFd


class LoopProbe:
    """Measures an event loop's lag: how late it serves a tick that is due every 10 ms."""

    INTERVAL_NS = 10_000_000

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._timer = TimerFd(loop, self._tick)
        self.reset()

    def reset(self) -> None:
        """Start a new series."""
        self.lags_ns: list[int] = []
        self._cpu_ns = time.process_time_ns()
        self.start_ns = time.monotonic_ns()
        self._due_ns = self.start_ns + self.INTERVAL_NS
        self._timer.arm(self._due_ns, self.INTERVAL_NS)

    def values(self) -> dict[str, float]:
        """Return lag p99 and max in ms (0 before the first tick) and the process's CPU share."""
        lags = sorted(self.lags_ns) or [0]
        wall_ns = max(time.monotonic_ns() - self.start_ns, 1)
        return {
            "loop_lag_p99_ms": lags[min(len(lags) - 1, int(len(lags) * 0.99))] / 1e6,
            "loop_lag_max_ms": lags[-1] / 1e6,
            "cpu_share": (time.process_time_ns() - self._cpu_ns) / wall_ns,
        }

    def close(self) -> None:
        """Stop measuring."""
        self._timer.close()

    def _tick(self) -> None:
        late_ns = max(time.monotonic_ns() - self._due_ns, 0)
        # Every tick that a stuck loop missed counts, as late as it was: a hold-up of a second among
        # sixty is 1.7% of the samples.
        self.lags_ns += range(late_ns, -1, -self.INTERVAL_NS)
        self._due_ns += self.INTERVAL_NS * (1 + late_ns // self.INTERVAL_NS)
