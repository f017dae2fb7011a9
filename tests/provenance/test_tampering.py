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
    LAUNCH,
    NOOP_CELL,
    PLAIN_CELL,
    SEALS,
    Tamper,
    add_to,
    another_machine,
    cache_hit,
    columns_gone,
    copy_request_id,
    csv_field,
    csv_row_gone,
    csv_row_twice,
    cut_off,
    delay_all,
    delete,
    delete_request_unsealed,
    every_other_step,
    failures,
    faster_steps,
    fewer_success,
    forged,
    forged_record,
    hidden_configuration,
    json_value,
    labels_exchanged,
    last_links_gone,
    late,
    launch_gone,
    link_gone,
    links,
    list_entry_gone,
    more_decode,
    no_health,
    no_histogram,
    no_preemptions,
    no_text,
    other_command,
    other_margin_sealed,
    other_picture,
    other_picture_in_report,
    pictures_exchanged_in_report,
    plain_picture_in_report,
    planted,
    records,
    relabelled,
    remove,
    rename_requests,
    report_text,
    resealed,
    second_step,
    set_in,
    shorter,
    swap_cells,
    swap_files,
    text_replaced,
    whole_chain_forged,
)

HYPOTHESES = "analysis/hypotheses.json"
SKIPPED_INDEX = "runs/mooncake_consumer/block0/A/index.json"
GATE_LOG = "preflight/verify_kv_consumer.log"
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
            rf"columns: published {len(tables.COLUMNS[paths.EFFECTS]) - 1}, ",
        ),
        "the intervals gone from effects.csv": (
            columns_gone(EFFECTS, "lo", "hi"),
            rf"columns: published {len(tables.COLUMNS[paths.EFFECTS]) - 2}, ",
        ),
        "a row gone from effects.csv": (csv_row_gone(EFFECTS), r"row: published \d+, made"),
        "a tax twice": (csv_row_twice(EFFECTS), r"row: published \d+, made"),
        "a configuration that was never measured": (
            csv_field(EFFECTS, "config", "fast_connector"),
            r"row\[0\]\.config: published 'fast_connector'",
        ),
        "a column gone from a figure": (
            columns_gone("figures/fig9_forest.csv", "verdict"),
            r"columns: published 18",
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
            r"picture\[\d+\]: published 'data:image/svg\+xml;base64,AAAA",
        ),
        "a picture in the report that is not encoded": (
            plain_picture_in_report,
            r"picture\[\d+\]: published 'data:image/svg\+xml,%3C/%3E', made again 'figures/",
        ),
        "two pictures of the report exchanged": (
            pictures_exchanged_in_report,
            r"picture\[\d+\]: published 'figures/\w+\.svg', made again 'figures/",
        ),
        "the report gone": (remove("report.html"), "is missing"),
        "a stamp shifted, still in order": (
            records("requests", add_to(30, -2_000_000, "t_headers_ns", "t_first_token_ns")),
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
            text_replaced("manifest.md", "| 2/0/0/0 |", "| 9/0/0/0 |"),
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
        "complete.json gone": (remove("complete.json"), "is missing"),
        "steps halved in time, the chain forged": (whole_chain_forged, "is not, byte for byte"),
    },
    "launch": {
        "another launch command": (
            text_replaced(f"{LAUNCH}/launch.sh", "--configuration noop_connector", "--x plain"),
            r"launch\.sh does not run config\.json's argv",
        ),
        "a skip without its reason": (
            json_value(SKIPPED_INDEX, "reason", value=""),
            "skipped without a reason",
        ),
        "a launch without its index": (remove(INDEX), "index.json is missing"),
        "an environment of launch.sh alone": (
            text_replaced(f"{LAUNCH}/launch.sh", "\nexec ", "\nexport A=1\nexec "),
            "launch.sh does not set config.json's environment",
        ),
        "the engine of config.json": (
            json_value(f"{LAUNCH}/config.json", "engine", "kind", value="vllm"),
            r"config\.json\.engine\.kind: published 'vllm', made again 'embedded'",
        ),
        "the environment of a launch, sealed anew": (
            resealed(text_replaced(f"{LAUNCH}/env.txt", "cpu: ", "cpu: H20, ")),
            r"env\.txt differs from the study's",
        ),
        "the label of index.json, sealed anew": (
            resealed(json_value(INDEX, "label", value="real vLLM, H20")),
            r"index\.json\.label: published 'real vLLM, H20'",
        ),
        "the configuration of index.json, sealed anew": (
            resealed(json_value(INDEX, "configuration", value="plain")),
            r"index\.json\.configuration: published 'plain'",
        ),
        "the configuration of a skipped launch, sealed anew": (
            resealed(json_value(SKIPPED_INDEX, "configuration", value="plain")),
            r"index\.json\.configuration: published 'plain'",
        ),
        "the block of index.json, sealed anew": (
            resealed(json_value(INDEX, "block", value=1)),
            r"index\.json\.block: published 1, made again 0",
        ),
        "a reason of a cell in index.json, sealed anew": (
            resealed(json_value(INDEX, "cells", 0, "reason", value="a slow disk")),
            r"index\.json\.cells\[0\]\.reason: published 'a slow disk', made again None",
        ),
        "a launch measured again on request, sealed anew": (
            resealed(json_value(INDEX, "attempts", 0, "supersedes", value="A.superseded1")),
            r"index\.json\.attempts\[0\]\.supersedes: published 'A\.superseded1'",
        ),
        "how long a launch took, sealed anew": (
            resealed(json_value(INDEX, "timing", "wall_s", value=9.0)),
            r"index\.json\.timing\.wall_s: published 9\.0",
        ),
    },
    "command": {
        "the environment of config.json and launch.sh, sealed anew": (
            resealed(other_command(lambda c: c["environment"].update(OMP_NUM_THREADS="8"))),
            r"config\.json\.environment\.OMP_NUM_THREADS: only published",
        ),
        "the command of config.json and launch.sh, sealed anew": (
            resealed(other_command(lambda c: c["argv"].append("--no-connector"))),
            r"config\.json\.argv: published",
        ),
    },
    "environment": {
        "environment.json, sealed anew": (
            resealed(json_value("environment.json", "gpu", value=["H20"])),
            r"env\.txt\[\d\]: published \"gpu: \['no GPU'\]\", made again \"gpu: \['H20'\]\"",
        ),
        "the engine of the environment, sealed anew": (
            resealed(
                json_value("environment.json", "engine_label", value="real vLLM"),
                text_replaced(
                    "env.txt", "engine_label: embedded (emulated)", "engine_label: real vLLM"
                ),
            ),
            "engine_label is 'real vLLM'",
        ),
    },
    "gate": {
        "a configuration hidden behind its gate": (hidden_configuration, "left out without a gate"),
        "the log of a gate gone": (remove(GATE_LOG), r"preflight/verify_kv_consumer\.log'"),
        "the log of a gate rewritten": (
            text_replaced(GATE_LOG, "SKIP", "INCLUDE"),
            "does not end with 'SKIP: verify_kv_consumer: not ready after 30 s'",
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
            r"study\.design_sha256: published '\w+', made again",
        ),
        "the study's seed": (
            json_value("study.json", "config", "seed", value=2),
            r"study\.seed: published \d+, made again 2",
        ),
        "the run order": (
            json_value("study.json", "run_order", "A", 1, "config", value="plain"),
            r"study\.run_order\.A\[1\]\.config: published 'plain'",
        ),
        "the engine's label": (
            json_value("study.json", "engine_label", value="real vLLM, GPU"),
            "engine_label 'real vLLM, GPU', the engine is 'embedded'",
        ),
        "an embedded study relabelled": (
            relabelled,
            r"study\.emulated: published False, made again True",
        ),
    },
    "seal": {
        "a deleted request": (
            delete_request_unsealed,
            r"r40/requests_A_r40\.jsonl changed after it was sealed",
        ),
        "two cells exchanged": (swap_cells, r"r80/engine_step_A_r80\.jsonl is missing"),
        "a file beside the records": (
            planted(f"{NOOP_CELL}/notes.txt"),
            r"r40/notes\.txt came after the seal",
        ),
        "a file put beside a launch": (planted(f"{LAUNCH}/note.txt"), "note.txt came after the"),
        "a file put into the study's folder": (planted("notes.txt"), "notes.txt came after the"),
        "a hidden file": (planted(".notes"), r"\.notes is no file of a study"),
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
            json_value(f"{LAUNCH}/settings.json", "attempt", value=7),
            "settings.json changed after it was sealed",
        ),
        "what a server took": (
            json_value(f"{LAUNCH}/resources.json", "startup_s", value=0.1),
            "resources.json changed after it was sealed",
        ),
        "a scrape in the middle of a cell": (
            records("metrics", set_in(2, "scrape_ms", 99.0)),
            "index.json changed after it was sealed",
        ),
        "steps halved in time": (
            records("engine_step", faster_steps),
            "index.json changed after it was sealed",
        ),
        "a hidden configuration's index": (
            hidden_configuration,
            "index.json changed after it was sealed",
        ),
        "the environment of a run": (
            text_replaced("runs/plain/block0/A/env.txt", "cpu", "gpu"),
            r"env\.txt changed after it was sealed",
        ),
        "environment.json": (
            json_value("environment.json", "gpu", value=["H20"]),
            "environment.json changed after it was sealed",
        ),
        "the machine of the whole study": (
            another_machine,
            "environment.json changed after it was sealed",
        ),
        "a line more in the log of a gate": (
            text_replaced(GATE_LOG, "2026-05-26", "not ready\n2026-05-26"),
            "preflight/verify_kv_consumer.log changed after it was sealed",
        ),
        "the attempts gone": (remove(f"{LAUNCH}/attempts.json"), "attempts.json is missing"),
        "the server's log gone": (remove(f"{LAUNCH}/vllm_stderr.log"), "vllm_stderr.log is miss"),
        "a line of the server's log": (
            text_replaced(f"{LAUNCH}/vllm_stderr.log", "synthetic", "an honest server"),
            "vllm_stderr.log changed after it was sealed",
        ),
        "a launch taken out of the design": (
            launch_gone,
            "plain_2/block0/Bp was measured, and is gone",
        ),
        "a margin changed after the data": (
            json_value("study.json", "config", "statistics", "margins", "ttft_p90", value=0.2),
            r"changed after the first measurement, .*statistics.margins.ttft_p90: 0.03 -> 0.2",
        ),
        "the confirmatory family changed after the data": (
            json_value("study.json", "config", "statistics", "confirmatory", value=["ref_load"]),
            "statistics.confirmatory: .*ref_safe.* -> ",
        ),
        "a bound of a hypothesis changed after the data": (
            json_value("study.json", "config", "hypotheses", "h1_min_tax", value=0.01),
            "hypotheses.h1_min_tax: 0.1 -> 0.01",
        ),
        "the criterion of saturation changed after the data": (
            json_value("study.json", "config", "saturation", "waiting_p50_max", value=9),
            "saturation.waiting_p50_max: 1.0 -> 9",
        ),
        "the margin changed where it is sealed": (
            links(other_margin_sealed),
            "link 1 follows .*, not link 0",
        ),
        "the chain gone": (remove(SEALS), "seals.jsonl is missing"),
        "a link gone": (links(link_gone), "link 4 says it is number 5"),
        "the last links gone": (links(last_links_gone), "has none of this launch"),
    },
    "records": {
        "a success hidden": (
            records("requests", set_in(40, "status", "dropped")),
            r"cell\.counts\.ok: published 80, made again 79",
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
        "a reference rate": (
            json_value("reference_rates.json", "ref_safe", value=80.0),
            r"rate_rps is 40\.0, the reference rate is now 80\.0",
        ),
        "a launch of another design": (
            json_value(INDEX, "depends", "design_sha256", value="0" * 64),
            "the launch belongs to another study",
        ),
        "another seed's name": (
            forged_record(NOOP_CELL, "schedule", "seed", value="9/arrivals/block0/A/r40"),
            r"cell\.schedule\.seed: published '9/arrivals/block0/A/r40', made again '\d+/",
        ),
        "a longer window": (
            forged_record(NOOP_CELL, "window", "t_cooldown_end_ns", value=10**18),
            r"arrivals end 9\.99e\+08 s after the origin, allowed: 30\.5 s",
        ),
        "the hash of the prompts": (
            forged_record(NOOP_CELL, "prompts_sha256", value="0" * 64),
            r"cell\.prompts_sha256: published '0{64}', made again",
        ),
        "prompts of another attempt": (
            records("requests", rename_requests(NOOP_CELL, "attempt12")),
            r"cell\.prompts_sha256: published",
        ),
        "a cache hit": (
            records("metrics", cache_hit),
            r"server_counters\.after\.prefix_cache_hits: published 0\.0, made again 16\.0",
        ),
        "the last scrape gone": (
            records("metrics", delete(-1)),
            r"server_counters\.after\.success: published",
        ),
        "a health value": (
            forged_record(NOOP_CELL, "health", "schedule_lag_p99_ms", "value", value=0.01),
            r"health\.schedule_lag_p99_ms\.value: published 0\.01",
        ),
        "a late cell that says it is valid": (
            records("requests", late),
            r"health\.schedule_lag_p99_ms\.value: published",
        ),
        "a worker that died": (
            forged_record(NOOP_CELL, "load_generator", "workers_died", value=[0]),
            r"health\.workers_died\.value: published 0, made again 1",
        ),
        "a machine that was suspended": (
            forged_record(NOOP_CELL, "suspended_ms", value=5000),
            r"health\.suspended_ms\.value: published 0, made again 5000",
        ),
        "a counter of the load generator gone": (no_health, "lost_messages"),
        "a window cut below its floor": (
            json_value("study.json", "config", "cell", "floor_s", value=60),
            "window_s",
        ),
        "fewer successes than the design wants": (
            json_value("study.json", "config", "cell", "min_completed", value=10**6),
            "measured_ok",
        ),
    },
    "requests": {
        "a later stop": (
            forged_record(NOOP_CELL, "window", "t_stop_ns", value=10**18),
            r"origin <= warm-up end < stop <= end of arrivals does not hold",
        ),
        "a deleted request, hashes forged": (
            records("requests", delete(7)),
            "line 7: seq is 8, by its place 7",
        ),
        "a stamp out of order": (
            records("requests", add_to(5, -(10**9), "t_first_token_ns")),
            "seq 5: t_first_token_ns is before t_headers_ns",
        ),
        "a request sent early": (
            records(
                "requests",
                add_to(9, -(10**6), "t_issue_ns", "t_worker_ns", "t_conn_ns", "t_send_ns"),
            ),
            "seq 9: written before it was due",
        ),
        "another length": (
            records("requests", set_in(4, "completion_tokens", 31)),
            "seq 4: 256x31, asked 256x32",
        ),
        "a failure called success": (
            records("requests", set_in(4, "t_done_ns", None)),
            "seq 4: a success lacks a stamp",
        ),
        "a success after the drain": (
            records("requests", add_to(79, 10**11, "t_last_token_ns", "t_done_ns")),
            "seq 79: its last token is after the cell was drained",
        ),
        "a request called warm-up": (
            records("requests", set_in(60, "warmup", True)),
            "line 60: warmup is True, by its place False",
        ),
        "a request put in, hashes forged": (
            records("requests", lambda r: r.append({**r[-1], "seq": len(r)})),
            "81 requests, the seed gives 80",
        ),
        "all arrivals later": (
            records("requests", delay_all),
            "80 arrivals are not the seed's",
        ),
        "requests of another configuration": (swap_files, "80 arrivals are not the seed's"),
        "a request id used twice": (
            copy_request_id,
            "line 3: request_id is 'plain/block0/A/r40/attempt11/0', by its place",
        ),
        "prompts of another launch": (
            records("requests", rename_requests(PLAIN_CELL, "attempt11")),
            "begin with 'plain/block0/A/r40/attempt11'",
        ),
        "a request id of no prompt": (
            records("requests", set_in(5, "request_id", "other")),
            "line 5: request_id is 'other', by its place",
        ),
    },
    "identities": {
        "half of the steps deleted": (
            records("engine_step", every_other_step),
            "prefill_tokens of the steps add",
        ),
        "one decoded token more": (
            records("engine_step", more_decode),
            "decode_tokens of the steps add up",
        ),
        "TTFTs shortened": (
            records("requests", shorter("first", 0.6)),
            "TTFT: .*faster than its server",
        ),
        "TTFTs shortened a little": (
            records("requests", shorter("first", 0.74)),
            "TTFT: .*faster than its server",
        ),
        "E2Es shortened": (
            records("requests", shorter("last", 0.6)),
            "E2E: .*faster than its server",
        ),
        "a counter of the server": (
            records("metrics", fewer_success),
            "generation_tokens_total.*its text says",
        ),
        "the page of the server gone": (
            records("metrics", no_text),
            "the scrape after the cell holds no text",
        ),
        "a histogram of the server gone": (
            records("metrics", no_histogram),
            "vllm:e2e_request_latency_seconds is missing",
        ),
        "a counter of the server gone": (
            records("metrics", no_preemptions),
            "counters lack preemptions",
        ),
    },
    "steps": {
        "a connector's callback in plain": (
            forged(PLAIN_CELL, "engine_step", set_in(0, "build_meta_us", 5.0)),
            "plain has a connector callback",
        ),
        "a step counted twice": (
            records("engine_step", second_step),
            "two records of one step",
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
