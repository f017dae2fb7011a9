"""The command line of `connector-tax ab`."""

import argparse
import os
import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import msgspec

from connector_tax.artifacts.metrics import (
    CLOSED_LOOP_METRICS,
    GOODPUT_LATENCIES,
    METRICS,
    THROUGHPUT_METRICS,
    VERDICT_METRICS,
)
from connector_tax.artifacts.names import UNNAMED
from connector_tax.artifacts.study_records import AccessSection
from connector_tax.commands import AnsweringParser
from connector_tax.compare.bounds import bound_of
from connector_tax.foreign import is_secret
from connector_tax.loadgen.prompts import PromptLine, read_prompts
from connector_tax.loadgen.trace import BLOCK, read_trace
from connector_tax.servers.command import (
    PORT_MARK,
    expanded,
    running_url,
    split_command,
    with_homes,
)
from connector_tax.servers.kinds import STEP_LOG_VARIABLE, ServerError
from connector_tax.study.endpoint import Endpoint

BASELINE = "baseline"
MOST_IN_FLIGHT = 1024
OWN_VARIABLES = {
    "PYTHONPATH": "give the folders by --pythonpath; they are prepended to PYTHONPATH",
    STEP_LOG_VARIABLE: "ab sets this variable for the step probe",
}
EPILOG = """exit status:
  0    answered; with --max every cost is below its bound
  1    a cost is above its bound (--max)
  2    cannot tell
  3    a cost has no number or no verdict, or the command failed (the last line says why)
  64   the command line is wrong
  130  stopped

Repeat the same command to resume a stopped comparison, or to print the answer of a finished one."""
_NAMED = re.compile(r"([a-z][a-z0-9_]{0,39})=(.*)", re.DOTALL)
# A name, valid or not.
_BEGUN = re.compile(r"([\w.-]+)=")
_SHAPE = re.compile(r"([1-9]\d*)x([1-9]\d*)")
_VARIABLE = re.compile(r"([A-Z_][A-Z0-9_]*)=(.*)", re.DOTALL)
_ENV = re.compile(r"([A-Za-z_][A-Za-z0-9_]*)=(.*)", re.DOTALL)
# A server's address in the file system.
_SOCKET = re.compile(r"(?<!\S)(--uds(?=[\s=])|\S*unix:\S*|\S+\.sock(?=\s|$))")
_TAKEN = re.compile(r".*_([2-9]|1\d|20|last)")


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """Return the checked options; on an error print a line and exit with status 64."""
    parser = AnsweringParser(
        prog="connector-tax ab",
        description="Measure what a candidate server costs its users against a baseline.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    servers = parser.add_argument_group("servers")
    baseline = servers.add_mutually_exclusive_group(required=True)
    baseline.add_argument("--baseline", type=_command, metavar="COMMAND",
                          help="command that starts the server; {port} is its port")  # fmt: skip
    baseline.add_argument("--baseline-url", dest="baseline", type=_url, metavar="URL",
                          help="URL of a running server: http[s]://HOST[:PORT][/v1]")  # fmt: skip
    candidates = servers.add_mutually_exclusive_group(required=True)
    candidates.add_argument("--candidate", action="append", type=_candidate,
                            metavar="[NAME=]COMMAND",
                            help="command of a candidate server; may be repeated")  # fmt: skip
    candidates.add_argument("--candidate-url", dest="candidate", action="append", type=_named_url,
                            metavar="[NAME=]URL",
                            help="URL of a running candidate; may be repeated")  # fmt: skip
    servers.add_argument("--beside", action="append", default=[], type=_command, metavar="COMMAND",
                         help="command to run beside each candidate; {port} is its port,"
                         " {beside1.port} in the candidate's line")  # fmt: skip
    servers.add_argument("--env", action="append", default=[], type=_variable,
                         metavar="NAME=VALUE",
                         help="environment variable for both servers; ~ is expanded as in a shell's"
                         " assignment")  # fmt: skip
    servers.add_argument("--pythonpath", action="append", default=[], metavar="FOLDER",
                         help="folder to prepend to both servers' PYTHONPATH")  # fmt: skip
    servers.add_argument("--api-key-env", metavar="NAME",
                         help="variable that holds the servers' API key; the key is sent, and"
                         " recorded nowhere")  # fmt: skip
    servers.add_argument("--api-key-header", metavar="NAME",
                         help="header that sends the key, such as api-key [Authorization, as a"
                         " bearer token]")  # fmt: skip
    trust = servers.add_mutually_exclusive_group()
    trust.add_argument("--ca-file", type=Path, metavar="FILE",
                       help="PEM certificates to trust instead of the system's")  # fmt: skip
    trust.add_argument("--insecure", action="store_true", help="trust any certificate")
    servers.add_argument("--model", help="model to request; required if a server lists several")
    servers.add_argument("--ready-timeout", type=_positive, default=600.0, metavar="S",
                         help="longest start-up of a server, s [600]")  # fmt: skip
    add("--rate", action="append", default=[], type=_positive, metavar="R",
        help="rate in requests/s; may be given several times")  # fmt: skip
    add("--concurrency", type=_places, metavar="N",
        help="keep N requests in flight instead (closed loop): the verdict is on requests/s and"
        " tokens/s, too")  # fmt: skip
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--shape", type=_shape, metavar="INxOUT",
                      help="random prompts with these input and output tokens, such as"
                      " 2048x128")  # fmt: skip
    what.add_argument("--trace", type=Path, metavar="FILE",
                      help="send a trace (Mooncake format) with its times, lengths and shared"
                      " prefixes; it is cut so that three blocks fit --minutes")  # fmt: skip
    what.add_argument("--prompts", type=Path, metavar="FILE",
                      help="JSONL with prompt or messages, and max_tokens; each line is sent once"
                      " in a launch")  # fmt: skip
    add("--trace-speed", type=_positive, metavar="X",
        help="speed of --trace; 2 is twice as fast [1]")  # fmt: skip
    add("--trace-block", type=_count, metavar="N",
        help=f"prompt tokens per hash id of --trace [{BLOCK}]")  # fmt: skip
    add("--max-tokens", type=_count, metavar="N",
        help="output tokens for --prompts lines without max_tokens [64]")  # fmt: skip
    length = parser.add_mutually_exclusive_group()
    length.add_argument("--minutes", type=_positive, default=30.0,
                        help="longest duration of the comparison [30]")  # fmt: skip
    length.add_argument("--blocks", type=_blocks, help="number of blocks, in place of --minutes")
    add("--dry-run", action="store_true",
        help="start nothing; print the smallest cost that the blocks would prove, from the numbers"
        " of an earlier --name")  # fmt: skip
    add("--margin", type=_percent, default=0.03, metavar="3%",
        help="ignore costs smaller than this [3%%]")  # fmt: skip
    add("--metric", action="append", default=[], choices=(*METRICS, *THROUGHPUT_METRICS),
        help="judge this metric instead of the medians; may be given several times")  # fmt: skip
    add("--goodput", type=_limits, nargs="+", action="extend", default=[], metavar="ttft:200",
        help="also judge the requests/s within these limits (ms) of ttft, tpot, e2e")  # fmt: skip
    add("--max", type=bound_of, action="append", default=[], metavar="[METRIC=]5%",
        help="exit non-zero if a cost over all rates exceeds this bound; without METRIC the bound"
        " applies to each judged metric that no other --max names; may be given several"
        " times")  # fmt: skip
    add("--name", type=_name, help="name of the study, results/NAME [from the arguments]")
    add("--seed", type=int,
        help="seed of order, arrivals and prompts [1; for URLs a new one, since running servers"
        " keep prompts in their prefix caches]")  # fmt: skip
    add("--device", type=_name, default=None, metavar="NAME",
        help="device to lock during the measurement [cpu, or the GPUs]")  # fmt: skip
    add("--shared-machine", action="store_true",
        help="measure even if other processes use the CPUs; the answer notes that")  # fmt: skip
    add("--export-markdown", type=Path, metavar="FILE",
        help="write the answer, both commands and the latencies as Markdown")  # fmt: skip
    add("--json", action="store_true", help="print the answer as JSON")
    given = sys.argv[1:] if argv is None else argv
    for number, word in enumerate(given, 1):
        if word != word.encode(errors="ignore").decode():
            parser.error(f"argument {number}: found bytes that are not UTF-8; allowed: UTF-8, since"
                         " arguments are recorded")  # fmt: skip
    options = parser.parse_args(given)
    # Rates that print alike would share the name of a cell.
    options.rate = sorted({float(f"{rate:g}") for rate in options.rate})
    if options.blocks is not None:
        options.minutes = None
    _check(parser, options)
    return options


def _check(parser: AnsweringParser, options: argparse.Namespace) -> None:
    names = [name for name, _ in options.candidate]
    if None in names and len(names) > 1:
        parser.error("--candidate: found several without a name; allowed: NAME='COMMAND'")
    options.candidate = [(name or UNNAMED, command) for name, command in options.candidate]
    names = [name for name, _ in options.candidate]
    for name in names:
        if names.count(name) > 1 or name == BASELINE or _TAKEN.fullmatch(name):
            parser.error(f"--candidate: found the name {name!r}; allowed: each name once, except"
                         " baseline and names that end in _last or _2 to _20")  # fmt: skip
    for line in options.beside:
        if PORT_MARK not in line:
            parser.error(f"--beside: found no {PORT_MARK} in {line!r}; allowed: a command that"
                         " listens on it")  # fmt: skip
    servers = [(BASELINE, options.baseline), *options.candidate]
    urls = [running_url(command) for _, command in servers]
    running = [url is not None for url in urls]
    if options.seed is None and not any(running):
        options.seed = 1
    if any(running):
        if not all(running):
            parser.error("found a URL and a command; allowed: --baseline-url with --candidate-url,"
                         " or --baseline with --candidate")  # fmt: skip
        for key in ("beside", "env", "pythonpath"):
            if getattr(options, key):
                parser.error(f"--{key}: found with a URL; allowed: with commands, since a server"
                             " that runs already is not started")  # fmt: skip
        for number, (_, url) in enumerate(servers):
            if urls.index(urls[number]) < number:
                parser.error(f"--candidate-url: found {url!r} again; allowed: each server once")
    _check_access(parser, options, urls)
    for name, command in servers if not any(running) else ():
        option = name if name == BASELINE else "candidate"
        if (socket := _SOCKET.search(command)) and (
            socket[0] == "--uds" or PORT_MARK not in command
        ):
            parser.error(f"--{option}: found {socket[0]}, a Unix socket; allowed: a command that"
                         f" serves on the TCP port {PORT_MARK}")  # fmt: skip
        if PORT_MARK not in command:
            parser.error(f"--{option}: found no {PORT_MARK} in {command!r}; allowed: a command that"
                         " serves on it")  # fmt: skip
    commands = [*servers, *(("--beside", line) for line in options.beside)]
    for name, command in commands if not any(running) else ():
        if is_secret("command", command):
            parser.error(f"{name}: found what looks like a secret (not shown), but commands are"
                         " recorded; export the secret in your shell")  # fmt: skip
    for name, value in options.env:
        if is_secret(name, value):
            parser.error(f"--env {name}: found what looks like a secret (not shown), but --env is"
                         " recorded; export the secret in your shell")  # fmt: skip
        if name in OWN_VARIABLES:
            parser.error(f"--env {name}: {OWN_VARIABLES[name]}")
    options.metric = list(dict.fromkeys(options.metric))
    _check_throughput(parser, options)
    judged = judged_of(options)
    bounded = [bound.metric for bound in options.max]
    for bound in options.max:
        if bounded.count(bound.metric) > 1:
            what = bound.metric or "each judged metric"
            parser.error(f"--max: found several bounds of {what}; allowed: one")
        if bound.metric not in (None, *judged):
            parser.error(f"--max: found {bound.metric}, which is not judged (--metric); allowed:"
                         f" {', '.join(judged)}")  # fmt: skip
    _check_load(parser, options, any(running))
    parser.check_page(options.export_markdown)
    for folder in options.pythonpath:
        if not Path(folder).is_dir() or ":" in folder:
            parser.error(f"--pythonpath: found {folder!r}; allowed: an existing folder")


def judged_of(options: argparse.Namespace) -> list[str]:
    """Return the metrics that get a verdict."""
    default = VERDICT_METRICS if options.concurrency is None else CLOSED_LOOP_METRICS
    more = ["goodput"] if options.goodput else []
    return list(dict.fromkeys([*(options.metric or default), *more]))


def _check_throughput(parser: AnsweringParser, options: argparse.Namespace) -> None:
    """Check the limits of goodput, and reject a throughput metric that the schedule fixes."""
    options.goodput = [limit for limits in options.goodput for limit in limits]
    if len(dict(options.goodput)) < len(options.goodput):
        parser.error("--goodput: the same latency is given twice; allowed: each latency once")
    options.goodput = dict(options.goodput)
    for metric in options.metric:
        if metric == "goodput" and not options.goodput:
            parser.error("--metric goodput needs --goodput, such as ttft:200")
        if metric in ("requests_per_s", "tokens_per_s") and options.concurrency is None:
            parser.error(f"--metric {metric} needs --concurrency: a schedule fixes the rate")


def _check_access(
    parser: AnsweringParser, options: argparse.Namespace, urls: Sequence[str | None]
) -> None:
    """Check URLs, key and certificates, and warn of servers on other machines."""
    encrypted = any(url and url.startswith("https:") for url in urls)
    if (options.ca_file or options.insecure) and not encrypted:
        parser.error("--ca-file and --insecure need an https URL")
    for url in urls:
        endpoint = Endpoint(url or "http://127.0.0.1:1", access_of(options))
        try:
            target = endpoint.target()
        except ValueError as error:
            parser.error(str(error))
        if url is not None and not endpoint.local:
            print(f"warning: {target.host} is another machine: client, network and server are"
                  " measured together", file=sys.stderr)  # fmt: skip


def access_of(options: argparse.Namespace) -> AccessSection:
    """Return key and certificate settings for the servers."""
    access: AccessSection = {}
    if options.api_key_env is not None:
        access["variable"] = options.api_key_env
    if options.ca_file is not None:
        access["ca_file"] = str(options.ca_file)
    if options.insecure:
        access["insecure"] = True
    if options.api_key_header is not None:
        access["header"] = options.api_key_header
    return access


def _check_load(parser: AnsweringParser, options: argparse.Namespace, running: bool) -> None:
    """Check the load options and read the user's file; reject an option without effect."""
    for name, default, needed in (("trace_speed", 1.0, "trace"), ("trace_block", BLOCK, "trace"),
                                  ("max_tokens", 64, "prompts")):  # fmt: skip
        option = f"--{name.replace('_', '-')}"
        if getattr(options, name) is None:
            setattr(options, name, default)
        elif getattr(options, needed) is None:
            parser.error(f"{option} has no effect without --{needed}")
    if options.concurrency is not None and (options.rate or options.shape is None):
        parser.error("--concurrency: found with --rate, --trace or --prompts; allowed: with"
                     " --shape, since requests are sent when others end")  # fmt: skip
    if options.trace is not None and options.rate:
        parser.error("--rate: a trace sets the times; see --trace-speed")
    if options.trace is None and options.concurrency is None and not options.rate:
        parser.error("--rate: found none; allowed: requests/s, --concurrency, or a --trace with its"
                     " own times")  # fmt: skip
    if options.shape is not None and options.shape[1] < 2:
        parser.error("--shape: found 1 output token; allowed: at least 2, else there is no TPOT")
    if options.prompts is not None and len(options.rate) > 1:
        parser.error("--rate: found several with --prompts; allowed: one, since a launch sends each"
                     " prompt once")  # fmt: skip
    if options.prompts is not None and running:
        parser.error("--prompts: found with a URL; allowed: with commands, since a server that is"
                     " not restarted keeps the prompts in its prefix cache")  # fmt: skip
    for option, path in (("trace", options.trace), ("prompts", options.prompts)):
        if path is not None and path.exists() and not path.is_file():
            parser.error(f"--{option}: found {str(path)!r}, which is no regular file; allowed: a"
                         " file, since it is read several times")  # fmt: skip
    options.chat = False
    try:
        if options.trace is not None:
            read_trace(options.trace, block=options.trace_block)
        elif options.prompts is not None:
            options.chat = _holds_messages(options)
            read_prompts(options.prompts, options.chat, options.max_tokens)
    except (ValueError, OSError) as error:
        parser.error(f"--{'trace' if options.prompts is None else 'prompts'}: {error}")


def _holds_messages(options: argparse.Namespace) -> bool:
    """Return whether a line of the prompts has messages, which only a chat endpoint takes."""
    with options.prompts.open("rb") as stream:
        try:
            return any(msgspec.json.decode(line, type=PromptLine).messages for line in stream)
        except (msgspec.DecodeError, RecursionError):
            # `read_prompts` names the line.
            return False


def _typed(check: Callable[[str], Any], allowed: str) -> Callable[[str], Any]:
    def read(text: str) -> Any:
        try:
            value = check(text)
        except ValueError:
            value = None
        if value is None:
            raise argparse.ArgumentTypeError(f"found {text!r}; allowed: {allowed}")
        return value

    return read


def _words(text: str) -> str | None:
    """Return a command line with its variables expanded; None if it is invalid."""
    try:
        if running_url(text) is not None:
            return text
        return expanded(text, os.environ) if split_command(text) else None
    except ServerError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _running(text: str) -> str | None:
    if text.startswith(("unix:", "http+unix:", "/", "./")):
        raise argparse.ArgumentTypeError(
            f"found {text!r}, a Unix socket; allowed: http[s]://HOST[:PORT], so let the server"
            " listen on a TCP port"
        )
    if "@" in urlsplit(text).netloc:
        raise argparse.ArgumentTypeError(
            "found a user name or password in the URL (not shown); allowed: none, since the"
            " URL is recorded; give a key with --api-key-env"
        )
    try:
        # A port out of range is a ValueError.
        return None if running_url(text) is None or urlsplit(text).port == 0 else text
    except ServerError as error:
        raise argparse.ArgumentTypeError(f"{text}: {error}") from None


def _named(check: Callable[[str], Any]) -> Callable[[str], tuple[str | None, str] | None]:
    def read(text: str) -> tuple[str | None, str] | None:
        match = _NAMED.fullmatch(text)
        begun = _BEGUN.match(text)
        if begun and not match and not _VARIABLE.fullmatch(text):
            raise argparse.ArgumentTypeError(
                f"found the name {begun[1]!r}; allowed: at most 40 letters (a-z), digits and _,"
                " a letter first (NAME in capitals sets an environment variable)"
            )
        name, server = (match[1], match[2]) if match else (None, text)
        known = check(server)
        return None if known is None else (name, known)

    return read


def _number(text: str) -> float | None:
    value = float(text)
    return value if 0 < value < 1e6 else None


def _limit(text: str) -> tuple[str, float]:
    name, _, limit = text.partition(":")
    if name not in GOODPUT_LATENCIES or (limit_ms := _number(limit)) is None:
        raise ValueError(text)
    return name, limit_ms


def _share(text: str) -> float | None:
    value = float(text.removesuffix("%")) / 100
    return value if text.endswith("%") and 0 < value < 1 else None


_command = _typed(_words, "a command line")
_candidate = _typed(_named(_words), "a command line, or NAME='COMMAND'")
_url = _typed(_running, "http[s]://HOST[:PORT][/v1], a server that runs already")
_named_url = _typed(_named(_running), "http[s]://HOST[:PORT][/v1], or NAME=URL")
_positive = _typed(_number, "a number above 0")
_count = _typed(lambda t: int(t) if 0 < int(t) < 1e6 else None, "a whole number above 0")
_percent = _typed(_share, "a percentage between 0% and 100%")
_places = _typed(
    lambda t: int(t) if 0 < int(t) <= MOST_IN_FLIGHT else None, f"1 to {MOST_IN_FLIGHT}"
)
_limits = _typed(
    lambda t: [_limit(one) for one in t.split(",")],
    "LATENCY:MS with ttft, tpot or e2e, such as ttft:200 tpot:20",
)
_blocks = _typed(lambda t: int(t) if 3 <= int(t) <= 100 else None, "3 to 100")
_shape = _typed(
    lambda t: (int(m[1]), int(m[2])) if (m := _SHAPE.fullmatch(t)) else None,
    "input x output tokens, such as 2048x128",
)
_name = _typed(
    lambda t: t if re.fullmatch(r"[a-z][a-z0-9_-]{0,47}", t) else None,
    "letters (a-z), digits, - and _",
)
_variable = _typed(
    lambda t: (m[1], with_homes(m[2])) if (m := _ENV.fullmatch(t)) else None, "NAME=VALUE"
)
