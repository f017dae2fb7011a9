"""The command line of `connector-tax loadgen`: its options, and which need which."""

import argparse
import math
import secrets
import shlex
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import msgspec

from connector_tax.loadgen.spellings import Parser
from connector_tax.loadgen.sweep import powers_of_two
from connector_tax.loadgen.trace import BLOCK

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
    parser = Parser(
        prog="connector-tax loadgen",
        allow_abbrev=False,
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
    if options.cooldown and options.requests and not any(given(options, end) for end in ends):
        parser.error("--cooldown has no effect when --requests alone ends the run: no load is left")
    if options.requests and options.warmup:
        parser.error(
            "--requests counts what is sent, warm-up and all; with --warmup: --duration, or "
            "--min-completed and --max-duration"
        )
    for name in absent:
        setattr(options, name, NEEDS[name][1])
    if options.no_stream:
        _refuse_token_times(parser, options)
    if options.seed is None:
        options.seed = secrets.randbits(31)
    return options


def _refuse_token_times(parser: argparse.ArgumentParser, options: argparse.Namespace) -> None:
    """Refuse what needs the times of tokens, which a whole response does not have."""
    timed = [name for name, _ in options.goodput if name != "E2E"]
    if timed:
        parser.error(f"--goodput {timed[0].lower()}: a whole response (--no-stream) has E2E alone")
    if options.stop_at_precision is not None:
        parser.error(
            "--stop-at-precision needs TTFT and TPOT, which a whole response does not have"
        )


def _rates(parser: Parser, options: argparse.Namespace) -> list[float]:
    """Return the rates in the order of their runs, ascending; exits if they cannot follow."""
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
    """Return the command line as a shell takes it, without values of headers and queries."""
    shown, before = ["connector-tax", "loadgen"], ""
    for word in words:
        option, equals, value = word.partition("=") if word.startswith("--") else (before, "", word)
        if option == "--header" and value:
            value = f"{value.partition(':')[0]}: ..."
        if option == "--url" and "?" in value:
            value = f"{value.partition('?')[0]}?..."
        shown.append(f"{option}={value}" if equals else value if option == before else word)
        before = "" if equals or not word.startswith("--") else word
    return shlex.join(shown)


def given(options: argparse.Namespace, name: str) -> bool:
    value = getattr(options, name)
    return value is not None and value is not False


def option_name(name: str) -> str:
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
    more = "further finish reason that counts as success; may be repeated"
    where.add_argument("--finish-reason", action="append", default=[], metavar="NAME", help=more)
    add("--no-usage", action="store_true", help="do not ask for token usage; events are counted")


def _add_load(parser: argparse.ArgumentParser) -> None:
    load = parser.add_argument_group("load (--rate, --concurrency, or a file with start times)")
    kind = load.add_mutually_exclusive_group()
    open_loop = "sessions a second, open loop; inf: all at once; several: one after the other"
    kind.add_argument("--rate", type=float, action="append", help=open_loop)
    doubled = "rates 1, 2, 4, ..., until one is too much for the server"
    kind.add_argument("--sweep", type=sweep, metavar="1:32", help=doubled)
    kind.add_argument("--concurrency", type=int, help="sessions kept active, closed loop")
    add = load.add_argument
    add("--requests", type=int, help="end after this many requests were sent and finished")
    add(
        "--duration",
        type=float,
        help="s that are measured [60, or until a file or --requests end]",
    )
    add("--arrivals", choices=["fixed", "jittered", "poisson", "gamma"], help="for --rate")
    add("--gamma-shape", type=float, help="1/shape is the squared variation; for --arrivals gamma")
    add("--rampup", type=float, help="s until all of --concurrency run; 0.2 ms each at least")
    add("--warmup", type=float, default=0.0, help="s of load before the measurement")
    add("--min-completed", type=int, help="continue measuring until this many requests succeeded")
    add("--max-duration", type=float, help="s, the most that --min-completed may take")
    narrow = "end before --duration, when the intervals of TTFT and TPOT p90 are as narrow (half)"
    add("--stop-at-precision", type=share_of_one, metavar="5%", help=narrow)
    add("--stop-overloaded", action="store_true", help="end when --inflight-cap is reached")
    add("--max-errors", type=int, help="end after this many failed requests")
    goes_on = "keep the load up, unmeasured, until all measured requests are answered"
    add("--cooldown", action="store_true", help=goes_on)
    again = (
        "of arrivals and prompts [another in every run, and printed]; a server that has seen the "
        "prompts of a seed may have them in its prefix cache"
    )
    add("--seed", type=int, help=again)


def _add_requests(parser: argparse.ArgumentParser) -> None:
    what = parser.add_argument_group("requests to send (give one of the first six)")
    source = what.add_mutually_exclusive_group(required=True)
    source.add_argument("--session-file", type=Path, help="one session (a graph) per line")
    source.add_argument("--prompt", help="the same text in every request")
    source.add_argument("--prompt-words", type=int, help="random words, fresh per request")
    source.add_argument("--prompt-tokens", type=int, help="random token ids, fresh per request")
    mooncake = "a trace (Mooncake format): its times, lengths and shared prefixes"
    source.add_argument("--trace", type=Path, metavar="FILE", help=mooncake)
    lines = "JSONL with prompt or messages, and max_tokens: each is sent once"
    source.add_argument("--prompts", type=Path, metavar="FILE", help=lines)
    add = what.add_argument
    add("--repeat", action="store_true", help="start --prompts over after the last one")
    add("--trace-speed", type=float, help="2: twice as fast")
    add("--trace-limit", type=int, metavar="N", help="only the first N requests")
    add("--trace-block", type=int, help="prompt tokens that a hash id stands for")
    add("--trace-words", action="store_true", help="words for tokens, as with --chat")
    add("--vocabulary", type=int, help="token ids below this")
    add("--max-tokens", type=int, help="of each answer")
    add("--ignore-eos", action="store_true", help="exactly --max-tokens; checked by the usage")
    merged = "JSON merged into every body; null removes a key"
    add("--body", type=json_object, default={}, help=merged)
    add("--keep-going", action="store_true", help="after a failure in a session")


def _add_output(parser: argparse.ArgumentParser) -> None:
    how = parser.add_argument_group("how")
    add = how.add_argument
    add("--workers", type=int, default=1, help="processes that send")
    add("--connections", type=int, help="most per worker [4096, or the limit of open files]")
    add("--inflight-cap", type=int, help="drop requests due beyond this number in flight")
    add("--timeout", type=float, default=600.0, help="s per request")
    add("--drain", type=float, default=60.0, help="s to wait at the end for running requests")
    add("--no-affinity", action="store_true", help="do not pin to CPUs")
    keep = "ms: count requests within all of these limits"
    add("--goodput", type=latency_limit, nargs="+", default=[], metavar="ttft:200", help=keep)
    add("--percentiles", type=percentiles, default="50,90,95,99", help="of every latency")
    add("--html", type=Path, help="a page with curves, checks and the command")
    add("--csv", type=Path, help="the table of latencies: a row for each")
    add("--summary", type=Path, help="JSON: configuration, checks, percentiles with intervals")
    add("--output", type=Path, help="JSONL, a record per request, as they end (- is stdout)")
    add("--session-output", type=Path, help="JSONL, one record per session")
