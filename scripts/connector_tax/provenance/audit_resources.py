"""Claims about what launches took of the machine and what their engines resolved."""

import math
from collections.abc import Iterator

from connector_tax.artifacts.cell_records import QuantityRecord
from connector_tax.provenance.audit_study import RawCell, RawLaunch, RawStudy
from connector_tax.provenance.claims import Ledger
from connector_tax.provenance.recompute import Row
from connector_tax.provenance.recompute_resources import recorded
from connector_tax.study.server_environment import shown

RECORDS = ("resources.json", "settings.json")
TOO_OLD = "measured before launches kept it"


def check_resources(study: RawStudy, ledger: Ledger) -> None:
    """Every claim about what a launch recorded besides its cells."""
    done = [launch for launch in study.launches if launch.status == "done"]
    without = [la for la in done if la.index is None or la.index.recorded is None]
    if without:
        first = f"{len(without)} launches, first {without[0].name}"
        ledger.not_checkable("launch records", first, TOO_OLD)
    for launch in (launch for launch in done if launch not in without):
        ledger.check("launch records", launch.name, _records(study, launch))
        for cell in study.cells:
            if cell.launch is launch and cell.measured:
                ledger.check("server CPU", cell.name, _server_cpu(cell))


def _records(study: RawStudy, launch: RawLaunch) -> Iterator[str]:
    assert launch.index is not None
    assert launch.index.recorded is not None
    for name in RECORDS:
        if name not in launch.index.recorded:
            yield f"{name} is not listed in index.json"
        elif study.sha256(launch.folder / name) != launch.index.recorded[name]:
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


def _quantity(quantity: QuantityRecord) -> Iterator[str]:
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
