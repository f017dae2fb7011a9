"""Runs the C event server on a CPU of its own, and reads its truth."""

import os
import platform
import shutil
import subprocess
import tempfile
from pathlib import Path
from types import TracebackType

SOURCE = Path(__file__).with_name("server.c")


def machine() -> str:
    """Return one line that says what the numbers were measured on."""
    model = "unknown CPU"
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            model = line.partition(":")[2].strip()
            break
    return (
        f"{os.cpu_count()} CPUs, {model}, Linux {platform.release()}, "
        f"Python {platform.python_version()}, load {os.getloadavg()[0]:.1f}"
    )


def two_cpus() -> tuple[int, int]:
    """Return the CPUs for client and server: the first and the last one allowed.

    Raises:
        SystemExit: only one CPU; server and client would measure each other.
    """
    cpus = sorted(os.sched_getaffinity(0))
    if len(cpus) < 2:
        raise SystemExit("this benchmark needs two CPUs: one for the server, one for the client")
    return cpus[0], cpus[-1]


class EventServer:
    """Compiles and runs server.c, pinned to `cpu`; `truth` is complete after the exit.

    Raises:
        SystemExit: there is no C compiler.
    """

    def __init__(self, gap_us: float, first_us: float, cpu: int) -> None:
        self._arguments = [f"{gap_us:g}", f"{first_us:g}"]
        self._cpu = cpu
        self.truth: dict[str, list[int]] = {}
        """By request id: arrival, then one write stamp per token event (CLOCK_MONOTONIC ns)."""
        self.responses: list[list[int]] = []
        """The same for every response, in the order in which they ended."""

    def __enter__(self) -> "EventServer":
        compiler = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
        if compiler is None:
            raise SystemExit("this benchmark needs a C compiler (cc) for its server")
        self._folder = tempfile.TemporaryDirectory(prefix="connector-tax-bench-")
        folder = Path(self._folder.name)
        binary, self._log = folder / "server", folder / "truth.txt"
        subprocess.run([compiler, "-O2", "-o", str(binary), str(SOURCE)], check=True)
        self._process = subprocess.Popen(
            ["taskset", "-c", str(self._cpu), str(binary), *self._arguments, str(self._log)],
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self._process.stdout is not None
        self.port = int(self._process.stdout.readline())
        return self

    def __exit__(
        self,
        _kind: type[BaseException] | None,
        _error: BaseException | None,
        _trace: TracebackType | None,
    ) -> None:
        self._process.terminate()
        self._process.communicate()
        for line in self._log.read_text().splitlines():
            name, *stamps = line.split(" ")
            numbers = [int(stamp) for stamp in stamps]
            self.truth[name] = numbers
            self.responses.append(numbers)
        self._folder.cleanup()
