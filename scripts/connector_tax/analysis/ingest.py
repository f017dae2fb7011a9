"""Read the planned cells of a study: each with its status, its record and what it depended on.

Everything that was planned is represented: a cell that was skipped, failed, void or never measured
is an object with that status and the reason, so that it becomes a row.

A block is measured on one device, which its effects therefore hold (docs/method.md, "Several
devices"). A study whose launches ran on one, or did not record theirs, has none to tell apart.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from connector_tax.artifacts import paths
from connector_tax.artifacts.cell_records import CellRecord
from connector_tax.artifacts.index import CellEntry, LaunchIndex, cell_state, read_index
from connector_tax.artifacts.launch_files import ClaimedNode, NodeRecord, nodes_of
from connector_tax.artifacts.names import CellKey, Launch, configuration_of
from connector_tax.artifacts.study_file import Study, cell_rates, launches, shape_limits
from connector_tax.artifacts.study_records import CellPlan
from connector_tax.files import ArtifactError, check_sha256, read_json

NOT_RECORDED = "a device that was not recorded"
# Of a GPU, what tells it from others of its type.
OWN = ("uuid", "pci.bus_id")
# Of a node, the hashes of the lock and of vLLM's sources.
FILES = "engine_files"


@dataclass(frozen=True)
class Cell:
    """One planned cell of one launch.

    Attributes:
        key: where it stands.
        status: valid | void | skipped | missing | failed (the whole launch failed).
        reason: why it is not valid; None for a valid cell.
        folder: where its files lie.
        files: name to SHA-256 of its files, as the launch's index has it.
        record: `cell_<phase>_<cell>.json`; None unless valid or void.
        rate_rps: offered rate; None when no rate was chosen.
        nodes: what the attempts of its launch ran on; none in studies that did not record it.
    """

    key: CellKey
    status: str
    reason: str | None
    folder: Path
    files: Mapping[str, str]
    record: CellRecord | None
    rate_rps: float | None
    input_tokens: int
    output_tokens: int
    nodes: tuple[NodeRecord, ...] = ()

    @property
    def configuration(self) -> str:
        """What its server was started with."""
        return configuration_of(self.key.config)

    @property
    def name(self) -> str:
        """`plain_2/block0/A/r40`."""
        return "/".join((self.key.config, f"block{self.key.block}", *self.key[2:]))

    def file(self, kind: str) -> Path:
        """The path of the cell's `requests`, `metrics` or `engine_step` file."""
        return self.folder / paths.cell_log(kind, self.key.phase, self.key.cell)

    def sha256(self, kind: str) -> str | None:
        """What the index vouches for as that file's hash; None when it does not list the file."""
        return self.files.get(self.file(kind).name)

    def listed(self, kind: str) -> tuple[Path, str]:
        """The path and the hash of a file that a valid cell must have.

        Raises:
            ArtifactError: the index does not list it.
        """
        path, digest = self.file(kind), self.sha256(kind)
        if digest is None:
            index = self.folder.parent / paths.INDEX
            raise ArtifactError(f"{index}: no hash of {path.name}, which a valid cell must have")
        return path, digest


def merged_reasons(reasons: Sequence[tuple[int, str]]) -> str:
    """The reasons of several blocks as one text: `block 0, 2: died; block 1: early send`."""
    by_text: dict[str, list[int]] = {}
    for block, text in reasons:
        by_text.setdefault(text, []).append(block)
    return "; ".join(
        f"block {', '.join(map(str, blocks))}: {text}" for text, blocks in by_text.items()
    )


def load_cells(study: Study, phase: str, rate_rps: float | None = None) -> list[Cell]:
    """Every planned cell of a phase, in the study's order of configurations, blocks and cells.

    Args:
        rate_rps: the phase's reference rate as of now, which the launches of Phases B and Bp must
            have been measured at; not looked at in Phase A.

    Raises:
        ArtifactError: a launch belongs to another design or to another reference rate, or an index
            or a cell file is malformed; names the file and what differs.
    """
    order, cells = study.configs(phase), list[Cell]()
    limits = shape_limits(study.document, study.root, phase)
    rates = cell_rates(study.document, phase, rate_rps, limits)
    planned = launches(study.document, phase)
    for launch in sorted(planned, key=lambda e: (order.index(e.config), e.block)):
        folder = launch.folder(study.root)
        if (index := read_index(folder)) is not None:
            _check_index(index, folder / paths.INDEX, study, launch, rate_rps)
        cells += [
            _cell(launch, cell, index, folder, rates[cell["cell"]]) for cell in study.cells(phase)
        ]
    return cells


def _check_index(
    index: LaunchIndex, path: Path, study: Study, launch: Launch, rate_rps: float | None
) -> None:
    for key in ("config", "block", "phase"):
        said, wanted = getattr(index, key), getattr(launch, key)
        if said != wanted:
            raise ArtifactError(f"{path}: {key} is {said!r}, its folder says {wanted!r}")
    design, wanted = index.depends.get("design_sha256"), study.document["design_sha256"]
    if design != wanted:
        raise ArtifactError(
            f"{path}: depends.design_sha256 is {design}, this study has {wanted}:"
            " the launch belongs to another study; mixtures are refused"
        )
    if launch.phase != "A" and index.status != "skipped" and index.rate_rps != rate_rps:
        raise ArtifactError(
            f"{path}: rate_rps is {index.rate_rps}, the reference rate is now {rate_rps}:"
            " the launch was measured at another rate; mixtures are refused. To measure the phase"
            " at one rate, its launches kept aside:"
            f" connector-tax remeasure {study.root} --phase {launch.phase}"
        )
    unknown = {entry.cell for entry in index.cells} - {c["cell"] for c in study.cells(launch.phase)}
    if unknown:
        raise ArtifactError(f"{path}: cell {min(unknown)!r} is not planned in study.json")


def _cell(
    launch: Launch,
    planned: CellPlan,
    index: LaunchIndex | None,
    folder: Path,
    rate_rps: float | None,
) -> Cell:
    key = CellKey(launch.config, launch.block, launch.phase, planned["cell"])
    entry = None if index is None else index.entry(key.cell)
    attempts = [] if index is None else index.attempts
    status, reason = cell_state(index, entry)
    record: CellRecord | None = None
    if planned["rate_rps"] is None and (index is None or index.rate_rps is None):
        rate_rps = None
    if status in ("valid", "void"):
        assert entry is not None
        path = folder / key.cell / paths.cell_record(key.phase, key.cell)
        record = read_json(path)
        _check_record(record, path, key, entry)
        if record["schedule"]["rate_rps"] != rate_rps:
            raise ArtifactError(
                f"{path}: rate_rps is {record['schedule']['rate_rps']}, the rate of this cell is "
                f"now {rate_rps}: mixtures are refused. To measure the phase at the new rate, its "
                f"launches kept aside: connector-tax remeasure {folder.parents[3]} --phase "
                f"{launch.phase}"
            )
    return Cell(
        key=key,
        status=status,
        reason=reason,
        folder=folder / key.cell,
        files={} if entry is None else entry.files,
        record=record,
        rate_rps=rate_rps,
        input_tokens=planned["input_tokens"],
        output_tokens=planned["output_tokens"],
        nodes=tuple(nodes_of(attempts)),
    )


def _check_record(record: Any, path: Path, key: CellKey, entry: CellEntry) -> None:
    if path.name not in entry.files:
        raise ArtifactError(f"{path.parent.parent / paths.INDEX}: no hash of {path.name}")
    check_sha256(path, entry.files[path.name])
    for name in ("config", "block", "phase", "cell"):
        if record.get(name) != getattr(key, name):
            raise ArtifactError(
                f"{path}: {name} is {record.get(name)!r}, its folder says {getattr(key, name)!r}"
            )
    for name in ("schedule", "window", "counts", "valid", "void_reasons"):
        if name not in record:
            raise ArtifactError(f"{path}: key {name!r} is missing")
    if record["valid"] != (entry.status == "valid"):
        raise ArtifactError(f"{path}: valid is {record['valid']}, index.json says {entry.status!r}")


# ---- devices


def block_devices(cells: Iterable[Cell]) -> dict[int, str]:
    """Block to the name of its device; empty where all blocks have the same.

    Args:
        cells: of any phases of the study.

    Raises:
        ArtifactError: a block has launches on two devices, or the study two types of device or two
            environments.
    """
    cells = list(cells)
    measured = [(cell, node) for cell in cells for node in cell.nodes]
    names: dict[int, str] = {}
    for cell, node in measured:
        name = device_name(node)
        known = names.setdefault(cell.key.block, name)
        if known != name:
            raise ArtifactError(
                f"{cell.folder.parent}: measured on {name}, the block's other launches on {known}:"
                " launches of one block are compared, and must be of one device (docs/devices.md)"
            )
    _check_types(measured)
    if len(set(names.values())) < 2:
        return {}
    return {cell.key.block: names.get(cell.key.block, NOT_RECORDED) for cell in cells}


def device_name(node: ClaimedNode) -> str:
    """The machine's alias and its GPUs' UUIDs; without GPUs `server.device` and the CPUs."""
    name = " ".join([node["machine"], *node["devices"]])
    return name if node["gpus"] else f"{name}, CPUs {node['cpus']}"


def _check_types(measured: Iterable[tuple[Cell, NodeRecord]]) -> None:
    known: dict[str, tuple[Cell, Any]] = {}
    for cell, node in measured:
        for key, value in device_type(node).items():
            first, wanted = known.setdefault(key, (cell, value))
            if value == wanted:
                continue
            what = "environments" if key == FILES else "types of device"
            raise ArtifactError(
                f"two {what} are never pooled: {key} is {wanted!r} in block {first.key.block} and"
                f" {value!r} in block {cell.key.block}. Measure a study with one; two studies are"
                " compared by `snakemake compare` (docs/compare.md)"
            )


def device_type(node: NodeRecord) -> dict[str, Any]:
    """What must be the same for all launches."""
    gpus = [{k: v for k, v in gpu.items() if k not in OWN} for gpu in node["gpus"]]
    return {
        "gpus": gpus, "cpu": node["cpu"], "quota_cpus": node["quota_cpus"],
        FILES: node["engine_files"],
    }  # fmt: skip
