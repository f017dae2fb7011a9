"""Write a study in virtual time that passes the whole audit, with all derived files.

This adds what a rehearsal leaves out (request ids and prompts, launch files, attempts, seals), then
runs analysis, figures, report and manifest on it.
"""

import contextlib
import copy
import hashlib
import io
import shutil
from collections.abc import Mapping
from datetime import UTC, datetime, timedelta
from functools import partial
from pathlib import Path
from typing import Any

from connector_tax.analysis.aggregate import write_tables
from connector_tax.analysis.validity import assess, void_reasons
from connector_tax.artifacts import paths
from connector_tax.artifacts.folder import StudyFolder
from connector_tax.artifacts.names import PHASES, Launch
from connector_tax.artifacts.study_file import launches
from connector_tax.artifacts.study_records import StudyDocument
from connector_tax.figures.tables import StudyTables
from connector_tax.files import read_json, read_jsonl, sha256_below, sha256_json, write_json
from connector_tax.machine import packages
from connector_tax.provenance import manifest
from connector_tax.provenance.environment import text as env_text
from connector_tax.provenance.remade import remake
from connector_tax.rehearsal.launch import HEALTHY
from connector_tax.rehearsal.machine import machine_of
from connector_tax.report.__main__ import write_views
from connector_tax.seals import seal_launch, seal_settings
from connector_tax.servers.kinds import command_for
from connector_tax.study import complete
from connector_tax.study.cell import planned_requests
from connector_tax.study.design import described, measured_design
from connector_tax.study.launch import LaunchOutcome, index_of, launch_title
from connector_tax.study.server_command import launch_script
from tests.study_folder import (
    NODE,
    edited_json,
    edited_lines,
    rehearse_study,
    replace,
    study_design,
    write_stages,
)

SHAPE_RATES = {"max_share": 0.5, "probe_s": 1.0}
# Added to the step that admits a request; at 80 requests/s the server cannot keep up.
OVERLOADED = ("nixl_both", "admission_us_per_request", 8_000.0)
LAGGING = copy.deepcopy(HEALTHY)
LAGGING["processes"]["main"]["loop_lag_p99_ms"] = 9.0
LAUNCH = timedelta(seconds=50)
SKIPPED = {"mooncake_consumer": "verify_kv_consumer: not ready after 30 s"}
Void = tuple[str, int, str, str]


def write_audited_study(
    folder: Path,
    *,
    step_cost: Mapping[str, float] | None = None,
    skipped: Mapping[str, str] = SKIPPED,
    step_timing: bool = True,
    void: frozenset[Void] = frozenset(),
    **config: Any,
) -> Path:
    """Write results/synthetic below `folder`, without figures and report; return the path of
    study.json.

    Args:
        step_cost: replaces keys of the engine's step cost.
        skipped: configuration to the reason why its gate left it out.
        step_timing: whether steps are recorded.
        void: cells (configuration, block, phase, cell) whose load generator lagged.
        config: replaces keys of CONFIG.
    """
    root = folder / "results" / "synthetic"
    document = _design(config, step_cost or {}, skipped)
    study_file = _write_stages(root, document, skipped, step_timing=step_timing)
    seal_settings(root, document)
    order = [launch for phase in PHASES for launch in launches(document, phase)]
    finish = partial(_complete_launch, document, root, order, void)
    rehearse_study(root, document, machine_of(document), finish)
    write_tables(StudyFolder.load(study_file))
    with contextlib.redirect_stdout(io.StringIO()):
        options = ["--study", str(study_file)]
        assert complete.main([*options, "--out", str(root / "complete.json")]) == 0
        assert manifest.main(options) == 0
    return study_file


def write_published_study(folder: Path) -> None:
    """Write a study with figures and report into `folder`/audited, and its recomputed claims beside
    it.
    """
    study_file = write_audited_study(folder / "audited")
    remake(StudyFolder.load(study_file), folder)
    write_views(StudyTables(study_file))
    manifest.write(study_file)


def _design(
    given: Mapping[str, Any], step_cost: Mapping[str, float], skipped: Mapping[str, str]
) -> StudyDocument:
    study = study_design(**{"shape_rates": SHAPE_RATES, **given})
    content: Any = study["config"]["engine"]["definition_content"]
    configuration, key, value = OVERLOADED
    content["connectors"][configuration][key] = value
    content["step_cost"] |= step_cost
    for entry in study["configurations"]:
        entry["gate"] = "verify_kv_consumer" if entry["id"] in skipped else None
    study["design_sha256"] = sha256_json(measured_design(study["config"], study["configurations"]))
    return study


def _write_stages(
    root: Path, study: StudyDocument, skipped: Mapping[str, str], *, step_timing: bool
) -> Path:
    environment: Any = {"engine_label": study["engine_label"]}
    environment |= dict.fromkeys(("vllm", "vllm_sha", "mooncake", "nixl", "lmcache"), "none")
    environment |= {"gpu": ["no GPU"], "cpu": "synthetic"}
    study_file = write_stages(
        root, study, skipped, step_timing=step_timing, environment=environment
    )
    replace(root / paths.ENV_TEXT, env_text(environment, {"pipeline packages": packages(None)}))
    with edited_json(root / paths.PREFLIGHT_STATUS) as gates:
        for name, reason in skipped.items():
            gates[name]["evidence"] = "preflight/verify_kv_consumer.log"
            line = f"2026-05-26T08:59:00.000+00:00 SKIP: {reason}\n"
            (root / gates[name]["evidence"]).write_text(line)
    return study_file


def _complete_launch(
    study: StudyDocument, root: Path, order: list[Launch], void: frozenset[Void], launch: Launch
) -> None:
    """Add the files that a rehearsal leaves out of a launch, and seal the launch."""
    folder, minute = launch.folder(root), order.index(launch)
    index_file = folder / paths.INDEX
    index: dict[str, Any] = read_json(index_file)
    index_file.unlink()
    began = datetime(2026, 5, 26, 9, tzinfo=UTC) + timedelta(minutes=minute)
    times = [time.isoformat(timespec="milliseconds") for time in (began, began + LAUNCH)]
    moments: dict[str, Any] = dict(zip(("started_utc", "ended_utc"), times, strict=True))
    attempts: Any = []
    if index["status"] == "done":
        command = command_for(study, launch, 8000)
        told = {"argv": command.argv, "environment": command.environment}
        write_json(folder / "config.json", {**described(study, launch), **told})
        title = launch_title(study, launch)
        (folder / "launch.sh").write_text(launch_script(command, title, "../.."))
        shutil.copyfile(root / paths.ENV_TEXT, folder / paths.ENV_TEXT)
        for name in ("vllm_stdout.log", "vllm_stderr.log"):
            (folder / name).write_text("synthetic\n")
        ns = {"started_ns": minute * 60 * 10**9 + 1, "ended_ns": (minute * 60 + 50) * 10**9}
        took = {"port": 8000, "startup_s": 1.0, "wall_s": 50.0}
        ran = {"attempt": 1, "pid": 1, "node": NODE, "supersedes": None}
        attempts = [{**ran, **moments, **ns, **took}]
        write_json(folder / "attempts.json", attempts)
        for entry in index["cells"]:
            lags = (launch.config, launch.block, launch.phase, entry["cell"]) in void
            _complete_cell(study, next((folder / entry["cell"]).glob("cell_*")), lags=lags)
    rate = None if index["status"] == "skipped" else index["rate_rps"]
    outcome = LaunchOutcome(index["status"], index["reason"], rate, attempts)
    content = {**index_of(study, launch, folder, outcome), **moments}
    seal_launch(root, launch.name, index_file, content)


def _complete_cell(study: StudyDocument, record_file: Path, *, lags: bool) -> None:
    """Write ids and the prompts' hash into a rehearsed cell, as if its requests had been sent."""
    folder = record_file.parent
    record = read_json(record_file)
    del record["rehearsed"]
    give_prompts(study, record, next(folder.glob("requests_*")))
    if lags:
        requests, metrics = (
            list(read_jsonl(next(folder.glob(f"{kind}_*")))) for kind in ("requests", "metrics")
        )
        record["load_generator"] = LAGGING
        record["health"] = assess(record, requests, metrics, study["config"])
        record["void_reasons"] = void_reasons(record["health"])
        record["valid"] = False
        assert record["void_reasons"]
    record["files"] = {k: v for k, v in sha256_below(folder).items() if not k.startswith("cell_")}
    write_json(record_file, record)


def give_prompts(study: StudyDocument, record: Any, requests_file: Path) -> None:
    """Write ids into a rehearsed cell's requests, and the prompts' hash into the cell's record."""
    where = f"{record['config']}/block{record['block']}/{record['phase']}/{record['cell']}"
    shape = record["input_tokens"], record["output_tokens"]
    with edited_lines(requests_file) as requests:
        planned = list(planned_requests(study, f"{where}/attempt11", shape, len(requests)))
        for request, sent in zip(requests, planned, strict=True):
            request["request_id"] = sent.request_id
    record["prompts_sha256"] = hashlib.sha256(b"".join(r.body + b"\n" for r in planned)).hexdigest()
