"""Test a launch with a taken port, a dying server, dead /metrics, or a full or read-only disk."""

import os
import subprocess
import time
from collections.abc import Callable, Iterator
from datetime import datetime, timedelta, tzinfo
from pathlib import Path

import httpx
import psutil
import pytest
from prometheus_client.parser import text_string_to_metric_families

from connector_tax.config import ROOT
from connector_tax.files import read_json, sha256_file, write_json
from connector_tax.study import guard, launch
from connector_tax.study.server import LOGS
from tests.study.driving import (
    arguments,
    drive,
    failed_index_of,
    index_of,
    launch_folder,
    start_driver,
    write_study,
)
from tests.workflow.harness import finished, server_of, wait_for

pytestmark = pytest.mark.workflow


def generated_tokens(url: str) -> float:
    """Return how many tokens a server has generated, by its metrics page."""
    families = text_string_to_metric_families(httpx.get(url).text)
    (family,) = (f for f in families if f.name == "vllm:generation_tokens")
    return sum(s.value for s in family.samples if s.name.endswith("_total"))


# ---- a server that dies


def starting(study_file: Path) -> bool:
    """Return whether launch.sh has become the engine."""
    server = server_of(launch_folder(study_file))
    return server is not None and "connector_tax.engine" in server.cmdline()


def in_first_cell(study_file: Path) -> bool:
    return any(launch_folder(study_file).glob("*.partial/metrics_*"))


def after_first_cell(study_file: Path) -> bool:
    return any(launch_folder(study_file).glob("r??/cell_*.json"))


@pytest.mark.parametrize("stage", [starting, in_first_cell, after_first_cell])
def test_a_server_that_dies_ends_its_launch_and_the_next_run_completes_it(
    study_file: Path, stage: Callable[[Path], bool]
) -> None:
    driver = start_driver(study_file)
    wait_for(lambda: stage(study_file), driver)
    kept = finished(study_file.parent)
    engine = server_of(launch_folder(study_file))
    assert engine is not None
    engine.kill()
    output, _ = driver.communicate(timeout=60)
    # Plain's: without it there is nothing to compare with, and the run ends.
    assert driver.returncode == 1, output
    index = failed_index_of(study_file)
    assert index["status"] == "failed"
    assert "the server ended with status -9" in index["reason"]
    assert "missing" in {entry["status"] for entry in index["cells"]}
    assert not list(launch_folder(study_file).glob("*.partial/cell_*"))
    assert kept.items() <= finished(study_file.parent).items()

    again = drive(study_file)
    assert again.returncode == 0, again.stdout
    assert index_of(study_file)["status"] == "done"
    assert kept.items() <= finished(study_file.parent).items()
    assert not list(launch_folder(study_file).glob("*.partial"))


def test_launch_ends_after_the_load_generator_lost_a_worker(study_file: Path) -> None:
    driver = start_driver(study_file)
    wait_for(lambda: in_first_cell(study_file), driver)
    # Before the cell's first request the worker would be missed, not lost.
    server = server_of(launch_folder(study_file))
    assert server is not None
    (url,) = (
        f"http://127.0.0.1:{connection.laddr.port}/metrics"
        for connection in server.net_connections("tcp")
        if connection.status == psutil.CONN_LISTEN
    )
    wait_for(lambda: generated_tokens(url) > 0, driver)
    children = psutil.Process(driver.pid).children(recursive=True)
    (worker,) = (p for p in children if "connector_tax.loadgen.worker" in " ".join(p.cmdline()))
    worker.kill()
    output, _ = driver.communicate(timeout=60)
    assert driver.returncode == 1, output
    index = failed_index_of(study_file)
    assert index["status"] == "failed"
    assert "a worker of the load generator died in cell r20 (kept as r20.void1)" in index["reason"]
    assert "rerun the same command to measure the missing cells" in index["reason"]
    assert {entry["status"] for entry in index["cells"]} == {"missing"}
    aside = read_json(launch_folder(study_file) / "r20.void1" / "cell_A_r20.json")
    reasons = " ".join(aside["void_reasons"])
    assert "workers of the load generator died: workers_died 1, allowed 0" in reasons
    assert "the window was cut short, or is longer than its cap: window_s" in reasons


def test_the_logs_of_a_killed_attempt_name_no_path_of_the_machine(tmp_path: Path) -> None:
    study_file = write_study(tmp_path / "results" / "tiny", [{"kind": "refuse_start"}])
    folder = launch_folder(study_file)
    folder.mkdir(parents=True)
    # Files that a killed driver leaves.
    write_json(folder / "attempts.json", [{"attempt": 1, "started_utc": "x", "ended_utc": None}])
    for name in (*LOGS, "lmcache_server.log"):
        (folder / name).write_bytes(b"\xff loaded " + os.fsencode(ROOT) + b"/scripts\n")
    assert launch.main(arguments(study_file)) == 1
    hidden = b"\xff loaded {root}/scripts\n"
    for name in ("vllm_stdout.attempt1.log", "vllm_stderr.attempt1.log", "lmcache_server.log"):
        assert (folder / name).read_bytes() == hidden


def test_dead_metrics_page_voids_only_its_cell(tmp_path: Path) -> None:
    dead = [{"kind": "malformed_metrics", "at": list(range(1, 500))}]
    study_file = write_study(tmp_path / "results" / "tiny", dead)
    done = drive(study_file)
    assert done.returncode == 0, done.stdout
    index = index_of(study_file)
    assert index["status"] == "done"
    for entry in index["cells"]:
        assert entry["status"] == "void"
        assert "/metrics was not read inside the window, or a scrape failed" in entry["reason"]
        folder = launch_folder(study_file) / entry["cell"]
        assert read_json(next(folder.glob("cell_*.json")))["counts"]["ok"] > 0
        assert folder.with_name(f"{entry['cell']}.void1").is_dir()


# ---- disks


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """Yield a file system of 400 kB; needs root."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=400k,mode=0700", "tmpfs", str(folder)]
    if subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("mounting a tmpfs needs root")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


def remount(folder: Path, option: str) -> None:
    subprocess.run(["mount", "-o", f"remount,{option}", str(folder)], check=True)


def test_full_disk_is_reported_and_the_next_run_completes(small_disk: Path) -> None:
    study_file = write_study(small_disk / "results" / "tiny")
    filler = small_disk / "filler"
    free = os.statvfs(small_disk).f_bavail * os.statvfs(small_disk).f_bsize
    filler.write_bytes(bytes(max(0, free - 100_000)))
    full = drive(study_file)
    assert "No space left on device" in full.stdout
    assert "Traceback" not in full.stdout
    # Either may fail first: the driver, which then leaves no index, or the engine's log, which
    # fails the launch.
    if full.returncode == 0:
        failed = index_of(study_file)
        assert failed["status"] == "failed"
        assert "No space left on device" in failed["reason"]
    else:
        assert not (launch_folder(study_file) / "index.json").exists()
    assert server_of(launch_folder(study_file)) is None

    filler.unlink()
    remount(small_disk, "size=20m")
    again = drive(study_file)
    assert again.returncode == 0, again.stdout
    index = index_of(study_file)
    assert index["status"] == "done"
    for entry in index["cells"]:
        for name, digest in entry["files"].items():
            assert sha256_file(launch_folder(study_file) / entry["cell"] / name) == digest
    assert not list(small_disk.rglob("*.partial"))


def test_read_only_results_folder_is_reported(small_disk: Path) -> None:
    study_file = write_study(small_disk / "results" / "tiny")
    remount(small_disk, "ro")
    done = drive(study_file)
    remount(small_disk, "rw")
    assert done.returncode != 0
    assert "Read-only file system" in done.stdout
    assert str(small_disk) in done.stdout
    assert "Traceback" not in done.stdout
    assert server_of(launch_folder(study_file)) is None


# ---- the wall clock


class Stepping(datetime):
    """A wall clock that is set an hour back or two hours ahead at every reading."""

    steps = 0

    @classmethod
    def now(cls, tz: tzinfo | None = None) -> "Stepping":
        cls.steps += 1
        shift = timedelta(hours=-1 if cls.steps % 2 else 2)
        shifted = datetime.now(tz) + shift
        return cls.fromtimestamp(shifted.timestamp(), tz)


def test_a_step_of_the_wall_clock_changes_no_measurement(
    study_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Shift every wall-clock reading of driver and cell; durations use CLOCK_MONOTONIC."""
    monkeypatch.setattr(guard, "datetime", Stepping)
    begun = time.monotonic()
    assert launch.main(arguments(study_file)) == 0
    spent = time.monotonic() - begun
    assert Stepping.steps > 3
    index = index_of(study_file)
    assert index["status"] == "done"
    assert 0 < index["timing"]["wall_s"] <= spent
    for entry in index["cells"]:
        record = read_json(next((launch_folder(study_file) / entry["cell"]).glob("cell_*.json")))
        window = record["window"]
        assert window["t_stop_ns"] - window["t_warmup_end_ns"] < 60e9
        assert record["counts"]["ok"] == record["counts"]["planned"]
