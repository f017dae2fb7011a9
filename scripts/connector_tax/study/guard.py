"""Ensure that processes end with their owner, and that each launch has only one driver.

A killed Snakemake leaves its jobs running, so a driver watches the Snakemake process named in
CONNECTOR_TAX_PARENT_PID. Its children die with it (linux.die_with_parent), and a guardian ends the
rest (study.guardian). Processes that survive a SIGKILL of all of these are recognised by their
environment and ended by the next launch of the study.

A scheduler or a second `snakemake` can start a driver while an earlier one still measures on
another machine, where no lock of this machine reaches. So a file names the driver of a launch, and
the driver touches it every HEARTBEAT_S seconds. A driver on this machine is looked up in the
process table; one on another machine counts as alive while its file is being touched. The touches
are observed, since the clocks of two machines may differ.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import platform
import re
import select
import shutil
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

import psutil

from connector_tax.artifacts import paths
from connector_tax.artifacts.names import Launch
from connector_tax.artifacts.record_reader import read_record
from connector_tax.files import TEMPORARY, ArtifactError, write_new_json
from connector_tax.linux import WARNING
from connector_tax.machine import boot_id, machine_alias
from connector_tax.study import guardian
from connector_tax.study.device import JOB_VARIABLE, DeviceError
from connector_tax.study.guardian import containers_of, remove_container, started_for
from connector_tax.study.processes import stat_of

if TYPE_CHECKING:
    from connector_tax.artifacts.launch_files import OwnerRecord

# ---- processes

PARENT_VARIABLE = "CONNECTOR_TAX_PARENT_PID"
KILLED_S = 10.0
BLOCK_MODULE = "connector_tax.study.block"
# Writing one file takes seconds at most.
OTHERS_TEMPORARY_S = 3600


def process_name(pid: int) -> str:
    """Return a name of process `pid` that is unique across machines: pid, boot, namespace, start.

    Raises:
        ProcessLookupError: the process does not exist, or is a zombie, as in a container whose
            first process does not reap children.
    """
    stat = stat_of(pid)
    if stat is None or stat.is_zombie:
        raise ProcessLookupError(pid)
    return f"{pid}:{_where()}:{stat.started}"


def _where() -> str:
    return f"{boot_id()}/{Path('/proc/self/ns/pid').stat().st_ino}"


def _is_here(process: str) -> bool:
    """Return whether the process belongs to this machine's current boot and to this container."""
    return f":{_where()}:" in process


def _runs(process: str) -> bool:
    """Return whether a process of this machine and container (see `_is_here`) still runs."""
    try:
        return process_name(int(process.partition(":")[0])) == process
    except ProcessLookupError:
        return False


def _named_parent() -> str | None:
    named = os.environ.get(PARENT_VARIABLE)
    if named and re.fullmatch(r"\d+:\S+:\d+", named) is None:
        raise SystemExit(
            f"{PARENT_VARIABLE}: found {named!r}; allowed: the process name that Snakemake's start "
            "sets. Unset it to run by hand."
        )
    return named or None


def utc() -> str:
    """Return the current UTC time in ISO 8601, to the millisecond."""
    return datetime.now(UTC).isoformat(timespec="milliseconds")


def set_job_environment(sources: str | None) -> None:
    """Set the variables that make Snakemake's jobs use this interpreter and die with Snakemake.

    If this process is itself a job of a running Snakemake, that Snakemake stays the jobs' owner.

    Args:
        sources: the folder from which the jobs import this package; None if it is installed.
    """
    first = {"PATH": str(Path(sys.executable).parent), "PYTHONPATH": sources}
    for name, folder in first.items():
        if folder is not None:
            os.environ[name] = os.pathsep.join(filter(None, [folder, os.environ.get(name)]))
    owner = _named_parent()
    if owner is None or not _is_here(owner) or not _runs(owner):
        os.environ[PARENT_VARIABLE] = process_name(os.getpid())


def pass_warnings_on() -> None:
    """Forward the signal WARNING from this process (Snakemake) to the block drivers that it runs.

    By default Snakemake and its jobs would die of the signal. Slurm sends it to all processes of a
    job or only to the first, which is Snakemake.
    """
    signal.signal(WARNING, lambda *_: _warn_blocks())


def _warn_blocks() -> None:
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.Error):
            if BLOCK_MODULE in process.cmdline():
                process.send_signal(WARNING)


def watch_parent(on_death: Callable[[], None], say: Callable[[str], object]) -> None:
    """Call `on_death` from a thread as soon as the process in CONNECTOR_TAX_PARENT_PID has ended.

    Nothing is watched without the variable (a driver started by hand), or if it names a process of
    another machine or container, which cannot be watched from here.

    Args:
        on_death: must not return if the process had already ended.
        say: receives the reason why nothing is watched, or that the process had already ended.
    """
    parent = _named_parent()
    if parent is None:
        return
    if not _is_here(parent):
        say(f"{PARENT_VARIABLE} names a process of another machine or container: not watched")
        return
    pid = int(parent.partition(":")[0])
    try:
        descriptor = os.pidfd_open(pid)
    except ProcessLookupError:
        descriptor = -1
    # Checked after opening: from now on the pid cannot be reused unnoticed.
    if not _runs(parent):
        say(f"{PARENT_VARIABLE} names process {pid}, which has ended; unset it to run by hand")
        on_death()

    def wait() -> None:
        select.select([descriptor], [], [])
        on_death()

    threading.Thread(target=wait, name="parent-watch", daemon=True).start()


def end_with_parent(say: Callable[[str], object]) -> None:
    """Kill this process and its descendants as soon as Snakemake has ended (see `watch_parent`)."""
    watch_parent(_end_at_once, say)


@contextlib.contextmanager
def ended_with_parent(say: Callable[[str], object]) -> Iterator[None]:
    """Kill this process and its descendants if Snakemake ends while the `with` block runs."""
    left = threading.Event()

    def end() -> None:
        if not left.is_set():
            _end_at_once()

    watch_parent(end, say)
    try:
        yield
    finally:
        left.set()


def _end_at_once() -> None:
    # Stopped first: a running process could start another that would be missed.
    stopped: set[psutil.Process] = set()
    while children := _below() - stopped:
        for process in children:
            with contextlib.suppress(psutil.Error):
                process.suspend()
        stopped |= children
    # Otherwise the main thread, whose child has ended, could end this process before all are
    # killed.
    sys.setswitchinterval(60)
    for process in stopped:
        with contextlib.suppress(ProcessLookupError):
            os.kill(process.pid, signal.SIGKILL)
    os._exit(1)


def _below() -> set[psutil.Process]:
    """Return all descendants except guardians, which still have to end other processes."""
    found = set()
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.Error):
            if guardian.__file__ not in process.cmdline():
                found.add(process)
    return found


class LeftoverError(DeviceError):
    """A process of an earlier launch does not end; the text names the process."""


def kill_started(folder: Path) -> int:
    """Kill all processes of launches in or below `folder`; return their number.

    Raises:
        LeftoverError: one of them does not end.
    """
    for path, _ in containers_of(folder):
        remove_container(path)
    return _kill(pid for pid, _ in started_for(folder))


def kill_leftovers(folder: Path) -> int:
    """Kill the processes of launches in or below `folder` whose drivers have ended; return their
    number.

    Raises:
        LeftoverError: one of them does not end.
    """
    for path, driver in containers_of(folder):
        if _has_ended(driver):
            remove_container(path)
    return _kill(pid for pid, driver in started_for(folder) if _has_ended(driver))


def _has_ended(driver: str) -> bool:
    """Return whether a driver on this machine has ended; False if it is in another container."""
    return _is_here(driver) and not _runs(driver)


def _kill(pids: Iterable[int]) -> int:
    processes = []
    for pid in pids:
        with contextlib.suppress(psutil.NoSuchProcess):
            processes.append(psutil.Process(pid))
    for process in processes:
        with contextlib.suppress(psutil.Error):
            process.kill()
    for process in psutil.wait_procs(processes, timeout=KILLED_S)[1]:
        with contextlib.suppress(psutil.NoSuchProcess):
            if process.status() != psutil.STATUS_ZOMBIE:
                raise LeftoverError(
                    f"process {process.pid} ({process.name()}) of an earlier launch survives "
                    "SIGKILL and would disturb the measurement, so nothing is started. If it does "
                    "not end by itself, restart the machine"
                )
    return len(processes)


def temporary_folder(launch_folder: Path) -> Path:
    """Return the temporary folder of a launch's server; its path is short, for Unix sockets."""
    name = hashlib.sha256(os.fsencode(launch_folder.resolve())).hexdigest()[:12]
    return Path(tempfile.gettempdir()) / f"connector-tax-{os.getuid()}-{name}"


def remove_temporary_folder(launch_folder: Path) -> None:
    """Delete the temporary folder of a launch's server, with its content."""
    folder = temporary_folder(launch_folder)
    if folder.is_dir() and not folder.is_symlink():
        shutil.rmtree(folder)


def remove_temporaries(folder: Path) -> None:
    """Delete temporary files below `folder` of processes killed while writing (files.write_bytes).

    Files of running processes stay, and so do files of processes on other machines.
    """
    for path in [p for p in folder.rglob(".*.tmp") if p.is_file() and _is_left(p)]:
        path.unlink(missing_ok=True)


def _is_left(temporary: Path) -> bool:
    writer = TEMPORARY.fullmatch(temporary.name)
    if writer is not None and writer[2] == platform.node():
        return not psutil.pid_exists(int(writer[1]))
    with contextlib.suppress(FileNotFoundError):
        return time.time() - temporary.stat().st_mtime > OTHERS_TEMPORARY_S
    return False


# ---- the owner of a launch

HEARTBEAT_S = 5.0
# An owner on another machine that misses this many heartbeats counts as ended.
MISSED = 6


class OwnerError(Exception):
    """Another driver measures the launch; the text says which, and what to do."""


@contextlib.contextmanager
def own_launch(study_folder: Path, launch: Launch, on_loss: Callable[[], None]) -> Iterator[None]:
    """Make this process the only driver of a launch inside the `with` block.

    Args:
        on_loss: called from a thread when another driver has taken the launch over, as after a long
            suspension; must not return.

    Raises:
        OwnerError: another driver measures it.
    """
    path = study_folder / paths.OWNERS / f"{launch.config}.block{launch.block}.{launch.phase}.json"
    owner: OwnerRecord = {
        "launch": launch.name,
        "process": process_name(os.getpid()),
        "machine": machine_alias(),
        "job": os.environ.get(JOB_VARIABLE),
        "since_utc": utc(),
    }
    while not write_new_json(path, owner):
        _remove_ended(path)
    over = threading.Event()
    beat = threading.Thread(target=_beat, args=(path, owner, over, on_loss), daemon=True)
    beat.start()
    try:
        yield
    finally:
        over.set()
        beat.join()
        # After a suspension another driver may own it.
        if _is(path, owner):
            path.unlink(missing_ok=True)


def _remove_ended(path: Path) -> None:
    """Remove the file of an owner that has ended.

    Raises:
        OwnerError: the owner still runs.
    """
    owner = _read(path)
    if owner is None:
        return
    if _lives(path, owner):
        job = f", job {owner['job']}" if owner["job"] else ""
        end = f"scancel {owner['job']}" if owner["job"] else "kill -TERM it there"
        pid = owner["process"].partition(":")[0]
        raise OwnerError(
            f"{owner['launch']} is being measured by process {pid} of {owner['machine']}{job}, "
            f"since {owner['since_utc']}. Wait for it, or end it ({end}); then rerun the same "
            f"command. This machine is {machine_alias()}."
        )
    aside = path.with_name(f".{path.name}.ended.{os.getpid()}@{platform.node()}.tmp")
    with contextlib.suppress(FileNotFoundError):
        path.rename(aside)
        if _read(aside) != owner:
            # Another driver was quicker and owns it now.
            with contextlib.suppress(FileExistsError):
                os.link(aside, path)
        aside.unlink()


def _lives(path: Path, owner: OwnerRecord) -> bool:
    if _is_here(owner["process"]) and owner["machine"] == machine_alias():
        return _runs(owner["process"])
    touched, deadline = _touched(path), time.monotonic() + MISSED * HEARTBEAT_S
    while time.monotonic() < deadline:
        time.sleep(HEARTBEAT_S / 4)
        if _touched(path) != touched:
            return True
    return False


def _touched(path: Path) -> int | None:
    """Return the file's modification time (ns) by its server's clock; opens it to bypass NFS's
    cache.
    """
    try:
        with path.open("rb") as stream:
            return os.fstat(stream.fileno()).st_mtime_ns
    except FileNotFoundError:
        return None


def _read(path: Path) -> OwnerRecord | None:
    # Imported late: Snakemake plans without msgspec.
    from connector_tax.artifacts.launch_files import OwnerRecord

    try:
        return read_record(path, OwnerRecord)
    except ArtifactError:
        if path.exists():
            raise
        return None


def _beat(
    path: Path, owner: OwnerRecord, over: threading.Event, on_loss: Callable[[], None]
) -> None:
    while not over.wait(HEARTBEAT_S):
        # A file system that fails now may work at the next heartbeat.
        with contextlib.suppress(OSError):
            if not _is(path, owner):
                on_loss()
            os.utime(path)


def _is(path: Path, owner: OwnerRecord) -> bool:
    try:
        return _read(path) == owner
    except ArtifactError:
        return False
