"""The load generator: its processes, the thread that issues requests, and the runs on them.

The thread walks a plan of due times on an absolute schedule, so that one late wake-up never shifts
the next. It does not spin: each request travels to its worker LEAD_NS before it is due and the
worker fires it (docs/decisions.md has the measurement of the alternatives).
"""

import contextlib
import gc
import os
import resource
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from typing import Any, Self

from connector_tax.artifacts.cell_records import GeneratorHealth
from connector_tax.loadgen.affinity import AffinityPlan
from connector_tax.loadgen.dispatcher import Dispatcher
from connector_tax.loadgen.endpoint import find_address
from connector_tax.loadgen.messages import (
    Begin,
    Begun,
    Cancel,
    Clock,
    FromRun,
    LoadGeneratorError,
    RequestRecord,
    Target,
    Unanswered,
    WorkerSettings,
)
from connector_tax.loadgen.plan import (
    LEAD_NS,
    POLL_NS,
    CellRule,
    CooldownEnd,
    Plan,
    PrecisionRule,
    Progress,
)
from connector_tax.loadgen.pool import SPARE
from connector_tax.loadgen.sessions import needed_capture
from connector_tax.loadgen.traffic import Load

ABORT_GRACE_S = 2.0
# No body is made this shortly before the plan is checked again.
BODY_NS = 2_000_000
PROGRESS_S = 0.25
START_DELAY_NS = 20_000_000
RECORDS_AT_ONCE = 10
"""Number of records handed to `on_record` before other threads may run."""
# Open files of a worker besides its connections: pipes, ipc sockets, timers, libraries.
OTHER_FILES = 64


class IssuingThread:
    """A thread that runs one plan to its end."""

    def __init__(self, plan: Plan, dispatcher: Dispatcher, cpus: tuple[int, ...] | None) -> None:
        self._plan = plan
        self._dispatcher = dispatcher
        self._cpus = cpus
        self._results: deque[FromRun] = deque()
        self._wake = threading.Event()
        self._ended = threading.Event()
        self.interrupted = False
        self._stop = False
        self._error: BaseException | None = None
        self.t_drained_ns = 0

    def start(self) -> None:
        threading.Thread(target=self._run, name="loadgen-issue", daemon=True).start()

    def join(self, timeout_s: float) -> bool:
        """Wait for the end; return whether the thread ended. Raises what the thread raised."""
        # Not Thread.join: interrupted by Ctrl-C, Python 3.11 takes the running thread for ended.
        if not self._ended.wait(timeout_s):
            return False
        if self._error is not None:
            raise self._error
        return True

    def put(self, result: FromRun) -> None:
        """Deliver a result; called from the event-loop thread."""
        self._results.append(result)
        if self._plan.wakes_on_result:
            self._wake.set()

    def stop(self) -> None:
        """Send nothing more, drain, and end; may be called from any thread."""
        self._stop = True
        self._wake.set()

    def interrupt(self) -> None:
        """Stop, and cancel the outstanding requests; may be called from any thread."""
        self.interrupted = True
        self.stop()

    def _run(self) -> None:
        try:
            if self._cpus is not None:
                os.sched_setaffinity(0, self._cpus)
            self._issue()
            self._drain()
            self.t_drained_ns = time.monotonic_ns()
        except BaseException as error:  # re-raised by join
            self._error = error
        finally:
            self._ended.set()

    def _take_results(self) -> None:
        while self._results:
            result = self._results.popleft()
            if isinstance(result, Unanswered):
                self._plan.take_unanswered(result.seqs)
            else:
                self._plan.take(result)

    def _sleep(self, until_ns: int) -> None:
        left_ns = until_ns - time.monotonic_ns()
        if left_ns > 0:
            self._wake.wait(left_ns / 1e9)

    def _issue(self) -> None:
        while True:
            self._wake.clear()  # first, so that a result that comes meanwhile ends the sleep
            self._take_results()
            now_ns = time.monotonic_ns()
            if self._stop:
                self._plan.stop(now_ns)
            items, next_ns = self._plan.step(now_ns, now_ns + LEAD_NS)
            if items:
                self._dispatcher.submit(items)
            if next_ns is None:
                return
            # Several at a time, each at least three quarters of the lead ahead: to wake two threads
            # and the worker for each request costs as much as the rest of this process's work.
            wake_ns = max(next_ns - LEAD_NS, now_ns + LEAD_NS // 4)
            while time.monotonic_ns() < wake_ns - BODY_NS and not self._wake.is_set():
                if not self._plan.prepare():
                    break
            self._sleep(wake_ns)

    def _drain(self) -> None:
        assert self._plan.stop_ns is not None
        deadline_ns = self._plan.stop_ns + round(self._plan.drain_s * 1e9)
        if self._wait_for_outstanding(deadline_ns, interruptible=True):
            return
        kind = "interrupted" if self.interrupted else "drain_timeout"
        self._dispatcher.submit([Cancel(kind, None)])
        grace_ns = time.monotonic_ns() + round(ABORT_GRACE_S * 1e9)
        if not self._wait_for_outstanding(grace_ns, interruptible=False):
            self._plan.give_up(kind)

    def _wait_for_outstanding(self, deadline_ns: int, interruptible: bool) -> bool:
        while True:
            self._wake.clear()
            self._take_results()
            if cancels := self._plan.take_cancels():
                self._dispatcher.submit(cancels)
            if self._plan.outstanding == 0:
                return True
            now_ns = time.monotonic_ns()
            if now_ns >= deadline_ns or (interruptible and self.interrupted):
                return False
            self._sleep(min(deadline_ns, now_ns + POLL_NS))


@dataclass(frozen=True, slots=True)
class LoadGeneratorOptions:
    """The options of the load generator's processes; none changes what is sent or when it is due.

    `connections_per_worker` limits the connections of one worker. A request that finds none free
    waits (counted in health as pool_waits). Set `strict` for a server under measurement: all
    connections are opened before a run, no request is retried, and a response that deviates from
    its request is a failure. Otherwise a few spare connections are kept open, and a record names
    the deviation that was tolerated.
    """

    workers: int = 1
    connections_per_worker: int = 256
    strict: bool = False
    keep_reads: bool = True
    cpus: AffinityPlan | None = None

    def __post_init__(self) -> None:
        if self.cpus is not None and len(self.cpus.workers) != self.workers:
            raise ValueError(f"the affinity plan is for {len(self.cpus.workers)} workers")


@dataclass(frozen=True, slots=True)
class CellResult:
    """The result of one cell; times are CLOCK_MONOTONIC ns.

    `records` holds the requests handed out, in that order. In open loop these are the requests due
    before `t_cooldown_end_ns`; those due from `t_stop_ns` on are not measured. `bodies_sha256` is
    the hash of the bodies of all `handed_out`, in order, a newline after each. `requests` holds
    `records` and then the unsent requests of their sessions. `extended_s` is the time by which the
    window exceeded its floor. `health` has, per process, event-loop lag, CPU and spin share and
    message counters, and lists the workers that died, in this cell or before.
    """

    records: list[RequestRecord]
    requests: list[RequestRecord]
    bodies_sha256: str
    handed_out: int
    t_origin_ns: int
    t_warmup_end_ns: int
    t_stop_ns: int
    t_cooldown_end_ns: int
    cooldown_ended_by: CooldownEnd
    t_drained_ns: int
    extended_s: float
    clock: Clock
    health: GeneratorHealth

    @classmethod
    def of(cls, plan: Plan, drained_ns: int, clock: Clock, health: GeneratorHealth) -> Self:
        """Return the result of a finished plan, whose last outstanding request ended at
        `drained_ns`.
        """
        assert plan.stop_ns is not None
        assert plan.cooldown_ended_by is not None
        requests = plan.requests()
        return cls(
            records=[record for record in requests if record.t_issue_ns is not None],
            requests=requests,
            bodies_sha256=plan.bodies_sha256,
            handed_out=plan.handed_out,
            t_origin_ns=plan.origin_ns,
            t_warmup_end_ns=plan.warmup_end_ns,
            t_stop_ns=plan.stop_ns,
            t_cooldown_end_ns=plan.cooldown_end_ns,
            cooldown_ended_by=plan.cooldown_ended_by,
            t_drained_ns=drained_ns,
            extended_s=max(0.0, (plan.stop_ns - plan.floor_ns) / 1e9),
            clock=clock,
            health=health,
        )


class Interrupted(KeyboardInterrupt):
    """Ctrl-C ended a run; `result` holds what was measured before it."""

    def __init__(self, result: CellResult) -> None:
        super().__init__()
        self.result = result


class LoadGenerator:
    """A client that sends planned requests to one endpoint and records the time of each event.

    A context manager: entering starts the worker processes, connects them and fills their
    connection pools; leaving ends them. No process, socket or temporary folder is left, even if
    this process is killed. `address` is the one of the host's `addresses` that gets every request.
    """

    address = ""
    addresses = 0

    def __init__(self, target: Target, options: LoadGeneratorOptions) -> None:
        self.target = target
        self.options = options
        self._run_number = 0
        self._issuer: IssuingThread | None = None

    def __enter__(self) -> "LoadGenerator":
        """Resolve the address and start the workers.

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
        main_cpus, worker_cpus = None, None
        if plan is not None and plan.enabled:
            main_cpus, worker_cpus = plan.loadgen, plan.workers
        self._main_cpus = main_cpus
        self._dispatcher = Dispatcher(self._worker_settings(), main_cpus, worker_cpus)
        self._dispatcher.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._dispatcher.close()

    @property
    def worker_pids(self) -> list[int]:
        return self._dispatcher.pids

    def describe(self) -> dict[str, Any]:
        """Return the target and the options for the records, without header values."""
        options = asdict(self.options)
        cpus = options.pop("cpus")
        return {
            "target": {
                "host": self.target.host,
                "port": self.target.port,
                "path": self.target.path.partition("?")[0],
                "https": self.target.tls is not None,
                "stream": self.target.stream,
                "header_names": sorted(self.target.headers),
            },
            **options,
            "affinity": cpus,
        }

    def run(
        self,
        load: Load,
        rule: CellRule,
        on_progress: Callable[[Progress], None] | None = None,
        precision: PrecisionRule | None = None,
        on_record: Callable[[RequestRecord], None] | None = None,
    ) -> CellResult:
        """Send `load` until `rule` ends it; return the result.

        Args:
            on_progress: called about four times a second in the calling thread, which also updates
                `precision` then.
            precision: a rule made for this cell only.
            on_record: called in the calling thread once for each request that has ended; it may
                drop what the record holds.

        Raises:
            LoadGeneratorError: no worker is left to run it.
            Interrupted: after Ctrl-C, once everything outstanding has been cancelled.
        """
        self._issuer = None
        plan = Plan(load, rule, precision, on_record is not None)
        while plan.prepare():
            pass
        issuer = IssuingThread(plan, self._dispatcher, self._main_cpus)
        with _collector_paused():
            begun = self._begin(load, rule, issuer)
            plan.start(time.monotonic_ns() + LEAD_NS + START_DELAY_NS, self.options.workers)

            def report() -> None:
                plan.look()
                while on_record is not None and plan.ended:
                    for _ in range(min(RECORDS_AT_ONCE, len(plan.ended))):
                        on_record(plan.ended.popleft())
                    time.sleep(0)  # give the other threads their turn
                if on_progress is not None:
                    on_progress(plan.progress(time.monotonic_ns()))

            self._drive(issuer, report)
            health = self._end(begun)
        clock: Clock = "kernel" if all(b.clock == "kernel" for b in begun) else "worker"
        result = CellResult.of(plan, issuer.t_drained_ns, clock, health)
        if on_record is not None:
            for record in result.requests[len(result.records) :]:
                on_record(record)  # was not sent
        if issuer.interrupted:
            raise Interrupted(result)
        return result

    def interrupt(self) -> bool:
        """End a run as Ctrl-C does, from a signal handler; return False if there is no run."""
        if self._issuer is None:
            return False
        self._issuer.interrupt()
        return True

    # ---- the parts of a run

    def _begin(self, load: Load, rule: CellRule, issuer: IssuingThread) -> list[Begun]:
        options = self.options
        self._run_number += 1
        self._ahead = options.connections_per_worker
        if not options.strict:
            self._ahead = min(self._ahead, SPARE)
            if load.offsets_ns is None:
                if load.concurrency < options.workers:
                    raise ValueError(
                        f"concurrency is {load.concurrency}; allowed: at least the "
                        f"{options.workers} workers, since each worker keeps its own places"
                    )
                places = min(load.concurrency, len(load.sessions))
                self._ahead = -(-places // options.workers)
        begin = Begin(
            run=self._run_number,
            inflight_cap=rule.inflight_cap or 0,
            request_timeout_ns=round(rule.request_timeout_s * 1e9),
            keep_reads=options.keep_reads,
            capture=needed_capture(load.sessions),
            connections=self._ahead,
            prompt=load.waits_for_results,
            closed=load.waits_in_workers,
        )
        return self._dispatcher.begin(begin, issuer.put, issuer.stop)

    def _drive(self, issuer: IssuingThread, report: Callable[[], None]) -> None:
        """Run the plan to its end; Ctrl-C ends it early."""
        self._issuer = issuer
        issuer.start()
        while True:
            try:
                if issuer.join(PROGRESS_S):
                    break
                report()
            except KeyboardInterrupt:
                issuer.interrupt()
            except BaseException:
                issuer.interrupt()
                issuer.join(60.0)
                raise
        report()

    def _end(self, begun: list[Begun]) -> GeneratorHealth:
        """End the run; return the health of every living process.

        `workers` and `connections_per_worker` in it are the numbers expected at the run's start.
        """
        processes = {f"worker{h.worker}": h.values for h in self._dispatcher.end()}
        return {
            "processes": {"main": self._dispatcher.values(), **processes},
            "workers": self.options.workers,
            "workers_died": list(self._dispatcher.died),
            "connections_per_worker": self._ahead,
            "connections": {f"worker{b.worker}": b.connections for b in begun},
            "connect_errors": [b.connect_error for b in begun if b.connect_error],
        }

    def _worker_settings(self) -> list[WorkerSettings]:
        options, target = self.options, self.target
        family, host, addresses = find_address(target.host, target.port)
        self.address, self.addresses = host, addresses
        return [
            WorkerSettings(
                worker=index,
                workers=options.workers,
                family=family,
                host=host,
                target=target,
                strict=options.strict,
                connections=options.connections_per_worker,
            )
            for index in range(options.workers)
        ]


@contextlib.contextmanager
def _collector_paused() -> Iterator[None]:
    """Disable Python's cyclic garbage collector during a run."""
    was_enabled = gc.isenabled()
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
