"""The fields of study.json, of the configuration in it, and of the files that make it up.

Each is declared here once (artifacts/declare.py). Times are seconds and rates requests/s unless the
name says otherwise.
"""

from typing import Annotated, Any, Literal, NotRequired, Required, TypedDict

from connector_tax.artifacts.declare import says

Reference = Literal["ref_safe", "ref_load"]
# Keys and values are somebody else's: vLLM's flags, a connector's own configuration.
Foreign = dict[str, Any]

Positive = Annotated[float, says(gt=0)]
NonNegative = Annotated[float, says(ge=0)]
Fraction = Annotated[float, says(gt=0, le=1)]
Share = Annotated[float, says(ge=0, le=1)]
Count = Annotated[int, says(ge=1)]
Tokens = Annotated[int, says(ge=1, le=1_000_000)]
# One token has no TPOT.
OutputTokens = Annotated[int, says(ge=2, le=1_000_000)]
Text = Annotated[str, says(min_length=1)]
Identifier = Annotated[str, says(pattern="^[a-z][a-z0-9_]{0,47}$")]
# plain_2, ..., plain_20 are further launches of plain, where that is the baseline.
ConfigurationId = Annotated[str, says(pattern="^(?!.*_([2-9]|1[0-9]|20)$)[a-z][a-z0-9_]{0,47}$")]
ClassName = Annotated[str, says(pattern="^[A-Za-z_][A-Za-z0-9_]*$")]
ModuleName = Annotated[str, says(pattern="^[A-Za-z_][A-Za-z0-9_.]*$")]
Role = Literal["kv_producer", "kv_consumer", "kv_both"]
# A flag's value is whatever vLLM takes, but no list or mapping.
Flag = Annotated[Any, says(type=["string", "number", "boolean", "null"])]
Flags = dict[Annotated[str, says(pattern="^--[a-z][a-z0-9-]*$")], Flag]
# Null takes a variable away.
Variable = Annotated[Any, says(type=["string", "null"])]
Environment = dict[
    Annotated[str, says(pattern="^(?!(PYTHONPATH|AGENTIC_STEP_LOG_PATH)$)[A-Z_][A-Z0-9_]*$")],
    Variable,
]
Ids = Annotated[list[Identifier], says(min_length=1, uniqueItems=True)]


class FormSection(TypedDict, total=False):
    """What differs for one configuration here from config/configurations.yaml."""

    python: Annotated[
        Text, says("interpreter of another environment, for another vLLM or connector")
    ]
    connector: Annotated[ClassName, says("another class")]
    flags: Annotated[Flags, says("added to engine.flags; null takes a flag away")]
    environment: Annotated[
        Environment, says("added to engine.environment; null takes a variable away")
    ]
    transfer_config: Annotated[Foreign, says("added to vLLM's KVTransferConfig")]
    extra_config: Annotated[Foreign, says("added to the configuration's extra_config")]


class DeviceTimeSection(TypedDict):
    """What the device is: its time of a step is a roofline of the accelerator and the model."""

    accelerator: Annotated[Text, says("a row of config/accelerators.yaml")]
    model_config: Annotated[Text, says("config.json of the model, with its sizes")]
    launch_us: Annotated[
        NonNegative,
        says("the host's CPU time for launching the kernels of a step, us; an assumption"),
    ]
    besides_us: Annotated[
        NonNegative,
        says(
            "of a step, us, in which the device does anything but matrix products and attention;"
            " an assumption"
        ),
    ]
    sweep_us: NotRequired[
        Annotated[
            list[Positive],
            says(
                "in place of the roofline these times of a step, each for some steps in turn; for"
                " the question from which time on the host's work is hidden",
                min_length=1,
            ),
        ]
    ]


class ServedSection(TypedDict):
    """What a server serves and how it is asked."""

    model: Annotated[str, says("the name that requests ask for")]
    vocab_size: Annotated[
        Annotated[int, says(ge=100)] | None,
        says("token ids below it are taken; null: text is sent"),
    ]
    chat: NotRequired[Annotated[bool, says("only /v1/chat/completions is answered")]]
    tokens_per_word: NotRequired[
        Annotated[Positive, says("of a text prompt, as the server counts")]
    ]
    fixed_tokens: NotRequired[
        Annotated[int, says("of a text prompt without a word, as the server counts")]
    ]
    body: NotRequired[
        Annotated[
            str,
            says(
                "what a request may hold: vLLM's keys, usage, neither",
                enum=["vllm", "openai", "bare"],
            ),
        ]
    ]
    exact_output: NotRequired[
        Annotated[bool, says("an answer has exactly the tokens asked for (ignore_eos)")]
    ]
    counters: NotRequired[Annotated[bool, says("/metrics has vLLM's counters")]]
    no_steps: NotRequired[
        Annotated[str | None, says("why the step probe is not in it; null: it is")]
    ]
    max_model_len: NotRequired[
        Annotated[int | None, says("tokens of a request, as /v1/models says")]
    ]
    version: NotRequired[Annotated[str | None, says("what /version answers")]]


class EngineSection(TypedDict, total=False):
    """The server that is measured; which keys it has besides `kind` and `label` its kind says."""

    # A module of servers, whose KIND names the keys it needs and those it may have.
    kind: Required[Annotated[Identifier, says("which sort of server")]]
    label: Required[
        Annotated[
            str, says("stands in every record, table and figure", min_length=1, max_length=60)
        ]
    ]
    definition: Annotated[Text, says("step cost and connector taxes, a file")]
    # No kind names these two: no study's file may have them.
    definition_content: Annotated[Foreign, says("in study.json: what stands in `definition`")]
    device_time_content: Annotated[
        Foreign, says("in study.json: coefficients of the device's time")
    ]
    device: Annotated[
        Literal["cpu", "cuda", "emulated"],
        says("emulated: its time is waited for (device_time)"),
    ]
    device_time: Annotated[
        DeviceTimeSection,
        says(
            "with device emulated, whose label must hold the words `device time emulated`",
        ),
    ]
    python: Annotated[Text, says("interpreter of the environment vLLM is installed in")]
    build_python: Annotated[
        Text,
        says(
            "interpreter that an environment of this project is built with, of the version"
            " that its lock is for; absent: python3.11. No part of the design",
        ),
    ]
    entry_point: Annotated[
        ModuleName,
        says(
            "module that is vLLM's server; absent: that of the newest release, which an older one"
            " may have elsewhere"
        ),
    ]
    model: Annotated[
        Text,
        says(
            "given to --model; fetched by this name before anything starts; ./folder: of the"
            " project",
        ),
    ]
    revision: Annotated[
        str,
        says(
            "commit, branch or tag of a model that is fetched by name; absent: what the hub"
            " calls main then. environment.json has the commit",
            pattern="^[A-Za-z0-9][A-Za-z0-9._/-]*$",
        ),
    ]
    served_model_name: Annotated[Text, says("name the server gives the model")]
    vocab_size: Annotated[int, says("prompts are random token ids below this", ge=100)]
    flags: Annotated[Flags, says("vLLM's command-line flags, in this order; true: the bare flag")]
    environment: Annotated[
        Environment,
        says(
            "added to the server's; the same for every configuration",
        ),
    ]
    pythonpath: Annotated[
        list[Annotated[str, says(pattern="^[^:]+$")]],
        says(
            "folders of the project, or absolute, in which connectors' modules are",
        ),
    ]
    forms: Annotated[
        dict[Identifier, FormSection],
        says("by configuration: what differs for it here"),
    ]
    commands: Annotated[
        dict[Identifier, Text],
        says(
            "by configuration: the command line that starts its server; {port} is its port",
        ),
    ]
    beside: Annotated[
        list[Annotated[str, says(pattern="[{]port[}]")]],
        says(
            "commands that run beside each candidate; the server knows the port of the first as"
            " {beside1.port}",
        ),
    ]
    served: Annotated[
        ServedSection,
        says("what the servers said of themselves before the study"),
    ]


class ServerSection(TypedDict):
    """How the server is started, stopped and placed."""

    host: Annotated[str, says("where it listens", const="127.0.0.1", default="127.0.0.1")]
    ready_timeout_s: Annotated[Positive, says("from launch to 200 on /v1/models", default=180)]
    stop_grace_s: Annotated[Positive, says("SIGTERM to SIGKILL", default=20)]
    release_s: Annotated[NonNegative, says("wait after it is gone (GPU memory release)", default=1)]
    device: Annotated[
        Identifier,
        says(
            "one measurement at a time holds the device of this name; with cuda the GPUs, by UUID",
            default="cpu",
        ),
    ]
    cores: Annotated[Count, says("physical cores kept for it when CPUs are pinned", default=1)]


class SlotSection(TypedDict):
    """CPUs and GPUs of this machine on which one block at a time is measured."""

    id: Annotated[Identifier, says("what the slot is called in messages")]
    visible: NotRequired[
        Annotated[
            str,
            says(
                "CUDA_VISIBLE_DEVICES of its server; with engine.device cuda, and only then",
                pattern="^[A-Za-z0-9-]+(,[A-Za-z0-9-]+)*$",
            ),
        ]
    ]
    cpus: Annotated[
        str,
        says(
            "CPUs that its server and its load generator share, such as 0-15,32-47",
            pattern="^[0-9]+(-[0-9]+)?(,[0-9]+(-[0-9]+)?)*$",
        ),
    ]


Command = Annotated[list[str], says(min_length=1)]


class CompanionCommand(TypedDict):
    """A companion's command, and the path whose GET says that it is ready."""

    command: Annotated[Command, says("as without `ready`")]
    ready: Annotated[str, says("answered 200 when it is ready", pattern="^/[!-~]*$")]


Companions = Annotated[
    dict[Annotated[str, says(pattern="^[a-z_]+$")], Command | CompanionCommand],
    says(
        "processes it needs beside the server, by name: the command, or {command, ready}. In it"
        " `{port}` is the TCP port of 127.0.0.1 it is to listen on, `{python}` the engine's"
        " interpreter, `{tmp}` the launch's temporary folder. Started first, ready when it listens"
        " or, with `ready`, when a GET of that path is answered 200; dead with the server"
    ),
]


class ConfigurationEntry(TypedDict, total=False):
    """A configuration of config/configurations.yaml, or of a study's own `connectors`.

    Those of a study document's `configurations` have all but `companions`.
    """

    id: Required[Annotated[ConfigurationId, says("names folders, colours and rows everywhere")]]
    label: Annotated[
        str, says("in figures and tables; absent: the id", min_length=1, max_length=40)
    ]
    connector: Required[
        Annotated[
            ClassName | None, says("class vLLM loads through --kv-transfer-config; null: none")
        ]
    ]
    module_path: Annotated[
        ModuleName | None,
        says("module of a class vLLM does not ship; null: vLLM's own registry", default=None),
    ]
    role: Annotated[Role | None, says("vLLM's kv_role; absent: kv_both with a connector")]
    extra_config: Annotated[
        Foreign,
        says(
            "kv_connector_extra_config; {name.port} starts that companion and is its port",
            default={},
        ),
    ]
    children: Annotated[
        list[Identifier], says("ids of the connectors a MultiConnector holds", default=[])
    ]
    gate: Annotated[
        Literal["verify_noop_connector", "verify_kv_consumer", "verify_multi_connector"] | None,
        says(
            "gate of its own; null: the general one on a real vLLM, none on the embedded engine",
            default=None,
        ),
    ]
    purpose: Annotated[Text, says("why it is measured", default="Defined by the study.")]
    companions: Companions


class ConfigurationsFile(TypedDict):
    """config/configurations.yaml: the connector configurations a study may name."""

    configurations: Annotated[list[ConfigurationEntry], says(min_length=1)]


class Efficiency(TypedDict):
    """What is reached of an accelerator's peaks, and what a start takes; assumptions."""

    linear: Annotated[Fraction, says("share of the dense peak in matrix products")]
    attention: Annotated[Fraction, says("share of the dense peak in the attention of a prefill")]
    bandwidth: Annotated[
        Fraction, says("share of the memory bandwidth, reading weights and KV cache")
    ]
    host_us: Annotated[
        NonNegative,
        says("of each step: what the host does meanwhile; the longer of the two counts"),
    ]
    besides_us: Annotated[NonNegative, says("of each step: what the GPU does besides")]
    reserve_gib: Annotated[
        NonNegative, says("memory for activations, CUDA graphs and the CUDA context")
    ]
    start_s: Annotated[NonNegative, says("of a start: imports, compilation, CUDA graphs")]
    load_gb_s: Annotated[Positive, says("reading weights, from a disk that has seen them before")]
    step_sd: Annotated[Share, says("relative spread from step to step")]
    launch_sd: Annotated[Share, says("relative spread from launch to launch")]


class Accelerator(TypedDict):
    """One accelerator: its dense peaks, bandwidth and memory."""

    bf16_tflops: Annotated[Positive, says("dense peak of bfloat16, TFLOP/s")]
    fp8_tflops: Annotated[
        Positive | None, says("dense peak of fp8, TFLOP/s; null where it has none")
    ]
    bandwidth_gb_s: Annotated[Positive, says("memory bandwidth, GB/s")]
    memory_mib: Annotated[Positive, says("as nvidia-smi shows it")]
    source: Annotated[Text, says("where the figures are from")]
    efficiency: NotRequired[
        Annotated[
            dict[Literal["linear", "attention", "bandwidth", "besides_us"], Positive],
            says("keys of `efficiency` of which more is known for this one, and their values"),
        ]
    ]


class AcceleratorsFile(TypedDict):
    """config/accelerators.yaml: what a rehearsal takes an accelerator to be."""

    efficiency: Annotated[Efficiency, says("of every accelerator")]
    accelerators: Annotated[
        dict[str, Accelerator], says("by the name that rehearsal.accelerator of a study gives")
    ]


class ArrivalsSection(TypedDict):
    """The arrival process."""

    process: Annotated[
        Literal["fixed", "jittered", "poisson", "gamma"], says("of requests", default="jittered")
    ]
    gamma_shape: Annotated[
        Positive | None,
        says("with gamma, and only then: shape of the intervals' distribution", default=None),
    ]


class PhaseASection(TypedDict):
    """The rate sweep at one shape."""

    rates_rps: Annotated[
        list[Positive], says("requests/s, ascending; a cell each", min_length=1, uniqueItems=True)
    ]
    input_tokens: Annotated[Tokens, says("prompt length of every cell")]
    output_tokens: Annotated[OutputTokens, says("completion length of every cell")]


class PhaseBSection(TypedDict):
    """Every input x output length at ref_safe."""

    configurations: NotRequired[Annotated[Ids, says("those that it measures; absent: all")]]
    input_tokens: Annotated[list[Tokens], says("prompt lengths", min_length=1, uniqueItems=True)]
    output_tokens: Annotated[
        list[OutputTokens], says("completion lengths", min_length=1, uniqueItems=True)
    ]


class PhaseBpSection(TypedDict):
    """Shapes at ref_load, where it differs from ref_safe."""

    configurations: Annotated[Ids, says("ids, the baseline among them")]
    shapes: Annotated[
        list[Annotated[list[OutputTokens], says(min_length=2, max_length=2)]],
        says("[input, output] tokens", min_length=1, uniqueItems=True),
    ]


class CellSection(TypedDict):
    """How long a cell takes, and what it may have under way."""

    warmup_s: Annotated[NonNegative, says("arrivals before this are discarded")]
    floor_s: Annotated[Positive, says("shortest measured window")]
    cap_s: Annotated[Positive, says("longest measured window")]
    min_completed: Annotated[
        Count, says("successes wanted in the window; it is extended until they are there")
    ]
    drain_s: Annotated[
        Positive,
        says("longest wait for outstanding requests after the end of the window", default=60),
    ]
    inflight_cap: Annotated[
        int,
        says(
            "arrivals beyond it, over all workers, are dropped and recorded",
            ge=1,
            le=100_000,
            default=256,
        ),
    ]
    request_timeout_s: Annotated[
        Positive, says("from a request's due time to its complete answer", default=60)
    ]
    end_overloaded: NotRequired[
        Annotated[
            bool,
            says(
                "true: in Phases B and B' the first arrival that the in-flight cap drops ends the"
                " cell, which is void and not measured again. false, as in the design: it goes on"
                " to its cap, and is measured twice"
            ),
        ]
    ]


class LoadGeneratorSection(TypedDict):
    """Its processes and connections."""

    workers: Annotated[int, says("worker processes", ge=1, le=256, default=1)]
    connections_per_worker: Annotated[
        int, says("at least inflight_cap / workers", ge=1, le=65536, default=256)
    ]
    enable_cpu_affinity: Annotated[
        bool, says("pin session, workers and server apart", default=True)
    ]
    keep_reads: Annotated[
        bool, says("record the stamp of every socket read, a third of the archive", default=False)
    ]


class MetricsSection(TypedDict):
    """How often the server's /metrics are read."""

    interval_s: Annotated[
        Positive,
        says(
            "from one scrape to the next, on average (drawn from 0.5 to 1.5 times that); of a vLLM"
            " on a CPU one that meets a first token adds 12 to 17 ms to it",
            default=2.0,
        ),
    ]


class QuietSection(TypedDict):
    """How the machine is watched while a cell runs; what is seen leaves no request out."""

    interval_ms: Annotated[
        float,
        says(
            "between two samples of memory latency and compute speed, on the load generator's CPUs",
            ge=5,
            le=1000,
            default=50,
        ),
    ]
    working_set_mib: Annotated[
        float,
        says(
            "the samples' loads are scattered over this much memory: about a core's share of the"
            " last-level cache",
            ge=1,
            le=1024,
            default=8,
        ),
    ]
    elements: Annotated[int, says("loads of one sample", ge=10, le=10_000, default=300)]
    chunk_ms: Annotated[
        float,
        says(
            "counters are read and GPUs asked about this often",
            ge=100,
            le=10_000,
            default=1000,
        ),
    ]


class ResourcesSection(TypedDict):
    """What a launch takes besides time: CPU while idle, memory, threads."""

    idle_s: Annotated[
        Positive,
        says(
            "how long the server is watched, ready and without a request, before its first cell",
            default=3,
        ),
    ]


class ShapeRatesSection(TypedDict):
    """Plain is asked after Phase A how much of each shape it can serve; more is not offered."""

    max_share: Annotated[
        Fraction, says("of what it served when it was probed; equal for all configurations")
    ]
    probe_s: Annotated[
        Positive,
        says("of each shape, about: growing bursts, while one takes less than a quarter of this"),
    ]


class ReferenceSection(TypedDict):
    """The rate where none qualifies."""

    fallback_rps: Annotated[
        Positive | None,
        says("used, and said so, when no rate qualifies; null: stop with an error", default=None),
    ]


class RehearsalSection(TypedDict, total=False):
    """What a rehearsal takes the machine of a real vLLM to be; no measurement depends on it.

    An accelerator and a model, or a launch of an archive whose step log is fitted.
    """

    accelerator: Annotated[Text, says("a row of config/accelerators.yaml")]
    model_config: Annotated[Text, says("the model's config.json")]
    archive: Annotated[Text, says("an archive of a study of the same engine and model")]
    launch: Annotated[
        str,
        says(
            "a launch of that study, such as plain/block0/A",
            pattern="^[a-z][a-z0-9_]*/block[0-9]+/(A|B|Bp)$",
        ),
    ]
    launch_sd: Annotated[
        Share,
        says(
            "relative spread from launch to launch; absent: that of config/accelerators.yaml,"
            " with an archive that of rehearsal/machine.py"
        ),
    ]


class StatisticsSection(TypedDict):
    """Intervals, families and margins."""

    confidence: Annotated[float, says("of every interval", ge=0.5, lt=1, default=0.95)]
    # Its keys are artifacts/metrics.py:METRICS.
    margins: Annotated[
        dict[str, float],
        says("a tax whose 90% interval lies within plus or minus this is less than it", default={}),
    ]
    confirmatory: Annotated[
        list[Reference],
        says(
            "the cells of Phase A whose taxes are the confirmatory family, beside the tax over all"
            " rates; every other tax is exploratory",
            min_length=1,
            uniqueItems=True,
            default=["ref_safe", "ref_load"],
        ),
    ]
    p99_min_samples: Annotated[int, says("below this a p99 is refused", ge=100, default=1000)]
    looks: NotRequired[
        Annotated[
            list[Annotated[float, says(gt=0, lt=0.2)]],
            says(
                "levels of the looks after the second block and on; what a look decides is not"
                " measured further, and their sum is the level of the whole",
                min_length=1,
            ),
        ]
    ]


class PriorSection(TypedDict):
    """The latencies that the hypotheses are from."""

    plain_ttft_p90_s: Annotated[Positive, says("the prior's TTFT p90 of plain", default=7.35)]
    nixl_ttft_p90_s: Annotated[Positive, says("of NIXL", default=10.1)]
    mooncake_both_ttft_p90_s: Annotated[
        Positive, says("of Mooncake in the role of both", default=10.67)
    ]


Band = Annotated[list[float], says(min_length=2, max_length=2)]


class HypothesesSection(TypedDict):
    """What the hypotheses and the success criteria are judged by."""

    h1_min_tax: Annotated[Fraction, says("H1: least TTFT p90 tax of mooncake_both", default=0.10)]
    h1_prior_band: Annotated[
        Band, says("criterion 1: taxes at which the prior is accepted", default=[0.25, 0.60])
    ]
    h2_prior_gap_pp: Annotated[float, says("the prior's gap, percentage points", default=7.0)]
    h2_gap_band_pp: Annotated[
        Band, says("H2: gaps that count as preserved, percentage points", default=[5.0, 10.0])
    ]
    h3_framework_share: Annotated[
        Fraction,
        says("H3: share of the tax below which the framework is the smaller part", default=0.50),
    ]
    h3_implementation_share: Annotated[
        Fraction, says("criterion 3: share below which the implementation dominates", default=0.30)
    ]
    h4_tolerance: Annotated[
        Fraction, says("H4: departure from additivity, share of the stack's tax", default=0.30)
    ]
    max_hours: Annotated[Positive, says("criterion 7: wall clock of the measurements", default=6.0)]
    prior: Annotated[PriorSection, says("what is reproduced", default={})]


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
# Folders of results/ that are no study.
_NO_STUDY = "(?!(archive|replot|compare|admission)$)"


class StudyConfig(TypedDict):
    """A study: config/config.yaml and the like, and `config` of study.json."""

    study: Annotated[
        str,
        says(
            "results/<study>/ and the rows of MANIFEST.md",
            pattern=f"^{_NO_STUDY}[a-z0-9][a-z0-9._-]{{0,63}}$",
        ),
    ]
    seed: Annotated[
        int,
        says(
            "every random choice is derived from this number and a name",
            ge=0,
            le=2**63 - 1,
            default=20260526,
        ),
    ]
    blocks: Annotated[
        int, says("launches of each configuration; verdicts need at least 3", ge=1, le=1000)
    ]
    baseline: NotRequired[
        Annotated[Identifier, says("the configuration that taxes are against; absent: plain")]
    ]
    plain_launches: Annotated[
        int,
        says(
            "launches of the baseline in each block, at seeded random positions; the last is the"
            " A/A comparison",
            ge=1,
            le=20,
            default=2,
        ),
    ]
    engine: EngineSection
    server: NotRequired[Annotated[ServerSection, says(default={})]]
    devices: NotRequired[
        Annotated[
            list[SlotSection],
            says(
                "no part of the design: slots of this machine, on which blocks are measured side"
                " by side, one on each at a time. Not with an executor: what it gives a job is the"
                " device",
                min_length=1,
            ),
        ]
    ]
    configurations: Annotated[
        list[Identifier],
        says(
            "ids of config/configurations.yaml or `connectors`, in the order of tables and figures",
            min_length=1,
            uniqueItems=True,
            default=EIGHT,
        ),
    ]
    connectors: NotRequired[
        Annotated[list[ConfigurationEntry], says("configurations of this study's own")]
    ]
    arrivals: Annotated[ArrivalsSection, says(default={})]
    phase_a: PhaseASection
    phase_b: NotRequired[PhaseBSection]
    phase_bp: NotRequired[PhaseBpSection]
    cell: CellSection
    load_generator: NotRequired[Annotated[LoadGeneratorSection, says(default={})]]
    metrics: NotRequired[Annotated[MetricsSection, says(default={})]]
    quiet: NotRequired[Annotated[QuietSection, says(default={})]]
    resources: NotRequired[Annotated[ResourcesSection, says(default={})]]
    # Its keys are those of artifacts/checks.py; in study.json all of them.
    validity: Annotated[
        dict[str, float],
        says("bounds of the cell checks; a cell outside any of them is void", default={}),
    ]
    # Its keys are artifacts/metrics.py:CRITERIA.
    saturation: Annotated[
        dict[str, float],
        says("a configuration is saturated at a rate when any criterion fires", default={}),
    ]
    shape_rates: NotRequired[
        Annotated[
            ShapeRatesSection | None,
            says(
                "absent or null, as in the design: all of Phases B and B' at ref_safe or ref_load"
            ),
        ]
    ]
    reference: Annotated[ReferenceSection, says(default={})]
    rehearsal: NotRequired[RehearsalSection]
    statistics: Annotated[StatisticsSection, says(default={})]
    hypotheses: Annotated[HypothesesSection, says(default={})]


LaunchName = Annotated[str, says(pattern="^[a-z][a-z0-9_]{0,63}$")]
CellName = Annotated[str, says(pattern="^[a-z0-9][a-z0-9.-]{0,63}$")]
Phase = Annotated[str, says(pattern="^(A|B|Bp)$")]


class LaunchPlan(TypedDict):
    """One launch of `run_order`: its name (`nixl_both`, `plain_2`) and its block, from 0."""

    config: LaunchName
    block: Annotated[int, says(ge=0, le=999)]


class CellPlan(TypedDict):
    """One planned cell: its name, requests/s (null where the rate is data), tokens."""

    cell: CellName
    rate_rps: Positive | None
    input_tokens: Tokens
    output_tokens: Tokens


class DesignLabel(TypedDict):
    """What every record of a study says of its design."""

    design_sha256: Annotated[
        str, says("over everything a measurement depends on", pattern="^[0-9a-f]{64}$")
    ]
    engine_label: Annotated[
        str, says("stands in every record, table and figure", min_length=1, max_length=60)
    ]


class StudyDocument(DesignLabel):
    """The resolved design."""

    study: Annotated[str, says("its name", pattern="^[a-z0-9][a-z0-9._-]{0,63}$")]
    emulated: Annotated[bool, says("measured on the embedded engine")]
    package_version: NotRequired[Annotated[str, says("of this package", max_length=60)]]
    created_utc: NotRequired[Annotated[str, says("ISO 8601", max_length=60)]]
    seed: Annotated[
        int, says("every random choice is derived from it and a name", ge=0, le=2**63 - 1)
    ]
    blocks: Annotated[int, says("launches of each configuration", ge=1, le=1000)]
    config: Annotated[
        StudyConfig, says("the configuration, with the embedded engine's file inside")
    ]
    configurations: Annotated[
        list[ConfigurationEntry], says("the entries that take part", min_length=1, max_length=1000)
    ]
    run_order: Annotated[
        dict[Phase, Annotated[list[LaunchPlan], says(max_length=100_000)]],
        says("phase to launches, in the order they run", min_length=3),
    ]
    cells: Annotated[
        dict[Phase, Annotated[list[CellPlan], says(max_length=1000)]],
        says("phase to cells", min_length=3),
    ]
