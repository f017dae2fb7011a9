"""What the design, the gates and the launches' own files must be, whatever was measured.

The design follows from the configuration and the seed. Launches of a block ran in the drawn order,
one after the other, on one device (docs/method.md, "Design: blocks of launches"): by
CLOCK_MONOTONIC within a boot of a machine, since the time of day may be set while a study runs.
"""

import itertools
import re
import shlex
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from connector_tax.analysis.looks import decided_earlier, read_looks
from connector_tax.artifacts import paths
from connector_tax.artifacts.index import LaunchIndex, read_index
from connector_tax.artifacts.launch_files import AttemptRecord, LaunchConfig, NodeRecord
from connector_tax.artifacts.names import PHASES, Launch
from connector_tax.artifacts.record_reader import read_record
from connector_tax.artifacts.stage_records import GateRecord, RatesRecord
from connector_tax.artifacts.study_file import Study, every_launch, launches
from connector_tax.artifacts.study_records import ConfigurationEntry
from connector_tax.files import read_json, sha256_json
from connector_tax.provenance.claims import Ledger
from connector_tax.servers.kinds import engine_of
from connector_tax.study.design import cell_order, cells_of, described, measured_design, run_order

# Of a node, what may change without another device: a reboot, the next job of a scheduler.
PASSING = ("boot", "job", "exclusive")
# Of a GPU, what tells it from others of its type.
OWN = ("uuid", "pci.bus_id")


def check_launches(study: Study, ledger: Ledger) -> None:
    """A claim for the design, the environment, each gate, each launch, and the order of each block.

    A launch without a readable index.json fails alone.
    """
    ledger.check("design", "study.json", _design(study), "follows from configuration and seed")
    ledger.check("environment", "environment.json", _environment(study), "what env.txt says")
    for entry in study.document["configurations"]:
        ledger.check("gate", entry["id"], _gate(study, entry))
    ended: dict[Launch, LaunchIndex] = {}
    for launch in every_launch(study.document):
        with ledger.guarded("launch", launch.name):
            index = read_index(launch.folder(study.root))
            ledger.check("launch", launch.name, _launch(study, launch, index))
            if index is not None:
                ended[launch] = index
    with ledger.guarded("order", "blocks"):
        _check_blocks(study, ended, ledger)


def _design(study: Study) -> Iterator[str]:
    document, config = study.document, study.config
    design = measured_design(config, document["configurations"])
    kind = engine_of(config["engine"])
    expected = {
        "design_sha256": sha256_json(design),
        "study": config["study"],
        "seed": config["seed"],
        "blocks": config["blocks"],
        "engine_label": config["engine"]["label"],
        "emulated": kind.emulated,
        "run_order": run_order(config),
        "cells": {phase: cells_of(config, phase) for phase in PHASES},
    }
    for key, value in expected.items():
        if document[key] != value:  # type: ignore[literal-required]
            yield f"{key} is not what the configuration and the seed give"
    emulated = document["emulated"] or config["engine"].get("device") == "emulated"
    if ("emulated" in document["engine_label"]) != emulated:
        label, named = document["engine_label"], config["engine"]["kind"]
        yield f"engine_label {label!r}, the engine is {named!r}"


def _environment(study: Study) -> Iterator[str]:
    """env.txt begins with environment.json, a line each."""
    environment = read_json(study.root / paths.ENVIRONMENT)
    text = (study.root / paths.ENV_TEXT).read_text(encoding="utf-8")
    lines = text.partition("\n\n")[0].splitlines()
    captured = [f"{key}: {value}" for key, value in environment.items()]
    yield from (f"{line!r} is not in env.txt" for line in captured if line not in lines)
    yield from (f"env.txt has {line!r}" for line in lines if line not in captured)
    if environment["engine_label"] != study.document["engine_label"]:
        yield f"engine_label is {environment['engine_label']!r}"


def _gates(study: Study) -> dict[str, GateRecord]:
    gates: dict[str, GateRecord] = read_json(study.root / paths.PREFLIGHT_STATUS)
    return gates


def _gate(study: Study, entry: ConfigurationEntry) -> Iterator[str]:
    """What pre-flight decided stands in the log of the gate."""
    said = _gates(study)[entry["id"]]
    evidence = said.get("evidence")
    if evidence is None:
        if engine_of(study.config["engine"]).gate_of(entry) or not said["include"]:
            yield "left out without a gate, or preflight_status.json names no log of its gate"
        return
    decision = f"{'INCLUDE' if said['include'] else 'SKIP'}: {said['reason']}"
    text = (study.root / evidence).read_text(encoding="utf-8")
    if not text.rstrip("\n").endswith(f" {decision}"):
        yield f"{evidence} does not end with {decision!r}"


def _launch(study: Study, launch: Launch, index: LaunchIndex | None) -> Iterator[str]:
    if index is None:
        yield "index.json is missing"
        return
    for key in ("config", "block", "phase"):
        if getattr(index, key) != getattr(launch, key):
            yield f"index.json: {key} is {getattr(index, key)!r}, its folder says otherwise"
    if index.depends["design_sha256"] != study.document["design_sha256"]:
        yield "depends.design_sha256 is of another design"
    if index.label != study.document["engine_label"]:
        yield f"index.json: label is {index.label!r}"
    planned = cell_order(study.document, launch)
    if sorted(entry.cell for entry in index.cells) != sorted(cell["cell"] for cell in planned):
        yield "index.json does not list the cells that the design plans"
    rates = read_record(study.root / paths.REFERENCE_RATES, RatesRecord)
    if index.status == "skipped":
        yield from _skipped(study, launch, index, rates)
        return
    rate = {"A": None, "B": rates["ref_safe"], "Bp": rates["ref_load"]}[launch.phase]
    if index.rate_rps != rate:
        yield f"rate_rps is {index.rate_rps}, reference_rates.json says {rate}"
    folder = launch.folder(study.root)
    for entry in index.cells:
        if entry.status == "skipped":
            yield f"{entry.cell} is skipped, and its launch is not"
    if index.status == "done":
        yield from _run_files(study, launch, folder)


def _skipped(study: Study, launch: Launch, index: LaunchIndex, rates: RatesRecord) -> Iterator[str]:
    gate = _gates(study)[launch.configuration]
    if not (index.reason or "").strip():
        yield "skipped without a reason"
    same_rates = launch.phase == "Bp" and rates["ref_safe"] == rates["ref_load"]
    if gate["include"] and not same_rates and not _ended_before(study, launch, index.reason):
        yield "skipped, though pre-flight includes it and no rule leaves it out"
    if any(launch.folder(study.root).glob("*/cell_*.json")):
        yield "skipped, though there are measured cells"


def _ended_before(study: Study, launch: Launch, reason: str | None) -> bool:
    """Whether a look had decided the launch, or the study has ended between two blocks before."""
    if not read_looks(study.root) or launch.phase != "A":
        return False
    if reason == decided_earlier(study.root, launch):
        return True
    rest = [la for la in launches(study.document, "A") if la.block >= launch.block]
    indexes = [read_index(la.folder(study.root)) for la in rest]
    return all(index is not None and index.status == "skipped" for index in indexes)


def _run_files(study: Study, launch: Launch, folder: Path) -> Iterator[str]:
    """launch.sh runs what config.json says, which is what study.json says."""
    missing = [name for name in paths.LAUNCH_FILES if not (folder / name).is_file()]
    yield from (f"{name} is missing" for name in missing)
    if missing:
        return
    config = read_record(folder / paths.LAUNCH_CONFIG, LaunchConfig)
    for key, value in described(study.document, launch).items():
        if config[key] != value:  # type: ignore[literal-required]
            yield f"config.json: {key} is not what study.json says"
    script = (folder / paths.LAUNCH_SCRIPT).read_text(encoding="utf-8")
    # launch.sh has the project's and the temporary folder in variables of its own.
    script = script.replace('"$root"', "{root}").replace('"${TMPDIR:-/tmp}"', "{tmp}")
    # The command is pinned to CPUs by `taskset` where the study pins it.
    argv = shlex.split(script.rpartition("\nexec ")[2])
    pinned = argv[3:] if argv[:2] == ["taskset", "--cpu-list"] else argv
    if pinned != config["argv"]:
        yield "launch.sh does not run config.json's argv"
    exports = [shlex.split(line)[1] for line in re.findall(r"^export .*$", script, re.MULTILINE)]
    if dict(export.split("=", 1) for export in exports) != config["environment"]:
        yield "launch.sh does not set config.json's environment"
    if (folder / paths.ENV_TEXT).read_bytes() != (study.root / paths.ENV_TEXT).read_bytes():
        yield "env.txt differs from the study's env.txt"


# ---- blocks


class Attempt(NamedTuple):
    """One start of a launch's server: whose, on what, and when by its machine's monotonic clock.

    Attributes:
        start_ns, end_ns: CLOCK_MONOTONIC; of an attempt of release 0.2 those of its cells. None
            where the attempt was killed before anything was measured.
    """

    launch: Launch
    node: NodeRecord
    supersedes: bool
    start_ns: int | None
    end_ns: int | None

    @property
    def clock(self) -> tuple[str, str]:
        """Only moments of one boot of one machine compare."""
        return self.node["machine"], self.node["boot"]


def _check_blocks(study: Study, ended: dict[Launch, LaunchIndex], ledger: Ledger) -> None:
    attempts = [
        _attempt(study, launch, entry)
        for launch, index in ended.items()
        for entry in index.attempts
        if "node" in entry
    ]
    for phase, block in itertools.product(PHASES, range(study.document["blocks"])):
        mine = [a for a in attempts if (a.launch.phase, a.launch.block) == (phase, block)]
        firsts = [next(group) for _, group in itertools.groupby(mine, lambda a: a.launch)]
        if firsts:
            ledger.check("order", f"block{block}/{phase}", _out_of_order(firsts), "as drawn")
    groups: dict[str, list[Attempt]] = {}
    for attempt in attempts:
        for place in (f"block{attempt.launch.block}", *_places(attempt.node)):
            groups.setdefault(place, []).append(attempt)
    for place, group in groups.items():
        ledger.check("overlap", place, _overlapping(group), f"{len(group)} starts")
    for block in sorted({attempt.launch.block for attempt in attempts}):
        mine = [attempt for attempt in attempts if attempt.launch.block == block]
        ledger.check("device", f"block{block}", _unlike(mine, _device), "one device")
    ledger.check("device", "whole study", _unlike(attempts, _type), "one type, one environment")
    ledger.check("device", "step probe", _not_proved(study, attempts), "proved on these sources")


def _attempt(study: Study, launch: Launch, entry: AttemptRecord) -> Attempt:
    start, end = entry.get("started_ns"), entry.get("ended_ns")
    if start is None or end is None:
        cells = [read_json(p) for p in launch.folder(study.root).glob("*/cell_*.json")]
        windows = [cell["window"] for cell in cells if cell["attempt"] == entry["attempt"]]
        start = start or min((w["t_origin_ns"] for w in windows), default=None)
        end = max((w["t_drained_ns"] for w in windows), default=start)
    return Attempt(launch, entry["node"], bool(entry.get("supersedes")), start, end)


def _out_of_order(drawn: Sequence[Attempt]) -> Iterator[str]:
    """Launches that began before one drawn earlier, but for those measured again on request."""
    begun = [a for a in drawn if a.start_ns is not None and not a.supersedes]
    for before, after in itertools.pairwise(begun):
        if before.clock == after.clock and after.start_ns < before.start_ns:  # type: ignore[operator]
            yield f"{after.launch.name} began before {before.launch.name}, which is drawn first"


def _places(node: NodeRecord) -> list[str]:
    if node["gpus"]:
        return list(node["devices"])
    return [f"{node['machine']} {name}, CPUs {node['cpus']}" for name in node["devices"]]


def _overlapping(group: Sequence[Attempt]) -> Iterator[str]:
    timed = [(a.clock, a.start_ns, a.end_ns, a.launch.name) for a in group if a.start_ns]
    for (clock, _, end, before), (other, start, _, name) in itertools.pairwise(
        sorted(timed, key=lambda t: t[:2])
    ):
        if clock == other and end is not None and start < end:
            yield f"{name} began {(end - start) / 1e9:.1f} s before {before} ended"


def _device(node: NodeRecord) -> dict[str, Any]:
    shared = ("engine_files", *PASSING)
    return {key: value for key, value in node.items() if key not in shared}


def _type(node: NodeRecord) -> dict[str, Any]:
    gpus = [{k: v for k, v in gpu.items() if k not in OWN} for gpu in node["gpus"]]
    files = node.get("engine_files")
    return {"gpus": gpus, "cpu": node["cpu"], "quota": node["quota_cpus"], "engine files": files}


def _unlike(
    attempts: Sequence[Attempt], what: Callable[[NodeRecord], dict[str, Any]]
) -> Iterator[str]:
    """What differs from the first attempt, with both values."""
    for attempt in attempts[1:]:
        wanted, found = what(attempts[0].node), what(attempt.node)
        for key in wanted:
            if wanted[key] != found.get(key):
                first = f"{attempts[0].launch.name} on {wanted[key]!r}"
                yield f"{key}: {first}, {attempt.launch.name} on {found.get(key)!r}"


def _not_proved(study: Study, attempts: Sequence[Attempt]) -> Iterator[str]:
    """vLLM's sources are those on which the step probe was proved."""
    proved = read_json(study.root / paths.PATCH_STATUS).get("vllm_sources_sha256_before")
    files = attempts[0].node.get("engine_files", {}) if attempts else {}
    python = study.config["engine"].get("python")
    ran = files[python]["sources_sha256"] if python in files else None
    if None not in (proved, ran) and proved != ran:
        yield f"vLLM's sources are {ran}, {proved} where step timing was proved"
