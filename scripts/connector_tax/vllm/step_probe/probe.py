# CONNECTOR_TAX_PATCH
"""Wrap vLLM's functions for the step probe, from the plugin's entry point."""

import inspect
import itertools
import logging
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from .hook_points import OWNERS, missing_hooks, object_named
from .log import Log, mark

PREFIX_VARIABLE = "AGENTIC_STEP_LOG_PATH"
# More steps than a launch can have, and exact in a double with thousands of ranks.
STEPS_OF_A_RANK = 10**9

# The design's fields. get_transfer_results is get_finished's successor and calls it by default.
FIELDS = {
    "build_connector_meta": "build_meta_us",
    "get_finished": "get_finished_us",
    "get_transfer_results": "get_finished_us",
    "start_load_kv": "start_load_kv_us",
}
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

_SCHEDULE, _UPDATE, _STEP = mark(0), mark(1), mark(2)
_EXECUTE, _SAMPLE = mark(0), mark(1)


class Probe:
    """The probe's state in one process; all of it runs on the engine's thread."""

    def __init__(self, prefix: str) -> None:
        self.active = True
        self.scheduler = Log(prefix, "scheduler", _switch_off)
        self.worker = Log(prefix, "worker", _switch_off)
        self._prefilling: dict[str, int] = {}

    def prefill_tokens(self, scheduler: Any, output: Any) -> int:
        """Return the step's tokens of requests whose prompt is not yet computed."""
        new, cached = output.scheduled_new_reqs, output.scheduled_cached_reqs
        prefilling = self._prefilling
        if not new and not prefilling and not cached.resumed_req_ids:
            return 0
        tokens = output.num_scheduled_tokens
        prefill, begun = 0, {request.req_id for request in new}
        # A preempted request begins its prompt again.
        again = begun.union(cached.resumed_req_ids)
        for request_id, remaining in list(prefilling.items()):
            if request_id in again:
                continue
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
            # It recomputes its earlier output, too.
            if request_id not in begun and request_id in tokens:
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


def _switch_off(error: Exception) -> None:
    """Switch the probe off in this process and log it once."""
    if _probe is not None and _probe.active:
        _probe.active = False
        _LOG.error("connector_tax step probe switched off: %s: %s", type(error).__name__, error)


def _timed(hook: Any, log: Log, position: int) -> Any:
    """Return `hook` with its calls recorded; a nested call ends before the outer one."""
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

    # Most hooks of a worker's step take no arguments, and passing empty arguments has a cost.
    return timed_hook_without_parameters if _takes_nothing(hook) else timed_hook


def _takes_nothing(hook: Any) -> bool:
    try:
        # The signature of the callable, not of what it wraps: a decorator may accept more.
        return not inspect.signature(hook, follow_wrapped=False).parameters
    except (TypeError, ValueError):
        return False


def watch_connector(probe: Probe, connector: Any, config: Any, role: Any) -> None:
    """Time the hooks of a connector object, and of a MultiConnector's children.

    The log line names them as in the configuration; vLLM may create a class of another name.
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
    engine, scheduler, worker, factory = (object_named(*owner) for owner in OWNERS)

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
            _switch_off(error)
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
                _switch_off(error)
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
    """Return the scheduler's data-parallel rank, or 0 if this vLLM has none."""
    parallel = getattr(scheduler.vllm_config, "parallel_config", None)
    return int(getattr(parallel, "data_parallel_index", 0))


def _step_wrapper(probe: Probe, step: Any) -> Any:
    log, now = probe.scheduler, _now
    numbers, add = log.numbers, log.numbers.extend

    def timed_step(self: Any) -> Any:
        start = now()
        result = step(self)
        if probe.active:
            try:
                add((start, now(), _STEP))
                if len(numbers) > log.limit:
                    log.write()
            except Exception as error:
                _switch_off(error)
        return result

    return timed_step


def _execute_wrapper(probe: Probe, execute: Any) -> Any:
    log, now = probe.worker, _now
    numbers, add = log.numbers, log.numbers.extend
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
                _switch_off(error)
        start = now()
        result = execute(self, output, *args, **kwargs)
        if probe.active:
            try:
                end, step_id = now(), getattr(output, "connector_tax_step_id", 0)
                add((start, end, step_id, result is not None, _EXECUTE))
                if len(numbers) > log.limit:
                    log.write()
            except Exception as error:
                _switch_off(error)
        return result

    return timed_execute


def _watch_sampling(probe: Probe, worker: Any) -> None:
    """Wrap sample_tokens of the worker object, if this vLLM has it."""
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


def register() -> None:
    """Install the probe if a step log is requested and vLLM is compatible; the plugin's entry
    point.
    """
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
        _switch_off(error)
        _LOG.exception("connector_tax step probe not installed")
