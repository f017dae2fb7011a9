"""Write a synthetic study that passes the whole audit, with all derived files.

`write_synthetic_study` knows latencies and taxes; this adds the rest (named schedules, counters,
health, run files, manifest), then runs analysis, figures, report and manifest on it.
"""

import contextlib
import copy
import hashlib
import io
import json
import math
import os
import shutil
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, cast

from connector_tax import __version__
from connector_tax.analysis import aggregate
from connector_tax.analysis.measure import summarise_cell
from connector_tax.analysis.validity import COUNTERS, assess, server_counters, void_reasons
from connector_tax.artifacts import paths
from connector_tax.artifacts.cell_records import ServerCounters
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
from connector_tax.report.__main__ import write_views
from connector_tax.seals import seal_launch, seal_settings
from connector_tax.servers.kinds import command_for
from connector_tax.study import complete
from connector_tax.study.cell import planned_requests
from connector_tax.study.design import described, measured_design, run_order
from connector_tax.study.launch import LaunchOutcome, index_of, launch_title
from connector_tax.study.server_command import launch_script
from tests.analysis.synthetic import write_synthetic_study
from tests.launch_records import complete_launch
from tests.study_folder import DEFAULT, NODE

SMALL: dict[str, Any] = {
    "phase_a": {"rates_rps": [40.0, 80.0]},
    "phase_b": {"input_tokens": [128, 512], "output_tokens": [16]},
    "phase_bp": {"configurations": ["plain", "mooncake_both"], "shapes": [[128, 16]]},
    "cell": {"floor_s": 1.5, "min_completed": 40},
    "shape_rates": {"max_share": 0.5, "probe_s": 1.0},
}
SECTIONS: dict[str, Any] = {
    "engine": {
        "kind": "embedded",
        "label": "embedded (emulated)",
        "definition": "config/embedded.yaml",
        "definition_content": {"model": {"served_name": "synthetic", "vocab_size": 32000}},
    },
    **{name: DEFAULT[name] for name in ("server", "load_generator", "metrics", "resources")},
}
LAGGING = copy.deepcopy(HEALTHY)
LAGGING["processes"]["main"]["loop_lag_p99_ms"] = 9.0
LAUNCH = timedelta(seconds=50)
SKIPPED = {"mooncake_consumer": "pre-flight: verify_kv_consumer: not ready after 30 s"}


def write_audited_study(folder: Path, **given: Any) -> Path:
    """Write results/synthetic below `folder`, without figures and report; return the path of
    study.json.

    Args:
        given: arguments of write_synthetic_study.
    """
    root = folder / "results" / "synthetic"
    arguments: dict[str, Any] = {"config": SMALL, "skipped": SKIPPED, "steps_per_cell": 60, **given}
    study_file = write_synthetic_study(root, **arguments)
    document = _complete_design(study_file)
    seal_settings(root, document)
    order = [launch for phase in PHASES for launch in launches(document, phase)]
    for minute, launch in enumerate(order):
        _complete_launch(document, launch.folder(root) / "index.json", minute)
    with contextlib.redirect_stdout(io.StringIO()):
        assert aggregate.main(["--study", str(study_file)]) == 0
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


def _complete_design(study_file: Path) -> Any:
    root = study_file.parent
    document = read_json(study_file)
    document["config"] |= SECTIONS
    document["package_version"] = __version__
    _decide_gates(root, document)
    document["run_order"] = run_order(document["config"])
    document["design_sha256"] = sha256_json(
        measured_design(document["config"], document["configurations"])
    )
    write_json(study_file, document)
    shape_rates = root / paths.SHAPE_RATES
    if shape_rates.exists():
        write_json(
            shape_rates, read_json(shape_rates) | {"design_sha256": document["design_sha256"]}
        )
    environment: Any = {"engine_label": document["engine_label"]}
    environment |= dict.fromkeys(("vllm", "vllm_sha", "mooncake", "nixl", "lmcache"), "none")
    environment |= {"gpu": ["no GPU"], "cpu": "synthetic"}
    write_json(root / "environment.json", environment)
    replace(root / "env.txt", env_text(environment, {"pipeline packages": packages(None)}))
    for of_launch in root.glob("runs/*/*/*/env.txt"):
        replace(of_launch, (root / "env.txt").read_text())
    return document


def _decide_gates(root: Path, document: dict[str, Any]) -> None:
    """Give a configuration that is left out a gate, and a gate log with that decision."""
    gates = read_json(root / "preflight" / "preflight_status.json")
    for entry in document["configurations"]:
        gate, said = entry["gate"], gates[entry["id"]]
        said["evidence"] = None
        if not said["include"]:
            entry["gate"] = gate = "verify_kv_consumer"
            said["reason"] = said["reason"].removeprefix("pre-flight: ")
        if gate is not None:
            said["evidence"] = f"preflight/{gate}.log"
            decision = f"{'INCLUDE' if said['include'] else 'SKIP'}: {said['reason']}"
            (root / said["evidence"]).write_text(f"2026-05-26T08:59:00.000+00:00 {decision}\n")
    write_json(root / "preflight" / "preflight_status.json", gates)


def _complete_launch(document: dict[str, Any], index_file: Path, minute: int) -> None:
    index: dict[str, Any] = read_json(index_file)
    folder = index_file.parent
    study = cast(StudyDocument, document)
    launch = Launch(index["config"], index["block"], index["phase"])
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
        (ran,) = index["attempts"] or [{"node": NODE}]
        ns = {"started_ns": minute * 60 * 10**9 + 1, "ended_ns": (minute * 60 + 50) * 10**9}
        took = {"port": 8000, "startup_s": 1.0, "wall_s": 50.0}
        attempts = [{"attempt": 1, "pid": 1, **ran, "supersedes": None, **moments, **ns, **took}]
        write_json(folder / "attempts.json", attempts)
        for entry in index["cells"]:
            _complete_cell(document, folder / entry["cell"], index)
            entry["files"] = sha256_below(folder / entry["cell"])
        write_json(index_file, index)
        complete_launch(index_file)
        summary = {e["cell"]: summarise_cell(folder / e["cell"]) for e in index["cells"]}
        write_json(folder / "summary.json", summary)
    rate = None if index["status"] == "skipped" else index["rate_rps"]
    outcome = LaunchOutcome(index["status"], index["reason"], rate, attempts)
    content = {**index_of(study, launch, folder, outcome), **moments}
    seal_launch(folder.parents[3], launch.name, index_file, content)


def _complete_cell(document: dict[str, Any], folder: Path, index: dict[str, Any]) -> None:
    """Complete a cell's records."""
    suffix = f"{index['phase']}_{folder.name}"
    where = f"{index['config']}/block{index['block']}/{index['phase']}/{folder.name}"
    record_file = folder / f"cell_{suffix}.json"
    record = read_json(record_file)
    requests = list(read_jsonl(folder / f"requests_{suffix}.jsonl"))
    shape = record["input_tokens"], record["output_tokens"]
    content = f"{where}/attempt{record['attempt']}1"
    planned = list(planned_requests(cast(StudyDocument, document), content, shape, len(requests)))
    record["cooldown"] = {"requests": 0, "ended_by": "answered"}
    for request, sent in zip(requests, planned, strict=True):
        request |= {"request_id": sent.request_id, "cooldown": False}
    record["prompts_sha256"] = hashlib.sha256(b"".join(r.body + b"\n" for r in planned)).hexdigest()
    metrics = list(read_jsonl(folder / f"metrics_{suffix}.jsonl"))
    steps = list(read_jsonl(folder / f"engine_step_{suffix}.jsonl"))
    totals = {
        "success": len(requests),
        "prompt_tokens": sum(r["prompt_tokens"] for r in requests),
        "generation_tokens": sum(r["completion_tokens"] for r in requests),
    }
    for scrape in metrics:
        last = scrape is metrics[-1]
        for key, name in COUNTERS.items():
            scrape["values"][f'{name}{{engine="0"}}'] = float(totals.get(key, 0) if last else 0)
    for moment, scrape in (("before", metrics[0]), ("after", metrics[-1])):
        scrape["raw"] = page(scrape["values"], requests if moment == "after" else [])
    fit_tokens(steps, totals)
    counters: ServerCounters = {
        "before": server_counters(metrics[0]["values"]),
        "after": server_counters(metrics[-1]["values"]),
    }
    name = f"{document['seed']}/arrivals/block{index['block']}/{index['phase']}/{folder.name}"
    record["schedule"] |= {"seed": name, "gamma_shape": None}
    generator = HEALTHY if record["valid"] else LAGGING
    record |= {"server_counters": counters, "load_generator": generator, "suspended_ms": 0}
    record["health"] = assess(record, requests, metrics, document["config"])
    record["void_reasons"] = void_reasons(record["health"])
    assert record["valid"] == (not record["void_reasons"])
    write_lines(folder / f"requests_{suffix}.jsonl", requests)
    write_lines(folder / f"metrics_{suffix}.jsonl", metrics)
    write_lines(folder / f"engine_step_{suffix}.jsonl", steps)
    record["files"] = {k: v for k, v in sha256_below(folder).items() if not k.startswith("cell_")}
    write_json(record_file, record)


def page(values: dict[str, float], served: list[dict[str, Any]]) -> str:
    """Return the server's page: its values, and histograms of latencies a quarter below the
    client's.
    """
    lines = [f"{key} {value!r}" for key, value in values.items()]
    for name, last in (("time_to_first_token", "first"), ("e2e_request_latency", "last")):
        metric = f"vllm:{name}_seconds"
        took = [(r[f"t_{last}_token_ns"] - r["t_send_ns"]) * 0.75e-9 for r in served]
        for bound in (0.001, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, math.inf):
            text = "+Inf" if math.isinf(bound) else repr(bound)
            lines.append(
                f'{metric}_bucket{{engine="0",le="{text}"}} {sum(t <= bound for t in took)}'
            )
        lines.append(f'{metric}_sum{{engine="0"}} {sum(took)!r}')
    return "\n".join(lines) + "\n"


def fit_tokens(steps: list[dict[str, Any]], totals: dict[str, int]) -> None:
    """Let the steps add up to the tokens of the requests: the first busy one has the rest."""
    scheduler = [step for step in steps if step["process"] == "scheduler"]
    if not scheduler:
        return  # steps were not timed
    first = next(step for step in scheduler if step["prefill_tokens"] + step["decode_tokens"])
    wanted = {
        "prefill_tokens": totals["prompt_tokens"],
        "decode_tokens": totals["generation_tokens"] - totals["success"],
    }
    for name, total in wanted.items():
        first[name] += total - sum(step[name] for step in scheduler)


def write_lines(path: Path, records: list[dict[str, Any]]) -> None:
    """Write JSON lines, breaking any hard link."""
    replace(path, "".join(json.dumps(record) + "\n" for record in records))


def replace(path: Path, text: str) -> None:
    """Write a file anew, so that hard-linked copies keep their content."""
    path.unlink(missing_ok=True)
    path.write_text(text)


def linked_copy(source: Path, target: Path) -> Path:
    """Return a copy made of hard links; to change a file, write it anew (`replace`)."""
    shutil.copytree(source, target, copy_function=os.link)
    return target


def seal_cell(cell: Path) -> None:
    """Make the hashes in a changed cell's record and in its launch's index.json fit again."""
    others = {k: v for k, v in sha256_below(cell).items() if not k.startswith("cell_")}
    for record_file in cell.glob("cell_*.json"):
        with edited_json(record_file) as record:
            record["files"] = others
    with edited_json(cell.parent / "index.json") as index:
        for entry in index["cells"]:
            if entry["cell"] == cell.name:
                entry["files"] = sha256_below(cell)


@contextlib.contextmanager
def edited_json(path: Path) -> Iterator[Any]:
    """Change a JSON file inside the block."""
    value = read_json(path)
    yield value
    write_json(path, value)


@contextlib.contextmanager
def edited_lines(path: Path) -> Iterator[list[dict[str, Any]]]:
    """Change the records of a JSON-lines file inside the block."""
    records = list(read_jsonl(path))
    yield records
    write_lines(path, records)
