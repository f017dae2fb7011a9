"""The audit catches every kind of tampering, and says what is wrong."""

import re
from pathlib import Path

import pytest

from connector_tax.figures.names import NAMES
from connector_tax.files import read_json
from connector_tax.provenance import audit, manifest
from connector_tax.provenance.audit_manifest import check_manifest
from connector_tax.provenance.audit_remade import check_remade
from connector_tax.provenance.claims import FAIL, Ledger
from connector_tax.provenance.manifest import COLUMNS
from tests.provenance.audited_study import (
    edited_json,
    linked_copy,
    one_in_three,
)
from tests.provenance.tampering import (
    AGGREGATE,
    INDEX,
    NOOP_CELL,
    PLAIN_CELL,
    TAXES,
    Tamper,
    add_file,
    add_key,
    add_to,
    aggregate_column_gone,
    cache_hit,
    claim_validity,
    columns_gone,
    copy_request_id,
    csv_field,
    csv_row_gone,
    csv_row_twice,
    cut_off,
    delay_all,
    delete,
    delete_request_unsealed,
    failures,
    forged,
    forged_record,
    json_value,
    list_entry_gone,
    markdown_row,
    no_skip_reason,
    other_environment,
    other_launch_script,
    other_picture,
    other_picture_in_report,
    relabelled,
    remove,
    removed_and_sealed,
    rename_requests,
    report_text,
    second_step,
    set_in,
    swap_cells,
    swap_files,
)

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
    "what was served of a shape": (
        json_value("preflight/shape_rates.json", "shapes", "512x16", "completed_s", value=[0.001]),
        "design", "512x16: most_rps is 30.0, what was served gives 500"),
    "a shape's rate": (
        json_value("preflight/shape_rates.json", "shapes", "512x16", "most_rps", value=35.0),
        "schedule", "rate is 30.0 req/s, it must be 35"),
    "a row gone from a figure": (
        csv_row_gone("figures/fig4_tax_bars.csv"), "figure", "0 rows"),
    "a picture": (other_picture, "report", "fig1_ttft_vs_rate.png in the report is not"),
    "a picture in the report": (other_picture_in_report, "report", "is not the one in figures/"),
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
    "a row of manifest.md": (markdown_row, "manifest", "manifest.md and manifest.json differ"),
}  # fmt: skip


# What is only caught by making everything again, in two files: hypotheses.json and the report.
WORDS: dict[str, tuple[Tamper, str]] = {
    "a hypothesis' sentence": (
        json_value(HYPOTHESES, "hypotheses", 1, "sentence", value="NIXL is free."),
        r"hypotheses\[1\].sentence: published 'NIXL is free.'"),
    "a point's label": (
        json_value(HYPOTHESES, "hypotheses", 2, "point_label", value="framework-dominated!"),
        r"hypotheses\[2\].point_label"),
    "every percentage of the report": (
        report_text(r"\+?\d+\.\d+\u2009?\xa0?\u202f? ?%", "0.1 %"),
        "not what this code makes of the study"),
    "the report's headline": (
        report_text("<h1>.*?</h1>", "<h1>Free of charge</h1>"),
        "not what this code makes of the study"),
}  # fmt: skip


@pytest.mark.parametrize("what", one_in_three(TAMPERING))
def test_tampering_is_caught(audited: Path, tmp_path: Path, what: str) -> None:
    folder = linked_copy(audited, tmp_path / "copy")
    root = folder / "results" / "synthetic"
    tamper, kind, message = TAMPERING[what]
    tamper(root)
    claims = failures(root / "study.json")
    failed = [claim for claim in claims if claim.kind == kind]
    assert failed, f"no {kind} claim fails"
    assert any(re.search(message, claim.message) for claim in failed), [c.message for c in failed]


@pytest.mark.parametrize(
    ("in_hypotheses", "in_report"),
    [
        ("a hypothesis' sentence", "the report's headline"),
        pytest.param("a point's label", "every percentage of the report", marks=pytest.mark.long),
    ],
)
def test_changed_words_are_caught_when_all_is_made_again(
    audited: Path, tmp_path: Path, in_hypotheses: str, in_report: str
) -> None:
    folder = linked_copy(audited, tmp_path / "copy")
    root = folder / "results" / "synthetic"
    messages = {}
    for what, file in ((in_hypotheses, HYPOTHESES), (in_report, "report.html")):
        tamper, messages[file] = WORDS[what]
        tamper(root)
    study, ledger = audit.raw_study(root / "study.json"), Ledger()
    check_remade(study, ledger)
    failed = {c.subject: c.message for c in ledger.claims if c.verdict == FAIL}
    assert failed.keys() == messages.keys()
    for file, message in messages.items():
        assert re.search(message, failed[file])


@pytest.mark.parametrize("column", [c for c in COLUMNS if c not in ("study", "sha256")])
def test_every_column_of_the_manifest_has_a_source(
    audited: Path, tmp_path: Path, column: str
) -> None:
    folder = linked_copy(audited, tmp_path / "copy")
    root = folder / "results" / "synthetic"
    with edited_json(root / "manifest.json") as rows:
        rows[1][column] = "H20"
    manifest.write_page(root, read_json(root / "manifest.json"))
    ledger = Ledger()
    check_manifest(audit.raw_study(root / "study.json"), ledger, folder / "MANIFEST.md")
    failed = [claim for claim in ledger.claims if claim.verdict == FAIL]
    assert {claim.kind for claim in failed} == {"manifest"}
    named = {"configuration", "block", "phase"}
    wanted = "has 0 rows" if column in named else f"{column} is 'H20'"
    assert any(wanted in claim.message for claim in failed), failed


def test_an_edited_number_of_each_figure_is_caught(audited: Path, tmp_path: Path) -> None:
    folder = linked_copy(audited, tmp_path / "copy")
    root = folder / "results" / "synthetic"
    columns = {"fig1": "value", "fig2": "hi", "fig3": "n", "fig6": "step_duration_us"}
    columns["fig10"] = "difference"
    wanted = {name: columns.get(name.partition("_")[0], "tax") for name in NAMES}
    for figure, column in wanted.items():
        csv_field(f"figures/{figure}.csv", column, "0.123")(root)
    failed = {c.subject: c.message for c in failures(root / "study.json") if c.kind == "figure"}
    assert failed.keys() == wanted.keys()
    for figure, column in wanted.items():
        assert f"{column}: published '0.123'" in failed[figure]
