"""Nothing outlives its owner."""

import os
import platform
import select
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from connector_tax.study.guard import (
    LAUNCH_VARIABLE,
    OTHERS_TEMPORARY_S,
    PARENT_VARIABLE,
    ProcessName,
    kill_leftovers,
    leftovers,
    remove_temporaries,
    set_job_environment,
)


def test_a_driver_notices_the_death_of_a_parent_that_is_not_its_own() -> None:
    owner = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    code = (
        "import os, signal;"
        "from connector_tax.study.guard import watch_parent;"
        "watch_parent(lambda: os._exit(8), print);"
        # The watch of a later server takes the place of that of one that was stopped.
        "watch_parent(lambda: os._exit(7), print);"
        "print('watching', flush=True); signal.pause()"
    )
    environment = {**os.environ, PARENT_VARIABLE: str(ProcessName.of(owner.pid))}
    driver = subprocess.Popen(
        [sys.executable, "-c", code], env=environment, stdout=subprocess.PIPE, text=True
    )
    assert driver.stdout is not None
    assert driver.stdout.readline() == "watching\n"
    owner.send_signal(signal.SIGKILL)
    owner.communicate()
    assert driver.wait(timeout=20) == 7
    driver.stdout.close()


def watched(parent: str, *prefix: str) -> subprocess.CompletedProcess[str]:
    """A driver that watches `parent` and then ends by itself with status 0."""
    code = (
        "import os; from connector_tax.study.guard import watch_parent;"
        "watch_parent(lambda: os._exit(7), lambda line: print(line, flush=True))"
    )
    environment = {**os.environ, PARENT_VARIABLE: parent}
    return subprocess.run(
        [*prefix, sys.executable, "-c", code],
        env=environment, capture_output=True, text=True, timeout=60,
    )  # fmt: skip


@pytest.mark.skipif(os.geteuid() != 0, reason="making a pid namespace needs root")
def test_the_parent_of_another_pid_namespace_is_not_watched() -> None:
    # As on a node of a scheduler: the same boot, and no process of this number.
    driver = watched(str(ProcessName.of(os.getpid())), "unshare", "--pid", "--fork", "--mount-proc")
    assert driver.returncode == 0, driver.stdout + driver.stderr
    assert "names a process of another machine or container: not watched" in driver.stdout


def test_a_pid_that_now_belongs_to_another_process_is_no_parent() -> None:
    stale = replace(ProcessName.of(os.getpid()), started=1)
    driver = watched(str(stale))
    assert driver.returncode == 7
    assert f"names process {os.getpid()}, which is gone; unset it" in driver.stdout


def test_a_process_of_another_machine_or_container_is_told_and_not_watched() -> None:
    # A pid that is not here: by the pid alone the driver would end.
    foreign = replace(ProcessName.of(os.getpid()), pid=2**22 + 1, where="another-boot/1")
    driver = watched(str(foreign))
    assert driver.returncode == 0
    assert "names a process of another machine or container: not watched" in driver.stdout


def test_a_parent_that_cannot_be_read_is_refused() -> None:
    driver = watched("4711")
    assert driver.returncode == 1
    assert "found '4711'; allowed: what Snakemake's start sets it to" in driver.stderr


def test_jobs_keep_a_running_owner_and_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", os.environ["PATH"])
    mine, owner = ProcessName.of(os.getpid()), ProcessName.of(os.getppid())
    for named, kept in (
        (owner, owner),
        (replace(owner, started=1), mine),
        (replace(owner, where="another-boot/1"), mine),
    ):
        monkeypatch.setenv(PARENT_VARIABLE, str(named))
        set_job_environment(None)
        assert os.environ[PARENT_VARIABLE] == str(kept)


def test_a_temporary_file_is_deleted_when_its_writer_is_gone(tmp_path: Path) -> None:
    gone = subprocess.Popen(["true"])
    gone.wait()
    here, old = platform.node(), time.time() - OTHERS_TEMPORARY_S - 1
    kept = [f".a.x1.{os.getpid()}@{here}.tmp", f".a.x2.{gone.pid}@elsewhere.tmp", "a.tmp"]
    left = [f".a.x3.{gone.pid}@{here}.tmp", ".a.x4.1@elsewhere.tmp", ".a.x5.tmp"]
    for name in (*kept, *left):
        (tmp_path / name).write_text("half")
    for name in left[1:]:
        os.utime(tmp_path / name, (old, old))
    assert remove_temporaries(tmp_path) == len(left)
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(kept)


def test_leftovers_of_a_launch_are_found_by_their_folder_and_killed(tmp_path: Path) -> None:
    mine, other = tmp_path / "runs" / "plain", tmp_path / "runs" / "plain_2"
    started = [
        subprocess.Popen(
            [sys.executable, "-c", "print('up', flush=True); import signal; signal.pause()"],
            env={**os.environ, LAUNCH_VARIABLE: str(folder)},
            stdout=subprocess.PIPE,
            start_new_session=True,
        )
        for folder in (mine / "block0" / "A", other / "block0" / "A")
    ]
    for process in started:
        assert process.stdout is not None
        select.select([process.stdout], [], [], 20)
    try:
        assert [process.pid for process in leftovers(mine)] == [started[0].pid]
        assert kill_leftovers(mine) == 1
        assert not psutil.pid_exists(started[0].pid)
        assert psutil.Process(started[1].pid).is_running()
    finally:
        for process in started:
            process.kill()
            process.communicate()
