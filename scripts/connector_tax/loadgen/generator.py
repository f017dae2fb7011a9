"""The load generator: its processes, and the runs on them."""

import resource
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Self

import numpy as np
from numpy.typing import NDArray

from connector_tax.artifacts.cell_records import GeneratorHealth
from connector_tax.artifacts.launch_files import AffinityRecord, GeneratorRecord
from connector_tax.loadgen.affinity import AffinityPlan
from connector_tax.loadgen.bodies import RequestSource
from connector_tax.loadgen.dispatcher import Dispatcher, FromRun
from connector_tax.loadgen.endpoint import Target, find_address, request_head
from connector_tax.loadgen.issuer import IssuingThread
from connector_tax.loadgen.messages import (
    Begin,
    Begun,
    Clock,
    LoadGeneratorError,
    RequestRecord,
    WorkerSettings,
)
from connector_tax.loadgen.plan import LEAD_NS, Plan, Progress
from connector_tax.loadgen.pool import SPARE
from connector_tax.loadgen.precision import HalfWidths, PrecisionRule
from connector_tax.loadgen.process import CollectorPause
from connector_tax.loadgen.rule import CellRule, CooldownEnd
from connector_tax.loadgen.traffic import Load, open_loop

PROGRESS_S = 0.25
START_DELAY_NS = 20_000_000
RECORDS_AT_ONCE = 10
"""Handed to `on_record` before the other threads get their turn."""
# Of a worker, beside its connections: pipes, ipc sockets, timers, libraries.
OTHER_FILES = 64


@dataclass(frozen=True, slots=True)
class LoadGeneratorOptions:
    """How the load generator works; none of it changes what is sent or when it is due.

    `connections_per_worker` is the most that one worker opens; a request that finds none free waits
    for one (counted in health as pool_waits). With `strict`, for a server that is judged, all of
    them are opened before a run, nothing is sent again, and nothing that a success lacks is
    tolerated. Otherwise a few more than in use are kept open, and records say what was missing.
    """

    workers: int = 1
    connections_per_worker: int = 256
    strict: bool = False
    kernel_stamps: bool = True
    keep_reads: bool = True
    cpus: AffinityPlan | None = None

    def __post_init__(self) -> None:
        for name in ("workers", "connections_per_worker"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be at least 1")
        if self.cpus is not None and len(self.cpus.workers) != self.workers:
            raise ValueError(f"the affinity plan is for {len(self.cpus.workers)} workers")


@dataclass(frozen=True, slots=True)
class CellResult:
    """What a cell brought; times are CLOCK_MONOTONIC ns.

    `records` holds the requests handed out, in that order: in open loop exactly those due before
    `t_cooldown_end_ns`, in schedule order; those due from `t_stop_ns` on are not measured.
    `bodies_sha256` is over their bodies, in order, a newline after each. `requests` has the same
    and, after them, those of their sessions that were not sent. `extended_s` is how far the window
    went beyond its floor. `precise` is what the precision rule saw when it ended the window; None
    when it did not. `health` has, per process, event-loop lag, CPU and spin share and message
    counters, and which workers have died, in this cell or before.
    """

    records: list[RequestRecord]
    requests: list[RequestRecord]
    bodies_sha256: str
    t_origin_ns: int
    t_warmup_end_ns: int
    t_stop_ns: int
    t_cooldown_end_ns: int
    cooldown_ended_by: CooldownEnd
    t_drained_ns: int
    extended_s: float
    precise: HalfWidths | None
    clock: Clock
    health: GeneratorHealth

    @classmethod
    def of(cls, plan: Plan, drained_ns: int, clock: Clock, health: GeneratorHealth) -> Self:
        """What a plan that has ended brought; nothing was outstanding any more at `drained_ns`."""
        assert plan.stop_ns is not None
        assert plan.cooldown_ended_by is not None
        requests = plan.requests()
        return cls(
            records=[record for record in requests if record.t_issue_ns is not None],
            requests=requests,
            bodies_sha256=plan.bodies_sha256,
            t_origin_ns=plan.origin_ns,
            t_warmup_end_ns=plan.warmup_end_ns,
            t_stop_ns=plan.stop_ns,
            t_cooldown_end_ns=plan.cooldown_end_ns,
            cooldown_ended_by=plan.cooldown_ended_by,
            t_drained_ns=drained_ns,
            extended_s=max(0.0, (plan.stop_ns - plan.floor_ns) / 1e9),
            precise=plan.precise,
            clock=clock,
            health=health,
        )


class Interrupted(KeyboardInterrupt):
    """Ctrl-C ended a run; `result` is what it brought until then."""

    def __init__(self, result: CellResult) -> None:
        super().__init__()
        self.result = result


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
        self._issuer: IssuingThread | None = None

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

    def __exit__(self, *_: object) -> None:
        self._dispatcher.close()

    @property
    def worker_pids(self) -> list[int]:
        """Process ids of the workers, by index."""
        return self._dispatcher.pids

    @property
    def affinity(self) -> AffinityRecord | None:
        """The affinity plan, for the records."""
        return None if self.options.cpus is None else self.options.cpus.describe()

    def describe(self) -> GeneratorRecord:
        """Return target and options, for the records; header values are left out."""
        options = self.options
        return {
            "target": {
                "host": self.target.host,
                "port": self.target.port,
                "path": self.target.path.partition("?")[0],
                "https": self.target.tls is not None,
                "stream": self.target.stream,
                "header_names": sorted(self.target.headers),
            },
            "workers": options.workers,
            "connections_per_worker": options.connections_per_worker,
            "strict": options.strict,
            "kernel_stamps": options.kernel_stamps,
            "keep_reads": options.keep_reads,
            "affinity": self.affinity,
        }

    def run_cell(
        self,
        offsets_ns: NDArray[np.int64],
        requests: RequestSource,
        rule: CellRule,
        on_progress: Callable[[Progress], None] | None = None,
        precision: PrecisionRule | None = None,
    ) -> CellResult:
        """Run one open-loop cell: request k is due `offsets_ns[k]` after the cell's origin.

        `offsets_ns` has shape (n,), ns, ascending, for n requests, must reach to
        warmup_s + cap_s and should to `rule.schedule_s`. For the rest see `run`.

        Raises:
            ValueError: the schedule does not fit the requests or the rule.
        """
        load = open_loop(offsets_ns, requests, rule)
        return self.run(load, rule, on_progress, precision)

    def run(
        self,
        load: Load,
        rule: CellRule,
        on_progress: Callable[[Progress], None] | None = None,
        precision: PrecisionRule | None = None,
        on_record: Callable[[RequestRecord], None] | None = None,
    ) -> CellResult:
        """Send `load` until `rule` says that it is enough.

        `on_progress` is called about four times a second in the calling thread, where `precision`,
        a rule of this cell's own, is brought up to date too. `on_record` is called there with each
        request that has ended, once, and may drop what it holds.

        Raises:
            LoadGeneratorError: no worker is left to run it.
            Interrupted: after Ctrl-C, once everything outstanding has been cancelled.
        """
        plan = Plan(load, rule, precision, on_record is not None)
        while plan.prepare():
            pass
        with CollectorPause():
            self._begin(load, rule)
            plan.start(time.monotonic_ns() + LEAD_NS + START_DELAY_NS, self.options.workers)

            def report() -> None:
                plan.look()
                while on_record is not None and plan.ended:
                    for _ in range(min(RECORDS_AT_ONCE, len(plan.ended))):
                        on_record(plan.ended.popleft())
                    time.sleep(0)  # lets the other threads go on
                if on_progress is not None:
                    on_progress(plan.progress(time.monotonic_ns()))

            drained_ns, interrupted = self._drive(plan, report)
            health = self._end()
        result = CellResult.of(plan, drained_ns, self.clock, health)
        if on_record is not None:
            for record in result.requests[len(result.records) :]:
                on_record(record)  # was not sent
        if interrupted:
            raise Interrupted(result)
        return result

    def interrupt(self) -> bool:
        """End a run as Ctrl-C does, from a signal's handler; False if none is under way."""
        if self._issuer is None:
            return False
        self._issuer.interrupt()
        return True

    # ---- the parts of a run

    @property
    def connect_errors(self) -> list[str]:
        """Why workers could not open all their connections at the beginning of this run."""
        return [begun.connect_error for begun in self._begun if begun.connect_error]

    @property
    def clock(self) -> Clock:
        """Where the stamps of this run come from; "kernel" only if every worker has it."""
        return "kernel" if all(begun.clock == "kernel" for begun in self._begun) else "worker"

    def _begin(self, load: Load, rule: CellRule) -> None:
        """Prepare the workers for a run."""
        options = self.options
        self._run_number += 1
        self._issuer = None
        self._ahead = options.connections_per_worker
        if not options.strict:
            self._ahead = min(self._ahead, SPARE)
            if load.offsets_ns is None:
                self._ahead = -(-load.concurrency // options.workers)
        begin = Begin(
            run=self._run_number,
            inflight_cap=rule.inflight_cap or 0,
            request_timeout_ns=round(rule.request_timeout_s * 1e9),
            keep_reads=options.keep_reads,
            capture=load.capture,
            connections=self._ahead,
            prompt=load.waits_for_results,
            closed=load.waits_in_workers,
        )
        self._begun = self._dispatcher.begin(begin, self._on_done, self._on_death)

    def _drive(self, plan: Plan, report: Callable[[], None]) -> tuple[int, bool]:
        """Run `plan` in its thread; return when it drained, and whether Ctrl-C ended it."""
        issuer = self._issuer = IssuingThread(plan, self._dispatcher, self._main_cpus)
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
        return issuer.t_drained_ns, issuer.interrupted

    def _end(self) -> GeneratorHealth:
        """End the run; return the health of every process that is alive.

        `workers` and `connections_per_worker` say how many there should have been at its beginning.
        """
        processes = {f"worker{h.worker}": h.values for h in self._dispatcher.end()}
        return {
            "processes": {"main": self._dispatcher.values(), **processes},
            "workers": self.options.workers,
            "workers_died": list(self._dispatcher.died),
            "connections_per_worker": self._ahead,
            "connections": {f"worker{b.worker}": b.connections for b in self._begun},
            "connect_errors": self.connect_errors,
        }

    def _on_done(self, result: FromRun) -> None:
        if self._issuer is not None:
            self._issuer.put(result)

    def _on_death(self) -> None:
        if self._issuer is not None:
            self._issuer.stop()

    def _worker_settings(self) -> list[WorkerSettings]:
        options, target = self.options, self.target
        family, host = find_address(target.host, target.port)
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
                tls=target.tls,
                head=request_head(target),
                chat=target.chat,
                stream=target.stream,
                strict=options.strict,
                connections=options.connections_per_worker,
                kernel_stamps=options.kernel_stamps,
            )
            for index in range(options.workers)
        ]
