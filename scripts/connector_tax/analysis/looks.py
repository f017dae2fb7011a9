"""Interim analyses while a study is measured: after a block, which configurations are decided.

An interim analysis judges the taxes over all rates of the blocks there are, as the study judges
them at its end (docs/method.md, "The error model"), at its own level. The levels stand in
`statistics.looks`, one for each analysis from `first_look` blocks on; their sum is the family's.
Candidates and metrics share a level (Bonferroni).
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
    """Judge the first `blocks` blocks; without an interval before the second.

    Args:
        study: Phase A of its first blocks has ended.
        blocks: how many of them count.

    Raises:
        ArtifactError: a record is missing, changed or malformed.
    """
    return findings_of(taxes_of_phase_a(study, blocks), blocks)


def taxes_of_phase_a(study: Study, blocks: int | None = None) -> TaxTable:
    """Return the taxes of Phase A, from the raw records.

    Args:
        study: Phase A of the blocks that count has ended.
        blocks: the first ones that count; None: all.

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
        key: sample_launch(of, key in judged and judged[key].saturated)
        for key, of in requests.items()
    }
    return TaxTable(study, cells, samples, {}, blocks)


def findings_of(taxes: TaxTable, blocks: int) -> list[Finding]:
    """Judge the taxes over all rates at the level of the analysis after so many blocks."""
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
    """Return the confidences of one of so many candidates' two intervals.

    All metrics must lie within the margin, so that they share no level for that
    (intersection-union).
    """
    return Levels(1 - level / (candidates * metrics), 1 - 2 * level / candidates)


def take_look(study: Study, blocks: int) -> list[Finding]:
    """Look once after `blocks` blocks, and keep what was seen: looks.json.

    A look that was taken stays as it is: a second one at the same data would be no other, and one
    at changed data would have no level left. So does what an earlier look has decided.
    """
    looks = read_looks(study.root)
    taken = next((entry for entry in looks if entry["blocks"] == blocks), None)
    if taken is not None:
        return taken["findings"]
    kept = {name: decided for entry in looks for name, decided in decided_in(entry).items()}
    findings = [kept.get(f.config, {}).get(f.metric, f) for f in look(study, blocks)]
    statistics = study.config["statistics"]
    level = statistics["looks"][blocks - first_look(statistics)]
    looks.append({"blocks": blocks, "level": level, "findings": findings})
    write_json(study.root / paths.LOOKS, msgspec.to_builtins(looks))
    return findings


def take_due_look(study: Study, block: int) -> list[Finding] | None:
    """Take the look that is due when a block of Phase A has ended; None where none is.

    Not while a launch up to it is missing or failed; nor where a later block has begun: what the
    look would have left out is measured then, and its level stays unspent.
    """
    blocks, statistics = block + 1, study.config["statistics"]
    if "looks" not in statistics or blocks < first_look(statistics):
        return None
    for launch in StudyFolder(study).of_phase("A"):
        ended = launch.status not in ("missing", "failed")
        if ended is not (launch.launch.block < blocks):
            return None
    return take_look(study, blocks)
