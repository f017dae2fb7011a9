"""Claims about the raw records: hashes, files, invariants, counters, validity.

A cell is valid, or it is void with a reason (docs/method.md). Nothing here is shared with
connector_tax.analysis or with the load generator.
"""

import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from connector_tax.artifacts.names import PLAIN
from connector_tax.provenance.audit_design import check_design, skipped_rate
from connector_tax.provenance.audit_identities import identities
from connector_tax.provenance.audit_machine import machine_checks, quiet_successes
from connector_tax.provenance.audit_schedule import check_prompts, schedule, window
from connector_tax.provenance.audit_study import RawCell, RawStudy
from connector_tax.provenance.claims import Ledger
from connector_tax.provenance.comparison import differences
from connector_tax.provenance.recompute import (
    Row,
)

# The per-cell records.
CELL_FILES = ("cell", "requests", "metrics", "engine_step")
FAILED = ("error", "timeout", "cancelled")
ENDED = ("ok", *FAILED)
STATUSES = (*ENDED, "dropped")
LATER_CHECKS = {"loop_lag_max_ms", "silent_workers", "unopened_connections", "unstamped_reads"}
# A cell recorded before they were checks lists none of them; they hold for it all the same.
LATEST_CHECKS = {"workers_died", "window_s", "measured_ok", "suspended_ms", "throttled_periods"}
ORDER = ("issue", "worker", "conn", "send", "headers", "first_token", "last_token", "done")
COUNTERS = {
    "success": "vllm:request_success_total",
    "prompt_tokens": "vllm:prompt_tokens_total",
    "generation_tokens": "vllm:generation_tokens_total",
    "prefix_cache_hits": "vllm:prefix_cache_hits_total",
    "external_prefix_cache_hits": "vllm:external_prefix_cache_hits_total",
    "preemptions": "vllm:num_preemptions_total",
}


def check_records(study: RawStudy, ledger: Ledger) -> None:
    """Every claim about the design, the launches and their raw records."""
    check_design(study, ledger)
    for cell in study.cells:
        if cell.measured:
            _check_cell(study, cell, ledger)
        elif cell.status == "skipped" and cell.launch.status != "skipped":
            ledger.check("skip", cell.name, skipped_rate(study, cell), str(cell.reason))
        elif cell.status != "skipped":
            ledger.fail("missing", cell.name, f"{cell.status}: {cell.reason}")
    check_prompts(study, ledger)
    ledger.check("arrivals", "all configurations", _same_arrivals(study), "the same for all")
    ledger.check("request ids", "whole study", _ids(study), "none stands twice")


def _check_cell(study: RawStudy, cell: RawCell, ledger: Ledger) -> None:
    ledger.check("hashes", cell.name, _hashes(study, cell))
    ledger.check("records", cell.name, _records(cell))
    ledger.check("schedule", cell.name, schedule(study, cell))
    ledger.check("window", cell.name, window(study, cell))
    ledger.check("counters", cell.name, _counters(cell))
    if cell.status == "valid":
        ledger.check("identities", cell.name, identities(study, cell, _deltas(cell)))
    ledger.check("validity", cell.name, _validity(study, cell))
    ledger.check("steps", cell.name, _steps(study, cell))


# ---- records of one cell


def _hashes(study: RawStudy, cell: RawCell) -> Iterator[str]:
    assert cell.entry is not None
    listed: Mapping[str, str] = cell.entry["files"]
    kinds = (*CELL_FILES, "machine") if "quiet" in study.config else CELL_FILES
    wanted = {cell.path(kind).name for kind in kinds}
    yield from (f"{name} is not listed in index.json" for name in sorted(wanted - listed.keys()))
    for name, digest in listed.items():
        path = cell.folder / name
        if not path.is_file():
            yield f"{name} is missing"
        elif study.sha256(path) != digest:
            yield f"{name}: sha256 is not what index.json says: changed after it was measured"
    extra = sorted({path.name for path in cell.folder.iterdir()} - listed.keys())
    yield from (f"{name} is in the folder and not in index.json" for name in extra)
    for name, digest in cell.record["files"].items():
        if listed.get(name) != digest:
            yield f"{name}: the cell file and index.json disagree on its sha256"


def _records(cell: RawCell) -> Iterator[str]:
    records, record = cell.requests, cell.record
    for key, value in zip(("config", "block", "phase", "cell"), cell.key, strict=True):
        if record[key] != value:
            yield f"cell file: {key} is {record[key]!r}, its folder says {value!r}"
    if [r["seq"] for r in records] != list(range(len(records))):
        missing = sorted(set(range(record["schedule"]["n"])) - {r["seq"] for r in records})
        yield f"seq does not count 0 to {len(records) - 1}; missing: {missing[:5]}"
    yield from _counts(cell)
    shape = (cell.planned["input_tokens"], cell.planned["output_tokens"])
    if (record["input_tokens"], record["output_tokens"]) != shape:
        yield f"the cell file's shape is not the design's {shape[0]}x{shape[1]}"
    for r in records:
        if r["status"] not in STATUSES:
            yield f"seq {r['seq']}: status {r['status']!r}"
        if r["status"] == "ok" and (r["prompt_tokens"], r["completion_tokens"]) != shape:
            asked = f"{shape[0]}x{shape[1]}"
            yield f"seq {r['seq']}: {r['prompt_tokens']}x{r['completion_tokens']}, asked {asked}"
        if r["status"] in FAILED and not r["error_kind"]:
            yield f"seq {r['seq']}: {r['status']} without an error_kind"
        yield from _stamps(r, record["window"])


def _counts(cell: RawCell) -> Iterator[str]:
    records, counts = cell.requests, cell.record["counts"]
    states = [r["status"] for r in records]
    kinds = [r["error_kind"] for r in records if r["status"] in FAILED]
    found = {
        "planned": len(records),
        "sent": sum(r["t_send_ns"] is not None for r in records),
        "ok": states.count("ok"),
        "dropped": states.count("dropped"),
        "failed": {kind: kinds.count(kind) for kind in sorted(set(kinds))},
        "measured_ok": sum(r["status"] == "ok" for r in _measured(cell)),
    }
    for key, value in found.items():
        if counts[key] != value:
            yield f"counts.{key} is {counts[key]}, the records give {value}"
    if found["ok"] + found["dropped"] + len(kinds) != len(records):
        yield "ok + failed + dropped is not the number of records"


def _measured(cell: RawCell) -> list[Row]:
    start, stop = (cell.record["window"][f"t_{name}_ns"] for name in ("warmup_end", "stop"))
    return [r for r in cell.requests if start <= r["t_intended_ns"] < stop]


def _stamps(r: Row, window: Mapping[str, Any]) -> Iterator[str]:
    where = f"seq {r['seq']}"
    names = [name for name in ORDER if r[f"t_{name}_ns"] is not None]
    stamps = [r[f"t_{name}_ns"] for name in names]
    for (a, x), (b, y) in itertools.pairwise(zip(names, stamps, strict=True)):
        if x > y:
            yield f"{where}: t_{b}_ns is before t_{a}_ns"
    if r["t_send_ns"] is not None and r["t_send_ns"] < r["t_intended_ns"]:
        yield f"{where}: written before it was due"
    if r["status"] == "ok" and len(names) < len(ORDER):
        yield f"{where}: a success lacks a stamp"
    if r["status"] == "ok" and r["t_last_token_ns"] > window["t_drained_ns"]:
        yield f"{where}: its last token is after the cell was drained"
    if r["warmup"] != (r["t_intended_ns"] < window["t_warmup_end_ns"]):
        yield f"{where}: warmup is {r['warmup']}, its arrival says otherwise"
    if r.get("cooldown", False) != (r["t_intended_ns"] >= window["t_stop_ns"]):
        yield f"{where}: cooldown is {r.get('cooldown')}, its arrival says otherwise"
    if r["reads"] and r["status"] == "ok":
        times = [t for t, _ in r["reads"]]
        ends = (r["t_first_token_ns"], r["t_last_token_ns"])
        if times != sorted(times) or (times[0], times[-1]) != ends:
            yield f"{where}: reads do not run from the first token to the last"


# ---- counters, validity, steps


def _series(values: Mapping[str, float], name: str) -> float | None:
    found = [value for key, value in values.items() if key.split("{")[0] == name]
    return sum(found) if found else None


def _deltas(cell: RawCell) -> dict[str, float | None]:
    first, last = cell.metrics[0]["values"], cell.metrics[-1]["values"]
    deltas: dict[str, float | None] = {}
    for key, name in COUNTERS.items():
        before, after = _series(first, name), _series(last, name)
        deltas[key] = None if before is None or after is None else after - before
    return deltas


def _counters(cell: RawCell) -> Iterator[str]:
    for moment, scrape in (("before", cell.metrics[0]), ("after", cell.metrics[-1])):
        found = {key: _series(scrape["values"], name) for key, name in COUNTERS.items()}
        if cell.record["server_counters"][moment] != found:
            yield f"server_counters.{moment} is not what the {moment} scrape holds"
    if cell.status != "valid":
        return
    deltas = _deltas(cell)
    for key in ("prefix_cache_hits", "external_prefix_cache_hits"):
        if deltas[key] != 0:
            yield f"{key} grew by {deltas[key]}; a valid cell has none"
    ok = [r for r in cell.requests if r["status"] == "ok"]
    if not any(r["status"] in FAILED for r in cell.requests):
        counted = {
            "success": len(ok),
            "prompt_tokens": sum(r["prompt_tokens"] for r in ok),
            "generation_tokens": sum(r["completion_tokens"] for r in ok),
        }
        for key, value in counted.items():
            if deltas[key] != value:
                yield f"the server counted {deltas[key]} {key}, the records {value}"


def _validity(study: RawStudy, cell: RawCell) -> Iterator[str]:
    found = recomputed_checks(study, cell)
    valid = all(check["pass"] for check in found.values())
    if not LATEST_CHECKS & cell.record["health"].keys():
        found = {name: check for name, check in found.items() if name not in LATEST_CHECKS}
    if cell.record["valid"] != valid:
        yield f"valid is {cell.record['valid']}, the checks give {valid}"
    if (cell.status == "valid") != valid:
        yield f"index.json says {cell.status}, the checks give {'valid' if valid else 'void'}"
    health = cell.record["health"]
    if health.keys() != found.keys():
        yield f"health lists {sorted(health.keys() ^ found.keys())} more or less than the checks"
    for name in health.keys() & found.keys():
        for difference in differences(health[name], found[name], name):
            yield f"health: {difference}"
    if len(cell.record["void_reasons"]) != sum(not c["pass"] for c in found.values()):
        yield "void_reasons does not name every failed check"
    if cell.status == "void" and not cell.reason:
        yield "void without a reason"


def recomputed_checks(study: RawStudy, cell: RawCell) -> dict[str, Row]:
    """Every check of the cell from the raw records: value, bound, pass."""
    bounds, records = study.config["validity"], cell.requests
    ok = [r for r in records if r["status"] == "ok"]
    failed = sum(r["status"] in FAILED for r in records)
    # The drain may cut requests of the cool-down: they do not count as errors.
    stop = cell.record["window"]["t_stop_ns"]
    judged = [r["status"] for r in records if r["t_intended_ns"] < stop and r["status"] in ENDED]
    deltas, shape = _deltas(cell), (cell.record["input_tokens"], cell.record["output_tokens"])

    def excess(key: str, counted: int, most: int) -> Row:
        delta = deltas[key]
        return _between(None if delta is None else delta - counted, 0, most)

    unfinished = sum(r["status"] not in STATUSES for r in records)
    planned = cell.record["counts"]["planned"]
    share = sum(status in FAILED for status in judged) / len(judged) if judged else None
    return {
        **_timing_checks(_measured(cell), quiet_successes(study, cell), bounds),
        "unaccounted_requests": _most(abs(planned - len(records)) + unfinished, 0),
        "error_rate": _most(share, bounds["max_error_rate"]),
        **_window_checks(study, cell),
        "server_success_excess": excess("success", len(ok), failed),
        "server_prompt_tokens_excess": excess(
            "prompt_tokens", sum(r["prompt_tokens"] for r in ok), failed * shape[0]
        ),
        "server_generation_tokens_excess": excess(
            "generation_tokens", sum(r["completion_tokens"] for r in ok), failed * shape[1]
        ),
        "prefix_cache_hits": _between(deltas["prefix_cache_hits"], 0, 0),
        "external_prefix_cache_hits": _between(deltas["external_prefix_cache_hits"], 0, 0),
        **_generator_checks(study, cell),
        "metrics_scrapes": _scrapes(cell),
        "suspended_ms": _most(_suspended(cell), 100),
        **machine_checks(study, cell),
    }


def _window_checks(study: RawStudy, cell: RawCell) -> dict[str, Row]:
    rule, times = study.config["cell"], cell.record["window"]
    precision = study.config.get("precision", {"enabled": False})
    length = (times["t_stop_ns"] - times["t_warmup_end_ns"]) / 1e9
    floor = precision["min_completed_floor"] if precision["enabled"] else rule["min_completed"]
    at_cap = round(length * 1e9) >= round(rule["cap_s"] * 1e9)
    least = 0 if at_cap else floor
    good = sum(r["status"] == "ok" for r in _measured(cell))
    limits = (round(rule[name] * 1e9) / 1e9 for name in ("floor_s", "cap_s"))
    return {
        "window_s": _between(length, *limits),
        "measured_ok": {"value": good, "bound": least, "pass": good >= least},
    }


def _suspended(cell: RawCell) -> float | None:
    """The suspended time of the cell; 0 for one recorded before anybody looked."""
    if "suspended_ms" not in cell.record and not LATEST_CHECKS & cell.record["health"].keys():
        return 0
    value: float | None = cell.record.get("suspended_ms")
    return value


def _most(value: float | None, bound: float) -> Row:
    return {"value": value, "bound": bound, "pass": value is not None and value <= bound}


def _between(value: float | None, low: float, high: float) -> Row:
    inside = value is not None and low <= value <= high
    return {"value": value, "bound": [low, high], "pass": inside}


def _timing_checks(
    measured: Sequence[Row], quiet: Sequence[int] | None, bounds: Mapping[str, float]
) -> dict[str, Row]:
    """The checks of the schedule; `quiet`: the successes that count, None: all."""
    kept = None if quiet is None else set(quiet)
    lags = [(r["t_send_ns"] - r["t_intended_ns"]) / 1e6 for r in measured if r["t_send_ns"]]
    late, ttft = [], []
    for r in measured:
        if kept is not None and r["status"] == "ok" and r["seq"] not in kept:
            continue
        if r["t_send_ns"]:
            late.append((r["t_send_ns"] - r["t_intended_ns"]) / 1e6)
        if r["status"] == "ok":
            ttft.append((r["t_first_token_ns"] - r["t_intended_ns"]) / 1e6)
    lag = bounds["schedule_lag_p99_ms"]
    if ttft:
        lag = max(lag, bounds["schedule_lag_ttft_fraction"] * float(np.median(ttft)))
    ratio = None
    if len(measured) > 1 and all(r["t_issue_ns"] is not None for r in measured):
        # A dropped request never reaches the socket; the time it was issued stands in.
        first, last = (r["t_send_ns"] or r["t_issue_ns"] for r in (measured[0], measured[-1]))
        due = measured[-1]["t_intended_ns"] - measured[0]["t_intended_ns"]
        ratio = due / (last - first) if last > first else None
    tolerance = bounds["sent_rate_tolerance"]
    return {
        "schedule_lag_p99_ms": _most(float(np.percentile(late, 99)) if late else None, lag),
        "early_send_ms": _most(max(0.0, -min(lags)) if lags else None, 0.0),
        "sent_rate_ratio": _between(ratio, 1 - tolerance, 1 + tolerance),
    }


def _generator_checks(study: RawStudy, cell: RawCell) -> dict[str, Row]:
    bounds, said = study.config["validity"], cell.record["load_generator"]
    processes: Mapping[str, Row] = said["processes"]
    workers = [values for name, values in processes.items() if name != "main"]

    def worst(key: str) -> float | None:
        values = [process.get(key) for process in processes.values()]
        known = [value for value in values if value is not None]
        return max(known) if known and len(known) == len(values) else None

    kinds = ("undecodable", "oversized", "dropped_messages", "late_results")
    counts = [process.get(kind) for process in processes.values() for kind in kinds[:3]]
    counts.append(processes["main"].get(kinds[3]))
    known = [count for count in counts if count is not None]
    checks = {
        "loop_lag_p99_ms": _most(worst("loop_lag_p99_ms"), bounds["loop_lag_p99_ms"]),
        "cpu_share": _most(worst("cpu_share"), bounds["max_cpu_share"]),
        "lost_messages": _most(sum(known) if len(known) == len(counts) else None, 0),
        "workers_died": _most(len(said["workers_died"]), 0),
    }
    if _lacks_later_checks(cell):
        return checks
    options = study.config["load_generator"]
    opened = sum(said["connections"].values())
    reads = sum(worker["reads"] for worker in workers)
    unstamped = sum(worker["unstamped_reads"] for worker in workers)
    share = (unstamped / reads if reads else None) if cell.record["clock"] == "kernel" else 0.0
    return checks | {
        "loop_lag_max_ms": _most(worst("loop_lag_max_ms"), bounds["loop_lag_max_ms"]),
        "silent_workers": _most(options["workers"] - len(workers), 0),
        "unopened_connections": _most(
            options["workers"] * options["connections_per_worker"] - opened, 0
        ),
        "unstamped_reads": _most(share, 0.01),
    }


def _lacks_later_checks(cell: RawCell) -> bool:
    """True for a cell recorded before there was a cool-down and before there were these checks."""
    return "cooldown" not in cell.record and not LATER_CHECKS & cell.record["health"].keys()


def _scrapes(cell: RawCell) -> Row:
    window = cell.record["window"]
    start, stop = window["t_warmup_end_ns"], window["t_stop_ns"]
    inside = sum(start <= s["t_ns"] < stop for s in cell.metrics)
    failed = sum(not s["ok"] for s in cell.metrics)
    value = inside - failed if inside else None
    return {"value": value, "bound": inside, "pass": inside > 0 and failed == 0}


def _steps(study: RawStudy, cell: RawCell) -> Iterator[str]:
    if not study.step_timing:
        return
    records = cell.steps()
    scheduler = [r["step_id"] for r in records if r["process"] == "scheduler"]
    if len(set(scheduler)) != len(scheduler):
        yield "the scheduler has two records of one step"
    if not scheduler and cell.record["counts"]["ok"]:
        yield "requests were served and no step is recorded"
    origin = cell.record["window"]["t_origin_ns"]
    if any(r["t_ns"] < origin for r in records if r["process"] == "scheduler"):
        yield "a step began before the cell did"
    if cell.launch.configuration == PLAIN:
        calls = ("build_meta_us", "get_finished_us", "start_load_kv_us")
        if any(r[name] is not None for r in records for name in calls):
            yield "plain has a connector callback"


# ---- across cells


def _same_arrivals(study: RawStudy) -> Iterator[str]:
    seen: dict[tuple[int, str, str], tuple[str, list[int]]] = {}
    for cell in study.cells:
        if not cell.measured:
            continue
        origin = cell.record["window"]["t_origin_ns"]
        due = [r["t_intended_ns"] - origin for r in cell.requests]
        name, first = seen.setdefault(cell.key[1:], (cell.name, due))
        shared = min(len(due), len(first))
        if due[:shared] != first[:shared]:
            yield f"{cell.name} has other arrivals than {name}"


def _ids(study: RawStudy) -> Iterator[str]:
    seen: dict[str, str] = {}
    for cell in study.cells:
        for r in cell.requests if cell.measured else ():
            if r["request_id"] in seen:
                yield f"{r['request_id']!r} in {seen[r['request_id']]} and {cell.name}"
            seen[r["request_id"]] = cell.name
