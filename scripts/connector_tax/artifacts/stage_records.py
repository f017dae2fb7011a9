"""The fields of the study's own files: gates, step timing, model, environment, rates, hypotheses.

As they lie on disk; what each means: docs/artifacts.md. A key that is NotRequired lacks where it
does not apply, or in studies measured before it existed.
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

    include: bool  #: it is run
    reason: str  #: why, or why not
    evidence: NotRequired[str | None]  #: the gate's log; null: no gate
    #: the way a connector's data would take, in the words of its log: Mooncake protocol, Mooncake
    #: RDMA devices, NIXL backend, NIXL transports, LMCache kernels; absent without a gate
    paths: NotRequired[dict[str, str]]
    #: recorded of the gate's requests, by process; absent without the step probe
    steps: NotRequired[dict[str, int]]


class VllmDescription(TypedDict):
    """The result of step_probe/hook_points.py for an installed vLLM; `package` is its folder."""

    vllm: str
    package: str
    targets: list[dict[str, Any]]
    missing: list[str]


class PatchStatus(TypedDict, total=False):
    """patch_status.json; from `vllm` on of a real vLLM only."""

    step_timing_available: Required[bool]  #: steps and hooks are timed
    method: str  #: how
    reason: str | None  #: why it is not; null: available
    targets: list[dict[str, Any]]  #: wrapped methods: hook, file, line, SHA-256 of the file
    vllm: str  #: its version; absent but for a vLLM
    missing: list[str]  #: hook points this vLLM lacks; absent but for a vLLM
    overlay: dict[str, str]  #: SHA-256 of the overlay's files; absent but for a vLLM
    #: over all sources of the installed vLLM; absent but for a vLLM
    vllm_sources_sha256_before: str
    #: files of the environment with the probe's marker: none; absent but for a vLLM
    leftovers: list[str]
    #: by process, in the baseline's gate; steps; absent but for a vLLM
    steps_recorded: dict[str, int]


class RevertStatus(TypedDict, total=False):
    """revert_status.json; after `removed` of a real vLLM only."""

    reverted: Required[bool]
    removed: Required[list[str]]
    vllm_sources_sha256_before: str
    vllm_sources_sha256_after: str
    leftovers: list[str]


class ModelRecord(TypedDict):
    """model.json: the model that was fetched."""

    model: str  #: `engine.model`
    revision: str | None  #: `engine.revision`; null: not asked for
    commit: str  #: of the model's repository: what every launch loads
    files: int  #: how many
    bytes: int  #: their size; B
    seconds: float  #: how long fetching took; little where they were there; s


class EnvironmentRecord(TypedDict):
    """environment.json: what the study ran on."""

    engine_label: str  #: the engine's label
    vllm: str  #: version, or that it is not installed
    mooncake: str  #: version, or that it is not installed
    nixl: str  #: version, or that it is not installed
    lmcache: str  #: version, or that it is not installed
    vllm_sha: str  #: vLLM's commit, or the release
    #: interpreter (`engine.forms.<id>.python`) to the same versions of its environment; absent
    #: where all are served with one interpreter
    further_engines: NotRequired[dict[str, dict[str, str]]]
    gpu: list[str]  #: nvidia-smi -L, or that there is none
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
    left_out: dict[str, str]  #: configuration to why it has no say in the rates
    fallback_used: bool  #: reference.fallback_rps stands in
    # Where a phase was measured at a rate that Phase A gives no more.
    #: reference rate to what Phase A gives by now (null: none), where a phase has been measured at
    #: another: that one stays; 1/s; null: each is what Phase A gives
    derived_now: NotRequired[dict[Reference, float | None]]


class ShapeRate(TypedDict):
    """The throughput of one shape on plain, and the highest rate that is offered of it."""

    completed_s: list[float]
    served_rps: float
    most_rps: float


class ShapeRatesRecord(TypedDict):
    """shape_rates.json; `shapes` is by cell name."""

    design_sha256: str  #: of the design
    label: str  #: the engine's label
    #: when the probes had ended, ISO 8601; no longer written
    probed_utc: NotRequired[str]
    #: cell name to: completed_s (when each request of the fastest burst was completed), served_rps
    #: (completions over the last of these), most_rps (`max_share` of that)
    shapes: dict[str, ShapeRate]


class AnalysisSettings(TypedDict):
    """The sections of a configuration that turn measurements into statements."""

    saturation: dict[str, float]
    reference: ReferenceSection
    statistics: StatisticsSection
    hypotheses: HypothesesSection


class SealContent(TypedDict, total=False):
    """The content that a link seals: a design's settings and names, or a launch's index."""

    design_sha256: str  #: of the design, in the first link
    #: the sections saturation, reference, statistics and hypotheses of the configuration, before
    #: anything of the design was measured; absent but in a link that holds settings
    settings: AnalysisSettings
    #: version of the method that the study was planned with; absent in older links, which were
    #: planned with method 1, and but in a link that holds settings
    method: int
    #: the configurations of study.json with their names, as they were then; absent but in a link
    #: that holds settings
    configurations: list[ConfigurationEntry]
    #: as plain/block0/A; of several links of one launch the last counts; absent but in the link of
    #: a launch
    launch: str
    #: of its index.json, which holds the SHA-256 of its other files; absent but in the link of a
    #: launch
    index_sha256: str


class SealLink(SealContent):
    """One line of seals.jsonl."""

    number: int  #: from 0
    previous: str  #: SHA-256 of the line before, without its line end; of the first line 64 zeros
    utc: str  #: when, ISO 8601
    #: SHA-256 of the files that no launch's index.json holds (study.json, gates, environment,
    #: reference_rates.json, runs that were moved aside) that are new or changed since the link
    #: before; null: gone
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
    """hypotheses.json."""

    engine_label: str  #: the engine's label
    emulated: bool  #: measured on the embedded engine
    #: id, verdict (supported, refuted, cannot tell), sentence, numbers with intervals as fractions;
    #: where more blocks would decide, blocks_needed (null: not by 100)
    hypotheses: list[ConclusionRecord]
    #: id (1 to 7), verdict (met, not met, cannot tell), sentence, numbers
    criteria: list[ConclusionRecord]


class ManifestRecord(TypedDict):
    """manifest.json; before release 0.4 the list of launches alone."""

    method: Annotated[int, meta(ge=1)]  #: version of the method that made the claims
    package: str | None  #: version of this package that made them; null: before release 0.4
    #: SHA-256 of every table, picture and page, reference_rates.json and looks.json; of an SVG with
    #: clip paths named by number, of the report with the digest of each picture in its place
    files: dict[str, str]
    launches: list[dict[str, str]]  #: a row for each launch
