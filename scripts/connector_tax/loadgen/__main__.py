"""Stand-alone load generator: `python -m connector_tax.loadgen --help`."""

import argparse
import contextlib
import math
import signal
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from types import FrameType
from typing import Any

from connector_tax import __version__
from connector_tax.artifacts.metrics import CellLoad
from connector_tax.files import (
    exit_status,
    is_stdout,
    open_closed_streams,
)
from connector_tax.foreign import printable
from connector_tax.loadgen.affinity import plan_affinity, read_topology
from connector_tax.loadgen.arguments import parse_arguments, shown_command, without_secrets
from connector_tax.loadgen.checks import verify
from connector_tax.loadgen.endpoint import is_local, wait_ready
from connector_tax.loadgen.generator import (
    CellResult,
    Interrupted,
    LoadGenerator,
    LoadGeneratorOptions,
)
from connector_tax.loadgen.http import read_clocks
from connector_tax.loadgen.messages import LoadGeneratorError, Target
from connector_tax.loadgen.outputs import OUTPUTS, check_outputs, write_outputs
from connector_tax.loadgen.plan import PrecisionRule
from connector_tax.loadgen.setup import (
    check_numbers,
    make_load,
    make_rule,
    make_target,
    most_connections,
)
from connector_tax.loadgen.show import print_summary, print_sweep
from connector_tax.loadgen.sink import RecordSink
from connector_tax.loadgen.source import Source, read_source
from connector_tax.loadgen.summary import Checks, summarise
from connector_tax.loadgen.sweep import NOT_JUDGED, judge_rate, judgement_record

COHORTS = (
    "closed loop with fixed lengths: requests that start together also end together, "
    "so the server receives its work in waves, and the latencies include their effect"
)


class _Signals:
    """The handler of Ctrl-C, SIGTERM and SIGHUP.

    During a run it ends the run in order; before and after a run it ends the command.
    """

    def __init__(self) -> None:
        self.generator: LoadGenerator | None = None
        self.received: int | None = None

    def __call__(self, number: int, _frame: FrameType | None) -> None:
        self.received = number
        if self.generator is None or not self.generator.interrupt():
            raise KeyboardInterrupt

    @contextlib.contextmanager
    def handled(self) -> Iterator[None]:
        """Handle the three signals in the `with` body, except those that were ignored before."""
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


@dataclass(frozen=True, slots=True)
class Run:
    """The result of one load. `output_failed` says whether a line of --output was not written."""

    summary: dict[str, Any]
    result: CellResult
    checks: Checks
    output_failed: bool


def run(
    generator: LoadGenerator,
    options: argparse.Namespace,
    source: Source,
    signals: _Signals,
    append: bool,
) -> Run:
    """Send one load and summarise it; with `append`, add to an earlier load's --output file."""
    rule = make_rule(options, source)
    load = make_load(options, generator.target, rule, source)
    target_width = options.stop_at_precision
    precision = None if target_width is None else PrecisionRule(target_width)
    sink = RecordSink(options.output, {"rate": _rate(options)}, append)
    signals.generator = generator
    clocks = [read_clocks()]
    try:
        result = generator.run(load, rule, sink.progress, precision, on_record=sink.take)
    except Interrupted as stop:
        result = stop.result
    clocks.append(read_clocks())
    sink.close()
    for problem in result.health["connect_errors"]:
        print(printable(f"warning: {problem}"), file=sys.stderr)
    checks = verify(result, load)
    # With these offsets the stamps can be matched to a server's log.
    offsets_ns = [wall_ns - monotonic_ns for monotonic_ns, wall_ns in clocks]
    begun = datetime.fromtimestamp((result.t_origin_ns + offsets_ns[0]) / 1e9, UTC)
    times = {
        "started_utc": begun.isoformat(timespec="microseconds"),
        "utc_minus_monotonic_ns": dict(zip(("begin", "end"), offsets_ns, strict=True)),
    }
    summary = _about(options, generator.target) | times
    summary |= summarise(result, checks, sink, options.goodput, options.percentiles)
    started = len({r.session for r in result.records if r.t_send_ns is not None})
    summary["notes"] += [*source.notes, *filter(None, [source.use(started)])]
    summary["address"] = generator.address
    if generator.addresses > 1:
        summary["notes"].append(
            f"{generator.target.host} has {generator.addresses} addresses; every request went to "
            f"{generator.address}"
        )
    if precision is not None:
        count, width = precision.seen
        known = f"known to ±{width:.1%}" if math.isfinite(width) else "not known yet"
        known = f"TTFT and TPOT p90 of {count} successes are {known}"
        summary["notes"].append(f"{known}; requested: ±{precision.target:.1%}")
    return Run(summary, result, checks, sink.problem is not None)


def run_all(
    options: argparse.Namespace, target: Target, source: Source, signals: _Signals
) -> tuple[list[Run], bool]:
    """Send each load, one after the other, up to the first rate that saturates the server.

    Returns:
        The finished loads, and whether the load generator failed at a later one.
    """
    server_cores = 1 if is_local(target.host) else 0
    plan = plan_affinity(read_topology(), options.workers, server_cores, not options.no_affinity)
    print("\n".join(plan.lines()), file=sys.stderr)
    generator_options = LoadGeneratorOptions(
        workers=options.workers, connections_per_worker=options.connections, cpus=plan
    )
    runs: list[Run] = []
    several, failed = len(options.rates) > 1, False
    earlier: dict[float, CellLoad] = {}
    with LoadGenerator(target, generator_options) as generator:
        for rate in options.rates or [None]:
            if signals.received is not None:
                break
            at = argparse.Namespace(**{**vars(options), "rate": rate})
            if several:
                print(f"rate {rate:g}:", file=sys.stderr)
                # Prompts that an earlier rate has made and not sent change none of this one.
                source = read_source(at, target)
            try:
                done = run(generator, at, source, signals, append=bool(runs))
            except KeyboardInterrupt:
                if not runs:
                    raise
                break
            except LoadGeneratorError as error:
                if not runs:
                    raise
                print(printable(f"error: {error}"), file=sys.stderr)
                failed = True
                break
            runs.append(done)
            if rate is not None and several:
                saturation = NOT_JUDGED
                if signals.received is None:
                    saturation = judgement_record(judge_rate(done.result, rate, earlier))
                done.summary["saturation"] = saturation
                if saturation["saturated"]:
                    break
    return runs, failed


def report(options: argparse.Namespace, runs: Sequence[Run], signals: _Signals) -> int:
    """Print the summaries and write the output files; return the exit status."""
    summaries = [done.summary for done in runs]
    to_stdout = any(is_stdout(getattr(options, name)) for name in OUTPUTS)
    output_failed = any(done.output_failed for done in runs)
    stream = sys.stderr if to_stdout else sys.stdout
    try:
        if len(options.rates) > 1:
            print_sweep(summaries, stream)
        else:
            print_summary(summaries[0], stream)
        sys.stdout.flush()
    except (BrokenPipeError, SystemExit):  # the reader closed the pipe; rich would end the process
        output_failed |= to_stdout
    except OSError as error:
        output_failed = True
        print(f"error: standard output: {error.strerror}", file=sys.stderr)
    try:
        write_outputs(options, summaries, [done.result for done in runs])
    except OSError as error:
        output_failed = True
        print(printable(f"error: {error}"), file=sys.stderr)
    if signals.received is not None:
        return 128 + signals.received
    if output_failed:
        return 4
    if not summaries[0]["ok"]:
        return 3
    return 0 if all(map(_passes, runs)) else 1


def _passes(done: Run) -> bool:
    """Return whether every check passed; failed and dropped requests are excused at a saturated
    rate.
    """
    saturated = done.summary.get("saturation", {"saturated": False})["saturated"]
    excused = {"error_rate", "dropped"} if saturated else set()
    if saturated and any(r.measured and r.t_send_ns is None for r in done.result.records):
        excused.add("sent_rate_ratio")
    return all(check["pass"] for name, check in done.checks.items() if name not in excused)


def _rate(options: argparse.Namespace) -> float | str | None:
    """Return --rate as a JSON value, with infinity as "inf"."""
    return "inf" if options.rate == math.inf else options.rate


def _about(options: argparse.Namespace, target: Target) -> dict[str, Any]:
    """Return version, command, configuration and notes for the summary, without header values."""
    configuration = {
        name: str(value) if isinstance(value, Path) else value
        for name, value in vars(options).items()
    }
    del configuration["command"]
    configuration["header"] = sorted(target.headers)
    # The query may hold a secret.
    configuration["url"] = options.url.partition("?")[0]
    configuration["rate"] = _rate(options)
    configuration["body"] = without_secrets(options.body)
    configuration["rates"] = options.rates if len(options.rates) > 1 else None
    prompts = options.prompt_words or options.prompt_tokens or options.trace
    arrivals = options.rate not in (None, math.inf) and options.arrivals != "fixed"
    drawn = prompts or arrivals
    notes = [f"--seed {options.seed} repeats this run's arrivals and prompts"] if drawn else []
    fixed = options.ignore_eos or options.body.get("ignore_eos")
    return {
        "version": __version__,
        "command": options.command,
        "configuration": configuration,
        "notes": [*notes, *([COHORTS] if options.concurrency is not None and fixed else [])],
    }


def main(arguments: Sequence[str] | None = None) -> int:
    open_closed_streams()
    words = sys.argv[1:] if arguments is None else arguments
    options = parse_arguments(words)
    options.command = shown_command(words)
    try:
        check_numbers(options)
        target = make_target(options)
        source = read_source(options, target)
        rule = make_rule(options, source)
        options.connections = most_connections(options)
        # Before the first request, so that bad arguments are reported at once.
        make_load(options, target, rule, source)
        check_outputs(options)
    except (ValueError, OSError) as error:
        print(printable(f"error: {error}"), file=sys.stderr)
        raise SystemExit(2) from None
    signals = _Signals()
    try:
        with signals.handled():
            if not options.no_ready_check:
                options.model = wait_ready(target, options.model, options.wait)
            runs, failed = run_all(options, target, source, signals)
            status = report(options, runs, signals)
            return 3 if failed and status in (0, 1) else status
    except KeyboardInterrupt:
        print("interrupted before anything was measured", file=sys.stderr)
        return 128 + (signals.received or signal.SIGINT)
    except (LoadGeneratorError, OSError) as error:
        print(printable(f"error: {error}"), file=sys.stderr)
        return 3


if __name__ == "__main__":
    raise SystemExit(exit_status(main))
