"""Stand in for docker: `run -d ... COMMAND`, `inspect`, `logs --follow`, `stop`, `rm --force`.

It knows containers only in its context (`--context mine`), if a file `context` is beside it.

A container is a process with its own environment and, where this machine allows it, a control
group. Its output and its state are files beside the script.
"""

import contextlib
import os
import secrets
import signal
import subprocess
import sys
import time
from pathlib import Path

STATE = Path(__file__).with_name("containers")
GROUPS = [Path("/sys/fs/cgroup/cpuacct"), Path("/sys/fs/cgroup/memory"), Path("/sys/fs/cgroup")]


def group_folders(name: str) -> list[Path]:
    """Return the folders of a container's control groups."""
    return [root / f"stub-{name[:12]}" for root in GROUPS if (root / "cgroup.procs").exists()]


def lives(pid: int) -> bool:
    """Return whether a process has not ended."""
    with contextlib.suppress(FileNotFoundError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    return False


def end(name: str, number: int) -> None:
    """End a container with a signal, and wait for it."""
    pid = int((STATE / name).read_text())
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)
    while lives(pid):
        time.sleep(0.01)
    for folder in group_folders(name):
        with contextlib.suppress(OSError):
            folder.rmdir()


def main(command: str, *arguments: str) -> None:
    """Run one command of docker."""
    if command == "--context":
        command, arguments = arguments[1], arguments[2:]
    elif (STATE.parent / "context").exists():
        sys.exit("no such container")
    STATE.mkdir(exist_ok=True)
    name = arguments[-1]
    if command == "run":
        name = secrets.token_hex(32)
        log = (STATE / f"{name}.log").open("wb")

        def enter_group() -> None:
            for folder in group_folders(name):
                with contextlib.suppress(OSError):
                    folder.mkdir()
                    (folder / "cgroup.procs").write_text(str(os.getpid()))

        process = subprocess.Popen(
            arguments[1:], stdout=log, stderr=log, start_new_session=True,
            env={"PATH": os.environ["PATH"]}, preexec_fn=enter_group,
        )  # fmt: skip
        (STATE / name).write_text(str(process.pid))
        print(name)
    elif command == "inspect":
        pid = int((STATE / name).read_text())
        running = lives(pid)
        hidden = (STATE.parent / "hidden").exists()
        pid_text = str(pid) if running and not hidden else "0"
        print(str(running).lower() if "Running" in arguments[1] else pid_text)
    elif command == "logs":
        with (STATE / f"{name}.log").open("rb") as stream:
            while lives(int((STATE / name).read_text())) or stream.peek(1):
                os.write(1, stream.read())
                time.sleep(0.05)
    elif command == "stop" and arguments[0] == "-t":
        end(name, signal.SIGTERM)
    elif command == "rm":
        end(name, signal.SIGKILL)
        (STATE / name).unlink()


if __name__ == "__main__":
    main(*sys.argv[1:])
