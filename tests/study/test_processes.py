"""Test that a server's CPU time is exact, includes ended processes, and is split by companion."""

import os
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator

import pytest

from connector_tax.artifacts.cell_records import ServerCounters
from connector_tax.study import resources
from connector_tax.study.processes import (
    Process,
    Reading,
    ServerProcesses,
    cpu_between,
    group_members,
    own_processes,
)
from connector_tax.study.resources import cell_cpu, idle_cpu, snapshot, thread_times
from tests.study.conftest import StandIn

BURN = """
import subprocess, sys, threading, time, os
def burn(seconds):
    end = time.thread_time() + seconds
    while time.thread_time() < end:
        pass
def child(code):
    return [sys.executable, "-c", "import time\\n" + code]
BURN_02 = "end = time.process_time() + 0.2\\nwhile time.process_time() < end: pass"
print("ready", flush=True)
for line in sys.stdin:
    exec(line)
    print("done", flush=True)
"""


class Worker:
    """A process group that runs one line of Python at a time."""

    def __init__(self) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", BURN],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        self._answer()

    def do(self, line: str) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(line + "\n")
        self.process.stdin.flush()
        self._answer()

    def _answer(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline()

    def end(self) -> None:
        for process in ServerProcesses(self.process.pid, {}).read().processes.values():
            os.kill(process.pid, 9)
        self.process.communicate()


@pytest.fixture
def worker() -> Iterator[Worker]:
    started = Worker()
    yield started
    started.end()


@pytest.mark.parametrize(
    "line",
    [
        "burn(0.2)",
        "t = threading.Thread(target=burn, args=(0.2,)); t.start(); t.join()",
        "subprocess.run(child(BURN_02))",
    ],
    ids=["a living thread", "a thread that ended", "a child that came and ended"],
)
def test_cpu_time_is_exact_and_includes_ended_children(worker: Worker, line: str) -> None:
    processes = ServerProcesses(worker.process.pid, {})
    before = processes.read()
    worker.do(line)
    use = cpu_between(before, processes.read())
    assert use.reason is None
    assert use.cpu_s is not None
    # Starting a child takes CPU time too; up to a tick (10 ms) of an ended child may be lost.
    assert 0.19 <= use.cpu_s < 0.45


def test_processes_of_a_server_without_its_own_session_are_counted() -> None:
    # Like `server | tee log` under a shell's job control, where neither descends from the other.
    command = ["sh", "-c", "second=$(sleep 60 >&2 & echo $!); echo $second; exec sleep 60"]
    with subprocess.Popen(command, process_group=0, stdout=subprocess.PIPE, text=True) as server:
        try:
            assert server.stdout is not None
            other = int(server.stdout.readline())
            assert set(group_members(server.pid)) == {server.pid, other}
            assert set(own_processes(os.getpid(), server.pid)[1]) == {server.pid, other}
        finally:
            os.killpg(server.pid, signal.SIGKILL)


def _when_the_child_has_burned(worker: Worker) -> tuple[ServerProcesses, Reading]:
    """Return the worker's processes, and a reading after its child used 0.2 s of CPU time."""
    processes = ServerProcesses(worker.process.pid, {})
    while (before := processes.read()) and sum(
        p.own_ns for p in before.processes.values() if p.pid != worker.process.pid
    ) < 0.2e9:
        pass
    return processes, before


def test_cpu_time_of_an_ended_child_is_not_counted_twice(worker: Worker) -> None:
    worker.do("c = subprocess.Popen(child(BURN_02 + '\\ninput()'), stdin=subprocess.PIPE)")
    processes, before = _when_the_child_has_burned(worker)
    worker.do("c.communicate(b'x')")
    use = cpu_between(before, processes.read())
    assert use.reason is None
    assert use.cpu_s is not None
    assert -0.02 <= use.cpu_s < 0.1


def test_cpu_time_is_null_with_a_reason_when_a_child_was_not_waited_for(worker: Worker) -> None:
    worker.do("import signal; signal.signal(signal.SIGCHLD, signal.SIG_IGN)")
    worker.do("c = subprocess.Popen(child(BURN_02 + '\\ninput()'), stdin=subprocess.PIPE)")
    processes, before = _when_the_child_has_burned(worker)
    worker.do("c.stdin.close(); c.wait()")
    use = cpu_between(before, processes.read())
    assert use.cpu_s is None
    assert use.reason is not None
    assert "ended, and no process of the server waited for it" in use.reason


def test_companion_and_its_children_are_counted_apart_from_the_server(worker: Worker) -> None:
    worker.do("c = subprocess.Popen(['sh', '-c', 'sleep 100 & sleep 101'], start_new_session=True)")
    others = ServerProcesses(worker.process.pid, {}).read().processes
    companion = min(p.pid for p in others.values() if p.name == "sh")
    processes = ServerProcesses(worker.process.pid, {"helper": companion})
    while len(processes.read().processes) < 4:
        pass
    before = processes.read()
    worker.do("burn(0.05)")
    use = cpu_between(before, processes.read())
    assert use.parts.keys() == {"helper", "server"}
    assert use.parts["server"] >= 0.05 > use.parts["helper"]
    assert snapshot(processes, "cpu")["memory_pss_mib"]["parts"].keys() == {"helper", "server"}
    parts = Counter(process.part for process in processes.read().processes.values())
    assert parts == {"helper": 3, "server": 1}


def test_memory_is_proportional_and_counts_shared_pages_once(worker: Worker) -> None:
    processes = ServerProcesses(worker.process.pid, {})
    before = snapshot(processes, "cpu")["memory_pss_mib"]["value"] or 0.0
    # 64 MiB of the parent that two forked children share.
    worker.do("data = bytearray(os.urandom(1 << 16) * 1024)")
    fork = "pids = [os.fork() or (sys.stdin.close(), time.sleep(100)) for _ in range(2)]"
    worker.do(fork)
    taken = snapshot(processes, "cpu")
    assert len(processes.read().processes) == 3
    assert 64 <= (taken["memory_pss_mib"]["value"] or 0.0) - before < 80


def test_unreadable_memory_is_null_with_a_reason() -> None:
    gone = subprocess.Popen(["true"])
    gone.wait()
    process = Process(gone.pid, "true", "server", False, 0, 0)
    memory = resources._memory([process])
    assert memory["value"] is None
    assert f"pid={gone.pid}" in str(memory["reason"])


def test_idle_cpu_is_per_second_and_reports_a_server_that_ended(worker: Worker) -> None:
    processes = ServerProcesses(worker.process.pid, {})
    idle = idle_cpu(processes, 0.2, lambda _: None)
    assert idle["value"] == pytest.approx(0, abs=0.01)
    spin = "threading.Thread(target=burn, args=(100,), daemon=True).start()"
    worker.do(spin)
    busy = idle_cpu(processes, 1.0, lambda _: None)
    # Beside other tests the spinning thread gets only a share of a core, and readings may be late.
    assert 0.1 < (busy["value"] or 0.0) < 2
    assert busy["to_ns"] - busy["from_ns"] >= 0.3e9
    (name, share), *_ = busy["threads"].items()
    main = f"({worker.process.pid})"
    assert main not in name  # the spinning thread, not the main thread, which waits
    assert share == pytest.approx(busy["value"], abs=0.2)

    def dead(when: str) -> None:
        raise RuntimeError(when)

    with pytest.raises(RuntimeError, match="while it was idle"):
        idle_cpu(processes, 0.01, dead)


@pytest.mark.parametrize(
    ("text", "value", "reason"),
    [
        ("{mine}, 100\n1, 7000\n{mine}, 23", 123.0, None),
        ("1, 7000", None, "names none of the server's processes"),
        ("{mine}, [N/A]", None, "nvidia-smi failed"),
    ],
    ids=["two GPUs and a stranger", "a stranger alone", "no number"],
)
def test_gpu_memory_counts_only_processes_of_the_server(
    worker: Worker, stand_in: StandIn, text: str, value: float | None, reason: str | None
) -> None:
    stand_in("nvidia-smi", f"cat <<'END'\n{text.format(mine=worker.process.pid)}\nEND")
    processes = ServerProcesses(worker.process.pid, {})
    memory = snapshot(processes, "cuda")["gpu_memory_mib"]
    assert memory["value"] == value
    assert memory["reason"] is None if reason is None else reason in str(memory["reason"])
    assert snapshot(processes, "cpu")["gpu_memory_mib"]["value"] is None


@pytest.mark.parametrize(
    ("counters", "value", "reason"),
    [
        ((10.0, 60.0), 4.0, None),
        ((10.0, 10.0), None, "no request was answered"),
        ((None, None), None, "does not count"),
    ],
)
def test_cell_cpu_time_is_divided_by_answered_requests(
    worker: Worker,
    counters: tuple[float | None, float | None],
    value: float | None,
    reason: str | None,
) -> None:
    processes = ServerProcesses(worker.process.pid, {})
    before = processes.read()
    threads = thread_times(before.engine)
    worker.do("burn(0.2)")
    busy = thread_times(before.engine)
    use = cpu_between(before, processes.read())
    both: ServerCounters = {"before": {"success": counters[0]}, "after": {"success": counters[1]}}
    cell = cell_cpu(use, both, threads, busy)
    cpu = cell["cpu_s_per_1000"]
    assert list(cell["threads"].values()) == ([] if value is None else [pytest.approx(4, rel=0.1)])
    assert cpu["value"] == (None if value is None else pytest.approx(value, rel=0.1))
    assert cpu["reason"] is None if reason is None else reason in str(cpu["reason"])
