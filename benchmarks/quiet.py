"""What the yardstick tells of a real study, and what sampling costs.

`explain` reads a study's Phase A (quiet_effect). `cost` launches plain and serves
one long cell at the study's first rate; in segments that alternate on-off-off-on or off-on-on-off
the watching process is stopped (SIGSTOP) and continued. A request belongs to the segment it was
due in, if it ended there; a segment's value is the median of its requests, a block's the logarithm
of the ratio of on to off. The mean of the blocks without the outer tenths stands with its bootstrap
interval (95%, BCa). `bursts` takes idle looks (yardstick) one after the other and counts
how many in a row are slower than the void check allows.
"""

import argparse
import contextlib
import itertools
import math
import os
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import ArrayLike
from rich.console import Console
from rich.table import Table
from scipy import stats

from benchmarks.quiet_effect import NAMES, explained, spreads, watched_cells
from connector_tax.artifacts.names import Launch
from connector_tax.artifacts.study_file import load_study
from connector_tax.artifacts.study_records import StudyDocument
from connector_tax.commands import run_command
from connector_tax.files import ArtifactError, read_json
from connector_tax.loadgen import CellResult, Progress, make_offsets
from connector_tax.machine import cpu
from connector_tax.servers.kinds import engine_of
from connector_tax.study.cell import cell_rule, load_generator
from connector_tax.study.device import DeviceError, devices_of, hold_devices
from connector_tax.study.machine import MachineWatch
from connector_tax.study.preflight import GateError, gated_server
from connector_tax.study.prompts import planned_requests
from connector_tax.study.server_command import affinity_plan
from connector_tax.study.yardstick import LOOK_PAUSE_S, LOOK_SAMPLES, Yardstick

FACTORS = (1.1, 1.2, 1.3, 1.5, 2.0)
STEALS = (0.01, 0.02, 0.03, 0.05, 0.1)
SEGMENT_S = 2.0
# Of a segment's beginning, left out: the watching process takes its first sample anew.
SETTLE_NS = 300_000_000


def explain(
    study_file: Path,
    factors: Sequence[float],
    steals: Sequence[float],
    percentile: float | None,
) -> None:
    """Print the tables of quiet_effect for one study."""
    study = load_study(study_file)
    cells = watched_cells(study)
    first = cells[0].cell.record
    assert first is not None
    rule = dict(first["quiet"]["rule"])
    rule |= {} if percentile is None else {"chunk_percentile": percentile}
    console = Console(width=110)
    title = "variance that the watched machine explains"
    table = _table(title, "level", "watched", "metric", "n", "r", "explained")
    for row in explained(cells):
        shown = [f"{row.r:+.2f}", f"{row.r**2:.0%}"]
        table.add_row(row.level, row.watched, row.metric, str(row.n), *shown)
    console.print(table)
    title = (
        f"between launches, block model (chunks by their {rule['chunk_percentile']:g}th "
        "percentile): standard deviation, A/A half-width"
    )
    table = _table(title, "left out", "kept", "launches", *NAMES)
    for spread in spreads(cells, factors, steals, rule):
        numbers = [f"{spread.sd[name]:.1%} {spread.half_width[name]:.1%}" for name in NAMES]
        table.add_row(spread.rule, f"{spread.kept:.0%}", str(spread.launches), *numbers)
    console.print(table)


def cost(study: StudyDocument, launches: int, blocks: int) -> None:
    """Print what sampling changes in the latencies of plain.

    Args:
        study: study.json.
        launches: servers launched.
        blocks: of four segments, for each launch.

    Raises:
        GateError: a server did not start, serve or stop as it must.
        DeviceError: another study or benchmark measures on the device.
    """
    rate = study["config"]["phase_a"]["rates_rps"][0]
    print(f"{cpu()}; {launches} launches, {blocks} blocks of 4 x {SEGMENT_S:g} s, {rate:g} req/s")
    with hold_devices(devices_of(study["config"])), tempfile.TemporaryDirectory() as text:
        ratios: dict[str, list[float]] = {"ttft": [], "tpot": []}
        for number in range(launches):
            folder = Path(text) / str(number)
            of_launch, share = _launch(study, number, folder, blocks)
            for metric, values in of_launch.items():
                ratios[metric] += values
                print(f"launch {number + 1}: {metric} on over off {_summary(values)}")
            print(f"launch {number + 1}: the watching process used {share:.2%} of its core")
    for metric, values in ratios.items():
        print(f"all: {metric} on over off in {len(values)} blocks {_summary(values)}")


def bursts(study: StudyDocument, seconds: float) -> None:
    """Print how long the idle machine is slower than `max_idle_memory_factor` times its level.

    Args:
        study: study.json.
        seconds: for how long looks are taken on the server's CPUs.
    """
    quiet, slow = study["config"]["quiet"], study["config"]["validity"]["max_idle_memory_factor"]
    assert quiet is not None
    yardstick = Yardstick(quiet["working_set_mib"], quiet["elements"])
    cpus, until, medians = affinity_plan(study).server, time.monotonic() + seconds, []
    while time.monotonic() < until:
        medians.append(float(np.median(yardstick.look(cpus)[0])) / quiet["elements"])
    level = float(np.percentile(medians, 10))
    runs = [
        len(list(run))
        for above, run in itertools.groupby(np.array(medians) > slow * level)
        if above
    ]
    print(
        f"{cpu()}; {len(medians)} looks of {LOOK_SAMPLES * LOOK_PAUSE_S:g} s, level {level:.1f} ns"
    )
    print(f"above {slow:g} times the level: {sum(runs) / len(medians):.1%} of the looks")
    for length, count in sorted(Counter(runs).items()):
        print(f"{length} in a row: {count}")


class _Switch:
    """Stops and continues the watching process by the clock; called while the cell runs."""

    def __init__(self, pid: int, blocks: int) -> None:
        self._pid = pid
        order = [(k % 2 == 0) ^ (j in (1, 2)) for k in range(blocks) for j in range(4)]
        self.order = order
        self.edges_ns: list[int] = []

    def __call__(self, _: Progress) -> None:
        """Begin the next segment when the last is over."""
        now_ns = time.monotonic_ns()
        over = not self.edges_ns or now_ns - self.edges_ns[-1] >= SEGMENT_S * 1e9
        if over and len(self.edges_ns) <= len(self.order):
            number = len(self.edges_ns)
            on = number == len(self.order) or self.order[number]
            os.kill(self._pid, signal.SIGCONT if on else signal.SIGSTOP)
            self.edges_ns.append(now_ns)


def _launch(
    study: StudyDocument, number: int, folder: Path, blocks: int
) -> tuple[dict[str, list[float]], float]:
    """Log ratios of on to off by metric, one for each block; the watching process's CPU share."""
    plan = affinity_plan(study)
    launch = Launch("plain", number, "A")
    with contextlib.ExitStack() as stack:
        server = stack.enter_context(
            gated_server(study, launch, "quiet", folder, lambda _: None, None)
        )
        if plan.enabled:
            stack.callback(os.sched_setaffinity, 0, os.sched_getaffinity(0))
            os.sched_setaffinity(0, plan.loadgen)
        watch = stack.enter_context(MachineWatch(study["config"]["quiet"], plan, gpus=()))
        generator = stack.enter_context(load_generator(study, server, plan))
        # Else leaving would wait for a stopped process.
        stack.callback(os.kill, watch.pid, signal.SIGCONT)
        watch.open(folder / "machine.jsonl", server.pid, slow_ns=None)
        # The driver's look for the next segment comes four times a second.
        whole_s = 4 * blocks * (SEGMENT_S + 0.3) + 1
        rate = study["config"]["phase_a"]["rates_rps"][0]
        rule = cell_rule(study["config"], "A")
        rule = replace(rule, floor_s=whole_s, cap_s=whole_s, min_completed=0)
        arrivals = study["config"]["arrivals"]
        offsets = make_offsets(
            arrivals["process"], rate, rule.warmup_s + whole_s, f"{number}/quiet",
            gamma_shape=arrivals["gamma_shape"],
        )  # fmt: skip
        sweep = study["config"]["phase_a"]
        requests = planned_requests(
            engine_of(study["config"]["engine"]).served, input_tokens=sweep["input_tokens"],
            output_tokens=sweep["output_tokens"], count=len(offsets), seed=study["seed"],
            name=f"quiet/{number}",
        )  # fmt: skip
        switch = _Switch(watch.pid, blocks)
        began, used = time.monotonic(), _cpu_s(watch.pid)
        result = generator.run_cell(offsets, requests, rule, switch)
        share = 2 * (_cpu_s(watch.pid) - used) / (time.monotonic() - began)
        os.kill(watch.pid, signal.SIGCONT)
        watch.close()
    return _log_ratios(result, switch), share


def _cpu_s(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return sum(map(int, fields[11:13])) / os.sysconf("SC_CLK_TCK")


def _log_ratios(result: CellResult, switch: _Switch) -> dict[str, list[float]]:
    segments = list(zip(switch.edges_ns, switch.edges_ns[1:], strict=False))
    medians: dict[str, list[float]] = {"ttft": [], "tpot": []}
    for begin, end in segments:
        values = np.array(list(_latencies(result, begin + SETTLE_NS, end))).reshape(-1, 2)
        for metric, column in zip(medians, values.T, strict=True):
            medians[metric].append(math.log(float(np.median(column))) if len(column) else math.nan)
    ratios: dict[str, list[float]] = {}
    for metric, logs in medians.items():
        blocks = range(0, len(segments) // 4 * 4, 4)
        differences = [
            sum(value if on else -value
                for value, on in zip(logs[b : b + 4], switch.order[b : b + 4], strict=True)) / 2
            for b in blocks
        ]  # fmt: skip
        ratios[metric] = [value for value in differences if not math.isnan(value)]
    return ratios


def _latencies(result: CellResult, begin_ns: int, end_ns: int) -> Iterator[tuple[float, float]]:
    """TTFT and time per token, ns, of the successes that lived between two moments."""
    for r in result.records:
        if r.status != "ok" or r.t_first_token_ns is None or r.t_last_token_ns is None:
            continue
        if begin_ns <= r.t_intended_ns and r.t_last_token_ns < end_ns:
            gaps = max(1, (r.completion_tokens or 2) - 1)
            yield (
                r.t_first_token_ns - r.t_intended_ns,
                (r.t_last_token_ns - r.t_first_token_ns) / gaps,
            )


def _summary(ratios: Sequence[float]) -> str:
    interval = stats.bootstrap((ratios,), _centre, rng=0).confidence_interval
    low, middle, high = (math.expm1(x) for x in (interval.low, _centre(ratios), interval.high))
    return f"{middle:+.2%} [{low:+.2%}, {high:+.2%}]"


def _centre(values: ArrayLike, axis: int = -1) -> Any:
    return stats.trim_mean(values, 0.1, axis=axis)


def _table(title: str, *headings: str) -> Table:
    table = Table(title=title, box=None, pad_edge=False, title_justify="left")
    for heading in headings:
        table.add_column(heading, justify="right")
    return table


def main(argv: Sequence[str] | None = None) -> int:
    """Judge the yardstick on a study, or measure what it costs."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.quiet", description=main.__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    offline = commands.add_parser("explain", help="variance explained, spread by rule")
    offline.add_argument("--study", type=Path, required=True, help="results/<study>/study.json")
    offline.add_argument("--factors", type=float, nargs="+", default=FACTORS)
    offline.add_argument("--steals", type=float, nargs="+", default=STEALS)
    offline.add_argument("--chunk-percentile", type=float, help="default: the study's")
    live = commands.add_parser("cost", help="sampling on and off within launches of plain")
    live.add_argument("--study", type=Path, required=True, help="results/<study>/study.json")
    live.add_argument("--launches", type=int, default=2)
    live.add_argument("--blocks", type=int, default=15, help="of four segments, a launch")
    idle = commands.add_parser("bursts", help="how long an idle machine is slow at a time")
    idle.add_argument("--study", type=Path, required=True, help="results/<study>/study.json")
    idle.add_argument("--seconds", type=float, default=90)
    return run_command(parser, argv, _run, (ArtifactError, DeviceError, GateError))


def _run(arguments: argparse.Namespace) -> None:
    if arguments.command == "explain":
        explain(arguments.study, arguments.factors, arguments.steals, arguments.chunk_percentile)
    elif arguments.command == "bursts":
        bursts(read_json(arguments.study), arguments.seconds)
    else:
        cost(read_json(arguments.study), arguments.launches, arguments.blocks)


if __name__ == "__main__":
    sys.exit(main())
