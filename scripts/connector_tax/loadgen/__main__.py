"""Stand-alone load generator: `python -m connector_tax.loadgen --help`."""

import argparse
import json
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn
from urllib.parse import urlsplit

import msgspec

from connector_tax.files import write_bytes
from connector_tax.loadgen.affinity import plan_affinity, read_topology
from connector_tax.loadgen.arrivals import make_offsets
from connector_tax.loadgen.dispatcher import LoadGeneratorError
from connector_tax.loadgen.generator import (
    START_DELAY_NS,
    LoadGenerator,
    LoadGeneratorOptions,
    Target,
    is_local,
)
from connector_tax.loadgen.health import (
    Check,
    Ramp,
    check_concurrency,
    check_intra_session,
    check_processes,
    check_requests,
    check_session_rate,
)
from connector_tax.loadgen.process import CollectorPause
from connector_tax.loadgen.session_run import SessionPlan, SessionRecord, session_outcomes
from connector_tax.loadgen.sessions import (
    Node,
    RequestBuilder,
    Session,
    needed_capture,
    read_sessions,
)
from connector_tax.loadgen.summary import print_summary
from connector_tax.loadgen.traffic import (
    Admission,
    ConcurrencyAdmission,
    RateAdmission,
    Scheduler,
)
from connector_tax.seeds import named_generator

EXIT_CODES = """exit status:
  0  every timing check passed and at most 1% of the requests failed
  1  a check failed: the numbers are printed, but do not believe them
  2  bad arguments or session file
  3  no request succeeded, or the load generator could not run
  130  interrupted; what had ended until then is printed and written"""


def parse_arguments(arguments: Sequence[str]) -> argparse.Namespace:
    """Parse the command line; exits with status 2 and a message if it is wrong."""
    parser = argparse.ArgumentParser(
        prog="python -m connector_tax.loadgen",
        description="Send requests to an OpenAI-compatible endpoint; report when everything came.",
        epilog=EXIT_CODES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    where = parser.add_argument_group("endpoint")
    where.add_argument(
        "--url",
        required=True,
        help="http://host:port, a base that ends in /v1, or a path to POST to",
    )
    where.add_argument("--chat", action="store_true", help="/v1/chat/completions, not completions")
    where.add_argument("--model", required=True)
    where.add_argument("--api-key-env", metavar="NAME", help="variable that holds the bearer token")
    where.add_argument("--no-stream", action="store_true", help="ask for whole responses")
    load = parser.add_argument_group("load (one of --rate and --concurrency)")
    kind = load.add_mutually_exclusive_group(required=True)
    kind.add_argument("--rate", type=float, help="sessions started per second, open loop")
    kind.add_argument("--concurrency", type=int, help="sessions kept active, closed loop")
    load.add_argument("--arrivals", choices=["fixed", "poisson", "gamma"], default="poisson")
    load.add_argument("--gamma-shape", type=float)
    load.add_argument("--rampup", type=float, default=0.0, help="s, for --concurrency")
    load.add_argument("--duration", type=float, default=60.0, help="s; nothing is sent after it")
    load.add_argument("--seed", type=int, default=0)
    what = parser.add_argument_group("what to send (one of the first three)")
    source = what.add_mutually_exclusive_group(required=True)
    source.add_argument("--session-file", type=Path, help="one session (a graph) per line")
    source.add_argument("--prompt", help="the same text in every request")
    source.add_argument("--prompt-tokens", type=int, help="random token ids, fresh per request")
    what.add_argument("--vocabulary", type=int, default=1000, help="token ids below this")
    what.add_argument("--requests", type=int, help="how many single-request sessions to make")
    what.add_argument("--max-tokens", type=int, default=64)
    what.add_argument("--ignore-eos", action="store_true", help="exactly --max-tokens, checked")
    what.add_argument("--body", type=json.loads, default={}, help="JSON merged into every body")
    what.add_argument("--keep-going", action="store_true", help="after a failure in a session")
    how = parser.add_argument_group("how")
    how.add_argument("--workers", type=int, default=1)
    how.add_argument("--connections", type=int, default=256, help="per worker")
    how.add_argument("--inflight-cap", type=int, default=0, help="drop what is due beyond; 0: off")
    how.add_argument("--timeout", type=float, default=600.0, help="s per request")
    how.add_argument("--drain", type=float, default=60.0, help="s after the end for what runs")
    how.add_argument("--no-affinity", action="store_true", help="do not pin to CPUs")
    how.add_argument("--output", type=Path, help="JSONL, one record per request")
    how.add_argument("--session-output", type=Path, help="JSONL, one record per session")
    return parser.parse_args(arguments)


def _fail(text: str) -> NoReturn:
    print(f"error: {text}", file=sys.stderr)
    raise SystemExit(2)


def make_target(options: argparse.Namespace) -> Target:
    """Return the endpoint that the options name; exits with status 2 if they do not."""
    parts = urlsplit(options.url)
    if parts.scheme != "http" or not parts.hostname or parts.fragment:
        _fail(f"--url is {options.url!r}; allowed: http://host:port[/path][?query]")
    path = parts.path.rstrip("/") or "/v1"
    if path.endswith("/v1"):
        path += "/chat/completions" if options.chat else "/completions"
    if parts.query:
        path += f"?{parts.query}"
    headers = {}
    if options.api_key_env is not None:
        key = os.environ.get(options.api_key_env)
        if not key:
            _fail(f"--api-key-env: {options.api_key_env} is not set in the environment")
        if not (key.isascii() and key.isprintable()):
            _fail(f"--api-key-env: {options.api_key_env} holds characters beyond printable ASCII")
        headers["Authorization"] = f"Bearer {key}"
    try:
        return Target(parts.hostname, parts.port or 80, path, headers, not options.no_stream)
    except ValueError as error:
        _fail(f"--url: {error}")


def make_sessions(options: argparse.Namespace, needed: int) -> list[Session]:
    """Return the sessions of the file, or `needed` sessions of one request each."""
    if options.session_file is not None:
        return read_sessions(options.session_file)
    count = options.requests if options.requests is not None else needed
    if options.prompt is not None:
        node = Node("0", options.prompt, options.max_tokens)
        return [Session(f"r{k}", (node,)) for k in range(count)]
    generator = named_generator(f"{options.seed}/prompts")
    ids = generator.integers(0, options.vocabulary, size=(count, options.prompt_tokens)).tolist()
    return [Session(f"r{k}", (Node("0", ids[k], options.max_tokens),)) for k in range(count)]


@dataclass(frozen=True, slots=True)
class Load:
    """What to run: the sessions, their start offsets (rate) or none (concurrency)."""

    sessions: list[Session]
    offsets_ns: list[int] | None


def make_load(options: argparse.Namespace) -> Load:
    """Make arrivals and sessions.

    Raises:
        ValueError, OSError: the options or the session file are wrong.
    """
    for name in ("duration", "timeout", "max_tokens", "workers", "connections"):
        if getattr(options, name) <= 0:
            raise ValueError(f"--{name.replace('_', '-')} must be positive")
    if options.requests is not None and options.requests < 1:
        raise ValueError("--requests must be at least 1")
    if options.rate is None:
        if options.concurrency < 1 or options.rampup < 0:
            raise ValueError("--concurrency must be at least 1 and --rampup not negative")
        if options.session_file is None and options.requests is None:
            raise ValueError("--concurrency needs --requests or --session-file")
        return Load(make_sessions(options, 0), None)
    offsets = make_offsets(
        options.arrivals,
        options.rate,
        options.duration,
        f"{options.seed}/arrivals",
        options.gamma_shape,
    ).tolist()
    sessions = make_sessions(options, len(offsets))
    count = min(len(sessions), len(offsets))
    if count == 0:
        raise ValueError("no session starts within --duration")
    return Load(sessions[:count], offsets[:count])


def check_prompts(sessions: Sequence[Session], target: Target) -> None:
    """Refuse token ids for an endpoint that takes messages.

    Raises:
        ValueError: names session and node.
    """
    for session in sessions if target.chat else ():
        for node in session.nodes:
            if not isinstance(node.prompt, str):
                raise ValueError(
                    f"session {session.id!r}, node {node.id!r}: the prompt is token ids; a chat "
                    "endpoint takes text"
                )


def run(options: argparse.Namespace, target: Target, load: Load) -> int:
    """Run, print, write; return the exit status."""
    capture = needed_capture(load.sessions)
    extra = {**({"ignore_eos": True} if options.ignore_eos else {}), **options.body}
    builder = RequestBuilder(options.model, target.chat, target.stream, capture, extra)
    server_cores = 1 if is_local(target.host) else 0
    plan = plan_affinity(read_topology(), options.workers, server_cores, not options.no_affinity)
    print("\n".join(plan.lines()), file=sys.stderr)
    generator_options = LoadGeneratorOptions(
        workers=options.workers, connections_per_worker=options.connections, cpus=plan
    )
    interrupted = False
    with LoadGenerator(target, generator_options) as generator, CollectorPause():
        generator.begin(options.inflight_cap, options.timeout, capture)
        for problem in generator.connect_errors:
            print(f"warning: {problem}", file=sys.stderr)
        origin_ns = time.monotonic_ns() + START_DELAY_NS + round(generator_options.lead_ms * 1e6)
        admission, starts_ns = make_admission(options, load, origin_ns)
        scheduler = Scheduler(load.sessions, admission, not options.keep_going)
        end_ns = origin_ns + round(options.duration * 1e9)
        session_plan = SessionPlan(load.sessions, scheduler, builder.build, end_ns, options.drain)
        progress = _ProgressLine(session_plan, scheduler, origin_ns)
        try:
            generator.drive(session_plan, progress)
        except KeyboardInterrupt:
            interrupted = True
        health = generator.end()
    progress.finish()
    assert session_plan.stop_ns is not None
    records = session_plan.records()
    window_s = max((session_plan.stop_ns - origin_ns) / 1e9, 1e-9)
    checks = verify(records, load, starts_ns, session_plan.stop_ns)
    if options.concurrency is not None:
        ramp = Ramp(options.concurrency, origin_ns, round(options.rampup * 1e9))
        checks += check_concurrency(records, len(load.sessions), ramp, session_plan.stop_ns)
    checks += check_processes(health, generator.clock)
    requests = [entry.record for entry in records]
    last_ns = max((r.t_done_ns or 0 for r in requests), default=0)
    served_s = max((last_ns - origin_ns) / 1e9, window_s)
    print_summary(requests, checks, window_s, served_s, sys.stdout)
    if options.output is not None:
        write_bytes(options.output, b"".join(map(_json_line, records)))
    if options.session_output is not None:
        lines = [msgspec.json.encode(line) + b"\n" for line in session_outcomes(records)]
        write_bytes(options.session_output, b"".join(lines))
    if interrupted:
        return 130
    if not any(entry.record.status == "ok" for entry in records):
        return 3
    return 0 if all(check.passed for check in checks) else 1


def make_admission(
    options: argparse.Namespace, load: Load, origin_ns: int
) -> tuple[Admission, list[int]]:
    """Return when sessions may start, and the planned starts (none for concurrency)."""
    if load.offsets_ns is None:
        rampup_ns = round(options.rampup * 1e9)
        return ConcurrencyAdmission(options.concurrency, origin_ns, rampup_ns), []
    starts_ns = [origin_ns + offset for offset in load.offsets_ns]
    return RateAdmission(starts_ns), starts_ns


def verify(
    records: list[SessionRecord],
    load: Load,
    starts_ns: list[int],
    stop_ns: int,
) -> list[Check]:
    """Return every check of the requests that applies whatever starts the sessions."""
    checks = check_requests([entry.record for entry in records])
    if load.offsets_ns is not None and len(load.sessions) > 1:
        checks.append(check_session_rate(records, [t for t in starts_ns if t < stop_ns]))
    if any(node.parents for session in load.sessions for node in session.nodes):
        checks += check_intra_session(records)
    return checks


def _json_line(entry: SessionRecord) -> bytes:
    fields = msgspec.structs.asdict(entry)
    record = fields.pop("record")
    return msgspec.json.encode(fields | msgspec.structs.asdict(record)) + b"\n"


class _ProgressLine:
    """A line on stderr: rewritten in a terminal, a new one every five seconds elsewhere."""

    def __init__(self, plan: SessionPlan, scheduler: Scheduler, origin_ns: int) -> None:
        self._plan = plan
        self._scheduler = scheduler
        self._origin_ns = origin_ns
        self._terminal = sys.stderr.isatty()
        self._next_s = 0.0

    def __call__(self) -> None:
        elapsed_s = (time.monotonic_ns() - self._origin_ns) / 1e9
        if elapsed_s < self._next_s:
            return
        self._next_s = elapsed_s + (0.2 if self._terminal else 5.0)
        plan = self._plan
        text = (
            f"{elapsed_s:7.1f} s  sessions {self._scheduler.started} started, "
            f"{self._scheduler.active} active  requests {len(plan.sent)} sent, "
            f"{plan.outstanding} in flight, {plan.ok} ok, {plan.failed} failed"
        )
        end = "\r" if self._terminal else "\n"
        print(text, end=end, file=sys.stderr, flush=True)

    def finish(self) -> None:
        """Leave the rewritten line standing."""
        if self._terminal:
            print(file=sys.stderr)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; return the exit status."""
    options = parse_arguments(sys.argv[1:] if arguments is None else arguments)
    target = make_target(options)
    try:
        load = make_load(options)
        needed_capture(load.sessions)
        check_prompts(load.sessions, target)
    except (ValueError, OSError) as error:
        _fail(str(error))
    try:
        return run(options, target, load)
    except LoadGeneratorError as error:
        print(f"error: {error}", file=sys.stderr)
        return 3


if __name__ == "__main__":
    raise SystemExit(main())
