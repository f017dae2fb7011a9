"""The HTTP surface: tokens and requests a second, and how late tokens leave against their schedule.

The server (with its worker process) is pinned to one core, the client to another where there is
one. Lateness is the server's own: the time of the write less the end of the step that made the
token. Beside it stands the machine's floor, measured in the same rounds: how late a process is that
only waits for such deadlines on the same core, as the engine's step device does, and writes no
byte. No server on that core can be earlier.
"""

import argparse
import asyncio
import json
import os
import selectors
import socket
import sys
import tempfile
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import uvloop

from benchmarks import run_alone
from benchmarks.running import payload, running
from connector_tax.config import ROOT, load_yaml
from connector_tax.files import read_jsonl, write_json
from connector_tax.linux import sharpen_timers
from connector_tax.machine import machine

_WARMUP_S = 0.5
_MEASURE_S = 3.0
_DONE = b"data: [DONE]"
_TOKEN = b'"text":'


@dataclass(frozen=True)
class Load:
    """Connections that each ask for `tokens` tokens, again and again; steps of `step_s`."""

    name: str
    connections: int
    tokens: int
    step_s: float


_LOADS = (
    Load("15,000 tokens/s offered", 30, 400, 0.002),
    Load("30,000 tokens/s offered", 60, 400, 0.002),
    Load("all it can, long", 128, 400, 0.0005),
    Load("750 requests/s or so", 8, 4, 0.002),
    Load("all it can, short", 64, 4, 0.0005),
)


# What the client saw in the measured seconds (tokens/s, requests/s, CPU share), and the lateness in
# ms: p50, p99, p99.9.
Result = tuple[float, float, float, float, float, float]
_P99 = 4  # its place in there


def _drive(port: int, load: Load, server: Sequence[psutil.Process]) -> tuple[float, float, float]:
    """Keep every connection busy; tokens/s, requests/s and CPU share of the measured seconds."""
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
            # A mark may be cut by the end of a read; all but its last byte is looked at again.
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
    """Their user and system time so far."""
    return sum(sum(process.cpu_times()[:2]) for process in processes)


async def _measure(pid: int, port: int, load: Load) -> tuple[float, float, float]:
    main = psutil.Process(pid)
    server = [main, *main.children(recursive=True)]
    for process in server:
        process.cpu_affinity([_server_core()])
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[0]})
    try:
        return await asyncio.to_thread(_drive, port, load, server)
    finally:
        os.sched_setaffinity(0, cores)


def _server_core() -> int:
    return max(os.sched_getaffinity(0))


def _late_ms(late_ns: list[int]) -> tuple[float, float, float]:
    p50, p99, p999 = np.percentile(np.array(late_ns) / 1e6, [50, 99, 99.9])
    return float(p50), float(p99), float(p999)


async def _engine(load: Load, folder: Path) -> Result:
    base: dict[str, Any] = load_yaml(ROOT / "config" / "embedded.yaml")
    cost = {**dict.fromkeys(base["step_cost"], 0.0), "beta0_us": load.step_s * 1e6}
    config = folder / "engine.json"
    truth = folder / "truth.jsonl"
    write_json(config, {**base, "step_cost": cost, "connectors": {"plain": None}})
    async with running(config, truth_log=truth) as engine:
        seen = await _measure(engine.pid, engine.port, load)
    late_ns = [
        written - deadline
        for record in read_jsonl(truth)
        for written, tokens, deadline in record.get("writes", [])
        if tokens
    ]
    return *seen, *_late_ms(late_ns)


# A sleep ends some tens of microseconds late; the last stretch before a deadline is spun.
_SPIN_NS = 70_000


def floor(core: int, step_s: float) -> None:
    """Print how late deadlines `step_s` apart are met, ns; a stall makes all it covers late."""
    os.sched_setaffinity(0, {core})
    sharpen_timers()
    late = []
    deadline = time.monotonic_ns()
    for _ in range(round(_MEASURE_S / step_s)):
        deadline += round(step_s * 1e9)
        ahead = deadline - time.monotonic_ns() - _SPIN_NS
        if ahead > 0:
            time.sleep(ahead / 1e9)
        while (now := time.monotonic_ns()) < deadline:
            pass
        late.append(now - deadline)
    json.dump(late, sys.stdout)


async def _floor(load: Load, _folder: Path) -> Result:
    command = f"from benchmarks.serving import floor; floor({_server_core()}, {load.step_s})"
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", command, stdout=asyncio.subprocess.PIPE
    )
    printed, _ = await process.communicate()
    if process.returncode:
        raise RuntimeError(f"the floor's process ended with status {process.returncode}")
    return np.nan, np.nan, np.nan, *_late_ms(json.loads(printed))


_CONTENDERS = {"engine": _engine, "machine floor": _floor}


async def run(rounds: int) -> None:
    """Print the table: engine and floor in turn, the median and the best of the rounds.

    The median is each column's own; the best round of each is the one with its smallest p99.
    """
    print(
        f"{f'{rounds} rounds':40}{'tokens/s':>10}{'requests/s':>12}"
        f"{'CPU share':>11}{'lateness p50':>14}{'p99':>8}{'p99.9 ms':>10}"
    )
    for load in _LOADS:
        taken: dict[str, list[Result]] = {name: [] for name in _CONTENDERS}
        for _ in range(rounds):
            for name, contender in _CONTENDERS.items():
                with tempfile.TemporaryDirectory(prefix="engine-bench-") as folder:
                    taken[name].append(await contender(load, Path(folder)))
        medians = {name: np.median(rows, axis=0) for name, rows in taken.items()}
        best = {
            name: np.array(min(rows, key=lambda row: row[_P99])) for name, rows in taken.items()
        }
        print(load.name)
        for which, table in (("median", medians), ("best round", best)):
            for name, values in table.items():
                print(_row(f"{name}, {which}", values))


def _row(name: str, values: Iterable[float]) -> str:
    widths, digits = (10, 12, 11, 14, 8, 10), (0, 0, 2, 3, 3, 3)
    cells = zip(values, widths, digits, strict=True)
    shown = ("-".rjust(w) if np.isnan(v) else f"{v:{w}.{d}f}" for v, w, d in cells)
    return f"  {name:38}" + "".join(shown)


def main() -> None:
    """Print the machine and the table."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.serving", description=__doc__)
    parser.add_argument(
        "--rounds", type=int, default=5, help="how often each contender takes its turn (default 5)"
    )
    arguments = parser.parse_args()
    if arguments.rounds < 1:
        parser.error(f"--rounds: found {arguments.rounds}; allowed: at least 1")
    print(machine("uvloop"), flush=True)
    uvloop.run(run(arguments.rounds))


if __name__ == "__main__":
    sys.exit(run_alone(main))
