"""The fields of a launch's files beside index.json, and of owners/ and devices/, on disk.

What each means: docs/artifacts.md. A key that is NotRequired lacks where it does not apply, or in
studies measured before it existed.
"""

from collections.abc import Sequence
from typing import Any, NotRequired, TypedDict

from connector_tax.artifacts.cell_records import QuantityRecord
from connector_tax.artifacts.study_records import CellPlan, ConfigurationEntry, EngineSection


class QuietLevel(TypedDict):
    """`quiet_level`: ns of a load and of a sample's arithmetic on the idle server's CPUs."""

    memory_ns: float
    compute_ns: NotRequired[float]
    looks: NotRequired[int]


class ClaimedNode(TypedDict):
    """`node` of a claim: what of a machine makes it another device."""

    machine: str
    devices: list[str]
    gpus: list[dict[str, str]]
    gpu_numa_nodes: NotRequired[list[int | None]]
    cpu: str
    cpus: str
    quota_cpus: float | None


class EngineFiles(TypedDict):
    """What the vLLM of an interpreter is made of."""

    lock_sha256: str | None
    sources_sha256: str | None


class NodeRecord(ClaimedNode):
    """`node` of an attempt: what the launch ran on; `exclusive` is null where nobody tells."""

    boot: str
    job: str | None
    exclusive: NotRequired[bool | None]
    engine_files: NotRequired[dict[str, EngineFiles]]


class DeviceClaim(TypedDict):
    """devices/block<k>.json: the device that a block was begun on."""

    design_sha256: str
    slurm_node: str | None
    node: ClaimedNode


class OwnerRecord(TypedDict):
    """owners/<launch>.json: the driver that measures the launch."""

    launch: str
    process: str
    machine: str
    job: str | None
    since_utc: str


class ThreadUse(TypedDict):
    """The server's threads of one name: how many, CPUs, CPU seconds."""

    threads: int
    cpus: list[str]
    cpu_s: float


class NamedThreadUse(ThreadUse):
    """One entry of `server_threads` of an attempt."""

    name: str


class TargetRecord(TypedDict, total=False):
    """Where the load generator sent; values of headers are left out."""

    host: str
    port: int
    path: str
    https: bool
    stream: bool
    header_names: list[str]


class AffinityRecord(TypedDict, total=False):
    """Which CPUs load generator, workers and server had, and the topology they were chosen from."""

    loadgen: Sequence[int]
    workers: Sequence[Sequence[int]]
    server: Sequence[int]
    enabled: bool
    warnings: Sequence[str]
    topology: dict[str, Any]


class GeneratorRecord(TypedDict, total=False):
    """`load_generator` of an attempt: its target and options; an older version noted fewer."""

    target: TargetRecord
    workers: int
    connections_per_worker: int
    strict: bool
    spin_us: float
    sleep_margin_us: float
    lead_ms: float
    kernel_stamps: bool
    keep_reads: bool
    stop_on_worker_death: bool
    affinity: AffinityRecord | None


class AttemptRecord(TypedDict, total=False):
    """One entry of attempts.json; keys lack in one that ended before they were known."""

    attempt: int
    pid: int
    started_utc: str
    ended_utc: str | None
    started_ns: int
    ended_ns: int
    node: NodeRecord
    quiet_level: QuietLevel | None
    supersedes: str | None
    ports_taken: list[int]
    port: int
    load_generator: GeneratorRecord
    startup_s: float
    server_threads: list[NamedThreadUse]
    stopped: str
    failure: str
    wall_s: float


class LaunchConfig(TypedDict):
    """config.json: what was launched."""

    study: str
    design_sha256: str
    configuration: ConfigurationEntry
    config: str
    block: int
    phase: str
    engine: EngineSection
    argv: list[str]
    environment: dict[str, str]
    cells: list[CellPlan]


class IdleCpu(QuantityRecord):
    """`idle_cpu`: CPU seconds per second of a server that has nothing to do."""

    from_ns: int
    to_ns: int


class ServerSnapshot(TypedDict):
    """`before_load`, `after_load`: what a server has that has nothing to do."""

    memory_pss_mib: QuantityRecord
    gpu_memory_mib: QuantityRecord
    threads: QuantityRecord
    processes: QuantityRecord


class ServerResources(TypedDict):
    """resources.json without what says which launch it is of."""

    idle_cpu: IdleCpu
    before_load: ServerSnapshot
    after_load: ServerSnapshot | None
    after_load_reason: str | None


class ResourcesRecord(ServerResources):
    """resources.json."""

    launch: str
    attempt: int
    startup_s: float


class SettingRecord(TypedDict):
    """One setting of the running engine, where it was read, or why it is not known."""

    value: Any
    source: str | None
    reason: str | None


class EngineRecord(TypedDict):
    """settings.json without what says which launch it is of."""

    settings: dict[str, SettingRecord]
    environment: dict[str, dict[str, str | None]]
    cleared: NotRequired[list[str]]


class SettingsRecord(EngineRecord):
    """settings.json."""

    launch: str
    attempt: int
