"""End the remaining processes of a server when its driver ends, however the driver ends.

Its standard input is a pipe that the driver holds open. The kernel's death signal reaches only
direct children, and a process may leave its group and session. So the guardian kills every process
whose environment names the launch, until none is left. This module imports only the standard
library, because it stays in memory beside each server.
"""

import contextlib
import os
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path

# Variables of a server's processes: the launch's folder, and the name of the driver.
LAUNCH_VARIABLE = "CONNECTOR_TAX_LAUNCH"
DRIVER_VARIABLE = "CONNECTOR_TAX_DRIVER"
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


def main() -> None:
    """Wait for the end of standard input, then kill the processes that a driver started in a
    folder.

    The arguments are the folder and the driver's name.
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
