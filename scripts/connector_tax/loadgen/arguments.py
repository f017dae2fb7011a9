"""Parse the command line of `connector-tax loadgen`."""

import argparse
import contextlib
import json
import math
import secrets
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from connector_tax import __version__
from connector_tax.files import parse_json
from connector_tax.foreign import is_secret
from connector_tax.loadgen.spellings import Parser
from connector_tax.loadgen.sweep import powers_of_two
from connector_tax.loadgen.trace import BLOCK

EXIT_CODES = """exit status:
  0  every check passed and at most 1% of the requests failed
  1  a check failed: the numbers are printed, but are not reliable
  2  bad arguments or session file
  3  the endpoint did not answer, no request succeeded, or the load generator could not run
  4  an output could not be written
  130, 143, 129  ended by Ctrl-C, SIGTERM or SIGHUP; requests finished by then are kept

Latencies begin at a request's due time, even if it was sent late. In a closed loop
(--concurrency) a slow server gets fewer requests, and requests of one fixed length that start
together also end together. To measure latencies under a given load, use --rate."""

# Option -> the options of which it needs one to have an effect, and its default in that case.
NEEDS: dict[str, tuple[tuple[str, ...], object]] = {
    "arrivals": (("rate",), "jittered"),
    "gamma_shape": (("arrivals",), None),
    "inflight_cap": (("rate", "session_file", "trace"), None),
    "stop_overloaded": (("inflight_cap",), False),
    "rampup": (("concurrency",), 0.0),
    "min_completed": (("max_duration", "stop_at_precision"), 0),
    "max_duration": (("min_completed",), None),
    "vocabulary": (("prompt_tokens", "trace"), 1000),
    "seed": (("rate", "prompt_tokens", "prompt_words", "trace"), None),
    "keep_going": (("session_file",), False),
    "requests": (("prompt", "prompt_tokens", "prompt_words", "prompts"), None),
    "max_tokens": (("prompt", "prompt_tokens", "prompt_words", "prompts"), 64),
    "repeat": (("prompts",), False),
    "trace_speed": (("trace",), 1.0),
    "trace_limit": (("trace",), None),
    "trace_block": (("trace",), BLOCK),
    "trace_words": (("trace",), False),
}


class _Help(argparse.RawDescriptionHelpFormatter):
    """A help formatter that shows the default of every option that has one."""

    def _get_help_string(self, action: argparse.Action) -> str:
        default = action.default
        if action.dest in NEEDS:
            default = NEEDS[action.dest][1]
        text = action.help or ""
        plain = default in (None, False, argparse.SUPPRESS, []) or not action.option_strings
        return text if plain else f"{text} [{default}]".lstrip()


def parse_arguments(arguments: Sequence[str]) -> argparse.Namespace:
    """Parse the command line; on an error print a message and exit with status 2."""
    parser = Parser(
        prog="connector-tax loadgen",
        allow_abbrev=False,
        description="Load an OpenAI-compatible endpoint; report latencies and throughput.",
        epilog=EXIT_CODES,
        formatter_class=_Help,
    )
    parser.add_argument("--version", action="version", version=__version__)
    _add_endpoint(parser)
    _add_load(parser)
    _add_requests(parser)
    _add_output(parser)
    options = parser.parse_args(arguments)
    options.rates = _rates(parser, options)
    options.rate = options.rates[0] if options.rates else None
    absent = [name for name in NEEDS if not given(options, name)]
    for name, (needed, _) in NEEDS.items():
        if name not in absent and not any(given(options, other) for other in needed):
            parser.error(
                f"{option_name(name)} has no effect without {' or '.join(map(option_name, needed))}"
            )
    drawn = options.prompt_tokens or options.prompt_words or options.trace
    if (
        options.seed is not None
        and not drawn
        and (options.rate == math.inf or options.arrivals == "fixed")
    ):
        parser.error("--seed has no effect: neither arrivals nor prompts are drawn")
    if options.rate == math.inf and options.arrivals is not None:
        parser.error("--arrivals has no effect with --rate inf")
    ends = ("duration", "min_completed", "stop_at_precision")
    used_up = ["requests", "session_file", "trace", *(() if options.repeat else ("prompts",))]
    alone = next((name for name in used_up if given(options, name)), None)
    if options.cooldown and alone and not any(given(options, end) for end in ends):
        parser.error(
            f"--cooldown has no effect when only {option_name(alone)} ends the run: no load is left"
        )
    if options.vocabulary is not None and options.trace and (options.chat or options.trace_words):
        parser.error("--vocabulary has no effect where a trace is sent as words")
    if (options.inflight_cap or math.inf) < (options.concurrency or 0):
        parser.error(
            f"--inflight-cap: found {options.inflight_cap}; allowed: at least --concurrency"
            f" ({options.concurrency})"
        )
    if options.requests and options.warmup:
        parser.error(
            "--requests counts every sent request, also those of the warm-up; with --warmup use"
            " --duration, or --min-completed and --max-duration"
        )
    for name in absent:
        setattr(options, name, NEEDS[name][1])
    if options.no_stream:
        _refuse_token_times(parser, options)
    if options.seed is None:
        options.seed = secrets.randbits(31)
    return options


def _refuse_token_times(parser: argparse.ArgumentParser, options: argparse.Namespace) -> None:
    """Reject options that need token times when responses are not streamed (--no-stream)."""
    timed = [name for name, _ in options.goodput if name != "E2E"]
    if timed:
        parser.error(f"--goodput {timed[0].lower()}: a whole response (--no-stream) has only E2E")
    if options.stop_at_precision is not None:
        parser.error(
            "--stop-at-precision needs TTFT and TPOT; a whole response (--no-stream) has neither"
        )


def _rates(parser: Parser, options: argparse.Namespace) -> list[float]:
    """Return the rates in ascending order; exit with an error if options forbid several."""
    rates: list[float] = sorted(options.sweep or options.rate or [])
    if len(rates) < 2:
        return rates
    if len({*rates}) < len(rates) or math.inf in rates:
        parser.error("--rate is given several times; allowed: different rates, none of them inf")
    for name in ("session_file", "session_output", "prompts"):
        if given(options, name):
            parser.error(f"{option_name(name)} is not valid with several rates")
    return rates


def shown_command(words: Sequence[str]) -> str:
    """Return the command line quoted for a shell, without header values and URL queries."""
    shown, before = ["connector-tax", "loadgen"], ""
    for word in words:
        option, equals, value = word.partition("=") if word.startswith("--") else (before, "", word)
        if option == "--header" and value:
            value = f"{value.partition(':')[0]}: ..."
        if option == "--url" and "?" in value:
            value = f"{value.partition('?')[0]}?..."
        if option == "--body":
            with contextlib.suppress(ValueError):
                if (shown_body := without_secrets(parse_json(value))) != parse_json(value):
                    value = json.dumps(shown_body)
        shown.append(f"{option}={value}" if equals else value if option == before else word)
        before = "" if equals or not word.startswith("--") else word
    return shlex.join(shown)


def without_secrets(value: Any, name: str = "") -> Any:
    """Return a JSON value with every plausible secret replaced."""
    if isinstance(value, dict):
        return {key: without_secrets(of, key) for key, of in value.items()}
    if isinstance(value, list):
        return [without_secrets(of, name) for of in value]
    return "(not shown)" if is_secret(name, value) else value


def given(options: argparse.Namespace, name: str) -> bool:
    value = getattr(options, name)
    return value is not None and value is not False


def option_name(name: str) -> str:
    return "--" + name.replace("_", "-")


def latency_limit(text: str) -> tuple[str, float]:
    name, _, limit = text.partition(":")
    if name.upper() not in ("TTFT", "TTFA", "TPOT", "E2E") or not 0 < float(limit) < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r}; allowed: ttft:MS, ttfa:MS, tpot:MS or e2e:MS")
    return name.upper(), float(limit)


def share_of_one(text: str) -> float:
    share = float(text.removesuffix("%")) / (100 if text.endswith("%") else 1)
    if not 0 < share < 1:
        raise argparse.ArgumentTypeError(f"{text!r}; allowed: between 0 and 100%")
    return share


def sweep(text: str) -> list[float]:
    lowest, _, highest = text.partition(":")
    try:
        return powers_of_two(float(lowest), float(highest))
    except ValueError as error:
        raise argparse.ArgumentTypeError(
            f"{text!r}: {error}; allowed: LOWEST:HIGHEST, requests/s"
        ) from None


def percentiles(text: str) -> list[float]:
    percents = sorted({float(part) for part in text.split(",")})
    if not all(0 < percent < 100 for percent in percents):
        raise argparse.ArgumentTypeError(f"{text!r}; allowed: numbers between 0 and 100")
    return percents


def json_object(text: str) -> dict[str, Any]:
    try:
        parse_json(text)  # no key twice
        return msgspec.json.decode(text, type=dict[str, Any])  # no NaN
    except ValueError as error:  # a DecodeError is a ValueError
        raise argparse.ArgumentTypeError(f"{text!r}: {error}; allowed: a JSON object") from None


def _add_endpoint(parser: argparse.ArgumentParser) -> None:
    where = parser.add_argument_group("endpoint")
    add = where.add_argument
    urls = "http[s]://host[:port], a base URL that ends in /v1, or the full URL to POST to"
    add("--url", required=True, help=urls)
    add("--chat", action="store_true", help="use /v1/chat/completions instead of /v1/completions")
    add("--model", help="model to request [the only one in /v1/models]")
    header = "header to send; may be repeated"
    add("--header", action="append", default=[], metavar="'NAME: VALUE'", help=header)
    add("--api-key-env", metavar="NAME", help="environment variable with the key")
    name = "header that sends the key, such as api-key [Authorization, as a bearer token]"
    add("--api-key-header", metavar="NAME", help=name)
    # The two options of a pair exclude each other.
    add = where.add_mutually_exclusive_group().add_argument
    add("--ca-file", type=Path, help="PEM certificates to trust instead of the system's")
    add("--insecure", action="store_true", help="trust any certificate")
    add = where.add_mutually_exclusive_group().add_argument
    add("--wait", type=float, default=10.0, help="seconds to wait for the endpoint")
    add("--no-ready-check", action="store_true", help="do not wait for the endpoint; needs --model")
    add = where.add_mutually_exclusive_group().add_argument
    add("--no-stream", action="store_true", help="request whole responses")
    more = "another finish reason that counts as success; may be repeated"
    where.add_argument("--finish-reason", action="append", default=[], metavar="NAME", help=more)
    add("--no-usage", action="store_true", help="count tokens by events, not by usage")


def _add_load(parser: argparse.ArgumentParser) -> None:
    load = parser.add_argument_group("load (--rate, --concurrency, or a file with start times)")
    kind = load.add_mutually_exclusive_group()
    open_loop = "sessions per second (open loop), inf for all at once; may be repeated for a sweep"
    kind.add_argument("--rate", type=float, action="append", help=open_loop)
    doubled = "run rates 1, 2, 4, ..., up to the first that saturates the server"
    kind.add_argument("--sweep", type=sweep, metavar="1:32", help=doubled)
    kind.add_argument("--concurrency", type=int, help="sessions to keep active (closed loop)")
    add = load.add_argument
    add("--requests", type=int, help="end once this many requests were sent and finished")
    add(
        "--duration",
        type=float,
        help="measured seconds [60, or until a file or --requests is used up]",
    )
    add(
        "--arrivals",
        choices=["fixed", "jittered", "poisson", "gamma"],
        help="arrival process of --rate",
    )
    add("--gamma-shape", type=float, help="shape of --arrivals gamma (cv is 1/sqrt(shape))")
    add("--rampup", type=float, help="seconds until all of --concurrency run; at least 0.2 ms each")
    add("--warmup", type=float, default=0.0, help="seconds of load before measuring")
    add("--min-completed", type=int, help="continue measuring until this many requests succeeded")
    add("--max-duration", type=float, help="longest wait for --min-completed in seconds")
    narrow = "end early once TTFT and TPOT p90 are known to ± this share of their value"
    add("--stop-at-precision", type=share_of_one, metavar="5%", help=narrow)
    add("--stop-overloaded", action="store_true", help="end when --inflight-cap is reached")
    add("--max-errors", type=int, help="end after this many failed requests")
    goes_on = "keep sending, unmeasured, until all measured requests are answered"
    add("--cooldown", action="store_true", help=goes_on)
    again = (
        "seed of arrivals and prompts [random, printed]; a server's prefix cache may still have the"
        " prompts of an earlier run with the same seed"
    )
    add("--seed", type=int, help=again)


def _add_requests(parser: argparse.ArgumentParser) -> None:
    what = parser.add_argument_group("requests to send (give one of the first six)")
    source = what.add_mutually_exclusive_group(required=True)
    source.add_argument(
        "--session-file", type=Path, help="JSONL, one session (a graph of requests) per line"
    )
    source.add_argument("--prompt", help="send this text in every request")
    source.add_argument("--prompt-words", type=int, help="random words, new in every request")
    source.add_argument("--prompt-tokens", type=int, help="random token ids, new in every request")
    mooncake = "send a trace (Mooncake format) with its times, lengths and shared prefixes"
    source.add_argument("--trace", type=Path, metavar="FILE", help=mooncake)
    lines = "JSONL with prompt or messages, and max_tokens; each line is sent once"
    source.add_argument("--prompts", type=Path, metavar="FILE", help=lines)
    add = what.add_argument
    add("--repeat", action="store_true", help="start --prompts again after its last line")
    add("--trace-speed", type=float, help="speed of the trace; 2 is twice as fast")
    add("--trace-limit", type=int, metavar="N", help="send only the trace's first N requests")
    add("--trace-block", type=int, help="prompt tokens per hash id")
    add(
        "--trace-words", action="store_true", help="send words instead of token ids, as with --chat"
    )
    add("--vocabulary", type=int, help="draw token ids below this number")
    add("--max-tokens", type=int, help="largest number of tokens in each answer")
    add("--ignore-eos", action="store_true", help="generate exactly --max-tokens; checked by usage")
    merged = "JSON merged into every body; null removes a key"
    add("--body", type=json_object, default={}, help=merged)
    add("--keep-going", action="store_true", help="continue a session after a failed request")


def _add_output(parser: argparse.ArgumentParser) -> None:
    how = parser.add_argument_group("sending and output")
    add = how.add_argument
    add("--workers", type=int, default=1, help="number of processes that send requests")
    add("--connections", type=int, help="largest number per worker [4096, or less by ulimit -n]")
    add("--inflight-cap", type=int, help="drop due requests while this many are in flight")
    add("--timeout", type=float, default=600.0, help="seconds per request")
    add("--drain", type=float, default=60.0, help="seconds to wait for running requests at the end")
    add("--no-affinity", action="store_true", help="do not pin processes to CPUs")
    keep = "report requests within all of these limits, in ms"
    add("--goodput", type=latency_limit, nargs="+", default=[], metavar="ttft:200", help=keep)
    add(
        "--percentiles",
        type=percentiles,
        default="50,90,95,99",
        help="percentiles of every latency",
    )
    add("--html", type=Path, help="write a page with curves, checks and the command")
    add("--csv", type=Path, help="write the table of latencies, one row each")
    add("--summary", type=Path, help="write configuration, checks and percentiles as JSON")
    add("--output", type=Path, help="write a JSONL record when a request ends (- is stdout)")
    add("--session-output", type=Path, help="write a JSONL record per session")
