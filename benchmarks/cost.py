"""CPU time of this load generator for a request and for a streamed event, by process.

    python -m benchmarks.cost

Short answers and streams of 64 tokens at fixed rates, against the C event server; without the spin,
which takes what time is left. A process's CPU time says more than the rate it reaches on a machine
that has other work too; it still rises by a tenth or two where others fill the caches.
"""

import argparse
import json
import os
import time

from rich.console import Console
from rich.table import Table

from benchmarks.event_server import EventServer, one_cpu_each
from connector_tax.loadgen import (
    CellRule,
    LoadGenerator,
    LoadGeneratorOptions,
    PlannedRequest,
    Target,
    make_offsets,
)
from connector_tax.machine import machine

TOKENS = 64
GAP_US, FIRST_US = 10_000.0, 1000.0


def cpu_ns(pid: int) -> int:
    """CPU time of a process with all its threads; clock_getcpuclockid(3) makes such a clock."""
    return time.clock_gettime_ns((~pid << 3) | 2)


def costs(rate_rps: float, tokens: int, seconds: float) -> tuple[float, float]:
    """Microseconds per request of the worker and of the main process."""
    plan = one_cpu_each()
    (server_cpu,) = plan.server
    rule = CellRule(0.0, seconds, 0, seconds, 5.0, None, 30.0, cooldown=False)
    offsets = make_offsets("poisson", rate_rps, seconds, "1/cost")
    body = json.dumps({"prompt": [1] * 16, "max_tokens": tokens}).encode()
    requests = [PlannedRequest(f"c{k}", body, 16, tokens) for k in range(len(offsets))]
    options = LoadGeneratorOptions(connections_per_worker=1024, cpus=plan, strict=True)
    with (
        EventServer(GAP_US, FIRST_US, server_cpu) as server,
        LoadGenerator(Target("127.0.0.1", server.port), options) as generator,
    ):
        few = CellRule(0.0, 0.5, 0, 0.5, 5.0, None, 30.0, cooldown=False)
        early = make_offsets("fixed", 100, 0.5, "unused")
        generator.run_cell(early, requests[: len(early)], few)  # opens the connections
        pids = (generator.worker_pids[0], os.getpid())
        before = [cpu_ns(pid) for pid in pids]
        result = generator.run_cell(offsets, requests, rule)
        worker, main = (cpu_ns(pid) - was for pid, was in zip(pids, before, strict=True))
    wall_ns = result.t_drained_ns - result.t_origin_ns
    worker -= round(result.health["processes"]["worker0"]["spin_share"] * wall_ns)
    failed = sum(record.status != "ok" for record in result.records)
    if failed:
        raise SystemExit(f"{failed} of {len(requests)} requests failed")
    return worker / len(requests) / 1e3, main / len(requests) / 1e3


def main() -> int:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--rates", default="1000,2000", help="of short requests, a second")
    parser.add_argument("--stream-rates", default="150,300", help="of requests of 64 events")
    parser.add_argument("--seconds", type=float, default=4.0, help="of each row")
    options = parser.parse_args()
    table = Table("requests/s", "tokens", "worker µs per request", "main µs", "worker µs per event")
    for tokens, rates in ((1, options.rates), (TOKENS, options.stream_rates)):
        for rate in map(float, rates.split(",")):
            worker, own = costs(rate, tokens, options.seconds)
            cells = f"{rate:g}", f"{tokens}", f"{worker:.0f}", f"{own:.0f}"
            table.add_row(*cells, f"{worker / tokens:.1f}")
    console = Console(width=110, highlight=False)
    console.print(machine("uvloop"))
    console.print(table)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
