"""Test that the audit detects every kind of tampering and names it."""

import platform
import re
from pathlib import Path

import pytest

from connector_tax.artifacts.folder import StudyFolder
from connector_tax.artifacts.tables import METHOD
from connector_tax.provenance import audit as audit_module
from connector_tax.provenance import manifest
from connector_tax.provenance import remade as remade_module
from connector_tax.provenance.audit import Audit
from connector_tax.provenance.claims import FAIL, NOT_CHECKABLE, PASS, Claim, Ledger
from connector_tax.provenance.differences import differences
from connector_tax.provenance.manifest import COLUMNS, LEFT_OUT
from connector_tax.provenance.remade import KIND, check_claims
from tests.provenance import tampering as by
from tests.provenance.tampering import (
    CELLS,
    EFFECTS,
    INDEX,
    LAUNCH,
    NOOP_CELL,
    PLAIN_CELL,
    SEALS,
    Tamper,
    csv_field,
    derived_failures,
    failures,
    forged_record,
    json_value,
    records,
    resealed,
    set_in,
    text_replaced,
)
from tests.study_folder import edited_json, linked_copy, replace

HYPOTHESES = "analysis/hypotheses.json"
SKIPPED_INDEX = "runs/mooncake_consumer/block0/A/index.json"
GATE_LOG = "preflight/verify_kv_consumer.log"
DERIVED = (KIND, "files", "views")
Tampering = tuple[Tamper, str]
pytestmark = pytest.mark.workflow


def field(name: str, column: str, value: str, row: int = 0, given: bool = True,
          **where: str) -> Tampering:  # fmt: skip
    """Return a change of a table's field (`csv_field`), and the audit's line about it."""
    tamper = csv_field(name, column, value, row, given, **where)
    return tamper, rf"\.csv\[.+\]\.{column}: published '?{value}"


def _published(path: tuple[str | int, ...], value: object) -> str:
    where = "".join(f"[{key}]" if isinstance(key, int) else f".{key}" for key in path)
    return re.escape(f"{where}: published {value!r}")


def value(name: str, *path: str | int, value: object) -> Tampering:
    """Return a change of a value in a JSON file, and the audit's line about it."""
    return json_value(name, *path, value=value), _published(path, value)


def resealed_value(name: str, *path: str | int, value: object) -> Tampering:
    """Return a change of a value in a study, after which the study is sealed again."""
    return resealed(json_value(name, *path, value=value)), _published(path, value)


def of_cell(*path: str, value: object) -> Tampering:
    """Return a change of a value in a cell's record, with forged hashes."""
    return forged_record(NOOP_CELL, *path, value=value), "cell" + _published(path, value)


def of_request(number: int, key: str, value: object) -> Tampering:
    """Return a change of a value in a request, with forged hashes."""
    tamper = records("requests", set_in(number, key, value))
    return tamper, "requests" + _published((number, key), value)


def sealed(tamper: Tamper, name: str) -> Tampering:
    """Return a change of a file that is not sealed again."""
    return tamper, rf"{re.escape(name)} changed after it was sealed"


# Changes by the kind of the claim that must fail, each with the claim's message.
TAMPERING: dict[str, dict[str, Tampering]] = {
    "made again": {
        "a percentile in cells.csv": field(CELLS, "ttft_p90_ms", "9.5", row=3),
        "a saturation flag": field(CELLS, "saturated", "true", saturated="false"),
        "a row gone from cells.csv": (by.csv_row_gone(CELLS), "row .*: only made again"),
        "a tax": field(EFFECTS, "estimate", "0.02"),
        "an interval of one launch": field(EFFECTS, "lo", "-0.5", given=False),
        "a column gone from effects.csv": (
            by.columns_gone(EFFECTS, "verdict"), "column verdict: only made again"),
        "a tax twice": (by.csv_row_twice(EFFECTS), r"effects\.csv:\d+: second row of"),
        "a point of the step distribution": field("analysis/step_cdf.csv", "step_duration_us", "7"),
        "a hypothesis' verdict": (
            json_value(HYPOTHESES, "hypotheses", 0, "verdict", value="supported"),
            r"hypotheses\.hypotheses\.H1\.verdict: published 'supported'",
        ),
        "a hypothesis' number": (
            json_value(HYPOTHESES, "hypotheses", 0, "numbers", "tax_ttft_p90", "point", value=0.1),
            r"hypotheses\.hypotheses\.H1\.numbers\.tax_ttft_p90\.point: published 0\.1",
        ),
        "a hypothesis gone": (
            by.list_entry_gone(HYPOTHESES, "hypotheses"),
            r"hypotheses\.hypotheses\.H\d: only made again",
        ),
        "a key twice in hypotheses.json": (
            by.key_twice(HYPOTHESES, '"hypotheses": []'), "found key 'hypotheses' twice"),
        "a key twice in complete.json": (
            by.key_twice("complete.json", '"complete": false'), "found key 'complete' twice"),
        "a key twice in manifest.json": (
            by.key_twice("manifest.json", f'"method": {METHOD}'), "found key 'method' twice"),
        "a criterion of a reference rate": value(
            "reference_rates.json", "criteria", "plain", "40", "throughput_ratio", "value",
            value=0.5),
        "a stamp shifted, still in order": (
            records("requests", by.answered_earlier),
            r"summary\.r40\.\w+_ms: published",
        ),
        "a failure called success": (
            records("requests", set_in(4, "t_done_ns", None)), r"requests_A_r40\.jsonl:5"),
        "a summary": value(f"{LAUNCH}/summary.json", "r40", "n", value=999),
        "a manifest hash": (
            json_value("manifest.json", "launches", 0, "sha256", value="0" * 64),
            r"row\[0\]\.sha256: published '0000",
        ),
        "a row of manifest.md": (
            text_replaced("manifest.md", "| 2/0/0/0 |", "| 9/0/0/0 |"),
            "differs from the page that manifest.json gives",
        ),
        "a file put into analysis/": (by.planted("analysis/x.csv"), "not a file of a study's"),
        "complete.json gone": (by.remove("complete.json"), "is missing"),
        "steps halved in time, the chain forged": (
            by.whole_chain_forged, "differs from the page that manifest.json gives",
        ),
    },
    "files": {
        "a percentile, of a table that the manifest names": (
            csv_field(CELLS, "ttft_p90_ms", "9.5", row=3), r"cells\.csv is not the published file"),
        "a table gone": (by.remove(EFFECTS), r"effects\.csv is missing"),
    },
    "views": {
        "a picture": (by.other_picture, r"fig1_ttft_vs_rate\.png is not the published file"),
        **{
            what: (tamper, r"report\.html is not the published file")
            for what, tamper in {
                "a picture in the report": by.other_picture_in_report,
                "a picture in the report that is not encoded": by.plain_picture_in_report,
                "two pictures of the report exchanged": by.pictures_exchanged_in_report,
                "a comma for a point in the report": by.report_text(r"(\d)\.(\d)", r"\1,\2"),
                "the report's headline": by.report_text("<h1>.*?</h1>", "<h1>Free</h1>"),
            }.items()
        },
        "the report gone": (by.remove("report.html"), r"report\.html is missing"),
        "a file put into figures/": (
            by.planted("figures/fig99.png"), r"fig99\.png is not the published file"),
    },
    "launch": {
        "another launch command": (
            text_replaced(f"{LAUNCH}/launch.sh", "--configuration noop_connector", "--x plain"),
            r"launch\.sh does not run config\.json's argv",
        ),
        "a skip without its reason": (
            json_value(SKIPPED_INDEX, "reason", value=""),
            "skipped for '', which no gate, rate or interim analysis gives",
        ),
        "a skip that nothing asks for, without a reason": (
            resealed(
                json_value("preflight/preflight_status.json", "mooncake_consumer", "include",
                           value=True),
                json_value(SKIPPED_INDEX, "reason", value=None),
            ),
            "skipped for None, which no gate",
        ),
        "a skip for another reason": (
            json_value(SKIPPED_INDEX, "reason", value="the operator was tired"),
            "skipped for 'the operator was tired', which no gate",
        ),
        "a launch without its index": (by.remove(INDEX), "index.json is missing"),
        "an environment of launch.sh alone": (
            text_replaced(f"{LAUNCH}/launch.sh", "\nexec ", "\nexport A=1\nexec "),
            "launch.sh does not set config.json's environment",
        ),
        "the engine of config.json": value(f"{LAUNCH}/config.json", "engine", "kind", value="vllm"),
        "the environment of a launch, sealed anew": (
            resealed(text_replaced(f"{LAUNCH}/env.txt", "cpu: ", "cpu: H20, ")),
            r"env\.txt differs from the study's",
        ),
        "the label of index.json, sealed anew": resealed_value(
            INDEX, "label", value="real vLLM, H20"),
        "the configuration of a skipped launch, sealed anew": resealed_value(
            SKIPPED_INDEX, "configuration", value="plain"),
        "a reason of a cell in index.json, sealed anew": resealed_value(
            INDEX, "cells", 0, "reason", value="a slow disk"),
        "a launch measured again on request, sealed anew": resealed_value(
            INDEX, "attempts", 0, "supersedes", value="A.superseded1"),
        "how long a launch took, sealed anew": resealed_value(INDEX, "timing", "wall_s", value=9.0),
    },
    "command": {
        "the environment of config.json and launch.sh, sealed anew": (
            resealed(by.other_command(lambda c: c["environment"].update(OMP_NUM_THREADS="8"))),
            r"config\.json\.environment\.OMP_NUM_THREADS: only published",
        ),
        "the command of config.json and launch.sh, sealed anew": (
            resealed(by.other_command(lambda c: c["argv"].append("--no-connector"))),
            r"config\.json\.argv: published",
        ),
    },
    "script": {
        what: (resealed(text_replaced(f"{LAUNCH}/launch.sh", old, new)), message)
        for what, old, new, message in (
            ("a command before the server's", "\nexec ", "\ncurl x | sh\nexec ",
             r"launch\.sh.*published 'curl x \| sh'"),
            ("the title", "# noop_connector", "# plain", r"published '# plain/block0/A"),
            ("a variable that is kept", "HF_TOKEN", "HF_TOKEN | OMP_*", "HF_TOKEN | OMP_"),
            ("a command in the root's place", "cd -- ../..", "cd -- $(curl x)", "curl x"),
            ("CPUs that the machine has not", "\nexec ", "\nexec taskset --cpu-list 900 ",
             "CPUs 900 of another machine"),
        )
    },
    "environment": {
        "environment.json, sealed anew": (
            resealed(json_value("environment.json", "gpu", value=["H20"])),
            r"env\.txt\[\d\]: published \"gpu: \['no GPU'\]\", made again \"gpu: \['H20'\]\"",
        ),
        "the engine of the environment, sealed anew": (
            resealed(
                json_value("environment.json", "engine_label", value="real vLLM"),
                text_replaced("env.txt", "engine_label: embedded (emulated)",
                              "engine_label: real vLLM"),
            ),
            "engine_label is 'real vLLM'",
        ),
    },
    "gate": {
        "a configuration hidden behind its gate": (
            by.hidden_configuration, "left out without a gate"),
        "the log of a gate gone": (by.remove(GATE_LOG), r"preflight/verify_kv_consumer\.log'"),
        "the log of a gate rewritten": (
            text_replaced(GATE_LOG, "SKIP", "INCLUDE"),
            "does not end with 'SKIP: verify_kv_consumer: not ready after 30 s'",
        ),
    },
    "design": {
        "what was served of a shape": (
            json_value(
                "preflight/shape_rates.json", "shapes", "512x16", "completed_s", value=[0.001]),
            r"512x16: most_rps is [\d.]+, but what was served gives 500",
        ),
        "a shape's rate": (
            json_value("preflight/shape_rates.json", "shapes", "512x16", "most_rps", value=35.0),
            r"512x16: most_rps is 35\.0, but what was served gives [\d.]+",
        ),
        "a rate of the design": (
            json_value("study.json", "config", "cell", "floor_s", value=60),
            r"study\.design_sha256: published '\w+', made again",
        ),
        "the study's seed": (
            json_value("study.json", "config", "seed", value=2),
            r"study\.seed: published \d+, made again 2",
        ),
        "the run order": value("study.json", "run_order", "A", 1, "config", value="plain"),
        "the engine's label": (
            json_value("study.json", "engine_label", value="real vLLM, GPU"),
            "engine_label is 'real vLLM, GPU', but the engine is 'embedded'",
        ),
        "an embedded study relabelled": (
            by.relabelled, r"study\.emulated: published False, made again True"),
    },
    "seal": {
        "a deleted request": sealed(by.delete_request_unsealed, "r40/requests_A_r40.jsonl"),
        "two cells exchanged": (by.swap_cells, r"r80/engine_step_A_r80\.jsonl is missing"),
        "a file beside the records": (
            by.planted(f"{NOOP_CELL}/notes.txt"), r"r40/notes\.txt was added after the seal"),
        "a file put into the study's folder": (by.planted("notes.txt"), "was added after the seal"),
        "no log among the logs": (by.planted("logs/x.csv"), r"logs/x\.csv is no file of a study"),
        "no owner among the owners": (
            by.planted("owners/x.txt"), r"owners/x\.txt is no file of a study"),
        "no device among the devices": (
            by.planted("devices/x.json"), r"devices/x\.json is no file of a study"),
        "a link out of the study as a log": (
            by.link("logs/x.log", "/etc/hostname"), r"logs/x\.log leads outside of the study"),
        "a link out of the study as a table": (
            by.link(EFFECTS, "../../x.csv"), r"effects\.csv leads outside of the study"),
        "a link to a folder among the records": (
            by.link(f"{LAUNCH}/x", "/etc"), r"block0/A/x leads outside of the study"),
        "a hidden file": (by.planted(".notes"), r"\.notes is no file of a study"),
        "a file as if half written": (by.planted(".x.tmp"), r"\.x\.tmp is no file of a study"),
        "a module among compiled ones": (
            by.planted("patch/__pycache__/x.py"), r"__pycache__/x\.py is no file of a study"),
        "labels of two configurations exchanged, the report made again": (
            by.labels_exchanged,
            r"configurations\.nixl_both\.label: .* -> |configurations\.noop_connector\.label",
        ),
        "when it was made": sealed(
            json_value("study.json", "created_utc", value="2020-01-01"), "study.json"),
        "what a server took": sealed(
            json_value(f"{LAUNCH}/resources.json", "startup_s", value=0.1), "resources.json"),
        "steps halved in time": sealed(records("engine_step", by.faster_steps), "index.json"),
        "a hidden configuration's index": sealed(by.hidden_configuration, "index.json"),
        "environment.json": sealed(
            json_value("environment.json", "gpu", value=["H20"]), "environment.json"),
        "a line more in the log of a gate": sealed(
            text_replaced(GATE_LOG, "2026-05-26", "not ready\n2026-05-26"), GATE_LOG),
        "the attempts gone": (by.remove(f"{LAUNCH}/attempts.json"), "attempts.json is missing"),
        "a launch taken out of the design": (
            by.launch_gone, "plain_2/block0/Bp was measured, but is missing from the design"),
        "a margin changed after the data": (
            json_value("study.json", "config", "statistics", "margins", "ttft_p90", value=0.2),
            r"changed after the first measurement, .*statistics.margins.ttft_p90: 0.05 -> 0.2",
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
            by.links(by.other_margin_sealed), "link 1 follows .*, not link 0"),
        "the chain gone": (by.remove(SEALS), "seals.jsonl is missing"),
        "a link with another number": (
            by.links(by.set_in(-1, "number", 1)), "link .* has the number 1"),
        "a link gone": (by.links(by.delete(4)), "link 4 follows .*, not link 3"),
        "the last links gone": (by.links(by.last_links_gone), "has no link of this launch"),
    },
    "records": {
        "a success hidden": (
            records("requests", set_in(40, "status", "dropped")),
            r"cell\.counts\.ok: published \d+, made again \d+",
        ),
        "a cut-off file, hashes forged": (
            by.cut_off, r"requests_A_r40\.jsonl:\d+: Input data was truncated"),
        "a valid cell called void": (
            forged_record(NOOP_CELL, "valid", value=False),
            r"valid is False, but index\.json says 'valid'",
        ),
        "another offered rate": (
            forged_record(NOOP_CELL, "schedule", "rate_rps", value=80.0),
            r"rate_rps is 80\.0, but the rate of this cell is now 40\.0",
        ),
        "a reference rate": (
            json_value("reference_rates.json", "ref_safe", value=80.0),
            r"rate_rps is 40\.0, but the reference rate is now 80\.0",
        ),
        "a launch of another design": (
            json_value(INDEX, "depends", "design_sha256", value="0" * 64),
            "the launch belongs to another study",
        ),
        "another seed's name": of_cell("schedule", "seed", value="9/arrivals/block0/A/r40"),
        "a longer window": (
            forged_record(NOOP_CELL, "window", "t_cooldown_end_ns", value=10**18),
            r"cell\.schedule\.n: published \d+, made again \d{3}",
        ),
        "the hash of the prompts": of_cell("prompts_sha256", value="0" * 64),
        "prompts of another attempt": (
            records("requests", by.rename_requests(NOOP_CELL, "attempt12")),
            r"cell\.prompts_sha256: published",
        ),
        "a cache hit": (
            records("metrics", by.cache_hit),
            r"server_counters\.after\.prefix_cache_hits: published 0\.0, made again 16\.0",
        ),
        "the last scrape gone": (
            records("metrics", by.delete(-1)), r"server_counters\.after\.success: published"),
        "a counter of the server gone": (
            records("metrics", by.no_preemptions),
            r"server_counters\.after\.preemptions: published 0\.0, made again None",
        ),
        "a health value": of_cell("health", "schedule_lag_p99_ms", "value", value=0.01),
        "a late cell that says it is valid": (
            records("requests", by.late), r"health\.schedule_lag_p99_ms\.value: published"),
        "a worker that died": (
            forged_record(NOOP_CELL, "load_generator", "workers_died", value=[0]),
            r"health\.workers_died\.value: published 0, made again 1",
        ),
        "a machine that was suspended": (
            forged_record(NOOP_CELL, "suspended_ms", value=5000),
            r"health\.suspended_ms\.value: published 0, made again 5000",
        ),
        "a counter of the load generator gone": (by.no_health, "lost_messages"),
        "a window cut below its floor": (
            json_value("study.json", "config", "cell", "floor_s", value=9), "window_s"),
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
            records("requests", by.delete(7)), r"requests\[7\]\.seq: published 8, made again 7"),
        "a request put in, hashes forged": (
            records("requests", lambda r: r.append({**r[-1], "seq": len(r)})),
            r"\d+ requests, but the seed gives \d+",
        ),
        "a success without a stamp": (
            records("requests", set_in(4, "t_headers_ns", None)), "seq 4: a success lacks a stamp"),
        "a stamp out of order": (
            records("requests", by.add_to(5, -(10**9), "t_first_token_ns")),
            "seq 5: t_first_token_ns is before t_headers_ns",
        ),
        "a request sent early": (
            records("requests", by.add_to(9, -(10**6), "t_issue_ns", "t_worker_ns", "t_conn_ns",
                                          "t_send_ns")),
            "seq 9: written before it was due",
        ),
        "another length": of_request(4, "completion_tokens", 31),
        "a success after the drain": (
            records("requests", by.add_to(79, 10**11, "t_last_token_ns", "t_done_ns")),
            "seq 79: its last token is after the cell was drained",
        ),
        "a request called warm-up": of_request(60, "warmup", True),
        "all arrivals later": (
            records("requests", by.delay_all), r"requests\[0\]\.due_ns: published"),
        "requests of another configuration": (
            by.swap_files, r"requests\[0\]\.request_id: published 'plain/"),
        "a request id used twice": (
            by.copy_request_id,
            r"requests\[3\]\.request_id: published 'plain/block0/A/r40/attempt11/0'",
        ),
        "prompts of another launch": (
            records("requests", by.rename_requests(PLAIN_CELL, "attempt11")),
            r"requests\[0\]\.request_id: published 'plain/.*, made again 'noop_",
        ),
        "a request id of no prompt": of_request(5, "request_id", "other"),
    },
    "identities": {
        "half of the steps deleted": (
            records("engine_step", by.every_other_step), "prefill_tokens of the steps add"),
        "one decoded token more": (
            records("engine_step", by.add_to(0, 1, "decode_tokens")),
            "decode_tokens of the steps add up",
        ),
        "TTFTs shortened": (
            records("requests", by.shorter("first", 0.6)), "TTFT: .*faster than its server"),
        "TTFTs shortened a little": (
            records("requests", by.shorter("first", 0.74)), "TTFT: .*faster than its server"),
        "E2Es shortened": (
            records("requests", by.shorter("last", 0.6)), "E2E: .*faster than its server"),
        "a counter of the server": (
            records("metrics", by.fewer_success), "generation_tokens_total.*: published .*, made"),
        "the page of the server gone": (
            records("metrics", lambda lines: lines[-1].pop("raw")), "key 'raw' is missing"),
        "the preemptions of the server gone": (
            records("metrics", by.no_preemptions), "the server's counters lack preemptions"),
        "a histogram of the server gone": (
            records("metrics", by.no_histogram), "vllm:e2e_request_latency_seconds is missing"),
    },
    "steps": {
        "a connector's callback in plain": (
            by.forged(PLAIN_CELL, "engine_step", set_in(0, "build_meta_us", 5.0)),
            "plain has a connector callback",
        ),
        "a step counted twice": (
            records("engine_step", lambda lines: lines.insert(1, lines[0])),
            "two records of one step",
        ),
    },
}  # fmt: skip


@pytest.mark.parametrize(("kind", "what"), [(k, what) for k in TAMPERING for what in TAMPERING[k]])
def test_audit_detects_tampering(
    audited: Path, remade: Path, tmp_path: Path, kind: str, what: str
) -> None:
    root = linked_copy(audited, tmp_path / "copy") / "results" / "synthetic"
    tamper, message = TAMPERING[kind][what]
    tamper(root)
    claims = derived_failures(root, remade) if kind in DERIVED else []
    # Comparing only derived files takes less time than auditing the whole study.
    if not _told(claims, kind, message):
        claims = failures(root / "study.json")
    assert _told(claims, kind, message), claims


def _told(claims: list[Claim], kind: str, message: str) -> bool:
    return any(claim.kind == kind and re.search(message, claim.message) for claim in claims)


def test_audit_passes_an_unchanged_study(audited: Path, remade: Path, tmp_path: Path) -> None:
    root = linked_copy(audited, tmp_path / "copy") / "results" / "synthetic"
    for note in ("logs/audit.log", "owners/plain_2.block0.A.json", "devices/block0.json"):
        by.planted(note)(root)
    by.link("logs/latest.log", "audit.log")(root)
    # Files of processes that were killed while they wrote.
    for place in ("", "figures/", "analysis/", f"{LAUNCH}/", "preflight/"):
        by.planted(f"{place}.fig3.svg.x1.4000000@{platform.node()}.tmp")(root)
    assert failures(root / "study.json") + derived_failures(root, remade) == []


def test_audit_prints_no_line_or_escape_sequence_of_an_archive(
    capsys: pytest.CaptureFixture[str],
) -> None:
    result = Audit(verdicts=["a\nPASS b"])
    result.ledger.check("launch", "plain\x1b[2J", ["\x1b]0;owned\x07reason\r\nPASS\u2028PASS"])
    result.ledger.check("launch", "alone\nPASS", [])
    audit_module.show(result)
    output = capsys.readouterr().out
    assert "FAIL launch plain\\u{1b}[2J: \\u{1b}]0;owned\\u{7}reason\\u{d}\\u{a}PASS" in output
    assert not {*"\x1b\x07\r\u2028"} & {*output}
    assert [line for line in output.splitlines() if line.startswith("PASS")] == []


def test_name_with_a_line_end_forges_no_line_of_the_audit(
    root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    by.planted("x\nPASS seal chain: 9 links")(root)
    page = root.parents[1] / "MANIFEST.md"
    assert audit_module.main(["--study", str(root / "study.json"), "--manifest", str(page)]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert any("x\\u{a}PASS seal chain: 9 links was added after the seal" in line for line in lines)
    assert [line for line in lines if line.startswith("PASS")] == []


def test_every_column_of_the_manifest_has_a_source(audited: Path) -> None:
    root = audited / "results" / "synthetic"
    record = manifest.read_manifest(root / "manifest.json")
    rows, page = record["launches"], (root / "manifest.md").read_text()
    assert manifest.rows(StudyFolder.load(root / "study.json")) == rows
    for column in COLUMNS:
        changed = [rows[0], {**rows[1], column: "H20"}, *rows[2:]]
        (told,) = differences(changed, rows, "row")
        assert told.startswith(f"row[1].{column}: published 'H20'")
        same = manifest.page(root, {**record, "launches": changed}) == page
        assert same == (column in LEFT_OUT)


# A changed value in each file that a method makes.
CLAIM_TAMPERING: dict[str, Tamper] = {
    CELLS: csv_field(CELLS, "ttft_p90_ms", "9.5", row=3),
    EFFECTS: csv_field(EFFECTS, "verdict", "costs", verdict="too few blocks"),
    "analysis/step_cdf.csv": csv_field("analysis/step_cdf.csv", "step_duration_us", "7"),
    HYPOTHESES: json_value(HYPOTHESES, "hypotheses", 0, "verdict", value="supported"),
    "reference_rates.json": json_value("reference_rates.json", "fallback_used", value=True),
}


@pytest.mark.parametrize("name", CLAIM_TAMPERING)
def test_forged_claim_of_an_older_method_is_not_accepted(
    root: Path, remade: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    CLAIM_TAMPERING[name](root)
    monkeypatch.setattr(remade_module, "METHOD", METHOD + 1)
    monkeypatch.setattr(audit_module, "METHOD", METHOD + 1)
    ledger = Ledger()
    claims = check_claims(StudyFolder.load(root / "study.json"), remade, ledger)
    (claim,) = [c for c in ledger.claims if c.kind == KIND and c.subject == name]
    assert claim.verdict == NOT_CHECKABLE
    assert f"made by method {METHOD}; this code has method {METHOD + 1}; " in claim.message
    assert claims.not_made_again == 6
    assert bool(claims.verdicts) == (name in (EFFECTS, HYPOTHESES))
    result = Audit(Ledger(), analysed=METHOD, not_made_again=claims.not_made_again)
    assert [result.status(), result.status(accepted=METHOD)] == [2, 0]
    # The file no longer has the digest that the manifest lists.
    assert f"{name} is not the published file" in ledger.claims[-1].message
    assert Audit(ledger, analysed=METHOD).status(accepted=METHOD) == 1


def test_study_of_an_older_method_exits_with_2_unless_accepted(
    root: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(remade_module, "METHOD", METHOD + 1)
    monkeypatch.setattr(audit_module, "METHOD", METHOD + 1)
    page = root.parents[1] / "MANIFEST.md"
    arguments = ["--study", str(root / "study.json"), "--manifest", str(page)]
    assert audit_module.main(arguments) == 2
    assert capsys.readouterr().out.endswith(
        f"analysed by method {METHOD}: 6 claims not made again\n"
    )
    assert audit_module.main([*arguments, "--accept-method", str(METHOD)]) == 0
    monkeypatch.setattr(remade_module, "METHOD", METHOD)
    monkeypatch.setattr(audit_module, "METHOD", METHOD)
    csv_field(EFFECTS, "estimate", "0.02")(root)
    assert audit_module.main([*arguments, "--accept-method", str(METHOD)]) == 1


def test_study_analysed_again_keeps_its_seal(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (remade_module, audit_module, manifest):
        monkeypatch.setattr(module, "METHOD", METHOD + 1)
    manifest.write(root / "study.json")
    result = audit_module.audit(root / "study.json", root.parents[1] / "MANIFEST.md")
    assert result.method == f"planned with method {METHOD}, analysed by method {METHOD + 1}"
    assert result.status() == 0


def older(root: Path) -> None:
    """Make the claims look as if another version wrote them: other columns, rows and files."""
    with edited_json(root / "manifest.json") as record:
        record["package"] = "0.2"

    def change(table: list[dict[str, str]]) -> None:
        for row in table:
            row["silence"] = row.pop("base")
        table[:] = [row for row in table if row["quantity"] != "hook"]
        table.append({**table[0], "metric": "removed"})

    by.table_changed(EFFECTS, change)(root)
    by.planted("analysis/pooled.csv")(root)
    page = root / "manifest.md"
    replace(page, page.read_text().replace("- engine: ", "- served by: "))


def verdicts(root: Path, remade: Path) -> dict[str, Claim]:
    ledger = Ledger()
    check_claims(StudyFolder.load(root / "study.json"), remade, ledger)
    return {claim.subject: claim for claim in ledger.claims if claim.kind == KIND}


def test_claims_of_another_version_are_named_and_do_not_fail(root: Path, remade: Path) -> None:
    older(root)
    claims = verdicts(root, remade)
    doubtful = {s for s, claim in claims.items() if claim.verdict == NOT_CHECKABLE}
    assert doubtful == {EFFECTS, "analysis/pooled.csv", "manifest.md"}
    for text in ("column silence: only published", "column base: only made again"):
        assert text in claims[EFFECTS].message
    assert "rows of tax/removed: only published" in claims[EFFECTS].message
    assert {claim.verdict for claim in claims.values()} == {PASS, NOT_CHECKABLE}


@pytest.mark.parametrize(
    ("tamper", "message"),
    [
        (csv_field(EFFECTS, "estimate", "0.02"), "estimate: published 0.02"),
        (by.table_changed(EFFECTS, lambda table: table.pop(3)), "row .*: only made again"),
    ],
    ids=["value", "row of a known kind"],
)
def test_tables_of_another_version_are_compared_in_common_columns(
    root: Path, remade: Path, tamper: Tamper, message: str
) -> None:
    older(root)
    tamper(root)
    claim = verdicts(root, remade)[EFFECTS]
    assert claim.verdict == FAIL
    assert re.search(message, claim.message)
