"""The design's seven success criteria, each a function from the tables to met, not met, cannot
tell.

Source: design, "Success Criteria". Criteria 1 to 5 ask that a number is reported and labelled; a
label is read off an interval and needs three blocks, else the number stands without it.
"""

from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

from connector_tax.analysis.conclusions import (
    Conclusion,
    numbers_of,
    point_sentence,
    shown,
    undecided,
)
from connector_tax.analysis.effects import Effect
from connector_tax.analysis.hypotheses import (
    MOONCAKE,
    NIXL,
    NOOP,
    at_safe,
    dominance,
    framework_share,
    gap_pp,
    h4,
    h5,
    h6,
)
from connector_tax.analysis.ingest import Cell
from connector_tax.analysis.taxes import Tables
from connector_tax.artifacts import paths
from connector_tax.artifacts.names import PHASES, Launch
from connector_tax.artifacts.stage_records import ConclusionRecord, GateRecord
from connector_tax.files import ArtifactError, read_json

MET, NOT_MET, CANNOT_TELL = "met", "not met", "cannot tell"
NS_PER_HOUR = 3.6e12


def criteria(tables: Tables, cells: Sequence[Cell], step_timing: bool) -> list[ConclusionRecord]:
    """All seven, in order, as hypotheses.json has them; `id` is a number."""
    findings = [
        prior_of_h1(tables),
        gap_of_h2(tables),
        label_of_h3(tables),
        additivity(tables),
        directions(tables),
        artifacts(tables, cells, step_timing),
        wall_clock(tables, cells),
    ]
    return [{**finding.as_dict(), "id": int(finding.id)} for finding in findings]


def prior_of_h1(tables: Tables) -> Conclusion:
    """1: tax_TTFT_p90 of mooncake_both at ref_safe is reported; the prior accepted or revised."""
    low, high = tables.study.config["hypotheses"]["h1_prior_band"]
    tax = _tax_at_safe(tables, MOONCAKE)
    if tax is None:
        return _unreported("1", f"the TTFT p90 tax of {MOONCAKE} at ref_safe")
    label, tail = "undecided", f"the interval crosses a border of [{low:.0%}, {high:.0%}]"
    if low <= tax.lo and tax.hi <= high:
        label, tail = "accepted", f"inside [{low:.0%}, {high:.0%}]: the prior is accepted"
    elif tax.hi < low or tax.lo > high:
        label, tail = "revised", f"outside [{low:.0%}, {high:.0%}]: the prior is revised"
    numbers = {"tax_ttft_p90": numbers_of(tax), "band": [low, high]}
    point = "accepted" if low <= tax.point <= high else "revised"
    start = f"{MOONCAKE} at ref_safe: {shown(tax)}"
    return _labelled("1", start, tail, label, numbers, [tax], f"prior {point}")


def gap_of_h2(tables: Tables) -> Conclusion:
    """2: the NIXL-Mooncake gap at ref_safe is reported; agreement with the prior is documented."""
    limits = tables.study.config["hypotheses"]
    low, high = (bound / 100 for bound in limits["h2_gap_band_pp"])
    cell = at_safe(tables)
    gap = None if cell is None else gap_pp(tables, cell)
    if gap is None:
        return _unreported("2", f"the gap between {MOONCAKE} and {NIXL} at ref_safe")
    label, tail = "undecided", "agreement with the prior cannot be told"
    if low <= gap.lo and gap.hi <= high:
        label, tail = "agrees", f"agrees with the prior's {limits['h2_prior_gap_pp']:g} pp"
    elif gap.hi < low or gap.lo > high:
        label, tail = "disagrees", f"disagrees with the prior's {limits['h2_prior_gap_pp']:g} pp"
    numbers = {"gap": numbers_of(gap), "prior_gap_pp": limits["h2_prior_gap_pp"]}
    point = "agrees" if low <= gap.point <= high else "disagrees"
    start = f"Gap {shown(gap, 'pp')}"
    return _labelled("2", start, tail, label, numbers, [gap], f"{point} with the prior")


def label_of_h3(tables: Tables) -> Conclusion:
    """3: tax(noop_connector) at ref_safe is reported and the substrate tax is labelled."""
    limits, cell = tables.study.config["hypotheses"], at_safe(tables)
    noop, mooncake = _tax_at_safe(tables, NOOP), _tax_at_safe(tables, MOONCAKE)
    if cell is None or noop is None or mooncake is None:
        return _unreported("3", f"the TTFT p90 taxes of {NOOP} and {MOONCAKE} at ref_safe")
    upper = framework_share(tables, cell, limits["h3_framework_share"])
    lower = framework_share(tables, cell, limits["h3_implementation_share"])
    if upper is None or lower is None:
        return _unreported("3", f"a block with both {NOOP} and {MOONCAKE}")
    label, tail = "undecided", "the share of the framework cannot be told"
    if mooncake.lo <= 0:
        tail = f"the tax of {MOONCAKE} may be zero, and there is nothing to split"
    elif upper.lo >= 0:
        label, tail = "framework-cost-dominated", "the tax is framework-cost-dominated"
    elif lower.hi < 0:
        label, tail = "implementation-cost-dominated", "the tax is implementation-cost-dominated"
    elif lower.lo >= 0 and upper.hi < 0:
        label, tail = "mixed", "neither the framework nor the implementation dominates"
    elif upper.hi < 0:
        tail = (
            f"the framework is less than {limits['h3_framework_share']:.0%} of the tax; whether"
            f" it is less than {limits['h3_implementation_share']:.0%} cannot be told"
        )
    share = noop.point / mooncake.point if mooncake.point > 0 else None
    numbers = {
        "noop_tax": numbers_of(noop),
        "mooncake_tax": numbers_of(mooncake),
        "framework_share": share,
    }
    start = f"No-op connector {shown(noop)}, {MOONCAKE} {shown(mooncake)}"
    point = dominance(tables, noop.point, mooncake.point)
    return _labelled("3", start, tail, label, numbers, [noop, mooncake, upper, lower], point)


def additivity(tables: Tables) -> Conclusion:
    """4: the departure from additivity is computed and compared with the tolerance."""
    finding = h4(tables)
    if not finding.numbers:
        return Conclusion("4", NOT_MET, f"Not reported. {finding.sentence}", {})
    labels = {"supported": "linear", "refuted": "not linear"}
    numbers = {**finding.settled, "label": labels.get(finding.verdict, "undecided")}
    return Conclusion("4", MET, finding.sentence, numbers, finding.point_label)


def directions(tables: Tables) -> Conclusion:
    """5: sign and magnitude of the growth of both taxes with length are reported."""
    findings = [h5(tables), h6(tables)]
    sentence = " ".join(finding.sentence for finding in findings)
    if not all(finding.numbers for finding in findings):
        return Conclusion("5", NOT_MET, f"Not reported. {sentence}", {})
    labels = "; ".join(str(finding.point_label) for finding in findings)
    return Conclusion("5", MET, sentence, {f.id: f.settled for f in findings}, labels)


def artifacts(tables: Tables, cells: Sequence[Cell], step_timing: bool) -> Conclusion:
    """6: a launch that ran has every file; a skipped configuration has a reason in pre-flight."""
    study = tables.study
    path = study.root / paths.PREFLIGHT_STATUS
    try:
        preflight: dict[str, GateRecord] = read_json(path)
    except ArtifactError as error:
        return Conclusion("6", NOT_MET, str(error), {})
    missing = []
    launches: dict[tuple[str, int, str], list[Cell]] = {}
    for cell in cells:
        launches.setdefault(cell.key[:3], []).append(cell)
    for (config, block, phase), members in launches.items():
        name = f"{paths.RUNS}/{Launch(config, block, phase).name}"
        missing += _missing_files(study.root.joinpath(name), name, members, step_timing)
        if members[0].status == "skipped" and phase != "Bp":
            entry = preflight.get(members[0].configuration)
            if entry is None or not entry.get("reason"):
                missing.append(f"{name}: skipped without a reason in preflight_status.json")
    numbers = {"launches": len(launches), "missing": missing}
    if missing:
        sentence = f"{len(missing)} artifacts or reasons are missing, first: {missing[0]}."
        return Conclusion("6", NOT_MET, sentence, numbers)
    sentence = f"All artifacts of {len(launches)} launches are present; every skip has its reason."
    return Conclusion("6", MET, sentence, numbers)


def _missing_files(
    folder: Path, name: str, members: Sequence[Cell], step_timing: bool
) -> list[str]:
    if all(cell.status in ("skipped", "failed", "missing") for cell in members):
        # A failed launch is missing its cells; the aggregate table says so row by row.
        return [f"{name}: {c.key.cell}: {c.reason}" for c in members if c.status != "skipped"]
    kinds = ["requests", "metrics", *(["engine_step"] if step_timing else [])]
    missing = [f"{name}/{file}" for file in paths.LAUNCH_FILES if not (folder / file).exists()]
    for cell in members:
        if cell.status in ("failed", "missing"):
            missing.append(f"{name}: {cell.key.cell}: {cell.reason}")
        elif cell.status in ("valid", "void"):
            missing += [
                f"{name}/{cell.key.cell}/{cell.file(kind).name}"
                for kind in kinds
                if not cell.file(kind).exists()
            ]
    return missing


def wall_clock(tables: Tables, cells: Sequence[Cell]) -> Conclusion:
    """7: the measurements span less than max_hours of wall clock, first arrival to last drain."""
    limit = tables.study.config["hypotheses"]["max_hours"]
    spans: dict[str, list[tuple[float, float]]] = {}
    busy_h = 0.0
    for cell in cells:
        if cell.record is None:
            continue
        window = cell.record["window"]
        hours = (window["t_drained_ns"] - window["t_origin_ns"]) / NS_PER_HOUR
        start_h = datetime.fromisoformat(window["started_utc"]).timestamp() / 3600
        device = tables.taxes.device_of.get(cell.key.block, "")
        spans.setdefault(device, []).append((start_h, start_h + hours))
        busy_h += hours
    if not spans:
        return Conclusion("7", CANNOT_TELL, "Cannot tell: no cell was measured.", {})
    measured = [span for on_device in spans.values() for span in on_device]
    span = _hours(measured)
    planned = sum(
        len(tables.study.document["run_order"][p]) * len(tables.study.cells(p)) for p in PHASES
    )
    numbers = {"span_hours": span, "cell_hours": busy_h, "max_hours": limit}
    numbers |= {"cells_measured": len(measured), "cells_planned": planned}
    on_devices = ""
    if len(spans) > 1:
        numbers["device_hours"] = sum(_hours(on_device) for on_device in spans.values())
        on_devices = f" and {numbers['device_hours']:.2f} h of {len(spans)} devices together"
    sentence = (
        f"{len(measured)} of {planned} planned cells span {span:.2f} h of wall clock{on_devices}"
        f" ({busy_h:.2f} h inside cells), limit {limit:g} h."
    )
    return Conclusion("7", MET if span < limit else NOT_MET, sentence, numbers)


def _hours(spans: Sequence[tuple[float, float]]) -> float:
    """From the first begin to the last end."""
    return max(end for _, end in spans) - min(begin for begin, _ in spans)


def _tax_at_safe(tables: Tables, config: str) -> Effect | None:
    cell = at_safe(tables)
    return None if cell is None else tables.taxes.tax(config, "A", cell, "ttft_p90")


def _unreported(identifier: str, what: str) -> Conclusion:
    return Conclusion(identifier, NOT_MET, f"Not reported: there is no number for {what}.", {})


def _labelled(
    identifier: str,
    start: str,
    tail: str,
    label: str,
    numbers: Mapping[str, Any],
    effects: Sequence[Effect],
    point: str,
) -> Conclusion:
    why = undecided(effects)
    if why is not None:
        sentence = f"{start}. {why} {point_sentence(point)}"
        return Conclusion(identifier, MET, sentence, {**numbers, "label": "undecided"}, point)
    sentence = f"{start}. {tail[0].upper()}{tail[1:]}."
    return Conclusion(identifier, MET, sentence, {**numbers, "label": label}, point)
