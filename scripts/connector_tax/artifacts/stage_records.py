"""The fields of the study's own files: gates, step timing, model, environment, rates, hypotheses.

As they lie on disk; what each means: docs/artifacts.md. A key that is NotRequired lacks where it
does not apply, or in studies measured before it existed.
"""

from typing import Any, NotRequired, TypedDict

from connector_tax.artifacts.launch_files import QuietLevel
from connector_tax.artifacts.study_records import (
    ConfigurationEntry,
    HypothesesSection,
    Reference,
    ReferenceSection,
    RehearsalSection,
    SaturationSection,
    StatisticsSection,
)


class GateRecord(TypedDict):
    """One configuration in preflight_status.json."""

    include: bool
    reason: str
    evidence: NotRequired[str | None]
    paths: NotRequired[dict[str, str]]


class HookTarget(TypedDict):
    """A method that the step probe wraps."""

    hook: str
    file: str
    line: int
    sha256: str


class VllmDescription(TypedDict):
    """What step_probe/hook_points.py says of an installed vLLM; `package` is its folder."""

    vllm: str
    package: str
    targets: list[HookTarget]
    missing: list[str]


class PatchStatus(TypedDict):
    """patch_status.json; from `vllm` on of a real vLLM only."""

    step_timing_available: bool
    method: NotRequired[str]
    reason: NotRequired[str | None]
    targets: NotRequired[list[HookTarget]]
    vllm: NotRequired[str]
    missing: NotRequired[list[str]]
    overlay: NotRequired[dict[str, str]]
    vllm_sources_sha256_before: NotRequired[str]
    leftovers: NotRequired[list[str]]
    steps_recorded: NotRequired[dict[str, int]]


class OverlayStatus(TypedDict):
    """The part of patch_status.json that says what was installed."""

    vllm: str
    targets: list[HookTarget]
    missing: list[str]
    overlay: dict[str, str]
    vllm_sources_sha256_before: str
    leftovers: list[str]


class RevertStatus(TypedDict):
    """revert_status.json; after `removed` of a real vLLM only."""

    reverted: bool
    removed: list[str]
    vllm_sources_sha256_before: NotRequired[str]
    vllm_sources_sha256_after: NotRequired[str]
    leftovers: NotRequired[list[str]]


class ModelRecord(TypedDict):
    """model.json: the model that was fetched."""

    model: str
    revision: str | None
    commit: str
    files: int
    bytes: int
    seconds: float


class EnvironmentRecord(TypedDict):
    """environment.json: what the study ran on."""

    engine_label: str
    vllm: str
    mooncake: str
    nixl: str
    lmcache: str
    vllm_sha: str
    further_engines: NotRequired[dict[str, dict[str, str]]]
    gpu: list[str]
    gpu_driver: str
    cpu: str
    memory_gib: float
    kernel: str
    clocksource: str
    cpu_governor: str
    python: str
    model: NotRequired[ModelRecord]
    quiet_level: NotRequired[QuietLevel]
    connector_tax: str
    connector_tax_git_sha: str


class CriterionRecord(TypedDict):
    """One criterion of saturation: median over the launches; null: none has it."""

    value: float | None
    bound: float
    fired: bool | None


class RateCriteria(TypedDict):
    """One rate of one configuration; `saturated` is null without a valid launch."""

    saturated: bool | None
    n_launches: int
    n_saturated: int
    throughput_ratio: CriterionRecord
    waiting: CriterionRecord
    ttft_ratio: CriterionRecord
    backlog_growth: list[float | None]


class RatesRecord(TypedDict):
    """reference_rates.json; `criteria` is by configuration and rate."""

    ref_safe: float
    ref_load: float
    rates_rps: list[float]
    saturation_rate_rps: dict[str, float | None]
    criteria: dict[str, dict[str, RateCriteria]]
    left_out: dict[str, str]
    fallback_used: bool
    # Where a phase was measured at a rate that Phase A gives no more.
    derived_now: NotRequired[dict[Reference, float | None]]


class ShapeRate(TypedDict):
    """What plain served of one shape, and the most that is offered of it."""

    completed_s: list[float]
    served_rps: float
    most_rps: float


class ShapeRatesRecord(TypedDict):
    """shape_rates.json; `shapes` is by cell name."""

    design_sha256: str
    label: str
    probed_utc: str
    shapes: dict[str, ShapeRate]


class DurationsRecord(TypedDict):
    """durations.json: expected seconds, of the cells by phase and name."""

    design_sha256: str
    machine: RehearsalSection | None
    startup_s: float
    probes_s: float
    source: str
    rates_rps: dict[str, float]
    cells: dict[str, dict[str, float]]


class AnalysisSettings(TypedDict):
    """The sections of a configuration that decide what the measurements are said to mean."""

    saturation: SaturationSection
    reference: ReferenceSection
    statistics: StatisticsSection
    hypotheses: HypothesesSection


class SealContent(TypedDict, total=False):
    """What a link seals: the settings and names of a design, or the index of a launch."""

    design_sha256: str
    settings: AnalysisSettings
    configurations: list[ConfigurationEntry]
    launch: str
    index_sha256: str


class SealLink(SealContent):
    """One line of seals.jsonl."""

    number: int
    previous: str
    utc: str
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

    engine_label: str
    emulated: bool
    hypotheses: list[ConclusionRecord]
    criteria: list[ConclusionRecord]
