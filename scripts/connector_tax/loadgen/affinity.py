"""Plan which process runs on which CPUs: topology from sysfs, placement of client and server.

The session and event-loop threads are the load generator's bottleneck and get the fastest physical
cores of the primary NUMA node; each worker gets one physical core (all its SMT siblings), first on
the same node, then on the next; the server gets every core that is left. The sysfs names are
documented in the kernel's admin-guide/cputopology.
"""

import math
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from connector_tax.linux import format_cpus, parse_cpus

LOADGEN_CORES = 2


@dataclass(frozen=True, slots=True)
class Core:
    """A physical core: its usable logical CPUs, NUMA node, and rank (higher is faster)."""

    cpus: tuple[int, ...]
    node: int
    performance: int


@dataclass(frozen=True, slots=True)
class Topology:
    """The cores this process may use, in order of preference, and its CPU quota, if any.

    NUMA nodes are ordered by their fastest core, cores of a node from fast to slow, ties by number.
    `ranked_by` names the sysfs source of `performance`; None if no source tells cores apart.
    """

    cores: tuple[Core, ...]
    quota_cpus: float | None
    ranked_by: str | None


@dataclass(frozen=True, slots=True)
class AffinityPlan:
    """Logical CPUs for the main process's threads, each worker, and the server.

    With `enabled` false nothing is pinned, and each CPU set holds all usable CPUs. `server` is
    empty for a server on another machine.
    """

    loadgen: tuple[int, ...]
    workers: tuple[tuple[int, ...], ...]
    server: tuple[int, ...]
    enabled: bool
    warnings: tuple[str, ...]
    topology: Topology

    def lines(self) -> list[str]:
        """Return the plan as lines to print."""
        if not self.enabled:
            return ["CPU affinity: off", *(f"warning: {text}" for text in self.warnings)]
        return [
            f"load generator on CPUs {format_cpus(self.loadgen)}",
            *(f"worker {i} on CPUs {format_cpus(cpus)}" for i, cpus in enumerate(self.workers)),
            *([f"server on CPUs {format_cpus(self.server)}"] if self.server else []),
            *(f"warning: {text}" for text in self.warnings),
        ]


def plan_affinity(
    topology: Topology,
    workers: int,
    server_cores: int = 1,
    enable_cpu_affinity: bool = True,
    server_node: int | None = None,
) -> AffinityPlan:
    """Assign CPUs to the load generator, `workers` worker processes and a server.

    With too few cores the load generator shrinks to one core, then workers share cores, then the
    whole client shares one core, then the server gets fewer. Server and client share a core only
    where there is just one; then nothing is pinned. Each of these steps adds a warning.

    Args:
        server_cores: the least number of cores for the server; 0 if it runs on another machine.
        server_node: the server's NUMA node, such as its GPU's. The client is placed on other nodes
            first, and the server gets only cores of this node, if there are enough.
    """
    warnings: list[str] = []
    cores = list(topology.cores)
    everything = _cpus(cores)
    if topology.quota_cpus is not None and topology.quota_cpus < len(everything):
        warnings.append(
            f"the cgroup grants {topology.quota_cpus:g} CPUs of time on {len(everything)} CPUs; "
            "throttling would distort timings, so the plan uses only that many cores"
        )
        cores = cores[: max(1, math.floor(topology.quota_cpus))]
    if not enable_cpu_affinity or len(cores) == 1:
        if enable_cpu_affinity:
            who = "client and server" if server_cores else "the load generator and its workers"
            warnings.append(
                f"one core for {who}: these processes are not pinned, and disturb each other"
            )
        sets = (everything,) * workers
        server = everything if server_cores else ()
        return AffinityPlan(everything, sets, server, False, tuple(warnings), topology)
    cores.sort(key=lambda core: core.node == server_node)
    client = max(1, len(cores) - server_cores)
    if client >= LOADGEN_CORES + workers:
        loadgen_cores = LOADGEN_CORES
    else:
        loadgen_cores = 1
        warnings.append(_shortage(len(cores), workers, server_cores))
    nodes = sorted({core.node for core in cores[:loadgen_cores]})
    if len(nodes) > 1:
        warnings.append(
            f"the load generator's cores lie on NUMA nodes {nodes[0]} and {nodes[1]}: its threads"
            " use memory of the other node"
        )
    used = min(loadgen_cores + workers, client)
    places, rest = cores[loadgen_cores:used] or cores[:loadgen_cores], cores[used:]
    near = [core for core in rest if core.node == server_node]
    if server_node is not None and len(near) < max(1, server_cores):
        warnings.append(
            f"{len(near)} cores are left of NUMA node {server_node}, the node of the server's GPU,"
            f" and {server_cores} are wanted: the server also uses cores of other nodes"
        )
    elif near:
        rest = near
    return AffinityPlan(
        loadgen=_cpus(cores[:loadgen_cores]),
        workers=tuple(places[i % len(places)].cpus for i in range(workers)),
        server=_cpus(rest) if server_cores else (),
        enabled=True,
        warnings=tuple(warnings),
        topology=topology,
    )


def _shortage(cores: int, workers: int, server_cores: int) -> str:
    wanted = f"{LOADGEN_CORES} + {workers} + {server_cores}"
    client = cores - server_cores
    if client <= 1:
        how = "the load generator and its workers share one core"
    elif client < 1 + workers:
        how = "workers share cores"
    else:
        how = "the load generator has one core instead of two"
    if client < 1:
        how += f", the server has {cores - 1}"
    return f"{cores} cores, but {wanted} wanted (load generator, workers, server): {how}"


def _cpus(cores: list[Core]) -> tuple[int, ...]:
    return tuple(sorted(cpu for core in cores for cpu in core.cpus))


# ---- reading sysfs


def read_topology(root: Path = Path("/"), inherited: set[int] | None = None) -> Topology:
    """Read the usable cores from sysfs: those in the CPU mask that this process inherited.

    Args:
        root: the folder that holds /sys and /proc.
        inherited: the CPU mask; by default this process's.

    Raises:
        ValueError: sysfs is malformed.
    """
    allowed = os.sched_getaffinity(0) if inherited is None else inherited
    system = root / "sys/devices/system"
    ranked_by, performance = _performance(system / "cpu", allowed)
    cores = [
        Core(siblings, _node_of(system / "node", siblings[0]), max(map(performance, siblings)))
        for siblings in _physical_cores(system / "cpu", allowed)
    ]
    best = {core.node: core.performance for core in sorted(cores, key=lambda c: c.performance)}
    cores.sort(key=lambda c: (-best[c.node], c.node, -c.performance, c.cpus))
    return Topology(tuple(cores), _cgroup_quota(root), ranked_by)


def _read(path: Path) -> str | None:
    try:
        return path.read_text().strip()
    except OSError:
        return None


def _physical_cores(cpu_folder: Path, allowed: set[int]) -> list[tuple[int, ...]]:
    groups: set[tuple[int, ...]] = set()
    for cpu in allowed:
        listed = _read(cpu_folder / f"cpu{cpu}/topology/core_cpus_list")
        siblings = parse_cpus(listed) & allowed if listed is not None else {cpu}
        groups.add(tuple(sorted(siblings | {cpu})))
    return sorted(groups)


def _node_of(node_folder: Path, cpu: int) -> int:
    for folder in sorted(node_folder.glob("node[0-9]*")):
        if cpu in parse_cpus(_read(folder / "cpulist") or ""):
            return int(folder.name.removeprefix("node"))
    return 0  # a kernel without NUMA support has no node folders


def _performance(cpu_folder: Path, allowed: set[int]) -> tuple[str | None, Callable[[int], int]]:
    """Return the first sysfs source of core speed that every CPU has, and a function to read it.

    The scales of the sources differ, so that one source must serve all CPUs.
    """
    for source in ("acpi_cppc/highest_perf", "cpu_capacity", "cpufreq/cpuinfo_max_freq"):
        texts = {cpu: _read(cpu_folder / f"cpu{cpu}" / source) for cpu in allowed}
        values = {cpu: int(text) for cpu, text in texts.items() if text}
        if len(values) == len(allowed):
            return source, values.__getitem__
    return None, lambda _cpu: 0


def _cgroup_quota(root: Path) -> float | None:
    """Return the CPU quota of this process's control group, version 1 or 2; None if unlimited.

    A limit at any level up to the root applies, so every level is read. Inside a container
    /proc/self/cgroup may hold the host's path; then the root of the mount is the group.
    """
    mount = root / "sys/fs/cgroup"
    quotas: list[float] = []
    for line in (_read(root / "proc/self/cgroup") or "").splitlines():
        _, controllers, path = line.split(":", 2)
        base = mount / controllers
        if not controllers and (mount / "unified").is_dir():
            base = mount / "unified"  # version 2 beside version 1 controllers
        folder = base / path.lstrip("/")
        if not folder.is_dir():
            folder = base
        for level in (folder, *(p for p in folder.parents if p == base or base in p.parents)):
            quota, _, period = (_read(level / "cpu.max") or "max").partition(" ")
            if quota != "max":
                quotas.append(int(quota) / int(period))
            quota_us = int(_read(level / "cpu.cfs_quota_us") or -1)
            if quota_us > 0:
                quotas.append(quota_us / int(_read(level / "cpu.cfs_period_us") or 100_000))
    return min(quotas, default=None)
