"""The fields of a cell's files, as they lie on disk. What each means: docs/artifacts.md.

Times are CLOCK_MONOTONIC in ns. A key that is NotRequired lacks where it does not apply.
"""

from typing import Annotated, Any, Literal, NotRequired, Required, TypedDict, TypeGuard

from connector_tax.artifacts.declare import says


class _Request(TypedDict):
    request_id: str
    seq: int
    status: str
    error_kind: str | None
    error_detail: str | None
    warmup: bool
    cooldown: bool
    t_intended_ns: int
    t_issue_ns: int | None
    t_worker_ns: int | None
    t_conn_ns: int | None
    t_headers_ns: int | None
    t_done_ns: int | None
    inflight_at_send: int | None
    worker: int | None
    reads: list[tuple[int, int]] | None


class RequestLine(_Request):
    """One line of requests_*.jsonl; written from loadgen/messages.py:RequestRecord."""

    t_send_ns: int | None
    t_first_token_ns: int | None
    t_last_token_ns: int | None
    prompt_tokens: int | None
    completion_tokens: int | None


class AnsweredRequest(_Request):
    """A line with status ok: what the others may lack is there."""

    t_send_ns: int
    t_first_token_ns: int
    t_last_token_ns: int
    prompt_tokens: int
    completion_tokens: int


def is_answered(request: RequestLine) -> TypeGuard[AnsweredRequest]:
    """Whether a request succeeded."""
    return request["status"] == "ok"


class ScrapeMoment(TypedDict):
    """When a scrape was, and whether the page was read and parsed."""

    t_ns: Annotated[int, says("CLOCK_MONOTONIC before the scrape")]
    ok: Annotated[bool, says("the page was read and parsed")]


class ScrapeLine(ScrapeMoment):
    """One line of metrics_*.jsonl."""

    scrape_ms: Annotated[float | None, says("how long the scrape took")]
    values: Annotated[
        dict[str, float],
        says(
            '`name{label="value"}` to number; empty when not ok. Histogram buckets and '
            "`*_created` are left out; as the server's"
        ),
    ]
    raw: NotRequired[
        Annotated[
            str, says("the page as it was sent; absent but in a cell's first and last scrape")
        ]
    ]
    error: NotRequired[Annotated[str, says("why the scrape failed; absent when ok")]]


class StepLine(TypedDict):
    """One line of engine_step_*.jsonl; what a step has depends on engine, process and connector."""

    t_ns: int
    step_id: int
    process: Literal["scheduler", "worker"]
    step_duration_us: float
    engine_step_us: float | None
    build_meta_us: float | None
    get_finished_us: float | None
    start_load_kv_us: float | None
    num_running: int | None
    num_waiting: int | None
    prefill_tokens: int | None
    decode_tokens: int | None
    kv_tokens: NotRequired[int | None]
    update_us: NotRequired[float | None]
    hooks_us: NotRequired[dict[str, float]]
    children_us: NotRequired[dict[str, dict[str, float]]]


class DeviceLine(TypedDict):
    """One line of device_*.jsonl: a step of an emulated device."""

    t_ns: Annotated[int, says("When the host queued it; ns")]
    step_id: Annotated[int, says("That of the engine step")]
    t_start_ns: Annotated[
        int, says("When the device began it: when it was queued, or when the step before ended; ns")
    ]
    t_end_ns: Annotated[int, says("When the device was done with it; ns")]
    t_since_ns: Annotated[
        int | None,
        says(
            "When the engine core was given the first of its requests; ns; "
            "null: it carries requests on from the step before"
        ),
    ]
    prefill_tokens: Annotated[int, says("Of prompts; tokens")]
    decode_seqs: Annotated[int, says("Sequences that decode")]
    kv_tokens: Annotated[int, says("KV cache of these before the step; tokens")]
    prefill_pairs: Annotated[int, says("Query and key, over the tokens of the prompts")]
    t_wait_ns: Annotated[
        int | None,
        says("When the host began to wait for its end; ns; null: the host did not wait for it"),
    ]
    t_woken_ns: Annotated[
        int | None, says("When the host went on; ns; null: the host did not wait for it")
    ]


class MachineCounters(TypedDict):
    """Totals when a line of machine_*.jsonl was written; of both sides where there are two."""

    idle_ms: list[float]
    steal_ms: list[float]
    own_ms: list[float]
    pressure_us: list[float | None]
    throttled: float | None
    suspended_ms: int
    self_us: float
    faults: int


class MachineLine(TypedDict, total=False):
    """One line of machine_*.jsonl: which fields it has depends on its kind."""

    kind: Required[Annotated[Literal["begin", "chunk"], says("begin or chunk")]]
    t_ns: Required[Annotated[int, says("CLOCK_MONOTONIC: when the counters were read")]]
    # chunk.
    memory_ns: Annotated[list[int], says("CPU time of the loads of each sample; absent from begin")]
    compute_ns: Annotated[
        list[int], says("CPU time of the arithmetic of each sample; absent from begin")
    ]
    at_us: Annotated[
        list[int],
        says("when each sample began, after the t_ns of the line before; absent but in a chunk"),
    ]
    gpu: Annotated[
        list[list[Any]],
        says(
            "a chunk's rows of nvidia-smi: uuid, SM clock and its highest, throttle reasons, memory"
            " clock, temperature, power; of the study's GPUs alone; absent without a GPU"
        ),
    ]
    foreign_gpu_pids: Annotated[
        list[int] | None,
        says(
            "processes seen on the study's GPUs in the chunk, neither the study's nor stopped; "
            "absent without a GPU; null: nvidia-smi named none of the study's processes in "
            "the chunk"
        ),
    ]
    # begin.
    interval_ms: Annotated[float, says("as in the configuration's quiet; absent but in begin")]
    working_set_mib: Annotated[float, says("as in the configuration's quiet; absent but in begin")]
    elements: Annotated[int, says("loads of one sample; absent but in begin")]
    chunk_ms: Annotated[float, says("as in the configuration's quiet; absent but in begin")]
    loadgen: Annotated[list[int], says("the logical CPUs of each side; absent but in begin")]
    server: Annotated[list[int], says("the logical CPUs of each side; absent but in begin")]
    # begin and chunk.
    counters: Annotated[
        MachineCounters,
        says(
            "totals. idle_ms, steal_ms and own_ms (the study's own processes) of both "
            "sides; pressure_us of cpu and memory, throttled periods, each null where the "
            "kernel does not tell; suspended_ms; CPU time and page faults of the watching "
            "process; absent from a look"
        ),
    ]


class MeasuredWindow(TypedDict):
    """From when to when a cell was measured."""

    t_warmup_end_ns: int
    t_stop_ns: int


class WindowRecord(MeasuredWindow):
    """`window`: when the cell's parts began and ended."""

    t_origin_ns: int
    t_cooldown_end_ns: int
    t_drained_ns: int
    started_utc: str


class ScheduleRecord(TypedDict):
    """`schedule`: the arrival process, requests/s, the seed's name, arrivals planned."""

    kind: str
    gamma_shape: float | None
    rate_rps: float
    seed: str
    n: int


class CooldownRecord(TypedDict):
    """`cooldown`: requests due after the window, and what ended it."""

    requests: int
    ended_by: str


class CountsRecord(TypedDict):
    """`counts`: requests; `failed` is by kind of failure."""

    planned: int
    sent: int
    ok: int
    dropped: int
    failed: dict[str, int]
    measured_ok: int


# Not a class: `pass` is no name of Python's.
CheckRecord = TypedDict(
    "CheckRecord", {"value": float | None, "bound": float | list[float], "pass": bool}
)
"""One check of `health` (artifacts/checks.py:CHECKS); a bound of two is a range."""


class QuantityRecord(TypedDict):
    """A quantity: its value, its parts (`server` and each companion), why the value is null."""

    value: float | None
    parts: dict[str, float]
    reason: str | None


class ServerCounters(TypedDict):
    """`server_counters`: the server's own counters around the cell; null: no such series."""

    before: dict[str, float | None]
    after: dict[str, float | None]


class CellCpu(TypedDict):
    """`server_cpu`: CPU time of the server's processes around the cell."""

    from_ns: int
    to_ns: int
    cpu_s: float | None
    requests: float | None
    cpu_s_per_1000: QuantityRecord
    engine_queued: NotRequired[QuantityRecord]


class GeneratorHealth(TypedDict, total=False):
    """`load_generator`: counters by process, who died, connections by worker."""

    processes: Required[dict[str, dict[str, float]]]
    workers: int
    workers_died: list[int]
    connections_per_worker: int
    connections: dict[str, int]
    connect_errors: list[str]


class RehearsedRecord(TypedDict):
    """`rehearsed`: of a cell in virtual time only."""

    seconds: float
    load: float
    inflight_p50: float
    preemptions: int


class MeasuredCellRecord(TypedDict):
    """A cell's record before it is judged."""

    phase: Annotated[str, says("A, B or Bp")]
    cell: Annotated[str, says("its name: r<rate>, or <input>x<output>")]
    config: Annotated[str, says("the launch's name")]
    configuration: Annotated[str, says("the configuration its server was started with")]
    block: Annotated[int, says("from 0")]
    label: Annotated[str, says("the engine's label")]
    input_tokens: Annotated[int, says("of every request; tokens")]
    output_tokens: Annotated[int, says("of every request; tokens")]
    schedule: Annotated[
        ScheduleRecord,
        says("kind, gamma_shape, rate_rps, seed (of the arrivals), n (arrivals planned)"),
    ]
    prompts_sha256: Annotated[str, says("over the bodies of the planned requests")]
    window: Annotated[
        WindowRecord,
        says(
            "t_origin_ns, t_warmup_end_ns, t_stop_ns, t_cooldown_end_ns, t_drained_ns; "
            "started_utc in wall time; ns"
        ),
    ]
    cooldown: Annotated[
        CooldownRecord,
        says(
            "requests (due after the window), ended_by (answered, drain, schedule, interrupted,"
            " overloaded)"
        ),
    ]
    counts: Annotated[
        CountsRecord, says("planned, sent, ok, dropped, failed by kind, measured_ok; requests")
    ]
    extended_s: Annotated[float, says("how far the window went beyond its floor")]
    achieved_rate_rps: Annotated[float, says("measured requests sent, over the window")]
    clock: Annotated[str, says("kernel or worker: who stamped the reads")]
    attempt: Annotated[int, says("the launch's attempt that measured it")]
    suspended_ms: NotRequired[
        Annotated[int, says("how long the machine was suspended during the cell")]
    ]
    server_counters: NotRequired[
        Annotated[ServerCounters, says("before and after: the server's counters the checks use")]
    ]
    server_cpu: NotRequired[
        Annotated[
            CellCpu,
            says(
                "from_ns, to_ns, cpu_s of all processes of the server, requests by its own "
                "count, cpu_s_per_1000 (value, parts, reason as in resources.json)"
            ),
        ]
    ]
    load_generator: NotRequired[
        Annotated[
            GeneratorHealth,
            says(
                "per process event-loop lag, CPU share and message counters; who died; connections"
            ),
        ]
    ]
    rehearsed: NotRequired[RehearsedRecord]


class CellRecord(MeasuredCellRecord):
    """cell_<phase>_<cell>.json; `files` is SHA-256 by name of the cell's other files."""

    health: Annotated[
        dict[str, CheckRecord],
        says("validity check to value, bound and pass; the checks are artifacts/checks.py:CHECKS"),
    ]
    valid: Annotated[bool, says("every check passed")]
    void_reasons: Annotated[list[str], says("a sentence per failed check; empty when valid")]
    files: Annotated[dict[str, str], says("SHA-256 of the cell's other files by name")]
