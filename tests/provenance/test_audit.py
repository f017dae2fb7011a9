"""The audit agrees with an honest study in every number, and catches every kind of tampering."""

import base64
import csv
import io
import json
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from connector_tax.analysis import aggregate
from connector_tax.figures import style
from connector_tax.figures.names import NAMES
from connector_tax.figures.tables import StudyTables
from connector_tax.files import read_json, sha256_json
from connector_tax.provenance import audit, manifest
from connector_tax.provenance.audit_remade import check_remade
from connector_tax.provenance.claims import FAIL, NOT_CHECKABLE, Claim, Ledger
from connector_tax.provenance.manifest import COLUMNS
from connector_tax.seals import read_links
from connector_tax.study.design import measured_design
from tests.analysis.synthetic import write_synthetic_study
from tests.provenance.audited_study import (
    edited_json,
    edited_lines,
    linked_copy,
    one_in_three,
    replace,
    seal,
    seal_manifest,
    unseal,
)

Tamper = Callable[[Path], None]
NOOP_CELL = "runs/noop_connector/block0/A/r40"
PLAIN_CELL = "runs/plain/block0/A/r40"


def failures(study_file: Path, *, words: bool = False) -> list[Claim]:
    """The claims that fail; those about words take processes of their own, and are asked for."""
    study, ledger = audit.raw_study(study_file), Ledger()
    if words:
        check_remade(study, ledger)
    else:
        audit.check_study(study, study_file.parents[2] / "MANIFEST.md", ledger)
    return [claim for claim in ledger.claims if claim.verdict == FAIL]


def test_an_honest_study_passes(audited: Path) -> None:
    study_file = audited / "results" / "synthetic" / "study.json"
    ledger = audit.audit(study_file, audited / "MANIFEST.md")
    assert [c for c in ledger.claims if c.verdict == FAIL] == []
    kinds = {claim.kind for claim in ledger.claims}
    assert {"hashes", "records", "schedule", "counters", "validity", "skip", "run files"} < kinds
    assert {"numbers", "figure", "summary", "manifest", "arrivals", "request ids"} < kinds
    assert {"made again", "environment"} < kinds
    doubtful = {claim.kind for claim in ledger.claims if claim.verdict == NOT_CHECKABLE}
    assert doubtful == set()


def test_cells_measured_before_their_prompts_were_hashed_are_not_checkable(
    audited: Path, tmp_path: Path
) -> None:
    folder = linked_copy(audited, tmp_path / "copy")
    root = folder / "results" / "synthetic"
    with edited_json(next((root / NOOP_CELL).glob("cell_*"))) as record:
        del record["prompts_sha256"]
    seal(root, root / NOOP_CELL)
    unseal(root)
    ledger = audit.audit(root / "study.json", folder / "MANIFEST.md")
    claims = [c for c in ledger.claims if c.kind == "prompts"]
    assert [c.message for c in claims if c.verdict == NOT_CHECKABLE] == [
        "1 cell files, first noop_connector/block0/A/r40, hold no prompts_sha256: "
        "recorded before cells kept it"
    ]
    assert len(claims) > 1
    assert not any(c.verdict == FAIL for c in ledger.claims)
    sealed = [(c.subject, c.message) for c in ledger.claims if c.kind == "seal"]
    assert sealed == [("whole study", "measured before studies were sealed")]


def test_every_number_of_three_blocks_is_recomputed(tmp_path: Path) -> None:
    """Intervals, adjusted p, verdicts and hypotheses, with cells void, failed and skipped."""
    root = tmp_path / "results" / "synthetic"
    study_file = write_synthetic_study(
        root,
        blocks=3,
        seed=5,
        ttft_growth=0.05,
        steps_per_cell=60,
        skipped={"mooncake_consumer": "the gate"},
        failed={("lmcache_only", 2, "B"): "the server ended"},
        void={("nixl_both", 1, "A", "r40"): "late"},
        config={"statistics": {"resamples": 200}, "cell": {"floor_s": 2.0}},
    )
    assert aggregate.main(["--study", str(study_file)]) == 0
    study = StudyTables(study_file)
    for name in NAMES:
        module = __import__(f"connector_tax.figures.{name}", fromlist=["draw"])
        style.save(module.draw(study), root / "figures", name)
    verdicts = {row.verdict for row in study.taxes}
    assert {"TAX", "INCONCLUSIVE"} <= verdicts
    wrong = [c for c in failures(study_file) if c.kind in ("numbers", "figure")]
    assert wrong == []


def test_the_audit_shares_no_code_with_what_it_audits() -> None:
    code = (
        "import sys, connector_tax.provenance.audit;"
        "rooms = ('connector_tax.analysis', 'connector_tax.figures', 'connector_tax.report');"
        "print([m for m in sys.modules if m.startswith(rooms) or m in ('scipy', 'polars')])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


# ---- tampering


def csv_field(
    name: str, column: str, value: str, row: int = 0, given: bool = True, **where: str
) -> Tamper:
    """Change a field of the n-th row that has a value there, or has none, and matches `where`."""

    def tamper(root: Path) -> None:
        path = root / name
        table = list(csv.DictReader(io.StringIO(path.read_text())))
        matching = [
            r
            for r in table
            if bool(r[column]) == given and all(r[k] == v for k, v in where.items())
        ]
        assert matching[row][column] != value
        matching[row][column] = value
        replace(path, _csv(table))

    return tamper


def columns_gone(name: str, *columns: str) -> Tamper:
    def tamper(root: Path) -> None:
        table = list(csv.DictReader(io.StringIO((root / name).read_text())))
        replace(root / name, _csv([{k: r[k] for k in r if k not in columns} for r in table]))

    return tamper


def csv_row_twice(name: str) -> Tamper:
    def tamper(root: Path) -> None:
        table = list(csv.DictReader(io.StringIO((root / name).read_text())))
        replace(root / name, _csv([*table, table[3]]))

    return tamper


def aggregate_column_gone(root: Path) -> None:
    with edited_json(root / "analysis/aggregate.json") as content:
        for row in content["rows"]:
            del row["dropped"]


def list_entry_gone(name: str, *path: str) -> Tamper:
    def tamper(root: Path) -> None:
        with edited_json(root / name) as content:
            for key in path:
                content = content[key]
            del content[-1]

    return tamper


def add_key(name: str, key: str, value: str) -> Tamper:
    def tamper(root: Path) -> None:
        with edited_json(root / name) as content:
            content[key] = value

    return tamper


def report_text(pattern: str, text: str) -> Tamper:
    def tamper(root: Path) -> None:
        old = (root / "report.html").read_text()
        new, count = re.subn(pattern, text, old, flags=re.DOTALL)
        assert count
        replace(root / "report.html", new)

    return tamper


def relabelled(root: Path) -> None:
    """A measurement of the embedded engine that says it is one of vLLM, everywhere."""
    label = "real vLLM, H20"
    with edited_json(root / "study.json") as study:
        study["engine_label"] = study["config"]["engine"]["label"] = label
        study["emulated"] = False
        design = measured_design(study["config"], study["configurations"])
        study["design_sha256"] = sha256_json(design)


def csv_row_gone(name: str) -> Tamper:
    def tamper(root: Path) -> None:
        table = list(csv.DictReader(io.StringIO((root / name).read_text())))
        replace(root / name, _csv(table[:-1]))

    return tamper


def _csv(table: list[dict[str, str]]) -> str:
    stream = io.StringIO()
    writer = csv.DictWriter(stream, list(table[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows(table)
    return stream.getvalue()


def json_value(name: str, *path: str | int, value: object) -> Tamper:
    def tamper(root: Path) -> None:
        with edited_json(root / name) as content:
            for key in path[:-1]:
                content = content[key]
            assert content[path[-1]] != value
            content[path[-1]] = value

    return tamper


def forged(cell: str, kind: str, change: Callable[[list[dict[str, object]]], None]) -> Tamper:
    """Change a cell's records and make every hash fit again."""

    def tamper(root: Path) -> None:
        with edited_lines(next((root / cell).glob(f"{kind}_*"))) as records:
            change(records)
        seal(root, root / cell)

    return tamper


def forged_record(cell: str, *path: str, value: object) -> Tamper:
    def tamper(root: Path) -> None:
        name = next((root / cell).glob("cell_*")).relative_to(root)
        json_value(str(name), *path, value=value)(root)
        seal(root, root / cell)

    return tamper


def set_in(number: int, key: str, value: object) -> Callable[[list[dict[str, object]]], None]:
    def change(records: list[dict[str, object]]) -> None:
        assert records[number][key] != value
        records[number][key] = value

    return change


def add_to(number: int, amount: int, *keys: str) -> Callable[[list[dict[str, object]]], None]:
    def change(records: list[dict[str, object]]) -> None:
        for key in keys:
            records[number][key] += amount  # type: ignore[operator]

    return change


def delete(number: int) -> Callable[[list[dict[str, object]]], None]:
    def change(records: list[dict[str, object]]) -> None:
        del records[number]

    return change


def delay_all(records: list[dict[str, object]]) -> None:
    for record in records:
        for key in list(record):
            if key.startswith("t_"):
                record[key] += 1_000_000  # type: ignore[operator]


def cache_hit(records: list[dict[str, object]]) -> None:
    name = 'vllm:prefix_cache_hits_total{engine="0"}'
    records[-1]["values"][name] = 16.0  # type: ignore[index]


def rename_requests(cell: str, attempt: str) -> Callable[[list[dict[str, object]]], None]:
    def change(records: list[dict[str, object]]) -> None:
        for number, record in enumerate(records):
            record["request_id"] = f"{cell.removeprefix('runs/')}/{attempt}/{number}"

    return change


def second_step(records: list[dict[str, object]]) -> None:
    records.insert(1, dict(records[0]))


def cut_off(root: Path) -> None:
    path = next((root / NOOP_CELL).glob("requests_*"))
    replace(path, path.read_text()[:-40])
    seal(root, root / NOOP_CELL)


def delete_request_unsealed(root: Path) -> None:
    with edited_lines(next((root / NOOP_CELL).glob("requests_*"))) as records:
        del records[7]


def swap_files(root: Path) -> None:
    """The other configuration's requests, under this one's name, all hashes fitting."""
    mine, other = (next((root / c).glob("requests_*")) for c in (NOOP_CELL, PLAIN_CELL))
    left, right = mine.read_text(), other.read_text()
    replace(mine, right)
    replace(other, left)
    seal(root, root / NOOP_CELL)
    seal(root, root / PLAIN_CELL)


def copy_request_id(root: Path) -> None:
    taken = json.loads(next((root / PLAIN_CELL).glob("requests_*")).read_text().split("\n")[0])
    forged(NOOP_CELL, "requests", set_in(3, "request_id", taken["request_id"]))(root)


def claim_validity(root: Path) -> None:
    """A cell with late requests that says it is valid."""
    late = [f"t_{n}_ns" for n in ("conn", "send", "headers", "first_token", "last_token", "done")]

    def change(records: list[dict[str, object]]) -> None:
        for number in range(25, len(records)):
            add_to(number, 300_000_000, *late)(records)

    forged(NOOP_CELL, "requests", change)(root)


def remove(name: str) -> Tamper:
    def tamper(root: Path) -> None:
        (root / name).unlink()

    return tamper


def removed_and_sealed(name: str) -> Tamper:
    def tamper(root: Path) -> None:
        (root / name).unlink()
        seal_manifest(root)

    return tamper


def no_skip_reason(root: Path) -> None:
    json_value("runs/mooncake_consumer/block0/A/index.json", "reason", value="")(root)
    seal_manifest(root)


def add_file(root: Path) -> None:
    (root / NOOP_CELL / "notes.txt").write_text("trust me\n")
    seal_manifest(root)


def other_launch_script(root: Path) -> None:
    path = root / "runs/noop_connector/block0/A/launch.sh"
    replace(path, path.read_text().replace("noop_connector", "plain"))
    seal_manifest(root)


def other_environment(root: Path) -> None:
    replace(root / "runs/plain/block0/A/env.txt", "other\n")
    seal_manifest(root)


def other_picture(root: Path) -> None:
    path = root / "figures" / "fig1_ttft_vs_rate.png"
    for kind in ("png", "svg"):
        data = path.with_suffix(f".{kind}").read_bytes()
        path.with_suffix(f".{kind}").unlink()
        path.with_suffix(f".{kind}").write_bytes(data + b"\n")


def other_picture_in_report(root: Path) -> None:
    path = root / "report.html"
    head = base64.b64encode(b"<svg").decode()[:4]
    text = path.read_text()
    start = text.index("base64,") + len("base64,")
    assert head
    replace(path, text[:start] + "AAAA" + text[start + 4 :])


def markdown_row(root: Path) -> None:
    path = root.parents[1] / "MANIFEST.md"
    replace(path, path.read_text().replace("| 2/0/0/0 |", "| 9/0/0/0 |", 1))


def swap_cells(root: Path) -> None:
    cells = [root / "runs/noop_connector/block0/A" / name for name in ("r40", "r80")]
    cells[0].rename(cells[0].with_name("x"))
    cells[1].rename(cells[0])
    cells[0].with_name("x").rename(cells[1])


AGGREGATE, TAXES = "analysis/aggregate.csv", "analysis/taxes.csv"
INDEX = "runs/noop_connector/block0/A/index.json"
HYPOTHESES = "analysis/hypotheses.json"
STEP_CALL = set_in(0, "build_meta_us", 5.0)
TAMPERING: dict[str, tuple[Tamper, str, str]] = {
    "a percentile in aggregate.csv": (
        csv_field(AGGREGATE, "ttft_p90_ms", "9.5", row=3), "numbers", "ttft_p90_ms"),
    "an interval in aggregate.csv": (
        csv_field(AGGREGATE, "tpot_p50_lo_ms", "1.5"), "numbers", "tpot_p50_lo_ms"),
    "a throughput in aggregate.csv": (
        csv_field(AGGREGATE, "effective_throughput_rps", "41"), "numbers", "effective_throughput"),
    "a saturation flag": (
        csv_field(AGGREGATE, "saturated", "true", saturated="false"), "numbers", "saturated"),
    "a row gone from aggregate.csv": (csv_row_gone(AGGREGATE), "numbers", "published 0 times"),
    "a void cell made up": (
        csv_field(AGGREGATE, "status", "void", status="valid"), "numbers", "status"),
    "a number in aggregate.json": (
        json_value("analysis/aggregate.json", "rows", 2, "e2e_p90_ms", value=1.0),
        "numbers", "e2e_p90_ms"),
    "the engine's label in aggregate.json": (
        json_value("analysis/aggregate.json", "engine_label", value="real vLLM, GPU"),
        "numbers", "engine_label is 'real vLLM, GPU'"),
    "a tax": (csv_field(TAXES, "tax", "0.02"), "numbers", "tax: published '0.02'"),
    "an interval of one launch": (
        csv_field(TAXES, "tax_lo", "-0.5", given=False), "numbers", "tax_lo: published '-0.5'"),
    "a verdict": (csv_field(TAXES, "verdict", "TAX"), "numbers", "verdict"),
    "a p-value of one launch": (
        csv_field(TAXES, "p_adjusted", "0.01", given=False), "numbers", "p_adjusted"),
    "a margin": (csv_field(TAXES, "margin", "0.1"), "numbers", "margin: published '0.1'"),
    "an exploratory tax called confirmatory": (
        csv_field(TAXES, "family", "confirmatory", family="exploratory"), "numbers", "family"),
    "a mark made up": (
        csv_field(TAXES, "mark", "plain saturated", given=False), "numbers", "mark"),
    "a column gone from taxes.csv": (
        columns_gone(TAXES, "verdict"), "numbers", "columns missing.*: verdict"),
    "the intervals and the A/A gone from taxes.csv": (
        columns_gone(TAXES, "tax_lo", "tax_hi", "aa_tax", "aa_lo", "aa_hi"),
        "numbers", "columns missing.*: tax_lo, tax_hi, aa_tax, aa_lo, aa_hi"),
    "a row gone from taxes.csv": (csv_row_gone(TAXES), "numbers", "published 0 times"),
    "a tax twice": (csv_row_twice(TAXES), "numbers", "published 2 times"),
    "a configuration that was never measured": (
        csv_field(TAXES, "config", "fast_connector"), "numbers", "recomputed 0"),
    "a column gone from every row of aggregate.json": (
        aggregate_column_gone, "numbers", "columns missing or added: dropped"),
    "a column gone from a figure": (
        columns_gone("figures/fig9_forest.csv", "verdict"), "figure", "columns missing: verdict"),
    "an absolute difference": (csv_field(TAXES, "abs_ms", "0"), "numbers", "abs_ms"),
    "a sample size": (csv_field(TAXES, "n_plain", "5000"), "numbers", "n_plain"),
    "the A/A noise floor": (csv_field(TAXES, "aa_tax", "0"), "numbers", "aa_tax"),
    "a step percentile": (
        csv_field("analysis/steps.csv", "step_duration_us_p50", "7"), "numbers", "step_duration"),
    "an engine-step tax": (
        csv_field(TAXES, "engine_step_tax_us", "7"), "numbers", "engine_step_tax_us"),
    "an engine step's percentile": (
        csv_field("analysis/steps.csv", "engine_step_us_p50", "7"), "numbers", "engine_step_us"),
    "a point of the step distribution": (
        csv_field("analysis/step_cdf.csv", "step_duration_us", "7"), "numbers", "step_duration_us"),
    "an amplification": (
        csv_field("analysis/amplification.csv", "gap", "0"), "numbers", "gap: published '0'"),
    "a hypothesis' verdict": (
        json_value(HYPOTHESES, "hypotheses", 0, "verdict", value="supported"),
        "numbers", "H1: verdict 'supported'"),
    "a hypothesis' number": (
        json_value(HYPOTHESES, "hypotheses", 0, "numbers", "tax_ttft_p90", "point", value=0.1),
        "numbers", "H1.tax_ttft_p90.point"),
    "a hypothesis' sentence": (
        json_value(HYPOTHESES, "hypotheses", 1, "sentence", value="NIXL is free."),
        "made again", r"hypotheses\[1\].sentence: published 'NIXL is free.'"),
    "a point's label": (
        json_value(HYPOTHESES, "hypotheses", 2, "point_label", value="framework-dominated!"),
        "made again", r"hypotheses\[2\].point_label"),
    "a hypothesis gone": (list_entry_gone(HYPOTHESES, "hypotheses"), "numbers", "not published"),
    "the engine's label in hypotheses.json": (
        json_value(HYPOTHESES, "engine_label", value="real vLLM, GPU"),
        "numbers", "engine_label is 'real vLLM, GPU'"),
    "a prior gone": (
        list_entry_gone(HYPOTHESES, "prior", "rows"), "numbers", "prior: published 2 entries"),
    "a success criterion": (
        json_value(HYPOTHESES, "criteria", 6, "verdict", value="not met"),
        "numbers", "criterion 7: 'not met'"),
    "the measured value beside the prior": (
        json_value(HYPOTHESES, "prior", "rows", 0, "measured_ttft_p90_s", value=7.3),
        "numbers", r"prior\[0\].measured_ttft_p90_s"),
    "the resolution": (
        json_value(HYPOTHESES, "resolution", 3, "half_width", value=0.001),
        "numbers", r"resolution\[3\].half_width"),
    "a criterion of a reference rate": (
        json_value("reference_rates.json", "criteria", "plain", "40", "throughput_ratio", "value",
                   value=0.5), "numbers", "throughput_ratio.value"),
    "a saturation rate": (
        json_value("reference_rates.json", "saturation_rate_rps", "plain", value=40.0),
        "numbers", "saturation_rate_rps.plain"),
    "a reference rate": (
        json_value("reference_rates.json", "ref_safe", value=80.0),
        "launch", "reference_rates.json says 80"),
    "a row gone from a figure": (
        csv_row_gone("figures/fig4_tax_bars.csv"), "figure", "0 rows"),
    "a picture": (other_picture, "report", "fig1_ttft_vs_rate.png in the report is not"),
    "a picture in the report": (other_picture_in_report, "report", "is not the one in figures/"),
    "every percentage of the report": (
        report_text(r"\+?\d+\.\d+\u2009?\xa0?\u202f? ?%", "0.1 %"),
        "made again", "not what this code makes of the study"),
    "the report's headline": (
        report_text("<h1>.*?</h1>", "<h1>Free of charge</h1>"),
        "made again", "not what this code makes of the study"),
    "the report gone": (remove("report.html"), "report", "report.html is missing"),
    "a deleted request": (delete_request_unsealed, "hashes", "requests_A_r40.jsonl: sha256"),
    "a deleted request, hashes forged": (
        forged(NOOP_CELL, "requests", delete(7)), "records", r"missing: \[7\]"),
    "a request put in, hashes forged": (
        forged(NOOP_CELL, "requests", lambda r: r.append({**r[-1], "seq": len(r)})),
        "schedule", "81 requests, the seed gives 80"),
    "a stamp out of order": (
        forged(NOOP_CELL, "requests", add_to(5, -10**9, "t_first_token_ns")),
        "records", "seq 5: t_first_token_ns is before t_headers_ns"),
    "a stamp shifted, still in order": (
        forged(NOOP_CELL, "requests", add_to(30, -2_000_000, "t_headers_ns", "t_first_token_ns")),
        "summary", "summary.r40"),
    "a request sent early": (
        forged(NOOP_CELL, "requests",
               add_to(9, -10**6, "t_issue_ns", "t_worker_ns", "t_conn_ns", "t_send_ns")),
        "records", "seq 9: written before it was due"),
    "all arrivals later": (
        forged(NOOP_CELL, "requests", delay_all), "schedule", "80 arrivals are not the seed's"),
    "another length": (
        forged(NOOP_CELL, "requests", set_in(4, "completion_tokens", 31)),
        "records", "seq 4: 256x31, asked 256x32"),
    "a failure called success": (
        forged(NOOP_CELL, "requests", set_in(4, "t_done_ns", None)),
        "records", "seq 4: a success lacks a stamp"),
    "a success hidden": (
        forged(NOOP_CELL, "requests", set_in(40, "status", "dropped")), "records", "counts.ok"),
    "a request called warm-up": (
        forged(NOOP_CELL, "requests", set_in(60, "warmup", True)),
        "records", "seq 60: warmup is True"),
    "a cut-off file, hashes forged": (cut_off, "records", "requests_A_r40.jsonl:80: not valid"),
    "requests of another configuration": (
        swap_files, "schedule", "80 arrivals are not the seed's"),
    "a request id used twice": (copy_request_id, "request ids", "plain/block0/A/r40/attempt11/0"),
    "the hash of the prompts": (
        forged_record(NOOP_CELL, "prompts_sha256", value="0" * 64),
        "prompts", "not that of the 80 requests the seed gives"),
    "prompts of another attempt": (
        forged(NOOP_CELL, "requests", rename_requests(NOOP_CELL, "attempt12")),
        "prompts", "not that of the 80 requests the seed gives"),
    "prompts of another launch": (
        forged(NOOP_CELL, "requests", rename_requests(PLAIN_CELL, "attempt11")),
        "prompts", "begin with 'plain/block0/A/r40/attempt11'"),
    "a request id of no prompt": (
        forged(NOOP_CELL, "requests", set_in(5, "request_id", "other")),
        "prompts", "1 request ids are not .*, first: 'other'"),
    "two cells exchanged": (swap_cells, "hashes", "is not listed in index.json|is missing"),
    "a cache hit": (
        forged(NOOP_CELL, "metrics", cache_hit), "counters", "prefix_cache_hits grew by 16"),
    "the last scrape gone": (
        forged(NOOP_CELL, "metrics", delete(-1)), "counters", "server_counters.after"),
    "a health value": (
        forged_record(NOOP_CELL, "health", "schedule_lag_p99_ms", "value", value=0.01),
        "validity", "schedule_lag_p99_ms.value"),
    "a late cell that says it is valid": (claim_validity, "validity", "the checks give False"),
    "a worker that died": (
        forged_record(NOOP_CELL, "load_generator", "workers_died", value=[0]),
        "validity", "workers_died"),
    "a machine that was suspended": (
        forged_record(NOOP_CELL, "suspended_ms", value=5000), "validity", "suspended_ms"),
    "a window cut below its floor": (
        json_value("study.json", "config", "cell", "floor_s", value=60), "validity", "window_s"),
    "fewer successes than the design wants": (
        json_value("study.json", "config", "cell", "min_completed", value=10**6),
        "validity", "measured_ok"),
    "a valid cell called void": (
        forged_record(NOOP_CELL, "valid", value=False), "validity", "valid is False"),
    "another seed's name": (
        forged_record(NOOP_CELL, "schedule", "seed", value="9/arrivals/block0/A/r40"),
        "schedule", "the documented name is '1/arrivals/block0/A/r40'"),
    "another offered rate": (
        forged_record(NOOP_CELL, "schedule", "rate_rps", value=80.0), "schedule", "it must be 40"),
    "a longer window": (
        forged_record(NOOP_CELL, "window", "t_stop_ns", value=10**18),
        "window", "the window lasts"),
    "a connector's callback in plain": (
        forged(PLAIN_CELL, "engine_step", STEP_CALL), "steps", "plain has a connector callback"),
    "a step counted twice": (
        forged(NOOP_CELL, "engine_step", second_step), "steps", "two records of one step"),
    "a file beside the records": (add_file, "hashes", "notes.txt is in the folder and not in"),
    "a log gone": (
        removed_and_sealed("runs/noop_connector/block0/A/vllm_stderr.log"),
        "run files", "vllm_stderr.log is missing"),
    "another launch command": (other_launch_script, "run files", "does not run config.json's argv"),
    "the environment of a run": (
        other_environment,
        "run files", "env.txt differs"),
    "a summary": (
        json_value("runs/noop_connector/block0/A/summary.json", "r40", "n", value=999),
        "summary", "summary.r40.n"),
    "a skip without its reason": (no_skip_reason, "skip", "skipped without a reason"),
    "a launch without its index": (remove(INDEX), "launch", "index.json is missing"),
    "a launch of another design": (
        json_value(INDEX, "depends", "design_sha256", value="0" * 64),
        "launch", "of another design"),
    "a rate of the design": (
        json_value("study.json", "config", "cell", "floor_s", value=60),
        "design", "its content hashes to"),
    "the study's seed": (json_value("study.json", "config", "seed", value=2), "design", "seed"),
    "the run order": (
        json_value("study.json", "run_order", "A", 1, "config", value="plain"),
        "design", "phase A is not the order seed 1 gives"),
    "the engine's label": (
        json_value("study.json", "engine_label", value="real vLLM, GPU"),
        "label", "contradicts emulated"),
    "an embedded study relabelled": (
        relabelled, "label", "emulated is False, the engine is 'embedded'"),
    "environment.json": (
        json_value("environment.json", "gpu", value=["H20"]),
        "environment", r"gpu: \[.H20.\]. is not in env.txt"),
    "a line more in environment.json": (
        add_key("environment.json", "gpu_driver", "550.1"),
        "environment", "'gpu_driver: 550.1' is not in env.txt"),
    "a manifest hash": (
        json_value("manifest.json", 0, "sha256", value="0" * 64), "manifest", "changed after"),
    "a row of MANIFEST.md": (markdown_row, "manifest", "MANIFEST.md and manifest.json differ"),
}  # fmt: skip


@pytest.mark.parametrize("what", one_in_three(TAMPERING))
def test_tampering_is_caught(audited: Path, tmp_path: Path, what: str) -> None:
    folder = linked_copy(audited, tmp_path / "copy")
    root = folder / "results" / "synthetic"
    tamper, kind, message = TAMPERING[what]
    tamper(root)
    claims = failures(root / "study.json", words=kind == "made again")
    found = [claim for claim in claims if claim.kind == kind]
    assert found, f"no {kind} claim fails"
    assert any(re.search(message, claim.message) for claim in found), [c.message for c in found]


@pytest.mark.parametrize("column", one_in_three(c for c in COLUMNS if c not in ("study", "sha256")))
def test_every_column_of_the_manifest_has_a_source(
    audited: Path, tmp_path: Path, column: str
) -> None:
    folder = linked_copy(audited, tmp_path / "copy")
    root = folder / "results" / "synthetic"
    with edited_json(root / "manifest.json") as rows:
        rows[1][column] = "H20"
    rows, seal = read_json(root / "manifest.json"), read_links(root)[-1][0]
    manifest.update(folder / "MANIFEST.md", "synthetic", rows, seal)
    found = failures(root / "study.json")
    assert {claim.kind for claim in found} == {"manifest"}
    named = {"configuration", "block", "phase"}
    wanted = "has 0 rows" if column in named else f"{column} is 'H20'"
    assert any(wanted in claim.message for claim in found), found


def text_of(kind: str, text: str | bytes) -> Tamper:
    def tamper(root: Path) -> None:
        path = next((root / NOOP_CELL).glob(f"{kind}_*"))
        path.unlink()
        path.write_bytes(text if isinstance(text, bytes) else text.encode())
        seal(root, root / NOOP_CELL)

    return tamper


def empty_window(root: Path) -> None:
    path = next((root / NOOP_CELL).glob("cell_*"))
    with edited_json(path) as record:
        record["window"]["t_stop_ns"] = record["window"]["t_warmup_end_ns"]
    seal(root, root / NOOP_CELL)


def brackets_in_record(root: Path) -> None:
    replace(next((root / NOOP_CELL).glob("cell_*")), "[" * 200_000)


MALFORMED: dict[str, tuple[Tamper, str]] = {
    "an empty window": (empty_window, "noop_connector/block0/A/r40: malformed: ZeroDivisionError"),
    "a record of brackets": (brackets_in_record, "cell_A_r40.json: not valid JSON: maximum recur"),
    "requests of brackets": (
        text_of("requests", "[" * 200_000 + "\n"), "requests_A_r40.jsonl:1: not valid JSON"),
    "requests that are lists": (text_of("requests", "[]\n"), "noop_connector/block0/A/r40: "),
    "a page that is no text": (text_of("metrics", b"\xff\n"), "metrics_A_r40.jsonl: not UTF-8"),
    "no scrape": (text_of("metrics", ""), "noop_connector/block0/A/r40: "),
    "steps without their keys": (text_of("engine_step", "{}\n"), "noop_connector/block0/A/r40: "),
    "an index that is a list": (
        lambda root: replace(root / INDEX, "[]"), "an index.json: malformed|index.json"),
    "an index of brackets": (
        lambda root: replace(root / INDEX, "[" * 200_000), "index.json: not valid JSON"),
    "a study of brackets": (
        lambda root: replace(root / "study.json", "[" * 200_000), "study.json: not valid JSON"),
    "a study that is a list": (lambda root: replace(root / "study.json", "[]"), "found list"),
    "a chain that is no JSON": (
        lambda root: replace(root / "seals.jsonl", "x\n"), "seals.jsonl:1: not valid JSON"),
    "a chain of nothing": (lambda root: replace(root / "seals.jsonl", "{}\n"), "key 'files'"),
}  # fmt: skip


@pytest.mark.parametrize("what", one_in_three(MALFORMED))
def test_what_is_malformed_fails_by_name(audited: Path, tmp_path: Path, what: str) -> None:
    folder = linked_copy(audited, tmp_path / "copy")
    root = folder / "results" / "synthetic"
    tamper, message = MALFORMED[what]
    tamper(root)
    ledger = Ledger()
    with ledger.guarded("study", "study.json"):
        audit.check_study(audit.raw_study(root / "study.json"), folder / "MANIFEST.md", ledger)
    shown = [f"{c.subject}: {c.message}" for c in ledger.claims if c.verdict == FAIL]
    assert any(re.search(message, text) for text in shown), shown


def test_a_malformed_study_replaces_the_audit_that_passed(
    audited: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = linked_copy(audited, tmp_path / "copy")
    root = folder / "results" / "synthetic"
    replace(root / "audit.json", '{"counts": {"FAIL": 0}}')
    replace(root / "study.json", "[" * 200_000)
    arguments = ["--study", str(root / "study.json"), "--manifest", str(folder / "MANIFEST.md")]
    assert audit.main(arguments) == 1
    assert read_json(root / "audit.json")["counts"][FAIL] == 1
    assert "FAIL study study.json" in capsys.readouterr().out


@pytest.mark.parametrize("figure", one_in_three(NAMES))
def test_an_edited_figure_number_is_caught(audited: Path, tmp_path: Path, figure: str) -> None:
    folder = linked_copy(audited, tmp_path / "copy")
    root = folder / "results" / "synthetic"
    columns = {"fig1": "value", "fig2": "hi", "fig3": "n", "fig6": "step_duration_us"}
    columns["fig10"] = "difference"
    column = columns.get(figure.partition("_")[0], "tax")
    csv_field(f"figures/{figure}.csv", column, "0.123")(root)
    found = [c for c in failures(root / "study.json") if (c.kind, c.subject) == ("figure", figure)]
    assert len(found) == 1
    assert f"{column}: published '0.123'" in found[0].message


def test_the_command_ends_non_zero_and_writes_every_claim(
    audited: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "copy"
    shutil.copytree(audited, folder)
    root = folder / "results" / "synthetic"
    arguments = ["--study", str(root / "study.json"), "--manifest", str(folder / "MANIFEST.md")]
    assert audit.main(arguments) == 0
    assert read_json(root / "audit.json")["counts"][FAIL] == 0
    csv_field(TAXES, "tax", "0.02")(root)
    assert audit.main(arguments) == 1
    written = read_json(root / "audit.json")
    failed = [(c["kind"], c["subject"]) for c in written["claims"] if c["verdict"] == FAIL]
    assert failed == [("numbers", "taxes.csv"), ("made again", "analysis/taxes.csv")]
    assert "FAIL numbers taxes.csv" in capsys.readouterr().out
    assert sum(written["counts"].values()) == len(written["claims"])


def test_without_a_study_there_is_a_clear_message(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["--study", str(tmp_path / "study.json"), "--manifest", "MANIFEST.md"]
    assert audit.main(arguments) == 2
    assert "no such file" in capsys.readouterr().err
