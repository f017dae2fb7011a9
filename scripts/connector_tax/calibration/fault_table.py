"""Every fault switch of the engine, injected into a cell over real HTTP: what becomes of the cell.

A fault of what the client is told (a cut stream, an error, a wrong count, a cache hit, an
unreadable /metrics) must void the cell or fail the launch. A fault that only changes how correct
bytes are packed or how long the server takes must not: the cell stays valid, and its stamps must
still be those of the truth log.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from connector_tax.artifacts.names import PLAIN, Launch
from connector_tax.calibration.design import PHASE, study_document
from connector_tax.calibration.live import LiveCell, measure_launch
from connector_tax.servers.kinds import ServerError

VOID, VALID, FAILED = "void", "valid", "failed"
TIMEOUT_S = 3.0
CELL = {
    "warmup_s": 0.3,
    "floor_s": 1.5,
    "cap_s": 1.5,
    "min_completed": 1,
    "request_timeout_s": TIMEOUT_S,
}
# Only the fault may void a cell here, whatever else this machine is doing.
VALIDITY = {
    "schedule_lag_p99_ms": 1000.0,
    "schedule_lag_ttft_fraction": 1.0,
    "sent_rate_tolerance": 0.9,
    "loop_lag_p99_ms": 1000.0,
    "loop_lag_max_ms": 10_000.0,
    "max_cpu_share": 1.0,
}
SHARE = 0.2
# A stamp taken at the wrong event is off by at least a step, 3 ms.
STAMP_ERROR_MAX_US = 1000.0
SCRAPE_S = 0.25


@dataclass(frozen=True)
class Case:
    """A fault rule, and what must become of its cell.

    Attributes:
        name: of the row; the kind, with what tells two cases of one kind apart.
        rule: of the engine's `faults` section.
        expected: void, valid, or failed (the launch, so that no cell is kept).
        must_name: part of the void reason or of the launch's failure; for a valid cell, why it is.
    """

    name: str
    rule: Mapping[str, Any]
    expected: str
    must_name: str


def _struck(kind: str, **parameters: Any) -> dict[str, Any]:
    return {"kind": kind, "probability": SHARE, **parameters}


CASES = (
    Case("fin", _struck("fin", after_tokens=2), VOID, "error_rate"),
    Case("rst", _struck("rst", after_tokens=2), VOID, "error_rate"),
    Case("error_event", _struck("error_event", after_tokens=2), VOID, "error_rate"),
    Case("no_done", _struck("no_done"), VOID, "error_rate"),
    Case("http_429", _struck("http_429"), VOID, "error_rate"),
    Case("http_500", _struck("http_500"), VOID, "error_rate"),
    Case("wrong_length +1", _struck("wrong_length", tokens=1), VOID, "error_rate"),
    Case("wrong_length -1", _struck("wrong_length", tokens=-1), VOID, "error_rate"),
    Case("delay_headers > time-out", _struck("delay_headers", ms=4500.0), VOID, "error_rate"),
    Case("stall > time-out", _struck("stall", after_tokens=2, ms=4500.0), VOID, "error_rate"),
    Case("prefix_hit, once", {"kind": "prefix_hit", "at": [40]}, VOID, "prefix_cache_hits"),
    Case("slow_metrics > time-out", {"kind": "slow_metrics", "at": [2], "ms": 6000.0}, VOID,
         "metrics_scrapes"),
    Case("malformed_metrics, once", {"kind": "malformed_metrics", "at": [2]}, VOID,
         "metrics_scrapes"),
    Case("refuse_start", {"kind": "refuse_start"}, FAILED, "before it was ready"),
    Case("die", {"kind": "die", "at": [40]}, FAILED, "ended with status"),
    Case("none (control)", _struck("crlf") | {"probability": 0.0}, VALID, "nothing is injected"),
    Case("coalesce", _struck("coalesce", tokens=4), VALID,
         "every token arrives; a read's stamp is that of its write, and events are not counted"),
    Case("split_event", _struck("split_event", at_byte=12, ms=2.0), VALID,
         "an event is complete, and stamped, with its last byte"),
    Case("crlf", _struck("crlf"), VALID, "CR LF ends a line of an event stream as LF does"),
    Case("delay_headers < time-out", _struck("delay_headers", ms=20.0), VALID,
         "a slower server is what is measured: the delay is in TTFT, as it should be"),
    Case("stall < time-out", _struck("stall", after_tokens=2, ms=20.0), VALID,
         "a slower server is what is measured: the stall is in TPOT, as it should be"),
    Case("slow_metrics < time-out", {"kind": "slow_metrics", "at": [2], "ms": 200.0}, VALID,
         "the sampler is a process of its own; a late scrape delays no request"),
)  # fmt: skip


def run(
    root: Path, names: Sequence[str] | None, seed: int, say: Callable[[str], None]
) -> list[dict[str, Any]]:
    """One row for each case: what became of its cell, why, and how far its stamps are off."""
    chosen = [case for case in CASES if names is None or case.name.partition(",")[0] in names]
    rows = []
    for number, case in enumerate(chosen):
        rows.append(_row(case, root / f"case{number}", seed))
        say(f"fault {case.name}: {rows[-1]['outcome']}")
    return rows


def _row(case: Case, folder: Path, seed: int) -> dict[str, Any]:
    document = study_document("jittered", seed, 1, (), cell=CELL, faults=[case.rule])
    document["config"]["validity"] |= VALIDITY
    document["config"]["metrics"]["interval_s"] = SCRAPE_S
    row: dict[str, Any] = {"fault": case.name, "struck": None, "requests": None, "stamps_us": None}
    try:
        cell = measure_launch(document, Launch(PLAIN, 0, PHASE), folder)
    except ServerError as error:
        outcome, why = FAILED, str(error).splitlines()[0]
        right = case.must_name in why
    else:
        outcome = VALID if cell.record["valid"] else VOID
        row["struck"] = sum(truth.fault is not None for truth in cell.truth.values())
        row["requests"] = len(cell.requests)
        row["stamps_us"] = _stamps_us(cell)
        why = case.must_name if outcome == VALID else "; ".join(cell.record["void_reasons"])
        right = case.must_name in why
        if outcome == VALID:
            right = all(abs(off) < STAMP_ERROR_MAX_US for off in row["stamps_us"])
    as_designed = outcome == case.expected and right
    return row | {"outcome": outcome, "why": why, "as_designed": as_designed}


def _stamps_us(cell: LiveCell) -> list[float]:
    """The median error of the stamps of first and last tokens, of the successes the fault struck.

    Of all where it struck none.
    """
    struck = cell.errors(lambda truth: truth.fault is not None)
    off = struck if len(struck) else cell.errors()
    return [float(off[name].median()) for name in ("first_us", "last_us")]
