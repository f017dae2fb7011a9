"""The records of the load generator: results, and messages between its processes.

Between processes every record is msgpack in array form (field order is the wire format), tagged by
a small integer. Nothing is pickled.
"""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import msgspec

Clock = Literal["kernel", "worker"]
CountedBy = Literal["server", "client"]
Tolerated = Literal["no_done", "not_closed", "prompt_length"]
Capture = Literal["counts", "text", "token_ids"]
"""The part of an answer that a worker keeps besides its counts."""
Output = str | list[int] | dict[str, Any]
"""The part of an answer that descendants inherit: text, token ids, or a chat message."""
WAITS = -1
"""The due time of a request that waits in a worker for a place in a closed loop."""
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
    "http_status": ("error", "the server answered with a status other than 200"),
    "malformed_http": ("error", "the response was not valid HTTP/1.1"),
    "reset_mid_response": ("error", "the connection was reset in the middle of the response"),
    "closed_mid_response": ("error", "the server closed the connection in mid-response"),
    "malformed_event": ("error", "an event or body of the response was not the expected JSON"),
    "oversized_event": ("error", "an event of the stream exceeded the size limit"),
    "error_event": ("error", "the server reported an error after status 200"),
    "missing_done": ("error", "the stream ended without [DONE], or the body without finish reason"),
    "missing_finish": ("error", "the stream ended with [DONE], but no choice had a finish reason"),
    "bad_finish": ("error", "the answer ended with a finish reason that does not count as success"),
    "several_choices": (
        "error",
        "the answer had several choices, but only one is measured: remove n from --body",
    ),
    "not_a_stream": ("error", "the answer with status 200 was not an event stream"),
    "data_after_done": ("error", "tokens followed [DONE]"),
    "missing_usage": ("error", "the response carried no token usage"),
    "missing_token_ids": ("error", "the response carried no token ids, which the session inherits"),
    "wrong_length": ("error", "prompt or completion tokens differ from the requested numbers"),
    "worker_died": ("error", "the worker process that held the request died"),
    "send_buffer_full": ("error", "the worker did not take the request; its buffer was full"),
    "oversized_message": ("error", "the result exceeded the message size limit between processes"),
    "internal_error": ("error", "the load generator itself failed on this request"),
    "request_timeout": ("timeout", "no complete response within the request timeout"),
    "drain_timeout": ("timeout", "the request was still running at the end of the drain time"),
    "session_failed": ("cancelled", "an earlier request of the same session failed"),
    "run_ended": ("cancelled", "the request was not sent: the run ended before its due time"),
    "interrupted": ("cancelled", "the run was interrupted by the user"),
    "inflight_cap": (
        "dropped",
        "the request was not sent: the in-flight cap was reached when it was due",
    ),
}


GOOD_ENDS = frozenset(
    (
        *("stop", "length", "tool_calls", "function_call", "content_filter"),
        *("eos", "eos_token", "stop_sequence"),
    )
)
"""The finish reasons that end an answer well."""

# Failures before any byte of an answer, as on a pooled connection that was already dead.
DEAD = ("reset_before_headers", "closed_before_headers")
PAUSE_AFTER = ("connect_refused", "connect_failed", "tls_failed", *DEAD)
PAUSE_NS = 1_000_000_000
"""Pause of a closed loop's place after a failed connection, so that a dead server is not flooded.
"""
TOO_MANY = 429
"""After this status, a status of 500 or more, or an error with Retry-After, the place pauses for
the time in Retry-After, or for PAUSE_NS.
"""
PAUSE_LIMITS_NS = (100_000_000, 86_400_000_000_000)
"""Limits of the pause that Retry-After can request."""

# Tolerated deviation of a success (not strict) -> the text a user reads.
TOLERATED: dict[Tolerated, str] = {
    "no_done": "the stream ended in order and with a finish reason, but without [DONE]",
    "not_closed": "the stream sent [DONE], but did not end or was truncated",
    "prompt_length": "the server counted more or fewer prompt tokens than were sent",
}


class LoadGeneratorError(Exception):
    """The load generator's processes cannot work; the text names the process and the cause."""


class RequestFailed(Exception):
    """A failed request: `kind` is a key of FAILURES, `detail` the cause."""

    def __init__(self, kind: str, detail: str | None = None) -> None:
        super().__init__(kind, detail)
        self.kind = kind
        self.detail = detail


class RequestRecord(msgspec.Struct, kw_only=True, array_like=True, tag=0):
    """One request, from its plan to its outcome; times are CLOCK_MONOTONIC ns.

    The main process creates it; a worker adds the outcome and sends it back. `t_issue_ns` is when
    the issuing thread handed the request on, ahead of its due time `t_intended_ns`; the worker
    holds it and sends it when due. Schedule lag and "no early send" are judged on `t_send_ns -
    t_intended_ns`. `warmup` and `cooldown`: due before and after the measured window.
    `t_first_answer_ns`: arrival of the first token that is not reasoning. `counted_by`: source of
    the token count, the server's usage or the client's token events. `first_read_tokens`: token
    events in the read that brought the first. `raw_reads`: pairs of native int64 (t_ns, token
    events), one for each read with token events. `retries`: how often it was sent again because a
    pooled connection was dead. `tolerated`: the deviation of a success from a complete answer.
    `token_events`: events that brought tokens. `cached_tokens`: cached prompt tokens, by the
    server's usage.
    """

    request_id: str
    seq: int
    status: Status = "ok"
    error_kind: str | None = None
    error_detail: str | None = None
    warmup: bool = False
    cooldown: bool = False
    t_intended_ns: int
    t_issue_ns: int | None = None
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
    worker: int | None = None
    raw_reads: bytes | None = None
    session: str = ""
    node: str = ""
    parents: tuple[str, ...] = ()
    wait_after_ready_ns: int = 0
    t_first_answer_ns: int | None = None
    first_read_tokens: int | None = None
    counted_by: CountedBy | None = None
    retries: int = 0
    tolerated: Tolerated | None = None
    finish_reason: str | None = None
    token_events: int | None = None
    cached_tokens: int | None = None
    # Only between processes: run, requested token counts (None: unchecked), output that children
    # inherit, and the pause of its place in a closed loop.
    run: int = 0
    pause_ns: int = 0
    wanted: tuple[int | None, int | None] = (None, None)
    output: Output | None = None

    @property
    def measured(self) -> bool:
        return not (self.warmup or self.cooldown)

    @property
    def reads(self) -> list[tuple[int, int]] | None:
        """Return the time of each read with token events, and its number of events."""
        if self.raw_reads is None:
            return None
        numbers = memoryview(self.raw_reads).cast("q").tolist()
        return list(zip(numbers[::2], numbers[1::2], strict=True))

    def fail(self, kind: str, detail: str | None = None) -> None:
        self.status, self.error_kind, self.error_detail = FAILURES[kind][0], kind, detail
        if kind in PAUSE_AFTER:
            self.pause_ns = PAUSE_NS

    def fields(self, names: Iterable[str]) -> dict[str, Any]:
        return {name: getattr(self, name) for name in names}


LINE_FIELDS = tuple(
    "reads" if name == "raw_reads" else name
    for name in RequestRecord.__struct_fields__
    if name not in ("run", "pause_ns", "wanted", "output")
)
"""A line of the command's requests file, in order."""
STUDY_FIELDS = LINE_FIELDS[: LINE_FIELDS.index("session")]
"""A line of a study's requests file: its requests have no sessions, and are all strict."""


# ---- main process -> worker


class TlsSettings(msgspec.Struct, frozen=True):
    """The settings for trusting an https endpoint.

    `name` is the host name in its certificate; `ca_file` holds PEM certificates to trust instead of
    the system's; with `insecure` any certificate is accepted.
    """

    name: str
    ca_file: str | None
    insecure: bool


_TOKEN = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+").fullmatch
# Headers that the load generator sets for each request.
_OWN_HEADERS = {"content-length", "transfer-encoding", "x-request-id"}


@dataclass(frozen=True, slots=True)
class Target:
    """The endpoint; `path` may carry a query.

    Header values (credentials) are sent, but never logged or described. `finish_reasons`: reasons
    that count as success, besides GOOD_ENDS.
    """

    host: str
    port: int
    path: str = "/v1/completions"
    headers: Mapping[str, str] = field(default_factory=dict, repr=False)
    stream: bool = True
    tls: TlsSettings | None = None
    finish_reasons: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if not (self.path.isascii() and self.path.isprintable()) or " " in self.path:
            raise ValueError(f"path {self.path!r} holds characters that must be %-encoded")
        for name, value in self.headers.items():
            if any(character in name + value for character in "\r\n"):
                raise ValueError(f"header {name!r} contains a line break")
            if not _TOKEN(name):
                raise ValueError(
                    f"header name {name!r} is invalid; allowed: letters, digits, - and the like"
                )
            if name.lower() in _OWN_HEADERS:
                raise ValueError(f"header {name!r} cannot be set: the load generator sets it")
            if not all(ord(character) < 256 for character in value):
                raise ValueError(f"header {name!r} holds characters outside Latin-1")

    @property
    def chat(self) -> bool:
        return self.path.partition("?")[0].endswith("/chat/completions")


class WorkerSettings(msgspec.Struct):
    """A worker's settings at its start; `family` and `host` are the target's address.

    The dispatcher fills in the last two; `folder` holds the two ipc sockets.
    """

    worker: int
    workers: int
    family: int
    host: str
    target: Target
    strict: bool
    connections: int
    inflight_fd: int = -1
    folder: str = ""


class Begin(msgspec.Struct, array_like=True, tag=2):
    """A message that starts a run: open `connections`, reset the counters, and reply `Begun`.

    `prompt`: send each result at once, since the plan waits for it; otherwise results may be
    batched for a few milliseconds. `closed`: a closed loop of single requests, where requests
    without a due time wait in the worker and one starts when another ends.
    """

    run: int
    inflight_cap: int
    request_timeout_ns: int
    keep_reads: bool
    capture: Capture
    connections: int = 0
    prompt: bool = True
    closed: bool = False


class Requests(msgspec.Struct, array_like=True, tag=1):
    """Requests for one worker, each with its body: one message wakes a worker once."""

    requests: list[tuple[RequestRecord, bytes]]


class Cancel(msgspec.Struct, array_like=True, tag=3):
    """A message that ends the worker's requests in `seqs`, or all, with the failure `kind`."""

    kind: str
    seqs: list[int] | None


class End(msgspec.Struct, array_like=True, tag=4):
    """A message that ends a run: the worker replies `Health`."""


class Window(msgspec.Struct, array_like=True, tag=5):
    """A message that a closed loop's measured window ends at `stop_ns`.

    With `goes_on`, the worker replies `Unanswered` then. Otherwise it starts nothing from then on,
    and returns the waiting requests as `run_ended`.
    """

    stop_ns: int
    goes_on: bool


ToWorker = Requests | Begin | Cancel | End | Window
Item = tuple[RequestRecord, bytes] | Cancel | Window
"""Output of a plan: a request with its body, or a message to the workers."""


# ---- worker -> main process


class Begun(msgspec.Struct, array_like=True, tag=2):
    """A worker's reply that it is ready for the requests of a run."""

    worker: int
    connections: int
    connect_error: str | None
    clock: Clock


class Health(msgspec.Struct, array_like=True, tag=4):
    """A worker's report at the end of a run: its health values."""

    worker: int
    values: dict[str, float]


class Ended(msgspec.Struct, array_like=True, tag=5):
    """The requests that ended within a few milliseconds, in one message.

    Each message wakes four threads: two of ZMQ and two event loops.
    """

    results: list[RequestRecord]


class Unanswered(msgspec.Struct, array_like=True, tag=6):
    """The requests due in a closed loop's window that a worker still holds at the window's end.

    `seqs` lists them.
    """

    worker: int
    seqs: list[int]


FromWorker = Begun | Health | Ended | Unanswered
FromRun = RequestRecord | Unanswered
"""A message from a worker during a run."""
