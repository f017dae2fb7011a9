"""Build /sys and /proc trees of machines, as the kernel shows them."""

from collections.abc import Iterable, Mapping
from pathlib import Path


def write_tree(root: Path, files: Mapping[str, str]) -> Path:
    """Write `files` (path below the root -> content) and return the root."""
    for name, content in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content)
    return root


def machine(
    cores: Iterable[tuple[int, tuple[int, ...]]],
    *,
    ranks: Mapping[int, int] | None = None,
    source: str = "cpufreq/cpuinfo_max_freq",
) -> dict[str, str]:
    """Return the files of a machine of `cores`: (NUMA node, logical CPUs of the core).

    `ranks` is the content of `source` per CPU.
    """
    files = {"proc/self/cgroup": "0::/\n"}
    nodes: dict[int, list[int]] = {}
    for node, cpus in cores:
        nodes.setdefault(node, []).extend(cpus)
        for cpu in cpus:
            folder = f"sys/devices/system/cpu/cpu{cpu}"
            files[f"{folder}/topology/core_cpus_list"] = ",".join(map(str, cpus)) + "\n"
            if ranks is not None:
                files[f"{folder}/{source}"] = f"{ranks[cpu]}\n"
    for node, here in nodes.items():
        files[f"sys/devices/system/node/node{node}/cpulist"] = ",".join(map(str, here)) + "\n"
    return files


def two_sockets_smt(cores_per_socket: int = 8) -> dict[str, str]:
    """Return two sockets with SMT, numbered as in Intel servers: siblings are i and i + n/2."""
    total = 2 * cores_per_socket
    return machine([(i // cores_per_socket, (i, i + total)) for i in range(total)])


def hybrid() -> dict[str, str]:
    """Return a desktop of 4 SMT performance cores and 4 efficiency cores, ranked by CPPC."""
    cores = [(0, (2 * i, 2 * i + 1)) for i in range(4)] + [(0, (8 + i,)) for i in range(4)]
    ranks = {cpu: (66 if cpu < 8 else 42) for cpu in range(12)}
    ranks[4] = ranks[5] = 70  # the favoured core
    return machine(cores, ranks=ranks, source="acpi_cppc/highest_perf")


def arm_big_little() -> dict[str, str]:
    """Write an arm64 tree: 4 little and 4 big cores, ranked by cpu_capacity, no NUMA folders, no
    CPPC."""
    ranks = {cpu: 446 if cpu < 4 else 1024 for cpu in range(8)}
    files = machine([(0, (i,)) for i in range(8)], ranks=ranks, source="cpu_capacity")
    return {name: text for name, text in files.items() if "/node/" not in name}
