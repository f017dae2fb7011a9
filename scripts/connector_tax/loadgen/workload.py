"""From the command line to what is sent: the endpoint, when to stop, sessions and their bodies."""

import argparse
import math
import os
import resource
import secrets
from collections.abc import Callable
from typing import Any
from urllib.parse import urlsplit

import numpy as np
from numpy.typing import NDArray

from connector_tax.loadgen.arrivals import make_offsets
from connector_tax.loadgen.bodies import Build, RandomTokens, RandomWords, SessionBodies
from connector_tax.loadgen.endpoint import Target
from connector_tax.loadgen.generator import OTHER_FILES
from connector_tax.loadgen.messages import TlsSettings
from connector_tax.loadgen.rule import CellRule
from connector_tax.loadgen.sessions import Node, Sessions, Singles, needed_capture, read_sessions
from connector_tax.loadgen.tls import TlsClient
from connector_tax.loadgen.traffic import Load

UNLIMITED_S = 1e8
CONNECTIONS = 4096
"""What a worker may open, unless told or limited: in open loop a slow server needs many."""
MANY = 10**12
"""Sessions of a closed loop whose number nobody has limited."""


def make_target(options: argparse.Namespace) -> Target:
    """Return the endpoint that the options name.

    Raises:
        ValueError: the options make no sense; names the option.
    """
    parts = urlsplit(options.url)
    if parts.scheme not in ("http", "https") or not parts.hostname or parts.fragment:
        raise ValueError(f"--url is {options.url!r}; allowed: http[s]://host[:port][/path][?query]")
    path = parts.path.rstrip("/") or "/v1"
    if path.endswith("/v1"):
        path += "/chat/completions" if options.chat else "/completions"
    if parts.username is not None:
        raise ValueError("--url holds a user name; give it with --header 'Authorization: ...'")
    if parts.query:
        path += f"?{parts.query}"
    tls = None
    if parts.scheme == "https":
        ca_file = None if options.ca_file is None else str(options.ca_file)
        tls = TlsSettings(parts.hostname, ca_file, options.insecure)
        try:
            TlsClient(tls.name, tls.ca_file, tls.insecure)
        except OSError as error:
            raise ValueError(f"--ca-file {ca_file}: {error}") from None
    elif options.ca_file is not None or options.insecure:
        raise ValueError("--ca-file and --insecure need an https URL")
    if options.no_ready_check and options.model is None:
        raise ValueError("--no-ready-check needs --model")
    try:
        return Target(
            host=parts.hostname,
            port=parts.port or (80 if tls is None else 443),
            path=path,
            headers=_headers(options),
            stream=not options.no_stream,
            tls=tls,
        )
    except ValueError as error:
        raise ValueError(f"--url or --header: {error}") from None


def _headers(options: argparse.Namespace) -> dict[str, str]:
    headers = {}
    for line in options.header:
        name, colon, value = line.partition(":")
        if not colon:
            raise ValueError(f"{name!r} is no header; write 'Name: value'")
        headers[name.strip()] = value.strip()
    if options.api_key_env is not None:
        key = os.environ.get(options.api_key_env)
        if not key:
            raise ValueError(f"--api-key-env: {options.api_key_env} is not set in the environment")
        if not (key.isascii() and key.isprintable()):
            raise ValueError(
                f"--api-key-env: {options.api_key_env} holds characters beyond printable ASCII"
            )
        headers["Authorization"] = f"Bearer {key}"
    return headers


def make_rule(options: argparse.Namespace) -> CellRule:
    """Return when to stop.

    Raises:
        ValueError: the options make no sense; names the option.
    """
    for name in ("duration", "timeout", "max_tokens", "workers", "connections", "requests",
                 "concurrency", "rate", "max_errors", "inflight_cap"):  # fmt: skip
        value = getattr(options, name)
        if value is not None and not value > 0:
            raise ValueError(f"--{name.replace('_', '-')} must be positive")
    for name in ("warmup", "min_completed", "drain", "rampup"):
        if not 0 <= getattr(options, name) < math.inf:
            raise ValueError(f"--{name.replace('_', '-')} must not be negative")
    floor_s, longest_s = options.duration, options.max_duration
    if floor_s is None:
        floor_s = 60.0 if options.requests is None else UNLIMITED_S
        floor_s = min(floor_s, longest_s or UNLIMITED_S)
    if longest_s is None:
        longest_s = floor_s
    if longest_s < floor_s:
        raise ValueError("--max-duration must not be below --duration")
    least = options.min_completed
    if options.stop_at_precision is not None:
        # So many that an interval has some meaning; its ends are seen again and again.
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
    """Return how many connections a worker may open.

    Raises:
        ValueError: a closed loop needs more than --connections allows.
    """
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
    connections: int = options.connections
    return connections


def make_load(options: argparse.Namespace, target: Target, rule: CellRule) -> Load:
    """Make arrivals, sessions and what makes their bodies.

    Raises:
        ValueError, OSError: the options or the session file are wrong.
    """
    sessions: Sessions | None = None
    if options.session_file is not None:
        sessions = read_sessions(options.session_file)
        _check_prompts(sessions, target)
    starts_s = [session.start_s for session in sessions or () if session.start_s is not None]
    if sum((options.rate is not None, options.concurrency is not None, bool(starts_s))) != 1:
        raise ValueError("one of --rate, --concurrency and start_s in --session-file is needed")
    count = options.requests if sessions is None else len(sessions)
    offsets: NDArray[np.int64] | None = None
    if options.rate is not None:
        offsets = _offsets(options, rule, count)
        count = len(offsets)
    elif sessions is not None and starts_s:
        if len(starts_s) < len(sessions):
            raise ValueError(f"{options.session_file}: start_s stands in some sessions only")
        sessions = sorted(sessions, key=lambda session: session.start_s or 0.0)
        offsets = np.rint(np.sort(starts_s) * 1e9).astype(np.int64)
    if sessions is None:
        node = Node("0", options.prompt or "", options.max_tokens)
        sessions = Singles(MANY if count is None else count, node)
    elif len(sessions) != count:
        sessions = [sessions[k] for k in range(count or 0)]
    # Where sessions are fewer than arrivals, the run ends with the last of them.
    all_arrive = options.session_file is None and options.requests is None
    return Load(
        sessions,
        _bodies(options, target, sessions),
        offsets,
        concurrency=options.concurrency or 0,
        rampup_s=options.rampup,
        horizon_s=rule.warmup_s + rule.cap_s if all_arrive else 0.0,
        keep_going=options.keep_going,
    )


def _offsets(options: argparse.Namespace, rule: CellRule, count: int | None) -> NDArray[np.int64]:
    """The arrivals of --rate: `count` at most, and as far as the run may last."""
    if math.isinf(options.rate):
        if count is None or options.arrivals != "jittered":
            raise ValueError("--rate inf needs --requests or --session-file, and has no --arrivals")
        return np.zeros(count, np.int64)
    horizon_s = rule.schedule_s
    if count is not None:
        # Far beyond the count-th arrival: of any process, for the same ones come again.
        horizon_s = min(horizon_s, 2 * (count + 10 * math.sqrt(count) + 10) / options.rate)
    offsets = np.empty(0, np.int64)
    while True:
        offsets = make_offsets(
            options.arrivals,
            options.rate,
            horizon_s,
            f"{options.seed}/arrivals",
            options.gamma_shape,
        )[:count]
        if count is None or len(offsets) == count or horizon_s >= rule.schedule_s:
            break
        horizon_s = min(2 * horizon_s, rule.schedule_s)
    if len(offsets) == 0:
        raise ValueError("no session starts within --duration")
    return offsets


def _bodies(options: argparse.Namespace, target: Target, sessions: Sessions) -> Build:
    """What makes the body of each request."""
    if not isinstance(options.body, dict):
        raise ValueError(f"--body: found {options.body!r}; allowed: a JSON object")
    common: dict[str, Any] = {"model": options.model, "stream": target.stream}
    if target.stream and not options.no_usage:
        common["stream_options"] = {"include_usage": True}
    if needed_capture(() if isinstance(sessions, Singles) else sessions) == "token_ids":
        common["return_token_ids"] = True
    run_id = secrets.token_hex(4)  # of this run alone, so that a server's log can tell runs apart
    extra = {**({"ignore_eos": True} if options.ignore_eos else {}), **options.body}
    for name in ("prompt_tokens", "prompt_words", "vocabulary"):
        value = getattr(options, name)
        if value is not None and value < 1:
            raise ValueError(f"--{name.replace('_', '-')}: found {value}; allowed: at least 1")
    fresh: Callable[[], str | list[int]] | None = None
    stream = f"{options.seed}/prompts"
    if options.prompt_words is not None:
        fresh = RandomWords(stream, options.prompt_words)
    elif options.prompt_tokens is not None:
        if target.chat:
            raise ValueError(
                "--prompt-tokens makes ids; a chat endpoint takes text: --prompt-words"
            )
        fresh = RandomTokens(stream, options.prompt_tokens, 0, options.vocabulary)
    return SessionBodies(sessions, run_id, common, target.chat, extra, fresh).build


def _check_prompts(sessions: Sessions, target: Target) -> None:
    for session in sessions if target.chat else ():
        for node in session.nodes:
            if not isinstance(node.prompt, str):
                raise ValueError(
                    f"session {session.id!r}, node {node.id!r}: the prompt is token ids; a chat "
                    "endpoint takes text"
                )
