"""Check the design, the gates and the launches' own files, independently of measured values.

The design follows from the configuration and the seed. Launches of a block ran in the drawn order,
one after the other, on one device (docs/method.md, "Design: blocks of launches"). The order is
checked by CLOCK_MONOTONIC within a boot, since the time of day may be set while a study runs.
"""

import itertools
import json
import re
import shlex
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from connector_tax import __version__
from connector_tax.analysis.ingest import block_devices, device_name
from connector_tax.artifacts import paths
from connector_tax.artifacts.folder import LaunchFolder, StudyFolder
from connector_tax.artifacts.index import LaunchIndex
from connector_tax.artifacts.launch_files import LaunchConfig, NodeRecord, nodes_of
from connector_tax.artifacts.looks import read_looks
from connector_tax.artifacts.names import PHASES, Launch
from connector_tax.artifacts.record_reader import read_record
from connector_tax.artifacts.stage_records import GateRecord, ShapeRatesRecord
from connector_tax.artifacts.study_file import Study, most_of_shape
from connector_tax.artifacts.study_records import ConfigurationEntry, StudyDocument
from connector_tax.files import read_json, sha256_json
from connector_tax.linux import format_cpus, parse_cpus
from connector_tax.provenance.claims import Ledger
from connector_tax.provenance.differences import differences
from connector_tax.provenance.environment import text as environment_text
from connector_tax.servers.kinds import ServerCommand, command_for, engine_of
from connector_tax.study.design import cells_of, described, measured_design, run_order
from connector_tax.study.device import on_slot, slot_at
from connector_tax.study.launch import (
    Attempts,
    LaunchOutcome,
    index_of,
    launch_skip_reason,
    launch_title,
)
from connector_tax.study.plan import reference_rate
from connector_tax.study.server_command import MARKS, OVERLAY, launch_script

# Fields of a node that may change on the same device (a reboot, another scheduler job), and the
# environment, which is common to the study.
PASSING = ("boot", "job", "exclusive", "engine_files")
# Parts of a command that vary: free ports, and the study's folder.
FREE_PORT = re.compile(r"(port\W{1,8}|(?:127\.0\.0\.1|localhost)[:/])\d+", re.IGNORECASE)
LISTENS = re.compile(r"/dev/tcp/127\.0\.0\.1/(\d+)")
# Lines of launch.sh that no record repeats: the project's and the user's folder.
ROOT_LINE = re.compile(r"^root=\$\(cd -- (.+) && pwd\)$", re.MULTILINE)
CALLERS_LINE = re.compile(r'^cd -- (?!"\$)(.+)$', re.MULTILINE)
STUDY_FOLDER = re.compile(rf'[^:"]*(?=/{paths.PATCH}/{OVERLAY})')


def check_launches(folder: StudyFolder, ledger: Ledger) -> None:
    """Check the design, each gate, each launch, and the order and device of each block."""
    study = folder.study
    ledger.check("design", paths.STUDY, _design(study), "follows from configuration and seed")
    if study.config.get("shape_rates") is not None:
        ledger.check("design", "shape rates", _shape_rates(study), "follow from what was served")
    ledger.check(
        "environment", paths.ENVIRONMENT, _environment(study), f"what {paths.ENV_TEXT} says"
    )
    gates: dict[str, GateRecord] = read_json(study.root / paths.PREFLIGHT_STATUS)
    for entry in study.document["configurations"]:
        ledger.check("gate", entry["id"], _gate(study, entry, gates))
    for planned in folder.launches:
        launch = planned.launch
        with ledger.guarded("launch", launch.name):
            index = planned.index
            ledger.check("launch", launch.name, _launch(folder, launch, index))
            if index is not None and index.status == "done":
                _check_command(study, launch, index, ledger)
    with ledger.guarded("order", "blocks"):
        _check_blocks(folder, ledger)


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
    recorded = {key: value for key, value in document.items() if key in expected}
    yield from differences(recorded, expected, "study")
    emulated = document["emulated"] or config["engine"].get("device") == "emulated"
    if ("emulated" in document["engine_label"]) != emulated:
        label, named = document["engine_label"], config["engine"]["kind"]
        yield f"engine_label is {label!r}, but the engine is {named!r}"


def _shape_rates(study: Study) -> Iterator[str]:
    section = study.config["shape_rates"]
    assert section is not None
    shapes = read_record(study.root / paths.SHAPE_RATES, ShapeRatesRecord)["shapes"]
    for name, shape in shapes.items():
        most = most_of_shape(section["max_share"], shape["completed_s"])
        if shape["most_rps"] != most:
            yield f"{name}: most_rps is {shape['most_rps']}, but what was served gives {most}"


def _environment(study: Study) -> Iterator[str]:
    """Yield differences between environment.json and its copy at the beginning of env.txt."""
    environment = read_json(study.root / paths.ENVIRONMENT)
    recorded = (study.root / paths.ENV_TEXT).read_text(encoding="utf-8").partition("\n\n")[0]
    made = environment_text(environment, {})
    yield from differences(recorded.split("\n"), made.splitlines(), paths.ENV_TEXT)
    if environment["engine_label"] != study.document["engine_label"]:
        yield f"engine_label is {environment['engine_label']!r}"


def _gate(study: Study, entry: ConfigurationEntry, gates: dict[str, GateRecord]) -> Iterator[str]:
    """Check that the gate's log ends with pre-flight's decision."""
    gate = gates[entry["id"]]
    evidence = gate.get("evidence")
    if evidence is None:
        if engine_of(study.config["engine"]).gate_of(entry) or not gate["include"]:
            yield "left out without a gate, or preflight_status.json names no log of its gate"
        return
    decision = f"{'INCLUDE' if gate['include'] else 'SKIP'}: {gate['reason']}"
    text = (study.root / evidence).read_text(encoding="utf-8")
    if not text.rstrip("\n").endswith(f" {decision}"):
        yield f"{evidence} does not end with {decision!r}"


# ---- a launch


def _launch(whole: StudyFolder, launch: Launch, index: LaunchIndex | None) -> Iterator[str]:
    """Yield differences between index.json and the design, attempts.json and the cells' records."""
    study, folder = whole.study, launch.folder(whole.root)
    if index is None:
        yield "index.json is missing"
        return
    skipped = index.status == "skipped"
    rate = None if skipped else reference_rate(study.root, launch.phase)
    attempts = Attempts(folder).entries
    outcome = LaunchOutcome(index.status, index.reason, rate, attempts)
    excluded = ("files", "seal", *(() if attempts else ("started_utc", "ended_utc")))
    recorded, again = (
        {key: value for key, value in content.items() if key not in excluded}
        for content in (
            read_json(folder / paths.INDEX), index_of(study.document, launch, folder, outcome)
        )
    )  # fmt: skip
    yield from differences(recorded, again, paths.INDEX)
    if skipped and any(folder.glob("*/cell_*.json")):
        yield "skipped, though there are measured cells"
    if skipped and not _left_out(whole, launch, index.reason):
        yield f"skipped for {index.reason!r}, which no gate, rate or interim analysis gives"
    if index.status == "done":
        yield from _run_files(study, launch, index)


def _left_out(folder: StudyFolder, launch: Launch, reason: str | None) -> bool:
    """Return whether a launch had a reason to be skipped, such as an interim analysis."""
    rule = launch_skip_reason(folder.root, launch)
    if rule is not None:
        return reason == rule
    if launch.phase != "A" or not (reason or "").strip() or not read_looks(folder.root):
        return False
    rest = [la for la in folder.of_phase("A") if la.launch.block >= launch.block]
    return all(la.status == "skipped" for la in rest)


def _run_files(study: Study, launch: Launch, index: LaunchIndex) -> Iterator[str]:
    """Yield differences between launch.sh, config.json and study.json."""
    folder = launch.folder(study.root)
    config = read_record(folder / paths.LAUNCH_CONFIG, LaunchConfig)
    design = described(_on_its_slot(study, index), launch)
    recorded = {key: value for key, value in config.items() if key in design}
    yield from differences(recorded, design, "config.json")
    if (folder / paths.ENV_TEXT).read_bytes() != (study.root / paths.ENV_TEXT).read_bytes():
        yield "env.txt differs from the study's"
    script = (folder / paths.LAUNCH_SCRIPT).read_text(encoding="utf-8")
    for mark, variable in MARKS.items():
        script = script.replace(variable, mark)
    # `taskset` pins the command to CPUs if the study pins it.
    argv = shlex.split(script.rpartition("\nexec ")[2])
    pinned = argv[3:] if argv[:2] == ["taskset", "--cpu-list"] else argv
    if pinned != config["argv"]:
        yield "launch.sh does not run config.json's argv"
    exports = [shlex.split(line)[1] for line in re.findall(r"^export .*$", script, re.MULTILINE)]
    if dict(export.split("=", 1) for export in exports) != config["environment"]:
        yield "launch.sh does not set config.json's environment"


def _check_command(study: Study, launch: Launch, index: LaunchIndex, ledger: Ledger) -> None:
    """Compare config.json's command with the recomputed command, except free ports."""
    folder, kind = launch.folder(study.root), engine_of(study.config["engine"])
    timed = read_json(study.root / paths.PATCH_STATUS)["step_timing_available"]
    probe = study.root / paths.PATCH / OVERLAY if kind.takes_probe and timed else None
    port = index.attempts[-1].get("port", 0) if index.attempts else 0
    made = command_for(_on_its_slot(study, index), launch, port, probe)
    config = read_json(folder / paths.LAUNCH_CONFIG)
    recorded = config["argv"], {**config["environment"]}
    again = made.argv, {**made.environment}
    if made.callers:  # Its PYTHONPATH ends with the PYTHONPATH of the user who started the study.
        for _, environment in (recorded, again):
            environment.pop("PYTHONPATH", None)
    wrong = differences(_comparable(*recorded), _comparable(*again), "config.json")
    version = study.document.get("package_version", "a version that study.json does not name")
    doubt = "" if version == __version__ else f"measured with {version}, whose command may differ"
    ledger.check("command", launch.name, wrong, "follows from the study", doubt)
    # Compared with config.json, which the claim above checks.
    ran = replace(made, argv=config["argv"], environment=config["environment"])
    script = _script(study, launch, index, ran)
    ledger.check("script", launch.name, script, "every line follows from the records", doubt)


def _script(
    study: Study, launch: Launch, index: LaunchIndex, command: ServerCommand
) -> Iterator[str]:
    """Compare launch.sh line by line with the recomputed one, apart from free ports."""
    script = (launch.folder(study.root) / paths.LAUNCH_SCRIPT).read_text(encoding="utf-8")
    pinned = re.search(r"^exec taskset --cpu-list (\S+) ", script, re.MULTILINE)
    cpus = parse_cpus(pinned[1]) if pinned else set()
    if outside := cpus - parse_cpus(nodes_of(index.attempts)[-1]["cpus"]):
        yield f"launch.sh pins the server to CPUs {format_cpus(tuple(outside))} of another machine"
    root, caller = (_word(line.search(script)) for line in (ROOT_LINE, CALLERS_LINE))
    title = launch_title(study.document, launch)
    made = launch_script(command, title, root, tuple(cpus), caller)
    recorded, again = (_without_ports(text).splitlines() for text in (script, made))
    yield from differences(recorded, again, paths.LAUNCH_SCRIPT)


def _without_ports(script: str) -> str:
    """Return launch.sh with each free port replaced by 0, also in companions' arguments."""
    for port in set(LISTENS.findall(script)):
        script = re.sub(rf"\b{port}\b", "0", script)
    return FREE_PORT.sub(r"\g<1>0", script)


def _word(line: re.Match[str] | None) -> str:
    """Return the shell word in the first group of a match; "." without a match."""
    words = shlex.split(line[1]) if line else ["."]
    return words[0] if len(words) == 1 else "."


def _comparable(argv: Sequence[str], environment: dict[str, str]) -> Any:
    """Return a command without its free ports and without the study's folder."""
    text = json.dumps({"argv": argv, "environment": environment})
    return json.loads(STUDY_FOLDER.sub("", FREE_PORT.sub(r"\g<1>0", text)))


def _on_its_slot(study: Study, index: LaunchIndex) -> StudyDocument:
    """Return the study, with the values of the launch's slot if the study has slots."""
    nodes = nodes_of(index.attempts)
    slot = slot_at(study.document, nodes[-1]["cpus"]) if nodes else None
    return study.document if slot is None else on_slot(study.document, slot)


# ---- blocks


class Attempt(NamedTuple):
    """One start of a launch's server: launch, machine, device, and times.

    Attributes:
        start_ns, end_ns: CLOCK_MONOTONIC; a killed attempt ends with its last cell.
    """

    launch: Launch
    node: NodeRecord
    supersedes: bool
    start_ns: int
    end_ns: int

    @property
    def clock(self) -> tuple[str, str]:
        """Return machine and boot; only times of the same pair can be compared."""
        return self.node["machine"], self.node["boot"]


def _attempts(planned: LaunchFolder) -> Iterator[Attempt]:
    index = planned.index
    for entry in index.attempts if index is not None else ():
        start, end = entry["started_ns"], entry.get("ended_ns")
        if end is None:
            cells = [cell for cell in planned.measured if cell["attempt"] == entry["attempt"]]
            end = max((cell["window"]["t_drained_ns"] for cell in cells), default=start)
        yield Attempt(planned.launch, entry["node"], bool(entry["supersedes"]), start, end)


def _check_blocks(folder: StudyFolder, ledger: Ledger) -> None:
    """Check that a block's launches began in the drawn order, one at a time on a device."""
    drawn, alone, blocks = (defaultdict[str, list[Attempt]](list) for _ in range(3))
    for planned in folder.launches:
        launch = planned.launch
        for attempt in _attempts(planned):
            blocks[f"block{launch.block}"].append(attempt)
            drawn[f"block{launch.block}/{launch.phase}"].append(attempt)
            node = attempt.node
            for place in node["devices"] if node["gpus"] else [device_name(node)]:
                alone[place].append(attempt)
    for subject, group in drawn.items():
        ledger.check("order", subject, _out_of_order(group), "as drawn")
    for subject, group in alone.items():
        ledger.check("overlap", subject, _overlapping(group), f"{len(group)} starts")
    passed = "one device per block; one type and environment per study, with proved step timing"
    wrong = itertools.chain(_devices(folder), _moved(blocks.values()))
    ledger.check("device", "study", wrong, passed)


def _out_of_order(drawn: Sequence[Attempt]) -> Iterator[str]:
    """Yield launches that began before a launch drawn earlier, unless remeasured on request."""
    firsts = [next(group) for _, group in itertools.groupby(drawn, lambda a: a.launch)]
    for before, after in itertools.pairwise(a for a in firsts if not a.supersedes):
        if before.clock == after.clock and after.start_ns < before.start_ns:
            yield f"{after.launch.name} began before {before.launch.name}, which is drawn first"


def _overlapping(group: Sequence[Attempt]) -> Iterator[str]:
    for before, after in itertools.pairwise(sorted(group, key=lambda a: (a.clock, a.start_ns))):
        if before.clock == after.clock and after.start_ns < before.end_ns:
            early_s = (before.end_ns - after.start_ns) / 1e9
            yield f"{after.launch.name} began {early_s:.1f} s before {before.launch.name} ended"


def _moved(blocks: Iterable[Sequence[Attempt]]) -> Iterator[str]:
    """Yield differences in device, CPUs and NUMA nodes between the launches of a block."""
    for first, *others in blocks:
        for attempt in others:
            for key, wanted in first.node.items():
                if key not in PASSING and (actual := attempt.node.get(key)) != wanted:
                    yield (
                        f"{key}: {first.launch.name} on {wanted!r}, "
                        f"{attempt.launch.name} on {actual!r}"
                    )


def _devices(folder: StudyFolder) -> Iterator[str]:
    """Check the devices of blocks; yield an error if vLLM is not the one that the gates proved."""
    study = folder.study
    loaded = (folder.cells(p, reference_rate(study.root, p)) for p in PHASES)
    cells = [cell for of_phase in loaded for cell in of_phase]
    block_devices(cells)
    proved = read_json(study.root / paths.PATCH_STATUS).get("vllm_sources_sha256_before")
    python = study.config["engine"].get("python", "")
    # All launches have the same environment, so any launch will do.
    files = next((node["engine_files"] for cell in cells for node in cell.nodes), {})
    ran = files[python]["sources_sha256"] if python in files else None
    if None not in (proved, ran) and proved != ran:
        yield f"vLLM's sources are {ran}, but {proved} where step timing was proved"
