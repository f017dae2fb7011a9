"""Explain void cells, and find a baseline that does not serve the load."""

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

from connector_tax.artifacts.folder import CellFolder, LaunchFolder
from connector_tax.artifacts.names import FAILED, TRACE
from connector_tax.artifacts.study_file import Study, launches
from connector_tax.files import read_jsonl
from connector_tax.foreign import one_line
from connector_tax.loadgen.messages import FAILURES
from connector_tax.study.remeasure import MACHINE_CAUSES, unserved, void_cause

# The suggested load is this multiple of the load that was answered, and at least that multiple of
# LEAST of the offered load.
CAUTION, LEAST = 0.8, 0.1


def all_void(cells: Iterable[CellFolder]) -> dict[str, str]:
    """Return the reason for each configuration whose measured cells are all void."""
    measured: dict[str, list[CellFolder]] = {}
    for cell in cells:
        if cell.status in ("valid", "void"):
            measured.setdefault(cell.configuration, []).append(cell)
    return {
        name: why_void(of[0])
        for name, of in measured.items()
        if all(cell.status == "void" for cell in of)
    }


def why_void(cell: CellFolder) -> str:
    """Return why a cell is void, and the most frequent error of its requests."""
    error = _most_frequent_error(read_jsonl(cell.file("requests")))
    reason = cell.reason or "no reason is known"
    return one_line(f"{reason}; mostly {error}" if error else reason)


def _most_frequent_error(requests: Iterable[Mapping[str, Any]]) -> str:
    """Return the most frequent error of failed requests; "" if none failed."""
    errors = Counter(
        request["error_detail"] or FAILURES[request["error_kind"]][1]
        for request in requests
        if request["status"] in FAILED
    )
    return next((error for error, _ in errors.most_common(1)), "")


def overload(study: Study, *, named: bool) -> str | None:
    """Return what shows that the baseline does not serve the load, and the load to try.

    None if its first launch serves the load, or has not ended.

    Args:
        named: whether the user named the comparison.
    """
    drawn = (
        LaunchFolder(study.root, launch)
        for launch in launches(study.document, "A")
        if launch.configuration == study.baseline
    )
    first = next((launch for launch in drawn if launch.status == "done"), None)
    if first is None:
        return None
    for planned in sorted(study.cells("A"), key=lambda cell: cell["rate_rps"] or 0.0):
        cell = first.cell(planned)
        if cell.status != "void" or cell.record is None or not unserved(cell.record):
            continue
        if void_cause(cell.record) not in MACHINE_CAUSES:
            return one_line(_refusal(study, cell, named))
    return None


def _refusal(study: Study, cell: CellFolder, named: bool) -> str:
    assert cell.record is not None
    stop_ns = cell.record["window"]["t_stop_ns"]
    requests = [one for one in read_jsonl(cell.file("requests")) if one["t_intended_ns"] < stop_ns]
    failed = [request for request in requests if request["status"] != "ok"]
    why = _most_frequent_error(failed)
    if preempted := cell.counted("preemptions"):
        why += f"; {preempted:.0f} preemptions: its KV cache is too small for this load"
    option, offered, lower = _lower_load(study, cell, 1 - len(failed) / len(requests))
    another = " and another --name" if named else ""
    remedy = f"try {option} {lower:g}{another}" if lower < offered else "check the server"
    return (
        f"{option}: found {offered:g}; {len(failed)} of {len(requests)} requests to the baseline"
        f" failed, mostly: {why}; {remedy}; requests: {cell.file('requests')}"
    )


def _lower_load(study: Study, cell: CellFolder, answered: float) -> tuple[str, float, float]:
    """Return the option of the load, its value, and a value that the server may serve.

    Args:
        answered: share of the requests that were answered.
    """
    assert cell.record is not None
    sweep, share = study.config["phase_a"], CAUTION * max(LEAST, answered)
    if (concurrency := sweep.get("concurrency")) is not None:
        return "--concurrency", concurrency, max(1, int(concurrency * share))
    option, offered = "--rate", cell.record["schedule"]["rate_rps"]
    traffic = sweep.get("traffic")
    if traffic is not None and traffic["kind"] == TRACE:
        option, offered = "--trace-speed", traffic["speed"]
    return option, offered, float(f"{offered * share:.2g}")
