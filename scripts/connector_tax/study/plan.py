"""List every launch and cell of a study in run order, with its state.

`snakemake -n` lists jobs in no particular order. This table follows the seeded order, and shows the
state and the expected minutes of each cell (`study.durations`).
"""

import statistics
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from connector_tax.analysis.ingest import device_name
from connector_tax.artifacts import paths
from connector_tax.artifacts.folder import LaunchFolder, StudyFolder
from connector_tax.artifacts.looks import decided_earlier, first_look
from connector_tax.artifacts.names import PHASES, REFERENCE_OF, Launch
from connector_tax.artifacts.record_reader import read_record
from connector_tax.artifacts.stage_records import RatesRecord
from connector_tax.artifacts.study_file import Study, shape_limits
from connector_tax.artifacts.study_records import StudyDocument
from connector_tax.files import ArtifactError
from connector_tax.study.design import cell_order
from connector_tax.study.device import read_claim, slot_of
from connector_tax.study.durations import (
    Durations,
    durations_of,
    expected_rates,
    gates_s,
    probing_s,
)

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
        wall_s: elapsed time.
        device_s: summed over all devices.
        devices: number of devices; blocks that have not begun count only if they have a slot.
    """

    wall_s: float
    device_s: float
    devices: int

    @property
    def of_devices(self) -> str:
        """Return a text with device hours and devices for the remaining time; "" for one device."""
        hours = f", {self.device_s / 3600:.2f} device hours on {self.devices} devices"
        return hours if self.devices > 1 else ""

    def after(self, seconds: float) -> "Remaining":
        """Return the time that remains after all devices have worked for `seconds`."""
        left = max(0.0, 1 - seconds / self.wall_s) if self.wall_s else 0.0
        return self._replace(wall_s=self.wall_s * left, device_s=self.device_s * left)


def reference_rate(folder: Path, phase: str) -> float | None:
    """Return a phase's rate from reference_rates.json; None if unknown, and in Phase A."""
    path = folder / paths.REFERENCE_RATES
    if phase == "A" or not path.exists():
        return None
    return read_record(path, RatesRecord)[REFERENCE_OF[phase]]


def launch_overhead_s(study: StudyDocument, folder: Path, known: Durations) -> float:
    """Return the expected seconds of a launch besides its cells: start-up (measured if possible)
    and release.
    """
    seen = [
        attempt["startup_s"]
        for launch in StudyFolder(Study(folder, study)).launches
        if (index := launch.index) is not None
        for attempt in index.attempts
        if attempt.get("startup_s") is not None
    ]
    startup = statistics.median(seen) if seen else known.startup_s
    return float(startup + study["config"]["server"]["release_s"])


def _is_skipped(folder: Path, known: Durations, phase: str) -> bool:
    """Return whether the phase has no launches: B' if ref_load equals, or will equal, ref_safe."""
    rates = [reference_rate(folder, name) or known.rates_rps.get(name) for name in ("B", "Bp")]
    return phase == "Bp" and rates[0] is not None and rates[0] == rates[1]


def planned_cells(study: StudyDocument, folder: Path) -> Iterator[PlannedCell]:
    """Yield every cell of the study in run order."""
    known, planned = durations_of(study), StudyFolder(Study(folder, study))
    for phase in PHASES:
        limits = shape_limits(study, folder, phase) if (folder / paths.SHAPE_RATES).exists() else {}
        rates = expected_rates(study, phase, reference_rate(folder, phase), known, limits)
        skipped = _is_skipped(folder, known, phase)
        for of_phase in planned.of_phase(phase):
            launch = of_phase.launch
            decided = decided_earlier(folder, launch) if of_phase.index is None else None
            for cell in cell_order(study, launch):
                name = cell["cell"]
                state, reason = _state(of_phase, name)
                if decided is not None:
                    state, reason = "skipped", decided
                shape = (cell["input_tokens"], cell["output_tokens"])
                expected = known.cell_s(study["config"]["cell"], rates[name], shape)
                done = skipped or state in ("done", "void", "skipped")
                yield PlannedCell(launch, name, state, reason, 0.0 if done else expected)


def _state(launch: LaunchFolder, cell: str) -> tuple[str, str]:
    if launch.index is not None:
        status, reason = launch.state(cell)
        return "done" if status == "valid" else status, reason or ""
    try:
        record = launch.record(cell)
        if record is None:
            return "missing", ""
        return "done" if record["valid"] else "void", "; ".join(record["void_reasons"])
    except (ArtifactError, KeyError, TypeError) as error:
        return "damaged", str(error)


def remaining(study: StudyDocument, folder: Path, *, least: bool = False) -> Remaining:
    """Return the remaining time of gates, Phase A, shape probes, and Phases B and B'.

    Devices work side by side. A block without a device counts for the device with the least to do.

    Args:
        least: assume that the first interim analysis decides everything; otherwise, that no
            analysis decides anything.
    """
    known = durations_of(study)
    rows = [row for row in planned_cells(study, folder) if row.state in TO_MEASURE]
    if least and "looks" in study["config"]["statistics"]:
        first = first_look(study["config"]["statistics"])
        rows = [row for row in rows if row.launch.phase == "A" and row.launch.block < first]
    overhead = launch_overhead_s(study, folder, known)
    run = {row.launch for row in rows if not _is_skipped(folder, known, row.launch.phase)}
    steps = [(row.launch, row.expected_s) for row in rows]
    steps += [(launch, overhead) for launch in run]
    # Seconds of Phase A and of what follows: first by block, then by device.
    blocks: defaultdict[int, list[float]] = defaultdict(lambda: [0.0, 0.0])
    for launch, seconds in steps:
        blocks[launch.block][launch.phase != "A"] += seconds
    devices = {block: _device(study, folder, block) for block in sorted(blocks)}
    busy = {name: [0.0, 0.0] for name in devices.values() if name} or {"": [0.0, 0.0]}
    for block in sorted(devices, key=lambda block: devices[block] is None):
        device = devices[block] or min(busy, key=lambda name: sum(busy[name]))
        busy[device] = [x + y for x, y in zip(busy[device], blocks[block], strict=True)]
    stages = list(zip(*busy.values(), strict=True))
    # Gates before any block, probes between Phases A and B; both use one device.
    alone = 0.0 if (folder / paths.PREFLIGHT_STATUS).exists() else gates_s(study, known.startup_s)
    if not (folder / paths.SHAPE_RATES).exists():
        alone += probing_s(study, known.startup_s, known.probes_s)
    return Remaining(alone + sum(map(max, stages)), alone + sum(map(sum, stages)), len(busy))


def _device(study: StudyDocument, folder: Path, block: int) -> str | None:
    """Return the key of a block's device: its slot, or the node on which the block began."""
    if slot := slot_of(study, folder, block):
        return str(slot["id"])
    claim = read_claim(folder, block, study["design_sha256"])
    return None if claim is None else device_name(claim["node"])
