"""Test that two slots of one machine measure one block each, side by side."""

import os
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest

from connector_tax.files import read_json
from tests.workflow.harness import passed_claims, prepare, run, smaller

CPUS = sorted(os.sched_getaffinity(0))[:2]
pytestmark = [
    pytest.mark.workflow,
    pytest.mark.long,
    pytest.mark.timeout(900),
    pytest.mark.skipif(len(CPUS) < 2, reason="two slots need two CPUs"),
]


def with_slots(text: str) -> str:
    slots = [f"{{id: {name}, cpus: '{cpu}'}}" for name, cpu in zip("ab", CPUS, strict=True)]
    return smaller(text).replace("blocks: 1", "blocks: 4") + f"devices: [{', '.join(slots)}]\n"


def attempts(folder: Path, block: int, phase: str) -> list[dict[str, Any]]:
    """Return every start of a server of the block and phase, in the order they began."""
    files = folder.glob(f"results/tiny/runs/*/block{block}/{phase}/attempts.json")
    begun = [attempt for path in files for attempt in read_json(path)]
    return sorted(begun, key=lambda attempt: str(attempt["started_utc"]))


def span(begun: list[dict[str, Any]]) -> tuple[datetime, datetime]:
    return (
        datetime.fromisoformat(begun[0]["started_utc"]),
        datetime.fromisoformat(begun[-1]["ended_utc"]),
    )


def test_two_slots_measure_one_block_each_at_a_time(tmp_path: Path) -> None:
    folder = prepare(tmp_path / "study", with_slots)
    # More cores than slots: a slot has one block at a time all the same.
    done = run(folder, "all", options=("--cores", "5"))
    assert done.returncode == 0, done.stdout + done.stderr
    spans = []
    for block in range(4):
        nodes = [a["node"] for phase in ("A", "B", "Bp") for a in attempts(folder, block, phase)]
        assert {node["cpus"] for node in nodes} == {str(CPUS[block % 2])}
        spans.append(span(attempts(folder, block, "A")))
    assert max(spans[0][0], spans[1][0]) < min(spans[0][1], spans[1][1]), "one after the other"
    assert spans[0][1] <= spans[2][0]
    assert spans[1][1] <= spans[3][0]
    ends = [span(attempts(folder, block, "A"))[1] for block in range(4)]
    assert max(ends) <= min(span(attempts(folder, block, "B"))[0] for block in range(4))
    done = run(folder, "audit")
    assert done.returncode == 0, done.stdout
    passed = passed_claims(folder / "results" / "tiny")
    assert ("device", "study") in passed
    assert sum(kind == "overlap" for kind, _ in passed) == 2, "one for each slot"
