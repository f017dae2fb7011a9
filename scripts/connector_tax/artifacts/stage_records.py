"""The fields of the study's own files: gates, step timing, model, environment, rates, hypotheses.

As they lie on disk; what each means: docs/artifacts.md. A key that is NotRequired lacks where it
does not apply, or in studies measured before it existed.
"""

from typing import Annotated, Any, NotRequired, Required, TypedDict

from connector_tax.artifacts.declare import says
from connector_tax.artifacts.study_records import (
    ConfigurationEntry,
    HypothesesSection,
    Reference,
    ReferenceSection,
    RehearsalSection,
    StatisticsSection,
)


class GateRecord(TypedDict):
    """One configuration in preflight_status.json."""

    include: Annotated[bool, says("it is run")]
    reason: Annotated[str, says("why, or why not")]
    evidence: NotRequired[Annotated[str | None, says("the gate's log; null: no gate")]]
    paths: NotRequired[
        Annotated[
            dict[str, str],
            says(
                "the way a connector's data would take, in the words of its log: Mooncake "
                "protocol, Mooncake RDMA devices, NIXL backend, NIXL transports, LMCache "
                "kernels; absent without a gate"
            ),
        ]
    ]
    steps: NotRequired[
        Annotated[
            dict[str, int],
            says("recorded of the gate's requests, by process; absent without the step probe"),
        ]
    ]


class VllmDescription(TypedDict):
    """What step_probe/hook_points.py says of an installed vLLM; `package` is its folder."""

    vllm: str
    package: str
    targets: list[dict[str, Any]]
    missing: list[str]


class PatchStatus(TypedDict, total=False):
    """patch_status.json; from `vllm` on of a real vLLM only."""

    step_timing_available: Required[Annotated[bool, says("steps and hooks are timed")]]
    method: Annotated[str, says("how")]
    reason: Annotated[str | None, says("why it is not; null: available")]
    targets: Annotated[
        list[dict[str, Any]], says("wrapped methods: hook, file, line, SHA-256 of the file")
    ]
    vllm: Annotated[str, says("its version; absent but for a vLLM")]
    missing: Annotated[list[str], says("hook points this vLLM lacks; absent but for a vLLM")]
    overlay: Annotated[
        dict[str, str], says("SHA-256 of the overlay's files; absent but for a vLLM")
    ]
    vllm_sources_sha256_before: Annotated[
        str, says("over all sources of the installed vLLM; absent but for a vLLM")
    ]
    leftovers: Annotated[
        list[str],
        says("files of the environment with the probe's marker: none; absent but for a vLLM"),
    ]
    steps_recorded: Annotated[
        dict[str, int],
        says("by process, in the baseline's gate; steps; absent but for a vLLM"),
    ]


class RevertStatus(TypedDict, total=False):
    """revert_status.json; after `removed` of a real vLLM only."""

    reverted: Required[bool]
    removed: Required[list[str]]
    vllm_sources_sha256_before: str
    vllm_sources_sha256_after: str
    leftovers: list[str]


class ModelRecord(TypedDict):
    """model.json: the model that was fetched."""

    model: Annotated[str, says("`engine.model`")]
    revision: Annotated[str | None, says("`engine.revision`; null: not asked for")]
    commit: Annotated[str, says("of the model's repository: what every launch loads")]
    files: Annotated[int, says("how many")]
    bytes: Annotated[int, says("their size; B")]
    seconds: Annotated[float, says("how long fetching took; little where they were there; s")]


class EnvironmentRecord(TypedDict):
    """environment.json: what the study ran on."""

    engine_label: Annotated[str, says("the engine's label")]
    vllm: Annotated[str, says("version, or that it is not installed")]
    mooncake: Annotated[str, says("version, or that it is not installed")]
    nixl: Annotated[str, says("version, or that it is not installed")]
    lmcache: Annotated[str, says("version, or that it is not installed")]
    vllm_sha: Annotated[str, says("vLLM's commit, or the release")]
    further_engines: NotRequired[
        Annotated[
            dict[str, dict[str, str]],
            says(
                "interpreter (`engine.forms.<id>.python`) to the same versions of its "
                "environment; absent where all are served with one interpreter"
            ),
        ]
    ]
    gpu: Annotated[list[str], says("nvidia-smi -L, or that there is none")]
    gpu_driver: Annotated[str, says("version of the driver")]
    cpu: Annotated[str, says("model and usable CPUs")]
    memory_gib: Annotated[float, says("main memory")]
    kernel: Annotated[str, says("name, release, version")]
    clocksource: Annotated[str, says("of the kernel; unknown where it does not say")]
    cpu_governor: Annotated[str, says("of CPU 0; unknown where it does not say")]
    python: Annotated[str, says("version of the pipeline's")]
    model: NotRequired[
        Annotated[
            ModelRecord,
            says(
                "model.json: the model, its revision as asked for, the commit that was fetched,"
                " files, bytes, seconds; absent where the model is a folder, and in older "
                "studies"
            ),
        ]
    ]
    connector_tax: Annotated[str, says("version of this package")]
    connector_tax_git_sha: Annotated[str, says("commit of this project, if it is a checkout")]


class RatesRecord(TypedDict):
    """reference_rates.json; `criteria` is by configuration and rate."""

    ref_safe: Annotated[float, says("the reference rates; 1/s")]
    ref_load: Annotated[float, says("the reference rates; 1/s")]
    rates_rps: Annotated[list[float], says("the grid of Phase A")]
    saturation_rate_rps: Annotated[
        dict[str, float | None],
        says(
            "launch name to the lowest saturated rate; null: a configuration the sweep did "
            "not saturate"
        ),
    ]
    criteria: Annotated[
        dict[str, dict[str, dict[str, Any]]],
        says(
            "launch name and rate to: saturated, n_launches, n_saturated, each criterion's "
            "value, bound and fired, backlog_growth (s by quarter)"
        ),
    ]
    left_out: Annotated[dict[str, str], says("configuration to why it has no say in the rates")]
    fallback_used: Annotated[bool, says("reference.fallback_rps stands in")]
    # Where a phase was measured at a rate that Phase A gives no more.
    derived_now: NotRequired[
        Annotated[
            dict[Reference, float | None],
            says(
                "reference rate to what Phase A gives by now (null: none), where a phase has "
                "been measured at another: that one stays; 1/s; null: each is what Phase A "
                "gives"
            ),
        ]
    ]


class ShapeRate(TypedDict):
    """What plain served of one shape, and the most that is offered of it."""

    completed_s: list[float]
    served_rps: float
    most_rps: float


class ShapeRatesRecord(TypedDict):
    """shape_rates.json; `shapes` is by cell name."""

    design_sha256: Annotated[str, says("of the design")]
    label: Annotated[str, says("the engine's label")]
    probed_utc: Annotated[str, says("when the probes had ended, ISO 8601")]
    shapes: Annotated[
        dict[str, ShapeRate],
        says(
            "cell name to: completed_s (when each request of the fastest burst was "
            "completed), served_rps (completions over the last of these), most_rps "
            "(`max_share` of that)"
        ),
    ]


class DurationsRecord(TypedDict):
    """durations.json: expected seconds, of the cells by phase and name."""

    design_sha256: Annotated[str, says("of the design")]
    machine: Annotated[
        RehearsalSection | None,
        says("the `rehearsal` section of its configuration; null: the study names none"),
    ]
    startup_s: Annotated[float, says("from a launch to a server that answers")]
    probes_s: Annotated[float, says("all probes of shapes together; 0 where none is made")]
    source: Annotated[str, says("which model, or what was assumed, and why")]
    rates_rps: Annotated[
        dict[str, float], says("expected reference rate of Phases B and B'; empty without a model")
    ]
    cells: Annotated[
        dict[str, dict[str, float]],
        says(
            "by phase and cell, a second measurement of a void cell included, 0 where it is"
            " left out; empty without a model; s"
        ),
    ]


class AnalysisSettings(TypedDict):
    """The sections of a configuration that decide what the measurements are said to mean."""

    saturation: dict[str, float]
    reference: ReferenceSection
    statistics: StatisticsSection
    hypotheses: HypothesesSection


class SealContent(TypedDict, total=False):
    """What a link seals: the settings and names of a design, or the index of a launch."""

    design_sha256: Annotated[str, says("of the design, in the first link")]
    settings: Annotated[
        AnalysisSettings,
        says(
            "the sections saturation, reference, statistics and hypotheses of the "
            "configuration, before anything of the design was measured; absent but in a "
            "link that holds settings"
        ),
    ]
    configurations: Annotated[
        list[ConfigurationEntry],
        says(
            "the configurations of study.json with their names, as they were then; absent "
            "but in a link that holds settings"
        ),
    ]
    launch: Annotated[
        str,
        says(
            "as plain/block0/A; of several links of one launch the last counts; absent but "
            "in the link of a launch"
        ),
    ]
    index_sha256: Annotated[
        str,
        says(
            "of its index.json, which holds the SHA-256 of its other files; absent but in "
            "the link of a launch"
        ),
    ]


class SealLink(SealContent):
    """One line of seals.jsonl."""

    number: Annotated[int, says("from 0")]
    previous: Annotated[
        str, says("SHA-256 of the line before, without its line end; of the first line 64 zeros")
    ]
    utc: Annotated[str, says("when, ISO 8601")]
    files: Annotated[
        dict[str, str | None],
        says(
            "SHA-256 of the files that no launch's index.json holds (study.json, gates, "
            "environment, reference_rates.json, runs that were moved aside) that are new or"
            " changed since the link before; null: gone"
        ),
    ]


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

    engine_label: Annotated[str, says("the engine's label")]
    emulated: Annotated[bool, says("measured on the embedded engine")]
    hypotheses: Annotated[
        list[ConclusionRecord],
        says(
            "id, verdict (supported, refuted, cannot tell), sentence, numbers with "
            "intervals as fractions; where more blocks would decide, blocks_needed (null: "
            "not by 100)"
        ),
    ]
    criteria: Annotated[
        list[ConclusionRecord],
        says("id (1 to 7), verdict (met, not met, cannot tell), sentence, numbers"),
    ]
