"""Test the wait for the step with the prompt, and the report's note on it."""

import hashlib
import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from connector_tax.analysis.measure import measure_requests
from connector_tax.analysis.step_tables import wait_rows
from connector_tax.analysis.steps import prefill_wait_ms, read_steps
from connector_tax.artifacts.folder import CellFolder
from connector_tax.artifacts.names import CellKey
from connector_tax.artifacts.study_file import load_study
from connector_tax.figures.tables import StudyTables
from connector_tax.figures.taxes import other_waits
from connector_tax.report.answer import hypotheses
from tests.analysis.tables import edit, edit_csv
from tests.analysis.test_steps import scheduler, worker

MS = 1_000_000
BASE_MS = 5.0


def cell_of(folder: Path, due_ms: list[float], steps: list[dict[str, Any]]) -> CellFolder:
    """Return a valid cell with a success for each due time, all answered at 90 ms."""
    key = CellKey("plain", 0, "B", "128x8")
    answered = {"t_send_ns": 90 * MS, "t_first_token_ns": 90 * MS, "t_last_token_ns": 91 * MS}
    answered |= {"t_done_ns": 92 * MS, "completion_tokens": 8}
    requests = [
        {"seq": seq, "t_intended_ns": round(due * MS), "status": "ok", **answered}
        for seq, due in enumerate(due_ms)
    ]
    files = {}
    for kind, records in (("requests", requests), ("engine_step", steps)):
        path = folder / f"{kind}_B_128x8.jsonl"
        path.write_text("".join(json.dumps(record) + "\n" for record in records))
        files[path.name] = hashlib.sha256(path.read_bytes()).hexdigest()
    window = {"t_warmup_end_ns": 10 * MS, "t_stop_ns": 80 * MS}
    record: Any = {"window": window, "schedule": {"kind": "jittered"}}
    return CellFolder(key, "valid", None, folder, files, record, 16.0, 128, 8)


def test_a_request_waits_for_the_first_step_with_prompt_tokens(tmp_path: Path) -> None:
    steps = [
        scheduler(1, t_ns=22 * MS),  # a step without prompt tokens
        scheduler(2, t_ns=23 * MS, prefill_tokens=128),
        worker(2, t_ns=21 * MS),
        scheduler(3, t_ns=45 * MS, prefill_tokens=128),
    ]

    def wait_ms(*due_ms: float) -> float | None:
        cell = cell_of(tmp_path, [*due_ms], steps)
        assert cell.record is not None
        return prefill_wait_ms(measure_requests(cell), read_steps(cell), cell.record["window"])

    # One request in the warm-up, one before each step, and one that no step follows.
    assert wait_ms(5, 20, 40, 60) == 4
    assert wait_ms(60) is None


@pytest.fixture
def study_file(crisp: Path, tmp_path: Path) -> Path:
    return shutil.copytree(crisp, tmp_path / "x") / "study.json"


def note_on_waits(study_file: Path, less_ms: float, spread_ms: float) -> str:
    """Return the report's note if requests wait less with Mooncake both than with plain."""
    study = load_study(study_file)
    waits = {
        CellKey(name, block, "B", "128x16"): BASE_MS
        - (less_ms if name == "mooncake_both" else 0)
        + spread_ms * (-1) ** (block + len(name) // 6)
        for name in study.configs("B")
        for block in range(study.document["blocks"])
    }
    rows = wait_rows(study, waits)
    assert {row["config"] for row in rows} == {*study.configurations, "plain_2"} - {"plain"}
    mine = next(row for row in rows if row["config"] == "mooncake_both")
    assert mine["own"] - mine["base"] == pytest.approx(mine["estimate"], abs=spread_ms)

    def add(table: list[dict[str, str]]) -> None:
        table[:] = [row for row in table if row["quantity"] != "wait"]
        table += [dict.fromkeys(table[0], "") | {k: str(v) for k, v in r.items()} for r in rows]

    edit_csv(study_file.parent / "analysis" / "effects.csv", add)
    tables = StudyTables(study_file)
    (h5,) = (item["sentence"] for name, _, _, item in hypotheses(tables) if name == "H5")
    assert h5.endswith(f" {other_waits(tables)}.") if other_waits(tables) else "Waits" not in h5
    return other_waits(tables)


@pytest.mark.parametrize(
    ("less_ms", "spread_ms", "told"),
    [(4, 0.01, True), (0.0001, 0.00001, False), (4, 9, False)],
    ids=["differs", "within the margin", "cannot be told"],
)
def test_note_on_waits_appears_only_if_waits_differ(
    study_file: Path, less_ms: float, spread_ms: float, told: bool
) -> None:
    text = note_on_waits(study_file, less_ms, spread_ms)
    assert ("−4.00 ms at 128x16" in text) is told
    assert bool(text) is told


@pytest.mark.parametrize("process", ["fixed", "jittered"])
def test_note_on_waits_gives_the_cause_for_fixed_arrivals_only(
    study_file: Path, process: str
) -> None:
    def arrive(document: Any) -> None:
        document["config"]["arrivals"]["process"] = process

    edit(study_file, arrive)
    text = note_on_waits(study_file, 4, 0.01)
    assert text.startswith("Waits for the step with the prompt differ")
    assert ("due to arrivals, not the connector" in text) is (process == "fixed")
