"""The command line of the stand-alone load generator."""

import argparse
import json
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path

EXIT_CODES = """exit status:
  0  every timing check passed and at most 1% of the requests failed
  1  a check failed: the numbers are printed, but do not believe them
  2  bad arguments or session file
  3  the endpoint did not answer, no request succeeded, or the load generator could not run
  130  interrupted; what had ended until then is printed and written

Times of requests begin at their due time, also where they were sent late. In closed loop
(--concurrency) a slow server is asked less often, and requests of one fixed length that start
together end together and stay in step: for latencies under a given load use --rate."""


class _Help(argparse.RawDescriptionHelpFormatter):
    """Shows the default of every option that has one."""

    def _get_help_string(self, action: argparse.Action) -> str:
        text = action.help or ""
        plain = action.default in (None, False, argparse.SUPPRESS) or not action.option_strings
        return text if plain else f"{text} [%(default)s]".lstrip()


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
    return parser.parse_args(arguments)


def _add_endpoint(parser: argparse.ArgumentParser) -> None:
    where = parser.add_argument_group("endpoint")
    add = where.add_argument
    add(
        "--url",
        required=True,
        help="http[s]://host[:port], a base that ends in /v1, or a path to POST to",
    )
    add("--chat", action="store_true", help="/v1/chat/completions, not completions")
    add("--model", help="default: the one that /v1/models names")
    add("--header", action="append", default=[], metavar="'NAME: VALUE'", help="may be repeated")
    add("--api-key-env", metavar="NAME", help="variable that holds the bearer token")
    add("--ca-file", type=Path, help="PEM certificates to trust instead of the system's")
    add("--insecure", action="store_true", help="trust any certificate")
    add("--wait", type=float, default=10.0, help="s for the endpoint to answer before the run")
    add("--no-ready-check", action="store_true", help="do not ask it; needs --model")
    add("--no-stream", action="store_true", help="ask for whole responses")
    add(
        "--usage",
        choices=["required", "client"],
        default="required",
        help="a response without token usage fails, or counts the token events that came",
    )


def _add_load(parser: argparse.ArgumentParser) -> None:
    load = parser.add_argument_group("load (one of --rate and --concurrency)")
    kind = load.add_mutually_exclusive_group(required=True)
    kind.add_argument("--rate", type=float, help="sessions started per second, open loop")
    kind.add_argument("--concurrency", type=int, help="sessions kept active, closed loop")
    add = load.add_argument
    add("--arrivals", choices=["fixed", "poisson", "gamma"], default="poisson", help="for --rate")
    add("--gamma-shape", type=float, help="1/shape is the squared variation; for --arrivals gamma")
    add("--rampup", type=float, default=0.0, help="s, for --concurrency")
    add("--warmup", type=float, default=0.0, help="s of load before what is measured")
    add("--duration", type=float, default=60.0, help="s that are measured")
    add("--min-completed", type=int, default=0, help="measure on until so many have succeeded")
    add("--max-duration", type=float, help="s, the most that --min-completed may take")
    add(
        "--cooldown",
        action="store_true",
        help="load goes on, unmeasured, until what was measured is answered",
    )
    add("--seed", type=int, default=0, help="of arrivals and prompts")


def _add_requests(parser: argparse.ArgumentParser) -> None:
    what = parser.add_argument_group("what to send (one of the first three)")
    source = what.add_mutually_exclusive_group(required=True)
    source.add_argument("--session-file", type=Path, help="one session (a graph) per line")
    source.add_argument("--prompt", help="the same text in every request")
    source.add_argument("--prompt-tokens", type=int, help="random token ids, fresh per request")
    add = what.add_argument
    add("--vocabulary", type=int, default=1000, help="token ids below this")
    add("--requests", type=int, help="how many single-request sessions to make")
    add("--max-tokens", type=int, default=64, help="of each answer")
    add("--ignore-eos", action="store_true", help="exactly --max-tokens, checked")
    add("--body", type=json.loads, default={}, help="JSON merged into every body")
    add("--keep-going", action="store_true", help="after a failure in a session")


def _add_output(parser: argparse.ArgumentParser) -> None:
    how = parser.add_argument_group("how")
    add = how.add_argument
    add("--workers", type=int, default=1, help="processes that send")
    add("--connections", type=int, default=256, help="per worker")
    add("--inflight-cap", type=int, default=0, help="drop what is due beyond; 0: off")
    add("--timeout", type=float, default=600.0, help="s per request")
    add("--drain", type=float, default=60.0, help="s after the end for what runs")
    add("--no-affinity", action="store_true", help="do not pin to CPUs")
    add("--summary", type=Path, help="JSON: configuration, checks, percentiles with intervals")
    add("--output", type=Path, help="JSONL, one record per request")
    add("--session-output", type=Path, help="JSONL, one record per session")
