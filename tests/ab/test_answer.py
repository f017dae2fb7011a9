"""Test the answer's text, and the command's exit status."""

import fcntl
import json
import os
import struct
import sys
import termios
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from connector_tax.ab.__main__ import Failed, Line, _stage, fitted
from connector_tax.ab.answer import Answer
from connector_tax.ab.void_cells import all_void
from connector_tax.artifacts import paths
from connector_tax.artifacts.checks import BOUNDS
from connector_tax.artifacts.names import ALL_RATES
from connector_tax.artifacts.study_file import Study
from connector_tax.artifacts.tables import COLUMNS
from connector_tax.artifacts.verdicts import CANNOT_TELL, COSTS, MARKED
from connector_tax.compare.bounds import ABOVE, BELOW, NO_NUMBER, STATUS, Bound
from tests.study_folder import DEFAULT


def answer(verdict: str, root: Path) -> Answer:
    """Return the answer for a candidate whose TTFT is 20% above the baseline's."""
    config = {**DEFAULT, "statistics": {**DEFAULT["statistics"], "margins": {"ttft_p50": 0.03}}}
    engine = {**DEFAULT["engine"], "label": "a server", "commands": {}}
    document: Any = {"config": {**config, "engine": engine, "validity": BOUNDS}}
    tables: Any = SimpleNamespace(
        label=str,
        baseline="baseline",
        pooled=[],
        judged_rates=[],
        connectors=[],
        of=lambda *_: [],
        settings=document["config"],
    )
    tax: Any = SimpleNamespace(**dict.fromkeys(COLUMNS[paths.EFFECTS]))
    vars(tax).update(
        config="candidate", metric="ttft_p50", estimate=0.2, family_lo=0.1, family_hi=0.3,
        narrow_hi=0.28, margin=0.03, verdict=verdict, change=(0.2, 0.1, 0.3),
        mark="a server saturated" if verdict == MARKED else "", cell=ALL_RATES,
        error=0.03, df=12, n_blocks=2, scale="log", method="block model (df 12)",
    )  # fmt: skip
    return Answer(Study(root, document), 2, 1.5, [tax], [], root / "x.tar.zst", tables)


def test_failed_stage_is_reported_with_the_last_line_and_path_of_its_log(tmp_path: Path) -> None:
    log = tmp_path / "logs" / "study_preflight.ab.log"
    log.parent.mkdir()
    log.write_text("a line of an earlier run\n" * 20)
    with pytest.raises(Failed, match=r"preflight ended with status .*study\.json") as failed:
        _stage("study.preflight", tmp_path)
    assert str(failed.value).splitlines()[1:] == [f"log: {log}"]


@pytest.mark.parametrize("bounds", [[], [Bound(0.05)], [Bound(0.5, "ttft_p50")]])
def test_saturated_server_gets_no_verdict_at_any_bound(bounds: list[Bound], tmp_path: Path) -> None:
    saturated = answer(MARKED, tmp_path)
    line = "candidate: TTFT +20.0% [+10.0, +30.0] no verdict: a server fell behind this rate"
    assert saturated.text().splitlines()[0] == line
    assert saturated.status(bounds) == STATUS[NO_NUMBER]
    saturated.taxes[0].mark = "few requests"  # type: ignore[misc]
    assert "no verdict: a cell has few requests" in saturated.text()
    costs = answer(COSTS, tmp_path)
    assert costs.status(bounds) != STATUS[NO_NUMBER]
    line = "candidate: TTFT +20.0% [+10.0, +30.0], at most +28.0%: costs"
    assert costs.text().splitlines()[0] == line


def test_bound_of_a_metric_replaces_the_bound_of_all_metrics(tmp_path: Path) -> None:
    costs = answer(COSTS, tmp_path)
    general, own = Bound(0.05), Bound(0.5, "ttft_p50")
    assert costs.status([general]) == STATUS[ABOVE]
    assert costs.status([general, own]) == costs.status([own, general]) == STATUS[BELOW]


def test_answer_without_a_valid_cell_has_a_reason_in_place_of_a_number(tmp_path: Path) -> None:
    def cell(name: str, status: str, reason: str = "", *errors: str) -> Any:
        path = tmp_path / f"{name}.jsonl"
        requests = [{"status": "error", "error_kind": "http_status", "error_detail": error}
                    for error in errors]  # fmt: skip
        path.write_text("\n".join(map(json.dumps, [{"status": "ok"}, *requests])))
        return SimpleNamespace(
            configuration=name, status=status, reason=reason, file=lambda _: path
        )

    limited = "429: rate\x1b[2J limit"
    void = all_void([
        cell("candidate", "void", "short answers"), cell("candidate", "void", "again"),
        cell("limited", "void", "errors", "503: busy", limited, limited),
        cell("baseline", "void", "busy"), cell("baseline", "valid"), cell("late", "skipped"),
    ])  # fmt: skip
    assert void == {
        "candidate": "short answers",
        "limited": "errors; mostly 429: rate\\u{1b}[2J limit",
    }
    known = answer(CANNOT_TELL, tmp_path)
    vars(known.taxes[0])["estimate"] = None
    none = replace(known, void=void)
    line = "candidate: no number, since every cell is void: short answers"
    assert none.text().splitlines()[0] == line
    assert none.status([]) == STATUS[NO_NUMBER]
    vars(known.taxes[0])["reason"] = "one read"
    line = "candidate: TTFT no number: one read"
    assert replace(none, void={}).text().splitlines()[0] == line
    line = "candidate: no number, since every cell is void: baseline: busy"
    assert replace(none, void={"baseline": "busy"}).text().splitlines()[0] == line


def test_answer_lists_resources_that_differ_significantly(tmp_path: Path) -> None:
    def second_line(*rows: tuple[str, float, float]) -> str:
        taken: Any = [
            SimpleNamespace(config="candidate", metric=metric, p=p, difference=(difference, 0, 1))
            for metric, difference, p in rows
        ]
        return replace(answer(COSTS, tmp_path), resources=taken).text().splitlines()[1].strip()

    memory = ("memory_pss_mib", 13.0, 0.03)
    assert second_line(memory) == "besides: memory +13 MiB"
    # Two resources share the level.
    assert second_line(memory, ("startup_s", 0.1, 0.4)) == "besides: no difference found"
    assert second_line() == "besides: nothing is known"


@pytest.mark.parametrize("width", [39, 40, 80, 200])
def test_progress_keeps_the_parts_that_fit_the_terminal(width: int) -> None:
    parts = ["block 12 of 12", "13:20 left", "TTFT +28.1%", "TPOT +9.4%", "x" * 200]
    line = fitted(parts, width)
    assert len(line) <= width
    assert line.startswith("block 12 of 12, 13:20 left")
    assert ("TPOT +9.4%" in line) is (width >= 52)


def test_progress_line_fits_the_terminal_width(monkeypatch: pytest.MonkeyPatch) -> None:
    ours, theirs = os.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 30, 0, 0))
    with os.fdopen(theirs, "w") as terminal:
        monkeypatch.setattr(sys, "stderr", terminal)
        Line().show("x" * 100)
        assert os.read(ours, 1000).count(b"x") == 29
    os.close(ours)
