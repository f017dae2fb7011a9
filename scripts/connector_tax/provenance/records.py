"""What the raw records of each measured cell must be, whatever was made of them.

Arrivals and prompts follow from the seed; stamps are in order; client, server and step records of
the same requests agree (docs/method.md, "Clocks, latencies, success").
"""

import hashlib
import itertools
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from connector_tax.analysis.ingest import Cell, load_cells
from connector_tax.analysis.validity import FAILED, counted, server_counters
from connector_tax.artifacts import paths
from connector_tax.artifacts.names import PHASES, PLAIN, REQUEST_STATUSES
from connector_tax.artifacts.rates import most_of_shape
from connector_tax.artifacts.record_reader import read_record
from connector_tax.artifacts.stage_records import RatesRecord, ShapeRatesRecord
from connector_tax.artifacts.study_file import Study
from connector_tax.files import read_json, read_jsonl
from connector_tax.loadgen import make_offsets
from connector_tax.provenance.claims import Ledger
from connector_tax.servers.kinds import engine_of
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
        self.name = cell.name
        self.requests: list[Line] = list(read_jsonl(cell.file("requests")))
        self.metrics: list[Line] = list(read_jsonl(cell.file("metrics")))
        self.steps: list[Line] = list(read_jsonl(cell.file("engine_step")))
        first, last = (server_counters(scrape["values"]) for scrape in self.ends)
        # How much the server's counters grew over the cell; None where one is absent.
        self.growth = {
            key: None if before is None or (after := last[key]) is None else after - before
            for key, before in first.items()
        }

    @property
    def ends(self) -> tuple[Line, Line]:
        """The scrapes before and after the cell."""
        return self.metrics[0], self.metrics[-1]

    @property
    def ok(self) -> list[Line]:
        """The successes."""
        return [r for r in self.requests if r["status"] == "ok"]


def check_records(study: Study, ledger: Ledger) -> None:
    """A claim of each kind for each measured cell, and one for what the cells share."""
    ids: dict[str, str] = {}
    twice: list[str] = []
    for cell in measured_cells(study, ledger):
        name = "/".join(map(str, cell.key))
        with ledger.guarded("records", name):
            records = Records(study, cell)
            for kind, check in CHECKS.items():
                ledger.check(kind, records.name, check(records))
            for r in records.requests:
                if r["request_id"] in ids:
                    twice.append(f"{r['request_id']!r} in {ids[r['request_id']]} and {name}")
                ids[r["request_id"]] = name
    ledger.check("request ids", "whole study", twice, "none stands twice")
    if study.config.get("shape_rates") is not None:
        ledger.check("design", "shape rates", _shape_rates(study), "follow from what was served")


def measured_cells(study: Study, ledger: Ledger) -> Iterator[Cell]:
    """The valid and void cells; a claim that fails for each that has no records and should."""
    rates = read_record(study.root / paths.REFERENCE_RATES, RatesRecord)
    for phase in PHASES:
        with ledger.guarded("records", f"phase {phase}"):
            rate = {"A": None, "B": rates["ref_safe"], "Bp": rates["ref_load"]}[phase]
            for cell in load_cells(study, phase, rate):
                if cell.record is not None:
                    yield cell
                elif cell.status != "skipped":
                    ledger.fail("records", "/".join(map(str, cell.key)), str(cell.reason))


# ---- what was sent, and when


def _schedule(records: Records) -> Iterator[str]:
    """Arrivals at the times that the seed gives, at the rate of the design, within its lengths."""
    study, cell, plan = records.study, records.cell, records.record["schedule"]
    arrivals, rule, times = study.config["arrivals"], study.config["cell"], records.record["window"]
    name = f"{study.seed}/arrivals/block{cell.key.block}/{cell.key.phase}/{cell.key.cell}"
    said = (plan["seed"], plan["kind"], plan["rate_rps"])
    if said != (name, arrivals["process"], cell.rate_rps):
        yield f"it says {said}, the design {(name, arrivals['process'], cell.rate_rps)}"
    origin, warm, stop = (times[f"t_{n}_ns"] for n in ("origin", "warmup_end", "stop"))  # type: ignore[literal-required]
    end = times.get("t_cooldown_end_ns", stop)
    # The last request may be done before the window closes: no order between stop and drained.
    if not origin <= warm < stop <= end or times["t_drained_ns"] < origin:
        yield "origin <= warm-up end < stop <= end of arrivals does not hold"
    if abs(warm - origin - rule["warmup_s"] * 1e9) > 1:
        yield f"the warm-up lasts {(warm - origin) / 1e9} s, not {rule['warmup_s']} s"
    longest = rule["warmup_s"] + rule["cap_s"] + rule["drain_s"]
    # Also keeps a forged stamp from asking for a schedule without end.
    if not 0 < end - origin <= longest * 1e9 + 1:
        yield f"arrivals end {(end - origin) / 1e9:g} s after the origin, allowed: {longest:g} s"
        return
    due = make_offsets(
        arrivals["process"], cell.rate_rps or 0, (end - origin) / 1e9, name, arrivals["gamma_shape"]
    )
    offsets = [r["t_intended_ns"] - origin for r in records.requests]
    if not len(due) == len(offsets) == plan["n"]:
        yield f"{len(offsets)} requests, n is {plan['n']}, the seed gives {len(due)}"
    wrong = [k for k, (a, b) in enumerate(zip(offsets, due, strict=False)) if abs(a - b) > 1]
    if wrong:
        yield f"{len(wrong)} arrivals are not the seed's, first: seq {wrong[0]}"
    later = sum(r["t_intended_ns"] >= stop for r in records.requests)
    if records.record["cooldown"]["requests"] != later:
        yield f"cooldown.requests is {records.record['cooldown']['requests']}, found {later}"


def _prompts(records: Records) -> Iterator[str]:
    """Request ids name the stream their bodies are drawn from; drawn again, these hash the same."""
    ids = [r["request_id"] for r in records.requests]
    stream = ids[0].rpartition("/")[0] if ids else ""
    attempt = f"{records.name}/attempt{records.record['attempt']}"
    if re.fullmatch(re.escape(attempt) + r"\d", stream) is None:
        yield f"request ids begin with {stream!r}, not with {attempt!r} and one more digit"
    wrong = [k for k, name in enumerate(ids) if name != f"{stream}/{k}"]
    if wrong:
        yield f"{len(wrong)} request ids are not {stream}/<seq>, first: {ids[wrong[0]]!r}"
    served = engine_of(records.study.config["engine"]).served
    digest = hashlib.sha256()
    for request in planned_requests(
        served,
        input_tokens=records.cell.input_tokens,
        output_tokens=records.cell.output_tokens,
        count=len(ids),
        seed=records.study.seed,
        name=stream,
    ):
        digest.update(request.body + b"\n")
    if records.record["prompts_sha256"] != digest.hexdigest():
        yield f"prompts_sha256 is not that of the {len(ids)} requests the seed gives"


def _shape_rates(study: Study) -> Iterator[str]:
    section = study.config["shape_rates"]
    assert section is not None
    shapes = read_record(study.root / paths.SHAPE_RATES, ShapeRatesRecord)["shapes"]
    for name, shape in shapes.items():
        most = most_of_shape(section["max_share"], shape["completed_s"])
        if shape["most_rps"] != most:
            yield f"{name}: most_rps is {shape['most_rps']}, what was served gives {most}"


# ---- what came back


def _requests(records: Records) -> Iterator[str]:
    record, cell = records.record, records.cell
    if [r["seq"] for r in records.requests] != list(range(len(records.requests))):
        missing = sorted(set(range(record["schedule"]["n"])) - {r["seq"] for r in records.requests})
        yield f"seq does not count 0 to {len(records.requests) - 1}; missing: {missing[:5]}"
    shape = (cell.input_tokens, cell.output_tokens)
    if (record["input_tokens"], record["output_tokens"]) != shape:
        yield f"the cell file's shape is not the design's {shape[0]}x{shape[1]}"
    if record["label"] != records.study.document["engine_label"]:
        yield f"label is {record['label']!r}"
    said: Mapping[str, Any] = record["counts"]
    for key, value in counted(records.requests, record["window"]).items():  # type: ignore[arg-type]
        if said[key] != value:
            yield f"counts.{key} is {said[key]}, the records give {value}"
    served = engine_of(records.study.config["engine"]).served
    # Of text the server alone knows the length; one that ends an answer where it likes says so.
    checked = (served["vocab_size"] is not None, served.get("exact_output", True))
    for r in records.requests:
        where = f"seq {r['seq']}"
        if r["status"] not in REQUEST_STATUSES:
            yield f"{where}: status {r['status']!r}"
        found = (r["prompt_tokens"], r["completion_tokens"])
        as_asked = (not known or a == b for known, a, b in zip(checked, found, shape, strict=True))
        if r["status"] == "ok" and not all(as_asked):
            asked = f"{shape[0]}x{shape[1]}"
            yield f"{where}: {r['prompt_tokens']}x{r['completion_tokens']}, asked {asked}"
        if r["status"] in FAILED and not r["error_kind"]:
            yield f"{where}: {r['status']} without an error_kind"
        yield from (f"{where}: {wrong}" for wrong in _stamps(r, record["window"]))


def _stamps(r: Line, window: Mapping[str, Any]) -> Iterator[str]:
    stamps = [(name, r[f"t_{name}_ns"]) for name in ORDER if r[f"t_{name}_ns"] is not None]
    for (a, x), (b, y) in itertools.pairwise(stamps):
        if x > y:
            yield f"t_{b}_ns is before t_{a}_ns"
    if r["t_send_ns"] is not None and r["t_send_ns"] < r["t_intended_ns"]:
        yield "written before it was due"
    if r["status"] == "ok" and len(stamps) < len(ORDER):
        yield "a success lacks a stamp"
    elif r["status"] == "ok" and r["t_last_token_ns"] > window["t_drained_ns"]:
        yield "its last token is after the cell was drained"
    if r["warmup"] != (r["t_intended_ns"] < window["t_warmup_end_ns"]):
        yield f"warmup is {r['warmup']}, its arrival says otherwise"
    if r["cooldown"] != (r["t_intended_ns"] >= window["t_stop_ns"]):
        yield f"cooldown is {r['cooldown']}, its arrival says otherwise"
    if r["reads"] and r["status"] == "ok":
        times = [t for t, _ in r["reads"]]
        ends = (r["t_first_token_ns"], r["t_last_token_ns"])
        if times != sorted(times) or (times[0], times[-1]) != ends:
            yield "reads do not run from the first token to the last"


# ---- the server's word for it


def counted_by_server(records: Records) -> bool:
    """Whether its server counts under vLLM's names."""
    return engine_of(records.study.config["engine"]).served.get("counters", True)


def _counters(records: Records) -> Iterator[str]:
    said = records.record["server_counters"]
    for moment, scrape in zip(("before", "after"), records.ends, strict=True):
        if said[moment] != server_counters(scrape["values"]):  # type: ignore[literal-required]
            yield f"server_counters.{moment} is not what the {moment} scrape holds"
    growth = records.growth
    if (
        not counted_by_server(records)
        or records.cell.status != "valid"
        or any(r["status"] in FAILED for r in records.requests)
    ):
        return
    counted = {
        "success": len(records.ok),
        "prompt_tokens": sum(r["prompt_tokens"] for r in records.ok),
        "generation_tokens": sum(r["completion_tokens"] for r in records.ok),
        "prefix_cache_hits": 0,
        "external_prefix_cache_hits": 0,
    }
    for key, value in counted.items():
        if growth[key] != value:
            yield f"the server counted {growth[key]} {key}, the records give {value}"


def _identities(records: Records) -> Iterator[str]:
    """What client, server and step records of a valid cell say of the same requests."""
    if records.cell.status != "valid" or not counted_by_server(records):
        return
    missing = [name for name, grown in records.growth.items() if grown is None]
    if missing:
        yield f"the server's counters lack {', '.join(missing)}"
        return
    undisturbed = all(r["status"] in ("ok", "dropped") for r in records.requests)
    if read_json(records.study.root / paths.PATCH_STATUS)["step_timing_available"]:
        yield from _step_tokens(records, undisturbed and records.growth["preemptions"] == 0)
    pages = []
    for moment, scrape in zip(("before", "after"), records.ends, strict=True):
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
    grown, ok = records.growth, records.ok
    counted = {
        "prefill_tokens": sum(r["prompt_tokens"] for r in ok),
        "decode_tokens": sum(r["completion_tokens"] - 1 for r in ok),
    }
    if exact:
        generated, success = grown["generation_tokens"] or 0, grown["success"] or 0
        counted = {
            "prefill_tokens": int(grown["prompt_tokens"] or 0),
            "decode_tokens": int(generated - success),
        }
    for name, wanted in counted.items():
        total = sum(step[name] for step in records.steps if step["process"] == "scheduler")
        if total < wanted or (exact and total != wanted):
            least = "" if exact else "at least "
            yield f"{name} of the steps add up to {total}, the counters say {least}{wanted}"


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
        bound = re.search(r'[{,]le="([^"]+)"', key)
        if key.startswith(f"{metric}_bucket") and bound:
            totals[bound[1]] = totals.get(bound[1], 0.0) + value
        elif key.startswith(f"{metric}_sum"):
            totals["sum"] = totals.get("sum", 0.0) + value
    return totals


def _steps(records: Records) -> Iterator[str]:
    if not read_json(records.study.root / paths.PATCH_STATUS)["step_timing_available"]:
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
    "schedule": _schedule,
    "prompts": _prompts,
    "records": _requests,
    "counters": _counters,
    "identities": _identities,
    "steps": _steps,
}
