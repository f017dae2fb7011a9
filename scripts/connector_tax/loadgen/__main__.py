"""Stand-alone load generator: `python -m connector_tax.loadgen --help`."""

import argparse
import os
import sys
from collections.abc import Sequence
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

import msgspec

from connector_tax.files import write_bytes, write_json
from connector_tax.loadgen.affinity import plan_affinity, read_topology
from connector_tax.loadgen.endpoint import Target, is_local
from connector_tax.loadgen.generator import (
    CellResult,
    Interrupted,
    LoadGenerator,
    LoadGeneratorOptions,
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
from connector_tax.loadgen.messages import LoadGeneratorError
from connector_tax.loadgen.options import parse_arguments
from connector_tax.loadgen.plan import Progress
from connector_tax.loadgen.ready import wait_ready
from connector_tax.loadgen.records import SessionRequest, session_outcomes
from connector_tax.loadgen.rule import CellRule
from connector_tax.loadgen.summary import print_summary, summarise
from connector_tax.loadgen.traffic import Load
from connector_tax.loadgen.workload import make_load, make_rule, make_target

COHORTS = (
    "closed loop with fixed lengths: requests that start together end together and stay in step, "
    "so latencies are those of a server that gets its work in waves"
)


def run(options: argparse.Namespace, target: Target, load: Load, rule: CellRule) -> int:
    """Run, print, write; return the exit status."""
    server_cores = 1 if is_local(target.host) else 0
    plan = plan_affinity(read_topology(), options.workers, server_cores, not options.no_affinity)
    print("\n".join(plan.lines()), file=sys.stderr)
    generator_options = LoadGeneratorOptions(
        workers=options.workers, connections_per_worker=options.connections, cpus=plan
    )
    progress = _ProgressLine()
    interrupted = False
    with LoadGenerator(target, generator_options) as generator:
        try:
            result = generator.run(load, rule, progress)
        except Interrupted as stop:
            result, interrupted = stop.result, True
    progress.finish()
    for problem in result.health["connect_errors"]:
        print(f"warning: {problem}", file=sys.stderr)
    checks = verify(result, load)
    summary = _about(options, target) | summarise(result, checks)
    # The files first: a closed pipe ends the printing.
    if options.summary is not None:
        write_json(options.summary, summary)
    if options.output is not None:
        write_bytes(options.output, b"".join(map(_json_line, result.requests)))
    if options.session_output is not None:
        lines = [msgspec.json.encode(line) + b"\n" for line in session_outcomes(result.requests)]
        write_bytes(options.session_output, b"".join(lines))
    print_summary(summary, sys.stdout)
    if interrupted:
        return 130
    if not any(record.status == "ok" for record in result.records):
        return 3
    return 0 if all(check.passed for check in checks) else 1


def verify(result: CellResult, load: Load) -> list[Check]:
    """Return every check that applies to this load."""
    entries, stop_ns = result.requests, result.t_stop_ns
    measured = [entry for entry in entries if entry.record.measured]
    checks = check_requests([entry.record for entry in measured])
    if load.offsets_ns is None:
        rampup_ns = round(load.rampup_s * 1e9)
        ramp = Ramp(load.concurrency, result.t_origin_ns, rampup_ns)
        checks += check_concurrency(entries, len(load.sessions), ramp, stop_ns)
    elif len(load.sessions) > 1:
        starts_ns = (load.offsets_ns + result.t_origin_ns).tolist()
        due_ns = [t for t in starts_ns if result.t_warmup_end_ns <= t < stop_ns]
        checks.append(check_session_rate(measured, due_ns))
    if any(entry.parents for entry in entries):
        checks += check_intra_session(entries)
    return checks + check_processes(result.health, result.clock)


def _about(options: argparse.Namespace, target: Target) -> dict[str, Any]:
    """What was asked for, by whom; header values are left out."""
    configuration = {
        name: str(value) if isinstance(value, Path) else value
        for name, value in vars(options).items()
    }
    configuration["header"] = sorted(target.headers)
    # A query may hold a key.
    configuration["url"] = options.url.partition("?")[0]
    fixed = options.ignore_eos or options.body.get("ignore_eos")
    return {
        "version": version("connector-tax"),
        "started_utc": datetime.now(UTC).isoformat(timespec="milliseconds"),
        "configuration": configuration,
        "notes": [COHORTS] if options.concurrency is not None and fixed else [],
    }


def _json_line(entry: SessionRequest) -> bytes:
    fields = msgspec.structs.asdict(entry)
    record = fields.pop("record")
    return msgspec.json.encode(fields | msgspec.structs.asdict(record)) + b"\n"


class _ProgressLine:
    """A line on stderr: rewritten in a terminal, a new one every five seconds elsewhere."""

    def __init__(self) -> None:
        self._terminal = sys.stderr.isatty()
        self._next_s = 0.0

    def __call__(self, progress: Progress) -> None:
        if progress.elapsed_s < self._next_s:
            return
        self._next_s = progress.elapsed_s + (0.2 if self._terminal else 5.0)
        text = (
            f"{progress.elapsed_s:7.1f} s  sessions {progress.started} started, "
            f"{progress.active} active  requests {progress.issued} sent, "
            f"{progress.inflight} in flight, {progress.ok} ok, {progress.failed} failed"
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
    try:
        target, rule = make_target(options), make_rule(options)
        # Before anything is asked of the endpoint, so that bad arguments are seen at once.
        make_load(options, target, rule)
        for path in (options.summary, options.output, options.session_output):
            if path is not None and not os.access(path.parent, os.W_OK):
                raise ValueError(f"{path}: the folder cannot be written to")
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        raise SystemExit(2) from None
    try:
        if not options.no_ready_check:
            options.model = wait_ready(target, options.model, options.wait)
        return run(options, target, make_load(options, target, rule), rule)
    except LoadGeneratorError as error:
        print(f"error: {error}", file=sys.stderr)
        return 3


if __name__ == "__main__":
    raise SystemExit(main())
