"""The audit agrees with an honest study in every number, and names what is malformed."""

import base64
import re
import shutil
from pathlib import Path

import pytest

from connector_tax.artifacts.tables import STEP
from connector_tax.figures.tables import StudyTables
from connector_tax.files import ArtifactError, read_json
from connector_tax.provenance import audit
from connector_tax.provenance.claims import FAIL, NOT_CHECKABLE
from connector_tax.provenance.differences import compare
from connector_tax.provenance.views import digest
from connector_tax.report.answer import answer
from tests.provenance.tampering import EFFECTS, INDEX, NOOP_CELL, Tamper, csv_field, failures
from tests.study_folder import STEP_US, edited_json, replace, seal_cell, write_analysed_study


def arguments(root: Path) -> list[str]:
    return ["--study", str(root / "study.json"), "--manifest", str(root.parents[1] / "MANIFEST.md")]


def test_honest_study_passes_and_every_claim_is_recorded(root: Path) -> None:
    assert audit.main(arguments(root)) == 0
    written = read_json(root / "audit.json")
    assert written["counts"][FAIL] == 0
    assert sum(written["counts"].values()) == len(written["claims"])
    kinds = {claim["kind"] for claim in written["claims"]}
    assert {"seal", "design", "gate", "launch", "order", "overlap", "device"} < kinds
    assert {"records", "requests", "identities", "steps", "made again"} < kinds
    doubtful = [c["subject"] for c in written["claims"] if c["verdict"] == NOT_CHECKABLE]
    assert doubtful == ["MANIFEST.md"]
    assert "published nowhere" in written["seal"]


def test_taxes_are_relative_to_the_named_baseline(tmp_path: Path) -> None:
    """Use a baseline with a connector, whose callbacks are not zero."""
    study = StudyTables(
        write_analysed_study(tmp_path, baseline="noop_connector", phase_b=None, phase_bp=None)
    )
    taxes = study.at("ref_safe", "tpot_p90")
    assert set(taxes) == {item.id for item in study.connectors} | {"noop_connector_2"}
    expected = {"plain": 1 / 1.1, "mooncake_both": 1.45 / 1.1, "noop_connector_2": 1}
    for config, ratio in expected.items():
        assert taxes[config].estimate == pytest.approx(ratio - 1, abs=0.03)
    callbacks = study.at("ref_safe", "callbacks", STEP)
    assert callbacks["mooncake_both"].estimate == pytest.approx(0.6 * 0.35 * STEP_US)
    assert study.against("ms over plain's") == "ms over no-op connector's"
    assert " over no-op connector" in answer(study)


def text_of(kind: str, text: str | bytes) -> Tamper:
    def tamper(root: Path) -> None:
        path = next((root / NOOP_CELL).glob(f"{kind}_*"))
        path.unlink()
        path.write_bytes(text if isinstance(text, bytes) else text.encode())
        seal_cell(root / NOOP_CELL)

    return tamper


def empty_window(root: Path) -> None:
    path = next((root / NOOP_CELL).glob("cell_*"))
    with edited_json(path) as record:
        record["window"]["t_stop_ns"] = record["window"]["t_warmup_end_ns"]
    seal_cell(root / NOOP_CELL)


MALFORMED: dict[str, tuple[Tamper, str]] = {
    "an empty window": (empty_window, "noop_connector/block0/A/r40: "),
    "requests of brackets": (
        text_of("requests", "[" * 200_000 + "\n"), "requests_A_r40.jsonl:1: "),
    "requests that are lists": (text_of("requests", "[]\n"), "noop_connector/block0/A/r40: "),
    "a page that is no text": (text_of("metrics", b"\xff\n"), "metrics_A_r40.jsonl:1: "),
    "no scrape": (text_of("metrics", ""), "noop_connector/block0/A/r40: "),
    "steps without their keys": (text_of("engine_step", "{}\n"), "noop_connector/block0/A/r40: "),
    "an index that is a list": (
        lambda root: replace(root / INDEX, "[]"), "index.json"),
    "a study of brackets": (
        lambda root: replace(root / "study.json", "[" * 200_000), "study.json: not valid JSON"),
    "a study that is a list": (
        lambda root: replace(root / "study.json", "[]"), r"found \[\]; allowed: object"),
    "a chain that is no JSON": (
        lambda root: replace(root / "seals.jsonl", "x\n"), "seals.jsonl:1: not a link"),
    "a chain of nothing": (lambda root: replace(root / "seals.jsonl", "{}\n"), "key 'files'"),
}  # fmt: skip


@pytest.mark.parametrize("what", MALFORMED)
def test_audit_failure_names_the_malformed_record(root: Path, what: str) -> None:
    tamper, message = MALFORMED[what]
    tamper(root)
    shown = [f"{c.subject}: {c.message}" for c in failures(root / "study.json")]
    assert any(re.search(message, text) for text in shown), shown


def test_failed_audit_of_a_malformed_study_replaces_a_passed_one(
    root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    replace(root / "audit.json", '{"counts": {"FAIL": 0}}')
    replace(root / "study.json", "[" * 200_000)
    assert audit.main(arguments(root)) == 1
    assert read_json(root / "audit.json")["counts"][FAIL] == 1
    assert "FAIL study study.json" in capsys.readouterr().out


def test_audit_exits_non_zero_and_names_failed_claims(
    root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    csv_field(EFFECTS, "estimate", "0.02")(root)
    assert audit.main(arguments(root)) == 1
    written = read_json(root / "audit.json")
    failed = [c["subject"] for c in written["claims"] if c["verdict"] == FAIL]
    assert failed == ["analysis/effects.csv", "analysis"]
    assert "FAIL made again analysis/effects.csv" in capsys.readouterr().out


def test_audit_without_a_study_gives_a_clear_message(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert audit.main(arguments(tmp_path / "results" / "x")) == 2
    message = capsys.readouterr().err
    assert "study.json: no such file; nothing of the study x was measured yet" in message


def test_audit_of_an_unmeasured_study_prints_one_line_with_the_command_that_measures(
    root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.rmtree(root / "runs")
    chain = root / "seals.jsonl"
    links = chain.read_text()
    assert audit.main(arguments(root)) == 1, "sealed launches without their files are a failure"
    assert "FAIL seal" in capsys.readouterr().out
    replace(chain, links.splitlines(keepends=True)[0])
    assert audit.main(arguments(root)) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err == (
        "audit: nothing of the study synthetic was measured yet. To measure it: snakemake"
        " --cores 1 all, with the study's --configfile\n"
    )
    chain.unlink()
    (root / "audit.json").unlink()
    assert audit.main(arguments(root)) == 2
    assert not (root / "audit.json").exists()


PICTURE = """<svg><clipPath id="p0123456789"/><clipPath id="pabcdef0123"/>
<path clip-path="url(#p0123456789)" d="M 1 2"/><path clip-path="url(#pabcdef0123)"/></svg>"""


@pytest.mark.parametrize(
    ("old", "new", "same"),
    [
        ("p0123456789", "p9876543210", True),
        ("url(#p0123456789)", "url(#pabcdef0123)", False),
        ("M 1 2", "M 1 3", False),
    ],
)
def test_pictures_are_compared_except_for_clip_path_names(
    tmp_path: Path, old: str, new: str, same: bool
) -> None:
    one, other = tmp_path / "one.svg", tmp_path / "other.svg"
    one.write_text(PICTURE)
    other.write_text(PICTURE.replace(old, new))
    assert (digest(one) == digest(other)) == same


def test_numbers_in_table_tuples_are_compared_with_tolerance(tmp_path: Path) -> None:
    texts = ["(0.1, None)", "(0.10000000000000002, None)", "(0.11, None)"]
    published, near, far = (tmp_path / name / "engine.csv" for name in ("published", "near", "far"))
    for file, text in zip((published, near, far), texts, strict=True):
        file.parent.mkdir()
        file.write_text(f'config,setting,narrow,label\nx,y,"{text}",(emulated)\n')
    assert compare(published, near).wrong == []
    assert compare(published, far).wrong == [
        "engine.csv[x/y].narrow[0]: published 0.1, made again 0.11"
    ]


def test_tables_are_compared_by_key_in_any_order(tmp_path: Path) -> None:
    one, other = tmp_path / "engine.csv", tmp_path / "other" / "engine.csv"
    other.parent.mkdir()
    one.write_text("config,setting,value\nx,a,1\nx,b,2\n")
    other.write_text("setting,config,value\nb,x,2\na,x,1\n")
    assert compare(one, other).wrong == []
    other.write_text("config,setting,value\nx,a,1\nx,b\n")
    with pytest.raises(ArtifactError, match=r"engine\.csv:3: other columns than line 1"):
        compare(one, other)


def test_page_digest_depends_on_text_and_pictures(tmp_path: Path) -> None:
    page = tmp_path / "report.html"

    def written(picture: str, text: str = "+3.2 %") -> str:
        uri = base64.b64encode(picture.encode()).decode()
        page.write_text(f'<p>{text}</p><img src="data:image/svg+xml;base64,{uri}"/>')
        return digest(page)

    genuine = written(PICTURE)
    assert written(PICTURE.replace("p0123456789", "p9876543210")) == genuine
    assert written(PICTURE.replace("M 1 2", "M 1 3")) != genuine
    assert written(PICTURE, "+3,2 %") != genuine
