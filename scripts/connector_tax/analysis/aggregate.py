"""Write every table under analysis/ from the raw records of a study.

Source: docs/method.md. One pass over the raw files, cell by cell; then rows, taxes,
hypotheses. Nothing here depends on when or where it runs: same input, same bytes.
"""

import argparse
import os
import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from connector_tax.analysis.conclusions import numbers_of
from connector_tax.analysis.criteria import criteria
from connector_tax.analysis.device_tables import device_time_rows
from connector_tax.analysis.device_time import DeviceSteps, read_device
from connector_tax.analysis.effects import TaxTable
from connector_tax.analysis.engine_settings import engine_rows
from connector_tax.analysis.hook_tables import hook_rows
from connector_tax.analysis.hypotheses import MOONCAKE, NIXL, findings
from connector_tax.analysis.ingest import Cell, load_cells
from connector_tax.analysis.launch_records import read_launch_records
from connector_tax.analysis.measure import (
    Requests,
    measure_machine,
    measure_requests,
    measure_waiting,
)
from connector_tax.analysis.overload import overloads
from connector_tax.analysis.parquet import table_parquet
from connector_tax.analysis.quiet import QuietTime, quiet_time
from connector_tax.analysis.reference import (
    NoReferenceRateError,
    Sweep,
    judge_launches,
    measured_rates,
    reference_rates,
)
from connector_tax.analysis.resolution import resolution_rows
from connector_tax.analysis.resources import resource_rows
from connector_tax.analysis.rows import aggregate_rows
from connector_tax.analysis.samples import LogSample, chunk_seconds, sample_launch
from connector_tax.analysis.saturation import CellLoad, load_of
from connector_tax.analysis.step_tables import StepTable
from connector_tax.analysis.steps import Steps, read_steps, step_timing_reason
from connector_tax.analysis.taxes import Tables, amplification_rows, device_rows, tax_rows
from connector_tax.artifacts import paths
from connector_tax.artifacts.names import PHASES, CellKey
from connector_tax.artifacts.record_reader import read_record
from connector_tax.artifacts.stage_records import RatesRecord
from connector_tax.artifacts.study_file import Study, load_study
from connector_tax.artifacts.tables import table_text
from connector_tax.commands import run_command, study_parser
from connector_tax.files import ArtifactError, write_bytes, write_json, write_text


@dataclass(frozen=True)
class MeasuredCell:
    """Everything read from one valid cell."""

    requests: Requests
    waiting_p50: float | None
    load: CellLoad | None
    quiet: QuietTime | None
    steps: Steps | None
    device: DeviceSteps | None


def measure(cell: Cell, with_steps: bool) -> MeasuredCell:
    """Read one valid cell.

    Raises:
        ArtifactError: one of its files is missing, changed or malformed.
    """
    requests, waiting = measure_requests(cell), measure_waiting(cell)
    steps = read_steps(cell) if with_steps else None
    load, machine = load_of(requests, waiting), measure_machine(cell)
    quiet = None
    if machine is not None and cell.record is not None:
        quiet = quiet_time(machine, cell.record["quiet"]["rule"], cell.record["window"])
    device = read_device(cell) if cell.sha256(paths.DEVICE_LOG) else None
    return MeasuredCell(requests, waiting, load, quiet, steps, device)


def sample_cells(
    study: Study, requests: Mapping[CellKey, Requests]
) -> dict[CellKey, dict[str, LogSample]]:
    """The resampled percentiles of every valid cell."""
    statistics = study.config["statistics"]
    chunk_s = chunk_seconds(requests, statistics["chunk_s"])

    def draw(key: CellKey) -> dict[str, LogSample]:
        length_s = chunk_s[key.phase, key.cell]
        return sample_launch(requests[key], statistics["resamples"], length_s, study.seed, key)

    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        return dict(zip(requests, pool.map(draw, requests), strict=True))


def aggregate(study: Study) -> dict[str, str | dict[str, Any]]:
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
    requests = {key: m.requests for key, m in measured.items()}
    sweep_cells = [cell for cell in cells if cell.key.phase == "A"]
    loads = {key: m.load for key, m in measured.items() if m.load is not None}
    sweeps = judge_launches(study, sweep_cells, loads)
    _check_rates(study, rates, rates_file, sweep_cells, sweeps)
    steps = {key: m.steps for key, m in measured.items() if m.steps is not None}
    confidence = study.config["statistics"]["confidence"]
    step_table = StepTable(study, cells, steps, no_steps)
    dropped = {key: m.requests.dropped for key, m in measured.items()}
    overloaded = overloads(study, cells, loads, dropped, sweeps)
    taxes = TaxTable(study, cells, sample_cells(study, requests), overloaded)
    whole = None
    if any(r.whole is not None for r in requests.values()):
        whole = taxes
        if any(r.n_disturbed for r in requests.values()):
            everything = {key: r.everything for key, r in requests.items()}
            whole = TaxTable(study, cells, sample_cells(study, everything), overloaded)
    tables = Tables(study, taxes, rates, step_table.points(), whole)
    rows = aggregate_rows(
        study,
        cells,
        {key: (m.requests, m.waiting_p50, m.load, m.quiet) for key, m in measured.items()},
        sweeps,
        steps,
    )
    launches = read_launch_records(sweep_cells)
    of_taxes = tax_rows(tables)
    at_safe = tables.cell_at("ref_safe")
    label = {key: study.document[key] for key in ("engine_label", "emulated")}
    tables_of = {
        paths.AGGREGATE: rows,
        paths.TAXES: of_taxes,
        paths.AMPLIFICATION: amplification_rows(tables),
        paths.STEPS: step_table.rows(),
        paths.STEP_TAXES: step_table.tax_rows(),
        paths.HOOKS: hook_rows(steps, step_table.configuration_of, confidence),
        paths.STEP_CDF: step_table.cdf_rows(at_safe),
        paths.RESOURCE_TABLE: resource_rows(launches, study.baseline, at_safe, confidence),
        paths.ENGINE_TABLE: engine_rows(launches, study.baseline),
    }
    if study.config["engine"].get("device") == "emulated":
        device = {key: m.device for key, m in measured.items() if m.device is not None}
        tables_of[paths.DEVICE_STEPS] = device_time_rows(
            study, device, step_table.configuration_of, taxes.device_of
        )
    if taxes.device_of:
        tables_of[paths.DEVICE_TAXES] = device_rows(taxes, of_taxes)
    return {
        **{name: table_text(name, content) for name, content in tables_of.items()},
        paths.AGGREGATE_JSON: {**label, "rows": rows},
        paths.HYPOTHESES: {
            **label,
            "hypotheses": [finding.as_dict() for finding in findings(tables)],
            "criteria": criteria(tables, cells, no_steps is None),
            "prior": _prior(tables),
            "resolution": resolution_rows(cells, requests, rates, study),
        },
    }


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


def _prior(tables: Tables) -> dict[str, Any]:
    """The prior's TTFT p90 beside the measured one at ref_safe (design, "Hypotheses")."""
    prior, baseline = tables.study.config["hypotheses"]["prior"], tables.study.baseline
    known = {
        baseline: prior["plain_ttft_p90_s"],
        NIXL: prior["nixl_ttft_p90_s"],
        MOONCAKE: prior["mooncake_both_ttft_p90_s"],
    }
    cell = tables.cell_at("ref_safe")
    rows = []
    for config, prior_s in known.items():
        row: dict[str, Any] = {
            "config": config,
            "prior_ttft_p90_s": prior_s,
            "prior_tax": prior_s / prior["plain_ttft_p90_s"] - 1,
            "measured_ttft_p90_s": None,
            "measured_tax": None,
        }
        taxes = tables.taxes
        if cell is not None and config == baseline:
            plain_ms = taxes.plain_ms("A", cell, "ttft_p90")
            row["measured_ttft_p90_s"] = None if plain_ms is None else plain_ms / 1e3
        elif cell is not None and (effect := taxes.tax(config, "A", cell, "ttft_p90")) is not None:
            config_ms = taxes.levels_ms(config, "A", cell, "ttft_p90")[1]
            row |= {"measured_ttft_p90_s": config_ms / 1e3, "measured_tax": numbers_of(effect)}
        rows.append(row)
    return {"at": "ref_safe", "rate_rps": tables.rates["ref_safe"], "rows": rows}


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
    if paths.DEVICE_TAXES not in files:
        for path in (study.root / paths.ANALYSIS).glob(f"{Path(paths.DEVICE_TAXES).stem}.*"):
            path.unlink()
    for name, content in files.items():
        path = study.root / paths.ANALYSIS / name
        if isinstance(content, str):
            write_text(path, content)
            write_bytes(path.with_suffix(".parquet"), table_parquet(name, content))
        else:
            write_json(path, content)
    return list(files)


if __name__ == "__main__":
    sys.exit(main())
