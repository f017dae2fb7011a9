"""Turn the command's options into an endpoint, a rule that ends the run, and traffic."""

import argparse
import math
import resource
import secrets
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from connector_tax.artifacts.study_records import MOST_WORKERS
from connector_tax.loadgen.arguments import option_name
from connector_tax.loadgen.endpoint import target_of
from connector_tax.loadgen.generator import OTHER_FILES
from connector_tax.loadgen.messages import Target
from connector_tax.loadgen.plan import CellRule
from connector_tax.loadgen.sessions import (
    LONGEST_S,
    Build,
    Prompt,
    Sessions,
    needed_capture,
    session_bodies,
)
from connector_tax.loadgen.source import Source
from connector_tax.loadgen.traffic import Load, make_offsets

MOST_SESSIONS = 10**8
CONNECTIONS = 4096
"""Default connections per worker, if `ulimit -n` allows; a slow server in open loop needs many."""


def make_target(options: argparse.Namespace) -> Target:
    """Return the endpoint from the options.

    Raises:
        ValueError: an option is invalid; names it.
    """
    target = target_of(
        options.url, chat=options.chat, key_variable=options.api_key_env, ca_file=options.ca_file,
        insecure=options.insecure, key_header=options.api_key_header, header_lines=options.header,
        stream=not options.no_stream, finish_reasons=options.finish_reason,
    )  # fmt: skip
    if options.no_ready_check and options.model is None:
        raise ValueError("--no-ready-check needs --model")
    return target


def check_numbers(options: argparse.Namespace) -> None:
    """Reject numbers outside an option's range.

    Raises:
        ValueError: names the option.
    """
    for name in ("max_tokens", "workers", "connections", "requests", "concurrency", "rate",
                 "max_errors", "inflight_cap", "prompt_tokens", "prompt_words",
                 "vocabulary", "trace_speed", "trace_limit", "trace_block"):  # fmt: skip
        values = options.rates if name == "rate" else [getattr(options, name)]
        for value in values:
            if value is not None and not value > 0:
                raise ValueError(f"{option_name(name)}: found {value}; allowed: above 0")
            if value == math.inf and name != "rate":
                raise ValueError(f"{option_name(name)}: found inf; allowed: a finite number")
    for name in ("warmup", "drain", "rampup", "wait"):
        value = getattr(options, name)
        if not 0 <= value <= LONGEST_S:
            raise ValueError(f"{option_name(name)}: found {value}; allowed: 0 to {LONGEST_S:g} s")
    for name in ("duration", "max_duration", "timeout"):
        value = getattr(options, name)
        if value is not None and not 0 < value <= LONGEST_S:
            raise ValueError(
                f"{option_name(name)}: found {value}; allowed: above 0, to {LONGEST_S:g} s"
            )
    if options.min_completed < 0:
        raise ValueError(f"--min-completed: found {options.min_completed}; allowed: at least 0")
    if options.workers > MOST_WORKERS:
        raise ValueError(f"--workers: found {options.workers}; allowed: up to {MOST_WORKERS}")


def make_rule(options: argparse.Namespace, source: Source) -> CellRule:
    """Return the rule that ends the run: by default after 60 s, or when the source is used up.

    Raises:
        ValueError: options contradict each other; names them.
    """
    floor_s, longest_s = options.duration, options.max_duration
    if floor_s is None:
        floor_s = 60.0 if source.limit is None else LONGEST_S
        floor_s = min(floor_s, longest_s or LONGEST_S)
    if longest_s is None:
        longest_s = floor_s
    if longest_s < floor_s:
        raise ValueError("--max-duration must not be below --duration")
    if options.rampup > options.warmup + longest_s:
        raise ValueError(
            f"--rampup: found {options.rampup:g}; allowed: up to {options.warmup + longest_s:g} s,"
            " --warmup and the longest run; otherwise --concurrency is never reached"
        )
    least = options.min_completed
    if options.stop_at_precision is not None:
        # Enough for a meaningful interval, which is checked repeatedly during the run.
        floor_s, least = 0.0, max(least, 100)
    return CellRule(
        warmup_s=options.warmup,
        floor_s=floor_s,
        min_completed=least,
        cap_s=longest_s,
        drain_s=options.drain,
        inflight_cap=options.inflight_cap,
        request_timeout_s=options.timeout,
        cooldown=options.cooldown,
        end_overloaded=options.stop_overloaded,
        max_errors=options.max_errors,
    )


def most_connections(options: argparse.Namespace) -> int:
    """Return the number of connections that a worker may open.

    Raises:
        ValueError: a closed loop needs more than --connections allows.
    """
    if options.concurrency is not None and options.workers > options.concurrency:
        raise ValueError(
            f"--workers: found {options.workers}; allowed: up to --concurrency "
            f"({options.concurrency}), a place for each"
        )
    places: int = -(-(options.concurrency or 0) // options.workers)
    if options.connections is None:
        _, files = resource.getrlimit(resource.RLIMIT_NOFILE)
        room = CONNECTIONS if files == resource.RLIM_INFINITY else files - OTHER_FILES
        return max(1, places, min(CONNECTIONS, room))
    if options.connections < places:
        raise ValueError(
            f"--connections is {options.connections}; --concurrency {options.concurrency} needs "
            f"{places} for each of {options.workers} workers"
        )
    return int(options.connections)


def make_load(options: argparse.Namespace, target: Target, rule: CellRule, source: Source) -> Load:
    """Return the load: arrivals, sessions, and the function that makes their bodies.

    Raises:
        ValueError: options contradict each other; names them.
    """
    timed = source.starts_ns is not None
    if sum((options.rate is not None, options.concurrency is not None, timed)) != 1:
        raise ValueError(
            "one of --rate, --concurrency, --trace and start_s in --session-file is needed"
        )
    offsets, sessions = source.starts_ns, source.sessions
    if options.rate is not None:
        offsets = _offsets(options, rule, source.limit)
        sessions = source.first(len(offsets))
    return Load(
        sessions,
        _bodies(options, target, sessions, source.prompt_of),
        offsets,
        concurrency=options.concurrency or 0,
        rampup_s=options.rampup,
        # If sessions can be used up, the run ends with the last of them.
        horizon_s=rule.warmup_s + rule.cap_s if source.limit is None else 0.0,
        keep_going=options.keep_going,
    )


def _offsets(options: argparse.Namespace, rule: CellRule, count: int | None) -> NDArray[np.int64]:
    """Return arrival times (ns) at --rate: at most `count`, none after the longest duration."""
    wanted = min(options.rate * rule.schedule_s, math.inf if count is None else count)
    if math.isinf(wanted):
        raise ValueError("--rate inf needs --requests, --session-file or --prompts")
    if wanted > MOST_SESSIONS:
        raise ValueError(
            f"--rate, --duration and --requests: found {wanted:.3g} sessions; allowed: up to "
            f"{MOST_SESSIONS:g}"
        )
    if math.isinf(options.rate):
        return np.zeros(int(wanted), np.int64)
    offsets = make_offsets(
        options.arrivals,
        options.rate,
        rule.schedule_s,
        f"{options.seed}/arrivals",
        options.gamma_shape,
        most=count,
    )
    if len(offsets) == 0:
        raise ValueError("no session starts within --duration")
    return offsets


def _bodies(
    options: argparse.Namespace,
    target: Target,
    sessions: Sessions,
    prompt_of: Callable[[int], Prompt] | None,
) -> Build:
    """Return the function that makes the body of each request."""
    common: dict[str, Any] = {"model": options.model, "stream": target.stream}
    if target.stream and not options.no_usage:
        common["stream_options"] = {"include_usage": True}
    if needed_capture(sessions) == "token_ids":
        common["return_token_ids"] = True
    run_id = secrets.token_hex(4)  # unique to this run, so that runs differ in a server's log
    fixed = options.ignore_eos or options.trace is not None
    extra = {**({"ignore_eos": True} if fixed else {}), **options.body}
    if options.vocabulary is not None and options.vocabulary > 2**31:
        raise ValueError(f"--vocabulary: found {options.vocabulary}; allowed: up to 2^31")
    made = "messages" if target.chat else "prompt"
    if made in options.body:
        raise ValueError(
            f"--body: found {made!r}; allowed: any other key, since each request has its own"
        )
    if options.body.get("n") not in (None, 1):
        raise ValueError(
            f"--body: found n {options.body['n']!r}; allowed: 1, since one answer is measured"
        )
    if options.body.get("stream", target.stream) != target.stream:
        raise ValueError("--body: found 'stream'; allowed: --no-stream, for whole responses")
    return session_bodies(sessions, run_id, common, target.chat, extra, prompt_of)
