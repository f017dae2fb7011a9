"""The audit recomputes resources and settings by itself, and catches what was changed."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from connector_tax.analysis import aggregate
from connector_tax.figures import fig10_resources, style
from connector_tax.figures.tables import StudyTables
from connector_tax.files import read_json, sha256_file, write_json
from connector_tax.provenance.audit_resources import check_resources
from connector_tax.provenance.audit_study import RawStudy
from connector_tax.provenance.audit_tables import check_published
from connector_tax.provenance.claims import FAIL, NOT_CHECKABLE, Claim, Ledger
from tests.analysis.synthetic import SMALL_GRID, write_synthetic_study
from tests.launch_records import complete_launches
from tests.provenance.audited_study import edited_json, linked_copy, replace, seal

Tamper = Callable[[Path], None]
LAUNCH = "runs/nixl_both/block0/A"
CELL = f"{LAUNCH}/r40"


def claims(root: Path, published: Path | None = None) -> list[Claim]:
    """The claims about resources and settings."""
    study, ledger = RawStudy(root / "study.json", published), Ledger()
    check_resources(study, ledger)
    check_published(study, ledger, root / "MANIFEST.md")
    mine = ("resources.csv", "engine.csv", "fig10_resources")
    kinds = ("launch records", "server CPU")
    return [c for c in ledger.claims if c.kind in kinds or c.subject in mine]


def test_an_honest_study_passes_and_every_kind_of_claim_is_made(audited: Path) -> None:
    checked = claims(audited / "results" / "synthetic")
    assert {claim.verdict for claim in checked} == {"PASS"}
    kinds = {(claim.kind, claim.subject) for claim in checked}
    assert {("numbers", "resources.csv"), ("numbers", "engine.csv")} < kinds
    assert {("figure", "fig10_resources"), ("launch records", "nixl_both/block0/A")} < kinds
    assert ("server CPU", "nixl_both/block0/A/r40") in kinds


@pytest.mark.parametrize("blocks", [pytest.param(2, marks=pytest.mark.long), 3])
def test_intervals_and_p_of_several_blocks_are_recomputed(tmp_path: Path, blocks: int) -> None:
    """With a launch that failed, one skipped, and a configuration of another spread."""
    study_file = write_synthetic_study(
        tmp_path / "s",
        blocks=blocks,
        steps_per_cell=5,
        failed={("lmcache_only", 1, "A"): "the server ended"},
        skipped={"mooncake_consumer": "the gate"},
        void={("nixl_both", 1, "A", "r40"): "late"},
        config={**SMALL_GRID, "statistics": {"resamples": 100}},
    )
    complete_launches(study_file.parent)
    noisy = study_file.parent / "runs" / "mooncake_both" / "block0" / "A"
    change_record(noisy, "resources.json", lambda r: r.update(startup_s=90.0))
    assert aggregate.main(["--study", str(study_file)]) == 0
    picture = fig10_resources.draw(StudyTables(study_file))
    style.save(picture, study_file.parent / "figures", "fig10_resources")
    rows = StudyTables(study_file).resources
    assert {"block model", "own spread", "exact"} <= {row.interval_method for row in rows}
    assert {row.status for row in rows} == {"valid", "missing"}
    wrong = [c for c in claims(study_file.parent) if c.kind in ("numbers", "figure")]
    assert [c for c in wrong if c.verdict == FAIL] == []
    assert len(wrong) == 3


def change_record(folder: Path, name: str, change: Callable[[Any], None]) -> None:
    """Change a record of a launch and make its hash in the index fit, as a forger would."""
    record = read_json(folder / name)
    change(record)
    write_json(folder / name, record)
    index = read_json(folder / "index.json")
    index["files"][name] = sha256_file(folder / name)
    write_json(folder / "index.json", index)


def published(name: str, old: str, new: str) -> Tamper:
    def tamper(root: Path) -> None:
        path = root / name
        text = path.read_text()
        assert old in text
        replace(path, text.replace(old, new, 1))

    return tamper


def forged(name: str, change: Callable[[Any], None]) -> Tamper:
    return lambda root: change_record(root / LAUNCH, name, change)


def unsealed(root: Path) -> None:
    with edited_json(root / LAUNCH / "settings.json") as record:
        record["settings"]["layout"]["value"] = "NHD"


def cell_cpu(key: str, value: float) -> Tamper:
    def tamper(root: Path) -> None:
        with edited_json(root / CELL / "cell_A_r40.json") as record:
            record["server_cpu"][key] = value
        seal(root, root / CELL)

    return tamper


def set_idle(record: Any) -> None:
    record["idle_cpu"]["value"] = record["idle_cpu"]["parts"]["server"] = 0.01


def late_idle(record: Any) -> None:
    record["idle_cpu"] |= {"from_ns": 10**18, "to_ns": 10**18 + 3 * 10**9}


def show_secret(record: Any) -> None:
    record["environment"]["server"]["HF_TOKEN"] = "hf_abc"


@pytest.mark.parametrize(
    ("tamper", "kind", "message"),
    [
        (
            published("analysis/resources.csv", "nixl_both,threads,threads,log,65.0,75.0,10.0",
                      "nixl_both,threads,threads,log,65.0,75.0,0.0"),
            "numbers", "nixl_both threads: difference: published '0.0', recomputed",
        ),
        (
            published("analysis/engine.csv", "layout HND (plain NHD)", ""),
            "numbers", "mooncake_both kv_blocks: also_differs: published",
        ),
        (
            published("figures/fig10_resources.csv", "nixl_both,threads,threads,65.0,10.0",
                      "nixl_both,threads,threads,65.0,1.0"),
            "figure", "nixl_both threads: difference: published '1.0', recomputed",
        ),
        (unsealed, "launch records", "settings.json: sha256 is not what index.json says"),
        (forged("resources.json", set_idle), "numbers", "nixl_both idle_cpu: config_mean"),
        (
            forged("resources.json", lambda r: r["before_load"]["threads"].update(value=65)),
            "launch records", "before_load.threads: 65 is not the sum of its parts",
        ),
        (forged("resources.json", late_idle), "launch records", "a cell began while"),
        (
            forged("settings.json", lambda r: r["settings"]["layout"].update(reason="unknown")),
            "launch records", "layout: value, source and reason contradict",
        ),
        (forged("settings.json", show_secret), "launch records", "server shows a secret"),
        (cell_cpu("requests", 1.0), "server CPU", "1.0 requests, the server's counters say"),
        (cell_cpu("cpu_s", 1.0), "server CPU", "per 1,000 requests is not 1.0 s over"),
        (cell_cpu("from_ns", 2**60), "server CPU", "the readings do not enclose the cell"),
    ],
)  # fmt: skip
def test_what_was_changed_is_caught(
    audited: Path, tmp_path: Path, tamper: Tamper, kind: str, message: str
) -> None:
    root = linked_copy(audited, tmp_path / "copy") / "results" / "synthetic"
    tamper(root)
    failed = [c for c in claims(root) if c.verdict == FAIL and c.kind == kind]
    assert any(message in claim.message for claim in failed), failed


def test_launches_from_before_there_were_records_are_not_checkable(
    audited: Path, tmp_path: Path
) -> None:
    root = linked_copy(audited, tmp_path / "copy") / "results" / "synthetic"
    with edited_json(root / LAUNCH / "index.json") as index:
        del index["files"]
    uncheckable = [c for c in claims(root) if c.verdict == NOT_CHECKABLE]
    subject = "1 launches, first nixl_both/block0/A"
    assert [(c.kind, c.subject) for c in uncheckable] == [("launch records", subject)]


def test_a_study_published_before_there_were_the_tables_is_not_wrong_for_it(
    audited: Path, tmp_path: Path
) -> None:
    """An unpacked archive has its published tables in a folder of their own."""
    root = linked_copy(audited, tmp_path / "copy") / "results" / "synthetic"
    made = claims(root, root / "published")
    uncheckable = [(c.kind, c.subject) for c in made if c.verdict == NOT_CHECKABLE]
    assert uncheckable == [
        ("numbers", "resources.csv"),
        ("numbers", "engine.csv"),
        ("figure", "fig10_resources"),
    ]
    assert not [c for c in made if c.verdict == FAIL]
