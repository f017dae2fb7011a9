"""The load generator: its processes, and the runs on them."""

import contextlib
import resource
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from connector_tax.loadgen.affinity import AffinityPlan
from connector_tax.loadgen.cell import (
    CellRule,
    CooldownEnd,
    MayCount,
    OpenLoopCell,
    PlannedRequest,
    Progress,
)
from connector_tax.loadgen.dispatcher import Dispatcher, LoadGeneratorError
from connector_tax.loadgen.messages import Begin, Begun, Clock, Done, RequestRecord, WorkerSettings
from connector_tax.loadgen.precision import HalfWidths, PrecisionRule
from connector_tax.loadgen.process import CollectorPause
from connector_tax.loadgen.session import Plan, SessionThread

PROGRESS_S = 0.25
START_DELAY_NS = 20_000_000
PROBE_S = 2.0
# Of a worker, beside its connections: pipes, ipc sockets, timers, libraries.
OTHER_FILES = 64


@dataclass(frozen=True, slots=True)
class Target:
    """The endpoint. Header values (credentials) are sent, and never logged or described.

    `path` may carry a query.
    """

    host: str
    port: int
    path: str = "/v1/completions"
    headers: Mapping[str, str] = field(default_factory=dict, repr=False)
    stream: bool = True

    def __post_init__(self) -> None:
        if not (self.path.isascii() and self.path.isprintable()) or " " in self.path:
            raise ValueError(f"path {self.path!r} holds characters that must be %-encoded")
        for name, value in self.headers.items():
            if any(character in name + value for character in "\r\n"):
                raise ValueError(f"header {name!r} contains a line break")
            if not _is_latin_1(name + value):
                raise ValueError(f"header {name!r} holds characters outside Latin-1")

    @property
    def chat(self) -> bool:
        """True for a chat-completions endpoint."""
        return self.path.partition("?")[0].endswith("/chat/completions")


@dataclass(frozen=True, slots=True)
class LoadGeneratorOptions:
    """How the load generator works; none of it changes what is sent or when it is due.

    A request travels to its worker `lead_ms` before it is due. The worker's timer is set
    `sleep_margin_us` before the due time; for the last `spin_us` it makes ready what the request
    needs and spins instead of sleeping.
    `connections_per_worker` are opened ahead and are the most one worker opens; a request that
    finds none free waits for one (counted in health as pool_waits).
    """

    workers: int = 1
    connections_per_worker: int = 256
    spin_us: float = 400.0
    sleep_margin_us: float = 400.0
    lead_ms: float = 20.0
    kernel_stamps: bool = True
    keep_reads: bool = True
    cpus: AffinityPlan | None = None
    stop_on_worker_death: bool = True

    def __post_init__(self) -> None:
        for name in ("workers", "connections_per_worker"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be at least 1")
        for name in ("spin_us", "sleep_margin_us", "lead_ms"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} is {getattr(self, name)}; it must not be negative")
        if self.cpus is not None and len(self.cpus.workers) != self.workers:
            raise ValueError(f"the affinity plan is for {len(self.cpus.workers)} workers")


@dataclass(frozen=True, slots=True)
class CellResult:
    """What a cell brought; times are CLOCK_MONOTONIC ns.

    `records` holds exactly the requests due before `t_cooldown_end_ns`, in schedule order; those
    due from `t_stop_ns` on are not measured. `extended_s` is how far the window went beyond its
    floor. `precise` is what the precision rule saw when it ended the window; None when it did not.
    `health` has, per process, event-loop lag, CPU and
    spin share and message counters, and which workers have died, in this cell or before.
    """

    records: list[RequestRecord]
    t_origin_ns: int
    t_warmup_end_ns: int
    t_stop_ns: int
    t_cooldown_end_ns: int
    cooldown_ended_by: CooldownEnd
    t_drained_ns: int
    extended_s: float
    precise: HalfWidths | None
    clock: Clock
    health: dict[str, Any]


class LoadGenerator:
    """Sends planned requests to one endpoint and records when everything happened.

    A context manager: entering starts the worker processes, connects them and fills their
    connection pools; leaving ends them. No process, socket or temporary folder is left, also when
    this process is killed.
    """

    def __init__(self, target: Target, options: LoadGeneratorOptions) -> None:
        self.target = target
        self.options = options
        self._run_number = 0
        self._begun: list[Begun] = []

    def __enter__(self) -> "LoadGenerator":
        """Start everything.

        Raises:
            LoadGeneratorError: the host has no address, a worker did not start, or the limit of
                open files is below what the connections need.
        """
        files = self.options.connections_per_worker + OTHER_FILES
        _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
        if most != resource.RLIM_INFINITY and files > most:
            raise LoadGeneratorError(
                f"connections_per_worker {self.options.connections_per_worker} needs {files} open "
                f"files; the hard limit is {most} (ulimit -Hn)"
            )
        plan = self.options.cpus
        self._main_cpus = plan.loadgen if plan is not None and plan.enabled else None
        worker_cpus = plan.workers if plan is not None and plan.enabled else None
        self._dispatcher = Dispatcher(self._worker_settings(), self._main_cpus, worker_cpus)
        self._dispatcher.start()
        return self

    def __exit__(
        self,
        _kind: type[BaseException] | None,
        _error: BaseException | None,
        _trace: TracebackType | None,
    ) -> None:
        self._dispatcher.close()

    @property
    def worker_pids(self) -> list[int]:
        """Process ids of the workers, by index."""
        return self._dispatcher.pids

    @property
    def affinity(self) -> dict[str, Any] | None:
        """The affinity plan, for the records."""
        return None if self.options.cpus is None else self.options.cpus.describe()

    def describe(self) -> dict[str, Any]:
        """Return target and options, for the records; header values are left out."""
        options = self.options
        return {
            "target": {
                "host": self.target.host,
                "port": self.target.port,
                "path": self.target.path,
                "stream": self.target.stream,
                "header_names": sorted(self.target.headers),
            },
            "workers": options.workers,
            "connections_per_worker": options.connections_per_worker,
            "spin_us": options.spin_us,
            "sleep_margin_us": options.sleep_margin_us,
            "lead_ms": options.lead_ms,
            "kernel_stamps": options.kernel_stamps,
            "keep_reads": options.keep_reads,
            "stop_on_worker_death": options.stop_on_worker_death,
            "affinity": self.affinity,
        }

    def run_cell(
        self,
        offsets_ns: NDArray[np.int64],
        requests: Sequence[PlannedRequest],
        rule: CellRule,
        on_progress: Callable[[Progress], None] | None = None,
        precision: PrecisionRule | None = None,
        may_count: MayCount | None = None,
    ) -> CellResult:
        """Run one open-loop cell: request k is due `offsets_ns[k]` after the cell's origin.

        `offsets_ns` has shape (n,), ns, ascending, for n requests, must reach to
        warmup_s + cap_s and should to `rule.schedule_s`. `on_progress` is called about four times
        a second in the calling thread, where `precision`, a rule of this cell's own, is brought up
        to date too, and `may_count` (None: every success counts) is asked which successes count
        towards `min_completed`.
        After Ctrl-C outstanding requests are cancelled and KeyboardInterrupt is raised.

        Raises:
            ValueError: the schedule does not fit the requests or the rule.
            LoadGeneratorError: no worker is left to run it.
        """
        cell = OpenLoopCell(offsets_ns, requests, rule, precision, may_count)
        with CollectorPause():
            self.begin(rule.inflight_cap, rule.request_timeout_s, "counts")
            lead_ns = round(self.options.lead_ms * 1e6)
            cell.start(time.monotonic_ns() + lead_ns + START_DELAY_NS)

            def report() -> None:
                cell.look()
                if on_progress is not None:
                    on_progress(cell.progress(time.monotonic_ns()))

            drained_ns = self.drive(cell, report)
            health = self.end()
        assert cell.stop_ns is not None
        assert cell.cooldown_ended_by is not None
        return CellResult(
            records=cell.records(),
            t_origin_ns=cell.origin_ns,
            t_warmup_end_ns=cell.warmup_end_ns,
            t_stop_ns=cell.stop_ns,
            t_cooldown_end_ns=cell.cooldown_end_ns,
            cooldown_ended_by=cell.cooldown_ended_by,
            t_drained_ns=drained_ns,
            extended_s=max(0.0, (cell.stop_ns - cell.floor_ns) / 1e9),
            precise=cell.precise,
            clock=self.clock,
            health=health,
        )

    # ---- the parts of a run, for plans other than an open-loop cell

    @property
    def connect_errors(self) -> list[str]:
        """Why workers could not open all their connections at the beginning of this run."""
        return [begun.connect_error for begun in self._begun if begun.connect_error]

    @property
    def clock(self) -> Clock:
        """Where the stamps of this run come from; "kernel" only if every worker has it."""
        return "kernel" if all(begun.clock == "kernel" for begun in self._begun) else "worker"

    def begin(
        self,
        inflight_cap: int,
        request_timeout_s: float,
        capture: Literal["counts", "text", "token_ids"],
    ) -> None:
        """Prepare the workers for a run. An inflight_cap of 0 means none."""
        self._run_number += 1
        self._session: SessionThread | None = None
        begin = Begin(
            self._run_number,
            inflight_cap,
            round(request_timeout_s * 1e9),
            self.options.keep_reads,
            capture,
        )
        self._begun = self._dispatcher.begin(begin, self._on_done, self._on_death)

    def drive(self, plan: Plan, report: Callable[[], None]) -> int:
        """Run `plan` in a session thread, calling `report` now and then; return when it drained.

        Raises:
            KeyboardInterrupt: after Ctrl-C, once everything outstanding has been cancelled.
        """
        lead_ns = round(self.options.lead_ms * 1e6)
        session = self._session = SessionThread(plan, self._dispatcher, lead_ns, self._main_cpus)
        interrupted = False
        session.start()
        while True:
            try:
                if session.join(PROGRESS_S):
                    break
                report()
            except KeyboardInterrupt:
                interrupted = True
                session.interrupt()
            except BaseException:
                session.interrupt()
                session.join(60.0)
                raise
        if interrupted:
            raise KeyboardInterrupt
        report()
        return session.t_drained_ns

    def end(self) -> dict[str, Any]:
        """End the run; return the health of every process that is alive.

        `workers` and `connections_per_worker` say how many there should be.
        """
        processes = {f"worker{h.worker}": h.values for h in self._dispatcher.end()}
        return {
            "processes": {"main": self._dispatcher.values(), **processes},
            "workers": self.options.workers,
            "workers_died": list(self._dispatcher.died),
            "connections_per_worker": self.options.connections_per_worker,
            "connections": {f"worker{b.worker}": b.connections for b in self._begun},
            "connect_errors": self.connect_errors,
        }

    def _on_done(self, done: Done) -> None:
        if self._session is not None:
            self._session.put(done)

    def _on_death(self, _worker: int, living: int) -> None:
        if self._session is not None and (living == 0 or self.options.stop_on_worker_death):
            self._session.stop()

    def _worker_settings(self) -> list[WorkerSettings]:
        options, target = self.options, self.target
        family, host = _address(target.host, target.port)
        return [
            WorkerSettings(
                worker=index,
                parent=0,
                folder="",
                inflight_fd=-1,
                workers=options.workers,
                family=family,
                host=host,
                port=target.port,
                head=_request_head(target),
                chat=target.chat,
                stream=target.stream,
                connections=options.connections_per_worker,
                spin_ns=round(options.spin_us * 1e3),
                sleep_margin_ns=round(options.sleep_margin_us * 1e3),
                kernel_stamps=options.kernel_stamps,
            )
            for index in range(options.workers)
        ]


def is_local(host: str) -> bool:
    """True if `host` is this machine; False for an unknown one."""
    try:
        known = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)
    except OSError:
        return False
    for family, *_, address in known:
        with socket.socket(family, socket.SOCK_STREAM) as probe, contextlib.suppress(OSError):
            probe.bind(address)  # only an address of this machine can be bound
            return True
    return False


def _address(host: str, port: int) -> tuple[int, str]:
    """The first address of `host` that takes a connection, or its first if none does."""
    try:
        known = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except OSError as error:
        raise LoadGeneratorError(f"host {host!r} has no address: {error}") from None
    for family, *_, address in known if len(known) > 1 else ():
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            probe.settimeout(PROBE_S)
            if probe.connect_ex(address) == 0:
                return int(family), str(address[0])
    family, *_, address = known[0]
    return int(family), str(address[0])


def _is_latin_1(text: str) -> bool:
    return all(ord(character) < 256 for character in text)


def _request_head(target: Target) -> str:
    """Return the request head without its per-request headers, which the worker adds."""
    headers = {
        "Host": f"[{target.host}]:{target.port}"
        if ":" in target.host
        else f"{target.host}:{target.port}",
        "Content-Type": "application/json",
        "Accept": "text/event-stream" if target.stream else "application/json",
        **target.headers,
    }
    lines = [f"POST {target.path} HTTP/1.1", *(f"{n}: {v}" for n, v in headers.items())]
    return "\r\n".join(lines) + "\r\n"
