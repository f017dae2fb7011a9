"""Claims about what a cell sent and when: its schedule, prompts, window and precision.

Nothing here is shared with connector_tax.analysis or with the load generator.
"""

import re
from collections.abc import Iterator

import numpy as np

from connector_tax.artifacts.cell_records import WindowRecord
from connector_tax.artifacts.study_records import PrecisionSection
from connector_tax.provenance.audit_study import RawCell, RawStudy
from connector_tax.provenance.claims import Ledger
from connector_tax.provenance.comparison import differences
from connector_tax.provenance.distributions import binomial_ranks
from connector_tax.provenance.recompute import (
    Measured,
    Row,
    arrival_offsets_ns,
    prompts_sha256,
)

COOLDOWN_ENDS = ("answered", "drain", "schedule", "interrupted", "overloaded")
HEARD_NS = 1_000_000_000


def schedule(study: RawStudy, cell: RawCell) -> Iterator[str]:
    """Arrivals at the times that the seed gives, at the rate of the design."""
    plan, times, arrivals = (
        cell.record["schedule"],
        cell.record["window"],
        study.config["arrivals"],
    )
    launch = cell.launch
    name = f"{study.document['seed']}/arrivals/block{launch.block}/{launch.phase}/{cell.cell}"
    if plan["seed"] != name:
        yield f"seed is {plan['seed']!r}, the documented name is {name!r}"
    if plan["kind"] != arrivals["process"]:
        yield f"kind is {plan['kind']!r}, the design says {arrivals['process']!r}"
    rate = study.offered_rps(launch.phase, cell.planned)
    if plan["rate_rps"] != rate:
        yield f"rate is {plan['rate_rps']} req/s, it must be {rate}"
    rule = study.document["config"]["cell"]
    longest_s = rule["warmup_s"] + rule["cap_s"]
    # Also keeps a forged stamp from asking for a schedule without end.
    ends = (
        ("the window ends", times["t_stop_ns"], longest_s),
        ("arrivals end", _arrivals_end_ns(times), longest_s + rule["drain_s"]),
    )
    for what, end_ns, most_s in ends:
        end_s = (end_ns - times["t_origin_ns"]) / 1e9
        if not 0 < end_s <= most_s + 1e-9:
            yield f"{what} {end_s:g} s after the origin, allowed: up to {most_s:g} s"
            return
    until = _arrivals_end_ns(times) - times["t_origin_ns"]
    due = arrival_offsets_ns(arrivals["process"], rate, until, name, arrivals["gamma_shape"])
    offsets = [r["t_intended_ns"] - times["t_origin_ns"] for r in cell.requests]
    if plan["n"] != len(due):
        yield f"n is {plan['n']}, the seed gives {len(due)} arrivals before their end"
    if len(offsets) != len(due):
        yield f"{len(offsets)} requests, the seed gives {len(due)}"
    # A stamp is a rounded float; two ways of rounding may differ by a nanosecond.
    wrong = [k for k, (a, b) in enumerate(zip(offsets, due, strict=False)) if abs(a - b) > 1]
    if wrong:
        yield f"{len(wrong)} arrivals are not the seed's, first: seq {wrong[0]}"


def check_prompts(study: RawStudy, ledger: Ledger) -> None:
    """One claim for each cell, and one for all the cells without a hash of their prompts."""
    without: list[str] = []
    for cell in study.cells:
        if not cell.measured:
            continue
        with ledger.guarded("prompts", cell.name):
            if "prompts_sha256" in cell.record:
                ledger.check("prompts", cell.name, _prompts(study, cell), "drawn again, the same")
            else:
                without.append(cell.name)
    if without:
        reason = (
            f"{len(without)} cell files, first {without[0]}, hold no prompts_sha256: "
            "recorded before cells kept it"
        )
        ledger.not_checkable("prompts", "whole study", reason)


def _prompts(study: RawStudy, cell: RawCell) -> Iterator[str]:
    """Request ids name the stream their bodies are drawn from; drawn again, these hash the same."""
    ids = [r["request_id"] for r in cell.requests]
    stream = ids[0].rpartition("/")[0] if ids else ""
    match = re.fullmatch(re.escape(cell.name) + r"/attempt(\d+)\d", stream)
    if match is None or int(match[1]) != cell.record["attempt"]:
        attempt = f"{cell.name}/attempt{cell.record['attempt']}"
        yield f"request ids begin with {stream!r}, not with {attempt!r} and one more digit"
    wrong = [k for k, name in enumerate(ids) if name != f"{stream}/{k}"]
    if wrong:
        yield f"{len(wrong)} request ids are not {stream}/<seq>, first: {ids[wrong[0]]!r}"
    engine = study.config["engine"]
    if engine["kind"] == "embedded":
        served = engine["definition_content"]["model"]
        model, vocab_size = served["served_name"], served["vocab_size"]
    else:
        model, vocab_size = engine["served_model_name"], engine["vocab_size"]
    digest = prompts_sha256(
        model=model,
        vocab_size=vocab_size,
        shape=(cell.planned["input_tokens"], cell.planned["output_tokens"]),
        count=len(ids),
        seed=f"{study.document['seed']}/content/{stream}",
    )
    if cell.record["prompts_sha256"] != digest:
        yield f"prompts_sha256 is not that of the {len(ids)} requests the seed gives"


def window(study: RawStudy, cell: RawCell) -> Iterator[str]:
    """Warm-up, window and drain in order and within the design's lengths."""
    times, rule = cell.record["window"], study.config["cell"]
    stamps = [times[f"t_{name}_ns"] for name in ("origin", "warmup_end", "stop", "drained")]
    # The last request may be done before the window closes: no order between stop and drained.
    if not stamps[0] <= stamps[1] < stamps[2] or stamps[3] < stamps[0]:
        yield "origin <= warm-up end < stop does not hold, or drained is before the origin"
    if _arrivals_end_ns(times) < stamps[2]:
        yield "arrivals end before the window"
    yield from _cooldown(cell, rule.get("end_overloaded", False))
    if abs(stamps[1] - stamps[0] - rule["warmup_s"] * 1e9) > 1:
        yield f"the warm-up lasts {(stamps[1] - stamps[0]) / 1e9} s, not {rule['warmup_s']} s"
    length, whole = (stamps[2] - stamps[1]) / 1e9, cell.status == "valid"
    if whole and not rule["floor_s"] - 1e-6 <= length <= rule["cap_s"] + 1e-6:
        yield f"the window lasts {length} s, allowed {rule['floor_s']} to {rule['cap_s']} s"
    if "quiet" in study.config:
        said = cell.record["quiet"]["rule"]
        yield from differences(
            said, {k: v for k, v in study.config["quiet"].items() if k in said}, "rule"
        )
    precision = study.config.get("precision")
    precise = precision is not None and precision["enabled"]
    floor = precision["min_completed_floor"] if precision and precise else rule["min_completed"]
    early = whole and length < rule["cap_s"] - 1e-6
    if early and cell.record["counts"]["measured_ok"] < floor:
        yield f"stopped before the cap with fewer than {floor} completed"
    if precision and precise:
        yield from _precision(cell, precision, floor, early)


def _cooldown(cell: RawCell, end_overloaded: bool) -> Iterator[str]:
    """Arrivals go on until the measured requests are answered, or the cell says what ended them."""
    if "cooldown" not in cell.record:
        return
    said, window = cell.record["cooldown"], cell.record["window"]
    later = sum(r["t_intended_ns"] >= window["t_stop_ns"] for r in cell.requests)
    if said["requests"] != later:
        yield f"cooldown.requests is {said['requests']}, the records give {later}"
    if said["ended_by"] not in COOLDOWN_ENDS:
        yield f"cooldown.ended_by is {said['ended_by']!r}, allowed: {', '.join(COOLDOWN_ENDS)}"
    ends = end_overloaded and cell.launch.phase != "A"
    dropped = [r["t_intended_ns"] for r in cell.requests if r["status"] == "dropped"]
    # The end may come before the load generator hears of the last drops.
    early = [due for due in dropped if due < window["t_stop_ns"] - HEARD_NS]
    if said["ended_by"] == "overloaded":
        if not (ends and dropped and cell.status == "void"):
            yield "ended as overloaded, as only a void cell with a dropped arrival may, where asked"
    elif ends and early and said["ended_by"] != "interrupted":
        yield f"{len(early)} arrivals of the window were dropped, and it did not end for them"


def _precision(cell: RawCell, settings: PrecisionSection, floor: int, early: bool) -> Iterator[str]:
    """What the cell says of its own precision, from its requests."""
    said, measured = cell.record["precision"], Measured(cell.requests, cell.record["window"])
    recomputed: Row = {"n": measured.n, "ttft_p90": None, "tpot_p90": None}
    low, high = binomial_ranks(measured.n, 90, 0.95)
    if low is not None and high is not None:
        for name, values in (("ttft_p90", measured.ttft), ("tpot_p90", measured.tpot)):
            ordered, p90 = np.sort(values), float(np.percentile(values, 90))
            if p90 > 0:
                recomputed[name] = float(ordered[high - 1] - ordered[low - 1]) / (2 * p90)
    yield from differences(said["achieved"], recomputed, "precision.achieved")
    if early and said["stopped_by"] != "target":
        yield f"stopped before the cap by {said['stopped_by']!r}, a valid cell only by the target"
    if said["stopped_by"] == "target":
        seen, target = said["at_stop"], settings["target_relative_half_width"]
        if seen["n"] < floor or max(seen["ttft_p90"], seen["tpot_p90"]) > target:
            yield f"stopped by the target with {seen}, wanted {floor} successes within {target}"


def _arrivals_end_ns(window: WindowRecord) -> int:
    """Cells recorded before there was a cool-down sent nothing after their window."""
    return int(window.get("t_cooldown_end_ns", window["t_stop_ns"]))
