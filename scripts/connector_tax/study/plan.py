"""What the study will do, has done and still has to do: every launch and cell in run order.

`snakemake -n` lists jobs in no particular order; this table is the seeded order itself, with the
state of each cell and the minutes it is expected to take.
"""

import argparse
import statistics
import sys
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from rich.console import Console
from rich.table import Table

from connector_tax.analysis.devices import device_name
from connector_tax.artifacts import paths
from connector_tax.artifacts.index import LaunchIndex, read_index
from connector_tax.artifacts.names import PHASES, Launch
from connector_tax.artifacts.rates import cell_rates, shape_limits
from connector_tax.artifacts.stage_records import RehearsalRecord
from connector_tax.artifacts.study_file import launches, read_study
from connector_tax.artifacts.study_records import StudyConfig, StudyDocument
from connector_tax.commands import run_command, study_parser
from connector_tax.files import ArtifactError, read_json
from connector_tax.study.design import cell_order, successes_wanted
from connector_tax.study.node import read_claim
from connector_tax.study.slots import slot_of

TO_MEASURE = ("missing", "failed", "damaged")
# Start-up seconds assumed until a rehearsal or a launch of this study has shown others.
ASSUMED_STARTUP_S = {"embedded": 2.0, "vllm": 40.0}


@dataclass(frozen=True, slots=True)
class PlannedCell:
    """One row of the plan; `state` is done, void, skipped, failed, damaged or missing."""

    launch: Launch
    cell: str
    state: str
    reason: str
    expected_s: float


class Remaining(NamedTuple):
    """Expected seconds until all is measured.

    Attributes:
        wall_s: on the clock.
        device_s: of all devices together.
        devices: how many there are; of blocks that were not begun, only slots are known.
    """

    wall_s: float
    device_s: float
    devices: int

    @property
    def of_devices(self) -> str:
        """What stands behind the time on the clock; "" of one device."""
        hours = f", {self.device_s / 3600:.2f} device hours on {self.devices} devices"
        return hours if self.devices > 1 else ""

    def after(self, seconds: float) -> "Remaining":
        """What is left of it that much later, all devices having worked alike."""
        left = max(0.0, 1 - seconds / self.wall_s) if self.wall_s else 0.0
        return self._replace(wall_s=self.wall_s * left, device_s=self.device_s * left)


def reference_rate(folder: Path, phase: str) -> float | None:
    """The rate of a phase from reference_rates.json; None before it is known, and for Phase A."""
    path = folder / paths.REFERENCE_RATES
    if phase == "A" or not path.exists():
        return None
    rate: float | None = read_json(path)["ref_safe" if phase == "B" else "ref_load"]
    return rate


def rehearsed(study: StudyDocument, folder: Path) -> RehearsalRecord | None:
    """What a rehearsal of this design expects; None where there was none."""
    path = folder / paths.REHEARSAL
    content: RehearsalRecord | None = read_json(path) if path.exists() else None
    return content if content and content["design_sha256"] == study["design_sha256"] else None


def expected_cell_s(config: StudyConfig, rate_rps: float | None) -> float:
    """Expected seconds of a cell of a server that keeps up: warm-up, and the window at this rate.

    The window is max(floor, time to the successes wanted), at most the cap; an unknown rate counts
    as the floor. Overload and what a cell needs for its precision are known to a rehearsal only.
    """
    cell = config["cell"]
    window = cell["floor_s"]
    if rate_rps is not None:
        window = min(max(window, successes_wanted(config) / rate_rps), cell["cap_s"])
    return float(cell["warmup_s"] + window)


def launch_overhead_s(study: StudyDocument, folder: Path) -> float:
    """Expected seconds of a launch beside its cells: start-up as seen or rehearsed, and release."""
    seen = [
        attempt["startup_s"]
        for phase in PHASES
        for launch in launches(study, phase)
        if (index := read_index(launch.folder(folder))) is not None
        for attempt in index.attempts
        if attempt.get("startup_s") is not None
    ]
    known = rehearsed(study, folder)
    assumed = known["startup_s"] if known else ASSUMED_STARTUP_S[study["config"]["engine"]["kind"]]
    startup = statistics.median(seen) if seen else assumed
    return float(startup + study["config"]["server"]["release_s"])


def planned_cells(study: StudyDocument, folder: Path) -> Iterator[PlannedCell]:
    """Every cell of the study in the order it runs."""
    known = rehearsed(study, folder)
    for phase in PHASES:
        limits = shape_limits(study, folder, phase) if (folder / paths.SHAPE_RATES).exists() else {}
        rates = cell_rates(study, phase, reference_rate(folder, phase), limits)
        seconds = known["cells"][phase] if known else {}
        for launch in launches(study, phase):
            path = launch.folder(folder)
            index = read_index(path)
            for cell in cell_order(study, launch):
                name = cell["cell"]
                state, reason = _state(path, name, index, launch.phase)
                expected = seconds.get(name, expected_cell_s(study["config"], rates[name]))
                done = state in ("done", "void", "skipped")
                yield PlannedCell(launch, name, state, reason, 0.0 if done else expected)


def _state(folder: Path, cell: str, index: LaunchIndex | None, phase: str) -> tuple[str, str]:
    if index is not None:
        entry = index.entry(cell)
        if index.status == "skipped":
            return "skipped", index.reason or ""
        if entry is None or entry.status == "missing":
            return "failed", index.reason or ""
        return "done" if entry.status == "valid" else entry.status, entry.reason or ""
    path = folder / cell / paths.cell_record(phase, cell)
    if path.exists():
        try:
            content = read_json(path)
            reasons = "; ".join(content["void_reasons"])
            return "done" if content["valid"] else "void", reasons
        except (ArtifactError, KeyError, TypeError) as error:
            return "damaged", str(error)
    return "missing", ""


def remaining(study: StudyDocument, folder: Path) -> Remaining:
    """What is left to measure: devices work side by side, Phase A ends before B.

    A block that no device has yet is counted on the one with the least to do.
    """
    rows = [row for row in planned_cells(study, folder) if row.state in TO_MEASURE]
    overhead = launch_overhead_s(study, folder)
    steps = [(row.launch, row.expected_s) for row in rows]
    steps += [(launch, overhead) for launch in {row.launch for row in rows}]
    # Phase A, and what comes after it: of each block, then of each device.
    blocks: defaultdict[int, list[float]] = defaultdict(lambda: [0.0, 0.0])
    for launch, seconds in steps:
        blocks[launch.block][launch.phase != "A"] += seconds
    devices = {block: _device(study, folder, block) for block in sorted(blocks)}
    busy = {name: [0.0, 0.0] for name in devices.values() if name} or {"": [0.0, 0.0]}
    for block in sorted(devices, key=lambda block: devices[block] is None):
        device = devices[block] or min(busy, key=lambda name: sum(busy[name]))
        busy[device] = [x + y for x, y in zip(busy[device], blocks[block], strict=True)]
    stages = list(zip(*busy.values(), strict=True))
    return Remaining(sum(map(max, stages)), sum(map(sum, stages)), len(busy))


def _device(study: StudyDocument, folder: Path, block: int) -> str | None:
    """What tells the device of a block from others: its slot, or the node that has begun it."""
    if slot := slot_of(study, folder, block):
        return str(slot["id"])
    held = read_claim(folder, block, study["design_sha256"])
    return None if held is None else device_name(held["node"])


def main(argv: Sequence[str] | None = None) -> int:
    """Print the seeded run order with state and expected minutes of each cell."""
    return run_command(study_parser("study.plan", main.__doc__), argv, _show)


def _show(arguments: argparse.Namespace) -> None:
    study = read_study(arguments.study)
    rows = list(planned_cells(study, arguments.study.parent))
    table = Table(box=None, pad_edge=False)
    for heading, justify in (("#", "right"), ("phase", "left"), ("block", "right")):
        table.add_column(heading, justify=justify)  # type: ignore[arg-type]
    for heading in ("configuration", "cell", "state"):
        table.add_column(heading, no_wrap=True)
    table.add_column("min", justify="right")
    table.add_column("reason", overflow="fold")
    numbers = {launch: n for n, launch in enumerate(dict.fromkeys(r.launch for r in rows), 1)}
    for row in rows:
        table.add_row(
            str(numbers[row.launch]),
            row.launch.phase,
            str(row.launch.block),
            row.launch.config,
            row.cell,
            row.state,
            f"{row.expected_s / 60:.2f}" if row.expected_s else "",
            row.reason.replace("[", "\\["),
        )
    console = Console(width=None if sys.stdout.isatty() else 160)
    console.print(table)
    left = remaining(study, arguments.study.parent)
    console.print(
        f"{len(numbers)} launches, {len(rows)} cells, "
        f"{sum(r.state in TO_MEASURE for r in rows)} still to measure, "
        f"about {left.wall_s / 60:.1f} min{left.of_devices} "
        f"(design {study['design_sha256'][:12]}, seed {study['seed']})"
    )
    if rehearsed(study, arguments.study.parent) is None:
        console.print("Minutes of a server that keeps up with every rate; `rehearse` knows better.")


if __name__ == "__main__":
    sys.exit(main())
