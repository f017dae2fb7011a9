"""The watched machine again, from the raw lines: disturbed chunks, quiet requests, the checks.

Nothing here is shared with connector_tax.analysis: the rule is written down a second time, chunk by
chunk and request by request.
"""

import itertools
import math
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from connector_tax.artifacts import paths
from connector_tax.artifacts.launch_files import QuietLevel
from connector_tax.artifacts.stage_records import EnvironmentRecord
from connector_tax.artifacts.study_records import QuietSection
from connector_tax.files import read_json
from connector_tax.provenance.audit_study import RawCell, RawStudy
from connector_tax.provenance.recompute import Row

LEAST_SAMPLES = 3
# Checked where the kernel counts it, and where nvidia-smi tells.
WHERE_TOLD = ("throttled_periods", "foreign_gpu_processes")
Interval = tuple[int, int]


def machine_checks(study: RawStudy, cell: RawCell) -> dict[str, Row]:
    """The checks of a watched machine; none in a study without a `quiet` section."""
    if "quiet" not in study.config:
        return {}
    bounds, quiet = study.config["validity"], study.config["quiet"]
    values: dict[str, Any] = dict.fromkeys(
        ("quiet_requests", "idle_memory_factor", "server", "loadgen", *WHERE_TOLD)
    )
    if cell.path("machine").exists():
        lines = cell.machine
        values |= cpu_shares(lines)
        values["throttled_periods"] = throttled_periods(lines)
        values["foreign_gpu_processes"] = foreign_gpu_processes(lines)
        values["quiet_requests"] = len(quiet_successes(study, cell) or ())
        level = _quiet_level(study, cell)
        if level is not None:
            begin = next(r for r in lines if r["kind"] == "begin")
            medians = [np.median(r["memory_ns"]) for r in lines if r["kind"] == "look"]
            latency = float(max(medians)) / begin["elements"]
            values["idle_memory_factor"] = latency / level["memory_ns"]
    precision = study.config["precision"]
    wanted = study.config["cell"]["min_completed"]
    if precision["enabled"]:
        wanted = precision["min_completed_floor"]
    least = math.ceil(quiet["min_quiet_share"] * wanted)
    value = values["quiet_requests"]
    checks = {
        "quiet_requests": {
            "value": value, "bound": least, "pass": value is not None and value >= least,
        },
        "idle_memory_factor": at_most(
            values["idle_memory_factor"], bounds["max_idle_memory_factor"]
        ),
        "foreign_cpu_server": at_most(values["server"], bounds["max_foreign_cpu"]),
        "foreign_cpu_loadgen": at_most(values["loadgen"], bounds["max_foreign_cpu"]),
        **{name: at_most(values[name], 0) for name in WHERE_TOLD},
    }  # fmt: skip
    there = cell.path("machine").exists()
    return {
        k: v for k, v in checks.items() if not (there and k in WHERE_TOLD and values[k] is None)
    }


def _quiet_level(study: RawStudy, cell: RawCell) -> QuietLevel | None:
    """Of the cell's block and phase; in studies measured before each had one, of the study."""
    attempts = () if cell.launch.index is None else cell.launch.index.attempts
    for attempt in attempts:
        if attempt["attempt"] == cell.record["attempt"] and "quiet_level" in attempt:
            return attempt["quiet_level"]
    of_study: EnvironmentRecord = read_json(study.root / paths.ENVIRONMENT)
    return of_study.get("quiet_level")


def quiet_successes(study: RawStudy, cell: RawCell) -> list[int] | None:
    """`seq` of the window's successes that lived within the chunks and in no disturbed one.

    None in a study without a `quiet` section: nothing is left out.
    """
    if "quiet" not in study.config:
        return None
    if not cell.path("machine").exists():
        return []
    window = cell.record["window"]
    start, stop = window["t_warmup_end_ns"], window["t_stop_ns"]
    chunks = disturbed_chunks(cell.machine, study.config["quiet"])
    return quiet_seqs(chunks, [r for r in cell.requests if start <= r["t_intended_ns"] < stop])


def quiet_seqs(chunks: Sequence[tuple[int, int, bool]], requests: Sequence[Row]) -> list[int]:
    """`seq` of the successes that lived within the chunks and in no disturbed one."""
    kept = []
    for r in requests:
        if r["status"] != "ok":
            continue
        start, end = r["t_intended_ns"], r["t_last_token_ns"]
        watched = bool(chunks) and chunks[0][0] <= start and end <= chunks[-1][1]
        # The chunk a moment falls in: the last that begins at or before it.
        met = [bad for first, last, bad in chunks if first <= end and start < last]
        if watched and start == chunks[-1][1]:
            met.append(chunks[-1][2])
        if watched and not any(met):
            kept.append(int(r["seq"]))
    return kept


def quiet_columns(study: RawStudy, cell: RawCell) -> Row:
    """The aggregate table's columns about the machine in a cell's window."""
    if "quiet" not in study.config:
        return {"quiet_share": None, "memory_ns_p50": None}
    window = cell.record["window"]
    start, stop = window["t_warmup_end_ns"], window["t_stop_ns"]
    quiet_ns = sum(
        max(0, min(last, stop) - max(first, start))
        for first, last, bad in disturbed_chunks(cell.machine, study.config["quiet"])
        if not bad
    )
    inside = [memory_ns for t_ns, memory_ns in samples(cell.machine) if start <= t_ns < stop]
    elements = next(r["elements"] for r in cell.machine if r["kind"] == "begin")
    return {
        "quiet_share": quiet_ns / (stop - start),
        "memory_ns_p50": float(np.median(inside)) / elements if inside else None,
    }


def samples(lines: Sequence[Row]) -> Iterator[Interval]:
    """When each sample began, and the CPU time of its loads, in ns."""
    base = 0
    for line in lines:
        if line["kind"] == "chunk":
            for at_us, memory_ns in zip(line["at_us"], line["memory_ns"], strict=True):
                yield base + 1000 * at_us, memory_ns
        if line["kind"] in ("begin", "chunk"):
            base = line["t_ns"]


def disturbed_chunks(lines: Sequence[Row], quiet: QuietSection) -> list[tuple[int, int, bool]]:
    """Each chunk's beginning, its end, and whether it is disturbed."""
    marks = [r for r in lines if r["kind"] in ("begin", "chunk")]
    values = [
        float(np.percentile(mark["memory_ns"], quiet["chunk_percentile"]))
        if len(mark["memory_ns"]) >= LEAST_SAMPLES
        else None
        for mark in marks[1:]
    ]
    known = [value for value in values if value is not None]
    limit = most_steal = math.inf
    if known and quiet["max_factor"] is not None:
        limit = quiet["max_factor"] * float(np.percentile(known, quiet["level_percentile"]))
    if quiet["max_chunk_steal"] is not None:
        most_steal = quiet["max_chunk_steal"]
    chunks = []
    for value, (before, mark) in zip(values, itertools.pairwise(marks), strict=True):
        stolen = max(_steal_shares(marks[0], before, mark))
        bad = value is None or value > limit or stolen > most_steal
        chunks.append((before["t_ns"], mark["t_ns"], bad))
    return chunks


def _steal_shares(begin: Row, before: Row, mark: Row) -> list[float]:
    """What the hypervisor took of each side's CPUs between two lines."""
    wall_ms = (mark["t_ns"] - before["t_ns"]) / 1e6
    totals = zip(before["counters"]["steal_ms"], mark["counters"]["steal_ms"], strict=True)
    return [
        (after - earlier) / len(begin[side]) / wall_ms
        for side, (earlier, after) in zip(("loadgen", "server"), totals, strict=True)
    ]


def throttled_periods(lines: Sequence[Row]) -> int | None:
    """Periods the control group was throttled in; None where the kernel does not count them."""
    counts = [r["counters"]["throttled"] for r in lines if r["kind"] in ("begin", "chunk")]
    return None if counts[-1] is None else int(counts[-1] - counts[0])


def foreign_gpu_processes(lines: Sequence[Row]) -> int | None:
    """Processes of others on the study's GPUs; None without GPUs, or where nobody told."""
    told = [r["foreign_gpu_pids"] for r in lines if r.get("foreign_gpu_pids") is not None]
    return len(set(itertools.chain(*told))) if told else None


def cpu_shares(lines: Sequence[Row]) -> dict[str, float]:
    begin = next(r for r in lines if r["kind"] == "begin")
    end = [r for r in lines if r["kind"] == "chunk"][-1]
    shared = begin["loadgen"] == begin["server"]
    grown = {
        name: np.subtract(end["counters"][name], begin["counters"][name])
        for name in ("idle_ms", "steal_ms", "own_ms")
    }
    shares: dict[str, float] = {}
    for side, name in enumerate(("loadgen", "server")):
        whole = (end["t_ns"] - begin["t_ns"]) / 1e6 * len(begin[name])
        ours = grown["own_ms"].clip(0)
        own = ours.sum() if shared else ours[side]
        rest = whole - grown["idle_ms"][side] - grown["steal_ms"][side] - own
        shares[name] = max(0.0, float(rest)) / whole
    return shares


def at_most(value: float | None, bound: float) -> Row:
    """A check that passes up to its bound, and fails without a value."""
    return {"value": value, "bound": bound, "pass": value is not None and value <= bound}
