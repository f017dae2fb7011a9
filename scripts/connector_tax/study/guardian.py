"""End what is left of a server when its driver ends, whichever way that ends.

Its standard input is a pipe that the driver holds open. The kernel's death signal reaches direct
children alone, and a process may leave its group and its session; so every process that the driver
started for the launch is killed, by its environment, until none is left. This module imports the
standard library only: it stays in memory beside each server.
"""

import contextlib
import os
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path

# In the environment of a server's processes: the launch's folder; by name, who started them.
LAUNCH_VARIABLE = "CONNECTOR_TAX_LAUNCH"
DRIVER_VARIABLE = "CONNECTOR_TAX_DRIVER"
# A process that the kernel does not end within this time is in it, and will not be ended.
GIVE_UP_S, POLL_S = 60.0, 0.02


def started_for(folder: Path) -> Iterator[tuple[int, str]]:
    """Yield pid and driver ("" if unnamed) of each process started for a launch in or below
    `folder`.
    """
    prefix = str(folder.resolve())
    for process in Path("/proc").glob("[0-9]*"):
        # Others' processes cannot be read, and one may end meanwhile. A zombie has no environment.
        with contextlib.suppress(OSError):
            text = os.fsdecode((process / "environ").read_bytes())
            named = dict(part.partition("=")[::2] for part in text.split("\0"))
            launch = named.get(LAUNCH_VARIABLE, "")
            if launch == prefix or launch.startswith(prefix + os.sep):
                yield int(process.name), named.get(DRIVER_VARIABLE, "")


def main() -> None:
    """Wait for the end of standard input, then kill what a driver started for a folder.

    The folder and the driver's name are the arguments.
    """
    folder, own_driver = sys.argv[1:]
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1):
        signal.signal(number, signal.SIG_IGN)
    sys.stdin.buffer.read()
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
