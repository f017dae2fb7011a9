"""Nothing outlives its owner, and one device serves one launch."""

import os
import select
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from connector_tax.study.guard import (
    LAUNCH_VARIABLE,
    PARENT_VARIABLE,
    DeviceBusyError,
    device_lock,
    kill_leftovers,
    leftovers,
)

HOLD = """
import sys
from connector_tax.study.guard import device_lock
with device_lock("testdevice", "the other study"):
    print("held", flush=True)
    sys.stdin.read()
"""


@pytest.fixture(autouse=True)
def private_locks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", None)


@pytest.fixture
def holder() -> Iterator[subprocess.Popen[str]]:
    process = subprocess.Popen(
        [sys.executable, "-c", HOLD], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "held\n"
    yield process
    process.kill()
    process.communicate()


@pytest.mark.usefixtures("holder")
def test_a_second_launch_on_the_device_is_refused_and_told_who_holds_it() -> None:
    with (
        pytest.raises(DeviceBusyError, match=r"'testdevice' is in use .*the other study"),
        device_lock("testdevice", "me", wait_s=0.1),
    ):
        pytest.fail("two launches hold one device")


def test_a_killed_holder_frees_the_device(holder: subprocess.Popen[str]) -> None:
    holder.kill()
    with device_lock("testdevice", "me"):
        pass


@pytest.mark.usefixtures("holder")
def test_two_devices_do_not_exclude_each_other() -> None:
    with device_lock("otherdevice", "me", wait_s=0.1):
        pass


def test_the_lock_folder_is_private(tmp_path: Path) -> None:
    with device_lock("testdevice", "me"):
        folders = list(tmp_path.glob("connector-tax-*"))
        assert [folder.stat().st_mode & 0o777 for folder in folders] == [0o700]


def test_a_driver_notices_the_death_of_a_parent_that_is_not_its_own() -> None:
    owner = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    code = (
        "import os, signal;"
        "from connector_tax.study.guard import watch_parent;"
        "watch_parent(lambda: os._exit(7));"
        "print('watching', flush=True); signal.pause()"
    )
    environment = {**os.environ, PARENT_VARIABLE: str(owner.pid)}
    driver = subprocess.Popen(
        [sys.executable, "-c", code], env=environment, stdout=subprocess.PIPE, text=True
    )
    assert driver.stdout is not None
    assert driver.stdout.readline() == "watching\n"
    owner.send_signal(signal.SIGKILL)
    owner.communicate()
    assert driver.wait(timeout=20) == 7
    driver.stdout.close()


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
