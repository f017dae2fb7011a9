"""Claims about what launches took of the machine and what their engines resolved."""

import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from connector_tax.artifacts import paths
from connector_tax.provenance.audit_study import RawCell, RawLaunch, RawStudy
from connector_tax.provenance.audit_tables import Declared, compare
from connector_tax.provenance.claims import Ledger
from connector_tax.provenance.comparison import Table, read_csv
from connector_tax.provenance.recompute import Row
from connector_tax.provenance.recompute_resources import Resources, engine_rows, recorded
from connector_tax.study.server_environment import shown

RECORDS = (paths.RESOURCES, paths.SETTINGS)
FIGURE = "fig10_resources"
DRAWN = (
    "idle_cpu", "cpu_s_per_1000", "memory_pss_mib", "gpu_memory_mib", "kv_blocks", "threads",
    "startup_s",
)  # fmt: skip
TOO_OLD = "measured before launches kept it"
RESOURCES = Declared(
    ("config", "resource"),
    ("config", "resource", "unit", "scale", "plain_mean", "config_mean", "difference",
     "difference_lo", "difference_hi", "tax", "tax_lo", "tax_hi", "p_value", "interval_method",
     "aa_difference", "aa_difference_lo", "aa_difference_hi", "aa_tax", "aa_tax_lo", "aa_tax_hi",
     "n_blocks", "n_launches", "companions", "status", "reason"),
)  # fmt: skip
DRAWN_COLUMNS = Declared(
    ("config", "resource"),
    ("config", "resource", "unit", "plain_mean", "difference", "difference_lo", "difference_hi",
     "tax", "aa_lo", "aa_hi", "interval_method", "n_blocks", "status", "reason"),
)  # fmt: skip
ENGINE = Declared(
    ("config", "setting"),
    ("config", "setting", "value", "plain", "differs", "source", "reason", "also_differs"),
)


def check_resources(study: RawStudy, ledger: Ledger) -> None:
    """Every claim about records of launches, resources.csv, engine.csv and their figure."""
    done = [launch for launch in study.launches if launch.status == "done"]
    without = [la for la in done if la.index is None or "files" not in la.index]
    if without:
        first = f"{len(without)} launches, first {without[0].name}"
        ledger.not_checkable("launch records", first, TOO_OLD)
    for launch in (launch for launch in done if launch not in without):
        ledger.check("launch records", launch.name, _records(study, launch))
        for cell in study.cells:
            if cell.launch is launch and cell.measured:
                ledger.check("server CPU", cell.name, _server_cpu(cell))
    _check_tables(study, ledger)


def _check_tables(study: RawStudy, ledger: Ledger) -> None:
    folder = study.published / "analysis"
    rates = {cell["rate_rps"]: cell["cell"] for cell in study.document["cells"]["A"]}
    with ledger.guarded("numbers", "resources.csv"):
        found = Resources(study, rates.get(study.rates["ref_safe"])).rows()
        expected = {
            "resources.csv": (found, RESOURCES),
            "engine.csv": (engine_rows(study), ENGINE),
        }
        for name, (rows, declared) in expected.items():
            if study.published != study.root and not (folder / name).exists():
                ledger.not_checkable("numbers", name, "published before it was made")
                continue
            table = read_csv(folder / name)
            ledger.check("numbers", name, _table(table, rows, declared), f"{len(table)} rows")
        path = study.published / paths.FIGURES / f"{FIGURE}.csv"
        if study.published != study.root and not path.exists():
            ledger.not_checkable("figure", FIGURE, "published before it was made")
        else:
            ledger.check("figure", FIGURE, _figure(path, found))


def _table(table: Table, rows: list[Row], declared: Declared) -> Iterator[str]:
    yield from compare(table, rows, declared)
    for row in table:
        missing = row.get("status") == "missing" or row.get("value") == ""
        if missing and not row["reason"]:
            yield f"{' '.join(row[key] for key in declared.keys)}: no value and no reason"


def _records(study: RawStudy, launch: RawLaunch) -> Iterator[str]:
    assert launch.index is not None
    for name in RECORDS:
        if name not in launch.index["files"]:
            yield f"{name} is not listed in index.json"
        elif study.sha256(launch.folder / name) != launch.index["files"][name]:
            yield f"{name}: sha256 is not what index.json says: changed after it was measured"
    resources, settings = (recorded(launch, name) for name in RECORDS)
    if resources is None or settings is None:
        return
    yield from _taken(study, launch, resources)
    for name, setting in settings["settings"].items():
        unknown = setting["value"] is None
        if unknown != (setting["source"] is None) or unknown != (setting["reason"] is not None):
            yield f"settings.json: {name}: value, source and reason contradict each other"
    for which, environment in settings["environment"].items():
        if environment != shown(environment):
            yield f"settings.json: environment.{which} shows a secret"


def _taken(study: RawStudy, launch: RawLaunch, resources: Row) -> Iterator[str]:
    idle = resources["idle_cpu"]
    moments = [("before_load", resources["before_load"]), ("after_load", resources["after_load"])]
    named = {"idle_cpu": idle} | {
        f"{when}.{name}": quantity
        for when, taken in moments
        for name, quantity in (taken or {}).items()
    }
    for name, quantity in named.items():
        yield from (f"resources.json: {name}: {wrong}" for wrong in _quantity(quantity))
    if idle["to_ns"] - idle["from_ns"] < 1e9 * study.config["resources"]["idle_s"]:
        yield "resources.json: the server was watched for less than resources.idle_s"
    origins = [
        cell.record["window"]["t_origin_ns"]
        for cell in study.cells
        if cell.launch is launch
        and cell.measured
        and cell.record["attempt"] == resources["attempt"]
    ]
    if any(origin < idle["to_ns"] for origin in origins):
        yield "resources.json: a cell began while the server was watched idle"


def _quantity(quantity: Mapping[str, Any]) -> Iterator[str]:
    value, reason = quantity["value"], quantity["reason"]
    if (value is None) != (reason is not None):
        yield "a value with a reason against it, or neither"
    elif value is not None and not _equal(value, sum(quantity["parts"].values())):
        yield f"{value} is not the sum of its parts"


def _server_cpu(cell: RawCell) -> Iterator[str]:
    use, window = cell.record["server_cpu"], cell.record["window"]
    if not use["from_ns"] <= window["t_origin_ns"] <= window["t_drained_ns"] <= use["to_ns"]:
        yield "the readings do not enclose the cell"
    counters = cell.record["server_counters"]
    before, after = (counters[when]["success"] for when in ("before", "after"))
    if before is not None and use["requests"] != after - before:
        yield f"{use['requests']} requests, the server's counters say {after - before}"
    each = use["cpu_s_per_1000"]
    yield from _quantity(each)
    if each["value"] is not None and not _equal(
        each["value"], 1000 * use["cpu_s"] / use["requests"]
    ):
        yield f"{each['value']} per 1,000 requests is not {use['cpu_s']} s over {use['requests']}"


def _equal(one: float, other: float) -> bool:
    return math.isclose(one, other, rel_tol=1e-9, abs_tol=1e-12)


def _figure(path: Path, rows: list[Row]) -> Iterator[str]:
    table = read_csv(path)
    drawn = [row for row in rows if row["resource"] in DRAWN]
    known = {row["resource"] for row in drawn if row["status"] == "valid"}
    if (list(table[0]) == ["absent_because"]) != (not known):
        yield "absent, though there are numbers" if known else "drawn without a number"
        return
    if known:
        expected = [row | _band(row) for row in drawn if row["resource"] in known]
        yield from compare(table, expected, DRAWN_COLUMNS)


def _band(row: Row) -> Row:
    point = row.get("aa_difference")
    ends = row.get("aa_difference_lo"), row.get("aa_difference_hi")
    if None in ends:
        ends = (None, None) if point is None else (-abs(point), abs(point))
    return dict(zip(("aa_lo", "aa_hi"), ends, strict=True))
