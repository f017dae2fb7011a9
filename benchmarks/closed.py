"""Closed loop beside a client of a few lines (closed_peer.py), on one CPU, against the same server.

    python -m benchmarks.closed

Both clients in turn, --rounds times; requests a second by the server's log, and their ratio, round
by round. From an end to the next send: from the kernel's stamp of the last byte of an answer to the
write of the request that takes its place. Places that start together end together: N ends come at
once, and the last of them waits for all. With a ramp they stay spread. Checks: those of the command
that did not pass. The last CPU is the server's.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.table import Table

from benchmarks import run_alone
from benchmarks.event_server import EventServer, two_cpus
from connector_tax.machine import machine

SETTLE_S = 1.0
FIRST_US = 1000.0


@dataclass(frozen=True)
class Shape:
    """So many places, tokens of each answer, microseconds between them, seconds of the ramp."""

    places: int
    tokens: int
    gap_us: float
    ramp_s: float

    def command(self, client: str, port: int, seconds: float, folder: Path) -> list[str]:
        """What keeps the places busy for so long after the ramp."""
        if client == "peer":
            numbers = (port, self.places, self.tokens, self.ramp_s, seconds + self.ramp_s)
            return [sys.executable, "-m", "benchmarks.closed_peer", *map(str, numbers)]
        return [
            *(sys.executable, "-m", "connector_tax.loadgen", "--url", f"http://127.0.0.1:{port}"),
            *("--model", "m", "--concurrency", f"{self.places}", "--rampup", f"{self.ramp_s}"),
            *("--warmup", f"{self.ramp_s}", "--duration", f"{seconds}", "--no-affinity"),
            *("--prompt-tokens", "8", "--max-tokens", f"{self.tokens}"),
            *("--output", str(folder / "out.jsonl"), "--summary", str(folder / "summary.json")),
        ]


def rate_rps(shape: Shape, client: str, seconds: float, folder: Path) -> float:
    """Requests a second that the server has answered, between ramp and end."""
    client_cpu, server_cpu = two_cpus()
    with EventServer(shape.gap_us, FIRST_US, server_cpu) as server:
        command = shape.command(client, server.port, seconds, folder)
        pinned = ["taskset", "-c", f"{client_cpu}", *command]
        subprocess.run(pinned, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, check=False)
    begin_ns = min(stamps[0] for stamps in server.responses)
    from_ns = begin_ns + (shape.ramp_s + SETTLE_S) * 1e9
    until_ns = begin_ns + (shape.ramp_s + seconds) * 1e9
    return sum(from_ns <= r[-1] < until_ns for r in server.responses) / (seconds - SETTLE_S)


def gaps_ms(folder: Path) -> tuple[float, float, float, float]:
    """p50, p90, p99 and the largest time from an end to the next send."""
    records = [json.loads(line) for line in (folder / "out.jsonl").read_text().splitlines()]
    gaps = [
        r["t_send_ns"] - r["t_intended_ns"] for r in records if not r["warmup"] and r["t_send_ns"]
    ]
    p50, p90, p99, most = (float(v) / 1e6 for v in np.percentile(gaps, [50, 90, 99, 100]))
    return p50, p90, p99, most


def main() -> int:
    """Print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=5.0, help="of each run")
    options = parser.parse_args()
    table = Table(
        *("places", "tokens", "ms between", "ramp s", "requests/s", "peer", "ratio, by round"),
        *("end to next send ms: p50/p90/p99/max", "checks that fail"),
    )
    shapes = [
        Shape(8, 8, 1000.0, 0.0),
        Shape(64, 8, 1000.0, 0.0),
        Shape(64, 1, 1000.0, 0.0),
        Shape(8, 16, 10_000.0, 1.0),
        Shape(64, 16, 10_000.0, 1.0),
    ]
    for shape in shapes:
        pairs, gaps, failed = [], [], set()
        for _ in range(options.rounds):
            with tempfile.TemporaryDirectory(prefix="connector-tax-closed-") as name:
                folder = Path(name)
                peer = rate_rps(shape, "peer", options.seconds, folder)
                pairs.append((rate_rps(shape, "own", options.seconds, folder), peer))
                gaps.append(gaps_ms(folder))
                summary = json.loads((folder / "summary.json").read_text())
            failed |= {check["name"] for check in summary["checks"] if not check["passed"]}
        own, peer = np.median(pairs, axis=0)
        table.add_row(
            *(f"{shape.places}", f"{shape.tokens}", f"{shape.gap_us / 1e3:g}", f"{shape.ramp_s:g}"),
            *(f"{own:,.0f}", f"{peer:,.0f}", " ".join(f"{mine / its:.3f}" for mine, its in pairs)),
            "/".join(f"{value:.2f}" for value in np.median(gaps, axis=0)),
            " ".join(sorted(failed)) or "none",
        )
    console = Console(width=150, highlight=False)
    console.print(machine("uvloop"))
    console.print(table)
    return 0


if __name__ == "__main__":
    raise SystemExit(run_alone(main))
