"""From the command line to what is sent: the endpoint, when to stop, sessions and their bodies."""

import argparse
import os
import secrets
from typing import Any
from urllib.parse import urlsplit

import numpy as np
from numpy.typing import NDArray

from connector_tax.loadgen.arrivals import make_offsets
from connector_tax.loadgen.bodies import Build, RandomPrompts, SessionBodies
from connector_tax.loadgen.endpoint import Target
from connector_tax.loadgen.messages import TlsSettings
from connector_tax.loadgen.rule import CellRule
from connector_tax.loadgen.sessions import Node, Sessions, Singles, needed_capture, read_sessions
from connector_tax.loadgen.tls import TlsClient
from connector_tax.loadgen.traffic import Load


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
            usage_required=options.usage == "required",
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
    for name in ("duration", "timeout", "max_tokens", "workers", "connections"):
        if getattr(options, name) <= 0:
            raise ValueError(f"--{name.replace('_', '-')} must be positive")
    for name in ("warmup", "min_completed", "drain", "inflight_cap", "rampup"):
        if getattr(options, name) < 0:
            raise ValueError(f"--{name.replace('_', '-')} must not be negative")
    if (options.min_completed > 0) != (options.max_duration is not None):
        raise ValueError("--min-completed and --max-duration go together")
    longest_s = options.duration if options.max_duration is None else options.max_duration
    if longest_s < options.duration:
        raise ValueError("--max-duration must not be below --duration")
    return CellRule(
        warmup_s=options.warmup,
        floor_s=options.duration,
        min_completed=options.min_completed,
        cap_s=longest_s,
        drain_s=options.drain,
        inflight_cap=options.inflight_cap or None,
        request_timeout_s=options.timeout,
        cooldown=options.cooldown,
    )


def make_load(options: argparse.Namespace, target: Target, rule: CellRule) -> Load:
    """Make arrivals, sessions and what makes their bodies.

    Raises:
        ValueError, OSError: the options or the session file are wrong.
    """
    offsets = _offsets(options, rule)
    if offsets is None and options.session_file is None and options.requests is None:
        raise ValueError("--concurrency needs --requests or --session-file")
    sessions, build = _sessions(options, target, len(() if offsets is None else offsets))
    if offsets is None:
        return Load(
            sessions,
            build,
            concurrency=options.concurrency,
            rampup_s=options.rampup,
            keep_going=options.keep_going,
        )
    count = min(len(sessions), len(offsets))
    return Load(
        sessions if count == len(sessions) else [sessions[k] for k in range(count)],
        build,
        offsets[:count],
        # Where sessions are fewer than arrivals, the run ends with the last of them.
        horizon_s=rule.warmup_s + rule.cap_s if count == len(offsets) else 0.0,
        keep_going=options.keep_going,
    )


def _offsets(options: argparse.Namespace, rule: CellRule) -> NDArray[np.int64] | None:
    if options.rate is None:
        if options.concurrency < 1:
            raise ValueError("--concurrency must be at least 1")
        return None
    offsets = make_offsets(
        options.arrivals,
        options.rate,
        rule.schedule_s,
        f"{options.seed}/arrivals",
        options.gamma_shape,
    )
    if len(offsets) == 0:
        raise ValueError("no session starts within --duration")
    return offsets


def _sessions(options: argparse.Namespace, target: Target, arrivals: int) -> tuple[Sessions, Build]:
    """The sessions of the file, or of one request each: as many as asked for, or as arrive."""
    if not isinstance(options.body, dict):
        raise ValueError(f"--body: found {options.body!r}; allowed: a JSON object")
    if options.requests is not None and options.requests < 1:
        raise ValueError("--requests must be at least 1")
    count = arrivals if options.requests is None else options.requests
    sessions: Sessions = Singles(count, Node("0", options.prompt or "", options.max_tokens))
    if options.session_file is not None:
        sessions = read_sessions(options.session_file)
        _check_prompts(sessions, target)
    common: dict[str, Any] = {"model": options.model, "stream": target.stream}
    if target.stream and target.usage_required:
        common["stream_options"] = {"include_usage": True}
    if needed_capture(sessions) == "token_ids":
        common["return_token_ids"] = True
    run_id = secrets.token_hex(4)  # of this run alone, so that a server's log can tell runs apart
    extra = {**({"ignore_eos": True} if options.ignore_eos else {}), **options.body}
    if options.prompt_tokens is None:
        return sessions, SessionBodies(sessions, run_id, common, target.chat, extra).build
    if target.chat:
        raise ValueError("--prompt-tokens makes token ids; a chat endpoint takes text")
    for name, value in (
        ("prompt-tokens", options.prompt_tokens),
        ("vocabulary", options.vocabulary),
    ):
        if value < 1:
            raise ValueError(f"--{name}: found {value}; allowed: at least 1")
    body = {**common, "max_tokens": options.max_tokens, **extra}
    requests = iter(
        RandomPrompts(
            name=run_id,
            seed=f"{options.seed}/prompts",
            count=count,
            tokens=options.prompt_tokens,
            first_id=0,
            end_id=options.vocabulary,
            before=body,
            after={},
            completion_tokens=body["max_tokens"] if body.get("ignore_eos") else None,
        )
    )
    return sessions, lambda _session, _node, _history: next(requests)


def _check_prompts(sessions: Sessions, target: Target) -> None:
    for session in sessions if target.chat else ():
        for node in session.nodes:
            if not isinstance(node.prompt, str):
                raise ValueError(
                    f"session {session.id!r}, node {node.id!r}: the prompt is token ids; a chat "
                    "endpoint takes text"
                )
