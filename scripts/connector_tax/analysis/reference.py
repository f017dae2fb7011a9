"""Judge saturation at a rate, and derive the reference rates from the cells of Phase A.

Source: docs/study.md, "Saturation and the reference rates". A cell is saturated if any of the
design's criteria holds. Each valid launch is judged by itself. A configuration is saturated at a
rate when at least half of its valid launches are (a tie counts as saturated, so that the reference
rate is conservative). `ref_safe` is the highest rate at which every included configuration is
unsaturated and none is saturated at a lower rate; `ref_load` is the same for the baseline alone. A
configuration is excluded, with a reason, if it has no valid cell or is saturated at its lowest
rate. A rate at which an included configuration has no valid cell does not qualify. Every launch of
the baseline counts.

The rates are derived once no launch of Phase A is missing or failed, and are fixed by the first
cell measured at them. Later changes of Phase A or its thresholds are reported, but do not change
them.
"""

import argparse
import sys
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import numpy as np

from connector_tax.analysis.ingest import block_devices
from connector_tax.analysis.measure import Requests, measure_requests, measure_waiting
from connector_tax.artifacts import paths
from connector_tax.artifacts.folder import CellFolder, StudyFolder
from connector_tax.artifacts.metrics import CellLoad, criteria_of
from connector_tax.artifacts.names import REFERENCE_OF, SAME_RATES, CellKey, Launch
from connector_tax.artifacts.saturation import Judgement, judge
from connector_tax.artifacts.stage_records import RatesRecord
from connector_tax.artifacts.study_file import Study
from connector_tax.artifacts.study_records import Reference
from connector_tax.commands import run_command, study_parser
from connector_tax.files import ArtifactError, read_json, write_json

# Configuration -> rate (1/s) -> whether it is saturated; None: no valid cell.
States = dict[str, dict[float, bool | None]]


class NoReferenceRateError(Exception):
    """There is no reference rate, or not yet; the text names the cause."""


def load_of(requests: Requests, waiting: float | None, rate_rps: float | None) -> CellLoad | None:
    """Return the values that show whether a cell was saturated; None if no request succeeded."""
    ratio = requests.throughput_ratio
    if requests.n == 0 or ratio is None:
        return None
    growth = requests.backlog_by_quarter_s
    return CellLoad(rate_rps, ratio, waiting, requests.percentiles_ms, growth)


def judge_cells(
    study: Study, cells: Sequence[CellFolder], loads: Mapping[CellKey, CellLoad]
) -> dict[CellKey, Judgement]:
    """Judge whether each cell is saturated; criteria that compare rates apply only in Phase A."""
    known = [cell for cell in cells if cell.key in loads and cell.rate_rps is not None]
    sweeps: dict[tuple[str, int, str], dict[float, CellLoad]] = {}
    for cell in known:
        of_launch = sweeps.setdefault(cell.key[:3], {})
        if cell.key.phase == "A" and cell.rate_rps is not None:
            of_launch[cell.rate_rps] = loads[cell.key]
    bounds = study.saturation
    return {c.key: judge(loads[c.key], sweeps[c.key[:3]], bounds) for c in known}


def combine(judgements: Sequence[Judgement], bounds: Mapping[str, float]) -> dict[str, Any]:
    """Judge a configuration at one rate from all valid launches, by medians and majorities.

    Returns:
        `saturated` with the criteria and the backlog, for reference_rates.json; `saturated` is None
            if no launch is valid.
    """
    quarters = [j.load.backlog_by_quarter_s for j in judgements]
    return {
        "saturated": at_least_half([j.saturated for j in judgements]),
        "n_launches": len(judgements),
        "n_saturated": sum(j.saturated for j in judgements),
        **{
            name: {
                "value": _median_or_none([j.values[name] for j in judgements]),
                "bound": float(bounds[criterion.bound]),
                "fired": at_least_half([f for j in judgements if (f := j.fired[name]) is not None]),
            }
            for name, criterion in criteria_of(bounds).items()
        },
        "backlog_growth": [_median_or_none(column) for column in zip(*quarters, strict=True)],
    }


def at_least_half(flags: Sequence[bool]) -> bool | None:
    """Return whether at least half of the launches have the flag; None if there are no launches."""
    return 2 * sum(flags) >= len(flags) if flags else None


def _median_or_none(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return float(np.median(known)) if known else None


# ---- the rates


def measured_rates(folder: StudyFolder) -> dict[Reference, float]:
    """Return the rate at which each of Phases B and B' was measured; omit phases without cells.

    Raises:
        ArtifactError: launches of a phase were measured at several rates.
    """
    measured: dict[Reference, float] = {}
    for phase, name in REFERENCE_OF.items():
        of_phase = folder.of_phase(phase)
        indexes = [index for launch in of_phase if (index := launch.index) is not None]
        of_cells = (i.rate_rps for i in indexes if any(entry.files for entry in i.cells))
        rates = {rate for rate in of_cells if rate is not None}
        if len(rates) > 1:
            raise ArtifactError(
                f"launches of Phase {phase} were measured at"
                f" {' and '.join(f'{rate:g}' for rate in sorted(rates))} req/s: mixtures are"
                " refused. To set its launches aside and measure the phase at one rate:"
                f" connector-tax remeasure {folder.root} --phase {phase}"
            )
        # Interrupted launches: the highest rate of a shape is the phase's.
        rates = rates or {
            read_json(path)["schedule"]["rate_rps"]
            for launch in of_phase
            for path in launch.folder.glob("*/cell_*.json")
            if not path.parent.suffix
        }
        if rates:
            measured[name] = max(rates)
        elif any((i.reason or "").startswith(SAME_RATES) for i in indexes):
            measured |= {name: measured["ref_safe"]} if "ref_safe" in measured else {}
    return measured


def rates_of(folder: StudyFolder) -> RatesRecord:
    """Return `reference_rates` of a study, from the raw records of Phase A.

    Raises:
        NoReferenceRateError: as `reference_rates`.
        ArtifactError: a file has changed, or the cells are of two types of device.
    """
    study, cells = folder.study, folder.cells("A")
    # Rejects two types of device before more is measured on them.
    block_devices(cells)
    loads = {
        cell.key: load
        for cell in cells
        if cell.status == "valid"
        and (load := load_of(measure_requests(cell), measure_waiting(cell), cell.rate_rps))
    }
    return reference_rates(study, cells, judge_cells(study, cells, loads), measured_rates(folder))


def reference_rates(
    study: Study,
    cells: Sequence[CellFolder],
    judged: Mapping[CellKey, Judgement],
    measured: Mapping[Reference, float],
) -> RatesRecord:
    """Return the content of reference_rates.json.

    Args:
        cells: the study's Phase A cells, for the reasons of invalid cells.
        judged: `judge_cells` of these cells.
        measured: `measured_rates` of the study, which do not change.

    Raises:
        NoReferenceRateError: no rate qualifies and `reference.fallback_rps` is null.
    """
    rates = [rate for cell in study.cells("A") if (rate := cell["rate_rps"]) is not None]
    criteria, states = _criteria(study, rates, cells, judged)
    left_out = {
        config: reason
        for config in study.configurations
        if (reason := _left_out(config, states[config], cells)) is not None
    }
    included = [config for config in study.configurations if config not in left_out]
    baseline = study.baseline
    considered = included if baseline in included else []
    qualifying: dict[Reference, float | None] = {
        "ref_safe": _highest_qualifying(rates, [states[config] for config in considered]),
        "ref_load": _highest_qualifying(rates, [states[baseline]] if considered else []),
    }
    fallback = study.config["reference"]["fallback_rps"]
    derived = {name: fallback if rate is None else rate for name, rate in qualifying.items()}
    safe, load = (measured.get(name, rate) for name, rate in derived.items())
    if safe is None or load is None:
        why = _why_none(rates, states, included, left_out, baseline)
        raise NoReferenceRateError(f"{why}\n{_remedy(study, cells, {baseline, *included})}")
    record: RatesRecord = {
        "ref_safe": safe,
        "ref_load": load,
        "rates_rps": rates,
        "saturation_rate_rps": {
            config: next((rate for rate in rates if known[rate] is True), None)
            for config, known in states.items()
        },
        "criteria": criteria,
        "left_out": left_out,
        "fallback_used": any(
            rate is None and chosen == fallback
            for rate, chosen in zip(qualifying.values(), (safe, load), strict=True)
        ),
    }
    if changed := {name: rate for name, rate in derived.items() if rate != record[name]}:
        record["derived_now"] = changed
    return record


def _criteria(
    study: Study,
    rates: Sequence[float],
    cells: Sequence[CellFolder],
    judged: Mapping[CellKey, Judgement],
) -> tuple[dict[str, dict[str, dict[str, Any]]], States]:
    launched: dict[tuple[str, float | None], list[Judgement]] = {}
    for cell in cells:
        if cell.key in judged:
            judged_launches = launched.setdefault((cell.configuration, cell.rate_rps), [])
            judged_launches.append(judged[cell.key])
    criteria: dict[str, dict[str, dict[str, Any]]] = {}
    states: States = {}
    for config in study.configurations:
        entries = {
            rate: combine(launched.get((config, rate), []), study.saturation) for rate in rates
        }
        criteria[config] = {f"{rate:g}": entry for rate, entry in entries.items()}
        states[config] = {rate: entry["saturated"] for rate, entry in entries.items()}
    return criteria, states


def _left_out(
    config: str, known: Mapping[float, bool | None], cells: Sequence[CellFolder]
) -> str | None:
    seen = [rate for rate, saturated in known.items() if saturated is not None]
    if not seen:
        reason = next((c.reason for c in cells if c.configuration == config and c.reason), None)
        return f"no valid Phase A cell: {reason}"
    if known[seen[0]]:
        return f"saturated at {seen[0]:g} req/s, its lowest valid rate"
    return None


def _highest_qualifying(
    rates: Sequence[float], included: Sequence[Mapping[float, bool | None]]
) -> float | None:
    best = None
    for rate in rates:
        states = [known[rate] for known in included]
        if True in states:
            break
        if states and None not in states:
            best = rate
    return best


def _why_none(
    rates: Sequence[float],
    states: States,
    included: Sequence[str],
    left_out: Mapping[str, str],
    baseline: str,
) -> str:
    lines = [f"{config} left out: {reason}" for config, reason in left_out.items()]
    for rate in rates:
        bad = [f"{c} saturated" for c in included if states[c][rate] is True]
        bad += [f"{c} without a valid cell" for c in included if states[c][rate] is None]
        lines.append(f"{rate:g} req/s: {', '.join(bad) or 'unsaturated for all included'}")
    return (
        f"no rate qualifies as reference rate ({baseline} must be unsaturated at it, and so must"
        " every included configuration):\n  " + "\n  ".join(lines)
    )


def _remedy(study: Study, cells: Sequence[CellFolder], involved: Collection[str]) -> str:
    """Return the remedy: measure invalid cells again or, if all are valid, change the grid."""
    bad = [c for c in cells if c.status in ("void", "missing") and c.configuration in involved]
    if bad:
        names = sorted({Launch(c.key.config, c.key.block, c.key.phase).name for c in bad})
        return (
            f"Cells are not valid. To measure their launches again: connector-tax remeasure"
            f" {study.root} --launch {' '.join(names)}"
        )
    return "Add lower rates to phase_a.rates_rps, or set reference.fallback_rps."


def main(argv: Sequence[str] | None = None) -> int:
    """Write reference_rates.json beside study.json from the finished Phase A launches."""
    parser = study_parser("analysis.reference", main.__doc__)
    refusals = (ArtifactError, NoReferenceRateError)
    return run_command(parser, argv, _write_rates, refusals, label="reference rates: ")


def _write_rates(arguments: argparse.Namespace) -> None:
    folder = StudyFolder.load(arguments.study)
    study = folder.study
    _refuse_unmeasured(folder)
    rates = rates_of(folder)
    write_json(study.root / paths.REFERENCE_RATES, rates)
    print(f"ref_safe {rates['ref_safe']:g} req/s, ref_load {rates['ref_load']:g} req/s")
    derived_now = rates.get("derived_now", {})
    for phase, name in REFERENCE_OF.items():
        if name not in derived_now:
            continue
        rate = derived_now[name]
        now = "no rate" if rate is None else f"{rate:g} req/s"
        print(
            f"{name} stays {rates[name]:g} req/s, which Phase {phase} was measured at; Phase A as"
            f" it is now gives {now}. To set its launches aside and measure the phase at that rate:"
            f" connector-tax remeasure {study.root} --phase {phase}"
        )


def _refuse_unmeasured(folder: StudyFolder) -> None:
    """Raise while launches of Phase A are missing or failed, which could change the rates."""
    lines = []
    for launch in folder.of_phase("A"):
        index = launch.index
        if index is None or index.status == "failed":
            reason = index.reason if index else "not measured yet"
            lines.append(f"{launch.launch.name}: {reason}")
    if lines:
        raise NoReferenceRateError(
            "not derived, since launches of Phase A failed or are missing:\n  "
            + "\n  ".join(lines)
            + "\nThe same command measures their missing cells first, and keeps all others. A"
            " configuration that cannot be measured must be left out of `configurations`, in a"
            " study of another name."
        )


if __name__ == "__main__":
    sys.exit(main())
