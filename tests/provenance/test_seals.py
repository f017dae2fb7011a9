"""Test that sealed measurements cannot be changed, by the chain of seals and MANIFEST.md."""

import re
import shutil
from pathlib import Path
from typing import Any

import pytest

from connector_tax.artifacts.folder import StudyFolder
from connector_tax.figures.tables import StudyTables
from connector_tax.files import ArtifactError, read_json
from connector_tax.provenance import audit, manifest
from connector_tax.provenance.claims import FAIL, NOT_CHECKABLE, Ledger
from connector_tax.provenance.launches import check_launches
from connector_tax.provenance.manifest import name_archive, pictures_of, read_manifest
from connector_tax.provenance.remade import published_views
from connector_tax.report.page import render
from connector_tax.seals import seal_end, seal_launch, seal_settings
from tests.provenance.audited_study import SKIPPED, write_audited_study
from tests.provenance.tampering import LAUNCH, SEALS, failures, json_value, whole_chain_forged
from tests.study_folder import edited_json, replace


@pytest.fixture
def published(root: Path) -> Path:
    """Return the audited study's study.json, after adding its seal to MANIFEST.md."""
    folder = root.parents[1]
    body = manifest.section_of((root / "manifest.md").read_text(), "synthetic")
    pictures = pictures_of(published_views(root))
    name_archive(folder / "MANIFEST.md", "synthetic", root / "env.txt", body, pictures)
    return root / "study.json"


def published_seal(study_file: Path) -> tuple[str, list[tuple[str, str]]]:
    """Return the audit's last line, and verdict and message of its claim about MANIFEST.md."""
    ledger = Ledger()
    manifest_file = study_file.parents[2] / "MANIFEST.md"
    line = audit.check_study(StudyFolder.load(study_file), manifest_file, ledger)
    mine = [(c.verdict, c.message) for c in ledger.claims if c.subject == "MANIFEST.md"]
    return line, mine


def test_audit_reports_if_the_seal_was_published(
    root: Path, request: pytest.FixtureRequest
) -> None:
    line, claims = published_seal(root / "study.json")
    assert "published nowhere: anyone with write access to this folder can have made it" in line
    assert [verdict for verdict, _ in claims] == [NOT_CHECKABLE]
    published = request.getfixturevalue("published")
    assert failures(published) == []
    line, claims = published_seal(published)
    assert "the seal that MANIFEST.md names" in line
    assert "The folder alone cannot show" in line
    assert [verdict for verdict, _ in claims] == ["PASS"]


def test_seal_added_after_the_published_one_fails_the_audit(published: Path) -> None:
    root = published.parent
    with edited_json(root / "study.json") as study:
        study["created_utc"] = "2020-01-01"
    seal_end(root)
    manifest.write(root / "study.json")
    line, claims = published_seal(published)
    assert claims == [(FAIL, "1 links were added after the published seal")]
    assert "not the study that MANIFEST.md names" in line


def test_seal_that_manifest_md_does_not_name_fails_the_audit(published: Path) -> None:
    """Seal the whole chain again: the folder is consistent, and only MANIFEST.md exposes it.

    A study of the same name that shares no launch with the published one is another measurement.
    """
    whole_chain_forged(published.parent)
    manifest.write(published)
    line, claims = published_seal(published)
    assert [verdict for verdict, _ in claims] == [FAIL]
    assert "not the study that MANIFEST.md names" in line
    page = published.parents[2] / "MANIFEST.md"
    replace(page, re.sub(r"[0-9a-f]{64} \|$", f"{'0' * 64} |", page.read_text(), flags=re.M))
    line, claims = published_seal(published)
    assert [verdict for verdict, _ in claims] == [NOT_CHECKABLE]
    assert "not the study that MANIFEST.md names" in line


def test_seal_removed_from_manifest_md_fails_the_audit(published: Path) -> None:
    page = published.parents[2] / "MANIFEST.md"
    replace(page, re.sub("^Seal: .*\n\n", "", page.read_text(), flags=re.M))
    assert [verdict for verdict, _ in published_seal(published)[1]] == [FAIL]


PICTURE = "`fig9_forest.png` "


@pytest.mark.parametrize(
    ("pattern", "text", "message"),
    [
        (rf"{PICTURE}\w+", PICTURE + "0" * 64, f"fig9_forest.png has .* but {'0' * 64} is listed"),
        (rf"{PICTURE}\w+, ", "", "fig9_forest.png has .* but None is listed"),
        ("^Pictures: ", "Pictures: `x.png` 0, ", "x.png has sha256 None, but 0 is listed"),
        ("^Pictures: ", "Pictures: of 8x H100, ", "the line contains more"),
        ("^Pictures: ", "Pictures: of 8x H100.\n\nPictures: ", "malformed"),
        ("^Pictures: .*\n\n", "", "but None is listed"),
    ],
)
def test_manifest_md_names_the_pictures_of_the_study(
    published: Path, pattern: str, text: str, message: str
) -> None:
    page = published.parents[2] / "MANIFEST.md"
    replace(page, re.sub(pattern, text, page.read_text(), count=1, flags=re.M))
    (claim,) = [claim for claim in failures(published) if claim.subject == "figures"]
    assert re.search(message, claim.message)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        (
            "<!-- study",
            "<!-- study synthetic -->\n## synthetic\n<!-- end of study synthetic -->\n\n<!-- study",
        ),
        ("# Manifest\n", "# Manifest\n\nMeasured on 8x H100.\n"),
    ],
    ids=["a section before the true one", "text outside the sections"],
)
def test_manifest_md_holds_generated_sections_only(published: Path, old: str, new: str) -> None:
    page = published.parents[2] / "MANIFEST.md"
    replace(page, page.read_text().replace(old, new, 1))
    message = "the page contains text outside its head and the sections of studies"
    assert published_seal(published)[1] == [(FAIL, message)]


def test_rows_of_manifest_md_equal_the_studys_manifest(published: Path) -> None:
    page = published.parents[2] / "MANIFEST.md"
    replace(page, page.read_text().replace("| 2/0/0/0 |", "| 9/0/0/0 |", 1))
    (claim,) = failures(published)
    assert (claim.subject, claim.message) == ("rows", "its rows differ from manifest.json")


def test_manifest_md_of_another_version_may_have_other_words_but_no_other_value(
    published: Path,
) -> None:
    page = published.parents[2] / "MANIFEST.md"
    text = page.read_text()
    for now, then in (("Each study lists", "Of each study,"), ("| cells", "| the cells"),
                      ("- engine: ", "- served by: ")):  # fmt: skip
        assert now in text
        text = text.replace(now, then)
    replace(page, text)
    assert {claim.subject for claim in failures(published)} == {"rows", "MANIFEST.md"}
    with edited_json(published.parent / "manifest.json") as record:
        record["package"] = "0.2"
    assert failures(published) == []
    assert published_seal(published)[1][0][0] == NOT_CHECKABLE
    replace(page, text.replace("| 2/0/0/0 |", "| 9/0/0/0 |", 1))
    assert {claim.subject for claim in failures(published)} == {"rows"}


def measured_again(root: Path) -> Path:
    """Move a launch aside and measure it again, as `remeasure` does; return the old folder."""
    folder = root / LAUNCH
    aside = folder.with_name("A.superseded1")
    shutil.copytree(folder, aside)
    index = read_json(folder / "index.json")
    (folder / "index.json").unlink()
    del index["seal"]
    with edited_json(folder / "attempts.json") as attempts:
        attempts[0]["supersedes"] = aside.name
    index["attempts"] = attempts
    seal_launch(root, "noop_connector/block0/A", folder / "index.json", index)
    manifest.write(root / "study.json")
    return aside


def test_remeasured_launch_is_reported_and_its_first_run_kept(root: Path) -> None:
    aside = measured_again(root)
    assert failures(root / "study.json") == []
    rows = read_manifest(root / "manifest.json")["launches"]
    (row,) = [row for row in rows if row["phase"] == "A.superseded1"]
    assert row["status"] == "measured again, not used"
    assert row["cells"] == "2/0/0/0"
    page = render(StudyTables(root / "study.json"))
    assert "noop_connector/block0/A" in page[page.index("remeasured on request") :][:400]
    shutil.rmtree(aside)
    manifest.write(root / "study.json")
    messages = " ".join(claim.message for claim in failures(root / "study.json"))
    assert "A.superseded1/index.json is missing" in messages


def test_audit_passes_with_a_wall_clock_set_back_during_the_study(root: Path) -> None:
    ledger = Ledger()
    for index_file in root.glob("runs/plain/block0/*/index.json"):
        with edited_json(index_file) as index:
            index["attempts"][0] |= {"started_utc": "2026-05-26T08:00:00.000+00:00"}
    check_launches(StudyFolder.load(root / "study.json"), ledger)
    wrong = [c for c in ledger.claims if c.verdict == FAIL and c.kind in ("overlap", "order")]
    assert wrong == []


def test_emptied_seal_chain_is_refused(root: Path) -> None:
    replace(root / SEALS, "")
    with pytest.raises(ArtifactError, match=r"holds no link, .* Restore the file"):
        seal_settings(root, read_json(root / "study.json"))
    replace(root / SEALS, "garbage\n")
    with pytest.raises(ArtifactError, match=r"seals.jsonl:1: not a link: .* move its folder away"):
        seal_settings(root, read_json(root / "study.json"))


def test_report_names_a_setting_changed_after_sealing(root: Path) -> None:
    assert "Changed after the first measurement" not in render(StudyTables(root / "study.json"))
    json_value("study.json", "config", "statistics", "margins", "tpot_p90", value=0.5)(root)
    page = render(StudyTables(root / "study.json"))
    assert re.search(r"Changed after the first measurement.*margins.tpot_p90: 0.05 -&gt; 0.5", page)


def honest(number: int) -> dict[str, Any]:
    """Return the arguments of the n-th small study: seeds, blocks, gates, void cells, steps."""
    # A single block would lose its only reference rate.
    lost = number % 4 == 1 and number % 3 > 0
    return {
        "seed": number,
        "blocks": 1 + number % 3,
        "plain_launches": 1 + number % 2,
        "skipped": {} if number % 5 == 2 else SKIPPED,
        "step_timing": number % 7 != 3,
        "step_cost": {"jitter_rel_sd": 0.01 * (1 + number % 6)},
        "void": frozenset({("nixl_both", 0, "A", "r40")}) if lost else frozenset(),
    }


@pytest.mark.long
@pytest.mark.timeout(3600)
def test_hundred_honest_studies_pass_the_audit(tmp_path: Path) -> None:
    for number in range(100):
        folder = tmp_path / str(number)
        study_file = write_audited_study(folder, **honest(number))
        assert failures(study_file) == [], number
