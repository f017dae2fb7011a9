"""The longest time without a token: known answers, and an engine that is stopped in a cell."""

import os
import signal
import time
from pathlib import Path

import numpy as np
import psutil
import pytest

from connector_tax.config import ROOT
from connector_tax.files import read_json, read_jsonl, write_json
from connector_tax.provenance.archive import unpack
from connector_tax.report.series import LEAST_S, Silence, longest_silence_s, silence
from tests.study.driving import launch_folder, start_driver, write_study
from tests.workflow.harness import of_this_study


@pytest.mark.parametrize(
    ("lives", "tokens", "longest"),
    [
        ([(0, 10)], [2, 3, 10], 7),  # to the last token
        ([(0, 4), (9, 12)], [1, 4, 10, 12], 3),  # nobody waits from 4 to 9
        ([(0, 12), (5, 12)], [1, 12], 11),  # another's arrival does not end it
        ([(0, 7), (1, 12)], [1, 12], 11),  # nor does another's failure
        ([(0, 5), (9, 12)], [1, 10, 12], 4),  # one that fails, and then nobody
        ([(0, 12)], [], 12),
        ([(-9, 3)], [3], 3),  # from the end of the warm-up on
    ],
)
def test_the_longest_silence(
    lives: list[tuple[int, int]], tokens: list[int], longest: float
) -> None:
    scaled = [(a * 10**9, b * 10**9) for a, b in lives]
    assert longest_silence_s(scaled, np.array(tokens, float) * 1e9, 0) == longest


def silence_of(cell: Path) -> Silence:
    (requests,) = cell.glob("requests_*")
    (steps,) = cell.glob("engine_step_*")
    (record,) = cell.glob("cell_*")
    busy = [s["t_ns"] for s in read_jsonl(steps) if s["process"] == "scheduler"]
    found = silence(requests, np.array(busy, float), read_json(record)["window"])
    assert found is not None
    return found


def test_an_engine_that_is_stopped_in_a_cell_is_flagged(tmp_path: Path) -> None:
    study_file = write_study(tmp_path / "results" / "tiny")
    folder = launch_folder(study_file)
    study = read_json(study_file)
    study["config"]["cell"] |= {"floor_s": 2.0}
    write_json(study_file, study)
    driver = start_driver(study_file)
    engine = None
    while engine is None and driver.poll() is None:
        found = (p for p in of_this_study(folder) if "connector_tax.engine" in p.cmdline())
        engine = next(found, None)
    assert isinstance(engine, psutil.Process)
    while not any(path.stat().st_size for path in folder.glob("r20.partial/metrics_*")):
        assert driver.poll() is None
        time.sleep(0.005)
    os.kill(engine.pid, signal.SIGSTOP)
    # How long it stands still is what is measured.
    time.sleep(2 * LEAST_S)
    os.kill(engine.pid, signal.SIGCONT)
    assert driver.wait(timeout=60) == 0
    assert read_json(folder / "r20" / "cell_A_r20.json")["valid"]
    stopped, undisturbed = (silence_of(folder / cell) for cell in ("r20", "r40"))
    assert stopped.flagged
    assert stopped.longest_s >= LEAST_S
    assert not undisturbed.flagged


@pytest.mark.long
@pytest.mark.parametrize("name", ["default", "vllm-cpu"])
def test_no_cell_of_the_shipped_archives_comes_near_the_bound(tmp_path: Path, name: str) -> None:
    """What LEAST_S is derived from."""
    unpack(ROOT / "results" / "archive" / f"{name}.tar.zst", tmp_path / name)
    records = [
        path
        for path in tmp_path.glob("*/runs/*/block*/*/*/cell_*.json")
        if not path.parent.suffix.startswith(".void") and read_json(path)["valid"]
    ]
    assert len(records) > 100
    found = {path: silence_of(path.parent).longest_s for path in records}
    assert max(found.values()) < LEAST_S / 3
    knees = read_json(tmp_path / name / "reference_rates.json")["saturation_rate_rps"]
    served = []
    for path, longest_s in found.items():
        cell = read_json(path)
        knee = knees[cell["configuration"]]
        if knee is None or cell["schedule"]["rate_rps"] < knee:
            served.append(longest_s)
    assert max(served) < LEAST_S / 9
