"""Run the C event server, which logs true times, on its own CPU."""

import os
import shutil
import subprocess
import tempfile
from pathlib import Path

SOURCE = Path(__file__).with_name("event_server.c")
# Times from a request to its first token, and between tokens.
FIRST_US, GAP_US = 1000.0, 10_000.0


def two_cpus() -> tuple[int, int]:
    """Return CPUs for client and server: the first and the last allowed CPU.

    Raises:
        SystemExit: only one CPU, on which server and client would disturb each other.
    """
    cpus = sorted(os.sched_getaffinity(0))
    if len(cpus) < 2:
        raise SystemExit("this benchmark needs two CPUs: one for the server, one for the client")
    return cpus[0], cpus[-1]


class EventServer:
    """The compiled event_server.c, running pinned to `cpu`.

    Raises:
        SystemExit: there is no C compiler.
    """

    def __init__(self, cpu: int) -> None:
        self._cpu = cpu
        self.responses: list[list[int]] = []
        """Set at the exit, in the order in which responses ended: arrival, then one write stamp per
        token event (CLOCK_MONOTONIC ns)."""
        self.truth: dict[str, list[int]] = {}
        """The same times by request id."""

    def __enter__(self) -> "EventServer":
        compiler = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
        if compiler is None:
            raise SystemExit("this benchmark needs a C compiler (cc) for its server")
        self._folder = tempfile.TemporaryDirectory(prefix="connector-tax-bench-")
        folder = Path(self._folder.name)
        binary, self._log = folder / "server", folder / "truth.txt"
        subprocess.run([compiler, "-O2", "-o", str(binary), str(SOURCE)], check=True)
        self._process = subprocess.Popen(
            ["taskset", "-c", f"{self._cpu}", binary, f"{GAP_US:g}", f"{FIRST_US:g}", self._log],
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self._process.stdout is not None
        self.port = int(self._process.stdout.readline())
        return self

    def __exit__(self, *_: object) -> None:
        self._process.terminate()
        self._process.communicate()
        for line in self._log.read_text().splitlines():
            name, *stamps = line.split(" ")
            self.truth[name] = [int(stamp) for stamp in stamps]
            self.responses.append(self.truth[name])
        self._folder.cleanup()
