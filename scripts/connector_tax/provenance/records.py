"""What the raw records of each measured cell must be, whatever was made of them.

A cell's own record follows from the design, the seed and the lines of its other files, so it is
made again, by the code that judged it. Arrivals and prompts follow from the seed; stamps are in
order; client, server and step records of the same requests agree (docs/method.md, "Clocks,
latencies, success").
"""

import hashlib
import itertools
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any

from connector_tax.analysis.device_time import device_values
from connector_tax.analysis.ingest import Cell, load_cells
from connector_tax.analysis.machine import read_machine
from connector_tax.analysis.measure import summarise_cell
from connector_tax.analysis.validity import FAILED, assess, counted, server_counters, void_reasons
from connector_tax.artifacts import paths
from connector_tax.artifacts.cell_records import ServerCounters
from connector_tax.artifacts.names import PHASES, PLAIN, REQUEST_STATUSES
from connector_tax.artifacts.study_file import Study, every_launch
from connector_tax.files import ArtifactError, read_json, read_jsonl
from connector_tax.loadgen import make_offsets
from connector_tax.provenance.claims import Ledger
from connector_tax.provenance.remade import KIND, differences
from connector_tax.servers.kinds import engine_of
from connector_tax.study.plan import reference_rate
from connector_tax.study.prompts import planned_requests
from connector_tax.study.scraper import parse_metrics

Line = dict[str, Any]
# In the order in which a request passes through them.
ORDER = ("issue", "worker", "conn", "send", "headers", "first_token", "last_token", "done")
HISTOGRAMS = {
    "TTFT": ("vllm:time_to_first_token_seconds", "t_first_token_ns"),
    "E2E": ("vllm:e2e_request_latency_seconds", "t_last_token_ns"),
}
# Wall and monotonic clock may run apart by 500 ppm while one of them is slewed.
CLOCKS = 1e-3


class Records:
    """A measured cell with its records, each file read once."""

    def __init__(self, study: Study, cell: Cell) -> None:
        assert cell.record is not None
        self.study, self.cell, self.record = study, cell, cell.record
        self.requests, self.metrics, self.steps = (
            list[Line](read_jsonl(cell.file(kind))) for kind in paths.CELL_LOGS[:3]
        )
        self.ok = [r for r in self.requests if r["status"] == "ok"]
        self.served = engine_of(study.config["engine"]).served
        self.timed: bool = read_json(study.root / paths.PATCH_STATUS)["step_timing_available"]
        self.counters: ServerCounters = {
            "before": server_counters(self.metrics[0]["values"]),
            "after": server_counters(self.metrics[-1]["values"]),
        }

    @property
    def arrivals_seed(self) -> str:
        """Names the stream that the arrivals are drawn from, the same for every configuration."""
        key = self.cell.key
        return f"{self.study.seed}/arrivals/block{key.block}/{key.phase}/{key.cell}"

    @property
    def stream(self) -> str:
        """What the request ids begin with: it names the stream their prompts are drawn from."""
        return str(self.requests[0]["request_id"]).rpartition("/")[0] if self.requests else ""

    @cached_property
    def due(self) -> list[int]:
        """When each request was to be sent, by the seed; ns after the origin.

        Raises:
            ArtifactError: arrivals end later than those of any cell.
        """
        arrivals, rule = self.study.config["arrivals"], self.study.config["cell"]
        window: Mapping[str, Any] = self.record["window"]
        end = window["t_cooldown_end_ns"]
        lasted = (end - window["t_origin_ns"]) / 1e9
        longest = rule["warmup_s"] + rule["cap_s"] + rule["drain_s"]
        # Also keeps a forged stamp from asking for a schedule without end.
        if not 0 < lasted <= longest + 1e-9:
            raise ArtifactError(
                f"arrivals end {lasted:g} s after the origin, allowed: {longest:g} s"
            )
        rate, process, shape = self.cell.rate_rps or 0, arrivals["process"], arrivals["gamma_shape"]
        due: list[int] = make_offsets(process, rate, lasted, self.arrivals_seed, shape).tolist()
        return due


def check_records(study: Study, ledger: Ledger) -> None:
    """A claim of each kind for each measured cell, and one for the summary of each launch."""
    for cell in measured_cells(study, ledger):
        with ledger.guarded("records", cell.name):
            check_cell(Records(study, cell), ledger)
    for launch in every_launch(study.document):
        folder = launch.folder(study.root)
        subject = f"{launch.name}/{paths.SUMMARY}"
        if (folder / paths.SUMMARY).exists():
            with ledger.guarded(KIND, subject):
                cells = [c["cell"] for c in study.cells(launch.phase)]
                again = {c: summarise_cell(folder / c) for c in cells if (folder / c).is_dir()}
                summary = read_json(folder / paths.SUMMARY)
                ledger.check(KIND, subject, differences(summary, again, "summary"))


def check_cell(records: Records, ledger: Ledger) -> None:
    """A claim of each kind for one cell."""
    for kind, check in CHECKS.items():
        ledger.check(kind, records.cell.name, check(records))


def measured_cells(study: Study, ledger: Ledger) -> Iterator[Cell]:
    """The valid and void cells; a claim that fails for each that has no records and should."""
    for phase in PHASES:
        with ledger.guarded("records", f"phase {phase}"):
            for cell in load_cells(study, phase, reference_rate(study.root, phase)):
                if cell.record is not None:
                    yield cell
                elif cell.status != "skipped":
                    ledger.fail("records", cell.name, str(cell.reason))


# ---- what the cell's record says


def _record(records: Records) -> Iterator[str]:
    """What follows from the design, the seed and the raw records, made again and judged again."""
    study, cell, record = records.study, records.cell, records.record
    arrivals, stop = study.config["arrivals"], record["window"]["t_stop_ns"]
    bodies = hashlib.sha256()
    for request in planned_requests(
        records.served,
        input_tokens=cell.input_tokens,
        output_tokens=cell.output_tokens,
        count=len(records.requests),
        seed=study.seed,
        name=records.stream,
    ):
        bodies.update(request.body + b"\n")
    checks = _judged(records)
    reasons = void_reasons(checks)
    again: dict[str, Any] = {
        "label": study.document["engine_label"],
        "input_tokens": cell.input_tokens,
        "output_tokens": cell.output_tokens,
        "schedule": {
            "kind": arrivals["process"],
            "gamma_shape": arrivals["gamma_shape"],
            "rate_rps": cell.rate_rps,
            "seed": records.arrivals_seed,
            "n": len(records.due),
        },
        "prompts_sha256": bodies.hexdigest(),
        "cooldown": {
            "requests": sum(r["t_intended_ns"] >= stop for r in records.requests),
            "ended_by": record["cooldown"]["ended_by"],
        },
        "counts": {**counted(records.requests, record["window"]), "planned": len(records.due)},  # type: ignore[arg-type]
        "server_counters": records.counters,
        "health": checks,
        "valid": not reasons,
        "void_reasons": sorted(reasons),
    }
    said = {key: record.get(key) for key in again}
    said["void_reasons"] = sorted(record["void_reasons"])
    yield from differences(said, again, "cell")


def _judged(records: Records) -> Mapping[str, Any]:
    """The checks of the cell, by the very code that judged it."""
    study, cell, record, device = records.study, records.cell, records.record, None
    machine = cell.file("machine")
    if study.config["engine"].get("device") == "emulated":
        log = list(read_jsonl(cell.file(paths.DEVICE_LOG)))
        device = device_values(log, records.steps, cell.configuration == study.baseline)
    return assess(
        records=records.requests,  # type: ignore[arg-type]
        planned=len(records.due),
        shape=(cell.input_tokens, cell.output_tokens),
        window=record["window"],
        cell=study.config["cell"],
        wanted=study.config["cell"]["min_completed"],
        suspended_ms=record["suspended_ms"],
        counters=records.counters,
        scrapes=records.metrics,  # type: ignore[arg-type]
        health=record["load_generator"],
        clock=record["clock"],
        bounds=study.config["validity"],
        device=device,
        machine=read_machine(machine, None) if machine.exists() else None,
        watched="quiet" in study.config,
        counted_by_server=records.served.get("counters", True),
    )


# ---- what was sent, and what came back


def _requests(records: Records) -> Iterator[str]:
    """Arrivals are the seed's, at their places in the cell, each with stamps in order."""
    window: Mapping[str, Any] = records.record["window"]
    due, rule = records.due, records.study.config["cell"]
    origin, warm, stop = (window[f"t_{name}_ns"] for name in ("origin", "warmup_end", "stop"))
    end, drained = window["t_cooldown_end_ns"], window["t_drained_ns"]
    # The last request may be done before the window closes: no order between stop and drained.
    if not origin <= warm < stop <= end or drained < origin:
        yield "origin <= warm-up end < stop <= end of arrivals does not hold"
    if abs(warm - origin - rule["warmup_s"] * 1e9) > 1:
        yield f"the warm-up lasts {(warm - origin) / 1e9} s, not {rule['warmup_s']} s"
    attempt = f"{records.cell.name}/attempt{records.record['attempt']}"
    if records.requests and re.fullmatch(re.escape(attempt) + r"\d", records.stream) is None:
        yield f"request ids begin with {records.stream!r}, not with {attempt!r} and one more digit"
    if len(records.requests) != len(due):
        yield f"{len(records.requests)} requests, the seed gives {len(due)}"
    offsets = [r["t_intended_ns"] - origin for r in records.requests]
    wrong = [k for k, (a, b) in enumerate(zip(offsets, due, strict=False)) if abs(a - b) > 1]
    if wrong:
        yield f"{len(wrong)} arrivals are not the seed's, first: seq {wrong[0]}"
    for number, request in enumerate(records.requests):
        arrival = request["t_intended_ns"]
        place = {
            "seq": number, "request_id": f"{records.stream}/{number}",
            "warmup": arrival < warm, "cooldown": arrival >= stop,
        }  # fmt: skip
        for key, value in place.items():
            if request[key] != value:
                yield f"line {number}: {key} is {request[key]!r}, by its place {value!r}"
        if request["status"] == "ok" and (request["t_last_token_ns"] or 0) > drained:
            yield f"seq {number}: its last token is after the cell was drained"
        yield from (f"seq {number}: {problem}" for problem in _of_one(records, request))


def _of_one(records: Records, r: Line) -> Iterator[str]:
    """What is wrong with one request in itself."""
    stamps = [(name, r[f"t_{name}_ns"]) for name in ORDER if r[f"t_{name}_ns"] is not None]
    for (a, x), (b, y) in itertools.pairwise(stamps):
        if x > y:
            yield f"t_{b}_ns is before t_{a}_ns"
    if r["t_send_ns"] is not None and r["t_send_ns"] < r["t_intended_ns"]:
        yield "written before it was due"
    if r["status"] not in REQUEST_STATUSES:
        yield f"status {r['status']!r}"
    if r["status"] in FAILED and not r["error_kind"]:
        yield f"{r['status']} without an error_kind"
    if r["status"] != "ok":
        return
    if len(stamps) < len(ORDER):
        yield "a success lacks a stamp"
    # Of text the server alone knows the length; one that ends an answer where it likes says so.
    known = (records.served["vocab_size"] is not None, records.served.get("exact_output", True))
    found = (r["prompt_tokens"], r["completion_tokens"])
    asked = (records.cell.input_tokens, records.cell.output_tokens)
    if any(k and a != b for k, a, b in zip(known, found, asked, strict=True)):
        yield f"{found[0]}x{found[1]}, asked {asked[0]}x{asked[1]}"
    times = [t for t, _ in r["reads"] or ()]
    ends = [r["t_first_token_ns"], r["t_last_token_ns"]]
    if times and (times != sorted(times) or [times[0], times[-1]] != ends):
        yield "reads do not run from the first token to the last"


# ---- the server's word for it


def _identities(records: Records) -> Iterator[str]:
    """What client, server and step records of a valid cell say of the same requests."""
    if records.cell.status != "valid" or not records.served.get("counters", True):
        return
    after = records.counters["after"]
    missing = [name for name, n in records.counters["before"].items() if None in (n, after[name])]
    if missing:
        yield f"the server's counters lack {', '.join(missing)}"
        return
    preempted = records.counters["before"]["preemptions"] != after["preemptions"]
    undisturbed = all(r["status"] in ("ok", "dropped") for r in records.requests)
    if records.timed:
        yield from _step_tokens(records, undisturbed and not preempted)
    pages = []
    for moment, scrape in (("before", records.metrics[0]), ("after", records.metrics[-1])):
        if "raw" not in scrape:
            yield f"the scrape {moment} the cell holds no text"
            return
        pages.append(parse_metrics(scrape["raw"], whole=True))
        for key, value in scrape["values"].items():
            if key.startswith("vllm:") and pages[-1].get(key) != value:
                told = f"{value:g} in the scrape {moment} the cell, its text says"
                yield f"{key}: {told} {pages[-1].get(key)}"
    for name, (metric, last) in HISTOGRAMS.items():
        seconds = [(r[last] - r["t_send_ns"]) / 1e9 for r in records.ok]
        yield from _no_client_is_faster(name, metric, pages, seconds, undisturbed)


def _step_tokens(records: Records, exact: bool) -> Iterator[str]:
    """A request's first token is of the step that ends its prefill."""
    served = {
        "prefill_tokens": sum(r["prompt_tokens"] for r in records.ok),
        "decode_tokens": sum(r["completion_tokens"] - 1 for r in records.ok),
    }
    for name, wanted in served.items():
        total = sum(step[name] for step in records.steps if step["process"] == "scheduler")
        if total < wanted or (exact and total != wanted):
            least = "" if exact else "at least "
            yield f"{name} of the steps add up to {total}, the requests had {least}{wanted}"


def _no_client_is_faster(
    name: str, metric: str, pages: Sequence[Mapping[str, float]], seconds: list[float], exact: bool
) -> Iterator[str]:
    """The server's histogram bounds the client's times: in each bucket, and in sum."""
    before, after = (_histogram(page, metric) for page in pages)
    if len(after) < 2 or before.keys() != after.keys():
        yield f"{metric} is missing"
        return
    took, grown = sum(seconds), after.pop("sum") - before["sum"]
    faster = "no client is faster than its server"
    for bound, count in after.items():
        served = count - before[bound]
        seen = sum(s * (1 + CLOCKS) <= float(bound) for s in seconds)
        if seen > served:
            told = f"{seen} requests took at most {bound} s at the client, only {served:g} at the"
            yield f"{name}: {told} server: {faster}"
            return
    if exact and took * (1 + CLOCKS) < grown:
        yield f"{name}: {took:.4f} s in sum at the client, {grown:.4f} s at the server: {faster}"


def _histogram(page: Mapping[str, float], metric: str) -> dict[str, float]:
    """Bucket's bound to count, and `sum`; series of several engines added up."""
    totals: dict[str, float] = {}
    for key, value in page.items():
        series = re.fullmatch(rf'{metric}_(?:bucket.*[{{,]le="([^"]+)".*|(sum).*)', key)
        if series:
            bound = series[1] or series[2]
            totals[bound] = totals.get(bound, 0.0) + value
    return totals


def _steps(records: Records) -> Iterator[str]:
    if not records.timed:
        return
    scheduler = [step for step in records.steps if step["process"] == "scheduler"]
    if len({step["step_id"] for step in scheduler}) != len(scheduler):
        yield "the scheduler has two records of one step"
    if not scheduler and records.ok:
        yield "requests were served and no step is recorded"
    if any(step["t_ns"] < records.record["window"]["t_origin_ns"] for step in scheduler):
        yield "a step began before the cell did"
    calls = ("build_meta_us", "get_finished_us", "start_load_kv_us")
    if records.cell.configuration == PLAIN and any(
        step[name] is not None for step in records.steps for name in calls
    ):
        yield "plain has a connector callback"


CHECKS: dict[str, Callable[[Records], Iterator[str]]] = {
    "records": _record,
    "requests": _requests,
    "identities": _identities,
    "steps": _steps,
}
