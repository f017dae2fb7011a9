"""The short form of the whole command: its files, and what must hold however few studies ran."""

import statistics
from pathlib import Path

import pytest

from connector_tax.calibration import __main__ as command
from connector_tax.calibration.__main__ import SHORT
from connector_tax.calibration.live import CASES, inject_faults
from connector_tax.engine.faults import FaultKind
from connector_tax.files import read_json


@pytest.mark.long
def test_the_short_calibration(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main(["--short", "--out", str(tmp_path)]) == 0
    text = capsys.readouterr().out
    assert text.rstrip("\n") == (tmp_path / "calibration.txt").read_text().rstrip("\n")
    virtual, http, faults = (
        read_json(tmp_path / f"{name}.json") for name in ("virtual", "http", "faults")
    )
    # Three spreads, two arrival processes, two metrics, 3 and 5 blocks.
    assert len(virtual["rows"]) == 24
    assert all(row["studies"] == SHORT.studies for row in virtual["rows"])
    # Of two studies and a truth from six launches: single rows may miss, all of them not.
    assert statistics.mean(row["covered"] for row in virtual["rows"]) > 0.6
    assert all(row["largest"] > 0.05 for row in virtual["rows"])
    # Launches that differ as a real vLLM's make wider intervals.
    widths = {
        spread: [row["half_width"] for row in virtual["rows"] if row["spread"] == spread]
        for spread in ("engine", "vllm-cpu")
    }
    assert statistics.mean(widths["vllm-cpu"]) > 2 * statistics.mean(widths["engine"])
    assert all(f["as_designed"] for f in faults["faults"]), faults["faults"]
    assert {f["fault"]: f["outcome"] for f in faults["faults"]} == {
        "fin": "void",
        "prefix_hit, once": "void",
        "refuse_start": "failed",
        "crlf": "valid",
    }
    assert http["requests"] > 100
    # A stamp of the wrong event is off by a step of 3 ms; half of them are not, on any machine.
    assert 0 < http["stamps"]["last_us"][0] < 3000
    assert len(http["taxes"]) == 4


def test_every_fault_switch_has_a_case() -> None:
    assert {case.rule["kind"] for case in CASES} == set(FaultKind)


@pytest.mark.long
def test_every_fault_does_what_the_table_says(tmp_path: Path) -> None:
    rows = inject_faults(tmp_path, None, 1, lambda _: None)
    assert [row for row in rows if not row["as_designed"]] == []
