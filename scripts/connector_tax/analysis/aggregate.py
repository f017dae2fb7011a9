"""Write every table under analysis/ from the raw records of a study.

Source: docs/method.md. One pass over the raw files, cell by cell; then rows, taxes,
hypotheses. Nothing here depends on when or where it runs: same input, same bytes.
"""

import argparse
import io
import math
import os
import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import polars as pl

from connector_tax.analysis.criteria import criteria
from connector_tax.analysis.device_tables import device_rows
from connector_tax.analysis.device_time import DeviceSteps, read_device
from connector_tax.analysis.effects import TaxTable, overloads
from connector_tax.analysis.engine_settings import engine_rows
from connector_tax.analysis.hypotheses import hypotheses
from connector_tax.analysis.ingest import Cell, load_cells
from connector_tax.analysis.launch_records import read_launch_records
from connector_tax.analysis.machine import MachineUse, machine_use
from connector_tax.analysis.measure import (
    Requests,
    measure_machine,
    measure_requests,
    measure_waiting,
)
from connector_tax.analysis.reference import (
    NoReferenceRateError,
    Sweep,
    judge_launches,
    measured_rates,
    reference_rates,
)
from connector_tax.analysis.resources import resource_rows
from connector_tax.analysis.rows import cell_rows
from connector_tax.analysis.samples import COMPUTE, LogSample, sample_launch
from connector_tax.analysis.saturation import CellLoad, load_of
from connector_tax.analysis.step_tables import cdf_rows, step_rows
from connector_tax.analysis.steps import Steps, read_steps, step_timing_reason
from connector_tax.analysis.taxes import Tables, gap_rows, tax_rows
from connector_tax.analysis.waits import prefill_wait_ms, wait_rows
from connector_tax.artifacts import paths
from connector_tax.artifacts.names import PHASES, CellKey
from connector_tax.artifacts.record_reader import read_record
from connector_tax.artifacts.stage_records import HypothesesRecord, RatesRecord
from connector_tax.artifacts.study_file import Study, load_study
from connector_tax.artifacts.table_reader import column_types
from connector_tax.artifacts.tables import ROW_TYPES, Row, table_text
from connector_tax.commands import run_command, study_parser
from connector_tax.files import ArtifactError, write_bytes, write_json, write_text


@dataclass(frozen=True)
class MeasuredCell:
    """Everything read from one valid cell."""

    requests: Requests
    waiting_p50: float | None
    load: CellLoad | None
    machine: MachineUse | None
    steps: Steps | None
    wait_ms: float | None
    device: DeviceSteps | None


def measure(cell: Cell, with_steps: bool) -> MeasuredCell:
    """Read one valid cell.

    Raises:
        ArtifactError: one of its files is missing, changed or malformed.
    """
    requests, waiting = measure_requests(cell), measure_waiting(cell)
    steps = read_steps(cell) if with_steps else None
    # TTFT is read by shape, in Phase B; Phase A has no shape to compare.
    wait_ms = prefill_wait_ms(cell) if with_steps and cell.key.phase == "B" else None
    load, machine = load_of(requests, waiting), measure_machine(cell)
    use = None
    if machine is not None and cell.record is not None:
        use = machine_use(machine, cell.record["window"])
    device = read_device(cell) if cell.sha256(paths.DEVICE_LOG) else None
    return MeasuredCell(requests, waiting, load, use, steps, wait_ms, device)


def sample_cells(requests: Mapping[CellKey, Requests]) -> dict[CellKey, dict[str, LogSample]]:
    """The percentiles of every valid cell."""
    return {key: sample_launch(measured) for key, measured in requests.items()}


def aggregate(study: Study) -> dict[str, str | HypothesesRecord]:
    """The content of every file under analysis/, by name: text of a CSV, or a JSON value.

    Raises:
        ArtifactError: an artifact is missing, changed, malformed, or of another study.
    """
    rates_file = study.root / paths.REFERENCE_RATES
    rates = read_record(rates_file, RatesRecord)
    rate_of = {"A": None, "B": rates["ref_safe"], "Bp": rates["ref_load"]}
    cells = [cell for phase in PHASES for cell in load_cells(study, phase, rate_of[phase])]
    no_steps = step_timing_reason(study)
    valid = [cell for cell in cells if cell.status == "valid"]
    # Hashing, parsing and large array operations release the interpreter lock.
    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        results = pool.map(lambda cell: measure(cell, no_steps is None), valid)
        measured = {cell.key: m for cell, m in zip(valid, results, strict=True)}
    steps = {key: m.steps for key, m in measured.items() if m.steps is not None}
    loads = {key: m.load for key, m in measured.items() if m.load is not None}
    sweep_cells = [cell for cell in cells if cell.key.phase == "A"]
    sweeps = judge_launches(study, sweep_cells, loads)
    _check_rates(study, rates, rates_file, sweep_cells, sweeps)
    dropped = {key: m.requests.dropped for key, m in measured.items()}
    overloaded = overloads(study, cells, loads, dropped, sweeps)
    samples = sample_cells({key: m.requests for key, m in measured.items()})
    for key, m in measured.items():
        if m.machine is not None and m.machine.compute_ns_p50:
            samples[key][COMPUTE] = LogSample(math.log(m.machine.compute_ns_p50), 0)
    taxes = TaxTable(study, cells, samples, overloaded)
    made = Tables(study, taxes, rates)
    rows = cell_rows(
        study,
        cells,
        {key: (m.requests, m.waiting_p50, m.load, m.machine) for key, m in measured.items()},
        sweeps,
        steps,
    )
    launches, at_safe = read_launch_records(sweep_cells), made.cell_at("ref_safe")
    confidence = study.config["statistics"]["confidence"]
    waits = {key: m.wait_ms for key, m in measured.items() if m.wait_ms is not None}
    device = {key: m.device for key, m in measured.items() if m.device is not None}
    effects = [
        *tax_rows(made),
        *gap_rows(made),
        *step_rows(study, cells, steps, no_steps),
        *wait_rows(study, waits),
        *(device_rows(study, device) if device else []),
        *resource_rows(launches, study.baseline, at_safe, confidence),
    ]
    tables_of = {
        paths.CELLS: rows,
        paths.EFFECTS: [_placed(made, row) for row in effects],
        paths.STEP_CDF: cdf_rows(steps, at_safe),
        paths.ENGINE_TABLE: engine_rows(launches, study.baseline),
    }
    return {
        **{name: table_text(name, content) for name, content in tables_of.items()},
        paths.HYPOTHESES: {
            "engine_label": study.document["engine_label"],
            "emulated": study.document["emulated"],
            "hypotheses": hypotheses(made),
            "criteria": criteria(made, cells, no_steps is None),
        },
    }


def _placed(made: Tables, row: Row) -> Row:
    """A row of a cell with the cell's rate and the reference rate it stands for."""
    planned = {cell["cell"]: cell for cell in made.study.cells(row["phase"])}
    cell = planned.get(row.get("cell", ""))
    return row if cell is None else made.where(row["phase"], cell) | row


def _check_rates(
    study: Study,
    rates: RatesRecord,
    path: Path,
    cells: Sequence[Cell],
    sweeps: Mapping[tuple[str, int], Sweep],
) -> None:
    """Refuse a reference_rates.json that the raw cells and present thresholds do not give."""
    try:
        again = reference_rates(study, cells, sweeps, measured_rates(study))
    except NoReferenceRateError as error:
        raise ArtifactError(f"{path}: the raw cells give no reference rate: {error}") from None
    for name in ("ref_safe", "ref_load"):
        if rates.get(name) != again[name]:
            raise ArtifactError(
                f"{path}: {name} is {rates.get(name)}, the raw cells and the thresholds in"
                f" study.json give {again[name]}: the file belongs to another state of the study"
            )


_TYPES: dict[type, type[pl.DataType]] = {
    str: pl.String,
    int: pl.Int64,
    float: pl.Float64,
    bool: pl.Boolean,
}


def table_parquet(table: str, text: str) -> bytes:
    """A table's CSV as parquet; an empty field is null, a column's type the same in every study."""
    schema = {name: _TYPES[of] for name, (of, _) in column_types(ROW_TYPES[table]).items()}
    stream = io.BytesIO()
    pl.read_csv(io.StringIO(text), schema=schema).write_parquet(stream, compression="zstd")
    return stream.getvalue()


def main(argv: Sequence[str] | None = None) -> int:
    """Write analysis/ beside study.json from the raw records."""
    parser = study_parser("analysis.aggregate", main.__doc__)
    return run_command(parser, argv, _write, label="analysis: ")


def _write(arguments: argparse.Namespace) -> None:
    study = load_study(arguments.study)
    print(f"{study.root / paths.ANALYSIS}: {', '.join(write_tables(study))}")


def write_tables(study: Study) -> list[str]:
    """Write every file under analysis/, each CSV as parquet too; the names without these.

    Raises:
        ArtifactError: as `aggregate`.
    """
    files = aggregate(study)
    folder = study.root / paths.ANALYSIS
    for name, content in files.items():
        if isinstance(content, str):
            write_text(folder / name, content)
            write_bytes((folder / name).with_suffix(".parquet"), table_parquet(name, content))
        else:
            write_json(folder / name, content)
    return list(files)


if __name__ == "__main__":
    sys.exit(main())
