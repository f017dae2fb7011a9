"""The fields of study.json and of the configuration in it, as they lie on disk.

What each means and may be: workflow/schemas/config.schema.yaml and docs/artifacts.md. A key that is
NotRequired is optional, or lacks in studies measured before it existed.
"""

from typing import Any, Literal, NotRequired, TypedDict

Reference = Literal["ref_safe", "ref_load"]
# Keys and values are somebody else's: vLLM's flags, a connector's own configuration.
Foreign = dict[str, Any]


class FormSection(TypedDict):
    """`engine.forms.<id>`: what differs for one configuration."""

    python: NotRequired[str]
    connector: NotRequired[str]
    flags: NotRequired[Foreign]
    environment: NotRequired[Foreign]
    transfer_config: NotRequired[Foreign]
    extra_config: NotRequired[Foreign]


class DeviceTimeSection(TypedDict):
    """`engine.device_time`: the emulated device."""

    accelerator: str
    model_config: str
    launch_us: float
    besides_us: float
    sweep_us: NotRequired[list[float]]


class ServedSection(TypedDict):
    """What a server serves and how it is asked; of kind command, `engine.served` of study.json."""

    model: str
    # None: the server takes no token ids, and is sent text.
    vocab_size: int | None
    chat: NotRequired[bool]
    # Of a text prompt, as the server counts them.
    tokens_per_word: NotRequired[float]
    fixed_tokens: NotRequired[int]
    # What a request may hold: vLLM's keys (vllm), usage (openai), neither (bare).
    body: NotRequired[str]
    # Whether an answer has exactly the tokens asked for (ignore_eos).
    exact_output: NotRequired[bool]
    # Whether /metrics has vLLM's counters.
    counters: NotRequired[bool]
    # Why the step probe is not in it; None: it is.
    no_steps: NotRequired[str | None]
    max_model_len: NotRequired[int | None]
    version: NotRequired[str | None]


class EngineSection(TypedDict):
    """`engine`: the server that is measured; after `label` the keys of one kind of engine each."""

    # A module of servers.
    kind: str
    label: str
    # embedded: the file, and in study.json what stands in it (schemas/embedded.schema.yaml).
    definition: NotRequired[str]
    definition_content: NotRequired[Foreign]
    # vllm.
    device: NotRequired[Literal["cpu", "cuda", "emulated"]]
    # emulated: the device, and in study.json the coefficients of its time (roofline.py).
    device_time: NotRequired[DeviceTimeSection]
    device_time_content: NotRequired[Foreign]
    python: NotRequired[str]
    build_python: NotRequired[str]
    model: NotRequired[str]
    revision: NotRequired[str]
    served_model_name: NotRequired[str]
    vocab_size: NotRequired[int]
    flags: NotRequired[Foreign]
    environment: NotRequired[Foreign]
    pythonpath: NotRequired[list[str]]
    forms: NotRequired[dict[str, FormSection]]
    # command: by configuration; what runs beside each; what the servers said of themselves.
    commands: NotRequired[dict[str, str]]
    beside: NotRequired[list[str]]
    served: NotRequired[ServedSection]


class ServerSection(TypedDict):
    """`server`: how it is started, stopped and placed."""

    host: str
    ready_timeout_s: float
    stop_grace_s: float
    release_s: float
    device: str
    cores: int


class SlotSection(TypedDict):
    """`devices[]`: CPUs and GPUs of this machine on which one block at a time is measured."""

    id: str
    visible: NotRequired[str]
    cpus: str


class CompanionCommand(TypedDict):
    """A companion's command, and the path whose GET says that it is ready."""

    command: list[str]
    ready: str


class ConnectorSection(TypedDict):
    """`connectors[]`: a configuration that the study defines itself."""

    id: str
    label: NotRequired[str]
    connector: str | None
    module_path: NotRequired[str | None]
    role: NotRequired[Literal["kv_producer", "kv_consumer", "kv_both"]]
    extra_config: NotRequired[Foreign]
    children: NotRequired[list[str]]
    purpose: NotRequired[str]
    companions: NotRequired[dict[str, list[str] | CompanionCommand]]


class ConfigurationEntry(TypedDict):
    """An entry of config/configurations.yaml, or of a study's own `connectors` filled up to one."""

    id: str
    label: str
    connector: str | None
    module_path: str | None
    role: Literal["kv_producer", "kv_consumer", "kv_both"] | None
    extra_config: Foreign
    children: list[str]
    gate: str | None
    purpose: str
    companions: NotRequired[dict[str, list[str] | CompanionCommand]]


class ArrivalsSection(TypedDict):
    """`arrivals`: the arrival process."""

    process: Literal["fixed", "jittered", "poisson", "gamma"]
    gamma_shape: float | None


class PhaseASection(TypedDict):
    """`phase_a`: the rate sweep of one shape."""

    rates_rps: list[float]
    input_tokens: int
    output_tokens: int


class PhaseBSection(TypedDict):
    """`phase_b`: the grid of shapes at ref_safe."""

    configurations: NotRequired[list[str]]
    input_tokens: list[int]
    output_tokens: list[int]


class PhaseBpSection(TypedDict):
    """`phase_bp`: shapes (input and output tokens) at ref_load."""

    configurations: list[str]
    shapes: list[list[int]]


class CellSection(TypedDict):
    """`cell`: how long a cell takes, and what it may have under way."""

    warmup_s: float
    floor_s: float
    cap_s: float
    min_completed: int
    drain_s: float
    inflight_cap: int
    request_timeout_s: float
    end_overloaded: NotRequired[bool]


class LoadGeneratorSection(TypedDict):
    """`load_generator`: its processes and connections."""

    workers: int
    connections_per_worker: int
    enable_cpu_affinity: bool
    keep_reads: bool


class MetricsSection(TypedDict):
    """`metrics`: how often the server's /metrics are read."""

    interval_s: float


class QuietRule(TypedDict):
    """The rule by which requests of disturbed time are left out; a cell's record holds it."""

    chunk_percentile: float
    level_percentile: float
    max_factor: float | None
    max_chunk_steal: float | None


class QuietSection(QuietRule):
    """`quiet`: how the machine is watched, and the rule."""

    interval_ms: float
    working_set_mib: float
    elements: int
    chunk_ms: float
    min_quiet_share: float
    level_looks: int


class ResourcesSection(TypedDict):
    """`resources`: for how long the idle server's CPU time is taken."""

    idle_s: float


class SaturationSection(TypedDict):
    """`saturation`: the bounds of the three criteria."""

    throughput_ratio_min: float
    waiting_p50_max: float
    ttft_p90_ratio_max: float


class ShapeRatesSection(TypedDict):
    """`shape_rates`: the share of what plain serves of a shape that is offered at most."""

    max_share: float
    probe_s: float


class ReferenceSection(TypedDict):
    """`reference`: the rate where none qualifies."""

    fallback_rps: float | None


class RehearsalSection(TypedDict):
    """`rehearsal`: an accelerator and a model's config.json, or an archive and a launch of it."""

    accelerator: NotRequired[str]
    model_config: NotRequired[str]
    archive: NotRequired[str]
    launch: NotRequired[str]
    launch_sd: NotRequired[float]


class StatisticsSection(TypedDict):
    """`statistics`: intervals, families and margins (by metric)."""

    confidence: float
    resamples: int
    margins: dict[str, float]
    confirmatory: list[Reference]
    chunk_s: float
    p99_min_samples: int
    looks: NotRequired[list[float]]


class PriorSection(TypedDict):
    """`hypotheses.prior`: the latencies that the hypotheses are from."""

    plain_ttft_p90_s: float
    nixl_ttft_p90_s: float
    mooncake_both_ttft_p90_s: float


class HypothesesSection(TypedDict):
    """`hypotheses`: what the hypotheses and the success criteria are judged by."""

    h1_min_tax: float
    h1_prior_band: list[float]
    h2_prior_gap_pp: float
    h2_gap_band_pp: list[float]
    h3_framework_share: float
    h3_implementation_share: float
    h4_tolerance: float
    max_hours: float
    prior: PriorSection


class StudyConfig(TypedDict):
    """One study's configuration: config/config.yaml and the like, and `config` of study.json.

    The schema requires more of a new study's: NotRequired is what an archive may lack.
    """

    study: str
    seed: int
    blocks: int
    baseline: NotRequired[str]
    plain_launches: int
    engine: EngineSection
    server: NotRequired[ServerSection]
    devices: NotRequired[list[SlotSection]]
    configurations: list[str]
    connectors: NotRequired[list[ConnectorSection]]
    arrivals: ArrivalsSection
    phase_a: PhaseASection
    phase_b: NotRequired[PhaseBSection]
    phase_bp: NotRequired[PhaseBpSection]
    cell: CellSection
    load_generator: NotRequired[LoadGeneratorSection]
    metrics: NotRequired[MetricsSection]
    quiet: NotRequired[QuietSection]
    resources: NotRequired[ResourcesSection]
    # By name, as artifacts/checks.py:BOUNDS has them; in study.json all of them.
    validity: dict[str, float]
    saturation: SaturationSection
    shape_rates: NotRequired[ShapeRatesSection | None]
    reference: ReferenceSection
    rehearsal: NotRequired[RehearsalSection]
    statistics: StatisticsSection
    hypotheses: HypothesesSection


class LaunchPlan(TypedDict):
    """One launch of `run_order`: its name (`nixl_both`, `plain_2`) and its block, from 0."""

    config: str
    block: int


class CellPlan(TypedDict):
    """One planned cell: its name, requests/s (null where the rate is data), tokens."""

    cell: str
    rate_rps: float | None
    input_tokens: int
    output_tokens: int


class DesignLabel(TypedDict):
    """What every record of a study says of its design."""

    design_sha256: str
    engine_label: str


class StudyDocument(DesignLabel):
    """study.json: the resolved design. `run_order` and `cells` are by phase."""

    study: str
    emulated: bool
    package_version: NotRequired[str]
    created_utc: NotRequired[str]
    seed: int
    blocks: int
    config: StudyConfig
    configurations: list[ConfigurationEntry]
    run_order: dict[str, list[LaunchPlan]]
    cells: dict[str, list[CellPlan]]
