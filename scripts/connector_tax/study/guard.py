"""Nothing outlives its owner: parent watch, leftover processes.

A killed Snakemake leaves its jobs running, so a driver watches the Snakemake process named in
CONNECTOR_TAX_PARENT_PID; its children ask the kernel to die with it (linux.die_with_parent); and
what a SIGKILL of the whole tree still leaves behind is recognised by an environment variable.
"""

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
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import psutil

from connector_tax.linux import WARNING
from connector_tax.machine import boot_id

PARENT_VARIABLE = "CONNECTOR_TAX_PARENT_PID"
LAUNCH_VARIABLE = "CONNECTOR_TAX_LAUNCH"
BLOCK_MODULE = "connector_tax.study.block"
# Writing one file takes seconds at most.
OTHERS_TEMPORARY_S = 3600
# What `watch_parent` was given: the last is called.
_on_death: list[Callable[[], None]] = []


@dataclass(frozen=True, slots=True)
class ProcessName:
    """A process that its pid alone does not name: of which machine, container and lifetime.

    Attributes:
        where: boot id of the machine and inode of its PID namespace.
        started: its start time, in clock ticks since the boot.
    """

    pid: int
    where: str
    started: int

    @classmethod
    def of(cls, pid: int) -> "ProcessName":
        """The running process `pid`.

        Raises:
            ProcessLookupError: there is none, or it has ended and nobody waited for it, as where a
                container's first process waits for none.
        """
        try:
            stat = Path(f"/proc/{pid}/stat").read_text(errors="replace")
        except FileNotFoundError:
            raise ProcessLookupError(pid) from None
        fields = stat.rpartition(")")[2].split()
        if fields[0] in ("Z", "X"):
            raise ProcessLookupError(pid)
        return cls(pid, _where(), int(fields[19]))

    @classmethod
    def parse(cls, text: str) -> "ProcessName":
        """The process that `str` wrote.

        Raises:
            SystemExit: it is none; says what is allowed.
        """
        match = re.fullmatch(r"(\d+):(\S+):(\d+)", text)
        if match is None:
            raise SystemExit(
                f"{PARENT_VARIABLE}: found {text!r}; allowed: what Snakemake's start sets it to. "
                "Unset it to run by hand."
            )
        return cls(int(match[1]), match[2], int(match[3]))

    def __str__(self) -> str:
        return f"{self.pid}:{self.where}:{self.started}"

    def is_here(self) -> bool:
        """Whether it is of this boot of this machine, and of this container."""
        return self.where == _where()

    def runs(self) -> bool:
        """Whether it still runs; for a process that `is_here` only."""
        try:
            return ProcessName.of(self.pid) == self
        except ProcessLookupError:
            return False


def _where() -> str:
    return f"{boot_id()}/{Path('/proc/self/ns/pid').stat().st_ino}"


def set_job_environment(sources: str | None) -> None:
    """Make the jobs of this process (Snakemake) run its interpreter, and die with it.

    One that is itself the job of a running Snakemake keeps that as the owner of its jobs.

    Args:
        sources: where the jobs find this package; None: it is installed.
    """
    first = {"PATH": str(Path(sys.executable).parent), "PYTHONPATH": sources}
    for name, folder in first.items():
        if folder is not None:
            os.environ[name] = os.pathsep.join(filter(None, [folder, os.environ.get(name)]))
    named = os.environ.get(PARENT_VARIABLE)
    owner = ProcessName.parse(named) if named else None
    if owner is None or not owner.is_here() or not owner.runs():
        os.environ[PARENT_VARIABLE] = str(ProcessName.of(os.getpid()))


def pass_warnings_on() -> None:
    """Have a WARNING to this process (Snakemake) reach the drivers of blocks that it runs.

    Snakemake itself would end by it, and its jobs with it. Slurm sends it to all processes of a job
    or to the first alone, which is Snakemake.
    """
    signal.signal(WARNING, lambda *_: _warn_blocks())


def _warn_blocks() -> None:
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.Error):
            if BLOCK_MODULE in process.cmdline():
                process.send_signal(WARNING)


def watch_parent(on_death: Callable[[], None], say: Callable[[str], object]) -> None:
    """Call `on_death` from a thread as soon as the process in CONNECTOR_TAX_PARENT_PID is gone.

    Without the variable (a driver started by hand) nothing is watched, nor where it names a
    process of another machine or container, which nobody can watch from here.

    One thread watches for the whole process: a later call's `on_death` takes the place of the
    earlier one's, whose server has been stopped.

    Args:
        on_death: must not return.
        say: is told why nothing is watched, or that the process was gone from the start.
    """
    named = os.environ.get(PARENT_VARIABLE)
    if named is None:
        return
    parent = ProcessName.parse(named)
    if not parent.is_here():
        say(f"{PARENT_VARIABLE} names a process of another machine or container: not watched")
        return
    _on_death.append(on_death)
    if len(_on_death) > 1:
        return
    try:
        descriptor = os.pidfd_open(parent.pid)
    except ProcessLookupError:
        descriptor = -1
    # Looked at when it can no longer become another's pid unnoticed.
    if not parent.runs():
        say(f"{PARENT_VARIABLE} names process {parent.pid}, which is gone; unset it to run by hand")
        on_death()

    def wait() -> None:
        select.select([descriptor], [], [])
        _on_death[-1]()

    threading.Thread(target=wait, name="parent-watch", daemon=True).start()


def leftovers(folder: Path) -> list[psutil.Process]:
    """Running processes that were started for a launch in or below `folder`."""
    prefix = str(folder.resolve())
    matching = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            launch = process.environ().get(LAUNCH_VARIABLE, "")
            if launch == prefix or launch.startswith(prefix + os.sep):
                matching.append(process)
    return [process for process in matching if process.pid != os.getpid()]


def kill_leftovers(folder: Path) -> int:
    """SIGKILL what a killed run left of the launches below `folder`; how many there were."""
    processes = leftovers(folder)
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
    psutil.wait_procs(processes, timeout=10)
    return len(processes)


def temporary_folder(launch_folder: Path) -> Path:
    """A launch's server's own temporary folder; short, since Unix sockets lie in it."""
    name = hashlib.sha256(os.fsencode(launch_folder.resolve())).hexdigest()[:12]
    return Path(tempfile.gettempdir()) / f"connector-tax-{os.getuid()}-{name}"


def remove_temporary_folder(launch_folder: Path) -> None:
    """Delete what a server of this launch has left in its temporary folder, and the folder."""
    folder = temporary_folder(launch_folder)
    if folder.is_dir() and not folder.is_symlink():
        shutil.rmtree(folder)


def remove_temporaries(folder: Path) -> int:
    """Delete what killed writes left below `folder` (files.write_bytes); how many there were.

    A process of this machine that still runs is not done yet; nor may one of another machine be.
    """
    left = [path for path in folder.rglob(".*.tmp") if path.is_file() and _is_left(path)]
    for path in left:
        path.unlink(missing_ok=True)
    return len(left)


def _is_left(temporary: Path) -> bool:
    writer = re.fullmatch(r"\..*\.(\d+)@(.*)\.tmp", temporary.name)
    if writer is not None and writer[2] == platform.node():
        return not psutil.pid_exists(int(writer[1]))
    with contextlib.suppress(FileNotFoundError):
        return time.time() - temporary.stat().st_mtime > OTHERS_TEMPORARY_S
    return False
