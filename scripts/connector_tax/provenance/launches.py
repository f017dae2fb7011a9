"""What the design, the gates and the launches' own files must be, whatever was measured.

The design follows from the configuration and the seed. Launches of a block ran in the drawn order,
one after the other, on one device (docs/method.md, "Design: blocks of launches"): by
CLOCK_MONOTONIC within a boot of a machine, since the time of day may be set while a study runs.
"""

import itertools
import json
import re
import shlex
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

from connector_tax import __version__
from connector_tax.analysis.ingest import device_type
from connector_tax.analysis.looks import decided_earlier
from connector_tax.artifacts import paths
from connector_tax.artifacts.index import LaunchIndex, read_index
from connector_tax.artifacts.launch_files import AttemptRecord, LaunchConfig, NodeRecord
from connector_tax.artifacts.looks import read_looks
from connector_tax.artifacts.names import PHASES, Launch
from connector_tax.artifacts.rates import most_of_shape
from connector_tax.artifacts.record_reader import read_record, read_records
from connector_tax.artifacts.stage_records import GateRecord, RatesRecord, ShapeRatesRecord
from connector_tax.artifacts.study_file import Study, every_launch, launches
from connector_tax.artifacts.study_records import ConfigurationEntry, StudyDocument
from connector_tax.files import read_json, sha256_json
from connector_tax.provenance.claims import Ledger
from connector_tax.provenance.environment import text as environment_text
from connector_tax.provenance.remade import differences
from connector_tax.servers.kinds import command_for, engine_of
from connector_tax.study.design import cells_of, described, measured_design, run_order
from connector_tax.study.device import on_slot, slot_at
from connector_tax.study.launch import LaunchOutcome, index_of
from connector_tax.study.plan import reference_rate
from connector_tax.study.server_command import MARKS, OVERLAY

# Of a node, what may change without another device: a reboot, the next job of a scheduler.
PASSING = ("boot", "job", "exclusive")
# Of a command, what a launch finds free, and where its study lies.
FREE_PORT = re.compile(r"(port\W{1,8}|(?:127\.0\.0\.1|localhost):)\d+", re.IGNORECASE)
STUDY_FOLDER = re.compile(rf'[^:"]*(?=/{paths.PATCH}/{OVERLAY})')


def check_launches(study: Study, ledger: Ledger) -> None:
    """A claim for the design, each gate, each launch, and the order and device of each block.

    A launch without a readable index.json fails alone.
    """
    ledger.check("design", paths.STUDY, _design(study), "follows from configuration and seed")
    if study.config.get("shape_rates") is not None:
        ledger.check("design", "shape rates", _shape_rates(study), "follow from what was served")
    ledger.check(
        "environment", paths.ENVIRONMENT, _environment(study), f"what {paths.ENV_TEXT} says"
    )
    gates: dict[str, GateRecord] = read_json(study.root / paths.PREFLIGHT_STATUS)
    for entry in study.document["configurations"]:
        ledger.check("gate", entry["id"], _gate(study, entry, gates))
    attempts: list[Attempt] = []
    for launch in every_launch(study.document):
        with ledger.guarded("launch", launch.name):
            index = read_index(launch.folder(study.root))
            ledger.check("launch", launch.name, _launch(study, launch, index, gates))
            ran = index.attempts if index is not None else []
            attempts += [_attempt(study, launch, entry) for entry in ran if "node" in entry]
            if index is not None and index.status == "done":
                _check_command(study, launch, index, ledger)
    with ledger.guarded("order", "blocks"):
        _check_blocks(study, attempts, ledger)


def _design(study: Study) -> Iterator[str]:
    document, config = study.document, study.config
    design = measured_design(config, document["configurations"])
    expected = {
        "design_sha256": sha256_json(design),
        "study": config["study"],
        "seed": config["seed"],
        "blocks": config["blocks"],
        "engine_label": config["engine"]["label"],
        "emulated": engine_of(config["engine"]).emulated,
        "run_order": run_order(config),
        "cells": {phase: cells_of(config, phase) for phase in PHASES},
    }
    said = {key: value for key, value in document.items() if key in expected}
    yield from differences(said, expected, "study")
    emulated = document["emulated"] or config["engine"].get("device") == "emulated"
    if ("emulated" in document["engine_label"]) != emulated:
        label, named = document["engine_label"], config["engine"]["kind"]
        yield f"engine_label {label!r}, the engine is {named!r}"


def _shape_rates(study: Study) -> Iterator[str]:
    section = study.config["shape_rates"]
    assert section is not None
    shapes = read_record(study.root / paths.SHAPE_RATES, ShapeRatesRecord)["shapes"]
    for name, shape in shapes.items():
        most = most_of_shape(section["max_share"], shape["completed_s"])
        if shape["most_rps"] != most:
            yield f"{name}: most_rps is {shape['most_rps']}, what was served gives {most}"


def _environment(study: Study) -> Iterator[str]:
    """env.txt begins with environment.json, a line each."""
    environment = read_json(study.root / paths.ENVIRONMENT)
    said = (study.root / paths.ENV_TEXT).read_text(encoding="utf-8").partition("\n\n")[0]
    made = environment_text(environment, {})
    yield from differences(said.split("\n"), made.splitlines(), paths.ENV_TEXT)
    if environment["engine_label"] != study.document["engine_label"]:
        yield f"engine_label is {environment['engine_label']!r}"


def _gate(study: Study, entry: ConfigurationEntry, gates: dict[str, GateRecord]) -> Iterator[str]:
    """What pre-flight decided stands in the log of the gate."""
    said = gates[entry["id"]]
    evidence = said.get("evidence")
    if evidence is None:
        if engine_of(study.config["engine"]).gate_of(entry) or not said["include"]:
            yield "left out without a gate, or preflight_status.json names no log of its gate"
        return
    decision = f"{'INCLUDE' if said['include'] else 'SKIP'}: {said['reason']}"
    text = (study.root / evidence).read_text(encoding="utf-8")
    if not text.rstrip("\n").endswith(f" {decision}"):
        yield f"{evidence} does not end with {decision!r}"


# ---- a launch


def _launch(
    study: Study, launch: Launch, index: LaunchIndex | None, gates: dict[str, GateRecord]
) -> Iterator[str]:
    folder = launch.folder(study.root)
    if index is None:
        yield "index.json is missing"
        return
    yield from _index(study, launch, index)
    if index.status == "skipped":
        if not (index.reason or "").strip():
            yield "skipped without a reason"
        if gates[launch.configuration]["include"] and not _left_out(study, launch, index.reason):
            yield "skipped, though pre-flight includes it and no rule leaves it out"
        if any(folder.glob("*/cell_*.json")):
            yield "skipped, though there are measured cells"
    elif index.status == "done":
        yield from _run_files(study, launch, index)


def _left_out(study: Study, launch: Launch, reason: str | None) -> bool:
    """Whether the rates are the same, or looks had decided the launch or ended the study before."""
    rates = read_record(study.root / paths.REFERENCE_RATES, RatesRecord)
    if launch.phase == "Bp":
        return rates["ref_safe"] == rates["ref_load"]
    if launch.phase == "B" or not read_looks(study.root):
        return False
    if reason == decided_earlier(study.root, launch):
        return True
    rest = [la for la in launches(study.document, "A") if la.block >= launch.block]
    indexes = [read_index(la.folder(study.root)) for la in rest]
    return all(index is not None and index.status == "skipped" for index in indexes)


def _index(study: Study, launch: Launch, index: LaunchIndex) -> Iterator[str]:
    """index.json is what the design, attempts.json and the cells' records give."""
    folder, skipped = launch.folder(study.root), index.status == "skipped"
    rate = None if skipped else reference_rate(study.root, launch.phase)
    ran = folder / paths.ATTEMPTS
    attempts = read_records(ran, AttemptRecord) if ran.exists() else []
    outcome = LaunchOutcome(index.status, index.reason, rate, attempts)
    again = index_of(study.document, launch, folder, outcome)
    beside = ("files", "seal", *(() if attempts else ("started_utc", "ended_utc")))
    said = {k: v for k, v in read_json(folder / paths.INDEX).items() if k not in beside}
    again = {k: v for k, v in again.items() if k not in beside}
    yield from differences(said, again, paths.INDEX)


def _run_files(study: Study, launch: Launch, index: LaunchIndex) -> Iterator[str]:
    """launch.sh runs what config.json says, which is what study.json says, in its environment."""
    folder = launch.folder(study.root)
    config = read_record(folder / paths.LAUNCH_CONFIG, LaunchConfig)
    design = described(_on_its_slot(study, index), launch)
    said = {key: value for key, value in config.items() if key in design}
    yield from differences(said, design, "config.json")
    if (folder / paths.ENV_TEXT).read_bytes() != (study.root / paths.ENV_TEXT).read_bytes():
        yield "env.txt differs from the study's"
    script = (folder / paths.LAUNCH_SCRIPT).read_text(encoding="utf-8")
    for mark, variable in MARKS.items():
        script = script.replace(variable, mark)
    # The command is pinned to CPUs by `taskset` where the study pins it.
    argv = shlex.split(script.rpartition("\nexec ")[2])
    pinned = argv[3:] if argv[:2] == ["taskset", "--cpu-list"] else argv
    if pinned != config["argv"]:
        yield "launch.sh does not run config.json's argv"
    exports = [shlex.split(line)[1] for line in re.findall(r"^export .*$", script, re.MULTILINE)]
    if dict(export.split("=", 1) for export in exports) != config["environment"]:
        yield "launch.sh does not set config.json's environment"


def _check_command(study: Study, launch: Launch, index: LaunchIndex, ledger: Ledger) -> None:
    """A claim for the command of config.json: that of the study, made again but for free ports."""
    folder, kind = launch.folder(study.root), engine_of(study.config["engine"])
    timed = read_json(study.root / paths.PATCH_STATUS)["step_timing_available"]
    probe = study.root / paths.PATCH / OVERLAY if kind.takes_probe and timed else None
    port = index.attempts[-1].get("port", 0) if index.attempts else 0
    made = command_for(_on_its_slot(study, index), launch, port, probe)
    config = read_json(folder / paths.LAUNCH_CONFIG)
    said = config["argv"], {**config["environment"]}
    again = made.argv, {**made.environment}
    if made.callers:  # Its PYTHONPATH ends with that of whoever started the study.
        for _, environment in (said, again):
            environment.pop("PYTHONPATH", None)
    wrong = list(differences(_comparable(*said), _comparable(*again), "config.json"))
    version = study.document["package_version"]
    if wrong and version != __version__:
        reason = f"another than this version's, measured with {version}: {wrong[0]}"
        ledger.not_checkable("command", launch.name, reason)
    else:
        ledger.check("command", launch.name, wrong, "follows from the study")


def _comparable(argv: Sequence[str], environment: dict[str, str]) -> Any:
    """A command without its free ports, and without where the study's folder is."""
    text = json.dumps({"argv": argv, "environment": environment})
    return json.loads(STUDY_FOLDER.sub("", FREE_PORT.sub(r"\g<1>0", text)))


def _on_its_slot(study: Study, index: LaunchIndex) -> StudyDocument:
    """The study as it was on the slot that a launch ran on, where it names slots."""
    nodes = [attempt["node"] for attempt in index.attempts if "node" in attempt]
    slot = slot_at(study.document, nodes[-1]["cpus"]) if nodes else None
    return study.document if slot is None else on_slot(study.document, slot)


# ---- blocks


class Attempt(NamedTuple):
    """One start of a launch's server: whose, on what, and when by its machine's monotonic clock.

    Attributes:
        start_ns, end_ns: CLOCK_MONOTONIC; of one that was killed the end of its last cell.
    """

    launch: Launch
    node: NodeRecord
    supersedes: bool
    start_ns: int
    end_ns: int

    @property
    def clock(self) -> tuple[str, str]:
        """Only moments of one boot of one machine compare."""
        return self.node["machine"], self.node["boot"]


def _attempt(study: Study, launch: Launch, entry: AttemptRecord) -> Attempt:
    start, end = entry["started_ns"], entry.get("ended_ns")
    if end is None:
        cells = [read_json(p) for p in launch.folder(study.root).glob("*/cell_*.json")]
        windows = [cell["window"] for cell in cells if cell["attempt"] == entry["attempt"]]
        end = max((w["t_drained_ns"] for w in windows), default=start)
    return Attempt(launch, entry["node"], bool(entry["supersedes"]), start, end)


def _check_blocks(study: Study, attempts: Sequence[Attempt], ledger: Ledger) -> None:
    """Attempts as `every_launch` has their launches: by phase, and as they were drawn."""
    drawn, alone, blocks = (defaultdict[str, list[Attempt]](list) for _ in range(3))
    for attempt in attempts:
        block, node = f"block{attempt.launch.block}", attempt.node
        drawn[f"{block}/{attempt.launch.phase}"].append(attempt)
        blocks[block].append(attempt)
        own = [f"{node['machine']} {name}, CPUs {node['cpus']}" for name in node["devices"]]
        for place in (block, *(node["devices"] if node["gpus"] else own)):
            alone[place].append(attempt)
    for subject, group in drawn.items():
        ledger.check("order", subject, _out_of_order(group), "as drawn")
    for subject, group in alone.items():
        ledger.check("overlap", subject, _overlapping(group), f"{len(group)} starts")
    for subject, group in blocks.items():
        ledger.check("device", subject, _unlike(group, _device), "one device")
    ledger.check("device", "whole study", _unlike(attempts, _type), "one type, one environment")
    ledger.check("device", "step probe", _not_proved(study, attempts), "proved on these sources")


def _out_of_order(drawn: Sequence[Attempt]) -> Iterator[str]:
    """Launches that began before one drawn earlier, but for those measured again on request."""
    firsts = [next(group) for _, group in itertools.groupby(drawn, lambda a: a.launch)]
    for before, after in itertools.pairwise(a for a in firsts if not a.supersedes):
        if before.clock == after.clock and after.start_ns < before.start_ns:
            yield f"{after.launch.name} began before {before.launch.name}, which is drawn first"


def _overlapping(group: Sequence[Attempt]) -> Iterator[str]:
    for before, after in itertools.pairwise(sorted(group, key=lambda a: (a.clock, a.start_ns))):
        if before.clock == after.clock and after.start_ns < before.end_ns:
            early_s = (before.end_ns - after.start_ns) / 1e9
            yield f"{after.launch.name} began {early_s:.1f} s before {before.launch.name} ended"


def _device(node: NodeRecord) -> dict[str, Any]:
    return {k: v for k, v in node.items() if k not in ("engine_files", *PASSING)}


def _type(node: NodeRecord) -> dict[str, Any]:
    return {key.replace("_", " "): value for key, value in device_type(node).items()}


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
    files = attempts[0].node["engine_files"] if attempts else {}
    python = study.config["engine"].get("python")
    ran = files[python]["sources_sha256"] if python in files else None
    if None not in (proved, ran) and proved != ran:
        yield f"vLLM's sources are {ran}, {proved} where step timing was proved"
