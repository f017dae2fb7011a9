"""Test that the processes that watch a cell record what happened."""

import functools
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from connector_tax.analysis.machine import read_machine
from connector_tax.files import read_jsonl
from connector_tax.loadgen.affinity import AffinityPlan, plan_affinity, read_topology
from connector_tax.servers.kinds import ServerError
from connector_tax.study import child
from connector_tax.study.child import ChildError
from connector_tax.study.endpoint import Endpoint
from connector_tax.study.machine_watch import (
    FIELDS,
    PROCESSES,
    GpuReadings,
    MachineWatch,
)
from connector_tax.study.processes import throttled, throttled_file
from connector_tax.study.scraper import MetricsSampler
from tests.study.conftest import StandIn

CHUNK_MS = 100.0
BURN = (
    "import os, sys\nos.sched_setaffinity(0, {int(sys.argv[1])})\nprint(flush=True)\nwhile 1: pass"
)
# Starts a process and ends at once, so that the process is no descendant of the test.
ORPHANED = (
    "import subprocess, sys\n"
    "p = subprocess.Popen([sys.executable, '-c', sys.argv[1], sys.argv[2]],"
    " stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, start_new_session=True)\n"
    "p.stdout.readline(); print(p.pid, flush=True)"
)


@pytest.fixture
def plan() -> AffinityPlan:
    """Return a plan with separate cores for load generator and server."""
    plan = plan_affinity(read_topology(), 1)
    if not plan.enabled:
        pytest.skip("needs two cores")
    return plan


@pytest.fixture
def sleeper() -> Iterator[int]:
    """Yield the process group of an idle server."""
    command = [sys.executable, "-c", "input()"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, start_new_session=True) as process:
        yield process.pid
        process.kill()


def watched(path: Path, plan: AffinityPlan, group: int, seconds: float) -> list[dict[str, Any]]:
    """Return the lines of a file that was open for a while."""
    with MachineWatch(plan, (), CHUNK_MS) as watch:
        watch.open(path, group)
        time.sleep(seconds)
        watch.close()
    return list(read_jsonl(path))


def test_machine_file_matches_its_declaration(
    tmp_path: Path, plan: AffinityPlan, sleeper: int
) -> None:
    path = tmp_path / "machine.jsonl"
    before = time.monotonic_ns()
    lines = watched(path, plan, sleeper, 2.5)
    after = time.monotonic_ns()
    kinds = [line["kind"] for line in lines]
    assert kinds[0] == "begin"
    assert 3 <= kinds.count("chunk") == len(kinds) - 1
    edges_ns = read_machine(path, None).edges_ns
    assert before < edges_ns[0] < edges_ns[-1] < after
    # Never more lines than planned; fewer on a busy machine, since the watch has idle priority.
    assert len(edges_ns) <= 28
    begin, end = lines[0], lines[-1]
    own_us = end["counters"]["self_us"] - begin["counters"]["self_us"]
    assert own_us < 0.05 * (end["t_ns"] - begin["t_ns"]) / 1e3


def written(path: Path) -> list[dict[str, Any]]:
    """Return the lines of a file that is open."""
    return [
        json.loads(line) for line in path.read_text().splitlines(keepends=True) if line[-1:] == "\n"
    ]


def test_process_on_the_servers_cpus_counts_as_foreign_and_the_server_does_not(
    tmp_path: Path, plan: AffinityPlan, sleeper: int
) -> None:
    cpu = str(plan.server[0])
    command = [sys.executable, "-c", ORPHANED, BURN, cpu]
    burner = int(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    try:
        watched(tmp_path / "foreign.jsonl", plan, sleeper, 2.0)
    finally:
        os.kill(burner, 9)
    foreign = read_machine(tmp_path / "foreign.jsonl", None).cpus["server"]
    share = 1 / len(plan.server)
    assert foreign.busy > 0.5 * share
    assert foreign.foreign > 0.4 * share
    # The same work in the server's process is not foreign.
    command = [sys.executable, "-c", BURN, cpu]
    with subprocess.Popen(command, stdout=subprocess.PIPE, start_new_session=True) as server:
        assert server.stdout is not None
        server.stdout.readline()
        watched(tmp_path / "own.jsonl", plan, server.pid, 2.0)
        server.kill()
    own = read_machine(tmp_path / "own.jsonl", None).cpus["server"]
    assert own.busy > 0.5 * share
    assert own.busy - own.foreign > 0.3 * share


def test_cpu_time_of_the_drivers_children_is_not_foreign(
    tmp_path: Path, plan: AffinityPlan, sleeper: int
) -> None:
    command = [sys.executable, "-c", BURN, str(plan.loadgen[0])]
    with MachineWatch(plan, (), CHUNK_MS) as watch:
        watch.open(tmp_path / "machine.jsonl", sleeper)
        with subprocess.Popen(command, stdout=subprocess.PIPE) as child:
            time.sleep(1.5)
            # The watch has idle priority: beside the child it would take half a minute.
            child.send_signal(signal.SIGSTOP)
            watch.close()
            child.kill()
    lines = list(read_jsonl(tmp_path / "machine.jsonl"))
    first, last = (line["counters"]["own_ms"] for line in (lines[0], lines[-1]))
    assert last[0] - first[0] > 300
    assert last[1] - first[1] < 100


def test_error_names_an_ended_machine_watch_instead_of_a_broken_pipe(
    tmp_path: Path, plan: AffinityPlan, sleeper: int
) -> None:
    with (  # noqa: PT012 the error comes from leaving the watch too
        pytest.raises(ChildError, match="machine_watch ended with status -9"),
        MachineWatch(plan, (), CHUNK_MS) as watch,
    ):
        os.kill(watch.pid, 9)
        # Its end of the pipe may stay open until the process is a zombie.
        os.waitid(os.P_PID, watch.pid, os.WEXITED | os.WNOWAIT)
        watch.open(tmp_path / "machine.jsonl", sleeper)


STUB = f"""[ "$1" = "--query-gpu={",".join(FIELDS)}" ] || exit 9
[ "$2 $3" = "--format=csv,noheader,nounits --loop-ms=1000" ] || exit 9
echo "GPU-a, 1980, 1980, 0x0000000000000000, 2619, 41, 118.52"
echo "GPU-b, 600, 1980, 0x0000000000000040, 2619, 90, 90.1"
echo "GPU-a, 345, 1980, 0x0000000000000001, 2619, 30, [N/A]"
printf "GPU-a, 1965, 19"
exec sleep 60"""


def test_gpu_rows_are_parsed_to_numbers_line_by_line(
    tmp_path: Path, stand_in: StandIn, plan: AffinityPlan, sleeper: int
) -> None:
    stand_in("nvidia-smi", STUB)
    rows = [["GPU-a", 1980.0, 1980.0, "0x0000000000000000", 2619.0, 41.0, 118.52],
            ["GPU-a", 345.0, 1980.0, "0x0000000000000001", 2619.0, 30.0, "[N/A]"]]  # fmt: skip
    readings = GpuReadings(["GPU-a"])
    taken: list[list[Any]] = []
    deadline = time.monotonic() + 10
    while len(taken) < 2 and time.monotonic() < deadline:
        taken += readings.take()
    # The last row is incomplete, and GPU-b is not the study's.
    assert taken + readings.take() == rows
    readings.child.kill()
    readings.child.wait()
    stand_in("nvidia-smi", "while echo GPU-a, 990, 1980, 0x20, 1, 90, 400; do sleep 0.05; done")
    path = tmp_path / "machine.jsonl"
    with MachineWatch(plan, ["GPU-a"], CHUNK_MS) as watch:
        watch.open(path, sleeper)
        deadline = time.monotonic() + 20
        while not any(line.get("gpu") for line in written(path)):
            assert time.monotonic() < deadline
            time.sleep(0.02)
        watch.close()
    seen = read_machine(path, None)
    assert seen.gpu_slowed
    assert seen.gpu_clock_share == 0.5


def test_foreign_processes_on_the_studys_gpus_are_recorded(
    tmp_path: Path, stand_in: StandIn, plan: AffinityPlan, sleeper: int
) -> None:
    users = tmp_path / "users"
    looks = f"while sleep 0.03; do cat {users}; done"
    stand_in("nvidia-smi", f"case $1 in {PROCESSES}) {looks};; *) exec sleep 60;; esac")
    own = f"GPU-a, {sleeper}\nGPU-a, {os.getpid()}\n"

    def until(text: str, foreign: list[int] | None) -> None:
        """Make nvidia-smi print `text` until a chunk lists exactly the processes `foreign`."""
        (tmp_path / "next").write_text(text)
        (tmp_path / "next").rename(users)
        deadline, before = time.monotonic() + 20, len(written(path))
        while foreign not in [c.get("foreign_gpu_pids", 0) for c in written(path)[before:]]:
            assert time.monotonic() < deadline
            time.sleep(0.02)

    users.write_text(own)
    path = tmp_path / "machine.jsonl"
    with MachineWatch(plan, ["GPU-a"], CHUNK_MS) as watch:
        watch.open(path, sleeper)
        until(f"{own}GPU-b, 1\n", [])
        until(f"{own}GPU-a, 1\n", [1])
        # Started by a shell that ends, so that it is no descendant of this test.
        script = "exec sleep 600 >&- & echo $!"
        other = int(subprocess.run(["sh", "-c", script], stdout=-1, check=True).stdout)
        try:
            os.kill(other, signal.SIGSTOP)
            until(f"{own}GPU-a, {other}\n", [])
            os.kill(other, signal.SIGCONT)
            until(f"{own}GPU-a, {other}\n", [other])
        finally:
            os.kill(other, signal.SIGKILL)
        # In a container nvidia-smi reports other process ids.
        until("GPU-a, 1\n", None)
        until(own, [])
        watch.close()
    assert read_machine(path, None).foreign_gpu == 2


def test_machine_watch_without_cpu_time_is_reported_after_its_limit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, plan: AffinityPlan, sleeper: int
) -> None:
    monkeypatch.setattr(child, "ANSWER_S", 0.2)
    message = "machine_watch did not answer within 0.2 s: .* end them and rerun"
    with MachineWatch(plan, []) as watch:
        os.kill(watch.pid, signal.SIGSTOP)
        with pytest.raises(ChildError, match=message):
            watch.open(tmp_path / "machine.jsonl", sleeper)
    assert not Path(f"/proc/{watch.pid}").exists()


def test_dead_server_is_reported_while_a_helper_does_not_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, plan: AffinityPlan, sleeper: int
) -> None:
    monkeypatch.setattr(child, "MEANWHILE_S", 0.1)
    looks: list[float] = []

    def check_alive() -> None:
        looks.append(time.monotonic())
        if len(looks) == 3:
            raise ServerError("the engine core died")

    with MachineWatch(plan, []) as watch:
        watch.meanwhile = check_alive
        os.kill(watch.pid, signal.SIGSTOP)
        with pytest.raises(ServerError, match="the engine core died"):
            watch.open(tmp_path / "machine.jsonl", sleeper)
    assert not Path(f"/proc/{watch.pid}").exists()


def test_sampler_of_a_shared_machine_does_not_wait_for_an_idle_cpu(url: str) -> None:
    policies = []
    for yields in (True, False):
        with MetricsSampler(Endpoint(url), INTERVAL_S, (), yields=yields) as sampler:
            sampler.open(Path(os.devnull), "seed")
            policies.append(os.sched_getscheduler(sampler.pid))
    assert policies == [os.SCHED_IDLE, os.SCHED_OTHER]


def test_without_nvidia_smi_a_gpu_study_does_not_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, plan: AffinityPlan
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with (
        MachineWatch(plan, ["GPU-a"], CHUNK_MS) as watch,
        pytest.raises(ChildError, match="ended with status 1"),
    ):
        watch.open(tmp_path / "machine.jsonl", os.getpid())


@pytest.mark.parametrize(
    ("groups", "folder"),
    [("0::/pod/one\n", "pod/one"), ("1:cpu,cpuacct:/a\n0::/\n", "cpu,cpuacct/a"), ("0::/x\n", "")],
)
def test_throttling_is_counted_if_the_control_group_reports_it(
    tmp_path: Path, groups: str, folder: str
) -> None:
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/self/cgroup").write_text(groups)
    assert throttled(throttled_file(tmp_path)) is None
    place = tmp_path / "sys/fs/cgroup" / folder
    place.mkdir(parents=True, exist_ok=True)
    (place / "cpu.stat").write_text("nr_periods 9\nnr_throttled 4\nthrottled_usec 7\n")
    assert throttled(throttled_file(tmp_path)) == 4


# ---- the sampler of /metrics

PAGE = b"# TYPE vllm:num_requests_waiting gauge\nvllm:num_requests_waiting 3\n"
INTERVAL_S = 0.15
SCRAPES = 17


@pytest.fixture
def url(tmp_path: Path) -> Iterator[str]:
    (tmp_path / "metrics").write_bytes(PAGE)
    handler = functools.partial(SimpleHTTPRequestHandler, directory=tmp_path)
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


def test_scrape_times_are_jittered_against_regular_arrivals(url: str, tmp_path: Path) -> None:
    log = tmp_path / "metrics.jsonl"
    with MetricsSampler(Endpoint(url), INTERVAL_S, ()) as sampler:
        began = time.monotonic()
        sampler.open(log, "7/arrivals/block0/A/r8/scrapes")
        while len(written(log)) < SCRAPES:
            time.sleep(0.02)
        took = time.monotonic() - began
        sampler.close()
    records = list(read_jsonl(log))
    assert all(record["values"] == {"vllm:num_requests_waiting": 3.0} for record in records)
    assert [i for i, record in enumerate(records) if "raw" in record] == [0, len(records) - 1]
    # The last scrape is left out, since it is made when the cell closes.
    gaps = [(b["t_ns"] - a["t_ns"]) / 1e9 / INTERVAL_S for a, b in pairwise(records[:-1])]
    assert min(gaps) < 0.75
    assert max(gaps) > 1.25
    # There are as many scrapes as at a fixed interval.
    assert took / (SCRAPES - 1) > 0.7 * INTERVAL_S
