"""The checks of a cell again, from its raw records: valid, or void with a reason (docs/method.md).

Nothing here is shared with connector_tax.analysis or with the load generator.
"""

from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from connector_tax.artifacts.names import REQUEST_STATUSES
from connector_tax.provenance.audit_machine import at_most, machine_checks, quiet_successes
from connector_tax.provenance.audit_study import FAILED, RawCell, RawStudy
from connector_tax.provenance.comparison import differences
from connector_tax.provenance.recompute import Row

LATER_CHECKS = {"loop_lag_max_ms", "silent_workers", "unopened_connections", "unstamped_reads"}
# A cell recorded before they were checks lists none of them; they hold for it all the same.
LATEST_CHECKS = {"workers_died", "window_s", "measured_ok", "suspended_ms", "throttled_periods"}


def validity(study: RawStudy, cell: RawCell) -> Iterator[str]:
    """A cell is valid, or it is void with a reason: its checks again."""
    checks = recomputed_checks(study, cell)
    valid = all(check["pass"] for check in checks.values())
    if not LATEST_CHECKS & cell.record["health"].keys():
        checks = {name: check for name, check in checks.items() if name not in LATEST_CHECKS}
    if cell.record["valid"] != valid:
        yield f"valid is {cell.record['valid']}, the checks give {valid}"
    if (cell.status == "valid") != valid:
        yield f"index.json says {cell.status}, the checks give {'valid' if valid else 'void'}"
    health = cell.record["health"]
    if health.keys() != checks.keys():
        yield f"health lists {sorted(health.keys() ^ checks.keys())} more or less than the checks"
    for name in health.keys() & checks.keys():
        for difference in differences(health[name], checks[name], name):
            yield f"health: {difference}"
    if len(cell.record["void_reasons"]) != sum(not c["pass"] for c in checks.values()):
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
    judged = [
        r["status"] for r in records if r["t_intended_ns"] < stop and r["status"] in ("ok", *FAILED)
    ]
    deltas, shape = cell.counter_growth, (cell.record["input_tokens"], cell.record["output_tokens"])

    def excess(key: str, counted: int, most: int) -> Row:
        delta = deltas[key]
        return _between(None if delta is None else delta - counted, 0, most)

    unfinished = sum(r["status"] not in REQUEST_STATUSES for r in records)
    planned = cell.record["counts"]["planned"]
    share = sum(status in FAILED for status in judged) / len(judged) if judged else None
    return {
        **_timing_checks(cell.in_window, quiet_successes(study, cell), bounds),
        "unaccounted_requests": at_most(abs(planned - len(records)) + unfinished, 0),
        "error_rate": at_most(share, bounds["max_error_rate"]),
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
        "suspended_ms": at_most(_suspended(cell), 100),
        **machine_checks(study, cell),
    }


def _window_checks(study: RawStudy, cell: RawCell) -> dict[str, Row]:
    rule, times = study.config["cell"], cell.record["window"]
    precision = study.config.get("precision", {"enabled": False})
    length = (times["t_stop_ns"] - times["t_warmup_end_ns"]) / 1e9
    floor = precision["min_completed_floor"] if precision["enabled"] else rule["min_completed"]
    at_cap = round(length * 1e9) >= round(rule["cap_s"] * 1e9)
    least = 0 if at_cap else floor
    good = sum(r["status"] == "ok" for r in cell.in_window)
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
        "schedule_lag_p99_ms": at_most(float(np.percentile(late, 99)) if late else None, lag),
        "early_send_ms": at_most(max(0.0, -min(lags)) if lags else None, 0.0),
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
        "loop_lag_p99_ms": at_most(worst("loop_lag_p99_ms"), bounds["loop_lag_p99_ms"]),
        "cpu_share": at_most(worst("cpu_share"), bounds["max_cpu_share"]),
        "lost_messages": at_most(sum(known) if len(known) == len(counts) else None, 0),
        "workers_died": at_most(len(said["workers_died"]), 0),
    }
    if _lacks_later_checks(cell):
        return checks
    options = study.config["load_generator"]
    opened = sum(said["connections"].values())
    reads = sum(worker["reads"] for worker in workers)
    unstamped = sum(worker["unstamped_reads"] for worker in workers)
    share = (unstamped / reads if reads else None) if cell.record["clock"] == "kernel" else 0.0
    return checks | {
        "loop_lag_max_ms": at_most(worst("loop_lag_max_ms"), bounds["loop_lag_max_ms"]),
        "silent_workers": at_most(options["workers"] - len(workers), 0),
        "unopened_connections": at_most(
            options["workers"] * options["connections_per_worker"] - opened, 0
        ),
        "unstamped_reads": at_most(share, 0.01),
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
