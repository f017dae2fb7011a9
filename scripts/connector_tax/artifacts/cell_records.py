"""The fields of a cell's files, as they lie on disk. What each means: docs/artifacts.md.

Times are CLOCK_MONOTONIC in ns. A key that is NotRequired lacks where it does not apply.
"""

from typing import Any, Literal, NotRequired, Required, TypedDict, TypeGuard


class RequestLine(TypedDict):
    """One line of requests_*.jsonl; written from loadgen/messages.py:RequestRecord."""

    request_id: str  #: Sent as X-Request-Id; names the stream the prompt is drawn from
    seq: int  #: Position in the schedule, from 0
    status: str  #: ok, error, timeout, cancelled or dropped
    #: The kind of failure; the closed list is loadgen/messages.py:FAILURES; null: status ok
    error_kind: str | None
    error_detail: str | None  #: What was seen; null: status ok, or nothing more is known
    warmup: bool  #: Due in the warm-up: sent, not measured
    #: Due after the window, while measured requests were still unanswered: sent, not measured
    cooldown: bool
    t_intended_ns: int  #: When the schedule has it due; ns
    #: When the issuing thread handed it on, ahead of its due time; ns; null: never handed to a
    #: worker
    t_issue_ns: int | None
    t_worker_ns: int | None  #: When the worker received it; ns; null: never reached a worker
    t_conn_ns: int | None  #: When it had its connection; ns; null: no connection was had
    t_send_ns: int | None  #: Before the first byte was written; ns; null: not sent
    #: The read that completed the response's head; ns; null: no head of a response came
    t_headers_ns: int | None
    #: The read that brought the first token event; ns; null: no token came
    t_first_token_ns: int | None
    #: The read that brought the last token event; ns; null: no token came
    t_last_token_ns: int | None
    #: The end of the response, or of the failed request; ns; null: interrupted before its end
    t_done_ns: int | None
    prompt_tokens: int | None  #: The server's count; tokens; null: no usage came
    completion_tokens: int | None  #: The server's count; tokens; null: no usage came
    inflight_at_send: int | None  #: Other requests in flight, over all workers; null: not sent
    worker: int | None  #: The worker that held it; null: never handed to a worker
    #: Each socket read with token events: its stamp in ns and how many events it completed; null:
    #: load_generator.keep_reads false, or no token came
    reads: list[tuple[int, int]] | None


class AnsweredRequest(TypedDict):
    """The fields of a line with status ok that readers use; they are never null there."""

    request_id: str
    t_intended_ns: int
    t_first_token_ns: int
    t_last_token_ns: int
    prompt_tokens: int
    completion_tokens: int


def is_answered(request: RequestLine) -> TypeGuard[AnsweredRequest]:
    """Return whether a request succeeded."""
    return request["status"] == "ok"


class ScrapeMoment(TypedDict):
    """A scrape's time, and whether the page was read and parsed."""

    t_ns: int  #: CLOCK_MONOTONIC before the scrape
    ok: bool  #: the page was read and parsed


class ScrapeLine(ScrapeMoment):
    """One line of metrics_*.jsonl."""

    scrape_ms: float | None  #: how long the scrape took
    #: `name{label="value"}` to number; empty when not ok. Histogram buckets and `*_created` are
    #: left out; as the server's
    values: dict[str, float]
    raw: NotRequired[str]  #: the page as it was sent; absent but in a cell's first and last scrape
    error: NotRequired[str]  #: why the scrape failed; absent when ok


class StepLine(TypedDict):
    """One line of engine_step_*.jsonl; what a step has depends on engine, process and connector."""

    t_ns: int  #: CLOCK_MONOTONIC at the start; of a vLLM in steps of 10 µs; ns
    #: Joins scheduler and worker; counts from 1 within a launch, of data-parallel rank r from r ·
    #: 10⁹ + 1
    step_id: int
    process: Literal["scheduler", "worker"]  #: scheduler or worker
    #: Scheduler: schedule(), entry to exit. Worker: execute_model(), with sample_tokens() where
    #: that is its own call; µs
    step_duration_us: float
    #: The engine's whole step; µs; null: the worker's record; a step without a whole one
    engine_step_us: float | None
    build_meta_us: float | None  #: build_connector_meta(); µs; null: not called in this process
    #: get_finished() or get_transfer_results(); µs; null: not called in this process
    get_finished_us: float | None
    start_load_kv_us: float | None  #: start_load_kv(); µs; null: not called in this process
    num_running: int | None  #: Running after schedule(); requests; null: the worker's record
    num_waiting: int | None  #: Waiting after schedule(); requests; null: the worker's record
    #: Scheduled for requests whose prompt was not computed yet; tokens; null: the worker's record
    #: of a vLLM
    prefill_tokens: int | None
    #: Scheduled for the others; tokens; null: the worker's record of a vLLM
    decode_tokens: int | None
    #: Embedded engine: KV tokens the decoding sequences read; tokens; absent from a vLLM's
    kv_tokens: NotRequired[int | None]
    #: update_from_output(); µs; absent from the worker's record and the embedded engine's; null for
    #: a step without one
    update_us: NotRequired[float | None]
    #: The connector's other hooks that were called, by name; µs; absent without a connector
    hooks_us: NotRequired[dict[str, float]]
    #: Timed hooks of its children, by child and hook; µs; absent but for a MultiConnector
    children_us: NotRequired[dict[str, dict[str, float]]]


class DeviceLine(TypedDict):
    """One line of device_*.jsonl: a step of an emulated device."""

    t_ns: int  #: When the host queued it; ns
    step_id: int  #: Id of the engine step
    #: When the device began it: when it was queued, or when the step before ended; ns
    t_start_ns: int
    t_end_ns: int  #: When the device was done with it; ns
    #: When the engine core was given the first of its requests; ns; null: it carries requests on
    #: from the step before
    t_since_ns: int | None
    prefill_tokens: int  #: Of prompts; tokens
    decode_seqs: int  #: Sequences that decode
    kv_tokens: int  #: KV cache of these before the step; tokens
    prefill_pairs: int  #: Query and key, over the tokens of the prompts
    #: When the host began to wait for its end; ns; null: the host did not wait for it
    t_wait_ns: int | None
    t_woken_ns: int | None  #: When the host went on; ns; null: the host did not wait for it


class MachineCounters(TypedDict):
    """Totals at the time of a line of machine_*.jsonl; a list has one value for each CPU set."""

    idle_ms: list[float]
    steal_ms: list[float]
    own_ms: list[float]
    pressure_us: NotRequired[list[float | None]]
    throttled: float | None
    suspended_ms: int
    self_us: float
    faults: int


class MachineLine(TypedDict, total=False):
    """One line of machine_*.jsonl: which fields it has depends on its kind."""

    kind: Required[Literal["begin", "chunk"]]  #: begin or chunk
    t_ns: Required[int]  #: CLOCK_MONOTONIC: when the counters were read
    # chunk.
    #: a chunk's rows of nvidia-smi: uuid, SM clock and its highest, throttle reasons, memory clock,
    #: temperature, power; of the study's GPUs alone; absent without a GPU
    gpu: list[list[Any]]
    #: processes seen on the study's GPUs in the chunk, neither the study's nor stopped; absent
    #: without a GPU; null: nvidia-smi named none of the study's processes in the chunk
    foreign_gpu_pids: list[int] | None
    # begin.
    chunk_ms: float  #: from one line to the next; absent but in begin
    loadgen: list[int]  #: the logical CPUs of each side; absent but in begin
    server: list[int]  #: the logical CPUs of each side; absent but in begin
    # begin and chunk.
    #: totals. idle_ms, steal_ms and own_ms (the study's own processes) of both sides; throttled
    #: periods, null where the kernel does not tell; suspended_ms; CPU time and page faults of the
    #: watching process; pressure_us is no longer written
    counters: MachineCounters


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


class GeneratorHealth(TypedDict):
    """`load_generator`: counters by process, who died, connections by worker."""

    processes: dict[str, dict[str, float]]
    workers: int
    workers_died: list[int]
    connections_per_worker: int
    connections: dict[str, int]
    connect_errors: NotRequired[list[str]]


class RehearsedRecord(TypedDict):
    """`rehearsed`: of a cell in virtual time only."""

    seconds: float
    load: float
    inflight_p50: float
    preemptions: int


class MeasuredCellRecord(TypedDict):
    """A cell's record before it is judged."""

    phase: str  #: A, B or Bp
    cell: str  #: its name: r<rate>, or <input>x<output>
    config: str  #: the launch's name
    configuration: str  #: the configuration its server was started with
    block: int  #: from 0
    label: str  #: the engine's label
    input_tokens: int  #: of every request; tokens
    output_tokens: int  #: of every request; tokens
    #: kind, gamma_shape, rate_rps, seed (of the arrivals), n (arrivals planned)
    schedule: ScheduleRecord
    prompts_sha256: str  #: over the bodies of the planned requests
    #: t_origin_ns, t_warmup_end_ns, t_stop_ns, t_cooldown_end_ns, t_drained_ns; started_utc in wall
    #: time; ns
    window: WindowRecord
    #: requests (due after the window), ended_by (answered, drain, schedule, interrupted,
    #: overloaded)
    cooldown: CooldownRecord
    counts: CountsRecord  #: planned, sent, ok, dropped, failed by kind, measured_ok; requests
    extended_s: float  #: how far the window went beyond its floor
    #: measured requests sent, over the window; no longer written
    achieved_rate_rps: NotRequired[float]
    clock: str  #: kernel or worker: who stamped the reads
    attempt: int  #: the launch's attempt that measured it
    suspended_ms: NotRequired[int]  #: how long the machine was suspended during the cell
    #: before and after: the server's counters the checks use
    server_counters: NotRequired[ServerCounters]
    #: from_ns, to_ns, cpu_s of all processes of the server, requests by its own count,
    #: cpu_s_per_1000 (value, parts, reason as in resources.json)
    server_cpu: NotRequired[CellCpu]
    #: per process event-loop lag, CPU share and message counters; who died; connections
    load_generator: NotRequired[GeneratorHealth]
    rehearsed: NotRequired[RehearsedRecord]


class CellRecord(MeasuredCellRecord):
    """cell_<phase>_<cell>.json; `files` is SHA-256 by name of the cell's other files."""

    #: validity check to value, bound and pass; the checks are artifacts/checks.py:CHECKS
    health: dict[str, CheckRecord]
    valid: bool  #: every check passed
    void_reasons: list[str]  #: a sentence per failed check; empty when valid
    files: dict[str, str]  #: SHA-256 of the cell's other files by name
