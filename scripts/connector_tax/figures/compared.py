"""Describe a comparison of servers: commands with their differences, load, machine, latencies.

Latencies are percentiles in ms at each rate, with the difference. Used in the terminal, the report,
JSON and Markdown of `connector-tax ab`.
"""

import json
import math
import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from difflib import SequenceMatcher
from typing import Any

from connector_tax import text
from connector_tax.artifacts import paths
from connector_tax.artifacts.metrics import (
    ALL_METRICS,
    HEADLINE,
    THROUGHPUT_METRICS,
    VERDICT_METRICS,
    judged_metrics,
)
from connector_tax.artifacts.names import UNNAMED
from connector_tax.artifacts.study_records import PhaseASection
from connector_tax.artifacts.tables import POOLED, TAX
from connector_tax.figures.tables import StudyTables
from connector_tax.files import read_json

MOST_LABEL = 40
_OPTION = re.compile(r"--?[A-Za-z][\w.-]*")
MEDIANS_FIRST = (*VERDICT_METRICS, *HEADLINE)
# A word of a command, and whether the other command lacks it.
Word = tuple[str, bool]
Interval = tuple[float | None, float | None, float | None]


@dataclass(frozen=True)
class Latency:
    """A metric at one rate, in its unit: for the baseline, a candidate, and their difference.

    Each is a value with the ends of its 95% interval; None if missing.
    """

    config: str
    rate_rps: float
    metric: str
    base: Interval
    own: Interval
    difference: Interval


def marked_words(words: Sequence[str], other: Sequence[str]) -> list[Word]:
    """Return each word of a command, and whether the other command lacks it at that place."""
    blocks = SequenceMatcher(None, words, other, autojunk=False).get_matching_blocks()
    same = {place for block in blocks for place in range(block.a, block.a + block.size)}
    return [(word, place not in same) for place, word in enumerate(words)]


def label_of(baseline: Sequence[str], candidate: Sequence[str]) -> str:
    """Return the words that only the candidate's command has, in at most 40 characters.

    An option that both have stands before a value that differs. A JSON word with a connector's name
    is shown as that name.
    """
    more: list[str] = []
    option = ""
    for word, other in marked_words(candidate, baseline):
        if other:
            more += [option] if option and not word.startswith("-") else []
            more.append(_short(word))
        option = word if _OPTION.fullmatch(word) and not other else ""
    less = [_short(word) for word, other in marked_words(baseline, candidate) if other]
    words = " ".join(more) or ("without " + " ".join(less) if less else "the same again")
    return words if len(words) <= MOST_LABEL else f"{words[: MOST_LABEL - 1].rstrip()}…"


def _short(word: str) -> str:
    option, equals, value = word.partition("=") if word.startswith("--") else ("", "", word)
    try:
        content = json.loads(value)
    except (ValueError, RecursionError):
        return word
    name = content.get("kv_connector") if isinstance(content, dict) else None
    return f"{option}{equals}{name}" if isinstance(name, str) else word


def commands(study: StudyTables) -> list[tuple[str, list[Word]]]:
    """Return each server's label and the words of its command; empty if none was recorded.

    A word of the baseline is marked if any candidate lacks it.
    """
    lines: Mapping[str, str] = study.settings["engine"].get("commands", {})
    if not lines:
        return []
    words = {name: line.split() for name, line in lines.items()}
    base = words[study.baseline]
    others = {name: of for name, of in words.items() if name != study.baseline}
    marked = [marked_words(base, of) for of in others.values()]
    first = [(word, any(of[place][1] for of in marked)) for place, word in enumerate(base)]
    labelled = [(study.label(study.baseline), first)]
    return labelled + [(study.label(name), marked_words(of, base)) for name, of in others.items()]


def judged_load(study: StudyTables) -> str:
    """Return the load of the taxes over all rates, and the rates that they leave out."""
    sweep, judged = study.settings["phase_a"], study.judged_rates
    left_out = [f"{rate:g}" for rate in sweep["rates_rps"] if rate not in judged]
    words = load_words(sweep, judged or sweep["rates_rps"])
    if not judged or not left_out:
        return words
    return f"{words} (not {', '.join(left_out)}, where a server fell behind)"


def load_words(sweep: PhaseASection, rates_rps: Sequence[float]) -> str:
    """Return the load in words: the rates, and the shape or the file of the requests."""
    rates = ", ".join(f"{rate:g}" for rate in rates_rps)
    shape = f"{sweep['input_tokens']}x{sweep['output_tokens']}"
    if (concurrency := sweep.get("concurrency")) is not None:
        return f"{concurrency} request{'s' * (concurrency > 1)} of {shape} tokens at a time"
    if (traffic := sweep.get("traffic")) is None:
        return f"{rates} requests/s of {shape} tokens"
    file = f"the {traffic['kind']} {traffic['source']}"
    if traffic["kind"] == "trace":
        file += f" at speed {traffic['speed']:g}"
    repeated = traffic["repeated_share"]
    again = f", {repeated:.0%} of the prompt tokens repeated" if repeated else ""
    return f"{rates} requests/s of {file}, on average {shape} tokens{again}"


def command_to_repeat(arguments: Mapping[str, Any]) -> str:
    """Return the command line that measures a comparison again, from its ab.json.

    The line contains no API key, and the files that it names must exist.
    """
    running = "-url" if arguments["baseline"].startswith(("http://", "https://")) else ""
    words = [f"--baseline{running}", arguments["baseline"]]
    for name, line in arguments["candidate"]:
        words += [f"--candidate{running}", line if name == UNNAMED else f"{name}={line}"]
    without_effect = {"baseline", "candidate", "chat"}
    if arguments["prompts"] is None:
        without_effect.add("max_tokens")
    if arguments["trace"] is None:
        without_effect |= {"trace_speed", "trace_block"}
    for key, value in arguments.items():
        if key not in without_effect and value is not None and value not in ([], {}):
            words += [] if value is False else _option(key, value)
    return shlex.join(["connector-tax", "ab", *words])


def _option(key: str, value: Any) -> list[str]:
    """Return an option of `connector-tax ab` with its value, as on the command line."""
    option = f"--{key.replace('_', '-')}"
    if value is True:
        return [option]
    if key == "shape":
        return [option, f"{value[0]}x{value[1]}"]
    if key == "margin":
        return [option, f"{100 * value:g}%"]
    if key == "goodput":
        return [option, ",".join(f"{name}:{limit:g}" for name, limit in value.items())]
    if key == "env":
        return [part for name, of in value for part in (option, f"{name}={of}")]
    if isinstance(value, list):
        return [part for one in value for part in (option, _text(one))]
    return [option, value["file"] if isinstance(value, dict) else _text(value)]


def _text(value: object) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)


def load(study: StudyTables) -> list[tuple[str, str]]:
    """Return the conditions of the measurement: load, machine, date, launches and requests, and
    the command line that repeats it.
    """
    sweep, seen = study.settings["phase_a"], read_json(study.root / paths.ENVIRONMENT)
    measured = [row for row in study.cell_rows if row.block != POOLED and row.status == "valid"]
    gpus = [gpu for gpu in seen.get("gpu", []) if gpu != "no GPU"]
    launches = {(row.config, row.block, row.phase) for row in measured}
    file = []
    if traffic := sweep.get("traffic"):
        used = f"the first {traffic['requests']} requests, sha256 {traffic['sha256']}"
        file = [(traffic["source"], used)]
    again, given = [], study.root / paths.ARGUMENTS
    if given.exists():
        again = [("repeat", command_to_repeat(read_json(given)))]
    loop = "closed" if "concurrency" in sweep else "open"
    return [
        ("load", f"{load_words(sweep, sweep['rates_rps'])}, {loop} loop"),
        *file,
        ("machine", "; ".join([str(seen.get("cpu", "unknown")), *gpus])),
        ("date", str(study.document.get("created_utc", "unknown"))),
        ("version", f"connector-tax {seen.get('connector_tax', 'unknown')}"),
        ("measured", f"{len(launches)} launches, {sum(row.n or 0 for row in measured):,} requests"),
        *again,
    ]  # fmt: skip


def latencies(study: StudyTables) -> list[Latency]:
    """Return each candidate's Phase A percentiles by rate, medians first."""
    pooled = {(row.config, row.cell): row for row in study.pooled}

    def level(config: str, cell: str, metric: str, of: float | None) -> Interval:
        row = pooled.get((config, cell))
        if row is None or metric in THROUGHPUT_METRICS:
            return of, None, None
        value, lo, hi = (row.number(f"{metric}{end}_ms") for end in ("", "_lo", "_hi"))
        if of is None:
            # The other side has no valid cell, so that there is no difference.
            return value, lo, hi
        # The difference uses only the blocks that both sides have; these intervals may use more.
        if value is None or of is None or not math.isclose(value, of):
            return of, None, None
        return value, lo, hi

    names = {item.id for item in study.connectors}
    judged = judged_metrics(study.settings["statistics"])
    throughputs = [metric for metric in judged if metric in THROUGHPUT_METRICS]
    order = list(dict.fromkeys((*throughputs, *MEDIANS_FIRST, *judged)))
    rows = [row for row in study.of(TAX, "A") if row.config in names and row.rate_rps is not None]
    latency_rows = [
        Latency(
            row.config, row.rate_rps or 0.0, row.metric,
            level(study.baseline, row.cell, row.metric, row.base),
            level(row.config, row.cell, row.metric, row.own), row.difference,
        )
        for row in rows
        if row.metric in order
    ]  # fmt: skip
    return sorted(latency_rows, key=lambda one: (one.rate_rps, order.index(one.metric)))


def ms(interval: Interval, *, signed: bool = False) -> str:
    """Return text such as `12.3 [11.9, 12.8]`; a difference with its sign."""
    value, lo, hi = interval
    if value is None:
        return text.DASH
    decimals = 2 if abs(value) < 9.95 else 1

    def number(one: float) -> str:
        return text.signed(one, decimals) if signed else text.number(one, decimals)

    return number(value) + ("" if lo is None or hi is None else f" [{number(lo)}, {number(hi)}]")


def table(study: StudyTables) -> tuple[list[str], list[list[str]]]:
    """Return headings and rows of the latencies in ms, and of the throughputs."""
    latency_rows = latencies(study)
    several = len({one.rate_rps for one in latency_rows}) > 1
    headings = ["ms", study.label(study.baseline), "candidate", "", "difference"]
    rows = [
        [_named(one.metric) + (f" at {one.rate_rps:g}/s" if several else ""),
         ms(one.base), study.label(one.config), ms(one.own), ms(one.difference, signed=True)]
        for one in latency_rows
    ]  # fmt: skip
    return headings, rows


def _named(metric: str) -> str:
    """Return a metric's label, and its unit unless the unit is ms or part of the label."""
    label, unit = ALL_METRICS[metric].label, ALL_METRICS[metric].unit
    return label if unit in ("ms", label) else f"{label}, {unit}"


def aligned(headings: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """Return the lines of a table in columns, for a terminal."""
    widths = [max(map(len, column)) for column in zip(headings, *rows, strict=True)]
    lines = ("  ".join(map(str.ljust, row, widths)).rstrip() for row in (headings, *rows))
    return [f"  {line}" for line in lines]


def markdown(study: StudyTables, answer: Sequence[str]) -> str:
    """Return the answer, what was compared, and the latencies, as Markdown."""
    lines = ["# " + study.name, "", *(f"- {line.strip()}" for line in answer), ""]
    for label, words in commands(study):
        shown = " ".join(f"**{word}**" if other else word for word, other in words)
        lines.append(f"- {label}: {shown}")
    lines += [f"- {name}: {value}" for name, value in load(study)]
    headings, rows = table(study)
    cells = ([cell.replace("|", "/") for cell in row] for row in (headings, *rows))
    return "\n".join([*lines, "", *text.markdown_table(*cells), ""])
