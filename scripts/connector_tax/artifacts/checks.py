"""The checks that a valid cell must pass: their names, bounds, and texts for failures.

`analysis.validity` computes them, and the audit recomputes them from the raw records. The load
generator's own command uses the same bounds.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Literal, NamedTuple

from connector_tax.ranks import at_least, percentile_of

if TYPE_CHECKING:
    from connector_tax.artifacts.cell_records import CheckRecord, GeneratorHealth


class Bound(NamedTuple):
    """A key of the `validity` section: its default and its meaning.

    Attributes:
        most: the largest allowed value; None for no limit.
        zero: whether 0 is allowed.
    """

    default: float
    meaning: str
    most: float | None = None
    zero: bool = False

    def schema(self) -> dict[str, float | str]:
        """Return the JSON schema of the key."""
        limits = {"minimum" if self.zero else "exclusiveMinimum": 0.0}
        limits |= {} if self.most is None else {"maximum": self.most}
        meaning = f"{self.meaning}; {self.default:g} where it is not set"
        return {"type": "number", "description": meaning, **limits}


class CheckKind(NamedTuple):
    """One check, which a cell's `health` records under its name.

    Attributes:
        void: what is wrong if it fails.
        bounds: its configurable bounds; empty if the bound is fixed.
        machine: applies only to cells whose machine was watched.
        device: applies only if this is the engine's device.
        counter: applies only to a server that counts under vLLM's names.
        loop: applies only to open-loop or only to closed-loop cells; None for both.
    """

    void: str
    bounds: Mapping[str, Bound] = {}
    machine: bool = False
    device: str | None = None
    counter: bool = False
    loop: Literal["open", "closed"] | None = None


_FOREIGN_CPU = {
    "max_foreign_cpu": Bound(
        0.1,
        "share of a CPU set's time that processes of others used while the cell was sampled",
        most=1,
    )
}
CHECKS: Mapping[str, CheckKind] = {
    "schedule_lag_p99_ms": CheckKind(
        "requests were written later than scheduled (p99)",
        {
            "schedule_lag_p99_ms": Bound(
                2.0, "delay of sends: lower end of the 95% interval of the 99th percentile"
            ),
            "schedule_lag_ttft_fraction": Bound(
                0.02, "or this share of the TTFT median, whichever is larger", most=1
            ),
        },
        loop="open",
    ),
    "early_send_ms": CheckKind("a request was written before its scheduled time", loop="open"),
    "sent_rate_ratio": CheckKind(
        "the sent rate departs from the schedule", {
            "sent_rate_tolerance": Bound(
                0.01, "relative departure of the sent rate from the schedule, both ways", most=1
            )
        },
        loop="open",
    ),
    "unaccounted_requests": CheckKind(
        "scheduled requests without exactly one outcome", loop="open"
    ),
    "idle_places": CheckKind(
        "the load generator kept fewer requests in flight than asked for", loop="closed"
    ),
    "error_rate": CheckKind(
        "too many requests failed",
        {
            "max_error_rate": Bound(
                0.01, "failed requests divided by answered or failed requests", most=1, zero=True
            )
        },
    ),
    "window_s": CheckKind("the window was cut short, or is longer than its cap"),
    "measured_ok": CheckKind("too few requests of the window succeeded"),
    "server_success_excess": CheckKind(
        "successes counted by client and server differ", counter=True
    ),
    "server_prompt_tokens_excess": CheckKind(
        "prompt tokens counted by client and server differ", counter=True
    ),
    "server_generation_tokens_excess": CheckKind(
        "generated tokens counted by client and server differ", counter=True
    ),
    "prefix_cache_hits": CheckKind("the prefix cache was hit", counter=True),
    "external_prefix_cache_hits": CheckKind("the external prefix cache was hit", counter=True),
    "loop_lag_p99_ms": CheckKind(
        "an event loop of the load generator lagged", {
            "loop_lag_p99_ms": Bound(
                5.0,
                "event-loop lag of each load-generator process, lower end of the 99th percentile's"
                " 95% interval",
            )
        }
    ),
    "loop_lag_max_ms": CheckKind(
        "an event loop of the load generator stood still", {
            "loop_lag_max_ms": Bound(100.0, "longest stall of an event loop of the load generator")
        }
    ),
    "cpu_share": CheckKind(
        "a process of the load generator was short of CPU", {
            "max_cpu_share": Bound(
                0.9, "CPU seconds per second of each load-generator process", most=1
            )
        }
    ),
    "workers_died": CheckKind("workers of the load generator died"),
    "silent_workers": CheckKind("workers of the load generator died or did not tell their health"),
    "unopened_connections": CheckKind(
        "connections to the server could not be opened before the cell"
    ),
    "unstamped_reads": CheckKind("reads lack the kernel's stamp though the clock is the kernel's"),
    "lost_messages": CheckKind("messages were dropped, undecodable or oversized"),
    "metrics_scrapes": CheckKind(
        "/metrics was not read inside the window, or a scrape failed", counter=True
    ),
    "suspended_ms": CheckKind("the machine was suspended"),
    "foreign_cpu_server": CheckKind(
        "machine disturbed: other processes used the server's CPUs",
        _FOREIGN_CPU,
        machine=True,
    ),
    "foreign_cpu_loadgen": CheckKind(
        "machine disturbed: other processes used the load generator's CPUs",
        _FOREIGN_CPU,
        machine=True,
    ),
    # If the kernel counts it.
    "throttled_periods": CheckKind(
        "machine disturbed: the control group's CPU quota was used up", machine=True
    ),
    # On GPUs, if nvidia-smi reports it.
    "foreign_gpu_processes": CheckKind(
        "machine disturbed: processes of others were on the study's GPUs", machine=True
    ),
    # On GPUs, if nvidia-smi reports it.
    "gpu_slowed": CheckKind(
        "a GPU was slowed by its heat or its power supply", machine=True, device="cuda"
    ),
    "gpu_clock_share": CheckKind(
        "a GPU ran far below its highest clock",
        {
            "min_gpu_clock_share": Bound(
                0.6, "a busy GPU's median SM clock in a cell, divided by its highest clock", most=1
            )
        },
        machine=True,
        device="cuda",
    ),
    "device_log_faults": CheckKind(
        "steps of the emulated device are missing, or are not where its queue has them",
        device="emulated",
    ),
    "device_woken_late_ms": CheckKind(
        "the host went on too late after a step of the emulated device (p50): its core is too slow,"
        " or busy",
        {
            "max_woken_late_ms": Bound(
                0.1, "median delay from the end of an emulated step to the host's wake-up"
            )
        },
        device="emulated",
    ),
    # Baseline only: idle time of the device under other configurations is the measured cost.
    "device_exposed_share": CheckKind(
        "the baseline left the emulated device idle between steps: its core is too slow for this"
        " device, or busy", {
            "max_exposed_share": Bound(
                0.03,
                "share of the steps before which the baseline left an emulated device idle though"
                " it had work",
                most=1,
            )
        },
        device="emulated",
    ),
}  # fmt: skip
MACHINE_CHECKS = tuple(name for name, check in CHECKS.items() if check.machine)
COUNTER_CHECKS = tuple(name for name, check in CHECKS.items() if check.counter)
LOOP_CHECKS = {
    loop: tuple(name for name, check in CHECKS.items() if check.loop == loop)
    for loop in ("open", "closed")
}
DEVICE_CHECKS = tuple(name for name, check in CHECKS.items() if check.device == "emulated")


def _bounds(device: str | None) -> dict[str, float]:
    kinds = [check for check in CHECKS.values() if check.device == device]
    return {key: bound.default for check in kinds for key, bound in check.bounds.items()}


# Default bounds of the `validity` section; the second only for an emulated device.
BOUNDS: Mapping[str, float] = _bounds(None)
DEVICE_BOUNDS: Mapping[str, Mapping[str, float]] = {d: _bounds(d) for d in ("cuda", "emulated")}
# Allowed share of reads without a stamp: setting the wall clock removes it from reads in progress.
UNSTAMPED_SHARE_MAX = 0.01
# Two clocks cannot be read at the same moment; a real suspend lasts seconds.
SUSPENDED_MS_MAX = 100
# The share of its places' time that a closed loop may leave empty between two requests.
IDLE_PLACES_MAX = 0.05
# The shortest and longest time between two scrapes of /metrics, as multiples of the interval.
SCRAPE_GAPS = (0.5, 1.5)
# Counters of every load-generator process; the main process also counts late results.
LOST_COUNTS = ("undecodable", "oversized", "dropped_messages")


def at_most(value: float | None, bound: float) -> CheckRecord:
    """Return a check that passes with a value of at most `bound`; None never passes."""
    return {"value": value, "bound": bound, "pass": value is not None and value <= bound}


def schedule_check(
    lags_ms: Sequence[float], ttfts_ms: Sequence[float], bounds: Mapping[str, float]
) -> CheckRecord:
    """Check the p99 of send lateness; it fails if the p99 is significantly above its bound.

    Among fewer than a hundred requests the p99 is the latest one, and a single request delayed by
    the kernel or host is not representative. So the lower end of its interval is compared
    (docs/method.md, "Validity").

    Args:
        lags_ms: lateness of each sent request, from its due time to the socket; ms.
        ttfts_ms: TTFT of the answered requests; ms.
    """
    bound = bounds["schedule_lag_p99_ms"]
    if ttfts_ms:
        bound = max(bound, bounds["schedule_lag_ttft_fraction"] * statistics.median(ttfts_ms))
    if not lags_ms:
        return at_most(None, bound)
    lags = sorted(lags_ms)
    return {**at_most(percentile_of(lags, 99), bound), "pass": at_least(lags, 99) <= bound}


def generator_checks(
    health: GeneratorHealth, clock: str, bounds: Mapping[str, float]
) -> dict[str, CheckRecord]:
    """Return the checks of the load generator's processes, for a cell or the loadgen command."""

    def worst(key: str) -> float | None:
        values = [health[key] for health in processes.values() if health.get(key) is not None]
        return max(values) if values and len(values) == len(processes) else None

    processes = health["processes"]
    counters = [(process, key) for process in processes for key in LOST_COUNTS]
    counts = [processes[process].get(key) for process, key in (*counters, ("main", "late_results"))]
    known = [count for count in counts if count is not None]
    lost_messages = sum(known) if len(known) == len(counts) else None
    connections = health["workers"] * health["connections_per_worker"]
    return {
        "loop_lag_p99_ms": at_most(worst("loop_lag_p99_ms"), bounds["loop_lag_p99_ms"]),
        "loop_lag_max_ms": at_most(worst("loop_lag_max_ms"), bounds["loop_lag_max_ms"]),
        "cpu_share": at_most(worst("cpu_share"), bounds["max_cpu_share"]),
        "workers_died": at_most(len(health["workers_died"]), 0),
        "silent_workers": at_most(health["workers"] - (len(processes) - 1), 0),
        "unopened_connections": at_most(connections - sum(health["connections"].values()), 0),
        "lost_messages": at_most(lost_messages, 0),
        "unstamped_reads": at_most(_unstamped_share(health, clock), UNSTAMPED_SHARE_MAX),
    }


def _unstamped_share(health: GeneratorHealth, clock: str) -> float | None:
    """Return the share of the workers' reads without a stamp of the cell's clock."""
    if clock != "kernel":
        return 0.0
    workers = [values for name, values in health["processes"].items() if name != "main"]
    if not all({"reads", "unstamped_reads"} <= values.keys() for values in workers):
        return None
    reads = sum(values["reads"] for values in workers)
    return sum(values["unstamped_reads"] for values in workers) / reads if reads else None
