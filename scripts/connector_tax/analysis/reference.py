"""The reference rates of Phases B and B', from the cells of Phase A.

Source: docs/study.md, "Saturation and the reference rates". `ref_safe` is the highest rate at which
every included configuration is seen unsaturated and none is saturated at a lower rate; `ref_load`
is the same for the baseline alone. Left out of the rule, with the reason: a configuration without a
valid cell, and one that is saturated at the lowest rate it has. A rate at which an included
configuration has no valid cell does not qualify. Every launch of the baseline counts.

The rates wait until no launch of Phase A is missing or failed, and are fixed by the first cell that
is measured at them: later changes of Phase A or of its thresholds are reported, and change neither.
"""

import argparse
import sys
from collections.abc import Collection, Mapping, Sequence

from connector_tax.analysis.devices import block_devices
from connector_tax.analysis.ingest import Cell, load_cells
from connector_tax.analysis.measure import measure_requests, measure_waiting
from connector_tax.analysis.saturation import (
    CellLoad,
    Judgement,
    combine,
    judge,
    judge_sweep,
    load_of,
)
from connector_tax.artifacts import paths
from connector_tax.artifacts.index import read_index
from connector_tax.artifacts.names import SAME_RATES, CellKey, Launch, configuration_of
from connector_tax.artifacts.stage_records import RateCriteria, RatesRecord
from connector_tax.artifacts.study_file import Study, launches, load_study
from connector_tax.artifacts.study_records import Reference
from connector_tax.commands import run_command, study_parser
from connector_tax.files import ArtifactError, read_json, write_json

Sweep = dict[float, Judgement]
States = dict[str, dict[float, bool | None]]


# The phase that is measured at each.
PHASE_OF: Mapping[Reference, str] = {"ref_safe": "B", "ref_load": "Bp"}


class NoReferenceRateError(Exception):
    """There is no reference rate, or not yet; the text says who is in the way."""


def read_loads(cells: Sequence[Cell]) -> dict[CellKey, CellLoad]:
    """The load figures of every valid cell in which something succeeded."""
    loads = {
        cell.key: load_of(measure_requests(cell), measure_waiting(cell))
        for cell in cells
        if cell.status == "valid"
    }
    return {key: load for key, load in loads.items() if load is not None}


def judge_launches(
    study: Study, cells: Sequence[Cell], loads: Mapping[CellKey, CellLoad]
) -> dict[tuple[str, int], Sweep]:
    """Judge the sweep of every Phase A launch: (config, block) to rate (1/s) to judgement."""
    sweeps: dict[tuple[str, int], dict[float, CellLoad]] = {}
    for cell in cells:
        sweep = sweeps.setdefault((cell.key.config, cell.key.block), {})
        if cell.key in loads and cell.rate_rps is not None:
            sweep[cell.rate_rps] = loads[cell.key]
    bounds = study.config["saturation"]
    return {launch: judge_sweep(sweep, bounds) for launch, sweep in sweeps.items()}


def judgement(
    study: Study,
    key: CellKey,
    rate_rps: float,
    load: CellLoad,
    sweeps: Mapping[tuple[str, int], Sweep],
) -> Judgement:
    """The saturation criteria of a valid cell; outside Phase A without the one at half the rate."""
    if key.phase == "A":
        return sweeps[key.config, key.block][rate_rps]
    return judge(load, None, study.config["saturation"])


def measured_rates(study: Study) -> dict[Reference, float]:
    """The rate that each of Phases B and B' was measured at; none where no cell was.

    Raises:
        ArtifactError: launches of a phase were measured at several.
    """
    measured: dict[Reference, float] = {}
    for name, phase in PHASE_OF.items():
        folders = [launch.folder(study.root) for launch in launches(study.document, phase)]
        indexes = [index for folder in folders if (index := read_index(folder)) is not None]
        of_cells = (i.rate_rps for i in indexes if any(entry.files for entry in i.cells))
        rates = {rate for rate in of_cells if rate is not None}
        if len(rates) > 1:
            raise ArtifactError(
                f"launches of Phase {phase} were measured at"
                f" {' and '.join(f'{rate:g}' for rate in sorted(rates))} req/s: mixtures are"
                " refused. To measure the phase again at one rate, its launches kept aside:"
                f" connector-tax remeasure {study.root} --phase {phase}"
            )
        # Of launches that were interrupted: no rate of a shape is above the phase's.
        rates = rates or {
            read_json(path)["schedule"]["rate_rps"]
            for folder in folders
            for path in folder.glob("*/cell_*.json")
            if not path.parent.suffix
        }
        if rates:
            measured[name] = max(rates)
        elif any((i.reason or "").startswith(SAME_RATES) for i in indexes):
            measured |= {name: measured["ref_safe"]} if "ref_safe" in measured else {}
    return measured


def reference_rates(
    study: Study,
    cells: Sequence[Cell],
    sweeps: Mapping[tuple[str, int], Sweep],
    measured: Mapping[Reference, float] | None = None,
) -> RatesRecord:
    """The content of reference_rates.json.

    Args:
        study: the study.
        cells: its Phase A cells, for the reasons of those that are not valid.
        sweeps: `judge_launches` of these cells.
        measured: `measured_rates` of the study, which stay as they are; None: none yet.

    Raises:
        NoReferenceRateError: no rate qualifies and `reference.fallback_rps` is null.
    """
    rates = [rate for cell in study.cells("A") if (rate := cell["rate_rps"]) is not None]
    criteria, states = _criteria(study, rates, sweeps)
    left_out = {
        config: reason
        for config in study.configurations
        if (reason := _left_out(config, states[config], cells)) is not None
    }
    included = [config for config in study.configurations if config not in left_out]
    baseline = study.baseline
    asked = included if baseline in included else []
    qualifying: dict[Reference, float | None] = {
        "ref_safe": _highest_qualifying(rates, [states[config] for config in asked]),
        "ref_load": _highest_qualifying(rates, [states[baseline]] if asked else []),
    }
    fallback = study.config["reference"]["fallback_rps"]
    derived = {name: fallback if rate is None else rate for name, rate in qualifying.items()}
    safe, load = ((measured or {}).get(name, rate) for name, rate in derived.items())
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
        "fallback_used": False,
    }
    record["fallback_used"] = any(
        rate is None and record[name] == fallback for name, rate in qualifying.items()
    )
    if changed := {name: rate for name, rate in derived.items() if rate != record[name]}:
        record["derived_now"] = changed
    return record


def _criteria(
    study: Study, rates: Sequence[float], sweeps: Mapping[tuple[str, int], Sweep]
) -> tuple[dict[str, dict[str, RateCriteria]], States]:
    criteria: dict[str, dict[str, RateCriteria]] = {}
    states: States = {}
    for config in study.configurations:
        own = [sweep for (name, _), sweep in sweeps.items() if configuration_of(name) == config]
        bounds = study.config["saturation"]
        entries = {rate: combine([s[rate] for s in own if rate in s], bounds) for rate in rates}
        criteria[config] = {f"{rate:g}": entry for rate, entry in entries.items()}
        states[config] = {rate: entry["saturated"] for rate, entry in entries.items()}
    return criteria, states


def _left_out(config: str, known: Mapping[float, bool | None], cells: Sequence[Cell]) -> str | None:
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


def _remedy(study: Study, cells: Sequence[Cell], involved: Collection[str]) -> str:
    """What to do: measure again what is not valid, or where all is, another grid."""
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
    study = load_study(arguments.study)
    _refuse_unmeasured(study)
    cells, measured = load_cells(study, "A"), measured_rates(study)
    # Refuses two types of device before more is measured on them.
    block_devices(cells)
    sweeps = judge_launches(study, cells, read_loads(cells))
    rates = reference_rates(study, cells, sweeps, measured)
    write_json(study.root / paths.REFERENCE_RATES, rates)
    print(f"ref_safe {rates['ref_safe']:g} req/s, ref_load {rates['ref_load']:g} req/s")
    for name, rate in rates.get("derived_now", {}).items():
        phase = PHASE_OF[name]
        now = "no rate" if rate is None else f"{rate:g} req/s"
        print(
            f"{name} stays {rates[name]:g} req/s, which Phase {phase} was measured at; Phase A as"
            f" it is now gives {now}. To measure the phase at that, its launches kept aside:"
            f" connector-tax remeasure {study.root} --phase {phase}"
        )


def _refuse_unmeasured(study: Study) -> None:
    """Refuse to derive rates that the next run, with all of Phase A, would not derive."""
    lines = []
    for launch in launches(study.document, "A"):
        index = read_index(launch.folder(study.root))
        if index is None or index.status == "failed":
            lines.append(f"{launch.name}: {index.reason if index else 'not measured yet'}")
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
