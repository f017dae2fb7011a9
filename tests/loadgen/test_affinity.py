"""Test affinity plans on synthetic sysfs trees, and the pinned processes."""

import os
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from connector_tax.loadgen.affinity import (
    AffinityPlan,
    Core,
    Topology,
    plan_affinity,
    read_topology,
)
from connector_tax.loadgen.endpoint import is_local
from tests.loadgen.fault_server import good_answer
from tests.loadgen.running import loading, run_scripts
from tests.loadgen.sysfs_trees import arm_big_little, hybrid, machine, two_sockets_smt, write_tree


def read(files: dict[str, str], root: Path, mask: set[int] | None = None) -> Topology:
    """Return the topology for `mask`, or for all of a machine's CPUs."""
    everything = {int(cpu) for cpu in re.findall(r"cpu(\d+)/topology", " ".join(files))}
    return read_topology(write_tree(root, files), mask or everything)


FAST = dict.fromkeys(range(8), 3_000_000) | {6: 3_500_000}


@pytest.mark.parametrize(
    ("files", "wanted", "client", "server", "source_or_warning"),
    [
        (
            machine([(0, (i,)) for i in range(8)]), (3, 1),
            [(0, 1), (2,), (3,), (4,)], (5, 6, 7), None,
        ),
        # Two physical cores, four logical; the last two workers on node 1.
        (
            two_sockets_smt(4), (4, 2),
            [(0, 1, 8, 9), (2, 10), (3, 11), (4, 12), (5, 13)], (6, 7, 14, 15), None,
        ),
        # The node with the fastest core comes first.
        (
            machine([(i // 4, (i,)) for i in range(8)], ranks=FAST), (1, 1),
            [(4, 6), (5,)], (0, 1, 2, 3, 7), "cpufreq/cpuinfo_max_freq",
        ),
        # The favoured core and the next performance core.
        (
            hybrid(), (2, 1), [(0, 1, 4, 5), (2, 3), (6, 7)], (8, 9, 10, 11),
            "acpi_cppc/highest_perf",
        ),
        (arm_big_little(), (1, 1), [(4, 5), (6,)], (0, 1, 2, 3, 7), "cpu_capacity"),
        (machine([(0, (0,)), (0, (1,))]), (2, 1), [(0,), (0,), (0,)], (1,), "share one core"),
        (machine([(0, (0,)), (0, (1,))]), (1, 2), [(0,), (0,)], (1,), "the server has 1"),
        (machine([(i, (i,)) for i in range(4)]), (1, 1), [(0, 1), (2,)], (3,), "nodes 0 and 1"),
    ],
    ids=["one-socket", "smt", "fastest-node", "hybrid", "arm64", "two-cores", "wants-all",
         "four-nodes"],
)  # fmt: skip
def test_affinity_plan_of_each_machine_is_as_expected(
    files: dict[str, str],
    wanted: tuple[int, int],
    client: list[tuple[int, ...]],
    server: tuple[int, ...],
    source_or_warning: str | None,
    tmp_path: Path,
) -> None:
    """Compare each machine's plan, and the source of its CPU ranking or the warning."""
    plan = plan_affinity(read(files, tmp_path), *wanted)
    assert [plan.loadgen, *plan.workers] == client
    assert plan.server == server
    if plan.topology.ranked_by is not None or source_or_warning is None:
        assert (plan.topology.ranked_by, plan.warnings) == (source_or_warning, ())
    else:
        assert source_or_warning in plan.warnings[0]


def test_plan_uses_only_allowed_cpus(tmp_path: Path) -> None:
    topology = read(two_sockets_smt(2), tmp_path, {1, 2, 5})
    assert [core.cpus for core in topology.cores] == [(1, 5), (2,)]


def test_server_gets_the_numa_node_of_its_gpu_and_client_another_node(tmp_path: Path) -> None:
    topology = read(two_sockets_smt(4), tmp_path)
    nodes = {cpu: core.node for core in topology.cores for cpu in core.cpus}
    for node in (0, 1):
        plan = plan_affinity(topology, 2, server_cores=4, server_node=node)
        assert {nodes[cpu] for cpu in plan.server} == {node}
        assert {nodes[cpu] for cpu in (*plan.loadgen, *plan.workers[0])} == {1 - node}
        assert not plan.warnings
    # Five cores are wanted, and the node has four.
    plan = plan_affinity(topology, 1, server_cores=5, server_node=0)
    assert {nodes[cpu] for cpu in plan.server} == {0, 1}
    assert "NUMA node 0, the node of the server's GPU" in plan.warnings[0]


def test_cpu_ranking_is_ignored_unless_every_cpu_has_one(tmp_path: Path) -> None:
    files = machine([(0, (i,)) for i in range(4)], ranks=dict.fromkeys(range(4), 5))
    files["sys/devices/system/cpu/cpu3/acpi_cppc/highest_perf"] = "200\n"
    topology = read(files, tmp_path)
    assert topology.ranked_by == "cpufreq/cpuinfo_max_freq"


@pytest.mark.parametrize(
    ("cgroup", "extra", "quota"),
    [
        ("0::/", {"cpu.max": "max 100000\n"}, None),
        ("0::/a/b", {"a/cpu.max": "250000 100000\n", "a/b/cpu.max": "max 100000\n"}, 2.5),
        ("0::/on/the/host", {"cpu.max": "50000 100000\n"}, 0.5),
        (
            "4:cpuset:/job\n2:cpu,cpuacct:/job\n1:name=systemd:/",
            {"cpu,cpuacct/job/cpu.cfs_quota_us": "75000\n",
             "cpu,cpuacct/job/cpu.cfs_period_us": "50000\n"},
            1.5,
        ),
        ("2:cpu:/\n0::/", {"unified/cpu.max": "max 1\n", "cpu/cpu.cfs_quota_us": "-1\n"}, None),
    ],
    ids=["v2-root", "v2-ancestor", "v2-container", "v1", "hybrid"],
)  # fmt: skip
def test_cgroup_limits_restrict_the_plan(
    cgroup: str, extra: dict[str, str], quota: float | None, tmp_path: Path
) -> None:
    files = machine([(0, (i,)) for i in range(8)])
    files["proc/self/cgroup"] = cgroup + "\n"
    files |= {f"sys/fs/cgroup/{name}": text for name, text in extra.items()}
    topology = read(files, tmp_path)
    assert topology.quota_cpus == quota
    plan = plan_affinity(topology, 1)
    if quota is not None:
        assert any("throttling" in text for text in plan.warnings)
        planned = {*plan.loadgen, *plan.server, *plan.workers[0]}
        assert len(planned) == max(1, int(quota)) or not plan.enabled


def test_one_core_warns_and_pins_nothing_unless_affinity_is_off(tmp_path: Path) -> None:
    topology = read(machine([(0, (0, 1))]), tmp_path)
    one, off = plan_affinity(topology, 1), plan_affinity(topology, 1, enable_cpu_affinity=False)
    assert not one.enabled
    assert one.server == (0, 1)
    assert "one core" in one.warnings[0]
    assert not off.enabled
    assert off.lines() == ["CPU affinity: off"]


@given(
    shape=st.lists(
        st.tuples(st.integers(0, 2), st.integers(1, 2), st.integers(0, 3)), min_size=2, max_size=40
    ),
    workers=st.integers(1, 20),
    server_cores=st.integers(1, 8),
)
def test_server_shares_no_core_with_the_client(
    shape: list[tuple[int, int, int]], workers: int, server_cores: int
) -> None:
    next_cpu, cores = 0, []
    for node, threads, rank in shape:
        cores.append(Core(tuple(range(next_cpu, next_cpu + threads)), node, rank))
        next_cpu += threads
    plan = plan_affinity(Topology(tuple(cores), None, None), workers, server_cores)
    client = {*plan.loadgen, *(cpu for cpus in plan.workers for cpu in cpus)}
    assert len(plan.workers) == workers
    assert all(plan.workers)
    assert plan.loadgen
    assert plan.server
    assert client.isdisjoint(plan.server)
    assert client | set(plan.server) == set(range(next_cpu))
    for core in cores:
        for place in (plan.loadgen, plan.server, *plan.workers):
            assert set(core.cpus) <= set(place) or set(core.cpus).isdisjoint(place)
    if len(cores) >= 2 + workers + server_cores:
        across = len({core.node for core in cores[:2]}) > 1
        assert [("NUMA" in text) for text in plan.warnings] == [True] * across
        assert len({*plan.workers, plan.loadgen}) == workers + 1
    else:
        assert plan.warnings


def _threads_on(pid: int) -> set[frozenset[int]]:
    return {
        frozenset(os.sched_getaffinity(int(task.name)))
        for task in Path(f"/proc/{pid}/task").iterdir()
    }


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="needs two CPUs to tell them apart")
def test_workers_pin_every_thread_from_the_start_and_the_calling_thread_stays_free(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    everyone = os.sched_getaffinity(0)
    first, second, *_ = sorted(everyone)
    plan = AffinityPlan((second,), ((first,),), (second,), True, (), read_topology())
    at_start: list[set[int]] = []

    class Watched(subprocess.Popen[bytes]):
        def __init__(self, *arguments: Any, **options: Any) -> None:
            super().__init__(*arguments, **options)
            at_start.append(os.sched_getaffinity(self.pid))

    monkeypatch.setattr("subprocess.Popen", Watched)
    with loading({"good": [good_answer()]}, cpus=plan) as generator:
        assert at_start == [{first}]  # before it imports anything
        assert _threads_on(generator.worker_pids[0]) == {frozenset({first})}
        assert frozenset({second}) in _threads_on(os.getpid())  # the event loop and ZMQ
        assert os.sched_getaffinity(0) == everyone
        result = run_scripts(generator, ["good"] * 5)
        assert {r.status for r in result.records} == {"ok"}
        described = generator.describe()["affinity"]
        assert described is not None
        assert described["workers"] == ((first,),)


def test_remote_server_reserves_no_core(tmp_path: Path) -> None:
    topology = read(machine([(0, (i,)) for i in range(3)]), tmp_path)
    here, elsewhere = plan_affinity(topology, 1), plan_affinity(topology, 1, server_cores=0)
    assert (here.loadgen, here.workers, here.server) == ((0,), ((1,),), (2,))
    assert (elsewhere.loadgen, elsewhere.workers) == ((0, 1), ((2,),))
    assert elsewhere.server == ()
    assert elsewhere.warnings == ()
    assert "server" not in "".join(elsewhere.lines())
    assert is_local("127.0.0.1")
    assert not is_local("192.0.2.1")  # reserved for documentation
    assert not is_local("no.such.host.invalid")
