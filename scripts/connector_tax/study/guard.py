"""Nothing outlives its owner: parent watch, leftover processes, one launch per device.

A killed Snakemake leaves its jobs running, so a driver watches the Snakemake process named in
CONNECTOR_TAX_PARENT_PID; its children ask the kernel to die with it (linux.die_with_parent); and
what a SIGKILL of the whole tree still leaves behind is recognised by an environment variable.
"""

import contextlib
import fcntl
import os
import select
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil

PARENT_VARIABLE = "CONNECTOR_TAX_PARENT_PID"
LAUNCH_VARIABLE = "CONNECTOR_TAX_LAUNCH"


class DeviceBusyError(Exception):
    """Another launch holds the device; the text names the holder."""


def own_jobs() -> None:
    """Make the jobs of this process (Snakemake) run its interpreter, and die with it."""
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    os.environ.update({"PATH": path})
    os.environ.setdefault(PARENT_VARIABLE, str(os.getpid()))


def watch_parent(on_death: Callable[[], None]) -> None:
    """Call `on_death` from a thread as soon as the process in CONNECTOR_TAX_PARENT_PID is gone.

    Without the variable (a driver started by hand) nothing is watched.
    """
    value = os.environ.get(PARENT_VARIABLE)
    if value is None:
        return
    try:
        descriptor = os.pidfd_open(int(value))
    except ProcessLookupError:
        on_death()
        return

    def wait() -> None:
        select.select([descriptor], [], [])
        on_death()

    threading.Thread(target=wait, name="parent-watch", daemon=True).start()


def leftovers(folder: Path) -> list[psutil.Process]:
    """Running processes that were started for a launch in or below `folder`."""
    prefix = str(folder.resolve())
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            launch = process.environ().get(LAUNCH_VARIABLE, "")
            if launch == prefix or launch.startswith(prefix + os.sep):
                found.append(process)
    return [process for process in found if process.pid != os.getpid()]


def kill_leftovers(folder: Path) -> int:
    """SIGKILL what a killed run left of the launches below `folder`; how many there were."""
    processes = leftovers(folder)
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
    psutil.wait_procs(processes, timeout=10)
    return len(processes)


def remove_temporaries(folder: Path) -> int:
    """Delete what a killed write left below `folder` (files.write_bytes); how many there were."""
    left = [path for path in folder.rglob(".*.tmp") if path.is_file()]
    for path in left:
        path.unlink(missing_ok=True)
    return len(left)


@contextlib.contextmanager
def device_lock(device: str, holder: str, wait_s: float = 10.0) -> Iterator[None]:
    """Hold the device for one launch; the kernel releases it however this process ends.

    Args:
        device: the name in the configuration (`server.device`).
        holder: what to tell another study that finds the device taken.
        wait_s: how long a driver that is just going away is waited for.

    Raises:
        DeviceBusyError: the device is still taken after `wait_s`.
    """
    folder = Path(tempfile.gettempdir()) / f"connector-tax-{os.getuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    if folder.stat().st_uid != os.getuid():
        raise DeviceBusyError(f"{folder}: belongs to another user; allowed: a folder of your own")
    path = folder / f"{device}.lock"
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
    try:
        deadline = time.monotonic() + wait_s
        while True:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline:
                    other = os.pread(descriptor, 500, 0).decode(errors="replace") or "unknown"
                    raise DeviceBusyError(
                        f"device {device!r} is in use by another launch ({other}); two launches on "
                        "one device would measure each other. Wait for it, or give this study "
                        "another `server.device`."
                    ) from None
                time.sleep(0.05)
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, holder.encode(), 0)
        yield
    finally:
        os.close(descriptor)
