"""Write the output files of the command at its end."""

import argparse
import itertools
import os
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from connector_tax.files import standard_stream, write_bytes, write_json
from connector_tax.loadgen.generator import CellResult
from connector_tax.loadgen.page import page
from connector_tax.loadgen.summary import session_outcomes
from connector_tax.loadgen.sweep import highest_unsaturated, verdict
from connector_tax.loadgen.table import latency_csv

OUTPUTS = ("summary", "output", "session_output", "csv", "html")


def check_outputs(options: argparse.Namespace) -> None:
    """Reject outputs that cannot be written, before anything is sent; raises ValueError."""
    paths = [path for name in OUTPUTS if (path := getattr(options, name)) is not None]
    for first, second in itertools.combinations(paths, 2):
        if first.resolve() == second.resolve() and not first.is_char_device():
            raise ValueError(f"{first}: same file given for two outputs")
    for path in paths:
        if standard_stream(path) is not None:
            continue
        place = path if path.exists() else path.resolve().parent
        if path.is_dir() or not os.access(place, os.W_OK):
            where = "the folder" if place != path else "it"
            raise ValueError(f"{path}: {where} is not writable")


def write_outputs(
    options: argparse.Namespace,
    summaries: Sequence[Mapping[str, Any]],
    results: Sequence[CellResult],
) -> None:
    """Write the summary, table, page and sessions.

    Raises:
        OSError: some cannot be written; the others are. Names each file.
    """
    problems: list[str] = []
    for write in (_write_summary, _write_table, _write_page, _write_sessions):
        try:
            write(options, summaries, results)
        except OSError as error:
            problems.append(f"{error.filename}: {error.strerror}")
    if problems:
        raise OSError("; ".join(problems))


def _write_summary(
    options: argparse.Namespace, summaries: Sequence[Mapping[str, Any]], _: object
) -> None:
    if options.summary is not None:
        whole: Mapping[str, Any] = summaries[0]
        if len(options.rates) > 1:
            whole = {
                "rates": summaries,
                "highest_unsaturated_rps": highest_unsaturated(summaries),
                "verdict": verdict(summaries),
            }
        write_json(options.summary, whole)


def _write_table(
    options: argparse.Namespace, summaries: Sequence[Mapping[str, Any]], _: object
) -> None:
    if options.csv is not None:
        tables = [(load_name(summary), summary["latency_ms"]) for summary in summaries]
        write_bytes(options.csv, latency_csv(tables, options.percentiles))


def _write_page(
    options: argparse.Namespace,
    summaries: Sequence[Mapping[str, Any]],
    results: Sequence[CellResult],
) -> None:
    if options.html is not None:
        write_bytes(options.html, page(summaries, results).encode())


def _write_sessions(options: argparse.Namespace, _: object, results: Sequence[CellResult]) -> None:
    if options.session_output is not None:
        outcomes = session_outcomes(results[0].requests)
        write_bytes(options.session_output, msgspec.json.Encoder().encode_lines(outcomes))


def load_name(summary: Mapping[str, Any]) -> str:
    """Return the name of a load in tables: "rate 5", "concurrency 8", "trace" or "sessions"."""
    configuration = summary["configuration"]
    for name in ("rate", "concurrency"):
        if configuration[name] is not None:
            return f"{name} {configuration[name]}"
    return "trace" if configuration["trace"] is not None else "sessions"
