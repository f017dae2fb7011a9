"""The records of the load generator: what it returns, and what travels between its processes.

Between processes every record is msgpack in array form (field order is the wire format), tagged by
a small integer; request bodies travel beside them as raw frames. Nothing is pickled.
"""

from typing import Literal

import msgspec

Clock = Literal["kernel", "worker"]
CountedBy = Literal["server", "client"]
Status = Literal["ok", "error", "timeout", "cancelled", "dropped"]

# Every way a request can end other than in success: kind -> (status, the text a user reads).
FAILURES: dict[str, tuple[Status, str]] = {
    "connect_refused": ("error", "the server refused the connection"),
    "connect_failed": ("error", "no connection to the server could be made"),
    "tls_failed": (
        "error",
        "TLS could not be agreed on, or the server's certificate is not trusted",
    ),
    "reset_before_headers": ("error", "the connection was reset before the response began"),
    "closed_before_headers": ("error", "the server closed the connection without a response"),
    "http_status": ("error", "the response status was not 200"),
    "malformed_http": ("error", "the response was not valid HTTP/1.1"),
    "reset_mid_response": ("error", "the connection was reset in the middle of the response"),
    "closed_mid_response": ("error", "the server closed the connection in mid-response"),
    "malformed_event": ("error", "an event or body of the response was not the expected JSON"),
    "oversized_event": ("error", "an event of the stream exceeded the size limit"),
    "error_event": ("error", "the server reported an error inside the stream"),
    "missing_done": ("error", "the stream ended without [DONE], or the body without finish reason"),
    "missing_finish": ("error", "the stream ended with [DONE], but no choice had a finish reason"),
    "data_after_done": ("error", "tokens followed [DONE]"),
    "missing_usage": ("error", "the response carried no token usage"),
    "missing_token_ids": ("error", "the response carried no token ids, which the session inherits"),
    "wrong_length": ("error", "prompt or completion tokens differ from what was asked for"),
    "worker_died": ("error", "the worker process that held the request died"),
    "send_buffer_full": ("error", "the worker did not take the request; its buffer was full"),
    "oversized_message": ("error", "the result exceeded the message size limit between processes"),
    "internal_error": ("error", "the load generator itself failed on this request"),
    "request_timeout": ("timeout", "no complete response within the request timeout"),
    "drain_timeout": ("timeout", "still running when the drain time after the window was over"),
    "session_failed": ("cancelled", "an earlier request of the same session failed"),
    "run_ended": ("cancelled", "not sent: the run ended before it was due"),
    "interrupted": ("cancelled", "the run was interrupted by the user"),
    "inflight_cap": ("dropped", "due while the in-flight cap was reached; not sent"),
}


class LoadGeneratorError(Exception):
    """The load generator's processes cannot do their work; the text says which and why."""


class RequestFailed(Exception):
    """A request ended in failure `kind` (a key of FAILURES); `detail` says what was seen."""

    def __init__(self, kind: str, detail: str | None = None) -> None:
        super().__init__(kind, detail)
        self.kind = kind
        self.detail = detail


class RequestRecord(msgspec.Struct, kw_only=True):
    """One scheduled request, a line of a requests file; times are CLOCK_MONOTONIC ns.

    `t_issue_ns` is when the issuing thread handed the request on, ahead of its due time
    `t_intended_ns`; the worker holds it and sends at the due time. Schedule lag and "no early send"
    are judged on `t_send_ns - t_intended_ns`. `warmup` and `cooldown`: due before and after the
    measured window of a cell.
    """

    request_id: str
    seq: int
    status: Status
    error_kind: str | None
    error_detail: str | None
    warmup: bool
    cooldown: bool
    t_intended_ns: int
    t_issue_ns: int | None
    t_worker_ns: int | None
    t_conn_ns: int | None
    t_send_ns: int | None
    t_headers_ns: int | None
    t_first_token_ns: int | None
    t_last_token_ns: int | None
    t_done_ns: int | None
    prompt_tokens: int | None
    completion_tokens: int | None
    inflight_at_send: int | None
    worker: int | None
    reads: list[tuple[int, int]] | None

    @property
    def measured(self) -> bool:
        """True if the request was due in the measured window."""
        return not (self.warmup or self.cooldown)


# ---- main process -> worker


class TlsSettings(msgspec.Struct, frozen=True):
    """How to trust an https endpoint.

    `name` stands in its certificate; `ca_file` holds PEM certificates to trust instead of the
    system's; with `insecure` any certificate will do.
    """

    name: str
    ca_file: str | None
    insecure: bool


class WorkerSettings(msgspec.Struct):
    """What a worker is told at its start; `folder` holds the two ipc sockets."""

    worker: int
    parent: int
    folder: str
    inflight_fd: int
    workers: int
    family: int
    host: str
    port: int
    tls: TlsSettings | None
    head: str
    chat: bool
    stream: bool
    usage_required: bool
    connections: int
    spin_ns: int
    sleep_margin_ns: int
    kernel_stamps: bool


class Issue(msgspec.Struct, array_like=True, tag=1):
    """Send the body in the next frame at `due_ns`. Token counts of None are not checked."""

    seq: int
    due_ns: int
    request_id: str
    prompt_tokens: int | None
    completion_tokens: int | None


class Begin(msgspec.Struct, array_like=True, tag=2):
    """A run starts: fill the connection pool, reset the counters, answer `Begun`.

    `prompt`: the plan waits for results; else each may be held for a few milliseconds.
    """

    run: int
    inflight_cap: int
    request_timeout_ns: int
    keep_reads: bool
    capture: Literal["counts", "text", "token_ids"]
    prompt: bool = True


class Cancel(msgspec.Struct, array_like=True, tag=3):
    """End the named requests, or every outstanding one if `seqs` is None, with failure `kind`."""

    kind: str
    seqs: list[int] | None


class End(msgspec.Struct, array_like=True, tag=4):
    """The run is over: answer `Health`."""


ToWorker = Issue | Begin | Cancel | End


# ---- worker -> main process


class Up(msgspec.Struct, array_like=True, tag=1):
    """The worker's first message: its way to the main process works."""

    worker: int


class Begun(msgspec.Struct, array_like=True, tag=2):
    """The worker is ready for requests of `run`."""

    worker: int
    run: int
    connections: int
    connect_error: str | None
    clock: Clock


class Done(msgspec.Struct, array_like=True, tag=3):
    """A request ended. `reads` is pairs of native int64 (t_ns, token events), concatenated."""

    run: int
    worker: int
    seq: int
    error_kind: str | None = None
    error_detail: str | None = None
    t_worker_ns: int | None = None
    t_conn_ns: int | None = None
    t_send_ns: int | None = None
    t_headers_ns: int | None = None
    t_first_token_ns: int | None = None
    t_last_token_ns: int | None = None
    t_done_ns: int | None = None
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    inflight_at_send: int | None = None
    reads: bytes | None = None
    text: str | None = None
    token_ids: list[int] | None = None
    t_first_answer_ns: int | None = None
    counted_by: CountedBy | None = None


class Health(msgspec.Struct, array_like=True, tag=4):
    """What one worker says about its own run (see health.py)."""

    run: int
    worker: int
    values: dict[str, float]


class Ended(msgspec.Struct, array_like=True, tag=5):
    """Requests that ended within a few milliseconds: a message on its own wakes four threads on its
    way, ZMQ's and the event loops.
    """

    results: list[Done]


FromWorker = Up | Begun | Done | Health | Ended
