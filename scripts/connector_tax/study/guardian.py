"""End the remaining processes of a server when its driver ends, however the driver ends.

Its standard input is a pipe that the driver holds open. The kernel's death signal reaches only
direct children, and a process may leave its group and session. So the guardian kills every process
whose environment names the launch, until none is left, and removes the launch's container. This
module imports only the standard library, because it stays in memory beside each server.
"""

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

# Variables of a server's processes: the launch's folder, and the name of the driver.
LAUNCH_VARIABLE = "CONNECTOR_TAX_LAUNCH"
DRIVER_VARIABLE = "CONNECTOR_TAX_DRIVER"
# In a launch's folder while its container exists: the engine's command, the id, the driver's name.
CONTAINER_FILE = "container.txt"
# A process that survives SIGKILL this long is stuck in the kernel.
GIVE_UP_S, POLL_S = 60.0, 0.02


def started_for(folder: Path) -> Iterator[tuple[int, str]]:
    """Yield pid and driver ("" if unnamed) of each process of a launch in or below `folder`."""
    prefix = str(folder.resolve())
    for process in Path("/proc").glob("[0-9]*"):
        # Processes of other users cannot be read; a process may end meanwhile; a zombie has none.
        with contextlib.suppress(OSError):
            text = os.fsdecode((process / "environ").read_bytes())
            named = dict(part.partition("=")[::2] for part in text.split("\0"))
            launch = named.get(LAUNCH_VARIABLE, "")
            if launch == prefix or launch.startswith(prefix + os.sep):
                yield int(process.name), named.get(DRIVER_VARIABLE, "")


def containers_of(folder: Path) -> Iterator[tuple[Path, str]]:
    """Yield the file and the driver of each container of a launch in or below `folder`."""
    # Unlike rglob, walk passes over a folder that is removed meanwhile.
    for where, _, files in os.walk(folder):
        if CONTAINER_FILE not in files:
            continue
        path = Path(where, CONTAINER_FILE)
        with contextlib.suppress(FileNotFoundError):
            lines = path.read_text(encoding="utf-8").split("\n")
            # A file of an earlier version may be cut off.
            if len(lines) == 3:
                yield path, lines[2]


def remove_container(path: Path, timeout_s: float | None = None) -> None:
    """Remove the container that a CONTAINER_FILE names, and the file.

    Raises:
        OSError: its engine does not start.
        TimeoutExpired: its engine takes longer than `timeout_s`.
    """
    engine, container, _ = path.read_text(encoding="utf-8").split("\n")
    command = [*engine.split(), "rm", "--force", container]
    subprocess.run(command, capture_output=True, check=False, timeout=timeout_s)
    path.unlink(missing_ok=True)


def main() -> None:
    """Wait for the end of standard input, then kill the processes that a driver started in a
    folder.

    The arguments are the folder and the driver's name.
    """
    folder, own_driver = sys.argv[1:]
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1):
        signal.signal(number, signal.SIG_IGN)
    sys.stdin.buffer.read()
    for path, driver in containers_of(Path(folder)):
        if driver == own_driver:
            with contextlib.suppress(OSError, subprocess.TimeoutExpired):
                remove_container(path, GIVE_UP_S)
    deadline = time.monotonic() + GIVE_UP_S
    while time.monotonic() < deadline:
        pids = [pid for pid, driver in started_for(Path(folder)) if driver == own_driver]
        if not pids:
            break
        for pid in pids:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(POLL_S)


if __name__ == "__main__":
    main()
