"""Test a real study end to end: every artifact, a dying server, nothing measured twice."""

import json
import os
import re
import subprocess
import sys
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from connector_tax.artifacts.folder import StudyFolder
from connector_tax.config import ROOT
from connector_tax.files import read_json, read_jsonl, sha256_file
from connector_tax.provenance.claims import PASS, Ledger
from connector_tax.provenance.launches import check_launches
from connector_tax.study.server_command import KEPT, can_change
from tests.provenance.forged_archives import members_of
from tests.workflow.harness import (
    finished,
    gone,
    prepare,
    run,
    server_of,
    smaller,
    start,
    temporary_folder,
    wait_for,
)
from tests.workflow.test_dry_run import MEASURING, planned

pytestmark = [pytest.mark.workflow, pytest.mark.timeout(1200)]

SECRETS = {
    "HF_TOKEN": "hf_SecretOfTheTest0001",
    "OPENAI_API_KEY": "sk-SecretOfTheTest0002",
    "STORE_API_KEY": "SecretOfTheTest0003",
    "CLIENT_SECRET": "SecretOfTheTest0004",
    "HF_ENDPOINT": "https://hub.example/?X-Amz-Signature=SecretOfTheTest0005",
    "MOONCAKE_PWD": "SecretOfTheTest0006",
    "NIXL_AUTH": "SecretOfTheTest0007",
    "LMCACHE_EXTRA_CONFIG": '{"remote": {"access": "SecretOfTheTest0008"}}',
}


@dataclass
class Study:
    """A study whose server for noop_connector died once in Phase B, and which was run again.

    The second run also packed it. Both ran with SECRETS in their environment.
    """

    folder: Path
    results: Path
    first_status: int
    first_output: str
    first_cells: dict[str, tuple[str, int]]
    second: subprocess.CompletedProcess[str]


@pytest.fixture(scope="module")
def study(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Study]:
    def edit(text: str) -> str:
        return smaller(text) + "shape_rates: {max_share: 0.05, probe_s: 1}\n"

    folder = prepare(tmp_path_factory.mktemp("end_to_end") / "study", edit)
    results = folder / "results" / "tiny"
    launch = results / "runs" / "noop_connector" / "block0" / "B"
    with pytest.MonkeyPatch.context() as patch:
        for name, value in SECRETS.items():
            patch.setenv(name, value)
        process = start(folder, "all")
        wait_for(lambda: any(launch.glob("*.partial/metrics_*.jsonl")), process, timeout_s=550)
        server = server_of(launch)
        assert server is not None
        passed = {n: v for n, v in SECRETS.items() if n in KEPT or not can_change(n)}
        assert server.environ().items() >= passed.items()
        server.kill()
        status = process.wait(timeout=550)
        output = (folder / "snakemake.log").read_text()
        cells = finished(results)
        yield Study(folder, results, status, output, cells, run(folder, "all", "archive"))


def archived(study: Study) -> dict[str, bytes]:
    """Return name to content of every member of the study's archive."""
    members = members_of(study.folder / "results" / "archive" / "tiny.tar.zst")
    return {info.name: content for info, content in members}


def test_offered_rate_of_a_shape_never_exceeds_its_share(study: Study) -> None:
    shapes = read_json(study.results / "preflight" / "shape_rates.json")["shapes"]
    ref_safe = read_json(study.results / "reference_rates.json")["ref_safe"]
    offered = {
        path.parent.name: read_json(path)["schedule"]["rate_rps"]
        for path in study.results.glob("runs/*/block*/B/*x*/cell_B_*.json")
        if not path.parent.suffix  # not the first measurement of a void cell
    }
    most = {name: min(ref_safe, shapes[name]["most_rps"]) for name in offered}
    assert offered == most
    assert len(offered) == 1


def test_dead_server_is_reported_and_other_configurations_continue(study: Study) -> None:
    assert study.first_status != 0
    assert "MISSING results/tiny/runs/noop_connector/block0/B" in study.first_output
    assert "the server ended with status -9" in study.first_output
    measured = {name.split("/")[1] for name in study.first_cells if "/B/" in name}
    assert measured == {"plain", "plain_2"}


def test_next_run_completes_the_study_and_keeps_every_finished_cell(study: Study) -> None:
    assert study.second.returncode == 0, study.second.stdout + study.second.stderr
    after = finished(study.results)
    assert study.first_cells.items() <= after.items()
    assert len(after) > len(study.first_cells)


def test_every_launch_has_its_artifacts(study: Study) -> None:
    content = read_json(study.results / "study.json")
    for phase, entries in content["run_order"].items():
        for entry in entries:
            launch = study.results / "runs" / entry["config"] / f"block{entry['block']}" / phase
            index = read_json(launch / "index.json")
            assert index["status"] in ("done", "skipped"), index
            if index["status"] == "skipped":
                assert index["reason"]
                continue
            (node,) = {json.dumps(attempt["node"]) for attempt in index["attempts"]}
            assert json.loads(node)["devices"] == [content["config"]["server"]["device"]]
            for name in ("config.json", "launch.sh", "vllm_stdout.log", "env.txt", "summary.json"):
                assert (launch / name).is_file(), launch / name
            for cell in index["cells"]:
                suffix = f"{phase}_{cell['cell']}"
                assert sorted(cell["files"]) == [
                    f"cell_{suffix}.json",
                    f"engine_step_{suffix}.jsonl",
                    f"machine_{suffix}.jsonl",
                    f"metrics_{suffix}.jsonl",
                    f"requests_{suffix}.jsonl",
                ]
                for name, digest in cell["files"].items():
                    assert sha256_file(launch / cell["cell"] / name) == digest


def test_every_block_is_complete(study: Study) -> None:
    """Check blocks of which a second run measured some launches."""
    ledger = Ledger()
    check_launches(StudyFolder.load(study.results / "study.json"), ledger)
    assert {claim.verdict for claim in ledger.claims} == {PASS}
    assert sum(claim.kind == "order" for claim in ledger.claims) == 2 + bool(
        read_json(study.results / "runs/plain/block0/Bp/index.json")["attempts"]
    )


def test_records_match_the_configured_load(study: Study) -> None:
    cell = study.results / "runs" / "plain" / "block0" / "A" / "r40"
    info = read_json(cell / "cell_A_r40.json")
    records = list(read_jsonl(cell / "requests_A_r40.jsonl"))
    assert len(records) == info["counts"]["planned"] == info["schedule"]["n"]
    assert [record["seq"] for record in records] == list(range(len(records)))
    origin = info["window"]["t_origin_ns"]
    due = [record["t_intended_ns"] - origin for record in records]
    assert [int(t * 40 / 1e9) for t in due] == list(range(len(records))), "one in each interval"
    for record in records:
        assert record["status"] == "ok"
        assert (record["prompt_tokens"], record["completion_tokens"]) == (64, 8)
        stamps = [record[f"t_{name}_ns"] for name in ("send", "first_token", "last_token", "done")]
        assert stamps == sorted(stamps)
        assert record["warmup"] == (record["t_intended_ns"] < info["window"]["t_warmup_end_ns"])


def test_every_configuration_gets_the_same_arrivals_and_fresh_content(study: Study) -> None:
    runs = study.results / "runs"
    cells = [runs / name / "block0" / "A" / "r40" for name in ("plain", "noop_connector")]
    infos = [read_json(cell / "cell_A_r40.json") for cell in cells]
    # The length of the cool-down depends on the server; the arrivals agree as far as both go.
    assert {**infos[0]["schedule"], "n": 0} == {**infos[1]["schedule"], "n": 0}
    records = [list(read_jsonl(cell / "requests_A_r40.jsonl")) for cell in cells]
    offsets = [
        [r["t_intended_ns"] - info["window"]["t_origin_ns"] for r in requests]
        for info, requests in zip(infos, records, strict=True)
    ]
    assert all(a == b for a, b in zip(*offsets, strict=False))
    ids = [{r["request_id"] for r in requests} for requests in records]
    assert not ids[0] & ids[1]


def test_step_logs_hold_both_processes_and_the_connectors_callbacks(study: Study) -> None:
    def steps(config: str) -> list[dict[str, Any]]:
        path = study.results / "runs" / config / "block0" / "A" / "r40" / "engine_step_A_r40.jsonl"
        return list(read_jsonl(path))

    assert {step["process"] for step in steps("plain")} == {"scheduler", "worker"}
    assert all(step["build_meta_us"] is None for step in steps("plain"))
    assert any(step["build_meta_us"] for step in steps("noop_connector"))


def test_figures_tables_report_and_manifest_exist(study: Study) -> None:
    for number in range(1, 9):
        for kind in ("png", "svg"):
            figures = list(study.results.glob(f"figures/fig{number}_*.{kind}"))
            assert len(figures) == 1
            assert figures[0].stat().st_size > 0
    for name in ("cells.csv", "effects.csv", "hypotheses.json"):
        assert (study.results / "analysis" / name).stat().st_size > 0
    hypotheses = read_json(study.results / "analysis" / "hypotheses.json")
    assert [h["id"] for h in hypotheses["hypotheses"]] == [f"H{n}" for n in range(1, 7)]
    assert [c["id"] for c in hypotheses["criteria"]] == list(range(1, 8))
    rows = read_json(study.results / "manifest.json")["launches"]
    assert len(rows) == 8
    assert {row["engine"] for row in rows} == {"embedded (emulated)"}
    assert "emulated" in (study.results / "report.html").read_text()


def test_no_file_holds_a_secret_of_the_environment(study: Study) -> None:
    files = {str(p): p.read_bytes() for p in study.folder.rglob("*") if p.is_file()}
    searched = files | archived(study)
    searched["output"] = (study.second.stdout + study.second.stderr).encode()
    kinds = ("launch.sh", "env.txt", "environment.json", "vllm_stderr.log", "logs/pack.log",
             "manifest.json", "manifest.md", "MANIFEST.md", "report.html", "fig1_ttft_vs_rate.svg",
             "effects.csv")  # fmt: skip
    for kind in kinds:
        assert any(name.endswith(kind) for name in searched), kind
    leaks = [name for name, content in searched.items() if b"SecretOfTheTest" in content]
    assert leaks == []


def test_published_files_name_no_folder_of_this_machine(study: Study) -> None:
    """Search for absolute paths; launch.sh reaches the project by a relative one."""
    published = archived(study)
    published["MANIFEST.md"] = (study.folder / "MANIFEST.md").read_bytes()
    published["report.html"] = (study.results / "report.html").read_bytes()
    folders = (ROOT, Path(sys.prefix), study.folder, temporary_folder(study.folder))
    named = [
        (name, folder)
        for name, content in published.items()
        for folder in folders
        if re.search(rb"(?<!\.\.)" + re.escape(os.fsencode(folder)), content)
    ]
    assert named == []


def test_run_leaves_no_process_or_temporary_file(study: Study) -> None:
    assert gone(study.folder, timeout_s=5) == []
    assert not list(study.results.rglob("*.partial"))
    assert not list(study.results.rglob(".*.tmp"))
    kept = [path.name for path in temporary_folder(study.folder).rglob("*") if path.is_file()]
    assert kept == []


def test_second_run_has_nothing_to_do_after_touching_the_code(study: Study) -> None:
    touched = [*(ROOT / "workflow").rglob("*.smk"), ROOT / "workflow" / "Snakefile"]
    touched += (ROOT / "scripts" / "connector_tax").rglob("*.py")
    for path in touched:
        os.utime(path)
    done = run(study.folder, "all")
    assert done.returncode == 0
    assert "Nothing to be done" in done.stdout + done.stderr


def test_the_plan_shows_the_state_of_every_cell(study: Study) -> None:
    done = run(study.folder, "plan")
    lines = [line.split() for line in done.stdout.splitlines()]
    rows = [words for words in lines if words[1:2] in (["A"], ["B"], ["Bp"])]
    assert len(rows) == 3 * 2 + 3 + 2
    # On a busy machine a cell may be void.
    void = {
        (index.parent.name, index.parents[2].name, cell["cell"]): cell["reason"]
        for index in study.results.glob("runs/*/block0/*/index.json")
        for cell in read_json(index)["cells"]
        if cell["status"] == "void"
    }
    assert {(row[1], row[3], row[4]) for row in rows if row[5] == "void"} == void.keys()
    if void:
        warnings.warn(f"void: {void}", stacklevel=1)
    assert {row[5] for row in rows} - {"void"} <= {"done", "skipped"}
    assert "0 still to measure" in done.stdout


def test_changed_margin_is_applied_without_measuring_again(study: Study) -> None:
    text = (study.folder / "study.yaml").read_text()
    try:
        (study.folder / "study.yaml").write_text(text.replace("ttft_p90: 0.03", "ttft_p90: 0.05"))
        done = run(study.folder, "all", options=("--dry-run",))
    finally:
        (study.folder / "study.yaml").write_text(text)
    jobs = planned(done.stdout + done.stderr)
    assert not jobs.keys() & set(MEASURING)
    assert jobs["analyse"] == 1
