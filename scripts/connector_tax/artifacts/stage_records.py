"""The fields of the study's own files: gates, step timing, model, environment, rates, hypotheses.

Their meanings: docs/artifacts.md. A NotRequired key is absent where it does not apply, or in
studies older than the key.
"""

from typing import Annotated, Any, NotRequired, Required, TypedDict

from connector_tax.artifacts.study_records import (
    ConfigurationEntry,
    HypothesesSection,
    Reference,
    ReferenceSection,
    StatisticsSection,
    meta,
)


class GateRecord(TypedDict):
    """One configuration in preflight_status.json."""

    include: bool  #: whether it is run
    reason: str  #: the reason
    evidence: NotRequired[str | None]  #: the gate's log; null: no gate
    #: the data path of a connector, from its log: Mooncake protocol, Mooncake RDMA devices, NIXL
    #: backend, NIXL transports, LMCache kernels; absent without a gate
    paths: NotRequired[dict[str, str]]
    #: step records of the gate's requests, by process; absent without the step probe
    steps: NotRequired[dict[str, int]]


class VllmDescription(TypedDict):
    """The result of step_probe/hook_points.py for an installed vLLM; `package` is its folder."""

    vllm: str
    package: str
    targets: list[dict[str, Any]]
    missing: list[str]


class PatchStatus(TypedDict, total=False):
    """patch_status.json; fields from `vllm` on exist only for a real vLLM."""

    step_timing_available: Required[bool]  #: whether steps and hooks are timed
    method: str  #: the method of timing
    reason: str | None  #: why timing is not available; null: it is
    targets: list[dict[str, Any]]  #: wrapped methods: hook, file, line, SHA-256 of the file
    vllm: str  #: vLLM's version; only for a vLLM
    missing: list[str]  #: hook points that this vLLM lacks; only for a vLLM
    overlay: dict[str, str]  #: SHA-256 of the overlay's files; only for a vLLM
    #: SHA-256 over all sources of the installed vLLM; only for a vLLM
    vllm_sources_sha256_before: str
    #: files of the environment with the probe's marker, which must be none; only for a vLLM
    leftovers: list[str]
    #: steps recorded in the baseline's gate, by process; only for a vLLM
    steps_recorded: dict[str, int]


class RevertStatus(TypedDict, total=False):
    """revert_status.json; fields after `removed` exist only for a real vLLM."""

    reverted: Required[bool]
    removed: Required[list[str]]
    vllm_sources_sha256_before: str
    vllm_sources_sha256_after: str
    leftovers: list[str]


class ModelRecord(TypedDict):
    """model.json: the model that was fetched."""

    model: str  #: `engine.model`
    revision: str | None  #: `engine.revision`; null: not set
    commit: str  #: commit of the model's repository that every launch loads
    files: int  #: number of files
    bytes: int  #: total size of the files; B
    seconds: float  #: duration of fetching, short if the files were cached; s


class EnvironmentRecord(TypedDict):
    """environment.json: the software and hardware of the study."""

    engine_label: str  #: the engine's label
    vllm: str  #: version, or a text that it is not installed
    mooncake: str  #: version, or a text that it is not installed
    nixl: str  #: version, or a text that it is not installed
    lmcache: str  #: version, or a text that it is not installed
    vllm_sha: str  #: vLLM's commit, or the release
    #: interpreter (`engine.forms.<id>.python`) to the same versions of its environment; absent
    #: where all are served with one interpreter
    further_engines: NotRequired[dict[str, dict[str, str]]]
    gpu: list[str]  #: output of nvidia-smi -L, or a text that there is none
    gpu_driver: str  #: version of the driver
    cpu: str  #: model and usable CPUs
    memory_gib: float  #: main memory
    kernel: str  #: name, release, version
    clocksource: str  #: of the kernel; unknown where it does not say
    cpu_governor: str  #: of CPU 0; unknown where it does not say
    python: str  #: version of the pipeline's
    #: model.json: the model, its revision as asked for, the commit that was fetched, files, bytes,
    #: seconds; absent where the model is a folder
    model: NotRequired[ModelRecord]
    connector_tax: str  #: version of this package
    connector_tax_git_sha: str  #: commit of this project, if it is a checkout


class RatesRecord(TypedDict):
    """reference_rates.json; `criteria` is by configuration and rate."""

    ref_safe: float  #: the reference rates; 1/s
    ref_load: float  #: the reference rates; 1/s
    rates_rps: list[float]  #: the grid of Phase A
    #: launch name to the lowest saturated rate; null: a configuration the sweep did not saturate
    saturation_rate_rps: dict[str, float | None]
    #: launch name and rate to: saturated, n_launches, n_saturated, each criterion's value, bound
    #: and fired, backlog_growth (s by quarter)
    criteria: dict[str, dict[str, dict[str, Any]]]
    left_out: dict[str, str]  #: configuration to the reason why the rates ignore it
    fallback_used: bool  #: whether reference.fallback_rps is used
    # If a phase was measured at a rate that Phase A no longer gives.
    #: reference rate to the value that Phase A now gives (null: none), if a phase was measured at
    #: another, which stays; 1/s; null: all agree with Phase A
    derived_now: NotRequired[dict[Reference, float | None]]


class ShapeRate(TypedDict):
    """The throughput of one shape on plain, and the highest rate offered for it."""

    completed_s: list[float]
    served_rps: float
    most_rps: float


class ShapeRatesRecord(TypedDict):
    """shape_rates.json; `shapes` is by cell name."""

    design_sha256: str  #: of the design
    label: str  #: the engine's label
    probed_utc: NotRequired[str]  #: end of the probes, ISO 8601; no longer written
    #: cell name to: completed_s (completion times of the fastest burst), served_rps (completions
    #: over the last time), most_rps (`max_share` of served_rps)
    shapes: dict[str, ShapeRate]


class AnalysisSettings(TypedDict):
    """The sections of a configuration that control the analysis."""

    saturation: dict[str, float]
    reference: ReferenceSection
    statistics: StatisticsSection
    hypotheses: HypothesesSection


class SealContent(TypedDict, total=False):
    """The sealed content of a link: a design's settings and names, or a launch's index."""

    design_sha256: str  #: of the design, in the first link
    #: the sections saturation, reference, statistics and hypotheses of the configuration, sealed
    #: before the first measurement; only in a link with settings
    settings: AnalysisSettings
    #: version of the method at planning; only in a link with settings; absent in older ones, which
    #: are of method 1
    method: int
    #: the configurations of study.json with their names at that time; only in a link with settings
    configurations: list[ConfigurationEntry]
    #: such as plain/block0/A; the last link of a launch counts; only in the link of a launch
    launch: str
    #: SHA-256 of its index.json, which lists its other files; only in the link of a launch
    index_sha256: str


class SealLink(SealContent):
    """One line of seals.jsonl."""

    number: int  #: from 0
    previous: str  #: SHA-256 of the line before, without its line end; of the first line 64 zeros
    utc: str  #: time of sealing, ISO 8601
    #: SHA-256 of new or changed files that no launch's index.json lists (study.json, gates,
    #: environment, reference_rates.json, runs that were moved aside); null: removed
    files: dict[str, str | None]


class EffectNumbers(TypedDict):
    """An effect among the `numbers` of hypotheses.json; fractions."""

    point: float
    lo: float | None
    hi: float | None
    method: str
    n_blocks: int
    mark: str


class ConclusionRecord(TypedDict):
    """One hypothesis or criterion in hypotheses.json."""

    id: str | int
    verdict: str
    sentence: str
    numbers: dict[str, Any]
    point_label: str | None


class HypothesesRecord(TypedDict):
    """The content of hypotheses.json."""

    engine_label: str  #: the engine's label
    emulated: bool  #: whether it was measured on the embedded engine
    #: id, verdict (supported, refuted, cannot tell), sentence, numbers with intervals as fractions;
    #: where more blocks would decide, blocks_needed (null: not by 100)
    hypotheses: list[ConclusionRecord]
    #: id (1 to 7), verdict (met, not met, cannot tell), sentence, numbers
    criteria: list[ConclusionRecord]


class ManifestRecord(TypedDict):
    """manifest.json; before release 0.4 the list of launches alone."""

    method: Annotated[int, meta(ge=1)]  #: version of the method that made the claims
    package: str | None  #: version of this package that made them; null: before release 0.4
    #: SHA-256 of every table, picture and page, reference_rates.json and looks.json; for an SVG
    #: with clip paths named by number, for the report with each picture replaced by its digest
    files: dict[str, str]
    launches: list[dict[str, str]]  #: a row for each launch
