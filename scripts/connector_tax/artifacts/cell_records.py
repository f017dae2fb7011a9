"""The fields of a cell's files on disk. Their meanings: docs/artifacts.md.

Times are CLOCK_MONOTONIC in ns. A NotRequired key is absent where it does not apply.
"""

from typing import Any, Literal, NotRequired, Required, TypedDict, TypeGuard


class RequestLine(TypedDict):
    """One line of requests_*.jsonl; written from loadgen/messages.py:RequestRecord."""

    request_id: str  #: Sent as X-Request-Id; names the stream the prompt is drawn from
    seq: int  #: Position in the schedule, from 0
    status: str  #: ok, error, timeout, cancelled or dropped
    #: The kind of failure; the closed list is loadgen/messages.py:FAILURES; null: status ok
    error_kind: str | None
    error_detail: str | None  #: The cause in detail; null: status ok, or nothing more is known
    warmup: bool  #: Due in the warm-up: sent, not measured
    #: Due after the window, while measured requests were still unanswered: sent, not measured
    cooldown: bool
    t_intended_ns: int  #: Due time by the schedule; ns
    #: When the issuing thread handed it to a worker, ahead of its due time; ns; null: never handed
    #: on
    t_issue_ns: int | None
    t_worker_ns: int | None  #: When the worker received it; ns; null: never reached a worker
    t_conn_ns: int | None  #: When it got its connection; ns; null: it got none
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
    #: Each socket read with token events: its stamp in ns and the number of events that it
    #: completed; null: load_generator.keep_reads is false, or no token came
    reads: list[tuple[int, int]] | None


class AnsweredRequest(TypedDict):
    """The fields that readers use of a line with status ok; none of them is null."""

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
    ok: bool  #: whether the page was read and parsed


class ScrapeLine(ScrapeMoment):
    """One line of metrics_*.jsonl."""

    scrape_ms: float | None  #: how long the scrape took
    #: `name{label="value"}` to number; empty when not ok. Histogram buckets and `*_created` are
    #: left out; as the server's
    values: dict[str, float]
    raw: NotRequired[str]  #: the page as it was sent; absent but in a cell's first and last scrape
    error: NotRequired[str]  #: why the scrape failed; absent when ok


class StepLine(TypedDict):
    """One line of engine_step_*.jsonl; its fields depend on engine, process and connector."""

    t_ns: int  #: CLOCK_MONOTONIC at the step's start; vLLM: in units of 10 µs; ns
    #: Step number, equal in scheduler and worker; from 1 within a launch, for data-parallel rank r
    #: from r · 10⁹ + 1
    step_id: int
    process: Literal["scheduler", "worker"]  #: scheduler or worker
    #: Scheduler: schedule(), entry to exit. Worker: execute_model(), with sample_tokens() where
    #: that is its own call; µs
    step_duration_us: float
    #: Duration of the engine's whole step; µs; null: a worker's record, or a step without a whole
    #: one
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
    #: update_from_output(); µs; null: not called in this step; absent from the worker's record and
    #: the embedded engine's
    update_us: NotRequired[float | None]
    #: The connector's other hooks that were called, by name; µs; absent without a connector
    hooks_us: NotRequired[dict[str, float]]
    #: Timed hooks of a MultiConnector's children, by child and hook; µs; absent without one
    children_us: NotRequired[dict[str, dict[str, float]]]


class DeviceLine(TypedDict):
    """One line of device_*.jsonl: a step of an emulated device."""

    t_ns: int  #: When the host queued it; ns
    step_id: int  #: Id of the engine step
    #: When the device began it: the later of its queueing and the previous step's end; ns
    t_start_ns: int
    t_end_ns: int  #: When the device finished it; ns
    #: When the engine core received its first request; ns; null: it continues requests of the
    #: previous step
    t_since_ns: int | None
    prefill_tokens: int  #: Prompt tokens that it computes; tokens
    decode_seqs: int  #: Number of decoding sequences
    kv_tokens: int  #: KV cache of the decoding sequences before the step; tokens
    prefill_pairs: int  #: Number of query-key pairs, over the prompt tokens
    #: When the host began to wait for its end; ns; null: the host did not wait
    t_wait_ns: int | None
    t_woken_ns: int | None  #: When the host continued; ns; null: the host did not wait
    #: Copies between device and host that were submitted from when it was queued to when the next
    #: one was; bytes; absent before release 0.4
    copied_bytes: NotRequired[int]
    copied_pieces: NotRequired[int]  #: Pieces of these copies; absent before release 0.4


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


# The sides whose CPU time a machine file counts.
SIDES: tuple[Literal["loadgen", "server"], ...] = ("loadgen", "server")


class MachineLine(TypedDict, total=False):
    """One line of machine_*.jsonl; its fields depend on its kind."""

    kind: Required[Literal["begin", "chunk"]]  #: begin or chunk
    t_ns: Required[int]  #: CLOCK_MONOTONIC: when the counters were read
    # chunk.
    #: rows of nvidia-smi for the study's GPUs in this chunk: uuid, SM clock, highest SM clock,
    #: throttle reasons, memory clock, temperature, power; absent without a GPU
    gpu: list[list[Any]]
    #: other running processes on the study's GPUs in this chunk; null: nvidia-smi listed none of
    #: the study's processes either; absent without a GPU
    foreign_gpu_pids: list[int] | None
    # begin.
    chunk_ms: float  #: interval of the lines; only in begin
    loadgen: list[int]  #: logical CPUs of this side; only in begin
    server: list[int]  #: logical CPUs of this side; only in begin
    # begin and chunk.
    #: totals: idle_ms, steal_ms and own_ms (the study's processes) of both sides; throttled
    #: periods, null if not counted; suspended_ms; CPU time and page faults of the watching process;
    #: pressure_us is no longer written
    counters: MachineCounters


class MeasuredWindow(TypedDict):
    """The start and end of a cell's measured window."""

    t_warmup_end_ns: int
    t_stop_ns: int


class WindowRecord(MeasuredWindow):
    """`window`: start and end of each part of the cell."""

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
    """`cooldown`: number of requests due after the window, and what ended it."""

    requests: int
    ended_by: str


class CountsRecord(TypedDict):
    """`counts`: numbers of requests, with `failed` by kind of failure."""

    planned: int
    sent: int
    ok: int
    dropped: int
    failed: dict[str, int]
    measured_ok: int


# Not a class: `pass` is a keyword.
CheckRecord = TypedDict(
    "CheckRecord", {"value": float | None, "bound": float | list[float], "pass": bool}
)
"""One check of `health` (artifacts/checks.py:CHECKS); two numbers in `bound` are a range."""


class QuantityRecord(TypedDict):
    """A quantity: value, parts (`server` and each companion), and the reason for a null value."""

    value: float | None
    parts: dict[str, float]
    reason: str | None


class ServerCounters(TypedDict):
    """`server_counters`: the server's counters around the cell, null for a missing series."""

    before: dict[str, float | None]
    after: dict[str, float | None]


class CellCpu(TypedDict):
    """`server_cpu`: CPU time of the server's processes, read before and after the cell."""

    from_ns: int
    to_ns: int
    cpu_s: float | None
    requests: float | None
    cpu_s_per_1000: QuantityRecord
    # Of the engine core's process, by name and thread id, CPU s per 1000 requests; of those that
    # are busy for 1% of the time, busiest first.
    threads: NotRequired[dict[str, float]]


class GeneratorHealth(TypedDict):
    """`load_generator`: counters by process, dead workers, connections by worker."""

    processes: dict[str, dict[str, float]]
    workers: int
    workers_died: list[int]
    connections_per_worker: int
    connections: dict[str, int]
    connect_errors: NotRequired[list[str]]


class RehearsedRecord(TypedDict):
    """`rehearsed`: fields that only a cell in virtual time has."""

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
    input_tokens: int  #: length of every request; tokens
    output_tokens: int  #: length of every request; tokens
    #: kind, gamma_shape, rate_rps, seed (of the arrivals), n (arrivals planned)
    schedule: ScheduleRecord
    prompts_sha256: str  #: SHA-256 over the bodies of the planned requests
    #: t_origin_ns, t_warmup_end_ns, t_stop_ns, t_cooldown_end_ns, t_drained_ns; started_utc in wall
    #: time; ns
    window: WindowRecord
    #: requests (due after the window), ended_by (answered, drain, schedule, interrupted,
    #: overloaded)
    cooldown: CooldownRecord
    counts: CountsRecord  #: planned, sent, ok, dropped, failed by kind, measured_ok; requests
    extended_s: float  #: time by which the window exceeded its floor
    #: measured requests sent per second of the window; no longer written
    achieved_rate_rps: NotRequired[float]
    clock: str  #: source of the reads' stamps: kernel or worker
    attempt: int  #: the launch's attempt that measured it
    suspended_ms: NotRequired[int]  #: how long the machine was suspended during the cell
    #: the server's counters for the checks, before and after the cell
    server_counters: NotRequired[ServerCounters]
    #: from_ns, to_ns, cpu_s of all processes of the server, requests by its own count,
    #: cpu_s_per_1000 (value, parts, reason as in resources.json)
    server_cpu: NotRequired[CellCpu]
    #: event-loop lag, CPU share and message counters per process; dead workers; connections
    load_generator: NotRequired[GeneratorHealth]
    rehearsed: NotRequired[RehearsedRecord]


class CellRecord(MeasuredCellRecord):
    """cell_<phase>_<cell>.json; `files` has the SHA-256 of the cell's other files by name."""

    #: validity check to value, bound and pass; the checks are artifacts/checks.py:CHECKS
    health: dict[str, CheckRecord]
    valid: bool  #: every check passed
    void_reasons: list[str]  #: a sentence for each failed check; empty if valid
    files: dict[str, str]  #: SHA-256 of the cell's other files by name
