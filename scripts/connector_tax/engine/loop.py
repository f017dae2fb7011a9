"""Run the engine: schedule arrivals, execute steps in the batched service, send tokens."""

import asyncio
import contextlib
import logging
import time
from collections import Counter, deque
from collections.abc import Callable, Mapping
from dataclasses import asdict

from connector_tax.engine.batching import BatchedService, ServiceError
from connector_tax.engine.completion import Completion
from connector_tax.engine.config import EngineConfig
from connector_tax.engine.connectors import BackgroundCpu, taxes_of_step
from connector_tax.engine.logs import LaunchTruth, LineLog, Step
from connector_tax.engine.metrics import Metrics
from connector_tax.engine.model import StepClock, StepDevice
from connector_tax.engine.scheduler import Scheduler, Sequence, StepPlan

_LOG = logging.getLogger(__name__)
# An engine later than this stops catching up with its deadlines and logs the delay.
_MAX_DEBT_NS = 250_000_000
# Duration of an event-loop turn that reads a request.
_SPIN_NS = 60_000


class Engine:
    """The engine of one launch, which executes steps while there is work.

    `launch_seed` seeds the jitter and the launch offset; `on_death` is called once if the worker
    process dies.
    """

    def __init__(
        self,
        config: EngineConfig,
        launch_seed: int,
        step_logs: Mapping[str, LineLog],
        on_death: Callable[[str], None],
    ) -> None:
        self.config = config
        self.metrics = Metrics(config.model.served_name)
        self.scheduler = Scheduler(config.scheduler, config.model.max_model_len)
        self.dead: str | None = None
        self.overruns = 0
        self._launch_seed = launch_seed
        self._step_logs = step_logs
        self._on_death = on_death
        # One element is a whole step, which the scheduler has already batched.
        self._service = BatchedService(max_batch_size=1, timeout_seconds=1.0, max_queue_size=1)
        self._burner = BackgroundCpu(config.tax.background_cpu if config.tax else 0.0)
        self._incoming: deque[Sequence] = deque()
        self._live: set[Sequence] = set()
        self._wake = asyncio.Event()
        self._step_id = 0
        self._task: asyncio.Task[None] | None = None

    # -- life -----------------------------------------------------------------------------------

    async def start(self) -> None:
        """Start the worker process and the background load, and wait until both are ready."""
        device = {"cost": asdict(self.config.step_cost), "launch_seed": self._launch_seed}
        self._service.on_worker_death = lambda error: self._die(str(error))
        await asyncio.gather(self._service.start(StepDevice, device), self._burner.start())
        self._task = asyncio.create_task(self._run())
        self._task.add_done_callback(self._on_end)

    async def stop(self) -> None:
        """End the step loop and every child process."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        await asyncio.gather(self._service.stop(), self._burner.stop())
        with contextlib.ExitStack() as closing:
            for log in self._step_logs.values():
                closing.callback(log.close)
        if self.overruns:
            _LOG.warning(
                "the engine fell more than %d ms behind its own schedule %d times: this machine "
                "was too busy for the step times it emulates",
                _MAX_DEBT_NS // 1_000_000,
                self.overruns,
            )

    def truth(self) -> LaunchTruth:
        """Return the launch's offset and taxes."""
        config = self.config
        return LaunchTruth(
            configuration=config.configuration,
            launch_seed=self._launch_seed,
            launch_factor=StepClock(config.step_cost, self._launch_seed).launch_factor,
            step_cost=asdict(config.step_cost),
            tax=asdict(config.tax) if config.tax else None,
        )

    def _on_end(self, task: asyncio.Task[None]) -> None:
        """Let an error of the step loop end the engine, as in vLLM."""
        if not task.cancelled() and (error := task.exception()) is not None:
            self._die(f"{type(error).__name__}: {error}")

    def _die(self, why: str) -> None:
        self.dead = f"EngineDeadError: {why}"
        for sequence in list(self._live):
            sequence.sink.fail(self.dead)
        self._live.clear()
        self._on_death(self.dead)

    # -- requests -------------------------------------------------------------------------------

    def submit(self, sequence: Sequence) -> None:
        """Accept a request; its tokens go to its sink."""
        self._incoming.append(sequence)
        self._live.add(sequence)
        self._wake.set()

    def abort(self, sequence: Sequence) -> None:
        """Drop a request whose client has disconnected."""
        if sequence not in self._live:
            return
        self._live.remove(sequence)
        self.metrics.finished["abort"] += 1
        if sequence in self._incoming:
            self._incoming.remove(sequence)
        else:
            self.scheduler.abort(sequence)

    # -- steps ----------------------------------------------------------------------------------

    async def _run(self) -> None:
        deadline = 0
        while True:
            start = await self._next_start(deadline)
            while self._incoming and self._incoming[0].sink.t_arrival_ns <= start:
                self.scheduler.add(self._incoming.popleft())
            plan = self.scheduler.plan()
            if plan.tokens:
                try:
                    deadline = await self._step(plan, start)
                except ServiceError as error:
                    # `_die` has notified every request.
                    _LOG.error("the step loop ends: %s", error)
                    return

    async def _next_start(self, deadline: int) -> int:
        """Return the next step's start (ns): the last step's deadline, or the arrival of work."""
        if not self.scheduler.has_work:
            while not self._incoming:
                self._wake.clear()
                await self._wake.wait()
            # A request that arrived while the last step's tokens were sent does not wait.
            first: Completion = self._incoming[0].sink
            return max(deadline, first.t_arrival_ns)
        now = time.monotonic_ns()
        if now - deadline > _MAX_DEBT_NS:
            self.overruns += 1
            return now
        return deadline

    async def _step(self, plan: StepPlan, start: int) -> int:
        tax = self.config.tax
        meta, finished, load = taxes_of_step(tax, self.scheduler.pool.cached, len(plan.admitted))
        for sequence in plan.admitted:
            if not sequence.sink.t_admitted_ns:
                sequence.sink.t_admitted_ns = start
        running, waiting = self.scheduler.running, len(self.scheduler.waiting)
        device_start, deadline = await self._service.do_one(
            [start, meta + finished, load, plan.prefill_tokens, plan.decode_seqs, plan.kv_tokens]
        )
        end = max(deadline, time.monotonic_ns())
        emitted = self._prepare(plan, end)
        await _until(deadline)
        for sequence in emitted:
            sequence.sink.token(
                sequence.generated - 1, last=sequence.finished, deadline_ns=deadline
            )
        self._step_id += 1
        taxes_us = (meta, finished, load) if tax else None
        times = start, device_start, end
        step = Step(self._step_id, *times, plan, taxes_us, running, waiting)
        for process, log in self._step_logs.items():
            log.write(step.line(process))
        return int(deadline)

    def _prepare(self, plan: StepPlan, end: int) -> list[Sequence]:
        """Account for a step that ends at `end` (ns); return the sequences with a token to send."""
        metrics = self.metrics
        emitted = self.scheduler.commit(plan)
        # Counted before the writes, so that counters are complete once a client reads [DONE].
        metrics.generation_tokens += len(emitted)
        metrics.iteration.observe(plan.prefill_tokens + plan.decode_seqs)
        gaps: Counter[int] = Counter()
        for sequence in emitted:
            sink: Completion = sequence.sink
            sink.prepare(sequence.generated - 1, last=sequence.finished)
            if sequence.generated == 1:
                sink.t_first_ns = end
                metrics.prompt_tokens += sequence.prompt_len
                metrics.ttft.observe((end - sink.t_arrival_ns) / 1e9)
            else:
                gaps[end - sink.t_token_ns] += 1
            sink.t_token_ns = end
            if sequence.finished:
                self._live.discard(sequence)
                stamps = sink.t_arrival_ns, sink.t_admitted_ns, sink.t_first_ns, end
                metrics.count_finished(sink.finish_reason, sequence, *stamps)
        for gap, times in gaps.items():
            metrics.inter_token.observe(gap / 1e9, times)
        return emitted


async def _until(deadline_ns: int) -> None:
    """Wait until the deadline (ns), reading arriving requests until shortly before it."""
    while (ahead_ns := deadline_ns - time.monotonic_ns()) > 0:
        if ahead_ns > _SPIN_NS:
            await asyncio.sleep(0)
