"""Who should wait for the due time: measured for docs/decisions/loadgen.md.

    python -m benchmarks.pacing

Each variant drives the whole load generator (client on one CPU, C event server on another):

- thread + spin: the issuing thread sleeps to just before the due time, spins, then hands on;
- metronome process: a process of its own sleeps and spins, the issuing thread waits for its tick;
- early: the request goes to its worker ahead of time, which waits on a kernel timer (and spins).
"""

import argparse
import json
import os
import struct
import subprocess
import sys
import time
from dataclasses import replace
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from benchmarks import run_alone
from benchmarks.event_server import EventServer, one_cpu_each
from connector_tax.loadgen import (
    CellRule,
    LoadGenerator,
    LoadGeneratorOptions,
    PlannedRequest,
    Target,
    generator,
    make_offsets,
)
from connector_tax.loadgen.issuer import IssuingThread
from connector_tax.machine import machine

MARGIN_NS = 200_000
TOKENS = 8

METRONOME = """
import os, struct, sys, time
while data := os.read(0, 8):
    (due_ns,) = struct.unpack("q", data)
    left_ns = due_ns - time.monotonic_ns() - %d
    if left_ns > 0:
        time.sleep(left_ns / 1e9)
    while time.monotonic_ns() < due_ns:
        pass
    os.write(1, b"x")
"""


class SpinningThread(IssuingThread):
    """Sleeps to MARGIN_NS before the due time, then spins in this process."""

    def _sleep(self, until_ns: int) -> None:
        super()._sleep(until_ns - MARGIN_NS)
        while time.monotonic_ns() < until_ns:
            pass


class MetronomeThread(IssuingThread):
    """Lets a process of its own sleep and spin."""

    _metronome: "subprocess.Popen[bytes] | None" = None

    def _sleep(self, until_ns: int) -> None:
        if self._metronome is None:
            self._metronome = subprocess.Popen(
                [sys.executable, "-c", METRONOME % MARGIN_NS],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
            )
        assert self._metronome.stdin is not None
        assert self._metronome.stdout is not None
        os.write(self._metronome.stdin.fileno(), struct.pack("q", until_ns))
        os.read(self._metronome.stdout.fileno(), 1)

    def _run(self) -> None:
        super()._run()
        if self._metronome is not None:
            self._metronome.kill()
            self._metronome.communicate()


VARIANTS: dict[str, tuple[type[IssuingThread], dict[str, Any]]] = {
    "thread + spin": (SpinningThread, {"lead_ms": 0.0, "spin_us": 0.0}),
    "metronome process": (MetronomeThread, {"lead_ms": 0.0, "spin_us": 0.0}),
    "early, no spin": (IssuingThread, {"spin_us": 0.0, "sleep_margin_us": 0.0}),
    "early, spin 30 us": (IssuingThread, {"spin_us": 30.0, "sleep_margin_us": 30.0}),
    "early, spin 100 us": (IssuingThread, {"spin_us": 100.0, "sleep_margin_us": 100.0}),
    "early, spin 400 us": (IssuingThread, {"spin_us": 400.0, "sleep_margin_us": 400.0}),
}


def run_variant(name: str, rate_rps: float, seconds: float) -> list[str]:
    """Run one variant; return its row."""
    thread, changes = VARIANTS[name]
    plan = one_cpu_each()
    (server_cpu,) = plan.server
    options = replace(LoadGeneratorOptions(connections_per_worker=64, cpus=plan), **changes)
    rule = CellRule(0.5, seconds, 0, seconds, 5.0, 1000, 10.0)
    offsets = make_offsets("poisson", rate_rps, rule.warmup_s + seconds, "1/pacing")
    body = json.dumps({"prompt": [1] * 512, "max_tokens": TOKENS}).encode()
    requests = [PlannedRequest(f"p{k}", body, 512, TOKENS) for k in range(len(offsets))]
    generator.IssuingThread = thread  # type: ignore[attr-defined]
    with (
        EventServer(2000.0, 1000.0, server_cpu) as server,
        LoadGenerator(Target("127.0.0.1", server.port), options) as load_generator,
    ):
        result = load_generator.run_cell(offsets, requests, rule)
    lag_us = [
        (r.t_send_ns - r.t_intended_ns) / 1e3
        for r in result.records
        if r.t_send_ns is not None and r.measured
    ]
    main, worker = (result.health["processes"][name] for name in ("main", "worker0"))
    p50, p90, p99 = np.percentile(lag_us, [50, 90, 99])
    return [
        name,
        f"{p50:.0f}",
        f"{p90:.0f}",
        f"{p99:.0f}",
        f"{min(lag_us):.0f}",
        f"{main['loop_lag_p99_ms']:.2f}",
        f"{worker['loop_lag_p99_ms']:.2f}",
        f"{main['cpu_share']:.2f}+{worker['cpu_share']:.2f}",
    ]


def main() -> int:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--rate", type=float, default=500.0, help="requests/s")
    parser.add_argument("--seconds", type=float, default=4.0)
    parser.add_argument("--rounds", type=int, default=2, help="variants alternate")
    options = parser.parse_args()
    columns = (
        "lag p50 µs",
        "p90",
        "p99",
        "min",
        "main loop lag p99 ms",
        "worker's",
        "CPU main+worker",
    )
    table = Table("variant", *columns)
    for _ in range(options.rounds):
        for name in VARIANTS:
            table.add_row(*run_variant(name, options.rate, options.seconds))
        table.add_section()
    console = Console(width=120, highlight=False)
    console.print(machine("uvloop"))
    console.print(
        f"{options.rate:g} requests/s, {TOKENS} events each, {options.seconds:g} s per row"
    )
    console.print(table)
    return 0


if __name__ == "__main__":
    raise SystemExit(run_alone(main))
