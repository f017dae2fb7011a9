"""Judge a cell: valid, or void with a reason.

All checks (`artifacts.checks.CHECKS`) are two-sided where a value can be wrong both ways. Missing
data fails: a check whose value is None never passes.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from connector_tax.analysis.machine import WatchedMachine
from connector_tax.artifacts.cell_records import (
    SIDES,
    AnsweredRequest,
    CheckRecord,
    CountsRecord,
    MeasuredCellRecord,
    MeasuredWindow,
    RequestLine,
    ScrapeMoment,
    is_answered,
)
from connector_tax.artifacts.checks import (
    CHECKS,
    COUNTER_CHECKS,
    DEVICE_CHECKS,
    IDLE_PLACES_MAX,
    LOOP_CHECKS,
    MACHINE_CHECKS,
    SUSPENDED_MS_MAX,
    at_most,
    generator_checks,
    schedule_check,
)
from connector_tax.artifacts.names import FAILED, REQUEST_STATUSES
from connector_tax.artifacts.study_records import CellSection, StudyConfig, TrafficSection

COUNTERS = {
    "success": "vllm:request_success_total",
    "prompt_tokens": "vllm:prompt_tokens_total",
    "generation_tokens": "vllm:generation_tokens_total",
    "prefix_cache_hits": "vllm:prefix_cache_hits_total",
    "external_prefix_cache_hits": "vllm:external_prefix_cache_hits_total",
    "preemptions": "vllm:num_preemptions_total",
}


def server_counters(values: Mapping[str, float]) -> dict[str, float | None]:
    """Return the counters for the checks, summed over label sets; None for a missing series.

    Args:
        values: `values` of one metrics record (`{name{labels}: number}`).
    """
    totals: dict[str, float | None] = {}
    for key, name in COUNTERS.items():
        series = [v for k, v in values.items() if k == name or k.startswith(name + "{")]
        totals[key] = sum(series) if series else None
    return totals


def in_window(records: Sequence[RequestLine], window: MeasuredWindow) -> list[RequestLine]:
    """Return the requests due after the warm-up and before the end of the window."""
    start, stop = window["t_warmup_end_ns"], window["t_stop_ns"]
    return [r for r in records if start <= r["t_intended_ns"] < stop]


def counted(records: Sequence[RequestLine], window: MeasuredWindow) -> CountsRecord:
    """Count a cell's requests by outcome."""
    states = [r["status"] for r in records]
    kinds = [r["error_kind"] for r in records if r["status"] in FAILED]
    return {
        "planned": len(records),
        "sent": sum(r["t_send_ns"] is not None for r in records),
        "ok": states.count("ok"),
        "dropped": states.count("dropped"),
        "failed": {str(kind): kinds.count(kind) for kind in sorted(set(kinds), key=str)},
        "measured_ok": sum(r["status"] == "ok" for r in in_window(records, window)),
    }


def assess(
    record: MeasuredCellRecord,
    requests: Sequence[RequestLine],
    scrapes: Sequence[ScrapeMoment],
    config: StudyConfig,
    *,
    machine: WatchedMachine | None = None,
    watched: bool = False,
    device: Mapping[str, float | None] | None = None,
    counted_by_server: bool = True,
) -> dict[str, CheckRecord]:
    """Return every check of `CHECKS` for one cell: `{check: {"value", "bound", "pass"}}`.

    Args:
        record: the cell's record, with `suspended_ms`, `server_counters` and `load_generator`.
        requests: all requests of the cell, including warm-up and cool-down.
        config: the study's configuration, of which sections `cell` and `validity` are used.
        machine: the cell's machine file; None if there is none.
        watched: whether a machine file is required; if not, MACHINE_CHECKS are left out.
        device: values for DEVICE_CHECKS, by check (`device_time.device_values`; for the baseline
            only: device_exposed_share); None if no device is emulated.
        counted_by_server: whether the server counts under vLLM's names; else COUNTER_CHECKS are
            left out.
    """
    window, bounds = record["window"], config["validity"]
    measured = in_window(requests, window)
    ok = [r for r in requests if is_answered(r)]
    failed = [r for r in requests if r["status"] in FAILED]
    if concurrency := config["phase_a"].get("concurrency"):
        checks = {"idle_places": at_most(_idle(requests, window, concurrency), IDLE_PLACES_MAX)}
    else:
        unaccounted = abs(record["counts"]["planned"] - len(requests))
        unaccounted += sum(r["status"] not in REQUEST_STATUSES for r in requests)
        checks = _schedule_checks(measured, bounds)
        checks["unaccounted_requests"] = at_most(unaccounted, 0)
    checks |= {
        "error_rate": at_most(_error_rate(ok, failed, window), bounds["max_error_rate"]),
        **_window_checks(measured, window, config["cell"]),
        **generator_checks(record["load_generator"], record["clock"], bounds),
        "suspended_ms": at_most(record["suspended_ms"], SUSPENDED_MS_MAX),
    }
    if counted_by_server:
        checks |= _server_checks(ok, len(failed), record, config["phase_a"].get("traffic"))
        checks["metrics_scrapes"] = _scrape_check(scrapes, window)
    absent = LOOP_CHECKS["open" if concurrency else "closed"]
    absent += () if counted_by_server else COUNTER_CHECKS
    assert checks.keys() == CHECKS.keys() - {*MACHINE_CHECKS, *DEVICE_CHECKS, *absent}
    if watched:
        checks |= _machine_checks(machine, bounds)
    for name, value in (device or {}).items():
        # Each check has one bound; the check of faults has none, so its sum is 0.
        checks[name] = at_most(value, sum(bounds[key] for key in CHECKS[name].bounds))
    return checks


def void_reasons(checks: Mapping[str, CheckRecord]) -> list[str]:
    """Return a sentence for each failed check, with value and bound; empty for a valid cell."""
    return [
        f"{CHECKS[name].void}: {name} {_shown(check['value'])}, allowed {_shown(check['bound'])}"
        for name, check in checks.items()
        if not check["pass"]
    ]


def _shown(value: Any) -> str:
    if value is None:
        return "missing"
    if isinstance(value, list):
        return f"{_shown(value[0])} to {_shown(value[1])}"
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _at_least(value: float | None, bound: float) -> CheckRecord:
    return {"value": value, "bound": bound, "pass": value is not None and value >= bound}


def _within(value: float | None, low: float, high: float) -> CheckRecord:
    return {
        "value": value,
        "bound": [low, high],
        "pass": value is not None and low <= value <= high,
    }


def _error_rate(
    ok: Sequence[AnsweredRequest], failed: Sequence[RequestLine], window: MeasuredWindow
) -> float | None:
    """Return the share of failures up to the window's end; the drain may cut the rest."""
    good, bad = (sum(r["t_intended_ns"] < window["t_stop_ns"] for r in of) for of in (ok, failed))
    return bad / (good + bad) if good + bad else None


def _schedule_checks(
    measured: Sequence[RequestLine], bounds: Mapping[str, float]
) -> dict[str, CheckRecord]:
    """Check the sent requests against the schedule."""
    lags = [
        (sent - r["t_intended_ns"]) / 1e6 for r in measured if (sent := r["t_send_ns"]) is not None
    ]
    ttft = [(r["t_first_token_ns"] - r["t_intended_ns"]) / 1e6 for r in measured if is_answered(r)]
    # A dropped request never reaches the socket, so the issuing thread's stamp is used.
    sent_ns = [
        issued if r["t_send_ns"] is None else r["t_send_ns"]
        for r in measured
        if (issued := r["t_issue_ns"]) is not None
    ]
    ratio = None
    if len(sent_ns) >= 2 and len(sent_ns) == len(measured):
        took_ns = sent_ns[-1] - sent_ns[0]
        planned_ns = measured[-1]["t_intended_ns"] - measured[0]["t_intended_ns"]
        ratio = planned_ns / took_ns if took_ns > 0 else None
    tolerance = bounds["sent_rate_tolerance"]
    return {
        "schedule_lag_p99_ms": schedule_check(lags, ttft, bounds),
        "early_send_ms": at_most(max(0.0, -min(lags)) if lags else None, 0.0),
        "sent_rate_ratio": _within(ratio, 1 - tolerance, 1 + tolerance),
    }


def _idle(requests: Sequence[RequestLine], window: MeasuredWindow, places: int) -> float | None:
    """Return the share of the window's time in which a place of a closed loop had no request."""
    start, stop = window["t_warmup_end_ns"], window["t_stop_ns"]
    taken_ns = sum(
        max(0, min(stop, done) - max(start, sent))
        for r in requests
        if (sent := r["t_send_ns"]) is not None and (done := r["t_done_ns"]) is not None
    )
    return 1 - taken_ns / (places * (stop - start)) if stop > start else None


def _window_checks(
    measured: Sequence[RequestLine], window: MeasuredWindow, cell: CellSection
) -> dict[str, CheckRecord]:
    """Check that the window ended with enough successes, or at its cap."""
    low_ns, cap_ns = round(cell["floor_s"] * 1e9), round(cell["cap_s"] * 1e9)
    length_ns = window["t_stop_ns"] - window["t_warmup_end_ns"]
    wanted = cell["min_completed"] if length_ns < cap_ns else 0
    return {
        "window_s": _within(length_ns / 1e9, low_ns / 1e9, cap_ns / 1e9),
        "measured_ok": _at_least(sum(r["status"] == "ok" for r in measured), wanted),
    }


def _server_checks(
    ok: Sequence[AnsweredRequest],
    failed: int,
    record: MeasuredCellRecord,
    traffic: TrafficSection | None,
) -> dict[str, CheckRecord]:
    """Check the server's counters; prompts repeated in a user's file may hit the cache."""
    counters = record["server_counters"]
    longest = [record["input_tokens"], record["output_tokens"]]
    if traffic is not None:
        longest = traffic["longest"]

    def delta(key: str) -> float | None:
        before, after = counters["before"].get(key), counters["after"].get(key)
        return None if before is None or after is None else after - before

    def excess(key: str, counted: int, at_most: int) -> CheckRecord:
        change = delta(key)
        return _within(None if change is None else change - counted, 0, at_most)

    prompt = sum(r["prompt_tokens"] for r in ok)
    generated = sum(r["completion_tokens"] for r in ok)
    hits = 0 if traffic is None else traffic.get("most_hits", prompt)
    # The server may have served a request, in part or in full, that failed on the client.
    return {
        "server_success_excess": excess("success", len(ok), failed),
        "server_prompt_tokens_excess": excess("prompt_tokens", prompt, failed * longest[0]),
        "server_generation_tokens_excess": excess(
            "generation_tokens", generated, failed * longest[1]
        ),
        "prefix_cache_hits": _within(delta("prefix_cache_hits"), 0, hits),
        "external_prefix_cache_hits": _within(delta("external_prefix_cache_hits"), 0, hits),
    }


def _machine_checks(
    machine: WatchedMachine | None, bounds: Mapping[str, float]
) -> dict[str, CheckRecord]:
    """Return the result of every check in MACHINE_CHECKS."""
    foreign = {side: None if machine is None else machine.cpus[side].foreign for side in SIDES}
    checks = {
        f"foreign_cpu_{side}": at_most(foreign[side], bounds["max_foreign_cpu"])
        for side in ("server", "loadgen")
    }
    # A quantity that could not be read does not void a watched cell.
    for name, value in (
        ("throttled_periods", None if machine is None else machine.throttled),
        ("foreign_gpu_processes", None if machine is None else machine.foreign_gpu),
    ):
        if machine is None or value is not None:
            checks[name] = at_most(value, 0)
    if machine is not None and (share := machine.gpu_clock_share) is not None:
        checks["gpu_slowed"] = at_most(machine.gpu_slowed, 0)
        checks["gpu_clock_share"] = _at_least(share, bounds["min_gpu_clock_share"])
    return checks


def _scrape_check(scrapes: Sequence[ScrapeMoment], window: MeasuredWindow) -> CheckRecord:
    inside = [s for s in scrapes if window["t_warmup_end_ns"] <= s["t_ns"] < window["t_stop_ns"]]
    failed = sum(not scrape["ok"] for scrape in scrapes)
    value = None if not inside else len(inside) - failed
    return {"value": value, "bound": len(inside), "pass": value is not None and failed == 0}
