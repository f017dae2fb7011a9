"""Measure the engine's HTTP server: tokens/s, requests/s, and the lateness of tokens.

The server with its worker process is pinned to one core, the client to another if there is one.
Lateness is measured in the server: time of the write minus the end of the step that made the token.
"""

import os
import selectors
import socket
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import psutil
from rich.console import Console
from rich.table import Table

from benchmarks import machine, parser_of, run_alone
from benchmarks.running import payload, running
from connector_tax.config import ROOT, load_yaml
from connector_tax.files import read_jsonl, write_json

_WARMUP_S = 0.5
_MEASURE_S = 3.0
_DONE = b"data: [DONE]"
_TOKEN = b'"text":'


class Load(NamedTuple):
    """A load of `connections` connections that repeatedly request `tokens` tokens.

    A step takes `step_s`.
    """

    name: str
    connections: int
    tokens: int
    step_s: float


_LOADS = (
    Load("15,000 tokens/s offered", 30, 400, 0.002),
    Load("30,000 tokens/s offered", 60, 400, 0.002),
    Load("unlimited, 400 tokens each", 128, 400, 0.0005),
    Load("750 requests/s or so, 4 tokens each", 8, 4, 0.002),
    Load("unlimited, 4 tokens each", 64, 4, 0.0005),
)
_COLUMNS = ("tokens/s", "requests/s", "CPU share", "lateness p50 ms", "p99")


def _drive(port: int, load: Load, server: Sequence[psutil.Process]) -> tuple[float, float, float]:
    """Keep every connection busy; return tokens/s, requests/s and the server's CPU share."""
    request = payload([1], load.tokens)
    selector = selectors.EpollSelector()
    tails: dict[socket.socket, bytes] = {}
    for _ in range(load.connections):
        connection = socket.create_connection(("127.0.0.1", port))
        connection.setblocking(False)
        connection.sendall(request)
        selector.register(connection, selectors.EVENT_READ)
        tails[connection] = b""
    begin = time.monotonic() + _WARMUP_S
    end = begin + _MEASURE_S
    tokens = requests = 0
    cpu_begin = -1.0
    while (now := time.monotonic()) < end:
        if cpu_begin < 0 and now >= begin:
            tokens = requests = 0
            cpu_begin = _cpu_s(server)
        for key, _ in selector.select(0.05):
            connection = key.fileobj  # type: ignore[assignment]
            data = connection.recv(1 << 16)
            if not data:
                raise RuntimeError("the server closed a connection")
            # A mark may be split between reads, so all but its last byte is searched again.
            seen = tails[connection] + data
            tokens += seen.count(_TOKEN) - tails[connection].count(_TOKEN)
            if _DONE in seen:
                requests += 1
                tails[connection] = b""
                connection.sendall(request)
            else:
                tails[connection] = seen[-len(_DONE) + 1 :]
    share = (_cpu_s(server) - cpu_begin) / _MEASURE_S
    for connection in tails:
        connection.close()
    return tokens / _MEASURE_S, requests / _MEASURE_S, share


def _cpu_s(processes: Sequence[psutil.Process]) -> float:
    """Return the processes' user and system time so far, in s."""
    return sum(sum(process.cpu_times()[:2]) for process in processes)


def _measure(load: Load) -> list[float]:
    """Measure one load; return its row of the table."""
    base: dict[str, Any] = load_yaml(ROOT / "config" / "embedded.yaml")
    cost = {**dict.fromkeys(base["step_cost"], 0.0), "beta0_us": load.step_s * 1e6}
    cores = sorted(os.sched_getaffinity(0))
    with tempfile.TemporaryDirectory(prefix="engine-bench-") as folder:
        config, truth = Path(folder, "engine.json"), Path(folder, "truth.jsonl")
        write_json(config, {**base, "step_cost": cost, "connectors": {"plain": None}})
        with running(config, truth_log=truth) as engine:
            main = psutil.Process(engine.pid)
            server = [main, *main.children(recursive=True)]
            for process in server:
                process.cpu_affinity([cores[-1]])
            os.sched_setaffinity(0, {cores[0]})
            try:
                seen = _drive(engine.port, load, server)
            finally:
                os.sched_setaffinity(0, cores)
        late_ns = [
            written - deadline
            for record in read_jsonl(truth)
            for written, tokens, deadline in record.get("writes", [])
            if tokens
        ]
    return [*seen, *np.percentile(np.array(late_ns) / 1e6, [50, 99]).tolist()]


def run(rounds: int) -> Table:
    """Return the table: for each load the medians over the rounds, by column."""
    table = Table("load", *_COLUMNS)
    for load in _LOADS:
        rows = [_measure(load) for _ in range(rounds)]
        digits = (0, 0, 2, 2, 2)
        cells = zip(np.median(rows, axis=0), digits, strict=True)
        table.add_row(load.name, *(f"{value:,.{places}f}" for value, places in cells))
    return table


def main() -> None:
    """Print the machine and the table."""
    parser = parser_of(__file__, __doc__)
    parser.add_argument("--rounds", type=int, default=5, help="rounds of each load (default 5)")
    rounds = parser.parse_args().rounds
    Console(width=110).print(machine("uvloop"), run(rounds), sep="\n")


if __name__ == "__main__":
    sys.exit(run_alone(main))
