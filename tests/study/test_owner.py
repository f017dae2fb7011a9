"""One driver for each launch: a second is refused while the first lives, wherever that is."""

import errno
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from connector_tax.artifacts.names import Launch
from connector_tax.files import read_json, write_json
from connector_tax.machine import machine_alias
from connector_tax.study import guard
from connector_tax.study.guard import OwnerError, ProcessName, own_launch
from tests.study.driving import drive, write_study

LAUNCH = Launch("plain", 0, "A")
ELSEWHERE = ("another machine", {"machine": "machine-b", "process": "7:boot/1:7"})
# Another container of this boot, as a second node of a scheduler may be one.
BESIDE = ("another container", {"machine": machine_alias(), "process": "7:boot/2:7"})


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(guard, "HEARTBEAT_S", 0.05)


def never() -> None:
    pytest.fail("the launch was taken over")


def owner_file(root: Path) -> Path:
    return root / "owners" / "plain.block0.A.json"


def owned_by(root: Path, **who: Any) -> Path:
    path = owner_file(root)
    write_json(path, {"launch": LAUNCH.name, "job": None, "since_utc": "then", **who})
    return path


def test_a_second_driver_on_this_machine_is_refused_and_told_who_measures(tmp_path: Path) -> None:
    told = f"plain/block0/A is being measured by process {os.getpid()} of {machine_alias()}, since"
    with own_launch(tmp_path, LAUNCH, never):
        with pytest.raises(OwnerError, match=told), own_launch(tmp_path, LAUNCH, never):
            pytest.fail("two drivers measure one launch")
        with own_launch(tmp_path, Launch("plain", 1, "A"), never):
            pass
    assert list((tmp_path / "owners").iterdir()) == []


@pytest.mark.parametrize("waited_for", [True, False])
def test_a_driver_of_this_machine_that_ended_is_no_owner(tmp_path: Path, waited_for: bool) -> None:
    ended = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    process = str(ProcessName.of(ended.pid))
    if waited_for:
        ended.communicate(b"")
    else:
        ended.kill()
        os.waitid(os.P_PID, ended.pid, os.WEXITED | os.WNOWAIT)  # it stays a zombie
    owned_by(tmp_path, machine=machine_alias(), process=process)
    with own_launch(tmp_path, LAUNCH, never):
        assert read_json(owner_file(tmp_path))["process"] == str(ProcessName.of(os.getpid()))
    ended.wait()


@pytest.fixture
def touching(tmp_path: Path) -> Iterator[None]:
    """A live owner elsewhere: all that is seen of it are its touches."""
    path, over = tmp_path / "owners" / "plain.block0.A.json", threading.Event()

    def touch() -> None:
        while not over.wait(0.02):
            if path.exists():
                os.utime(path)

    thread = threading.Thread(target=touch)
    thread.start()
    yield
    over.set()
    thread.join()


@pytest.mark.usefixtures("touching")
@pytest.mark.parametrize("who", [ELSEWHERE[1], BESIDE[1]], ids=[ELSEWHERE[0], BESIDE[0]])
def test_an_owner_elsewhere_lives_as_long_as_its_file_is_touched(
    tmp_path: Path, who: dict[str, str]
) -> None:
    path = owned_by(tmp_path, **{**who, "job": "17"})
    told = rf"process 7 of {who['machine']}, job 17.*scancel 17"
    with pytest.raises(OwnerError, match=told), own_launch(tmp_path, LAUNCH, never):
        pytest.fail("two drivers measure one launch")
    assert read_json(path)["process"] == who["process"]


@pytest.mark.parametrize("who", [ELSEWHERE[1], BESIDE[1]], ids=[ELSEWHERE[0], BESIDE[0]])
def test_an_owner_elsewhere_that_is_silent_has_ended(tmp_path: Path, who: dict[str, str]) -> None:
    owned_by(tmp_path, **who)
    with own_launch(tmp_path, LAUNCH, never):
        assert read_json(owner_file(tmp_path))["machine"] == machine_alias()


def test_a_driver_that_was_taken_for_dead_ends(tmp_path: Path) -> None:
    lost = threading.Event()
    with own_launch(tmp_path, LAUNCH, lost.set):
        owned_by(tmp_path, **ELSEWHERE[1])
        assert lost.wait(20)


def test_a_driver_that_lost_its_launch_leaves_the_file_of_the_new_owner(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(guard, "HEARTBEAT_S", 60)
    with own_launch(tmp_path, LAUNCH, never):
        theirs = owned_by(tmp_path, **ELSEWHERE[1])
    assert read_json(theirs)["machine"] == "machine-b"


def test_a_file_system_that_fails_once_does_not_end_the_heartbeat(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    beats, several = [], threading.Event()

    def utime(path: Path) -> None:
        beats.append(path)
        if len(beats) == 2:
            raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))
        if len(beats) == 4:
            several.set()

    monkeypatch.setattr(os, "utime", utime)
    with own_launch(tmp_path, LAUNCH, never):
        assert several.wait(20)


def test_the_driver_refuses_a_launch_that_is_measured_elsewhere(tmp_path: Path) -> None:
    study_file = write_study(tmp_path)
    with own_launch(study_file.parent, LAUNCH, never):
        done = drive(study_file)
    assert done.returncode == 2
    assert "plain/block0/A is being measured by process" in done.stdout
    assert not (study_file.parent / "runs").exists()
    assert list((study_file.parent / "owners").iterdir()) == []
