"""Claims about the raw records: hashes, files, invariants, counters, validity.

A cell is valid, or it is void with a reason (docs/method.md). Nothing here is shared with
connector_tax.analysis or with the load generator.
"""

import itertools
from collections.abc import Iterator

from connector_tax.artifacts import paths
from connector_tax.artifacts.cell_records import WindowRecord
from connector_tax.artifacts.names import PLAIN, REQUEST_STATUSES
from connector_tax.provenance.audit_design import check_design, skipped_rate
from connector_tax.provenance.audit_identities import identities
from connector_tax.provenance.audit_schedule import check_prompts, schedule, window
from connector_tax.provenance.audit_study import COUNTERS, FAILED, RawCell, RawStudy, series
from connector_tax.provenance.audit_validity import validity
from connector_tax.provenance.claims import Ledger
from connector_tax.provenance.recompute import Row

# In the order in which a request passes through them.
ORDER = ("issue", "worker", "conn", "send", "headers", "first_token", "last_token", "done")


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
        ledger.check("identities", cell.name, identities(study, cell, cell.counter_growth))
    ledger.check("validity", cell.name, validity(study, cell))
    ledger.check("steps", cell.name, _steps(study, cell))


# ---- records of one cell


def _hashes(study: RawStudy, cell: RawCell) -> Iterator[str]:
    assert cell.entry is not None
    listed = cell.entry.files
    watched = "quiet" in study.config
    kinds = [kind for kind in ("cell", *paths.CELL_LOGS) if watched or kind != "machine"]
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
        if r["status"] not in REQUEST_STATUSES:
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
    counted = {
        "planned": len(records),
        "sent": sum(r["t_send_ns"] is not None for r in records),
        "ok": states.count("ok"),
        "dropped": states.count("dropped"),
        "failed": {kind: kinds.count(kind) for kind in sorted(set(kinds))},
        "measured_ok": sum(r["status"] == "ok" for r in cell.in_window),
    }
    for key, value in counted.items():
        if counts[key] != value:
            yield f"counts.{key} is {counts[key]}, the records give {value}"
    if counted["ok"] + counted["dropped"] + len(kinds) != len(records):
        yield "ok + failed + dropped is not the number of records"


def _stamps(r: Row, window: WindowRecord) -> Iterator[str]:
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


# ---- counters, steps


def _counters(cell: RawCell) -> Iterator[str]:
    for moment, scrape in (("before", cell.metrics[0]), ("after", cell.metrics[-1])):
        scraped = {key: series(scrape["values"], name) for key, name in COUNTERS.items()}
        if cell.record["server_counters"][moment] != scraped:
            yield f"server_counters.{moment} is not what the {moment} scrape holds"
    if cell.status != "valid":
        return
    deltas = cell.counter_growth
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
