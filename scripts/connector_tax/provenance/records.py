"""Check the raw records of each measured cell, independently of derived results.

A cell's own record follows from the design, the seed and the lines of its other files, so it is
recomputed by the same code. Arrivals and prompts follow from the seed; stamps are in order; client,
server and step records of the same requests agree (docs/method.md, "Clocks, latencies, success").
"""

import hashlib
import itertools
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import lru_cache
from typing import Any, cast

import msgspec
import numpy as np

from connector_tax.analysis.device_time import device_values
from connector_tax.analysis.machine import read_machine
from connector_tax.analysis.measure import measure_requests, measure_waiting, summary_of
from connector_tax.analysis.steps import CALLBACKS
from connector_tax.analysis.validity import assess, server_counters, void_reasons
from connector_tax.artifacts import paths
from connector_tax.artifacts.cell_records import ServerCounters
from connector_tax.artifacts.folder import CellFolder, StudyFolder
from connector_tax.artifacts.names import PHASES, PLAIN, Launch
from connector_tax.artifacts.study_file import Study
from connector_tax.files import read_json
from connector_tax.loadgen.generator import CellResult
from connector_tax.loadgen.sessions import PlannedRequest
from connector_tax.provenance.claims import Ledger
from connector_tax.provenance.differences import differences
from connector_tax.provenance.remade import KIND
from connector_tax.servers.kinds import engine_of
from connector_tax.study.cell import cell_record, prepare
from connector_tax.study.plan import reference_rate

Line = dict[str, Any]
# The stamps in the order in which a request passes them.
ORDER = ("issue", "worker", "conn", "send", "headers", "first_token", "last_token", "done")
HISTOGRAMS = {
    "TTFT": ("vllm:time_to_first_token_seconds", "t_first_token_ns"),
    "E2E": ("vllm:e2e_request_latency_seconds", "t_last_token_ns"),
}
# A line of a Prometheus page: name, labels, value, and a time that is not used.
SERIES = re.compile(r"^(vllm:[\w:]+)(?:\{(.*)\})? +(\S+)(?: +-?\d+)?$", re.MULTILINE)
LABEL = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')
ESCAPED = re.compile(r"\\(.)")
# While a clock is slewed, wall and monotonic time can diverge by 500 ppm.
CLOCKS = 1e-3


class Records:
    """A measured cell with its records (each file read once) and its plan.

    Attributes:
        prepared: the cell before its measurement, with its window's length.
        due_ns: due times of its requests by the seed, in ns after the origin; empty in closed loop.
        planned, bodies_sha256: these requests without bodies, and the bodies' hash.
    """

    def __init__(self, study: Study, cell: CellFolder) -> None:
        assert cell.record is not None
        self.study, self.cell, self.record = study, cell, cell.record
        self.requests, self.metrics, self.steps = (cell.lines(kind) for kind in paths.CELL_LOGS[:3])
        self.scheduler = [step for step in self.steps if step["process"] == "scheduler"]
        self.ok = [r for r in self.requests if r["status"] == "ok"]
        self.served = engine_of(study.config["engine"]).served
        self.timed: bool = read_json(study.root / paths.PATCH_STATUS)["step_timing_available"]
        self.counters: ServerCounters = {
            "before": server_counters(self.metrics[0]["values"]),
            "after": server_counters(self.metrics[-1]["values"]),
        }
        self.launch = Launch(*cell.key[:3])
        (plan,) = (c for c in study.cells(cell.key.phase) if c["cell"] == cell.key.cell)
        # An id is <cell>/attempt<attempt><measurement>/<number>.
        ids = [r["request_id"].rpartition("/")[0] for r in self.requests[:1]]
        measurement = int(ids[0][-1]) if ids else 1
        self.prepared = prepare(
            study.document, study.root, self.launch, plan, cell.rate_rps or 0,
            attempt=self.record["attempt"], measurement=measurement,
        )  # fmt: skip
        window = self.record["window"]
        offsets_ns = self.prepared.offsets_ns
        if offsets_ns is None:
            count, self.due_ns = self.record["schedule"]["n"], list[int]()
        else:
            end_ns = window["t_cooldown_end_ns"] - window["t_origin_ns"]
            count = int(np.searchsorted(offsets_ns, end_ns))
            self.due_ns = offsets_ns[:count].tolist()
        self.planned, bodies = list[PlannedRequest](), hashlib.sha256()
        for request in itertools.islice(self.prepared.requests, count):
            bodies.update(request.body + b"\n")
            self.planned.append(msgspec.structs.replace(request, body=b""))
        self.bodies_sha256 = bodies.hexdigest()


def check_records(folder: StudyFolder, ledger: Ledger) -> None:
    """Check each kind of record of each measured cell, and the summary of each launch."""
    study, summaries = folder.study, dict[Launch, dict[str, Any]]()
    for phase in PHASES:
        with ledger.guarded("records", f"phase {phase}"):
            for cell in folder.cells(phase, reference_rate(study.root, phase)):
                if cell.record is not None:
                    with ledger.guarded("records", cell.name):
                        check_cell(Records(study, cell), ledger)
                    with ledger.guarded(KIND, cell.name):
                        summary = summary_of(measure_requests(cell))
                        of_launch = summaries.setdefault(Launch(*cell.key[:3]), {})
                        of_launch[cell.key.cell] = summary
                    with ledger.guarded("records", cell.name):
                        if cell.status == "valid":
                            measure_waiting(cell)  # now, while the cell's scrapes are in memory
                    cell.release()
                elif cell.status != "skipped":
                    ledger.check("records", cell.name, [str(cell.reason)])
    for planned in folder.launches:
        path, launch = planned.folder / paths.SUMMARY, planned.launch
        subject = f"{launch.name}/{paths.SUMMARY}"
        if path.exists():
            with ledger.guarded(KIND, subject):
                again = summaries.get(launch, {})
                ledger.check(KIND, subject, differences(read_json(path), again, "summary"))


def check_cell(records: Records, ledger: Ledger) -> None:
    """Check each kind of record of one cell."""
    for kind, check in CHECKS.items():
        ledger.check(kind, records.cell.name, check(records))


def _record(records: Records) -> Iterator[str]:
    """Recompute the cell's own record and checks, and yield differences."""
    study, cell, record, device = records.study, records.cell, records.record, None
    machine, window = cell.file("machine"), cast(Any, record["window"])
    if study.config["engine"].get("device") == "emulated":
        log = cast(Any, cell.lines(paths.DEVICE_LOG))
        device = device_values(log, records.steps, cell.configuration == study.baseline)
    result = CellResult(
        records=[],
        requests=[],
        bodies_sha256=records.bodies_sha256,
        handed_out=record["schedule"]["n"],
        **{name: ns for name, ns in window.items() if name != "started_utc"},
        cooldown_ended_by=record["cooldown"]["ended_by"],  # type: ignore[arg-type]
        extended_s=record["extended_s"],
        clock=record["clock"],  # type: ignore[arg-type]
        health=record["load_generator"],
    )
    measured = cell_record(
        study.document, records.launch, records.prepared, result,
        records.requests, window["started_utc"],  # type: ignore[arg-type]
    )  # fmt: skip
    measured["suspended_ms"] = record["suspended_ms"]
    measured["load_generator"] = record["load_generator"]
    measured["server_counters"] = records.counters
    lines = cast(Any, records)
    checks = assess(
        measured,
        lines.requests,
        lines.metrics,
        study.config,
        device=device,
        machine=read_machine(machine, None) if machine.exists() else None,
        watched=machine.name in record["files"],
        counted_by_server=records.served.get("counters", True),
    )
    reasons = void_reasons(checks)
    again: dict[str, Any] = {
        **measured,
        "health": checks,
        "valid": not reasons,
        "void_reasons": sorted(reasons),
    }
    recorded = {key: record.get(key) for key in again}
    recorded["void_reasons"] = sorted(record["void_reasons"])
    yield from differences(recorded, again, "cell")


# ---- requests and answers


def _requests(records: Records) -> Iterator[str]:
    """Check that arrivals follow from seed and cell times, and that stamps are in order."""
    window: Mapping[str, Any] = records.record["window"]
    origin, warm, stop = (window[f"t_{name}_ns"] for name in ("origin", "warmup_end", "stop"))
    end, drained = window["t_cooldown_end_ns"], window["t_drained_ns"]
    warmup_s = records.study.config["cell"]["warmup_s"]
    # The last request may end before the window: stop and drained have no fixed order.
    if not origin <= warm < stop <= end or drained < origin:
        yield "origin <= warm-up end < stop <= end of arrivals does not hold"
    if abs(warm - origin - warmup_s * 1e9) > 1:
        yield f"the warm-up lasts {(warm - origin) / 1e9} s, not {warmup_s} s"
    closed = records.prepared.offsets_ns is None
    if closed:
        # Those that came back unsent are no lines.
        numbers = [request["seq"] for request in records.requests]
        if numbers != sorted({*numbers}) or numbers[-1:] >= [len(records.planned)]:
            yield "the requests are out of order, repeated, or more than were planned"
            return
    elif len(records.requests) != len(records.due_ns):
        yield f"{len(records.requests)} requests, but the seed gives {len(records.due_ns)}"
    recorded, again = list[Line](), list[Line]()
    for place, request in enumerate(records.requests[: None if closed else len(records.due_ns)]):
        number, arrival = request["seq"] if closed else place, request["t_intended_ns"]
        planned = records.planned[number]
        due_ns = (request["t_send_ns"] or arrival) - origin if closed else records.due_ns[number]
        wanted: Line = {
            "seq": number, "request_id": planned.request_id,
            "warmup": arrival < warm, "cooldown": arrival >= stop,
        }  # fmt: skip
        if request["status"] == "ok":
            # Only the server knows the length of text; answers without ignore_eos have any length.
            for name in ("prompt_tokens", "completion_tokens"):
                wanted |= {name: n} if (n := getattr(planned, name)) is not None else {}
        recorded.append({name: request[name] for name in wanted} | {"due_ns": arrival - origin})
        again.append(wanted | {"due_ns": due_ns})
        yield from (f"seq {number}: {problem}" for problem in _of_one(request, drained))
    # Texts distinguish 1 from true, and equal texts need no walk through thousands of lines.
    if msgspec.json.encode(recorded) != msgspec.json.encode(again):
        yield from differences(recorded, again, "requests")


def _of_one(r: Line, drained_ns: int) -> Iterator[str]:
    """Yield the errors in one request's times."""
    stamps = [(name, r[f"t_{name}_ns"]) for name in ORDER if r[f"t_{name}_ns"] is not None]
    for (a, x), (b, y) in itertools.pairwise(stamps):
        if x > y:
            yield f"t_{b}_ns is before t_{a}_ns"
    if r["t_send_ns"] is not None and r["t_send_ns"] < r["t_intended_ns"]:
        yield "written before it was due"
    if r["status"] == "ok":
        if len(stamps) < len(ORDER):
            yield "a success lacks a stamp"
        if r["t_last_token_ns"] > drained_ns:
            yield "its last token is after the cell was drained"
        times = [t for t, _ in r["reads"] or ()]
        ends = [r["t_first_token_ns"], r["t_last_token_ns"]]
        if times and (times != sorted(times) or [times[0], times[-1]] != ends):
            yield "the reads are out of order, or do not span the first to the last token"


# ---- the server's records


def _identities(records: Records) -> Iterator[str]:
    """Check that client, server and step records of a valid cell agree on the same requests."""
    if records.cell.status != "valid" or not records.served.get("counters", True):
        return
    before, after = records.counters["before"], records.counters["after"]
    if None in (before["preemptions"], after["preemptions"]):
        yield "the server's counters lack preemptions"
    undisturbed = all(r["status"] in ("ok", "dropped") for r in records.requests)
    if records.timed:
        exact = undisturbed and before["preemptions"] == after["preemptions"]
        # The step that ends a request's prefill makes its first token.
        served = {
            "prefill_tokens": sum(r["prompt_tokens"] for r in records.ok),
            "decode_tokens": sum(r["completion_tokens"] - 1 for r in records.ok),
        }
        for name, wanted in served.items():
            total = sum(step[name] for step in records.scheduler)
            if total < wanted or (exact and total != wanted):
                least = "" if exact else "at least "
                yield f"{name} of the steps add up to {total}, but the requests had {least}{wanted}"
    pages = []
    for scrape in (records.metrics[0], records.metrics[-1]):
        page = series_of(scrape["raw"])
        values = {key: n for key, n in scrape["values"].items() if key.startswith("vllm:")}
        yield from differences(values, {key: page.get(key) for key in values}, "scrape")
        pages.append(page)
    for name, (metric, last) in HISTOGRAMS.items():
        seconds = [(r[last] - r["t_send_ns"]) / 1e9 for r in records.ok]
        yield from _no_client_is_faster(name, metric, pages, seconds, undisturbed)


def _no_client_is_faster(
    name: str, metric: str, pages: Sequence[Mapping[str, float]], seconds: list[float], exact: bool
) -> Iterator[str]:
    """Check that client times are at least the server's, in each histogram bucket and in sum."""
    before, after = (_histogram(page, metric) for page in pages)
    if len(after) < 2 or before.keys() != after.keys():
        yield f"{metric} is missing"
        return
    took, grown = sum(seconds), after.pop("sum") - before["sum"]
    faster = "no client is faster than its server"
    slowed = np.sort(np.array(seconds)) * (1 + CLOCKS)
    for bound, count in after.items():
        served = count - before[bound]
        seen = np.searchsorted(slowed, float(bound), side="right")
        if seen > served:
            comparison = (
                f"{seen} requests took at most {bound} s at the client, but only {served:g} at the"
            )
            yield f"{name}: {comparison} server: {faster}"
            return
    if exact and took * (1 + CLOCKS) < grown:
        yield f"{name}: {took:.4f} s in sum at the client, {grown:.4f} s at the server: {faster}"


def series_of(page: str) -> dict[str, float]:
    """Return vLLM's series in a Prometheus page, named as in a metrics record.

    Two pages are parsed for each cell, and prometheus_client would take seconds for a study.
    """
    series: dict[str, float] = {}
    for name, labels, value in SERIES.findall(page):
        label_text = _sorted_labels(labels)
        series[f"{name}{{{label_text}}}" if label_text else name] = float(value)
    return series


@lru_cache(maxsize=4096)
def _sorted_labels(labels: str) -> str:
    """Return labels in the order of a metrics record; cached, since a study's pages share them."""
    pairs = sorted(
        (key, ESCAPED.sub(lambda escaped: {"n": "\n"}.get(escaped[1], escaped[1]), text))
        for key, text in LABEL.findall(labels)
    )
    return ",".join(f'{key}="{text}"' for key, text in pairs)


def _histogram(page: Mapping[str, float], metric: str) -> dict[str, float]:
    """Return cumulative count by bucket bound, and `sum`, added over several engines."""
    totals: dict[str, float] = {}
    pattern = re.compile(rf'{metric}_(?:bucket.*[{{,]le="([^"]+)".*|(sum).*)')
    for key, value in page.items():
        if key.startswith(metric) and (series := pattern.fullmatch(key)):
            bound = series[1] or series[2]
            totals[bound] = totals.get(bound, 0.0) + value
    return totals


def _steps(records: Records) -> Iterator[str]:
    if len({step["step_id"] for step in records.scheduler}) != len(records.scheduler):
        yield "the scheduler has two records of one step"
    if any(step["t_ns"] < records.record["window"]["t_origin_ns"] for step in records.scheduler):
        yield "a step began before the cell did"
    if records.cell.configuration == PLAIN and any(
        step[name] is not None for step in records.steps for name in CALLBACKS
    ):
        yield "plain has a connector callback"


CHECKS: dict[str, Callable[[Records], Iterator[str]]] = {
    "records": _record,
    "requests": _requests,
    "identities": _identities,
    "steps": _steps,
}
