"""The fields of study.json, of the configuration in it, and of the files that make it up.

Times are seconds and rates requests/s unless the name says otherwise.

A declaration is a field of a TypedDict, dataclass or Struct, its meaning a comment that begins with
`#:`, above it or beside it. From it come the type that mypy checks, the check of what is read
(`record_reader`), the JSON schema of what a user writes (`schemas`) and the page of fields
(docs/fields.py).
"""

from typing import Annotated, Any, Literal, NotRequired, Required, TypedDict

from msgspec import Meta

from connector_tax.artifacts.record_reader import NOT_BEFORE_LINE_END

_MSGSPEC = ("gt", "ge", "lt", "le", "pattern", "min_length", "max_length")


def meta(**limits: Any) -> Meta:
    """Return a field's limits as metadata.

    Args:
        limits: limits of msgspec.Meta, other keys of JSON Schema (`uniqueItems`), or `default`,
            the value of a field that a file leaves out.
    """
    checked = {name: limits.pop(name) for name in _MSGSPEC if name in limits}
    if checked.get("pattern", "").endswith("$"):
        checked["pattern"] += NOT_BEFORE_LINE_END
    return Meta(extra_json_schema=limits or None, **checked)


Reference = Literal["ref_safe", "ref_load"]
# Keys and values are defined elsewhere: vLLM's flags, a connector's own configuration.
Foreign = dict[str, Any]

Positive = Annotated[float, meta(gt=0)]
NonNegative = Annotated[float, meta(ge=0)]
Fraction = Annotated[float, meta(gt=0, le=1)]
Share = Annotated[float, meta(ge=0, le=1)]
Count = Annotated[int, meta(ge=1)]
Tokens = Annotated[int, meta(ge=1, le=1_000_000)]
# One token has no TPOT.
OutputTokens = Annotated[int, meta(ge=2, le=1_000_000)]
Text = Annotated[str, meta(min_length=1)]
Identifier = Annotated[str, meta(pattern="^[a-z][a-z0-9_]{0,47}$")]
# plain_2, ..., plain_20 are further launches of plain, where that is the baseline.
ConfigurationId = Annotated[str, meta(pattern="^(?!.*_([2-9]|1[0-9]|20)$)[a-z][a-z0-9_]{0,47}$")]
ClassName = Annotated[str, meta(pattern="^[A-Za-z_][A-Za-z0-9_]*$")]
ModuleName = Annotated[str, meta(pattern="^[A-Za-z_][A-Za-z0-9_.]*$")]
Role = Literal["kv_producer", "kv_consumer", "kv_both"]
# A flag's value is anything that vLLM takes, except lists and mappings.
Flag = Annotated[Any, meta(type=["string", "number", "boolean", "null"])]
Flags = dict[Annotated[str, meta(pattern="^--[a-z][a-z0-9-]*$")], Flag]
# Null removes a variable.
Variable = Annotated[Any, meta(type=["string", "null"])]
Environment = dict[
    Annotated[str, meta(pattern="^(?!(PYTHONPATH|AGENTIC_STEP_LOG_PATH)$)[A-Za-z_][A-Za-z0-9_]*$")],
    Variable,
]
# Each is a process; all start at once.
MOST_WORKERS = 256
Ids = Annotated[list[Identifier], meta(min_length=1, uniqueItems=True)]


class FormSection(TypedDict, total=False):
    """A study's changes to one configuration of config/configurations.yaml."""

    python: Text  #: interpreter of another environment, for another vLLM or connector
    connector: ClassName  #: another connector class
    flags: Flags  #: added to engine.flags; null removes a flag
    environment: Environment  #: added to engine.environment; null removes a variable
    transfer_config: Foreign  #: added to vLLM's KVTransferConfig
    extra_config: Foreign  #: added to the configuration's extra_config


class DeviceTimeSection(TypedDict):
    """The emulated device: its step time is a roofline of the accelerator and the model."""

    accelerator: Text  #: a row of config/accelerators.yaml
    model_config: Text  #: the model's config.json, which has its sizes
    #: the host's CPU time for launching the kernels of a step, us; an assumption
    launch_us: NonNegative
    #: time of a step, us, for all device work besides matrix products and attention; an assumption
    besides_us: NonNegative
    #: of the link to the host's memory, in each direction, GB/s; an assumption
    link_gb_s: NotRequired[Annotated[Positive, meta(default=50)]]
    #: the host's CPU time for submitting a copy, us; an assumption
    copy_us: NotRequired[Annotated[NonNegative, meta(default=10)]]
    #: ... and for each of its pieces, ns; unknown until a GPU has been measured
    copy_piece_ns: NotRequired[Annotated[NonNegative, meta(default=0)]]


class ServedSection(TypedDict):
    """The served model and the form of its requests."""

    model: str  #: the name that requests ask for
    #: token ids below this are valid; null: text is sent
    vocab_size: Annotated[int, meta(ge=100)] | None
    chat: NotRequired[bool]  #: whether only /v1/chat/completions is served
    #: tokens per word of a text prompt, by the server's count
    tokens_per_word: NotRequired[Positive]
    fixed_tokens: NotRequired[int]  #: tokens of a text prompt without words, by the server's count
    #: what a request may hold: vLLM's keys, usage, neither
    body: NotRequired[Annotated[str, meta(enum=["vllm", "openai", "bare"])]]
    #: whether answers have exactly the requested length (ignore_eos)
    exact_output: NotRequired[bool]
    counters: NotRequired[bool]  #: whether /metrics has vLLM's counters
    no_steps: NotRequired[str | None]  #: why the server has no step probe; null: it has
    max_model_len: NotRequired[int | None]  #: most tokens of a request, from /v1/models
    version: NotRequired[str | None]  #: the answer of /version


class AccessSection(TypedDict, total=False):
    """Key and certificate for servers that need them."""

    variable: Text  #: environment variable with the key, which is recorded nowhere
    header: Text  #: header that sends the key; by default Authorization, as a bearer token
    ca_file: Text  #: PEM certificates to trust instead of the system's
    insecure: bool  #: whether any certificate is trusted


class EngineSection(TypedDict, total=False):
    """The measured server; its `kind` defines which other keys it has."""

    # A module of servers, whose KIND names the required and the allowed keys.
    kind: Required[Identifier]  #: kind of server
    #: stands in every record, table and figure
    label: Required[Annotated[str, meta(min_length=1, max_length=60)]]
    definition: Text  #: file with step cost and connector taxes
    # No kind names these two: no study's file may have them.
    definition_content: Foreign  #: in study.json: the content of `definition`
    device_time_content: Foreign  #: in study.json: coefficients of the emulated device's time
    device: Literal["cpu", "cuda", "emulated"]  #: emulated: its time is waited for (device_time)
    #: with device emulated, whose label must hold the words `device time emulated`
    device_time: DeviceTimeSection
    python: Text  #: Python interpreter of vLLM's environment
    #: interpreter that builds an environment of this project, of the lock's Python version; absent:
    #: python3.11. No part of the design
    build_python: Text
    entry_point: ModuleName  #: module of vLLM's server; absent: the newest release's
    #: given to --model; fetched by this name before anything starts; ./folder: of the project
    model: Text
    #: commit, branch or tag of a model that is fetched by name; absent: the hub's main.
    #: environment.json has the commit
    revision: Annotated[str, meta(pattern="^[A-Za-z0-9][A-Za-z0-9._/-]*$")]
    served_model_name: Text  #: name the server gives the model
    vocab_size: Annotated[int, meta(ge=100)]  #: prompts are random token ids below this
    flags: Flags  #: vLLM's command-line flags, in this order; true: a flag without value
    #: variables added to the server's environment; the same for every configuration
    environment: Environment
    #: folders of the project, or absolute, in which connectors' modules are
    pythonpath: list[Annotated[str, meta(pattern="^[^:]+$")]]
    forms: dict[Identifier, FormSection]  #: changes to single configurations, by id
    #: command line of each configuration's server, by id; {port} is its port
    commands: dict[Identifier, Text]
    #: commands that run beside each candidate; the server knows the port of the first as
    #: {beside1.port}
    beside: list[Annotated[str, meta(pattern="[{]port[}]")]]
    served: ServedSection  #: answers of the servers before the study, by configuration
    access: AccessSection  #: how the servers are reached


class ServerSection(TypedDict):
    """Start, stop and placement of the server."""

    #: address that it listens on
    host: Annotated[str, meta(const="127.0.0.1", default="127.0.0.1")]
    #: longest time from launch to 200 on /v1/models
    ready_timeout_s: Annotated[Positive, meta(default=180)]
    stop_grace_s: Annotated[Positive, meta(default=20)]  #: time from SIGTERM to SIGKILL
    release_s: Annotated[NonNegative, meta(default=1)]  #: wait after its end (GPU memory release)
    #: name of the device, which only one measurement may hold; with cuda the GPUs' UUIDs are used
    device: Annotated[Identifier, meta(default="cpu")]
    cores: Annotated[Count, meta(default=1)]  #: physical cores reserved for it when CPUs are pinned


class SlotSection(TypedDict):
    """CPUs and GPUs of this machine on which one block at a time is measured."""

    id: Identifier  #: name of the slot in messages
    #: CUDA_VISIBLE_DEVICES of its server; required with engine.device cuda, else invalid
    visible: NotRequired[Annotated[str, meta(pattern="^[A-Za-z0-9-]+(,[A-Za-z0-9-]+)*$")]]
    #: CPUs that its server and its load generator share, such as 0-15,32-47
    cpus: Annotated[str, meta(pattern="^[0-9]+(-[0-9]+)?(,[0-9]+(-[0-9]+)?)*$")]


Command = Annotated[list[str], meta(min_length=1)]


class CompanionCommand(TypedDict):
    """A companion's command, and a path that answers 200 once it is ready."""

    command: Command  #: as without `ready`
    ready: Annotated[str, meta(pattern="^/[!-~]*$")]  #: path that answers 200 when it is ready


Companions = dict[Annotated[str, meta(pattern="^[a-z_]+$")], Command | CompanionCommand]


class ConfigurationEntry(TypedDict, total=False):
    """A configuration of config/configurations.yaml, or of a study's own `connectors`.

    Entries of a study document's `configurations` have all keys but `companions`.
    """

    id: Required[ConfigurationId]  #: name in folders, colours and rows
    #: label in figures and tables; absent: the id
    label: Annotated[str, meta(min_length=1, max_length=40)]
    connector: Required[ClassName | None]  #: connector class for --kv-transfer-config; null: none
    #: module of a class outside vLLM; null: vLLM's registry has it
    module_path: Annotated[ModuleName | None, meta(default=None)]
    role: Role | None  #: vLLM's kv_role; absent: kv_both with a connector
    #: kv_connector_extra_config; {name.port} starts that companion and is its port
    extra_config: Annotated[Foreign, meta(default={})]
    children: Annotated[list[Identifier], meta(default=[])]  #: ids of a MultiConnector's connectors
    #: its gate; null: the general one on a real vLLM, none on the embedded engine
    gate: Annotated[
        Literal["verify_noop_connector", "verify_kv_consumer", "verify_multi_connector"] | None,
        meta(default=None),
    ]
    purpose: Annotated[Text, meta(default="Defined by the study.")]  #: purpose of the configuration
    #: processes it needs beside the server, by name: the command, or {command, ready}. In it
    #: `{port}` is the TCP port of 127.0.0.1 it is to listen on, `{python}` the engine's
    #: interpreter, `{tmp}` the launch's temporary folder. Started first, ready when it listens or,
    #: with `ready`, when a GET of that path is answered 200; dead with the server
    companions: Companions


class ConfigurationsFile(TypedDict):
    """config/configurations.yaml: the connector configurations a study may name."""

    configurations: Annotated[list[ConfigurationEntry], meta(min_length=1)]


class Efficiency(TypedDict):
    """Assumed shares of an accelerator's peaks, and the assumed start-up time."""

    linear: Fraction  #: share of the dense peak in matrix products
    attention: Fraction  #: share of the dense peak in the attention of a prefill
    bandwidth: Fraction  #: share of the memory bandwidth, reading weights and KV cache
    #: host time of each step, in parallel with the device; the longer of the two counts
    host_us: NonNegative
    besides_us: NonNegative  #: other GPU time of each step
    reserve_gib: NonNegative  #: memory for activations, CUDA graphs and the CUDA context
    start_s: NonNegative  #: start-up time for imports, compilation, CUDA graphs
    load_gb_s: Positive  #: rate of reading weights from a warm disk
    step_sd: Share  #: relative spread from step to step
    launch_sd: Share  #: relative spread from launch to launch


class Accelerator(TypedDict):
    """One accelerator: its dense peaks, bandwidth and memory."""

    bf16_tflops: Positive  #: dense peak of bfloat16, TFLOP/s
    fp8_tflops: Positive | None  #: dense peak of fp8, TFLOP/s; null: none
    bandwidth_gb_s: Positive  #: memory bandwidth, GB/s
    memory_mib: Positive  #: memory size as nvidia-smi shows it
    source: Text  #: source of the numbers
    #: values of `efficiency` that are specific to this accelerator
    efficiency: NotRequired[
        dict[Literal["linear", "attention", "bandwidth", "besides_us"], Positive]
    ]


class AcceleratorsFile(TypedDict):
    """config/accelerators.yaml: the accelerators that a rehearsal can assume."""

    efficiency: Efficiency  #: assumptions for every accelerator
    accelerators: dict[str, Accelerator]  #: accelerators by name, for rehearsal.accelerator


class ArrivalsSection(TypedDict):
    """The arrival process."""

    #: of requests
    process: Annotated[Literal["fixed", "jittered", "poisson", "gamma"], meta(default="jittered")]
    #: shape of the intervals' gamma distribution; only with gamma
    gamma_shape: Annotated[Positive | None, meta(default=None)]


class TrafficSection(TypedDict):
    """A file's requests (traffic.jsonl), which each cell sends in their order."""

    #: a trace has times, lengths and block ids; prompts have text
    kind: Literal["trace", "prompts"]
    source: Text  #: name of the user's file
    sha256: Text  #: SHA-256 of the user's file
    requests: Count  #: lines of traffic.jsonl
    speed: Positive  #: factor on the trace's pace; 1 for prompts
    block: Count  #: prompt tokens per block id
    max_tokens: Count  #: most tokens of an answer whose line gives none
    #: mean input and output tokens
    longest: Annotated[list[Count], meta(min_length=2, max_length=2)]
    repeated_share: Share  #: share of prompt tokens that repeat a prefix; 0 for prompts
    #: prompt tokens of a trace that a prefix cache may find, which begins empty; absent: all
    most_hits: NotRequired[Annotated[int, meta(ge=0)]]


class PhaseASection(TypedDict):
    """The rate sweep at one shape."""

    #: requests/s, ascending; one cell per rate
    rates_rps: Annotated[list[Positive], meta(min_length=1, uniqueItems=True)]
    input_tokens: Tokens  #: prompt length of every cell
    output_tokens: OutputTokens  #: completion length of every cell
    #: requests of a user's file instead; rate and lengths are their means
    traffic: NotRequired[TrafficSection]
    #: closed loop: requests kept in flight; rates_rps holds the one rate that is expected of them
    concurrency: NotRequired[Annotated[int, meta(ge=1, le=65536)]]


class PhaseBSection(TypedDict):
    """Every input x output length at ref_safe."""

    configurations: NotRequired[Ids]  #: configurations that it measures; absent: all
    input_tokens: Annotated[list[Tokens], meta(min_length=1, uniqueItems=True)]  #: prompt lengths
    #: completion lengths
    output_tokens: Annotated[list[OutputTokens], meta(min_length=1, uniqueItems=True)]


class PhaseBpSection(TypedDict):
    """Shapes at ref_load, where it differs from ref_safe."""

    configurations: Ids  #: configuration ids, including the baseline
    #: [input, output] tokens
    shapes: Annotated[
        list[Annotated[list[OutputTokens], meta(min_length=2, max_length=2)]],
        meta(min_length=1, uniqueItems=True),
    ]


class CellSection(TypedDict):
    """Durations of a cell, and its limits of requests in flight."""

    warmup_s: NonNegative  #: arrivals before this are discarded
    floor_s: Positive  #: shortest measured window
    cap_s: Positive  #: longest measured window
    #: required successes in the window, which is extended until they are reached
    min_completed: Count
    #: longest wait for outstanding requests after the end of the window
    drain_s: Annotated[Positive, meta(default=60)]
    #: most requests in flight over all workers; arrivals beyond it are dropped and recorded
    inflight_cap: Annotated[int, meta(ge=1, le=100_000, default=256)]
    #: longest time from a request's due time to its complete answer
    request_timeout_s: Annotated[Positive, meta(default=60)]
    #: true: in Phases B and B' the first arrival that the in-flight cap drops ends the cell, which
    #: is void and not measured again. false, as in the design: it goes on to its cap, and is
    #: measured twice
    end_overloaded: NotRequired[bool]


class LoadGeneratorSection(TypedDict):
    """The load generator's processes and connections."""

    workers: Annotated[int, meta(ge=1, le=MOST_WORKERS, default=1)]  #: worker processes
    #: at least inflight_cap / workers
    connections_per_worker: Annotated[int, meta(ge=1, le=65536, default=256)]
    #: whether main process, workers and server are pinned to separate CPUs
    enable_cpu_affinity: Annotated[bool, meta(default=True)]
    #: whether to record the stamp of every socket read, a third of the archive's size
    keep_reads: Annotated[bool, meta(default=False)]


class MetricsSection(TypedDict):
    """Interval at which the server's /metrics are read."""

    #: mean interval of scrapes, drawn from 0.5 to 1.5 times this; on vLLM on a CPU a scrape adds 12
    #: to 17 ms to a coinciding first token
    interval_s: Annotated[Positive, meta(default=2.0)]


class ResourcesSection(TypedDict):
    """Measurement of a launch's resources: idle CPU, memory, start-up."""

    #: how long the ready, idle server is watched before its first cell
    idle_s: Annotated[Positive, meta(default=3)]


class ShapeRatesSection(TypedDict):
    """Probing of plain's throughput for each shape, which limits the offered rates."""

    #: highest offered share of the probed throughput, equal for all configurations
    max_share: Fraction
    #: approximate time per shape; bursts grow while one takes less than a quarter of this
    probe_s: Positive


class ReferenceSection(TypedDict):
    """The fallback if no rate qualifies as reference rate."""

    #: rate to use, and to report, if no rate qualifies; null: stop with an error
    fallback_rps: Annotated[Positive | None, meta(default=None)]


class RehearsalSection(TypedDict, total=False):
    """The machine that a rehearsal assumes for a real vLLM; no measurement depends on it.

    An accelerator and a model go together.
    """

    accelerator: Text  #: a row of config/accelerators.yaml
    model_config: Text  #: the model's config.json
    #: relative spread from launch to launch; absent: the value of config/accelerators.yaml
    launch_sd: Share


class StatisticsSection(TypedDict):
    """Section `statistics`: confidence, margins, the confirmatory family and interim analyses."""

    confidence: Annotated[float, meta(ge=0.5, lt=1, default=0.95)]  #: confidence of every interval
    # Its keys are artifacts/metrics.py:METRICS.
    #: margin: a tax whose 90% interval lies within ± this is less than the margin
    margins: Annotated[dict[str, float], meta(default={})]
    #: the Phase A cells whose taxes are confirmatory, besides the tax over all rates; all other
    #: taxes are exploratory
    confirmatory: Annotated[
        list[Reference], meta(min_length=1, uniqueItems=True, default=["ref_safe", "ref_load"])
    ]
    p99_min_samples: Annotated[int, meta(ge=100, default=1000)]  #: least successes for a p99
    #: levels of the interim analyses, from the one after `first_look` blocks on; decided
    #: configurations are not measured further, and the levels' sum is the total level
    looks: NotRequired[Annotated[list[Annotated[float, meta(gt=0, lt=0.2)]], meta(min_length=1)]]
    #: number of blocks before the first interim analysis; default 2
    first_look: NotRequired[Annotated[int, meta(ge=2)]]
    #: the metrics whose taxes over all rates the interim analyses judge; absent: the medians
    judged: NotRequired[Annotated[list[Identifier], meta(min_length=1, uniqueItems=True)]]
    #: ms that a request counted in goodput takes at most, by latency (ttft, tpot, e2e)
    goodput: NotRequired[dict[Literal["ttft", "tpot", "e2e"], Positive]]


class PriorSection(TypedDict):
    """The earlier result behind the hypotheses."""

    plain_ttft_p90_s: Annotated[Positive, meta(default=7.35)]  #: the prior's TTFT p90 of plain
    nixl_ttft_p90_s: Annotated[Positive, meta(default=10.1)]  #: the prior's TTFT p90 of NIXL
    #: the prior's TTFT p90 of Mooncake with kv_role kv_both
    mooncake_both_ttft_p90_s: Annotated[Positive, meta(default=10.67)]


Band = Annotated[list[float], meta(min_length=2, max_length=2)]


class HypothesesSection(TypedDict):
    """Limits by which hypotheses and success criteria are judged."""

    h1_min_tax: Annotated[Fraction, meta(default=0.10)]  #: H1: least TTFT p90 tax of mooncake_both
    #: criterion 1: taxes at which the prior is accepted
    h1_prior_band: Annotated[Band, meta(default=[0.25, 0.60])]
    h2_prior_gap_pp: Annotated[float, meta(default=7.0)]  #: the prior's gap, percentage points
    #: H2: gaps that count as preserved, percentage points
    h2_gap_band_pp: Annotated[Band, meta(default=[5.0, 10.0])]
    #: H3: share of the tax below which the framework is the smaller part
    h3_framework_share: Annotated[Fraction, meta(default=0.50)]
    #: criterion 3: share below which the implementation dominates
    h3_implementation_share: Annotated[Fraction, meta(default=0.30)]
    #: H4: departure from additivity, share of the stack's tax
    h4_tolerance: Annotated[Fraction, meta(default=0.30)]
    #: criterion 7: wall clock of the measurements
    max_hours: Annotated[Positive, meta(default=6.0)]
    prior: Annotated[PriorSection, meta(default={})]  #: the reproduced result


EIGHT = [
    "plain",
    "noop_connector",
    "mooncake_producer",
    "mooncake_consumer",
    "mooncake_both",
    "nixl_both",
    "lmcache_only",
    "multi_mooncake_lmcache",
]
# Folders of results/ that are not studies.
_NO_STUDY = "(?!(archive|replot|compare|admission)$)"


class StudyConfig(TypedDict):
    """A study: config/config.yaml and the like, and `config` of study.json."""

    #: results/<study>/ and the rows of MANIFEST.md
    study: Annotated[str, meta(pattern=f"^{_NO_STUDY}[a-z0-9][a-z0-9._-]{{0,63}}$")]
    #: seed: every random choice is derived from it and a name
    seed: Annotated[int, meta(ge=0, le=2**63 - 1, default=20260526)]
    #: launches of each configuration; verdicts need at least 3
    blocks: Annotated[int, meta(ge=1, le=1000)]
    #: the configuration that taxes are relative to; absent: plain
    baseline: NotRequired[Identifier]
    #: launches of the baseline in each block, at seeded random positions; the last is the A/A
    #: comparison
    plain_launches: Annotated[int, meta(ge=1, le=20, default=2)]
    engine: EngineSection
    server: NotRequired[Annotated[ServerSection, meta(default={})]]
    #: slots of this machine, on which blocks are measured side by side, one at a time on each. No
    #: part of the design. Not with an executor, which assigns a device to each job
    devices: NotRequired[Annotated[list[SlotSection], meta(min_length=1)]]
    #: ids of config/configurations.yaml or `connectors`, in the order of tables and figures
    configurations: Annotated[list[Identifier], meta(min_length=1, uniqueItems=True, default=EIGHT)]
    connectors: NotRequired[list[ConfigurationEntry]]  #: configurations of this study's own
    arrivals: Annotated[ArrivalsSection, meta(default={})]
    phase_a: PhaseASection
    phase_b: NotRequired[PhaseBSection]
    phase_bp: NotRequired[PhaseBpSection]
    cell: CellSection
    load_generator: NotRequired[Annotated[LoadGeneratorSection, meta(default={})]]
    metrics: NotRequired[Annotated[MetricsSection, meta(default={})]]
    resources: NotRequired[Annotated[ResourcesSection, meta(default={})]]
    # Its keys are declared in artifacts/checks.py; study.json holds all of them.
    #: bounds of the cell checks; a cell outside any of them is void
    validity: Annotated[dict[str, float], meta(default={})]
    # Its keys are artifacts/metrics.py:CRITERIA.
    #: a configuration is saturated at a rate when any criterion fires
    saturation: Annotated[dict[str, float], meta(default={})]
    #: absent or null (as in the design): all of Phases B and B' at ref_safe or ref_load
    shape_rates: NotRequired[ShapeRatesSection | None]
    reference: Annotated[ReferenceSection, meta(default={})]
    rehearsal: NotRequired[RehearsalSection]
    statistics: Annotated[StatisticsSection, meta(default={})]
    hypotheses: Annotated[HypothesesSection, meta(default={})]


LaunchName = Annotated[str, meta(pattern="^[a-z][a-z0-9_]{0,63}$")]
CellName = Annotated[str, meta(pattern="^[a-z0-9][a-z0-9.-]{0,63}$")]
Phase = Annotated[str, meta(pattern="^(A|B|Bp)$")]


class LaunchPlan(TypedDict):
    """One launch of `run_order`: its name (`nixl_both`, `plain_2`) and its block, from 0."""

    config: LaunchName
    block: Annotated[int, meta(ge=0, le=999)]


class CellPlan(TypedDict):
    """One planned cell: name, requests/s (null if it depends on results), tokens."""

    cell: CellName
    rate_rps: Positive | None
    input_tokens: Tokens
    output_tokens: Tokens


class DesignLabel(TypedDict):
    """The fields that identify the design in every record of a study."""

    #: SHA-256 over everything that a measurement depends on
    design_sha256: Annotated[str, meta(pattern="^[0-9a-f]{64}$")]
    #: stands in every record, table and figure
    engine_label: Annotated[str, meta(min_length=1, max_length=60)]


class StudyDocument(DesignLabel):
    """The resolved design."""

    study: Annotated[str, meta(pattern="^[a-z0-9][a-z0-9._-]{0,63}$")]  #: its name
    emulated: bool  #: measured on the embedded engine
    package_version: NotRequired[Annotated[str, meta(max_length=60)]]  #: version of this package
    created_utc: NotRequired[Annotated[str, meta(max_length=60)]]  #: ISO 8601
    #: every random choice is derived from it and a name
    seed: Annotated[int, meta(ge=0, le=2**63 - 1)]
    blocks: Annotated[int, meta(ge=1, le=1000)]  #: launches of each configuration
    config: StudyConfig  #: the configuration, with the embedded engine's file inside
    #: the entries of the measured configurations
    configurations: Annotated[list[ConfigurationEntry], meta(min_length=1, max_length=1000)]
    #: phase to launches, in run order
    run_order: Annotated[
        dict[Phase, Annotated[list[LaunchPlan], meta(max_length=100_000)]], meta(min_length=3)
    ]
    #: phase to cells
    cells: Annotated[
        dict[Phase, Annotated[list[CellPlan], meta(max_length=1000)]], meta(min_length=3)
    ]
