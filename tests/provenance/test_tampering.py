"""The audit catches every kind of tampering, and says what is wrong."""

import re
from pathlib import Path

import pytest

from connector_tax.artifacts import paths, tables
from connector_tax.figures.names import NAMES
from connector_tax.files import read_json, write_json
from connector_tax.provenance import manifest
from connector_tax.provenance.manifest import COLUMNS, LEFT_OUT
from connector_tax.provenance.remade import differs
from tests.provenance.audited_study import linked_copy
from tests.provenance.tampering import (
    CELLS,
    EFFECTS,
    INDEX,
    NOOP_CELL,
    PLAIN_CELL,
    Tamper,
    add_file,
    add_key,
    add_to,
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
    labels_exchanged,
    list_entry_gone,
    markdown_row,
    no_skip_reason,
    other_environment,
    other_launch_script,
    other_picture,
    other_picture_in_report,
    planted,
    relabelled,
    remove,
    removed_and_sealed,
    rename_requests,
    report_text,
    second_step,
    set_in,
    swap_cells,
    swap_files,
    text_replaced,
)

HYPOTHESES = "analysis/hypotheses.json"
STEP_CALL = set_in(0, "build_meta_us", 5.0)
# By kind of the claim that fails: what is changed, and what the claim says.
TAMPERING: dict[str, dict[str, tuple[Tamper, str]]] = {
    "made again": {
        "a percentile in cells.csv": (
            csv_field(CELLS, "ttft_p90_ms", "9.5", row=3),
            r"row\[3\]\.ttft_p90_ms: published 9\.5",
        ),
        "an interval in cells.csv": (
            csv_field(CELLS, "tpot_p50_lo_ms", "1.5"),
            r"row\[0\]\.tpot_p50_lo_ms: published 1\.5",
        ),
        "a throughput in cells.csv": (
            csv_field(CELLS, "effective_throughput_rps", "41"),
            r"row\[0\]\.effective_throughput_rps: published 41\.0",
        ),
        "a saturation flag": (
            csv_field(CELLS, "saturated", "true", saturated="false"),
            r"row\[0\]\.saturated: published 'true'",
        ),
        "a row gone from cells.csv": (csv_row_gone(CELLS), "row: published 72"),
        "a void cell made up": (
            csv_field(CELLS, "status", "void", status="valid"),
            r"row\[0\]\.status: published 'void'",
        ),
        "a tax": (csv_field(EFFECTS, "estimate", "0.02"), r"row\[0\]\.estimate: published 0\.02"),
        "an interval of one launch": (
            csv_field(EFFECTS, "lo", "-0.5", given=False),
            r"row\[0\]\.lo: published -0\.5",
        ),
        "a verdict": (csv_field(EFFECTS, "verdict", "TAX"), r"row\[0\]\.verdict: published 'TAX'"),
        "a p-value of one launch": (
            csv_field(EFFECTS, "p_adjusted", "0.01", given=False),
            r"row\[0\]\.p_adjusted: published 0\.01",
        ),
        "a margin": (csv_field(EFFECTS, "margin", "0.1"), r"row\[0\]\.margin: published 0\.1"),
        "an exploratory tax called confirmatory": (
            csv_field(EFFECTS, "family", "confirmatory", family="exploratory"),
            r"row\[\d+\]\.family: published 'confirmatory'",
        ),
        "a mark made up": (
            csv_field(EFFECTS, "mark", "plain saturated", given=False),
            r"row\[0\]\.mark: published 'plain saturated'",
        ),
        "a column gone from effects.csv": (
            columns_gone(EFFECTS, "verdict"),
            rf"columns\[0\]: published {len(tables.COLUMNS[paths.EFFECTS]) - 1}, ",
        ),
        "the intervals gone from effects.csv": (
            columns_gone(EFFECTS, "lo", "hi"),
            rf"columns\[0\]: published {len(tables.COLUMNS[paths.EFFECTS]) - 2}, ",
        ),
        "a row gone from effects.csv": (csv_row_gone(EFFECTS), r"row: published \d+, made"),
        "a tax twice": (csv_row_twice(EFFECTS), r"row: published \d+, made"),
        "a configuration that was never measured": (
            csv_field(EFFECTS, "config", "fast_connector"),
            r"row\[0\]\.config: published 'fast_connector'",
        ),
        "a column gone from a figure": (
            columns_gone("figures/fig9_forest.csv", "verdict"),
            r"columns\[0\]: published 18",
        ),
        "a sample size": (
            csv_field(EFFECTS, "n_base", "5000"),
            r"row\[0\]\.n_base: published 5000\.0",
        ),
        "a step percentile": (
            csv_field(CELLS, "step_duration_us_p50", "7"),
            r"row\[0\]\.step_duration_us_p50: published 7\.0",
        ),
        "an engine-step tax": (
            csv_field(EFFECTS, "estimate", "7", quantity="step", metric="engine_step"),
            r"row\[\d+\]\.estimate: published 7\.0",
        ),
        "an engine step's percentile": (
            csv_field(CELLS, "engine_step_us_p50", "7"),
            r"row\[0\]\.engine_step_us_p50: published 7\.0",
        ),
        "a point of the step distribution": (
            csv_field("analysis/step_cdf.csv", "step_duration_us", "7"),
            r"row\[0\]\.step_duration_us: published 7\.0",
        ),
        "an amplification": (
            csv_field(EFFECTS, "estimate", "9", quantity="gap"),
            r"row\[\d+\]\.estimate: published 9\.0",
        ),
        "a hypothesis' verdict": (
            json_value(HYPOTHESES, "hypotheses", 0, "verdict", value="supported"),
            r"hypotheses\.hypotheses\[0\]\.verdict: published 'supported'",
        ),
        "a hypothesis' number": (
            json_value(HYPOTHESES, "hypotheses", 0, "numbers", "tax_ttft_p90", "point", value=0.1),
            r"hypotheses\.hypotheses\[0\]\.numbers\.tax_ttft_p90\.point: published 0\.1",
        ),
        "a hypothesis gone": (
            list_entry_gone(HYPOTHESES, "hypotheses"),
            r"hypotheses\.hypotheses: published 5",
        ),
        "the engine's label in hypotheses.json": (
            json_value(HYPOTHESES, "engine_label", value="real vLLM, GPU"),
            r"hypotheses\.engine_label: published 'real vLLM, GPU'",
        ),
        "a success criterion": (
            json_value(HYPOTHESES, "criteria", 6, "verdict", value="not met"),
            r"hypotheses\.criteria\[6\]\.verdict: published 'not met'",
        ),
        "a criterion of a reference rate": (
            json_value(
                "reference_rates.json",
                "criteria",
                "plain",
                "40",
                "throughput_ratio",
                "value",
                value=0.5,
            ),
            r"reference_rates\.criteria\.plain\.40\.throughput_ratio\.value: published 0\.5",
        ),
        "a saturation rate": (
            json_value("reference_rates.json", "saturation_rate_rps", "plain", value=40.0),
            r"reference_rates\.saturation_rate_rps\.plain: published 40\.0",
        ),
        "a row gone from a figure": (
            csv_row_gone("figures/fig4_tax_bars.csv"),
            "row: published 27",
        ),
        "a picture": (other_picture, "not the picture that this code makes of the study"),
        "a picture in the report": (
            other_picture_in_report,
            r"a image/svg\+xml in the report is none of figures/ or analysis/",
        ),
        "the report gone": (remove("report.html"), "is missing"),
        "a stamp shifted, still in order": (
            forged(
                NOOP_CELL, "requests", add_to(30, -2_000_000, "t_headers_ns", "t_first_token_ns")
            ),
            r"summary\.r40\.ttft_p50_ms",
        ),
        "a summary": (
            json_value("runs/noop_connector/block0/A/summary.json", "r40", "n", value=999),
            r"summary\.r40\.n: published 999",
        ),
        "a manifest hash": (
            json_value("manifest.json", 0, "sha256", value="0" * 64),
            r"manifest.0.\.sha256: published '000",
        ),
        "a row of manifest.md": (
            markdown_row,
            "is not, byte for byte, what this code makes of the study",
        ),
        "a hypothesis' sentence": (
            json_value(HYPOTHESES, "hypotheses", 1, "sentence", value="NIXL is free."),
            r"hypotheses\[1\].sentence: published 'NIXL is free.'",
        ),
        "a point's label": (
            json_value(HYPOTHESES, "hypotheses", 2, "point_label", value="framework-dominated!"),
            r"hypotheses\[2\].point_label",
        ),
        "every percentage of the report": (
            report_text(r"\+?\d+\.\d+\u2009?\xa0?\u202f? ?%", "0.1 %"),
            r"published 0\.1",
        ),
        "the report's headline": (
            report_text("<h1>.*?</h1>", "<h1>Free of charge</h1>"),
            "published 'Free of charge",
        ),
        "a second section before the true one": (
            text_replaced("manifest.md", "<!-- study", "<!-- study synthetic -->\n<!-- study"),
            "is not, byte for byte",
        ),
        "free text in manifest.md": (
            text_replaced("manifest.md", "# Manifest", "# Manifest\n\nMeasured on 8x H100."),
            "is not, byte for byte",
        ),
        "a file put into figures/": (planted("figures/fig99.png"), "no file that is made"),
        "a file put into analysis/": (planted("analysis/x.csv"), "no file that is made"),
    },
    "launch": {
        "a reference rate": (
            json_value("reference_rates.json", "ref_safe", value=80.0),
            "reference_rates.json says 80",
        ),
        "a log gone": (
            removed_and_sealed("runs/noop_connector/block0/A/vllm_stderr.log"),
            r"vllm_stderr\.log is missing",
        ),
        "another launch command": (
            other_launch_script,
            r"launch\.sh does not run config\.json's argv",
        ),
        "the environment of a run": (
            other_environment,
            r"env\.txt differs from the study's env\.txt",
        ),
        "a skip without its reason": (no_skip_reason, "skipped without a reason"),
        "a launch without its index": (remove(INDEX), "index.json is missing"),
        "a launch of another design": (
            json_value(INDEX, "depends", "design_sha256", value="0" * 64),
            "of another design",
        ),
        "an environment of launch.sh alone": (
            text_replaced(
                "runs/noop_connector/block0/A/launch.sh", "\nexec ", "\nexport A=1\nexec "
            ),
            "launch.sh does not set config.json's environment",
        ),
        "the engine of config.json": (
            json_value("runs/noop_connector/block0/A/config.json", "engine", "kind", value="vllm"),
            "config.json: engine is not what study.json says",
        ),
    },
    "design": {
        "what was served of a shape": (
            json_value(
                "preflight/shape_rates.json", "shapes", "512x16", "completed_s", value=[0.001]
            ),
            "512x16: most_rps is 30.0, what was served gives 500",
        ),
        "a shape's rate": (
            json_value("preflight/shape_rates.json", "shapes", "512x16", "most_rps", value=35.0),
            r"512x16: most_rps is 35\.0, what was served gives 30\.0",
        ),
        "a rate of the design": (
            json_value("study.json", "config", "cell", "floor_s", value=60),
            "design_sha256 is not what the configuration and the seed give",
        ),
        "the study's seed": (json_value("study.json", "config", "seed", value=2), "seed"),
        "the run order": (
            json_value("study.json", "run_order", "A", 1, "config", value="plain"),
            "run_order is not what the configuration and the seed give",
        ),
        "the engine's label": (
            json_value("study.json", "engine_label", value="real vLLM, GPU"),
            "engine_label 'real vLLM, GPU', the engine is 'embedded'",
        ),
        "an embedded study relabelled": (
            relabelled,
            "emulated is not what the configuration and the seed give",
        ),
    },
    "seal": {
        "a deleted request": (
            delete_request_unsealed,
            r"r40/requests_A_r40\.jsonl changed after it was sealed",
        ),
        "two cells exchanged": (swap_cells, r"r40/cell_A_r40\.json is missing"),
        "a file beside the records": (add_file, r"r40/notes\.txt came after the seal"),
        "labels of two configurations exchanged, the report made again": (
            labels_exchanged,
            r"configurations\.nixl_both\.label: .* -> |configurations\.noop_connector\.label",
        ),
        "a connector of an embedded study": (
            json_value("study.json", "configurations", 5, "connector", value="MooncakeConnector"),
            "study.json changed after it was sealed",
        ),
        "the version that measured": (
            json_value("study.json", "package_version", value="9.9"),
            "study.json changed",
        ),
        "when it was made": (
            json_value("study.json", "created_utc", value="2020-01-01"),
            "study.json changed",
        ),
        "a setting of the engine": (
            json_value("runs/noop_connector/block0/A/settings.json", "attempt", value=7),
            "settings.json changed after it was sealed",
        ),
        "what a server took": (
            json_value("runs/noop_connector/block0/A/resources.json", "startup_s", value=0.1),
            "resources.json changed after it was sealed",
        ),
        "a scrape in the middle of a cell": (
            forged(NOOP_CELL, "metrics", set_in(2, "scrape_ms", 99.0)),
            "index.json changed after it was sealed",
        ),
        "a file put into the study's folder": (planted("notes.txt"), "notes.txt came after the"),
    },
    "records": {
        "a deleted request, hashes forged": (
            forged(NOOP_CELL, "requests", delete(7)),
            r"missing: \[7\]",
        ),
        "a stamp out of order": (
            forged(NOOP_CELL, "requests", add_to(5, -(10**9), "t_first_token_ns")),
            "seq 5: t_first_token_ns is before t_headers_ns",
        ),
        "a request sent early": (
            forged(
                NOOP_CELL,
                "requests",
                add_to(9, -(10**6), "t_issue_ns", "t_worker_ns", "t_conn_ns", "t_send_ns"),
            ),
            "seq 9: written before it was due",
        ),
        "another length": (
            forged(NOOP_CELL, "requests", set_in(4, "completion_tokens", 31)),
            "seq 4: 256x31, asked 256x32",
        ),
        "a failure called success": (
            forged(NOOP_CELL, "requests", set_in(4, "t_done_ns", None)),
            "seq 4: a success lacks a stamp",
        ),
        "a success hidden": (
            forged(NOOP_CELL, "requests", set_in(40, "status", "dropped")),
            "counts.ok",
        ),
        "a request called warm-up": (
            forged(NOOP_CELL, "requests", set_in(60, "warmup", True)),
            "seq 60: warmup is True",
        ),
        "a cut-off file, hashes forged": (cut_off, "requests_A_r40.jsonl:80: not valid"),
        "a valid cell called void": (
            forged_record(NOOP_CELL, "valid", value=False),
            r"valid is False, index\.json says 'valid'",
        ),
        "another offered rate": (
            forged_record(NOOP_CELL, "schedule", "rate_rps", value=80.0),
            r"rate_rps is 80\.0, the rate of this cell is now 40\.0",
        ),
    },
    "schedule": {
        "a request put in, hashes forged": (
            forged(NOOP_CELL, "requests", lambda r: r.append({**r[-1], "seq": len(r)})),
            "81 requests, n is 80, the seed gives 80",
        ),
        "all arrivals later": (
            forged(NOOP_CELL, "requests", delay_all),
            "80 arrivals are not the seed's",
        ),
        "requests of another configuration": (swap_files, "80 arrivals are not the seed's"),
        "another seed's name": (
            forged_record(NOOP_CELL, "schedule", "seed", value="9/arrivals/block0/A/r40"),
            "9/arrivals/block0/A/r40",
        ),
        "a longer window": (
            forged_record(NOOP_CELL, "window", "t_stop_ns", value=10**18),
            r"arrivals end 9\.99e\+08 s after the origin, allowed: 30\.5 s",
        ),
    },
    "request ids": {
        "a request id used twice": (copy_request_id, "plain/block0/A/r40/attempt11/0"),
    },
    "prompts": {
        "the hash of the prompts": (
            forged_record(NOOP_CELL, "prompts_sha256", value="0" * 64),
            "not that of the 80 requests the seed gives",
        ),
        "prompts of another attempt": (
            forged(NOOP_CELL, "requests", rename_requests(NOOP_CELL, "attempt12")),
            "not that of the 80 requests the seed gives",
        ),
        "prompts of another launch": (
            forged(NOOP_CELL, "requests", rename_requests(PLAIN_CELL, "attempt11")),
            "begin with 'plain/block0/A/r40/attempt11'",
        ),
        "a request id of no prompt": (
            forged(NOOP_CELL, "requests", set_in(5, "request_id", "other")),
            "1 request ids are not .*, first: 'other'",
        ),
    },
    "counters": {
        "a cache hit": (
            forged(NOOP_CELL, "metrics", cache_hit),
            r"the server counted 16\.0 prefix_cache_hits",
        ),
        "the last scrape gone": (forged(NOOP_CELL, "metrics", delete(-1)), "server_counters.after"),
    },
    "validity": {
        "a health value": (
            forged_record(NOOP_CELL, "health", "schedule_lag_p99_ms", "value", value=0.01),
            "schedule_lag_p99_ms.value",
        ),
        "a late cell that says it is valid": (
            claim_validity,
            r"schedule_lag_p99_ms.value: published",
        ),
        "a worker that died": (
            forged_record(NOOP_CELL, "load_generator", "workers_died", value=[0]),
            "workers_died",
        ),
        "a machine that was suspended": (
            forged_record(NOOP_CELL, "suspended_ms", value=5000),
            "suspended_ms",
        ),
        "a window cut below its floor": (
            json_value("study.json", "config", "cell", "floor_s", value=60),
            "window_s",
        ),
        "fewer successes than the design wants": (
            json_value("study.json", "config", "cell", "min_completed", value=10**6),
            "measured_ok",
        ),
    },
    "steps": {
        "a connector's callback in plain": (
            forged(PLAIN_CELL, "engine_step", STEP_CALL),
            "plain has a connector callback",
        ),
        "a step counted twice": (
            forged(NOOP_CELL, "engine_step", second_step),
            "two records of one step",
        ),
    },
    "environment": {
        "environment.json": (
            json_value("environment.json", "gpu", value=["H20"]),
            r"gpu: \[.H20.\]. is not in env.txt",
        ),
        "a line more in environment.json": (
            add_key("environment.json", "gpu_driver", "550.1"),
            "'gpu_driver: 550.1' is not in env.txt",
        ),
    },
}


@pytest.mark.parametrize(("kind", "what"), [(k, what) for k in TAMPERING for what in TAMPERING[k]])
def test_tampering_is_caught(
    audited: Path, remade: Path, tmp_path: Path, kind: str, what: str
) -> None:
    root = linked_copy(audited, tmp_path / "copy") / "results" / "synthetic"
    tamper, message = TAMPERING[kind][what]
    tamper(root)
    claims = failures(root / "study.json", remade if kind == "made again" else None)
    failed = [claim.message for claim in claims if claim.kind == kind]
    assert any(re.search(message, text) for text in failed), claims


def test_nothing_fails_where_nothing_was_changed(audited: Path, remade: Path) -> None:
    assert failures(audited / "results" / "synthetic" / "study.json", remade) == []


def test_every_column_of_the_manifest_has_a_source(
    audited: Path, remade: Path, tmp_path: Path
) -> None:
    root = audited / "results" / "synthetic"
    rows = read_json(root / "manifest.json")
    for column in COLUMNS:
        changed = [rows[0], {**rows[1], column: "H20"}, *rows[2:]]
        write_json(tmp_path / "manifest.json", changed)
        (told,) = differs(tmp_path / "manifest.json", remade / "manifest.json")
        assert told.startswith(f"manifest[1].{column}: published 'H20'")
        same = manifest.page(root, changed) == (remade / "manifest.md").read_text()
        assert same == (column in LEFT_OUT)


def test_an_edited_number_of_each_figure_is_caught(
    audited: Path, remade: Path, tmp_path: Path
) -> None:
    root = linked_copy(audited, tmp_path / "copy") / "results" / "synthetic"
    columns = {"fig1": "value", "fig2": "hi", "fig3": "n", "fig6": "step_duration_us"}
    columns |= {"fig7": "step_us", "fig10": "difference", "scorecard": "value"}
    wanted = {name: columns.get(name.partition("_")[0], "tax") for name in NAMES}
    for figure, column in wanted.items():
        csv_field(f"figures/{figure}.csv", column, "0.123")(root)
    failed = {c.subject: c.message for c in failures(root / "study.json", remade)}
    for figure, column in wanted.items():
        assert f"{column}: published 0.123" in failed[f"figures/{figure}.csv"]
