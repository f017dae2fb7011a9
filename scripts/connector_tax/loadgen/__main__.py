"""Stand-alone load generator: `python -m connector_tax.loadgen --help`."""

import argparse
import contextlib
import itertools
import math
import os
import resource
import secrets
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from types import FrameType
from typing import Any
from urllib.parse import urlsplit

import msgspec
import numpy as np
from numpy.typing import NDArray

from connector_tax.artifacts.study_records import MOST_WORKERS
from connector_tax.files import (
    is_stdout,
    open_closed_streams,
    standard_stream,
    write_bytes,
    write_json,
)
from connector_tax.loadgen.affinity import plan_affinity, read_topology
from connector_tax.loadgen.endpoint import is_local, wait_ready
from connector_tax.loadgen.generator import (
    OTHER_FILES,
    Interrupted,
    LoadGenerator,
    LoadGeneratorOptions,
)
from connector_tax.loadgen.http import read_clocks, tls_context
from connector_tax.loadgen.messages import LoadGeneratorError, Target, TlsSettings
from connector_tax.loadgen.plan import CellRule, PrecisionRule
from connector_tax.loadgen.sessions import (
    LONGEST_S,
    Build,
    Node,
    Session,
    Sessions,
    Singles,
    needed_capture,
    random_tokens,
    random_words,
    read_sessions,
    session_bodies,
)
from connector_tax.loadgen.summary import (
    RecordSink,
    print_summary,
    session_outcomes,
    summarise,
    verify,
)
from connector_tax.loadgen.traffic import Load, make_offsets

# ---- the command line

EXIT_CODES = """exit status:
  0  every check passed and at most 1% of the requests failed
  1  a check failed: the numbers are printed, but do not believe them
  2  bad arguments or session file
  3  the endpoint did not answer, no request succeeded, or the load generator could not run
  4  an output could not be written
  130, 143, 129  ended by Ctrl-C, SIGTERM or SIGHUP; what had ended until then is kept

Times of requests begin at their due time, also where they were sent late. In closed loop
(--concurrency) a slow server is asked less often, and requests of one fixed length that start
together end together and stay in step: for latencies under a given load use --rate."""

# Option -> what it has no effect without (one of these), and its default where it has an effect.
NEEDS: dict[str, tuple[tuple[str, ...], object]] = {
    "arrivals": (("rate",), "jittered"),
    "gamma_shape": (("arrivals",), None),
    "inflight_cap": (("rate", "session_file"), None),
    "stop_overloaded": (("inflight_cap",), False),
    "rampup": (("concurrency",), 0.0),
    "min_completed": (("max_duration", "stop_at_precision"), 0),
    "max_duration": (("min_completed",), None),
    "vocabulary": (("prompt_tokens",), 1000),
    "seed": (("rate", "prompt_tokens", "prompt_words"), 0),
    "keep_going": (("session_file",), False),
    "requests": (("prompt", "prompt_tokens", "prompt_words"), None),
    "max_tokens": (("prompt", "prompt_tokens", "prompt_words"), 64),
}


class _Help(argparse.RawDescriptionHelpFormatter):
    """Shows the default of every option that has one."""

    def _get_help_string(self, action: argparse.Action) -> str:
        default = action.default
        if action.dest in NEEDS:
            default = NEEDS[action.dest][1]
        text = action.help or ""
        plain = default in (None, False, argparse.SUPPRESS, []) or not action.option_strings
        return text if plain else f"{text} [{default}]".lstrip()


def parse_arguments(arguments: Sequence[str]) -> argparse.Namespace:
    """Parse the command line; exits with status 2 and a message if it is wrong."""
    parser = argparse.ArgumentParser(
        prog="connector-tax loadgen",
        description="Send requests to an OpenAI-compatible endpoint; report when everything came.",
        epilog=EXIT_CODES,
        formatter_class=_Help,
    )
    parser.add_argument("--version", action="version", version=version("connector-tax"))
    _add_endpoint(parser)
    _add_load(parser)
    _add_requests(parser)
    _add_output(parser)
    options = parser.parse_args(arguments)
    absent = [name for name in NEEDS if not _given(options, name)]
    for name, (needed, _) in NEEDS.items():
        if name not in absent and not any(_given(options, other) for other in needed):
            parser.error(
                f"{_option(name)} has no effect without {' or '.join(map(_option, needed))}"
            )
    drawn = options.prompt_tokens or options.prompt_words
    if (
        options.seed is not None
        and not drawn
        and (options.rate == math.inf or options.arrivals == "fixed")
    ):
        parser.error("--seed has no effect: neither arrivals nor prompts are drawn")
    if options.rate == math.inf and options.arrivals is not None:
        parser.error("--arrivals has no effect with --rate inf")
    ends = ("duration", "min_completed", "stop_at_precision")
    if options.cooldown and options.requests and not any(_given(options, end) for end in ends):
        parser.error("--cooldown has no effect where only --requests end the run: no load is left")
    for name in absent:
        setattr(options, name, NEEDS[name][1])
    return options


def _given(options: argparse.Namespace, name: str) -> bool:
    value = getattr(options, name)
    return value is not None and value is not False


def _option(name: str) -> str:
    return "--" + name.replace("_", "-")


def latency_limit(text: str) -> tuple[str, float]:
    name, _, limit = text.partition(":")
    if name.upper() not in ("TTFT", "TTFA", "TPOT", "E2E") or not 0 < float(limit) < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r}; allowed: ttft, ttfa, tpot or e2e, :, ms")
    return name.upper(), float(limit)


def share_of_one(text: str) -> float:
    share = float(text.removesuffix("%")) / (100 if text.endswith("%") else 1)
    if not 0 < share < 1:
        raise argparse.ArgumentTypeError(f"{text!r}; allowed: between 0 and 100%")
    return share


def json_object(text: str) -> dict[str, Any]:
    # Unlike json's, msgspec's JSON has no NaN.
    try:
        return msgspec.json.decode(text, type=dict[str, Any])
    except msgspec.DecodeError as error:
        raise argparse.ArgumentTypeError(f"{text!r}: {error}; allowed: a JSON object") from None


def _add_endpoint(parser: argparse.ArgumentParser) -> None:
    where = parser.add_argument_group("endpoint")
    add = where.add_argument
    urls = "http[s]://host[:port], a base that ends in /v1, or a path to POST to"
    add("--url", required=True, help=urls)
    add("--chat", action="store_true", help="/v1/chat/completions, not completions")
    add("--model", help="default: the one that /v1/models names")
    add("--header", action="append", default=[], metavar="'NAME: VALUE'", help="may be repeated")
    add("--api-key-env", metavar="NAME", help="variable that holds the bearer token")
    # Of a pair, each makes the other one void.
    add = where.add_mutually_exclusive_group().add_argument
    add("--ca-file", type=Path, help="PEM certificates to trust instead of the system's")
    add("--insecure", action="store_true", help="trust any certificate")
    add = where.add_mutually_exclusive_group().add_argument
    add("--wait", type=float, default=10.0, help="s for the endpoint to answer before the run")
    add("--no-ready-check", action="store_true", help="do not ask it; needs --model")
    add = where.add_mutually_exclusive_group().add_argument
    add("--no-stream", action="store_true", help="ask for whole responses")
    add("--no-usage", action="store_true", help="do not ask for token usage; events are counted")


def _add_load(parser: argparse.ArgumentParser) -> None:
    load = parser.add_argument_group(
        "load (--rate, --concurrency, or a session file with start times)"
    )
    kind = load.add_mutually_exclusive_group()
    kind.add_argument("--rate", type=float, help="sessions a second, open loop; inf: all at once")
    kind.add_argument("--concurrency", type=int, help="sessions kept active, closed loop")
    add = load.add_argument
    add("--requests", type=int, help="end when so many have been sent and have ended")
    add("--duration", type=float, help="s that are measured [60, or until --requests are done]")
    add("--arrivals", choices=["fixed", "jittered", "poisson", "gamma"], help="for --rate")
    add("--gamma-shape", type=float, help="1/shape is the squared variation; for --arrivals gamma")
    add("--rampup", type=float, help="s until all of --concurrency run; 0.2 ms each at least")
    add("--warmup", type=float, default=0.0, help="s of load before what is measured")
    add("--min-completed", type=int, help="measure on until so many have succeeded")
    add("--max-duration", type=float, help="s, the most that --min-completed may take")
    narrow = "end before --duration, when the intervals of TTFT and TPOT p90 are as narrow (half)"
    add("--stop-at-precision", type=share_of_one, metavar="5%", help=narrow)
    add("--stop-overloaded", action="store_true", help="end when --inflight-cap is reached")
    add("--max-errors", type=int, help="end when so many requests have failed")
    goes_on = "load goes on, unmeasured, until what was measured is answered"
    add("--cooldown", action="store_true", help=goes_on)
    add("--seed", type=int, help="of arrivals and prompts")


def _add_requests(parser: argparse.ArgumentParser) -> None:
    what = parser.add_argument_group("what to send (one of the first four)")
    source = what.add_mutually_exclusive_group(required=True)
    source.add_argument("--session-file", type=Path, help="one session (a graph) per line")
    source.add_argument("--prompt", help="the same text in every request")
    source.add_argument("--prompt-words", type=int, help="random words, fresh per request")
    source.add_argument("--prompt-tokens", type=int, help="random token ids, fresh per request")
    add = what.add_argument
    add("--vocabulary", type=int, help="token ids below this")
    add("--max-tokens", type=int, help="of each answer")
    add("--ignore-eos", action="store_true", help="exactly --max-tokens; checked by the usage")
    add("--body", type=json_object, default={}, help="JSON merged into every body")
    add("--keep-going", action="store_true", help="after a failure in a session")


def _add_output(parser: argparse.ArgumentParser) -> None:
    how = parser.add_argument_group("how")
    add = how.add_argument
    add("--workers", type=int, default=1, help="processes that send")
    add("--connections", type=int, help="the most of a worker [4096, or what open files allow]")
    add("--inflight-cap", type=int, help="drop what is due beyond")
    add("--timeout", type=float, default=600.0, help="s per request")
    add("--drain", type=float, default=60.0, help="s after the end for what runs")
    add("--no-affinity", action="store_true", help="do not pin to CPUs")
    keep = "ms: how many requests keep all of these"
    add("--goodput", type=latency_limit, nargs="+", default=[], metavar="ttft:200", help=keep)
    add("--summary", type=Path, help="JSON: configuration, checks, percentiles with intervals")
    add("--output", type=Path, help="JSONL, a record per request, as they end (- is stdout)")
    add("--session-output", type=Path, help="JSONL, one record per session")


# ---- what the options say

MOST_SESSIONS = 10**8
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
    elif options.chat and not path.endswith("/chat/completions"):
        raise ValueError(f"--chat has no effect: --url names the path {path} to POST to")
    if parts.username is not None:
        raise ValueError("--url holds a user name; give it with --header 'Authorization: ...'")
    if parts.query:
        path += f"?{parts.query}"
    tls = None
    if parts.scheme == "https":
        ca_file = None if options.ca_file is None else str(options.ca_file)
        tls = TlsSettings(parts.hostname, ca_file, options.insecure)
        try:
            tls_context(tls)
        except OSError as error:
            raise ValueError(f"--ca-file {ca_file}: {error}") from None
    elif options.ca_file is not None or options.insecure:
        raise ValueError("--ca-file and --insecure need an https URL")
    if options.no_ready_check and options.model is None:
        raise ValueError("--no-ready-check needs --model")
    headers = _headers(options)
    try:
        return Target(
            host=parts.hostname,
            port=parts.port or (80 if tls is None else 443),
            path=path,
            headers=headers,
            stream=not options.no_stream,
            tls=tls,
        )
    except ValueError as error:
        raise ValueError(f"--url or --header: {error}") from None


def _headers(options: argparse.Namespace) -> dict[str, str]:
    headers: dict[str, str] = {}
    for line in options.header:
        name, colon, value = line.partition(":")
        name = name.strip()
        if not colon:
            raise ValueError(f"{name!r} is no header; write 'Name: value'")
        if name.lower() in map(str.lower, headers):
            raise ValueError(f"--header: found {name} twice; allowed: once")
        headers[name] = value.strip()
    if options.api_key_env is not None:
        if "authorization" in map(str.lower, headers):
            raise ValueError("--api-key-env has no effect beside --header 'Authorization: ...'")
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
    for name in ("max_tokens", "workers", "connections", "requests", "concurrency", "rate",
                 "max_errors", "inflight_cap", "prompt_tokens", "prompt_words",
                 "vocabulary"):  # fmt: skip
        value = getattr(options, name)
        if value is not None and not value > 0:
            raise ValueError(f"{_option(name)}: found {value}; allowed: above 0")
    for name in ("warmup", "drain", "rampup", "wait"):
        value = getattr(options, name)
        if not 0 <= value <= LONGEST_S:
            raise ValueError(f"{_option(name)}: found {value}; allowed: 0 to {LONGEST_S:g} s")
    for name in ("duration", "max_duration", "timeout"):
        value = getattr(options, name)
        if value is not None and not 0 < value <= LONGEST_S:
            raise ValueError(
                f"{_option(name)}: found {value}; allowed: above 0, to {LONGEST_S:g} s"
            )
    if options.min_completed < 0:
        raise ValueError(f"--min-completed: found {options.min_completed}; allowed: at least 0")
    if options.workers > MOST_WORKERS:
        raise ValueError(f"--workers: found {options.workers}; allowed: up to {MOST_WORKERS}")
    floor_s, longest_s = options.duration, options.max_duration
    if floor_s is None:
        floor_s = 60.0 if options.requests is None else LONGEST_S
        floor_s = min(floor_s, longest_s or LONGEST_S)
    if longest_s is None:
        longest_s = floor_s
    if longest_s < floor_s:
        raise ValueError("--max-duration must not be below --duration")
    if options.rampup > options.warmup + longest_s:
        raise ValueError(
            f"--rampup: found {options.rampup:g}; allowed: up to {options.warmup + longest_s:g} s,"
            " --warmup and the longest run: else --concurrency is never reached"
        )
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


def make_load(options: argparse.Namespace, target: Target, rule: CellRule) -> Load:
    """Make arrivals, sessions and what makes their bodies.

    Raises:
        ValueError, OSError: the options or the session file are wrong.
    """
    graphs: list[Session] = []
    if options.session_file is not None:
        graphs = read_sessions(options.session_file)
        _check_prompts(graphs, target)
    starts_s = [session.start_s for session in graphs if session.start_s is not None]
    if sum((options.rate is not None, options.concurrency is not None, bool(starts_s))) != 1:
        raise ValueError("one of --rate, --concurrency and start_s in --session-file is needed")
    count = len(graphs) or options.requests
    offsets: NDArray[np.int64] | None = None
    if options.rate is not None:
        offsets = _offsets(options, rule, count)
        count = len(offsets)
    elif starts_s:
        if len(starts_s) < len(graphs):
            raise ValueError(f"{options.session_file}: start_s stands in some sessions only")
        graphs.sort(key=lambda session: session.start_s or 0.0)
        offsets = np.rint(np.sort(starts_s) * 1e9).astype(np.int64)
    sessions: Sessions = graphs[:count]
    if not graphs:
        node = Node("0", options.prompt or "", options.max_tokens)
        sessions = Singles(MANY if count is None else count, node)
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
    wanted = min(options.rate * rule.schedule_s, math.inf if count is None else count)
    if math.isinf(wanted):
        raise ValueError("--rate inf needs --requests or --session-file")
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


def _bodies(options: argparse.Namespace, target: Target, sessions: Sessions) -> Build:
    """What makes the body of each request."""
    common: dict[str, Any] = {"model": options.model, "stream": target.stream}
    if target.stream and not options.no_usage:
        common["stream_options"] = {"include_usage": True}
    if needed_capture(sessions) == "token_ids":
        common["return_token_ids"] = True
    run_id = secrets.token_hex(4)  # of this run alone, so that a server's log can tell runs apart
    extra = {**({"ignore_eos": True} if options.ignore_eos else {}), **options.body}
    if options.vocabulary is not None and options.vocabulary > 2**31:
        raise ValueError(f"--vocabulary: found {options.vocabulary}; allowed: up to 2^31")
    made = "messages" if target.chat else "prompt"
    if made in options.body:
        raise ValueError(
            f"--body: found {made!r}; allowed: any other key, since each request has its own"
        )
    fresh: Callable[[], str | list[int]] | None = None
    stream = f"{options.seed}/prompts"
    if options.prompt_words is not None:
        fresh = random_words(stream, options.prompt_words)
    elif options.prompt_tokens is not None:
        if target.chat:
            raise ValueError(
                "--prompt-tokens makes ids; a chat endpoint takes text: --prompt-words"
            )
        fresh = random_tokens(stream, options.prompt_tokens, 0, options.vocabulary)
    return session_bodies(sessions, run_id, common, target.chat, extra, fresh)


def _check_prompts(sessions: Sequence[Session], target: Target) -> None:
    for session in sessions if target.chat else ():
        for node in session.nodes:
            if not isinstance(node.prompt, str):
                raise ValueError(
                    f"session {session.id!r}, node {node.id!r}: the prompt is token ids; a chat "
                    "endpoint takes text"
                )


# ---- the run

COHORTS = (
    "closed loop with fixed lengths: requests that start together end together and stay in step, "
    "so latencies are those of a server that gets its work in waves"
)
OUTPUTS = ("summary", "output", "session_output")


class _Signals:
    """Ctrl-C, SIGTERM and SIGHUP end a run in order; before one and after it, the command."""

    def __init__(self) -> None:
        self.generator: LoadGenerator | None = None
        self.received: int | None = None

    def __call__(self, number: int, _frame: FrameType | None) -> None:
        self.received = number
        if self.generator is None or not self.generator.interrupt():
            raise KeyboardInterrupt

    @contextlib.contextmanager
    def handled(self) -> Iterator[None]:
        """Handle the signals that this process was not started to ignore."""
        numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
        before = {number: signal.getsignal(number) for number in numbers}
        for number, handler in before.items():
            if handler is not signal.SIG_IGN:
                signal.signal(number, self)
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)


def run(
    options: argparse.Namespace, target: Target, load: Load, rule: CellRule, signals: _Signals
) -> int:
    """Run, print, write; return the exit status."""
    server_cores = 1 if is_local(target.host) else 0
    plan = plan_affinity(read_topology(), options.workers, server_cores, not options.no_affinity)
    print("\n".join(plan.lines()), file=sys.stderr)
    generator_options = LoadGeneratorOptions(
        workers=options.workers, connections_per_worker=options.connections, cpus=plan
    )
    target_width = options.stop_at_precision
    precision = None if target_width is None else PrecisionRule(target_width)
    with LoadGenerator(target, generator_options) as generator:
        sink = RecordSink(options.output)
        signals.generator = generator
        clocks = [read_clocks()]
        try:
            result = generator.run(load, rule, sink.progress, precision, on_record=sink.take)
        except Interrupted as stop:
            result = stop.result
        clocks.append(read_clocks())
        sink.close()
    for problem in result.health["connect_errors"]:
        print(f"warning: {problem}", file=sys.stderr)
    checks = verify(result, load)
    # By this the stamps can be joined to a server's log.
    offsets_ns = [wall_ns - monotonic_ns for monotonic_ns, wall_ns in clocks]
    begun = datetime.fromtimestamp((result.t_origin_ns + offsets_ns[0]) / 1e9, UTC)
    times = {
        "started_utc": begun.isoformat(timespec="microseconds"),
        "utc_minus_monotonic_ns": dict(zip(("begin", "end"), offsets_ns, strict=True)),
    }
    summary = _about(options, target) | times
    summary |= summarise(result, checks, sink.itl_ms, options.goodput)
    if precision is not None:
        count, width = precision.seen
        known = f"known to ±{width:.1%}" if math.isfinite(width) else "not known yet"
        known = f"TTFT and TPOT p90 of {count} successes are {known}"
        summary["notes"].append(f"{known}; asked for ±{precision.target:.1%}")
    to_stdout = any(is_stdout(getattr(options, name)) for name in OUTPUTS)
    lost = sink.problem is not None
    try:
        print_summary(summary, sys.stderr if to_stdout else sys.stdout)
        sys.stdout.flush()
    except (BrokenPipeError, SystemExit):  # nobody reads on, where rich would end the process
        lost |= to_stdout
    except OSError as error:
        lost = True
        print(f"error: standard output: {error.strerror}", file=sys.stderr)
    try:
        if options.summary is not None:
            write_json(options.summary, summary)
        if options.session_output is not None:
            lines = map(msgspec.json.encode, session_outcomes(result.requests))
            write_bytes(options.session_output, b"".join(line + b"\n" for line in lines))
    except OSError as error:
        lost = True
        print(f"error: {error.filename}: {error.strerror}", file=sys.stderr)
    if signals.received is not None:
        return 128 + signals.received
    if lost:
        return 4
    if not summary["ok"]:
        return 3
    return 0 if all(check["pass"] for check in checks.values()) else 1


def _about(options: argparse.Namespace, target: Target) -> dict[str, Any]:
    """What was asked for, by whom; header values are left out."""
    configuration = {
        name: str(value) if isinstance(value, Path) else value
        for name, value in vars(options).items()
    }
    configuration["header"] = sorted(target.headers)
    # A query may hold a key.
    configuration["url"] = options.url.partition("?")[0]
    if options.rate is not None:
        configuration["rate"] = options.rate if options.rate < 1e300 else "inf"
    fixed = options.ignore_eos or options.body.get("ignore_eos")
    return {
        "version": version("connector-tax"),
        "configuration": configuration,
        "notes": [COHORTS] if options.concurrency is not None and fixed else [],
    }


def _check_outputs(options: argparse.Namespace) -> None:
    """Refuse outputs that cannot be written before anything is sent; raises ValueError."""
    paths = [path for name in OUTPUTS if (path := getattr(options, name)) is not None]
    for first, second in itertools.combinations(paths, 2):
        if first.resolve() == second.resolve() and not first.is_char_device():
            raise ValueError(f"{first}: found it for two outputs; allowed: one")
    for path in paths:
        if standard_stream(path) is not None:
            continue
        place = path if path.exists() else path.resolve().parent
        if path.is_dir() or not os.access(place, os.W_OK):
            where = "the folder" if place != path else "it"
            raise ValueError(f"{path}: {where} cannot be written to")


def main(arguments: Sequence[str] | None = None) -> int:
    open_closed_streams()
    options = parse_arguments(sys.argv[1:] if arguments is None else arguments)
    try:
        target, rule = make_target(options), make_rule(options)
        options.connections = most_connections(options)
        # Before anything is asked of the endpoint, so that bad arguments are seen at once.
        make_load(options, target, rule)
        _check_outputs(options)
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        raise SystemExit(2) from None
    signals = _Signals()
    try:
        with signals.handled():
            if not options.no_ready_check:
                options.model = wait_ready(target, options.model, options.wait)
            return run(options, target, make_load(options, target, rule), rule, signals)
    except KeyboardInterrupt:
        print("interrupted before anything was measured", file=sys.stderr)
        return 128 + (signals.received or signal.SIGINT)
    except (LoadGeneratorError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 3


if __name__ == "__main__":
    raise SystemExit(main())
