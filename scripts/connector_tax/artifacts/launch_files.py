"""The fields of a launch's other files, and of owners/ and devices/, on disk.

Their meanings: docs/artifacts.md. A NotRequired key is absent where it does not apply.
"""

from collections.abc import Iterable
from typing import Any, NotRequired, TypedDict

from connector_tax.artifacts.cell_records import QuantityRecord
from connector_tax.artifacts.study_records import CellPlan, ConfigurationEntry, EngineSection


class ClaimedNode(TypedDict):
    """`node` of a claim: the properties that identify a device."""

    machine: str
    devices: list[str]
    gpus: list[dict[str, str]]
    gpu_numa_nodes: list[int | None]
    cpu: str
    cpus: str
    quota_cpus: float | None


class EngineFiles(TypedDict):
    """The hashes of an interpreter's vLLM."""

    lock_sha256: str | None
    sources_sha256: str | None


class NodeRecord(ClaimedNode):
    """The `node` of an attempt; `exclusive` is null where nothing reports it."""

    boot: str
    job: str | None
    exclusive: bool | None
    engine_files: NotRequired[dict[str, EngineFiles]]


class DeviceClaim(TypedDict):
    """devices/block<k>.json: the device on which a block began."""

    design_sha256: str  #: hash of the design; a claim of another design is void
    #: name of the node, to which the block's later jobs are sent; null: not run by Slurm
    slurm_node: str | None
    node: ClaimedNode  #: as `node` of an attempt, without boot, job and exclusive


class OwnerRecord(TypedDict):
    """owners/<launch>.json: the driver that is measuring the launch."""

    launch: str
    process: str
    machine: str
    job: str | None
    since_utc: str


class AttemptRecord(TypedDict, total=False):
    """One entry of attempts.json; keys that were not yet known at its end are absent."""

    attempt: int
    pid: int
    started_utc: str
    ended_utc: str | None
    started_ns: int
    ended_ns: int
    node: NodeRecord
    supersedes: str | None
    port: int
    # The load generator's target and options.
    load_generator: dict[str, Any]
    startup_s: float
    stopped: str
    failure: str
    # Number of lines removed because they looked like secrets, by log name.
    redacted: dict[str, int]
    wall_s: float


def nodes_of(attempts: Iterable[AttemptRecord]) -> list[NodeRecord]:
    """Return the nodes of attempts; an attempt that failed early has no node."""
    return [attempt["node"] for attempt in attempts if "node" in attempt]


class LaunchConfig(TypedDict):
    """config.json: the command of a launch and its origin."""

    study: str  #: the study's name
    design_sha256: str  #: hash of the design
    configuration: ConfigurationEntry  #: its entry of config/configurations.yaml
    config: str  #: the launch's name
    block: int  #: from 0
    phase: str  #: A, B or Bp
    engine: EngineSection  #: the engine section of the configuration
    argv: list[str]  #: the server's arguments; {root} is the project's folder
    environment: dict[str, str]  #: variables that launch.sh sets
    cells: list[CellPlan]  #: the cells in run order


class IdleCpu(QuantityRecord):
    """`idle_cpu`: CPU seconds per second of an idle server."""

    from_ns: int
    to_ns: int
    # Threads of the engine core's process by name and id, from 0.01 CPU s per s on, busiest first.
    threads: NotRequired[dict[str, float]]


class ServerSnapshot(TypedDict):
    """`before_load`, `after_load`: resources of an idle server."""

    memory_pss_mib: QuantityRecord
    gpu_memory_mib: QuantityRecord


class ResourcesRecord(TypedDict):
    """The content of resources.json."""

    launch: str  #: the launch's name
    attempt: int  #: the attempt that it describes
    startup_s: float  #: time from launch.sh to ready
    #: from_ns, to_ns, and the quantity: CPU time of the ready server before its first request; CPU
    #: s per s; threads: CPU of the engine core's busy threads, by name and id
    idle_cpu: IdleCpu
    #: quantities memory_pss_mib and gpu_memory_mib, before the first request
    before_load: ServerSnapshot
    #: the same after the last cell; null: the launch ended before its last cell
    after_load: ServerSnapshot | None
    after_load_reason: str | None  #: why after_load is null; null: it is not


class SettingRecord(TypedDict):
    """One setting of the running engine with its source, or the reason why it is unknown."""

    value: Any
    source: str | None
    reason: str | None


class EngineRecord(TypedDict):
    """settings.json without the fields that identify the launch."""

    #: setting to value, source (probe, metrics or log; null with the value) and reason (why the
    #: value is null); the settings are study/resources.py:SETTINGS
    settings: dict[str, SettingRecord]
    #: variables that can change a server, under server: value, or null where
    #: study/server_command.py:SHOWN does not list the name
    environment: dict[str, dict[str, str | None]]
    #: names of the caller's variables that could change a server and were dropped; no longer
    #: written
    cleared: NotRequired[list[str]]


class SettingsRecord(EngineRecord):
    """The content of settings.json."""

    launch: str  #: the launch's name
    attempt: int  #: the attempt that it describes
