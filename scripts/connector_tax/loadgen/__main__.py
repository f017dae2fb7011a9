"""Stand-alone load generator: `python -m connector_tax.loadgen --help`."""

import argparse
import contextlib
import itertools
import math
import os
import signal
import sys
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from types import FrameType
from typing import Any

import msgspec

from connector_tax.files import (
    exit_status,
    is_stdout,
    open_closed_streams,
    standard_stream,
    write_bytes,
    write_json,
)
from connector_tax.loadgen.affinity import plan_affinity, read_topology
from connector_tax.loadgen.arguments import parse_arguments
from connector_tax.loadgen.checks import verify
from connector_tax.loadgen.endpoint import is_local, wait_ready
from connector_tax.loadgen.generator import Interrupted, LoadGenerator, LoadGeneratorOptions
from connector_tax.loadgen.http import read_clocks
from connector_tax.loadgen.messages import LoadGeneratorError, Target
from connector_tax.loadgen.plan import CellRule, PrecisionRule
from connector_tax.loadgen.setup import (
    check_numbers,
    make_load,
    make_rule,
    make_target,
    most_connections,
)
from connector_tax.loadgen.show import print_summary
from connector_tax.loadgen.sink import RecordSink
from connector_tax.loadgen.source import Source, read_source
from connector_tax.loadgen.summary import session_outcomes, summarise
from connector_tax.loadgen.table import latency_csv
from connector_tax.loadgen.traffic import Load

COHORTS = (
    "closed loop with fixed lengths: requests that start together end together and stay in step, "
    "so latencies are those of a server that gets its work in waves"
)
OUTPUTS = ("summary", "output", "session_output", "csv")


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
    options: argparse.Namespace,
    target: Target,
    load: Load,
    rule: CellRule,
    source: Source,
    signals: _Signals,
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
    summary |= summarise(result, checks, sink, options.goodput, options.percentiles)
    started = len({r.session for r in result.records if r.t_send_ns is not None})
    summary["notes"] += [*source.notes, *filter(None, [source.use(started)])]
    summary["address"] = generator.address
    if generator.addresses > 1:
        summary["notes"].append(
            f"{target.host} has {generator.addresses} addresses; every request went to "
            f"{generator.address}"
        )
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
        if options.csv is not None:
            table = latency_csv([("run", summary["latency_ms"])], options.percentiles)
            write_bytes(options.csv, table)
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
    prompts = options.prompt_words or options.prompt_tokens or options.trace
    drawn = prompts or options.arrivals not in (None, "fixed")
    notes = [f"--seed {options.seed} repeats its arrivals and prompts"] if drawn else []
    fixed = options.ignore_eos or options.body.get("ignore_eos")
    return {
        "version": version("connector-tax"),
        "configuration": configuration,
        "notes": [*notes, *([COHORTS] if options.concurrency is not None and fixed else [])],
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
        check_numbers(options)
        target = make_target(options)
        source = read_source(options, target)
        rule = make_rule(options, source)
        options.connections = most_connections(options)
        # Before anything is asked of the endpoint, so that bad arguments are seen at once.
        make_load(options, target, rule, source)
        _check_outputs(options)
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        raise SystemExit(2) from None
    signals = _Signals()
    try:
        with signals.handled():
            if not options.no_ready_check:
                options.model = wait_ready(target, options.model, options.wait)
            load = make_load(options, target, rule, source)
            return run(options, target, load, rule, source, signals)
    except KeyboardInterrupt:
        print("interrupted before anything was measured", file=sys.stderr)
        return 128 + (signals.received or signal.SIGINT)
    except (LoadGeneratorError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 3


if __name__ == "__main__":
    raise SystemExit(exit_status(main))
