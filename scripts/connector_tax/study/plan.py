"""What the study will do, has done and still has to do: every launch and cell in run order.

`snakemake -n` lists jobs in no particular order; this table is the seeded order itself, with the
state of each cell and the minutes it is expected to take: from a model of the machine, else
assumed. The model is `rehearsal.durations`; what it says is kept in durations.json. Without it a
server is taken to keep up with every rate.
"""

import statistics
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from msgspec.structs import asdict

from connector_tax.analysis.ingest import device_name
from connector_tax.artifacts import paths
from connector_tax.artifacts.index import LaunchIndex, cell_state, read_index
from connector_tax.artifacts.looks import FIRST_LOOK, decided_earlier
from connector_tax.artifacts.names import PHASES, REFERENCE_OF, Launch
from connector_tax.artifacts.record_reader import converted, read_record
from connector_tax.artifacts.stage_records import Durations, DurationsRecord, RatesRecord
from connector_tax.artifacts.study_file import cell_rates, every_launch, launches, shape_limits
from connector_tax.artifacts.study_records import StudyConfig, StudyDocument
from connector_tax.files import ArtifactError, read_json
from connector_tax.servers.kinds import engine_of
from connector_tax.study.design import cell_order
from connector_tax.study.device import read_claim, slot_of

# ---- durations


def gates_s(study: StudyDocument, startup_s: float) -> float:
    """Expected seconds of all gates."""
    engine = engine_of(study["config"]["engine"])
    gates = sum(engine.gate_of(entry) is not None for entry in study["configurations"])
    return float(gates * (startup_s + engine.gate_s))


def probing_s(study: StudyDocument, known: Durations) -> float:
    """Expected seconds of the stage that probes the shapes; 0 in a study without it."""
    if study["config"].get("shape_rates") is None:
        return 0.0
    return known.startup_s + engine_of(study["config"]["engine"]).gate_s + known.probes_s


def assumed(study: StudyDocument, why: str) -> Durations:
    """What is said where there is no model of the machine, for the reason `why`."""
    engine, shape_rates = study["config"]["engine"], study["config"].get("shape_rates")
    startup_s = engine_of(engine).startup_s
    shapes = {cell["cell"] for phase in ("B", "Bp") for cell in study["cells"][phase]}
    probe_s = len(shapes) * shape_rates["probe_s"] if shape_rates else 0.0
    how = "assumed" if engine.get("device") == "cuda" else "as in the shipped studies"
    source = f"if the server keeps up with every rate, a start-up of {startup_s:g} s {how}; {why}"
    return Durations(startup_s, probe_s, source)


def durations_content(study: StudyDocument, known: Durations) -> dict[str, Any]:
    """The content of durations.json."""
    machine = study["config"].get("rehearsal")
    return {"design_sha256": study["design_sha256"], "machine": machine, **asdict(known)}


def read_durations(study: StudyDocument, folder: Path) -> Durations | None:
    """What durations.json says; None where there is none of this design and machine."""
    path = folder / paths.DURATIONS
    if not path.exists():
        return None
    known = converted(read_json(path), DurationsRecord, str(path))
    # The section that names the machine is no part of the design.
    own = (study["design_sha256"], study["config"].get("rehearsal"))
    return known if (known.design_sha256, known.machine) == own else None


def known_durations(study: StudyDocument, folder: Path) -> Durations:
    """What durations.json says, else what is assumed."""
    known = read_durations(study, folder)
    return assumed(study, f"no {paths.DURATIONS}") if known is None else known


# ---- the plan

TO_MEASURE = ("missing", "failed", "damaged")


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
    return read_record(path, RatesRecord)[REFERENCE_OF[phase]]


def expected_cell_s(config: StudyConfig, rate_rps: float | None) -> float:
    """Expected seconds of a cell of a server that keeps up: warm-up, and the window at this rate.

    The window is max(floor, time to the successes wanted), at most the cap; an unknown rate counts
    as the floor. Overload is known to a model only.
    """
    cell = config["cell"]
    window = cell["floor_s"]
    if rate_rps is not None:
        window = min(max(window, cell["min_completed"] / rate_rps), cell["cap_s"])
    return float(cell["warmup_s"] + window)


def launch_overhead_s(study: StudyDocument, folder: Path, known: Durations) -> float:
    """Expected seconds of a launch beside its cells: start-up as seen, else known, and release."""
    seen = [
        attempt["startup_s"]
        for launch in every_launch(study)
        if (index := read_index(launch.folder(folder))) is not None
        for attempt in index.attempts
        if attempt.get("startup_s") is not None
    ]
    startup = statistics.median(seen) if seen else known.startup_s
    return float(startup + study["config"]["server"]["release_s"])


def _is_skipped(folder: Path, known: Durations, phase: str) -> bool:
    """Whether no launch of the phase will be run: B' where ref_load is, or will be, ref_safe."""
    rates = [reference_rate(folder, name) or known.rates_rps.get(name) for name in ("B", "Bp")]
    return phase == "Bp" and rates[0] is not None and rates[0] == rates[1]


def planned_cells(
    study: StudyDocument, folder: Path, known: Durations | None = None
) -> Iterator[PlannedCell]:
    """Every cell of the study in the order it runs.

    Args:
        known: how long parts take; not given, what the folder says or what is assumed.
    """
    known = known or known_durations(study, folder)
    for phase in PHASES:
        limits = shape_limits(study, folder, phase) if (folder / paths.SHAPE_RATES).exists() else {}
        reference_rps = reference_rate(folder, phase)
        rates = cell_rates(study, phase, reference_rps, limits)
        # What is known holds for the rates that were expected.
        holds = reference_rps in (None, known.rates_rps.get(phase))
        seconds = known.cells.get(phase, {}) if holds else {}
        skipped = _is_skipped(folder, known, phase)
        for launch in launches(study, phase):
            path = launch.folder(folder)
            index = read_index(path)
            decided = decided_earlier(folder, launch) if index is None else None
            for cell in cell_order(study, launch):
                name = cell["cell"]
                state, reason = _state(path, name, index, launch.phase)
                if decided is not None:
                    state, reason = "skipped", decided
                expected = seconds.get(name, expected_cell_s(study["config"], rates[name]))
                done = skipped or state in ("done", "void", "skipped")
                yield PlannedCell(launch, name, state, reason, 0.0 if done else expected)


def _state(folder: Path, cell: str, index: LaunchIndex | None, phase: str) -> tuple[str, str]:
    if index is not None:
        status, reason = cell_state(index, index.entry(cell))
        return "done" if status == "valid" else status, reason or ""
    path = folder / cell / paths.cell_record(phase, cell)
    if path.exists():
        try:
            content = read_json(path)
            reasons = "; ".join(content["void_reasons"])
            return "done" if content["valid"] else "void", reasons
        except (ArtifactError, KeyError, TypeError) as error:
            return "damaged", str(error)
    return "missing", ""


def remaining(
    study: StudyDocument, folder: Path, known: Durations | None = None, *, least: bool = False
) -> Remaining:
    """What is left to do: gates, then Phase A, the probes of the shapes, and B with B'.

    Devices work side by side. A block that no device has yet is counted on the one with the least
    to do. Arguments as those of `planned_cells`.

    Args:
        least: as if the first look decided everything; else as if none decided anything.
    """
    known = known or known_durations(study, folder)
    rows = [row for row in planned_cells(study, folder, known) if row.state in TO_MEASURE]
    if least and "looks" in study["config"]["statistics"]:
        rows = [row for row in rows if row.launch.phase != "A" or row.launch.block < FIRST_LOOK]
    overhead = launch_overhead_s(study, folder, known)
    run = {row.launch for row in rows if not _is_skipped(folder, known, row.launch.phase)}
    steps = [(row.launch, row.expected_s) for row in rows]
    steps += [(launch, overhead) for launch in run]
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
    # Before any block, and between Phases A and B, on one device.
    alone = 0.0 if (folder / paths.PREFLIGHT_STATUS).exists() else gates_s(study, known.startup_s)
    alone += 0.0 if (folder / paths.SHAPE_RATES).exists() else probing_s(study, known)
    return Remaining(alone + sum(map(max, stages)), alone + sum(map(sum, stages)), len(busy))


def _device(study: StudyDocument, folder: Path, block: int) -> str | None:
    """What tells the device of a block from others: its slot, or the node that has begun it."""
    if slot := slot_of(study, folder, block):
        return str(slot["id"])
    held = read_claim(folder, block, study["design_sha256"])
    return None if held is None else device_name(held["node"])
