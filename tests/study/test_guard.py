"""Test that processes end with their owner, and a launch has one driver on any machine."""

import errno
import os
import platform
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from connector_tax.artifacts.names import Launch
from connector_tax.files import read_json, write_json
from connector_tax.machine import machine_alias
from connector_tax.study import guard
from connector_tax.study.guard import (
    OTHERS_TEMPORARY_S,
    PARENT_VARIABLE,
    LeftoverError,
    OwnerError,
    kill_leftovers,
    kill_started,
    own_launch,
    process_name,
    remove_temporaries,
    set_job_environment,
)
from connector_tax.study.guardian import DRIVER_VARIABLE, LAUNCH_VARIABLE
from tests.study.driving import drive


def owner_and_child(code: str) -> tuple[subprocess.Popen[bytes], subprocess.Popen[str]]:
    """Start a process, and a second that runs `code` and watches the first as its parent."""
    owner = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    environment = {**os.environ, PARENT_VARIABLE: process_name(owner.pid)}
    child = subprocess.Popen(
        [sys.executable, "-c", code], env=environment, stdout=subprocess.PIPE, text=True
    )
    return owner, child


def assert_ended(gates: subprocess.Popen[str], other: int) -> None:
    """Check that the gates end with status 1, and that a process below them (a pidfd) ends."""
    assert gates.wait(timeout=20) == 1
    assert select.select([other], [], [], 20)[0]
    os.close(other)
    assert gates.stdout is not None
    gates.stdout.close()


def test_driver_ends_when_the_watched_ancestor_dies() -> None:
    code = (
        "import os, signal;"
        "from connector_tax.study.guard import watch_parent;"
        "watch_parent(lambda: os._exit(7), print);"
        "print('watching', flush=True); signal.pause()"
    )
    owner, driver = owner_and_child(code)
    assert driver.stdout is not None
    assert driver.stdout.readline() == "watching\n"
    owner.send_signal(signal.SIGKILL)
    owner.communicate()
    assert driver.wait(timeout=20) == 7
    driver.stdout.close()


def test_gates_and_their_children_end_when_snakemake_does() -> None:
    # Like a probe of vLLM's environment: a shell with a child, which gets no signal if its parent
    # ends.
    code = (
        "import subprocess; from connector_tax.study.guard import end_with_parent;"
        "end_with_parent(print); subprocess.run(['sh', '-c', 'echo $$; sleep 60; true'])"
    )
    owner, gates = owner_and_child(code)
    assert gates.stdout is not None
    child = os.pidfd_open(int(gates.stdout.readline()))
    owner.kill()
    owner.communicate()
    # The pipe closes when the last process that holds it has ended.
    assert gates.stdout.read() == ""
    assert_ended(gates, child)


def test_guardian_of_a_launch_outlives_the_gates_that_started_it(tmp_path: Path) -> None:
    # A server that is no descendant any more, as after a double fork.
    orphan = "import os, time\nif os.fork(): os._exit(0)\nos.setsid(); time.sleep(60)"
    code = (
        "import os, subprocess, sys; from connector_tax.study import guard, guardian\n"
        f"folder, name = {str(tmp_path)!r}, guard.process_name(os.getpid())\n"
        "guard.end_with_parent(print)\n"
        "ends = subprocess.Popen([sys.executable, '-I', guardian.__file__, folder, name],"
        " stdin=subprocess.PIPE)\n"
        "named = {guardian.LAUNCH_VARIABLE: folder, guardian.DRIVER_VARIABLE: name}\n"
        f"subprocess.run([sys.executable, '-c', {orphan!r}], env=os.environ | named)\n"
        "print(*(pid for pid, _ in guardian.started_for(__import__('pathlib').Path(folder))),"
        " flush=True)\n"
        "subprocess.run(['sleep', '60'])"
    )
    owner, gates = owner_and_child(code)
    assert gates.stdout is not None
    server = os.pidfd_open(int(gates.stdout.readline()))
    owner.kill()
    owner.communicate()
    assert_ended(gates, server)


def watched(parent: str, *prefix: str) -> subprocess.CompletedProcess[str]:
    """Return a driver that watches `parent` and then ends by itself with status 0."""
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
def test_parent_in_another_pid_namespace_is_not_watched() -> None:
    # Like another container on the same machine: the same boot, but no process with this pid.
    driver = watched(process_name(os.getpid()), "unshare", "--pid", "--fork", "--mount-proc")
    assert driver.returncode == 0, driver.stdout + driver.stderr
    assert "names a process of another machine or container: not watched" in driver.stdout


@pytest.mark.parametrize(
    ("named", "status", "message"),
    [
        # The pid now belongs to another process.
        ("{pid}:{where}:1", 7, "names process {pid}, which has ended; unset it"),
        # The pid does not exist here; judged by the pid alone, the driver would end.
        (f"{2**22 + 1}:another-boot/1:1", 0, "machine or container: not watched"),
        ("{pid}:no place:1", 1, "allowed: the process name that Snakemake's start sets"),
    ],
)
def test_invalid_parent_variable_is_reported(named: str, status: int, message: str) -> None:
    where = process_name(os.getpid()).split(":")[1]
    driver = watched(named.format(pid=os.getpid(), where=where))
    assert driver.returncode == status
    assert message.format(pid=os.getpid()) in driver.stdout + driver.stderr


def test_job_environment_keeps_its_owner_only_while_the_owner_runs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("PATH", os.environ["PATH"])
    mine, owner = process_name(os.getpid()), process_name(os.getppid())
    pid, where, started = owner.split(":")
    for named, kept in (
        (owner, owner),
        (f"{pid}:{where}:1", mine),
        (f"{pid}:another-boot/1:{started}", mine),
    ):
        monkeypatch.setenv(PARENT_VARIABLE, named)
        set_job_environment(None)
        assert os.environ[PARENT_VARIABLE] == kept


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
    remove_temporaries(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(kept)


@pytest.fixture
def ended_driver() -> str:
    """Return the name of a driver of this machine that has ended."""
    driver = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    name = process_name(driver.pid)
    driver.communicate(b"")
    return name


def test_processes_of_ended_drivers_are_killed_by_folder(
    tmp_path: Path, ended_driver: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    mine, other = tmp_path / "results" / "a", tmp_path / "results" / "ab"
    here = process_name(os.getpid())
    started = [
        subprocess.Popen(
            [sys.executable, "-c", "print('up', flush=True); import signal; signal.pause()"],
            env={**os.environ, LAUNCH_VARIABLE: str(folder), DRIVER_VARIABLE: driver},
            stdout=subprocess.PIPE,
            start_new_session=True,
        )
        for folder, driver in (
            (mine / "runs/plain/block0/A", ended_driver),
            (mine / "runs/plain/block1/A", here),
            (mine / "runs/plain/block2/A", "7:boot/1:7"),
            (other / "runs/plain/block0/A", ended_driver),
        )
    ]
    for process in started:
        assert process.stdout is not None
        select.select([process.stdout], [], [], 20)
    try:
        with monkeypatch.context() as patch:
            patch.setattr(psutil.Process, "kill", lambda _: None)
            patch.setattr(guard, "KILLED_S", 0.05)
            message = rf"process {started[0].pid} \(python.*\) of an earlier launch survives "
            with pytest.raises(LeftoverError, match=message):
                kill_leftovers(mine)
        assert kill_leftovers(mine) == 1
        assert [process.poll() is None for process in started] == [False, True, True, True]
        assert kill_started(mine) == 2
        assert started[3].poll() is None
    finally:
        for process in started:
            process.kill()
            process.communicate()


# ---- the owner of a launch

LAUNCH = Launch("plain", 0, "A")
ELSEWHERE = {
    "another machine": {"machine": "machine-b", "process": "7:boot/1:7"},
    # The same boot, since a scheduler may run two containers on one machine.
    "another container": {"machine": machine_alias(), "process": "7:boot/2:7"},
}


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


def test_second_driver_on_this_machine_is_refused_and_names_the_first(tmp_path: Path) -> None:
    told = f"plain/block0/A is being measured by process {os.getpid()} of {machine_alias()}, since"
    with own_launch(tmp_path, LAUNCH, never):
        with pytest.raises(OwnerError, match=told), own_launch(tmp_path, LAUNCH, never):
            pytest.fail("two drivers measure one launch")
        with own_launch(tmp_path, Launch("plain", 1, "A"), never):
            pass
    assert list((tmp_path / "owners").iterdir()) == []


@pytest.mark.parametrize("waited_for", [True, False])
def test_ended_driver_of_this_machine_is_not_the_owner(tmp_path: Path, waited_for: bool) -> None:
    ended = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    process = process_name(ended.pid)
    if waited_for:
        ended.communicate(b"")
    else:
        ended.kill()
        os.waitid(os.P_PID, ended.pid, os.WEXITED | os.WNOWAIT)  # it stays a zombie
    owned_by(tmp_path, machine=machine_alias(), process=process)
    with own_launch(tmp_path, LAUNCH, never):
        assert read_json(owner_file(tmp_path))["process"] == process_name(os.getpid())
    ended.wait()


@pytest.fixture
def touching(tmp_path: Path) -> Iterator[None]:
    """Yield a live owner on another machine, visible only by the touches of its file."""
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
@pytest.mark.parametrize("who", ELSEWHERE.values(), ids=ELSEWHERE)
def test_remote_owner_is_alive_while_its_file_is_touched(
    tmp_path: Path, who: dict[str, str]
) -> None:
    path = owned_by(tmp_path, **{**who, "job": "17"})
    told = rf"process 7 of {who['machine']}, job 17.*scancel 17"
    with pytest.raises(OwnerError, match=told), own_launch(tmp_path, LAUNCH, never):
        pytest.fail("two drivers measure one launch")
    assert read_json(path)["process"] == who["process"]


@pytest.mark.parametrize("who", ELSEWHERE.values(), ids=ELSEWHERE)
def test_remote_owner_with_an_untouched_file_has_ended(tmp_path: Path, who: dict[str, str]) -> None:
    owned_by(tmp_path, **who)
    with own_launch(tmp_path, LAUNCH, never):
        assert read_json(owner_file(tmp_path))["machine"] == machine_alias()


def test_replaced_driver_ends_and_keeps_the_new_owners_file(
    tmp_path: Path,
) -> None:
    lost = threading.Event()
    with own_launch(tmp_path, LAUNCH, lost.set):
        theirs = owned_by(tmp_path, **ELSEWHERE["another machine"])
        assert lost.wait(20)
    assert read_json(theirs)["machine"] == "machine-b"


def test_heartbeat_survives_one_file_system_error(
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


def test_the_driver_refuses_a_launch_that_is_measured_elsewhere(study_file: Path) -> None:
    with own_launch(study_file.parent, LAUNCH, never):
        done = drive(study_file)
    assert done.returncode == 2
    assert "plain/block0/A is being measured by process" in done.stdout
    assert not (study_file.parent / "runs").exists()
    assert list((study_file.parent / "owners").iterdir()) == []
