"""Write every table under analysis/ from the raw records of a study.

Source: docs/method.md. One pass over the raw files, cell by cell; then rows, taxes, hypotheses. The
same input gives the same bytes, whenever and wherever it runs.
"""

import argparse
import os
import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from connector_tax.analysis.device_time import read_device
from connector_tax.analysis.effects import (
    TaxTable,
    gap_rows,
    sample_launch,
    tax_rows,
)
from connector_tax.analysis.hypotheses import criteria, hypotheses
from connector_tax.analysis.machine import machine_use, read_machine
from connector_tax.analysis.measure import measure_requests, measure_waiting
from connector_tax.analysis.reference import (
    NoReferenceRateError,
    judge_cells,
    load_of,
    measured_rates,
    reference_rates,
)
from connector_tax.analysis.resources import engine_rows, read_launch_records, resource_rows
from connector_tax.analysis.rows import MeasuredCell, cell_rows
from connector_tax.analysis.step_tables import cdf_rows, device_rows, step_rows, wait_rows
from connector_tax.analysis.steps import prefill_wait_ms, read_steps, step_timing_reason
from connector_tax.artifacts import paths
from connector_tax.artifacts.folder import CellFolder, StudyFolder
from connector_tax.artifacts.looks import read_looks
from connector_tax.artifacts.names import ALL_RATES, REFERENCE_OF, REFERENCES, CellKey
from connector_tax.artifacts.record_reader import read_record
from connector_tax.artifacts.saturation import Judgement
from connector_tax.artifacts.stage_records import HypothesesRecord, RatesRecord
from connector_tax.artifacts.study_file import Study, cell_rates, shape_limits
from connector_tax.artifacts.tables import Row, table_text
from connector_tax.commands import UNREADABLE, run_command, study_parser
from connector_tax.files import ArtifactError, write_json, write_text


def measure(cell: CellFolder, with_steps: bool) -> MeasuredCell:
    """Return the measured data of one valid cell.

    Raises:
        ArtifactError: one of its files is missing, changed or malformed.
    """
    assert cell.record is not None
    window = cell.record["window"]
    requests, waiting = measure_requests(cell), measure_waiting(cell)
    steps, machine, wait_ms = read_steps(cell) if with_steps else None, None, None
    # TTFT is compared by shape, in Phase B; Phase A has only one shape.
    if steps is not None and cell.key.phase == "B":
        wait_ms = prefill_wait_ms(requests, steps, window)
    if (digest := cell.sha256("machine")) is not None:
        machine = machine_use(read_machine(cell.file("machine"), digest))
    device = read_device(cell) if cell.sha256(paths.DEVICE_LOG) else None
    load = load_of(requests, waiting, cell.rate_rps)
    return MeasuredCell(requests, waiting, load, machine, steps, wait_ms, device)


def aggregate(
    folder: StudyFolder, rates: RatesRecord | None = None
) -> dict[str, str | HypothesesRecord]:
    """Return the content of every file under analysis/, by name: text of a CSV, or a JSON value.

    Args:
        rates: the reference rates. By default they are read from reference_rates.json.

    Raises:
        ArtifactError: an artifact is missing, changed, malformed, or of another study.
    """
    study, rates_file = folder.study, folder.root / paths.REFERENCE_RATES
    rates = rates or read_record(rates_file, RatesRecord)
    sweep = folder.cells("A")
    cells = list(sweep)
    for phase, name in REFERENCE_OF.items():
        cells += folder.cells(phase, rates[name])
    no_steps = step_timing_reason(study)
    valid = [cell for cell in cells if cell.status == "valid"]
    # Hashing, parsing and large array operations release the interpreter lock.
    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        results = pool.map(lambda cell: measure(cell, no_steps is None), valid)
        measured = {cell.key: m for cell, m in zip(valid, results, strict=True)}
    loads = {key: m.load for key, m in measured.items() if m.load is not None}
    judged = judge_cells(study, cells, loads)
    _check_rates(folder, rates, rates_file, sweep, judged)
    samples = {}
    for key, m in measured.items():
        saturated = key in judged and judged[key].saturated
        samples[key] = sample_launch(m.requests, saturated, study.config["statistics"])
    taxes = TaxTable(study, cells, samples, {name: rates[name] for name in REFERENCES})
    looks = read_looks(study.root)
    steps = {key: m.steps for key, m in measured.items() if m.steps is not None}
    launches, at_safe = read_launch_records(folder), taxes.cell_at("ref_safe")
    confidence = study.config["statistics"]["confidence"]
    waits = {key: m.wait_ms for key, m in measured.items() if m.wait_ms is not None}
    device = {key: m.device for key, m in measured.items() if m.device is not None}
    effects = [
        *tax_rows(taxes, looks[-1]["findings"] if looks else ()),
        *gap_rows(taxes),
        *step_rows(study, cells, steps, no_steps),
        *wait_rows(study, waits),
        *(device_rows(study, device) if device else []),
        *resource_rows(launches, study.baseline, at_safe, confidence, study.borrows),
    ]
    places = _places(study, rates)
    tables_of = {
        paths.CELLS: cell_rows(study, cells, measured, judged),
        paths.EFFECTS: [places.get((row["phase"], row.get("cell")), {}) | row for row in effects],
        paths.STEP_CDF: cdf_rows(steps, at_safe),
        paths.ENGINE_TABLE: engine_rows(launches, study.baseline),
    }
    conclusions = hypotheses(taxes)
    return {
        **{name: table_text(name, content) for name, content in tables_of.items()},
        paths.HYPOTHESES: {
            "engine_label": study.document["engine_label"],
            "emulated": study.document["emulated"],
            "hypotheses": conclusions,
            "criteria": criteria(taxes, conclusions, cells, no_steps is None),
        },
    }


def _places(study: Study, rates: RatesRecord) -> dict[tuple[str, str | None], Row]:
    """Return each cell's rate, and the name of the reference rate equal to it (ref_safe first)."""
    places: dict[tuple[str, str | None], Row] = {("A", ALL_RATES): {"reference": ALL_RATES}}
    names = {rates[name]: name for name in reversed(REFERENCES)}
    for planned in study.cells("A"):
        name = names.get(planned["rate_rps"] or 0.0, "")
        places["A", planned["cell"]] = {"rate_rps": planned["rate_rps"], "reference": name}
    limits = shape_limits(study.document, study.root, "B")
    for phase, reference in REFERENCE_OF.items():
        for cell, rate in cell_rates(study.document, phase, rates[reference], limits).items():
            places[phase, cell] = {"rate_rps": rate, "reference": reference}
    return places


def _check_rates(
    folder: StudyFolder,
    rates: RatesRecord,
    path: Path,
    cells: Sequence[CellFolder],
    judged: Mapping[CellKey, Judgement],
) -> None:
    """Raise if reference_rates.json differs from what raw cells and present thresholds give."""
    try:
        again = reference_rates(folder.study, cells, judged, measured_rates(folder))
    except NoReferenceRateError as error:
        why = " ".join(str(error).split())
        raise ArtifactError(f"{path}: the raw cells give no reference rate: {why}") from None
    for name in REFERENCES:
        if rates[name] != again[name]:
            raise ArtifactError(
                f"{path}: {name} is {rates[name]}, but the raw cells and the thresholds in"
                f" study.json give {again[name]}: the file belongs to another state of the study"
            )


def main(argv: Sequence[str] | None = None) -> int:
    """Write analysis/ beside study.json from the raw records."""
    parser = study_parser("analysis.aggregate", main.__doc__)
    return run_command(parser, argv, _write, UNREADABLE, label="analysis: ")


def _write(arguments: argparse.Namespace) -> None:
    folder = StudyFolder.load(arguments.study)
    print(f"{folder.root / paths.ANALYSIS}: {', '.join(write_tables(folder))}")


def write_tables(
    study: StudyFolder, root: Path | None = None, rates: RatesRecord | None = None
) -> list[str]:
    """Write every file under analysis/; return their names.

    Raises:
        ArtifactError: an artifact is unusable, as in `aggregate`.
    """
    files = aggregate(study, rates)
    folder = (root or study.root) / paths.ANALYSIS
    for name, content in files.items():
        if isinstance(content, str):
            write_text(folder / name, content)
        else:
            write_json(folder / name, content)
    return list(files)


if __name__ == "__main__":
    sys.exit(main())
