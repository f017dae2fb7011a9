# CONNECTOR_TAX_PATCH
"""The step probe: what one engine step and its connector hooks cost inside a running vLLM.

Loaded by vLLM as a `vllm.general_plugins` entry point in the engine-core and worker processes; a
copy of this file and its metadata in an overlay folder on the server's PYTHONPATH is the whole
installation (connector_tax.vllm.overlay), so no installed file changes.

With AGENTIC_STEP_LOG_PATH set it writes `<prefix>.scheduler.steps` and `<prefix>.worker.steps`, of
further ranks of the worker `<prefix>.worker2.steps` and so on, of the scheduler of data-parallel
rank 1 `<prefix>.scheduler2.steps`;
connector_tax.vllm.step_records turns them into the fields of docs/artifacts.md (engine_step):

    scheduler  Scheduler.schedule() entry to exit, with the step's requests and tokens;
               update_from_output(), which under asynchronous scheduling runs in a later engine
               step; the EngineCore step.
    worker     execute_model() and, where sampling is a call of its own, sample_tokens().
    both       every timed hook of the connector; of a MultiConnector's children the hooks with a
               field of the design and the lookup, since each costs its two clock readings.

The per-layer hooks (wait_for_layer_load, save_kv_layer) are not timed: on a deep model two clock
readings in each would cost more than the 5 us a step this probe may cost.

A step id set on SchedulerOutput travels to the worker with it and joins the two records; that of
data-parallel rank r counts from r * STEPS_OF_A_RANK + 1, so that no two steps share one. An error
of the probe switches it off in that process, is logged once, and never reaches vLLM.

A file begins with a line of JSON, `{"process", "groups"}`: for each connector object its name
(null: the connector itself), its hooks and the position of the first. Then, in doubles of the
machine, what was timed in the order in which it ended: start and end (CLOCK_MONOTONIC, s), its
values (VALUES), `mark(position)`. A double holds a clock reading to 2 ns on a machine that has run
for a hundred days.

Between a model's kernels the caches are cold, and every line of Python that is run there, every
thread that wakes and every page of memory that is touched costs several times what it does in a
loop. So the step's path only puts numbers into a list, and nobody wakes up while steps run. The
list goes to the file when HELD_NUMBERS are in it, when somebody sends a byte to the Unix socket
`<prefix>.<process>.socket` (the same byte comes back when it is done), and when the process ends,
by itself or by SIGTERM, as vLLM handles it; SIGKILL loses what was not asked for.
"""

import contextlib
import hashlib
import importlib
import inspect
import itertools
import json
import logging
import os
import socket
import struct
import sys
import threading
import time
from collections.abc import Iterator
from multiprocessing.util import Finalize  # noqa: TID251 (pickles nothing)
from pathlib import Path
from typing import Any

PREFIX_VARIABLE = "AGENTIC_STEP_LOG_PATH"
HELD_NUMBERS = 16384
# More than a launch can have, and exact in a double with thousands of ranks.
STEPS_OF_A_RANK = 10**9

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

# What is timed in every step, and the values that follow start and end; hooks follow in position.
VALUES: dict[str, dict[str, tuple[str, ...]]] = {
    "scheduler": {
        "schedule": ("step_id", "num_running", "num_waiting", "prefill_tokens", "decode_tokens"),
        "update": ("step_id",),
        "engine_step": (),
    },
    # complete: 1, or 0 where sample_tokens() follows and ends the step.
    "worker": {"execute_model": ("step_id", "complete"), "sample_tokens": ()},
}
FIRST_HOOK = 3


def mark(position: int) -> float:
    """What stands for a position among times and values, which are never negative."""
    return float(-1 - position)


@contextlib.contextmanager
def socket_address(path: str) -> Iterator[str]:
    """An address of the Unix socket at `path`: it has room for 107 bytes, a path may have more."""
    folder, name = os.path.split(path)
    directory = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        yield f"/proc/self/fd/{directory}/{name}"
    finally:
        os.close(directory)


_SCHEDULE, _UPDATE, _STEP = mark(0), mark(1), mark(2)
_EXECUTE, _SAMPLE = mark(0), mark(1)


class Log:
    """What one process records, held in memory until it is to be written."""

    def __init__(self, prefix: str, process: str) -> None:
        self._prefix = f"{prefix}.{process}"
        self._process = process
        # Of the scheduler: its data-parallel rank; known when its first step is.
        self.rank = 0
        # (None or the child's name, its hooks, the position of the first)
        self._groups: list[tuple[str | None, list[str], int]] = []
        self._next_hook = FIRST_HOOK
        self.numbers: list[float] = []
        # The first step writes, and so opens the file: vLLM may fork before.
        self.limit = 0
        self._descriptor = -1
        # What a full disk did not take: numbers are never cut.
        self._unwritten = b""
        self._writing = threading.Lock()

    def add_hooks(self, child: str | None, names: list[str]) -> int:
        """The position of the first of these hooks; called before the first step."""
        first = self._next_hook
        self._groups.append((child, names, first))
        self._next_hook += len(names)
        return first

    def write(self) -> None:
        """Write what is held; from any thread.

        Raises:
            OSError: the file cannot be made (it exists, or its folder does not) or written.
        """
        with self._writing:
            if self._descriptor < 0:
                self._open()
            numbers = self.numbers
            count = len(numbers)
            # Whoever adds meanwhile adds behind these.
            self._unwritten += struct.pack(f"{count}d", *numbers[:count])
            del numbers[:count]
            while self._unwritten:
                self._unwritten = self._unwritten[os.write(self._descriptor, self._unwritten) :]

    def _open(self) -> None:
        """Make the file and the socket; a worker that finds another rank's takes the next name."""
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
        own = f"{self._prefix}{self.rank + 1}" if self.rank else self._prefix
        for further in itertools.count(2):
            try:
                self._descriptor = os.open(f"{own}.steps", flags, 0o644)
                break
            except FileExistsError:
                if self._process != "worker":
                    raise
                own = f"{self._prefix}{further}"
        self.limit = HELD_NUMBERS
        header = {"process": self._process, "groups": self._groups}
        self._unwritten = json.dumps(header).encode() + b"\n"
        server = socket.socket(socket.AF_UNIX)
        with socket_address(f"{own}.socket") as address:
            server.bind(address)
        server.listen()
        threading.Thread(target=self._serve, args=(server,), name="step-probe", daemon=True).start()
        # atexit does not reach a process that multiprocessing has forked.
        Finalize(None, self._write_at_the_end, exitpriority=0)

    def _serve(self, server: socket.socket) -> None:
        try:
            while True:
                peer, _ = server.accept()
                # Who asks may be gone before the answer.
                with peer, contextlib.suppress(ConnectionError):
                    while order := peer.recv(1):
                        self.write()
                        peer.sendall(order)
        except Exception as error:
            _give_up(error)

    def _write_at_the_end(self) -> None:
        try:
            self.write()
        except OSError as error:
            _give_up(error)


class Probe:
    """The state of one process; everything runs on the engine's thread."""

    def __init__(self, prefix: str) -> None:
        self.active = True
        self.scheduler, self.worker = Log(prefix, "scheduler"), Log(prefix, "worker")
        self._prefilling: dict[str, int] = {}

    def prefill_tokens(self, scheduler: Any, output: Any) -> int:
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


_probe: Probe | None = None


def _give_up(error: Exception) -> None:
    """Switch the probe off in this process and say so once."""
    if _probe is not None and _probe.active:
        _probe.active = False
        _LOG.error("connector_tax step probe switched off: %s: %s", type(error).__name__, error)


def _timed(hook: Any, log: Log, position: int) -> Any:
    """`hook` with its calls recorded; one within another ends before it."""
    add, now, ended = log.numbers.extend, _now, mark(position)

    def timed_hook(*args: Any, **kwargs: Any) -> Any:
        start = now()
        try:
            return hook(*args, **kwargs)
        finally:
            add((start, now(), ended))

    def timed_hook_without_parameters() -> Any:
        start = now()
        try:
            return hook()
        finally:
            add((start, now(), ended))

    # Most hooks of a worker's step take nothing, and passing nothing on has a cost of its own.
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
    log = probe.scheduler if role.name == "SCHEDULER" else probe.worker
    names = [config.kv_transfer_config.kv_connector]
    _wrap_hooks(connector, log, HOOKS, None)
    children = getattr(connector, "_connectors", ())
    configs = getattr(connector, "_ktc_kv_transfer_config", ())
    for position, child in enumerate(children):
        known = position < len(configs)
        name = configs[position].kv_connector if known else type(child).__name__
        _wrap_hooks(child, log, CHILD_HOOKS, name)
        names.append(name)
    _LOG.info("connector_tax step probe watches %s (%s)", " > ".join(names), role.name)


def _wrap_hooks(connector: Any, log: Log, names: tuple[str, ...], child: str | None) -> None:
    present = [name for name in names if callable(getattr(connector, name, None))]
    first = log.add_hooks(child, present)
    for position, name in enumerate(present, first):
        hook = getattr(connector, name)
        setattr(connector, name, _timed(hook, log, position))


def install(probe: Probe) -> None:
    """Wrap the hook points of the vLLM in this process."""
    engine, scheduler, worker, factory = (_class_of(*HOOK_POINTS[i][:2]) for i in (0, 2, 4, 5))

    for name in ("step", "step_with_batch_queue"):
        setattr(engine, name, _step_wrapper(probe, getattr(engine, name)))

    _wrap_scheduler(probe, scheduler)
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


def _wrap_scheduler(probe: Probe, scheduler: Any) -> None:
    schedule, update = scheduler.schedule, scheduler.update_from_output
    numbers, add, now = probe.scheduler.numbers, probe.scheduler.numbers.extend, _now
    step_ids: Iterator[int] | None = None

    def timed_schedule(self: Any, *args: Any, **kwargs: Any) -> Any:
        nonlocal step_ids
        start = now()
        output = schedule(self, *args, **kwargs)
        end = now()
        if probe.active:
            try:
                if step_ids is None:
                    rank = probe.scheduler.rank = _data_parallel_rank(self)
                    step_ids = itertools.count(rank * STEPS_OF_A_RANK + 1)
                output.connector_tax_step_id = step_id = next(step_ids)
                prefill = probe.prefill_tokens(self, output)
                decode = output.total_num_scheduled_tokens - prefill
                counts = self.get_request_counts()
                add((start, end, step_id, *counts, prefill, decode, _SCHEDULE))
            except Exception as error:
                _give_up(error)
        else:
            numbers.clear()
        return output

    def timed_update(self: Any, output: Any, *args: Any, **kwargs: Any) -> Any:
        start = now()
        result = update(self, output, *args, **kwargs)
        if probe.active:
            add((start, now(), getattr(output, "connector_tax_step_id", 0), _UPDATE))
        return result

    scheduler.schedule, scheduler.update_from_output = timed_schedule, timed_update


def _data_parallel_rank(scheduler: Any) -> int:
    """Of a vLLM that does not know it 0: a second scheduler then finds its file taken."""
    parallel = getattr(scheduler.vllm_config, "parallel_config", None)
    return int(getattr(parallel, "data_parallel_index", 0))


def _step_wrapper(probe: Probe, step: Any) -> Any:
    log, numbers, add, now = (
        probe.scheduler,
        probe.scheduler.numbers,
        probe.scheduler.numbers.extend,
        _now,
    )

    def timed_step(self: Any) -> Any:
        start = now()
        result = step(self)
        if probe.active:
            try:
                add((start, now(), _STEP))
                if len(numbers) > log.limit:
                    log.write()
            except Exception as error:
                _give_up(error)
        return result

    return timed_step


def _execute_wrapper(probe: Probe, execute: Any) -> Any:
    log, numbers, add, now = probe.worker, probe.worker.numbers, probe.worker.numbers.extend, _now
    watched: Any = None

    def timed_execute(self: Any, output: Any, *args: Any, **kwargs: Any) -> Any:
        nonlocal watched
        if not probe.active:
            numbers.clear()
            return execute(self, output, *args, **kwargs)
        if watched is not self:
            try:
                _watch_sampling(probe, self.worker)
                watched = self
            except Exception as error:
                _give_up(error)
        start = now()
        result = execute(self, output, *args, **kwargs)
        if probe.active:
            try:
                end, step_id = now(), getattr(output, "connector_tax_step_id", 0)
                add((start, end, step_id, result is not None, _EXECUTE))
                if len(numbers) > log.limit:
                    log.write()
            except Exception as error:
                _give_up(error)
        return result

    return timed_execute


def _watch_sampling(probe: Probe, worker: Any) -> None:
    """Wrap sample_tokens of the worker object, where this vLLM has it."""
    sample = getattr(worker, "sample_tokens", None)
    if sample is None:
        return
    add, now = probe.worker.numbers.extend, _now

    def timed_sample(*args: Any, **kwargs: Any) -> Any:
        start = now()
        result = sample(*args, **kwargs)
        if probe.active:
            add((start, now(), _SAMPLE))
        return result

    worker.sample_tokens = timed_sample


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
