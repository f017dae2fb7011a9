"""Servers that log the truth, each on a CPU of its own: the C event server, the embedded engine."""

import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
from abc import ABC, abstractmethod
from pathlib import Path

from connector_tax.loadgen.affinity import AffinityPlan, read_topology

SOURCE = Path(__file__).with_name("event_server.c")


def two_cpus() -> tuple[int, int]:
    """Return the CPUs for client and server: the first and the last one allowed.

    Raises:
        SystemExit: only one CPU; server and client would measure each other.
    """
    cpus = sorted(os.sched_getaffinity(0))
    if len(cpus) < 2:
        raise SystemExit("this benchmark needs two CPUs: one for the server, one for the client")
    return cpus[0], cpus[-1]


def one_cpu_each() -> AffinityPlan:
    """The whole load generator on the client's CPU, the server on its own.

    Raises:
        SystemExit: only one CPU.
    """
    client, server = two_cpus()
    return AffinityPlan((client,), ((client,),), (server,), True, (), read_topology())


def client_cpus(named: str | None = None) -> list[int]:
    """The CPUs for a client: those `named` ("0,1"), or all but the last one, the server's."""
    _, server = two_cpus()
    if named is not None:
        return [int(cpu) for cpu in named.split(",")]
    return [cpu for cpu in sorted(os.sched_getaffinity(0)) if cpu != server]


class _TruthfulServer(ABC):
    """A server pinned to `cpu` that logs, line by line, what `truth` holds after its exit."""

    _folder: "tempfile.TemporaryDirectory[str]"
    _process: "subprocess.Popen[str]"
    _log: Path

    def __init__(self, cpu: int) -> None:
        self._cpu = cpu
        self.truth: dict[str, list[int]] = {}
        """By request id: arrival, then one write stamp per token event (CLOCK_MONOTONIC ns)."""

    @abstractmethod
    def _take(self, line: str) -> None:
        """Put a line of the log into `truth`."""

    def __exit__(self, *_: object) -> None:
        self._process.terminate()
        self._process.communicate()
        for line in self._log.read_text().splitlines():
            self._take(line)
        self._folder.cleanup()


class EventServer(_TruthfulServer):
    """Compiles and runs event_server.c, pinned to `cpu`; `truth` is complete after the exit.

    Raises:
        SystemExit: there is no C compiler.
    """

    def __init__(self, gap_us: float, first_us: float, cpu: int) -> None:
        super().__init__(cpu)
        self._arguments = [f"{gap_us:g}", f"{first_us:g}"]
        self.responses: list[list[int]] = []
        """As `truth`, but for every response, in the order in which they ended."""

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

    def _take(self, line: str) -> None:
        name, *stamps = line.split(" ")
        numbers = [int(stamp) for stamp in stamps]
        self.truth[name] = numbers
        self.responses.append(numbers)


class EngineServer(_TruthfulServer):
    """Runs the embedded engine (configuration `plain` of the file `config`), pinned to `cpu`.

    A write of several tokens counts once for each.

    Raises:
        SystemExit: the engine did not start.
    """

    def __init__(self, config: Path, cpu: int) -> None:
        super().__init__(cpu)
        self._config = config

    def __enter__(self) -> "EngineServer":
        self._folder = tempfile.TemporaryDirectory(prefix="connector-tax-bench-")
        self._log = Path(self._folder.name) / "truth.jsonl"
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = int(probe.getsockname()[1])
        self._process = subprocess.Popen(
            [
                *("taskset", "-c", str(self._cpu), sys.executable, "-m", "connector_tax.engine"),
                *("--config", str(self._config), "--configuration", "plain"),
                *("--port", str(self.port), "--launch-seed", "1", "--truth-log", str(self._log)),
            ],
            stderr=subprocess.PIPE,
            text=True,
        )
        assert self._process.stderr is not None
        for line in self._process.stderr:
            if "ready on port" in line:
                return self
        raise SystemExit(f"the engine did not start: exit status {self._process.wait()}")

    def _take(self, line: str) -> None:
        record = json.loads(line)
        if record["record"] == "request":
            writes = [t for t, tokens, _ in record["writes"] for _ in range(tokens)]
            self.truth[record["request_id"]] = [record["t_arrival_ns"], *writes]
