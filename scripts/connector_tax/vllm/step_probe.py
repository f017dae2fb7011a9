# CONNECTOR_TAX_PATCH
"""The step probe: what one engine step and its connector hooks cost inside a running vLLM.

Loaded by vLLM as a `vllm.general_plugins` entry point in the engine-core and worker processes; a
copy of this file and its metadata in an overlay folder on the server's PYTHONPATH is the whole
installation (connector_tax.vllm.overlay), so no installed file changes.

With AGENTIC_STEP_LOG_PATH set it writes `<prefix>.scheduler.steps` and `<prefix>.worker.steps`, in
which one record is one step; connector_tax.vllm.step_records turns them into the design's fields
(source 002, "Step-level timing instrumentation"):

    scheduler  Scheduler.schedule() entry to exit; update_from_output() of the same step, which
               under asynchronous scheduling runs in a later call; the EngineCore step that
               scheduled; requests and tokens of the step.
    worker     execute_model() and, where sampling is a call of its own, sample_tokens().
    both       every timed hook of the connector; of a MultiConnector's children the hooks with a
               field of the design and the lookup, since each costs its two clock readings.

The per-layer hooks (wait_for_layer_load, save_kv_layer) are not timed: on a deep model two clock
readings in each would cost more than the 5 us a step this probe may cost.

A step id set on SchedulerOutput travels to the worker with it and joins the two records. An error
of the probe switches it off in that process, is logged once, and never reaches vLLM.

A file begins with a line of JSON, `{"process", "counts", "spans", "groups"}`: the names of a
record's counts, what the first span positions are, and for each connector object its name (null:
the connector itself), its hooks and the position of the first. Then, in doubles of the machine,
each record behind its own length: start (CLOCK_MONOTONIC, s), step id, s spent, the counts, and for
each thing timed its start, its end and `mark(position)`; what it called stands between its start
and its end. A double holds a clock reading to 2 ns on a machine that has run for a hundred days.

The step's path only appends numbers to a list. A thread writes them every 50 ms. It holds the
interpreter lock, so it packs doubles, which is quicker than integers, and no more; what they mean
is worked out in another process. A process that ends by itself or by SIGTERM, as vLLM handles it,
writes everything; SIGKILL loses the last 50 ms. At most QUEUED_STEPS wait for a disk that does not
answer; then the probe gives up.
"""

import hashlib
import importlib
import inspect
import json
import logging
import os
import struct
import sys
import threading
import time
from collections import deque
from multiprocessing.util import Finalize
from pathlib import Path
from typing import Any

PREFIX_VARIABLE = "AGENTIC_STEP_LOG_PATH"
FLUSH_S = 0.05
# Steps in flight are at most the depth of vLLM's batch queue; beyond this the oldest is written.
PENDING_STEPS = 64
QUEUED_STEPS = 65536

# (module, class, method) the probe wraps; each must be there, or the probe is not installed.
HOOK_POINTS = (
    ("vllm.v1.engine.core", "EngineCore", "step"),
    ("vllm.v1.engine.core", "EngineCore", "step_with_batch_queue"),
    ("vllm.v1.core.sched.scheduler", "Scheduler", "schedule"),
    ("vllm.v1.core.sched.scheduler", "Scheduler", "update_from_output"),
    ("vllm.v1.worker.worker_base", "WorkerWrapperBase", "execute_model"),
    (
        "vllm.distributed.kv_transfer.kv_connector.factory",
        "KVConnectorFactory",
        "create_connector",
    ),
)
CONNECTOR_BASE = ("vllm.distributed.kv_transfer.kv_connector.v1.base", "KVConnectorBase_V1")
# Attributes of SchedulerOutput the records are made of.
OUTPUT_FIELDS = (
    "scheduled_new_reqs",
    "scheduled_cached_reqs",
    "num_scheduled_tokens",
    "total_num_scheduled_tokens",
)
# The design's fields. get_transfer_results is get_finished's successor and calls it by default.
FIELDS = {
    "build_connector_meta": "build_meta_us",
    "get_finished": "get_finished_us",
    "get_transfer_results": "get_finished_us",
    "start_load_kv": "start_load_kv_us",
}
REQUIRED_HOOKS = ("build_connector_meta", "get_finished", "start_load_kv")
HOOKS = (
    *FIELDS,
    "bind_connector_metadata",
    "build_connector_worker_meta",
    "clear_connector_metadata",
    "finish_forward",
    "get_block_ids_with_load_errors",
    "get_kv_connector_kv_cache_events",
    "get_kv_connector_stats",
    "get_num_new_matched_tokens",
    "handle_preemptions",
    "on_new_request",
    "request_finished",
    "request_finished_all_groups",
    "take_events",
    "update_connector_output",
    "update_state_after_alloc",
    "wait_for_save",
)
CHILD_HOOKS = (*FIELDS, "get_num_new_matched_tokens")

_LOG = logging.getLogger("vllm.connector_tax_step_probe")
_now = time.monotonic

# Positions of the scheduler's own two spans; a connector's hooks follow.
_UPDATE, _STEP, _FIRST_HOOK = range(3)
_SPANS = ("update", "engine_step")
COUNTS = {
    "scheduler": ("num_running", "num_waiting", "prefill_tokens", "decode_tokens"),
    "worker": (),
}


def mark(position: int) -> float:
    """What stands for a position among clock readings, which are never negative."""
    return float(-1 - position)


_UPDATE_MARK, _STEP_MARK = mark(_UPDATE), mark(_STEP)


class Hooks:
    """The timed hooks of one side's connector, and their calls since the last step."""

    def __init__(self) -> None:
        # (None or the child's name, its hooks, the position of the first)
        self.groups: list[tuple[str | None, list[str], int]] = []
        self.calls: list[float] = []
        self._next = _FIRST_HOOK

    def add(self, child: str | None, names: list[str]) -> int:
        """The position of the first of these hooks; called before the first step."""
        first = self._next
        self.groups.append((child, names, first))
        self._next += len(names)
        return first


class RecordWriter:
    """Writes the records of one process, in a thread of its own."""

    def __init__(self, path: str, process: str, hooks: Hooks) -> None:
        header = {
            "process": process,
            "counts": COUNTS[process],
            "spans": _SPANS,
            "groups": hooks.groups,
        }
        self._unwritten = json.dumps(header).encode() + b"\n"
        self._descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        self._queue: deque[list[float]] = deque(maxlen=QUEUED_STEPS)
        self.put = self._queue.append
        # Held until the end; waiting for it takes less of the processor than waiting for an event.
        self._running = threading.Lock()
        self._running.acquire()
        self._thread = threading.Thread(target=self._run, name="step-probe", daemon=True)
        self._thread.start()
        # atexit does not reach a process that multiprocessing has forked.
        self.close = Finalize(None, self._close, exitpriority=0)

    def _close(self) -> None:
        self._running.release()
        self._thread.join(1.0)

    def _run(self) -> None:
        try:
            while not self._running.acquire(timeout=FLUSH_S):
                self.flush()
            self.flush()
        except Exception as error:
            _give_up(error)

    def flush(self) -> None:
        """Write every record put so far.

        Raises:
            OSError: the file cannot be written.
            OverflowError: more records waited than the queue holds; the earliest are lost.
        """
        queue = self._queue
        count = len(queue)
        numbers: list[float] = []
        for _ in range(count):
            record = queue.popleft()
            numbers.append(len(record))
            numbers += record
        self._unwritten += struct.pack(f"{len(numbers)}d", *numbers)
        while self._unwritten:
            self._unwritten = self._unwritten[os.write(self._descriptor, self._unwritten) :]
        if count == QUEUED_STEPS:
            raise OverflowError(f"{count} steps waited to be written, earlier ones are lost")


class Probe:
    """The state of one process; every method runs on the engine's thread."""

    def __init__(self, prefix: str) -> None:
        self._prefix = prefix
        self.active = True
        self.scheduler_hooks, self.worker_hooks = Hooks(), Hooks()
        self.writers: dict[str, RecordWriter] = {}
        self._step_id = 0
        self._scheduled: dict[int, list[float]] = {}
        self._current: list[float] | None = None
        self._complete: list[list[float]] = []
        self._prefilling: dict[str, int] = {}
        self._executing: list[float] | None = None

    def close(self) -> None:
        """Write what is left and stop the writers."""
        for writer in self.writers.values():
            writer.close()

    def _open(self, process: str, hooks: Hooks) -> RecordWriter:
        """The writer of a process, made for its first record: vLLM may fork before."""
        writer = RecordWriter(f"{self._prefix}.{process}.steps", process, hooks)
        self.writers[process] = writer
        return writer

    # ---- scheduler

    def scheduled(self, scheduler: Any, output: Any, start: float, end: float) -> None:
        """Scheduler.schedule() returned `output`."""
        self._step_id = step_id = self._step_id + 1
        output.connector_tax_step_id = step_id
        prefill = self._prefill_tokens(scheduler, output)
        decode = output.total_num_scheduled_tokens - prefill
        calls = self.scheduler_hooks.calls
        counts = scheduler.get_request_counts()
        record = [start, step_id, end - start, *counts, prefill, decode, *calls]
        calls.clear()
        scheduled = self._scheduled
        scheduled[step_id] = self._current = record
        if len(scheduled) > PENDING_STEPS:
            self._complete.append(scheduled.pop(next(iter(scheduled))))

    def _prefill_tokens(self, scheduler: Any, output: Any) -> int:
        """Tokens of requests whose prompt is not computed yet; the rest of the step is decoding."""
        new, cached = output.scheduled_new_reqs, output.scheduled_cached_reqs
        prefilling = self._prefilling
        if not new and not prefilling and not cached.resumed_req_ids:
            return 0
        tokens = output.num_scheduled_tokens
        prefill = 0
        for request_id, remaining in list(prefilling.items()):
            count = tokens.get(request_id)
            if count is None:
                if request_id not in scheduler.requests:
                    del prefilling[request_id]
                continue
            prefill += count
            self._remain(request_id, remaining - count)
        for request in new:
            count = tokens[request.req_id]
            prefill += count
            left = len(request.prompt_token_ids) - request.num_computed_tokens - count
            self._remain(request.req_id, left)
        for request_id in cached.resumed_req_ids:
            # A preempted request computes its prompt and its earlier output again.
            if request_id not in prefilling and request_id in tokens:
                prefill += tokens[request_id]
                request = scheduler.requests[request_id]
                self._remain(request_id, request.num_tokens - request.num_computed_tokens)
        return prefill

    def _remain(self, request_id: str, tokens: int) -> None:
        if tokens > 0:
            self._prefilling[request_id] = tokens
        else:
            self._prefilling.pop(request_id, None)

    def updated(self, output: Any, start: float, end: float) -> None:
        """Scheduler.update_from_output() of `output` ended; it may be an earlier step's."""
        record = self._scheduled.pop(getattr(output, "connector_tax_step_id", -1), None)
        if record is not None:
            # Hooks run by the update belong to the step it concerns.
            calls = self.scheduler_hooks.calls
            record += (*calls, start, end, _UPDATE_MARK)
            calls.clear()
            self._complete.append(record)

    def stepped(self, start: float, end: float) -> None:
        """The engine-core step that began at `start` ended; complete records can be written."""
        if self._current is not None:
            self._current += (start, end, _STEP_MARK)
            self._current = None
        complete = self._complete
        if complete:
            writer = self.writers.get("scheduler") or self._open("scheduler", self.scheduler_hooks)
            for record in complete:
                writer.put(record)
            complete.clear()

    # ---- worker

    def executing(self, output: Any, start: float) -> None:
        """A worker begins a step; what the step before left open is complete."""
        if self._executing is not None:
            self._executed(self._executing)
        self._executing = [start, getattr(output, "connector_tax_step_id", -1), 0]

    def worked(self, start: float, end: float, complete: bool) -> None:
        """execute_model() or sample_tokens() ended; `complete` when the step has no more calls."""
        record = self._executing
        if record is not None:
            record[2] += end - start
            if complete:
                self._executed(record)

    def _executed(self, record: list[float]) -> None:
        """Hand the worker's record over; a warm-up step has no id and is left out."""
        self._executing = None
        calls = self.worker_hooks.calls
        if record[1] >= 0:
            record += calls
            writer = self.writers.get("worker") or self._open("worker", self.worker_hooks)
            writer.put(record)
        calls.clear()


_probe: Probe | None = None


def _give_up(error: Exception) -> None:
    """Switch the probe off in this process and say so once."""
    if _probe is not None and _probe.active:
        _probe.active = False
        _LOG.error("connector_tax step probe switched off: %s: %s", type(error).__name__, error)


def _timed(hook: Any, calls: list[float], position: int) -> Any:
    """`hook` with its calls added to `calls`; one within another stands inside it."""
    add, now, end = calls.append, _now, mark(position)

    def timed_hook(*args: Any, **kwargs: Any) -> Any:
        add(now())
        try:
            return hook(*args, **kwargs)
        finally:
            add(now())
            add(end)

    def timed_hook_without_parameters() -> Any:
        add(now())
        try:
            return hook()
        finally:
            add(now())
            add(end)

    # Most hooks of a worker's step take nothing, and passing nothing on costs a sixth of the rest.
    return timed_hook_without_parameters if _takes_nothing(hook) else timed_hook


def _takes_nothing(hook: Any) -> bool:
    try:
        # Of what is called, not of what it wraps: a decorator may take more than that.
        return not inspect.signature(hook, follow_wrapped=False).parameters
    except (TypeError, ValueError):
        return False


def watch_connector(probe: Probe, connector: Any, config: Any, role: Any) -> None:
    """Time the hooks of a connector object, and of the children a MultiConnector holds.

    The log line names them as the configuration does; vLLM may create a class of another name.
    """
    hooks = probe.scheduler_hooks if role.name == "SCHEDULER" else probe.worker_hooks
    names = [config.kv_transfer_config.kv_connector]
    _wrap_hooks(connector, hooks, HOOKS, None)
    children = getattr(connector, "_connectors", ())
    configs = getattr(connector, "_ktc_kv_transfer_config", ())
    for position, child in enumerate(children):
        known = position < len(configs)
        name = configs[position].kv_connector if known else type(child).__name__
        _wrap_hooks(child, hooks, CHILD_HOOKS, name)
        names.append(name)
    _LOG.info("connector_tax step probe watches %s (%s)", " > ".join(names), role.name)


def _wrap_hooks(connector: Any, hooks: Hooks, names: tuple[str, ...], child: str | None) -> None:
    present = [name for name in names if callable(getattr(connector, name, None))]
    first = hooks.add(child, present)
    for position, name in enumerate(present, first):
        hook = getattr(connector, name)
        setattr(connector, name, _timed(hook, hooks.calls, position))


def install(probe: Probe) -> None:
    """Wrap the hook points of the vLLM in this process."""
    engine, scheduler, worker, factory = (_class_of(*HOOK_POINTS[i][:2]) for i in (0, 2, 4, 5))

    for name in ("step", "step_with_batch_queue"):
        setattr(engine, name, _step_wrapper(probe, getattr(engine, name)))

    schedule, update = scheduler.schedule, scheduler.update_from_output

    def timed_schedule(self: Any, *args: Any, **kwargs: Any) -> Any:
        start = _now()
        output = schedule(self, *args, **kwargs)
        end = _now()
        if probe.active:
            try:
                probe.scheduled(self, output, start, end)
            except Exception as error:
                _give_up(error)
        else:
            probe.scheduler_hooks.calls.clear()
        return output

    def timed_update(self: Any, output: Any, *args: Any, **kwargs: Any) -> Any:
        start = _now()
        result = update(self, output, *args, **kwargs)
        if probe.active:
            try:
                probe.updated(output, start, _now())
            except Exception as error:
                _give_up(error)
        return result

    scheduler.schedule, scheduler.update_from_output = timed_schedule, timed_update
    worker.execute_model = _execute_wrapper(probe, worker.execute_model)

    create = factory.create_connector.__func__

    def create_connector(cls: Any, config: Any, role: Any, *args: Any, **kwargs: Any) -> Any:
        connector = create(cls, config, role, *args, **kwargs)
        try:
            watch_connector(probe, connector, config, role)
        except Exception as error:
            _give_up(error)
        return connector

    factory.create_connector = classmethod(create_connector)


def _step_wrapper(probe: Probe, step: Any) -> Any:
    def timed_step(self: Any) -> Any:
        start = _now()
        result = step(self)
        if probe.active:
            try:
                probe.stepped(start, _now())
            except Exception as error:
                _give_up(error)
        return result

    return timed_step


def _execute_wrapper(probe: Probe, execute: Any) -> Any:
    def timed_execute(self: Any, output: Any, *args: Any, **kwargs: Any) -> Any:
        if not probe.active:
            probe.worker_hooks.calls.clear()
            return execute(self, output, *args, **kwargs)
        start = _now()
        try:
            if "connector_tax_sampling" not in self.__dict__:
                self.connector_tax_sampling = _watch_sampling(probe, self.worker)
            probe.executing(output, start)
        except Exception as error:
            _give_up(error)
        result = execute(self, output, *args, **kwargs)
        if probe.active:
            try:
                # None: sample_tokens() follows and ends the step.
                probe.worked(start, _now(), result is not None)
            except Exception as error:
                _give_up(error)
        return result

    return timed_execute


def _watch_sampling(probe: Probe, worker: Any) -> bool:
    """Wrap sample_tokens of the worker object; False where this vLLM has none."""
    sample = getattr(worker, "sample_tokens", None)
    if sample is None:
        return False

    def timed_sample(*args: Any, **kwargs: Any) -> Any:
        start = _now()
        result = sample(*args, **kwargs)
        if probe.active:
            try:
                probe.worked(start, _now(), True)
            except Exception as error:
                _give_up(error)
        return result

    worker.sample_tokens = timed_sample
    return True


def _class_of(module: str, name: str) -> Any:
    return getattr(importlib.import_module(module), name)


def missing_hooks() -> list[str]:
    """What of HOOK_POINTS, the connector's hooks and SchedulerOutput this vLLM lacks."""
    missing = []
    for module, owner, method in HOOK_POINTS:
        try:
            found = getattr(_class_of(module, owner), method, None)
        except (ImportError, AttributeError) as error:
            missing.append(f"{module}.{owner}.{method} ({error})")
            continue
        if not callable(found):
            missing.append(f"{module}.{owner}.{method}")
    try:
        base = _class_of(*CONNECTOR_BASE)
        missing += [
            f"{'.'.join(CONNECTOR_BASE)}.{name}"
            for name in REQUIRED_HOOKS
            if not callable(getattr(base, name, None))
        ]
        fields = _class_of("vllm.v1.core.sched.output", "SchedulerOutput").__dataclass_fields__
        missing += [
            f"vllm.v1.core.sched.output.SchedulerOutput.{name}"
            for name in OUTPUT_FIELDS
            if name not in fields
        ]
        scheduler = _class_of(*HOOK_POINTS[2][:2])
        if not callable(getattr(scheduler, "get_request_counts", None)):
            missing.append(f"{HOOK_POINTS[2][0]}.Scheduler.get_request_counts")
    except (ImportError, AttributeError) as error:
        missing.append(str(error))
    return missing


def describe() -> dict[str, Any]:
    """The vLLM of this interpreter: version, hook points with file, line and hash, what is missing.

    Importing vLLM prints to standard output, so the caller looks for the last line.
    """
    missing = missing_hooks()
    targets = []
    for module, owner, method in HOOK_POINTS:
        if any(entry.startswith(f"{module}.{owner}.{method}") for entry in missing):
            continue
        function = inspect.unwrap(getattr(_class_of(module, owner), method))
        code = getattr(function, "__func__", function).__code__
        path = Path(code.co_filename)
        targets.append(
            {
                "hook": f"{module}.{owner}.{method}",
                "file": module.replace(".", "/") + ".py",
                "line": code.co_firstlineno,
                "sha256": hashlib.sha256(path.read_bytes()).hexdigest(),
            }
        )
    vllm = importlib.import_module("vllm")
    return {
        "vllm": getattr(vllm, "__version__", "unknown"),
        "package": str(Path(str(vllm.__file__)).parent),
        "targets": targets,
        "missing": missing,
    }


def register() -> None:
    """The entry point: install the probe where a step log is asked for and vLLM is known."""
    global _probe
    prefix = os.environ.get(PREFIX_VARIABLE)
    if not prefix or _probe is not None:
        return
    try:
        missing = missing_hooks()
        if missing:
            _LOG.error(
                "connector_tax step probe not installed; this vLLM lacks %s", ", ".join(missing)
            )
            return
        _probe = Probe(str(Path(prefix).resolve()))
        install(_probe)
        _LOG.info("connector_tax step probe installed (pid %d)", os.getpid())
    except Exception as error:
        _give_up(error)
        _LOG.exception("connector_tax step probe not installed")


if __name__ == "__main__":
    print(json.dumps(describe()))
    sys.exit(0)
