"""What was measured cannot be changed after: the chain of seals, and records against each other."""

import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from connector_tax.artifacts.study_file import load_study
from connector_tax.figures.tables import StudyTables
from connector_tax.files import ArtifactError, read_json
from connector_tax.provenance import audit, manifest
from connector_tax.provenance.claims import FAIL, NOT_CHECKABLE, Ledger
from connector_tax.provenance.launches import check_launches
from connector_tax.provenance.manifest import name_archive
from connector_tax.report.page import render
from connector_tax.seals import read_links, seal_end, seal_launch, seal_settings
from tests.provenance.audited_study import (
    edited_json,
    edited_lines,
    linked_copy,
    replace,
    seal,
    seal_manifest,
    write_audited_study,
)
from tests.provenance.tampering import (
    NOOP_CELL,
    Tamper,
    failures,
    forged,
    json_value,
    removed_and_sealed,
    text_replaced,
)

Lines = list[dict[str, Any]]
LAUNCH = "runs/noop_connector/block0/A"
SEALS = "seals.jsonl"


def records(kind: str, change: Callable[[Lines], None]) -> Tamper:
    return forged(NOOP_CELL, kind, change)


def links(change: Callable[[Lines], None]) -> Tamper:
    def tamper(root: Path) -> None:
        with edited_lines(root / SEALS) as chain:
            change(chain)

    return tamper


# ---- what a forger may do


def hidden_configuration(root: Path) -> None:
    """A configuration with unwelcome numbers is said not to have passed its gate."""
    reason = "verify_nixl: not ready after 30 s"
    with edited_json(root / "preflight/preflight_status.json") as gates:
        gates["nixl_both"] |= {"include": False, "reason": reason}
    for index_file in root.glob("runs/nixl_both/block0/*/index.json"):
        with edited_json(index_file) as index:
            index |= {"status": "skipped", "reason": f"pre-flight: {reason}"}
            for entry in index["cells"]:
                entry |= {"status": "skipped", "reason": index["reason"], "files": {}}
    seal_manifest(root)


def every_other_step(lines: Lines) -> None:
    del lines[::2]


def faster_steps(lines: Lines) -> None:
    for line in lines:
        line["step_duration_us"] *= 0.5
        if line.get("engine_step_us") is not None:
            line["engine_step_us"] *= 0.5


def shorter(name: str, share: float) -> Callable[[Lines], None]:
    def change(lines: Lines) -> None:
        for line in lines:
            took = line[f"t_{name}_token_ns"] - line["t_send_ns"]
            line[f"t_{name}_token_ns"] = line["t_send_ns"] + int(share * took)

    return change


def fewer_success(lines: Lines) -> None:
    for key in lines[-1]["values"]:
        if key.startswith("vllm:generation_tokens_total"):
            lines[-1]["values"][key] -= 1


def no_text(lines: Lines) -> None:
    del lines[-1]["raw"]


def no_histogram(lines: Lines) -> None:
    for line in (lines[0], lines[-1]):
        line["raw"] = re.sub(r"vllm:e2e_request_latency.*\n", "", line["raw"])


def no_preemptions(lines: Lines) -> None:
    for line in lines:
        line["values"] = {k: v for k, v in line["values"].items() if "preemptions" not in k}


def more_decode(lines: Lines) -> None:
    lines[0]["decode_tokens"] += 1


def no_health(root: Path) -> None:
    with edited_json(next((root / NOOP_CELL).glob("cell_*"))) as record:
        del record["load_generator"]["processes"]["worker0"]["oversized"]
    seal(root, root / NOOP_CELL)


def link_gone(chain: Lines) -> None:
    del chain[4]


def last_links_gone(chain: Lines) -> None:
    del chain[-5:]


def other_margin_sealed(chain: Lines) -> None:
    chain[0]["settings"]["statistics"]["margins"]["ttft_p90"] = 0.5


def whole_chain_forged(root: Path) -> None:
    """Steps are halved, and every hash there is but manifest.md's is made to fit."""
    records("engine_step", faster_steps)(root)
    names = [link.get("launch") for _, link in read_links(root)]
    indexes = {name: read_json(root / "runs" / name / "index.json") for name in names if name}
    for name in indexes:
        (root / "runs" / name / "index.json").unlink()
    (root / SEALS).unlink()
    seal_settings(root, read_json(root / "study.json"))
    for name, index in indexes.items():
        del index["seal"]
        seal_launch(root, name, root / "runs" / name / "index.json", index)


def another_machine(root: Path) -> None:
    """The whole study says that it ran on another machine, in every copy."""
    text = (root / "env.txt").read_text()
    for path in (root / "env.txt", *root.glob("runs/*/*/*/env.txt")):
        replace(path, text.replace("cpu: synthetic", "cpu: H20"))
    with edited_json(root / "environment.json") as environment:
        environment["cpu"] = "H20"
    seal_manifest(root)


def launch_gone(root: Path) -> None:
    """A launch is taken out of the design, too."""
    with edited_json(root / "study.json") as study:
        study["run_order"]["Bp"] = [e for e in study["run_order"]["Bp"] if e["config"] != "plain_2"]


TAMPERING: dict[str, tuple[Tamper, str, str]] = {
    "a configuration hidden behind its gate": (
        hidden_configuration, "gate", "left out without a gate"),
    "a hidden configuration's index": (
        hidden_configuration, "seal", "index.json changed after it was sealed"),
    "half of the steps deleted": (
        records("engine_step", every_other_step), "identities", "prefill_tokens of the steps add"),
    "steps halved in time": (
        records("engine_step", faster_steps), "seal", "index.json changed after it was sealed"),
    "steps halved in time, the chain forged": (
        whole_chain_forged, "made again", "is not, byte for byte"),
    "one decoded token more": (
        records("engine_step", more_decode), "identities", "decode_tokens of the steps add up"),
    "TTFTs shortened": (
        records("requests", shorter("first", 0.6)), "identities", "TTFT: .*faster than its server"),
    "TTFTs shortened a little": (
        records("requests", shorter("first", 0.74)), "identities", "TTFT: .*faster than its serve"),
    "E2Es shortened": (
        records("requests", shorter("last", 0.6)), "identities", "E2E: .*faster than its server"),
    "a counter of the server": (
        records("metrics", fewer_success), "identities", "generation_tokens_total.*its text says"),
    "the page of the server gone": (
        records("metrics", no_text), "identities", "the scrape after the cell holds no text"),
    "a histogram of the server gone": (
        records("metrics", no_histogram), "identities", "vllm:e2e_request_latency_seconds is miss"),
    "a counter of the server gone": (
        records("metrics", no_preemptions), "identities", "counters lack preemptions"),
    "a counter of the load generator gone": (no_health, "validity", "lost_messages"),
    "a margin changed after the data": (
        json_value("study.json", "config", "statistics", "margins", "ttft_p90", value=0.2),
        "seal", r"changed after the first measurement, .*statistics.margins.ttft_p90: 0.03 -> 0.2"),
    "the confirmatory family changed after the data": (
        json_value("study.json", "config", "statistics", "confirmatory", value=["ref_load"]),
        "seal", "statistics.confirmatory: .*ref_safe.* -> "),
    "a bound of a hypothesis changed after the data": (
        json_value("study.json", "config", "hypotheses", "h1_min_tax", value=0.01),
        "seal", "hypotheses.h1_min_tax: 0.1 -> 0.01"),
    "the criterion of saturation changed after the data": (
        json_value("study.json", "config", "saturation", "waiting_p50_max", value=9),
        "seal", "saturation.waiting_p50_max: 1.0 -> 9"),
    "the margin changed where it is sealed": (
        links(other_margin_sealed), "seal", "link 1 follows .*, not link 0"),
    "the log of a gate gone": (
        removed_and_sealed("preflight/verify_kv_consumer.log"),
        "gate", r"preflight/verify_kv_consumer\.log'"),
    "the log of a gate rewritten": (
        text_replaced("preflight/verify_kv_consumer.log", "SKIP", "INCLUDE"),
        "gate", "does not end with 'SKIP: verify_kv_consumer: not ready after 30 s'"),
    "a line more in the log of a gate": (
        text_replaced("preflight/verify_kv_consumer.log", "2026-05-26", "not ready\n2026-05-26"),
        "seal", "preflight/verify_kv_consumer.log changed after it was sealed"),
    "the attempts gone": (
        removed_and_sealed(f"{LAUNCH}/attempts.json"), "seal", "attempts.json is missing"),
    "the server's log gone": (
        removed_and_sealed(f"{LAUNCH}/vllm_stdout.log"), "seal", "vllm_stdout.log is missing"),
    "a line of the server's log": (
        text_replaced(f"{LAUNCH}/vllm_stderr.log", "synthetic", "an honest server"),
        "seal", "vllm_stderr.log changed after it was sealed"),
    "complete.json gone": (removed_and_sealed("complete.json"), "made again", "is missing"),
    "a file put beside a launch": (
        lambda root: replace(root / LAUNCH / "note.txt", "x"), "seal", "note.txt came after the"),
    "the machine of the whole study": (
        another_machine, "seal", "environment.json changed after it was sealed"),
    "a launch taken out of the design": (
        launch_gone, "seal", "plain_2/block0/Bp was measured, and is gone"),
    "the chain gone": (lambda root: (root / SEALS).unlink(), "seal", "seals.jsonl is missing"),
    "a link gone": (links(link_gone), "seal", "link 4 says it is number 5"),
    "the last links gone": (links(last_links_gone), "seal", "has none of this launch"),
}  # fmt: skip


@pytest.mark.parametrize("what", TAMPERING)
def test_tampering_is_caught(audited: Path, remade: Path, tmp_path: Path, what: str) -> None:
    root = linked_copy(audited, tmp_path / "copy") / "results" / "synthetic"
    tamper, kind, message = TAMPERING[what]
    tamper(root)
    claims = failures(root / "study.json", remade if kind == "made again" else None)
    messages = [claim.message for claim in claims if claim.kind == kind]
    assert any(re.search(message, text) for text in messages), claims


def published(folder: Path) -> Path:
    """A copy's study.json, once MANIFEST.md names its seal."""
    root = folder / "results" / "synthetic"
    body = manifest.section_of((root / "manifest.md").read_text(), "synthetic")
    assert body is not None
    name_archive(folder / "MANIFEST.md", "synthetic", root / "env.txt", body, {})
    return root / "study.json"


def told(study_file: Path) -> tuple[str, list[tuple[str, str]]]:
    """The audit's last line, and verdict and message of its claim about MANIFEST.md."""
    ledger = Ledger()
    manifest_file = study_file.parents[2] / "MANIFEST.md"
    line = audit.check_study(load_study(study_file), manifest_file, ledger)
    mine = [(c.verdict, c.message) for c in ledger.claims if c.subject == "MANIFEST.md"]
    return line, mine


def test_the_audit_says_whether_the_seal_was_published(audited: Path, tmp_path: Path) -> None:
    folder = linked_copy(audited, tmp_path / "copy")
    line, claims = told(folder / "results" / "synthetic" / "study.json")
    assert "published nowhere: whoever can write this folder can have made it" in line
    assert [verdict for verdict, _ in claims] == [NOT_CHECKABLE]
    line, claims = told(published(folder))
    assert "the one MANIFEST.md names" in line
    assert "cannot be told from the folder alone" in line
    assert [verdict for verdict, _ in claims] == ["PASS"]


def test_a_link_added_after_the_published_one_fails(audited: Path, tmp_path: Path) -> None:
    study_file = published(linked_copy(audited, tmp_path / "copy"))
    root = study_file.parent
    with edited_json(root / "study.json") as study:
        study["created_utc"] = "2020-01-01"
    seal_end(root)
    seal_manifest(root)
    line, claims = told(study_file)
    assert claims == [(FAIL, "1 links were added after the published seal")]
    assert "not the study that MANIFEST.md names" in line


def test_another_seal_than_manifest_md_names_is_not_believed(audited: Path, tmp_path: Path) -> None:
    """Sealed anew from the first link the folder is right in itself: only MANIFEST.md tells."""
    study_file = published(linked_copy(audited, tmp_path / "copy"))
    whole_chain_forged(study_file.parent)
    seal_manifest(study_file.parent)
    line, claims = told(study_file)
    assert [verdict for verdict, _ in claims] == [NOT_CHECKABLE]
    assert "not the study that MANIFEST.md names" in line


def test_rows_of_manifest_md_are_those_of_the_study(audited: Path, tmp_path: Path) -> None:
    study_file = published(linked_copy(audited, tmp_path / "copy"))
    page = study_file.parents[2] / "MANIFEST.md"
    replace(page, page.read_text().replace("| 2/0/0/0 |", "| 9/0/0/0 |", 1))
    assert told(study_file)[1] == [(FAIL, "its rows are not manifest.json's")]


def measured_again(root: Path) -> Path:
    """A launch is moved aside and measured again, as `remeasure` does it; where the old one is."""
    folder = root / LAUNCH
    aside = folder.with_name("A.superseded1")
    shutil.copytree(folder, aside)
    index = read_json(folder / "index.json")
    (folder / "index.json").unlink()
    del index["seal"]
    index["attempts"][0]["supersedes"] = aside.name
    seal_launch(root, "noop_connector/block0/A", folder / "index.json", index)
    seal_manifest(root)
    return aside


def test_a_launch_measured_again_is_told_and_its_first_run_is_kept(
    audited: Path, tmp_path: Path
) -> None:
    root = linked_copy(audited, tmp_path / "copy") / "results" / "synthetic"
    aside = measured_again(root)
    assert failures(root / "study.json") == []
    rows = read_json(root / "manifest.json")
    (row,) = [row for row in rows if row["phase"] == "A.superseded1"]
    assert row["status"] == "measured again, not used"
    assert row["cells"] == "2/0/0/0"
    page = render(StudyTables(root / "study.json"))
    assert "noop_connector/block0/A" in page[page.index("measured again on request") :][:400]
    shutil.rmtree(aside)
    seal_manifest(root)
    messages = " ".join(claim.message for claim in failures(root / "study.json"))
    assert "A.superseded1/index.json is missing" in messages


def test_rates_changed_after_phase_b_began_fail(audited: Path, tmp_path: Path) -> None:
    root = linked_copy(audited, tmp_path / "copy") / "results" / "synthetic"
    with edited_json(root / "reference_rates.json") as rates:
        rates["fallback_used"] = True
    seal_end(root)
    messages = [claim.message for claim in failures(root / "study.json")]
    assert any("reference_rates.json changed at link" in text for text in messages)


def test_the_time_of_day_may_be_set_back_while_a_study_runs(audited: Path, tmp_path: Path) -> None:
    root = linked_copy(audited, tmp_path / "copy") / "results" / "synthetic"
    ledger = Ledger()
    for index_file in root.glob("runs/plain/block0/*/index.json"):
        with edited_json(index_file) as index:
            index["attempts"][0] |= {"started_utc": "2026-05-26T08:00:00.000+00:00"}
    check_launches(load_study(root / "study.json"), ledger)
    wrong = [c for c in ledger.claims if c.verdict == FAIL and c.kind in ("overlap", "order")]
    assert wrong == []


def test_a_chain_that_was_emptied_is_not_begun_anew(audited: Path, tmp_path: Path) -> None:
    root = linked_copy(audited, tmp_path / "copy") / "results" / "synthetic"
    replace(root / SEALS, "")
    with pytest.raises(ArtifactError, match=r"holds no link, .* Put the file back"):
        seal_settings(root, read_json(root / "study.json"))
    replace(root / SEALS, "garbage\n")
    with pytest.raises(ArtifactError, match=r"seals.jsonl:1: not a link: .* move its folder away"):
        seal_settings(root, read_json(root / "study.json"))


def test_a_changed_setting_is_told_in_the_report(audited: Path, tmp_path: Path) -> None:
    root = linked_copy(audited, tmp_path / "copy") / "results" / "synthetic"
    assert "Changed after the first measurement" not in render(StudyTables(root / "study.json"))
    json_value("study.json", "config", "statistics", "margins", "tpot_p90", value=0.5)(root)
    page = render(StudyTables(root / "study.json"))
    assert re.search(r"Changed after the first measurement.*margins.tpot_p90: 0.03 -&gt; 0.5", page)


def honest(number: int) -> dict[str, Any]:
    """The arguments of the n-th small study: seeds, blocks, gates, void cells, steps."""
    # A single block would lose its only reference rate.
    lost = number % 4 == 1 and number % 3 > 0
    void = {("nixl_both", 0, "A", "r40"): "late"} if lost else {}
    return {
        "seed": number,
        "blocks": 1 + number % 3,
        "plain_launches": 1 + number % 2,
        "skipped": {} if number % 5 == 2 else {"mooncake_consumer": "the gate"},
        "step_timing": number % 7 != 3,
        "noise": 0.5 + (number % 6) / 2,
        "launch_sigma": 0.002 * (1 + number % 5),
        "void": void,
    }


@pytest.mark.long
@pytest.mark.timeout(3600)
def test_a_hundred_honest_studies_pass(tmp_path: Path) -> None:
    for number in range(100):
        folder = tmp_path / str(number)
        study_file = write_audited_study(folder, **honest(number))
        wrong = [c for c in failures(study_file) if c.subject != "report.html"]
        assert wrong == [], number
