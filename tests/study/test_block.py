"""Test a block's driver: a warning signal ends it after its current cell, and no cell is lost."""

import contextlib
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from connector_tax.config import load_yaml
from connector_tax.files import read_json, write_json
from connector_tax.study.block import end_s
from connector_tax.study.design import resolve
from tests.study.driving import write_study
from tests.workflow.harness import TINY, wait_for

pytestmark = pytest.mark.long
# Stands in for Snakemake in a job: it forwards a warning to the blocks below it.
PASS_ON = """
import subprocess, sys
from connector_tax.study.guard import pass_warnings_on
pass_warnings_on()
sys.exit(subprocess.run(sys.argv[1:]).returncode)
"""


def start(study_file: Path, *prefix: str) -> subprocess.Popen[bytes]:
    """Start the driver of block 0's Phase A in its own session."""
    block = [sys.executable, "-m", "connector_tax.study.block", "--study", str(study_file)]
    block += ["--block", "0", "--phase", "A", "--logs", str(study_file.parent / "logs")]
    return subprocess.Popen([*prefix, *block], stderr=subprocess.DEVNULL, start_new_session=True)


def measuring(study_file: Path) -> list[Path]:
    """Return the cells that are being measured."""
    return list(study_file.parent.glob("runs/*/block0/A/*.partial/metrics_*"))


def cells(study_file: Path) -> dict[str, int]:
    """Return every finished cell and its modification time."""
    paths = study_file.parent.glob("runs/*/block0/A/r[0-9]*/cell_*.json")
    return {str(p.parent): p.stat().st_mtime_ns for p in paths if not p.parent.suffix}


def attempts(study_file: Path) -> Iterator[dict[str, Any]]:
    """Yield every start of a server."""
    for path in study_file.parent.glob("runs/*/block0/A/attempts.json"):
        yield from read_json(path)


def all_of(process: subprocess.Popen[bytes]) -> list[psutil.Process]:
    """Return all processes of a job; Slurm without control groups signals them all."""
    return [psutil.Process(process.pid), *psutil.Process(process.pid).children(recursive=True)]


@pytest.mark.parametrize(
    ("reached", "number"),
    [
        ("block", signal.SIGTERM),
        ("block", signal.SIGUSR1),
        ("snakemake", signal.SIGUSR1),
        ("all", signal.SIGUSR1),
    ],
)
def test_block_ends_after_its_cell_on_a_warning_signal_and_resumes(
    tmp_path: Path, reached: str, number: signal.Signals
) -> None:
    study_file = write_study(tmp_path)
    process = start(study_file, *([] if reached == "block" else [sys.executable, "-c", PASS_ON]))
    wait_for(lambda: bool(measuring(study_file)), process)
    measured = measuring(study_file)[0].parent
    for one in all_of(process) if reached == "all" else all_of(process)[:1]:
        with contextlib.suppress(psutil.NoSuchProcess):
            one.send_signal(number)
    assert process.wait(timeout=60) == 128 + signal.SIGTERM
    before = cells(study_file)
    assert str(measured.with_suffix("")) in before
    assert [attempt["stopped"] for attempt in attempts(study_file)] == ["TERM"]
    assert not list(tmp_path.glob("runs/*/block0/A/*.partial"))
    assert not list(tmp_path.glob("runs/*/block0/A/index.json"))
    assert start(study_file).wait(timeout=120) == 0
    after = cells(study_file)
    assert before.items() <= after.items()
    # plain, plain_2 and noop_connector at two rates.
    assert len(after) == 6


def test_warning_signal_in_the_last_cell_prevents_further_launches(tmp_path: Path) -> None:
    study_file = write_study(tmp_path)
    study = read_json(study_file)
    study["cells"]["A"] = study["cells"]["A"][:1]
    study["config"]["cell"] |= {"floor_s": 4, "cap_s": 8}
    write_json(study_file, study)
    process = start(study_file)
    wait_for(lambda: bool(measuring(study_file)), process)
    process.send_signal(signal.SIGUSR1)
    assert process.wait(timeout=60) == 128 + signal.SIGTERM
    assert len(cells(study_file)) == len(list(attempts(study_file))) == 1


def test_warning_signal_leaves_time_for_the_longest_cell_and_the_server_stop() -> None:
    config = resolve(load_yaml(TINY), "tiny.yaml")["config"]
    cell, server = config["cell"], config["server"]
    longest = cell["warmup_s"] + cell["cap_s"] + cell["drain_s"]
    assert end_s(config) >= longest + server["stop_grace_s"] + server["release_s"]
