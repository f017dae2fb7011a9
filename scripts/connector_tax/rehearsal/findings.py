"""Describe a rehearsal: durations, cells, decidable effects, and recommended changes."""

import textwrap
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from statistics import median
from typing import Any

import pandas as pd

from connector_tax.analysis.effect import POWER
from connector_tax.analysis.effects import CONFIRMATORY, FEW_REQUESTS
from connector_tax.artifacts.looks import LEFT_OUT, first_look
from connector_tax.artifacts.names import PHASES, configuration_of
from connector_tax.artifacts.study_records import StudyDocument
from connector_tax.artifacts.tables import POOLED, EffectRow, Row
from connector_tax.artifacts.verdicts import CANNOT_TELL, DECIDED, MIN_BLOCKS_FOR_VERDICT
from connector_tax.rehearsal.study import Rehearsal
from connector_tax.study.durations import (
    durations_of,
    expected_cell_s,
    gates_s,
    overloaded_cells,
    probing_s,
)
from connector_tax.text import duration

PHASE_NAMES = {"A": "Phase A", "B": "Phase B", "Bp": "Phase B'"}
# Phase -> the configuration key of its cells.
KEYS = {"A": "phase_a.rates_rps", "B": "phase_b", "Bp": "phase_bp.shapes"}
COLUMNS = 80


@dataclass(frozen=True)
class Section:
    """A section of the page: a heading, sentences, and a table of text."""

    title: str
    sentences: list[str] = field(default_factory=list)
    headings: Sequence[str] = ()
    rows: Sequence[Sequence[str]] = ()


def page(title: str, sections: Sequence[Section]) -> str:
    """Return the sections as a page, readable both in an 80-column terminal and as Markdown."""
    lines = [f"# {title}", ""]
    for section in sections:
        lines += [f"## {section.title}", ""]
        for sentence in section.sentences:
            lines += textwrap.wrap(f"- {sentence}", COLUMNS, subsequent_indent="  ")
        if section.sentences:
            lines.append("")
        if section.rows:
            table = pd.DataFrame(section.rows, columns=list(section.headings))
            lines += ["```", table.to_string(index=False), "```", ""]
    return "\n".join(lines)


def seconds_by_part(rehearsal: Rehearsal) -> dict[str, float]:
    """Return the expected seconds of the study's parts, in run order."""
    study, machine = rehearsal.study, rehearsal.machine
    parts = {"gates": gates_s(study.document, machine.startup_s)}
    if rehearsal.probes_s is not None:
        seconds = probing_s(study.document, machine.startup_s, rehearsal.probes_s)
        parts["probes of the shapes"] = seconds
    around = 0.0
    for phase in PHASES:
        indexes = list(rehearsal.own_indexes(phase))
        parts[PHASE_NAMES[phase]] = sum(i.timing["cells_s"] for i in indexes)
        around += sum(i.timing["startup_s"] + i.timing["release_s"] for i in indexes)
    return {**parts, "start-up and release": around}


def _served(rehearsal: Rehearsal) -> pd.DataFrame:
    """Return a row for each cell of each launch that ran."""
    rows = [
        {
            "phase": launch.phase, "cell": cell, "block": launch.block,
            "is_baseline": launch.configuration == rehearsal.study.baseline,
            "valid": record["valid"], "why": "; ".join(record["void_reasons"]),
            "rate_rps": record["schedule"]["rate_rps"], "dropped": record["counts"]["dropped"],
            **record["rehearsed"],
        }
        for (launch, cell), record in rehearsal.records.items()
    ]  # fmt: skip
    return pd.DataFrame(rows)


def cells_that_cannot_be_valid(rehearsal: Rehearsal) -> dict[tuple[str, str], str]:
    """Return why cells are valid in no launch: the reason by (phase, cell)."""
    served = _served(rehearsal).groupby(["phase", "cell"], sort=False)
    cells = served.agg(valid=("valid", "any"), why=("why", "first"))
    reasons: dict[Any, str] = cells.why[~cells.valid].to_dict()
    return reasons


def sections(rehearsal: Rehearsal) -> list[Section]:
    """Return all sections of a rehearsal in order."""
    chapters = [_duration(rehearsal), _machine(rehearsal), *_cells(rehearsal)]
    if rehearsal.rates is not None:
        chapters += [_taxes(rehearsal), _hypotheses(rehearsal)]
    return [*chapters, Section("Advice", list(advice(rehearsal)) or ["Nothing to change."])]


def assumed(study: StudyDocument) -> Section:
    """Return the expected durations of a study without a machine, and their source."""
    config, known = study["config"], durations_of(study)
    parts = {"gates": gates_s(study, known.startup_s)}
    if config.get("shape_rates") is not None:
        parts["probes of the shapes"] = probing_s(study, known.startup_s, known.probes_s)
    release_s = config["server"]["release_s"]
    runs = {phase: len(order) for phase in PHASES if (order := study["run_order"][phase])}
    for phase, count in runs.items():
        cells_s = [
            expected_cell_s(config["cell"], cell["rate_rps"]) for cell in study["cells"][phase]
        ]
        parts[PHASE_NAMES[phase]] = count * sum(cells_s)
    parts["start-up and release"] = sum(runs.values()) * (known.startup_s + release_s)
    sentences = [
        f"{duration(sum(parts.values()))}, {known.source}.",
        "Not rehearsed: this study names no machine. A cell at an unknown reference rate"
        " counts with its shortest window.",
    ]
    return _parts(parts, sentences)


def _parts(parts: Mapping[str, float], sentences: list[str]) -> Section:
    total = sum(parts.values())
    rows = [[name, duration(s), f"{s / total:.0%}"] for name, s in parts.items()]
    return Section("Duration", sentences, ["part", "takes", "share"], rows)


def _duration(rehearsal: Rehearsal) -> Section:
    parts = seconds_by_part(rehearsal)
    total = sum(parts.values())
    blocks = rehearsal.own_blocks
    texts = [f"{duration(total)} for {blocks} block{'s' if blocks > 1 else ''}."]
    document = rehearsal.study.document
    if overloaded := overloaded_cells(document, durations_of(document)):
        texts.append(f"Overloaded cells, above what the server can serve: {', '.join(overloaded)}.")
    texts += _looks(rehearsal, total)
    return _parts(parts, texts)


def _looks(rehearsal: Rehearsal, total_s: float) -> Iterator[str]:
    """Yield lines on the launches that interim analyses save, and the study's possible times."""
    if "looks" not in rehearsal.study.config["statistics"]:
        return
    first = first_look(rehearsal.study.config["statistics"])
    most_s = least_s = total_s
    saved = []
    for phase in PHASES:
        indexes = list(rehearsal.own_indexes(phase))
        took_s = [
            (i.block, sum(i.timing[part] for part in ("startup_s", "cells_s", "release_s")))
            for i in indexes
            if i.status == "done"
        ]
        left_out = sum((i.reason or "").startswith(LEFT_OUT) for i in indexes)
        if took_s:
            most_s += left_out * median(seconds for _, seconds in took_s)
        least_s -= sum(s for block, s in took_s if phase != "A" or block >= first)
        if indexes:
            saved.append(f"{left_out} of the {len(indexes)} launches of {PHASE_NAMES[phase]}")
    yield (
        f"In this rehearsal, interim analyses leave out {', '.join(saved)}. The study takes at "
        f"most {duration(most_s)}, if no interim analysis decides anything, and at least "
        f"{duration(least_s)}, if the first decides everything."
    )


def _machine(rehearsal: Rehearsal) -> Section:
    machine, rates = rehearsal.machine, rehearsal.rates
    rates_text = f"NO REFERENCE RATE: {rehearsal.no_rate}"
    if rates is not None:
        rates_text = f"ref_safe {rates['ref_safe']:g} req/s, ref_load {rates['ref_load']:g} req/s."
    sentences = [
        *machine.source,
        f"Steps differ by {machine.launch_sd:.1%} from launch to launch.",
        f"KV cache: {machine.kv_tokens:,} tokens. Start-up {machine.startup_s:.0f} s.",
        "A rehearsal assumes a quiet machine and a load generator that is never late.",
        rates_text,
    ]
    return Section("Machine and reference rates", sentences)


def _cells(rehearsal: Rehearsal) -> Iterator[Section]:
    """Yield a table for each phase, with medians over the baseline's launches."""
    served = _served(rehearsal)
    pooled = {
        (row["phase"], row["cell"]): row
        for row in rehearsal.rows
        if row["configuration"] == rehearsal.study.baseline and row["block"] == POOLED
    }
    headings = ["cell", "req/s", "s", "load", "in fl.", "TTFT", "TPOT", "+-%", "drop", "state"]
    note = (
        f"{rehearsal.study.baseline}, medians over launches. s: seconds, with a second measurement "
        "where void. load: share of the time in steps. in fl.: requests in flight. TTFT, TPOT: "
        "p50, ms. +-%: half the interval of the TTFT p90 of one launch."
    )
    for phase in PHASES:
        cells = dict(iter(served[served.is_baseline & (served.phase == phase)].groupby("cell")))
        planned = [c["cell"] for c in rehearsal.study.cells(phase) if c["cell"] in cells]
        rows = [_cell_row(cells[name], pooled.get((phase, name), {})) for name in planned]
        if rows:
            sentences = [note] if phase == PHASES[0] else []
            yield Section(PHASE_NAMES[phase], sentences, headings, rows)


def _cell_row(launches: pd.DataFrame, row: Row) -> list[str]:
    def shown(name: str) -> str:
        value = row.get(name)
        return "" if value is None else f"{value:.4g}"

    valid, count = int(launches.valid.sum()), len(launches)
    state = "valid" if valid == count else f"VOID {count - valid}/{count}"
    if row.get("saturated"):
        state = "saturated" if valid else state
    width = ""
    if row.get("ttft_p90_hi_ms") is not None:
        half = (row["ttft_p90_hi_ms"] - row["ttft_p90_lo_ms"]) / 2 / row["ttft_p90_ms"]
        width = f"{100 * half:.1f}"
    first, middle = launches.iloc[0], launches.median(numeric_only=True)
    return [
        first.cell,
        f"{first.rate_rps:g}",
        f"{middle.seconds:.0f}",
        f"{middle.load:.0%}",
        f"{middle.inflight_p50:.0f}",
        shown("ttft_p50_ms"),
        shown("tpot_p50_ms"),
        width,
        str(round(middle.dropped)),
        state,
    ]


def _taxes(rehearsal: Rehearsal) -> Section:
    """Return the smallest detectable size of each tax that gets a verdict."""
    rows = []
    by_metric = sorted(_confirmatory(rehearsal), key=lambda t: (t.cell, t.metric))
    for (cell, metric), group in groupby(by_metric, key=lambda t: (t.cell, t.metric)):
        taxes = list(group)
        halves = [
            (tax.hi - tax.lo) / 2 for tax in taxes if tax.lo is not None and tax.hi is not None
        ]
        decided = sum(tax.verdict in DECIDED for tax in taxes)
        needed = [tax.blocks_needed for tax in taxes if tax.blocks_needed is not None]
        width = f"{100 * median(halves):.1f}" if halves else ""
        margin = f"{100 * (taxes[0].margin or 0):g}"
        more = str(max(needed, default=""))
        rows.append([cell, metric, width, margin, f"{decided}/{len(taxes)}", more])
    note = (
        f"The study has {rehearsal.study.document['blocks']} blocks, and no connector cost beyond "
        "the machine above. A tax below +-% cannot be distinguished from none. blocks: the number "
        f"of blocks that decides the undecided taxes in {POWER:.0%} of such studies."
    )
    headings = ["cell", "metric", "+-%", "margin %", "decided", "blocks"]
    return Section("Taxes", [note], headings, rows)


def _confirmatory(rehearsal: Rehearsal) -> list[EffectRow]:
    baseline = rehearsal.study.baseline
    return [
        tax
        for tax in rehearsal.taxes
        if tax.family == CONFIRMATORY and configuration_of(tax.config) != baseline
    ]


def _hypotheses(rehearsal: Rehearsal) -> Section:
    sentences = [f"{h['id']}: {h['verdict']}. {h['sentence']}" for h in rehearsal.hypotheses]
    decided = sum(h["verdict"] != CANNOT_TELL for h in rehearsal.hypotheses)
    start = (
        f"{decided} of {len(sentences)} would be decided with "
        f"{rehearsal.study.document['blocks']} blocks, if the taxes equal the rehearsed ones:"
    )
    return Section("Hypotheses", [start, *sentences])


def advice(rehearsal: Rehearsal) -> Iterator[str]:
    """Yield recommended changes, each sentence with its configuration key."""
    config, rates = rehearsal.study.config, rehearsal.rates
    parts = seconds_by_part(rehearsal)
    total_s = sum(parts.values())
    block_s = (total_s - parts["gates"]) / rehearsal.own_blocks
    if rehearsal.own_blocks < MIN_BLOCKS_FOR_VERDICT:
        yield (
            f"blocks: {rehearsal.own_blocks} decides nothing; {MIN_BLOCKS_FOR_VERDICT} take "
            f"{duration(block_s * MIN_BLOCKS_FOR_VERDICT + parts['gates'])}."
        )
    needed = [t.blocks_needed for t in _confirmatory(rehearsal) if t.blocks_needed is not None]
    if needed:
        needed_s = block_s * max(needed) + parts["gates"]
        yield f"blocks: {max(needed)} decide every confirmatory tax, in {duration(needed_s)}."
    few = [tax for tax in _confirmatory(rehearsal) if FEW_REQUESTS in tax.mark]
    for cell, group in groupby(sorted(few, key=lambda t: t.cell), key=lambda t: t.cell):
        taxes = list(group)
        metrics = ", ".join(dict.fromkeys(tax.metric for tax in taxes))
        least = min(tax.n_cell or 0 for tax in taxes)
        yield f"cell.min_completed: {least} requests at {cell} give no verdict on {metrics}."
    if total_s / 3600 > config["hypotheses"]["max_hours"]:
        limit = config["hypotheses"]["max_hours"]
        yield f"hypotheses.max_hours: {limit:g}; the study takes {duration(total_s)}."
    for (phase, cell), reason in cells_that_cannot_be_valid(rehearsal).items():
        yield f"{KEYS[phase]}: {cell} cannot be valid ({reason})."
    yield from _about_rates(rehearsal)
    if rates is None:
        yield "phase_a.rates_rps: add lower rates; Phases B and B' need a reference rate."
    elif rates["ref_safe"] == rates["ref_load"] and "phase_bp" in config:
        yield "phase_bp: skipped, since ref_load equals ref_safe in this rehearsal."
    if preempted := _served(rehearsal).preemptions.sum():
        yield f"cell.inflight_cap: the KV cache is too small for it; {preempted} preemptions."


def _about_rates(rehearsal: Rehearsal) -> Iterator[str]:
    """Yield advice on Phase A rates beyond the baseline's capacity, and on a grid that never
    saturates.
    """
    if rehearsal.rates is None:
        return
    baseline = rehearsal.study.baseline
    saturated = [
        row["cell"]
        for row in rehearsal.rows
        if (row["phase"], row["configuration"], row["block"]) == ("A", baseline, POOLED)
        and (row["saturated"] or row["status"] == "void")
    ]
    if not saturated:
        yield f"phase_a.rates_rps: {baseline} is never saturated; ref_load is only the grid's end."
        return
    first, *beyond = saturated
    if beyond:
        served = _served(rehearsal).query("phase == 'A' and block < @rehearsal.own_blocks")
        seconds = served[served.cell.isin(beyond)].seconds.sum()
        yield (
            f"phase_a.rates_rps: {baseline} saturates at {first}; {', '.join(beyond)} take "
            f"{duration(seconds)} and enter no verdict."
        )
