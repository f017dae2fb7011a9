"""The fields of a cell's files, as they lie on disk. What each means: docs/artifacts.md.

Times are CLOCK_MONOTONIC in ns. A key that is NotRequired lacks where it does not apply, or in
studies measured before it existed.
"""

from typing import Any, Literal, NotRequired, TypedDict, TypeGuard

from connector_tax.artifacts.study_records import QuietRule


class _Request(TypedDict):
    request_id: str
    seq: int
    status: str
    error_kind: str | None
    error_detail: str | None
    warmup: bool
    cooldown: NotRequired[bool]
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

    t_ns: int
    ok: bool


class ScrapeLine(ScrapeMoment):
    """One line of metrics_*.jsonl."""

    scrape_ms: float | None
    values: dict[str, float]
    raw: NotRequired[str]
    error: NotRequired[str]


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

    t_ns: int
    step_id: int
    t_start_ns: int
    t_end_ns: int
    t_since_ns: int | None
    prefill_tokens: int
    decode_seqs: int
    kv_tokens: int
    prefill_pairs: int
    t_wait_ns: int | None
    t_woken_ns: int | None


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


class MachineLine(TypedDict):
    """One line of machine_*.jsonl: which fields it has depends on its kind."""

    kind: Literal["look", "begin", "chunk"]
    t_ns: int
    # look.
    when: NotRequired[Literal["before", "after"]]
    cpus: NotRequired[list[int]]
    # look and chunk.
    memory_ns: NotRequired[list[int]]
    compute_ns: NotRequired[list[int]]
    # chunk.
    at_us: NotRequired[list[int]]
    gpu: NotRequired[list[list[Any]]]
    foreign_gpu_pids: NotRequired[list[int] | None]
    # begin.
    interval_ms: NotRequired[float]
    working_set_mib: NotRequired[float]
    elements: NotRequired[int]
    chunk_ms: NotRequired[float]
    loadgen: NotRequired[list[int]]
    server: NotRequired[list[int]]
    # begin and chunk.
    counters: NotRequired[MachineCounters]


class MeasuredWindow(TypedDict):
    """From when to when a cell was measured."""

    t_warmup_end_ns: int
    t_stop_ns: int


class WindowRecord(MeasuredWindow):
    """`window`: when the cell's parts began and ended."""

    t_origin_ns: int
    t_cooldown_end_ns: NotRequired[int]
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


class CellQuiet(TypedDict):
    """`quiet`: the rule that the cell's requests were judged by."""

    rule: QuietRule


# Not a class: `pass` is no name of Python's.
CheckRecord = TypedDict(
    "CheckRecord",
    {"value": float | None, "bound": float | list[float], "pass": bool},
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


class GeneratorHealth(TypedDict):
    """`load_generator`: counters by process, who died, connections by worker."""

    processes: dict[str, dict[str, float]]
    workers: NotRequired[int]
    workers_died: NotRequired[list[int]]
    connections_per_worker: NotRequired[int]
    connections: NotRequired[dict[str, int]]
    connect_errors: NotRequired[list[str]]


class RehearsedRecord(TypedDict):
    """`rehearsed`: of a cell in virtual time only."""

    seconds: float
    load: float
    inflight_p50: float
    inflight_max: int
    preemptions: int


class MeasuredCellRecord(TypedDict):
    """A cell's record before it is judged."""

    phase: str
    cell: str
    config: str
    configuration: str
    block: int
    label: str
    input_tokens: int
    output_tokens: int
    schedule: ScheduleRecord
    prompts_sha256: str
    window: WindowRecord
    cooldown: NotRequired[CooldownRecord]
    counts: CountsRecord
    extended_s: float
    achieved_rate_rps: float
    clock: str
    attempt: int
    suspended_ms: NotRequired[int]
    quiet: NotRequired[CellQuiet]
    server_counters: NotRequired[ServerCounters]
    server_cpu: NotRequired[CellCpu]
    load_generator: NotRequired[GeneratorHealth]
    rehearsed: NotRequired[RehearsedRecord]


class CellRecord(MeasuredCellRecord):
    """cell_<phase>_<cell>.json; `files` is SHA-256 by name of the cell's other files."""

    health: dict[str, CheckRecord]
    valid: bool
    void_reasons: list[str]
    files: dict[str, str]
