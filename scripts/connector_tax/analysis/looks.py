"""Interim analyses while a study is measured: decide configurations after a block.

An interim analysis judges the taxes over all rates of the finished blocks, as the final analysis
does (docs/method.md, "The error model"), but at its own level. `statistics.looks` lists a level for
each analysis from `first_look` blocks on; their sum is the family's level. Candidates and metrics
share a level (Bonferroni).
"""

from dataclasses import fields

import msgspec

from connector_tax.analysis.effect import Levels
from connector_tax.analysis.effects import TaxTable, family_rows, sample_launch
from connector_tax.analysis.measure import measure_requests, measure_waiting
from connector_tax.analysis.reference import judge_cells, load_of
from connector_tax.artifacts import paths
from connector_tax.artifacts.folder import StudyFolder
from connector_tax.artifacts.looks import Finding, decided_in, first_look, read_looks
from connector_tax.artifacts.metrics import judged_metrics
from connector_tax.artifacts.names import ALL_RATES
from connector_tax.artifacts.study_file import Study
from connector_tax.files import write_json


def look(study: Study, blocks: int) -> list[Finding]:
    """Return the findings on the first `blocks` blocks; a single block gives no intervals.

    Args:
        study: a study whose Phase A has ended in its first `blocks` blocks.

    Raises:
        ArtifactError: a record is missing, changed or malformed.
    """
    return findings_of(taxes_of_phase_a(study, blocks), blocks)


def taxes_of_phase_a(study: Study, blocks: int | None = None) -> TaxTable:
    """Return the taxes of Phase A, from the raw records.

    Args:
        study: a study whose Phase A has ended in these blocks.
        blocks: the number of first blocks to use; None for all.

    Raises:
        ArtifactError: a record is missing, changed or malformed.
    """
    cells = StudyFolder(study).cells("A")
    if blocks is not None:
        cells = [cell for cell in cells if cell.key.block < blocks]
    requests = {cell.key: measure_requests(cell) for cell in cells if cell.status == "valid"}
    loads = {
        cell.key: load
        for cell in cells
        if cell.key in requests
        and (load := load_of(requests[cell.key], measure_waiting(cell), cell.rate_rps))
    }
    judged = judge_cells(study, cells, loads)
    samples = {
        key: sample_launch(of, key in judged and judged[key].saturated, study.config["statistics"])
        for key, of in requests.items()
    }
    return TaxTable(study, cells, samples, {}, blocks)


def findings_of(taxes: TaxTable, blocks: int) -> list[Finding]:
    """Return the findings on taxes over all rates, at the alpha of the analysis after `blocks`."""
    statistics = taxes.study.config["statistics"]
    levels, first = statistics["looks"], first_look(statistics)
    metrics = judged_metrics(statistics)
    candidates = [name for name in taxes.study.configurations if name != taxes.study.baseline]
    pair = tuple(
        shared(level, len(candidates), len(metrics))
        for level in (levels[max(blocks - first, 0)], levels[-1])
    )
    names = {field.name for field in fields(Finding)}
    return [
        Finding(**{key: of for key, of in row.items() if key in names and of is not None})
        for metric in metrics
        for row in family_rows(taxes, "A", ALL_RATES, metric, look=(pair[0], pair[1]))
        if row["config"] in candidates
    ]


def shared(level: float, candidates: int, metrics: int) -> Levels:
    """Return the confidences of a candidate's two intervals, for a cost and for equivalence.

    The level is divided among candidates and metrics. For equivalence all metrics must lie within
    the margin, so metrics do not divide it (intersection-union).
    """
    return Levels(1 - level / (candidates * metrics), 1 - 2 * level / candidates)


def take_look(study: Study, blocks: int) -> list[Finding]:
    """Run the interim analysis after `blocks` blocks and store its results in looks.json.

    A stored analysis is never repeated: on the same data it would be identical, and on changed data
    its level is spent. Earlier decisions also stay. An analysis without any number, since all cells
    were void, has spent no alpha and is repeated.
    """
    looks = [
        entry
        for entry in read_looks(study.root)
        if entry["blocks"] != blocks or any(f.estimate is not None for f in entry["findings"])
    ]
    stored = next((entry for entry in looks if entry["blocks"] == blocks), None)
    if stored is not None:
        return stored["findings"]
    earlier = {name: decided for entry in looks for name, decided in decided_in(entry).items()}
    findings = [earlier.get(f.config, {}).get(f.metric, f) for f in look(study, blocks)]
    statistics = study.config["statistics"]
    level = statistics["looks"][blocks - first_look(statistics)]
    looks.append({"blocks": blocks, "level": level, "findings": findings})
    looks.sort(key=lambda entry: entry["blocks"])
    write_json(study.root / paths.LOOKS, msgspec.to_builtins(looks))
    return findings


def take_due_look(study: Study, block: int) -> list[Finding] | None:
    """Run the interim analysis that is due after `block` of Phase A; None if none is due.

    No analysis is due while a launch up to this block is missing or failed. None is due either if a
    later block has begun: the launches that the analysis would have dropped are then measured, and
    its level is not spent.
    """
    blocks, statistics = block + 1, study.config["statistics"]
    if "looks" not in statistics or blocks < first_look(statistics):
        return None
    for launch in StudyFolder(study).of_phase("A"):
        ended = launch.status not in ("missing", "failed")
        if ended is not (launch.launch.block < blocks):
            return None
    return take_look(study, blocks)
