"""Open the studies of a comparison, check that they are comparable, and list their differences."""

import json
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from connector_tax.analysis.aggregate import write_tables
from connector_tax.artifacts import paths
from connector_tax.artifacts.folder import StudyFolder
from connector_tax.artifacts.names import ALL_RATES
from connector_tax.artifacts.tables import POOLED, CellRow
from connector_tax.commands import limited_by_archive
from connector_tax.figures.tables import StudyTables
from connector_tax.files import ArtifactError, read_json
from connector_tax.provenance.archive import private_folder, unpack
from connector_tax.seals import analysis_settings
from connector_tax.servers.kinds import engine_of
from connector_tax.study.design import differences, measured_design

Where = tuple[str, str]  # phase, cell
Load = tuple[float | None, int | None, int | None]  # rate, input and output tokens
ARCHIVE_SUFFIX = ".tar.zst"


class NotComparableError(ArtifactError):
    """Two studies that cannot be compared; the text gives the reason."""


@contextmanager
def opened(path: Path, status: int = 2) -> Iterator[StudyTables]:
    """Yield the tables of a study, given as a folder, study.json or archive (reanalysed).

    Memory and CPU time are limited by the size of an archive, as in `replot`, while it is analysed.
    The `with` body calls `limited_by_archive` for its own work.

    Args:
        path: one of these.
        status: the exit status where an archive takes too much CPU time.

    Raises:
        ArtifactError: `path` is none of these, damaged, takes too much memory for its archive, or
            was analysed by another method.
    """
    if path.name.endswith(ARCHIVE_SUFFIX):
        # The folder is deleted even if the limit ends this process.
        with private_folder(Path(tempfile.gettempdir(), "compare")) as folder:
            root = folder / "study"
            unpack(path, root)
            with limited_by_archive(root, path, status):
                write_tables(StudyFolder.load(root / paths.STUDY))
            yield StudyTables(root / paths.STUDY)
        return
    file = path / paths.STUDY if path.is_dir() else path
    tables = StudyTables(file)
    effects = tables.root / paths.ANALYSIS / paths.EFFECTS
    text = effects.read_text(encoding="utf-8", errors="replace") if effects.exists() else ""
    if "error" not in text.partition("\n")[0].split(","):
        why = "has tables of method 1, without standard errors" if text else "has no tables"
        raise ArtifactError(
            f"{tables.root}: {why}; finish the study, or run `connector-tax aggregate --study "
            f"{file}`"
        )
    yield tables


def refuse_unlike(a: StudyTables, b: StudyTables) -> None:
    """Raise NotComparableError if a ratio of the two studies would be meaningless."""
    if a.document == b.document:
        raise NotComparableError("A and B are the same study: they share every launch")
    if a.emulated != b.emulated:
        raise NotComparableError(
            f"A is {a.engine_label}, B is {b.engine_label}: emulated costs were set by hand"
        )
    for what, one, other in (
        ("model", _model(a), _model(b)),
        ("device time", *(s.settings["engine"].get("device_time") for s in (a, b))),
        ("baseline", a.baseline, b.baseline),
        ("arrival process", a.settings["arrivals"], b.settings["arrivals"]),
        ("confidence", *(s.settings["statistics"]["confidence"] for s in (a, b))),
    ):
        if one != other:
            raise NotComparableError(
                f"A and B differ in their {what}: {json.dumps(one)} and {json.dumps(other)}"
            )
    if not common_configurations(a, b):
        raise NotComparableError(f"A and B have no configuration in common besides {a.baseline}")
    if not common_cells(a, b):
        raise NotComparableError(
            "A and B have no cell of equal rate and shape in common: "
            + "; ".join(left_out(a, b) or ["neither has one"])
        )


def common_configurations(a: StudyTables, b: StudyTables) -> list[str]:
    """Return the configurations besides the baseline in both studies, in A's order."""
    ids_of_b = {item.id for item in b.connectors}
    return [item.id for item in a.connectors if item.id in ids_of_b]


def common_cells(a: StudyTables, b: StudyTables) -> dict[Where, CellRow]:
    """Return A's pooled baseline row of every cell with equal rate and shape in both studies."""
    cells_a, cells_b = _cells(a), _cells(b)
    return {
        where: row
        for where, row in cells_a.items()
        if where in cells_b and row.rate_rps is not None and load_of(row) == load_of(cells_b[where])
    }


def left_out(a: StudyTables, b: StudyTables) -> list[str]:
    """Return the parts of either study that are not compared, each with the reason."""
    cells_a, cells_b, common = _cells(a), _cells(b), common_cells(a, b)
    lines = []
    if all_rates(a) != all_rates(b):
        lines.append(f"{ALL_RATES}: not over the same rates and shapes")
    for where in dict.fromkeys((*cells_a, *cells_b)):
        sides = [f"{s} {_load_text(cells[where])}" for s, cells in (("A", cells_a), ("B", cells_b))
                 if where in cells and where not in common]  # fmt: skip
        if sides:
            only = "only in " if len(sides) == 1 else ""
            lines.append(f"{' '.join(where)}: {only}{', '.join(sides)}")
    for side, study, other in (("A", a, b), ("B", b, a)):
        known = {item.id for item in other.configurations}
        lines += [f"{item.id}: only in {side}" for item in study.configurations
                  if item.id not in known]  # fmt: skip
    return lines


def _cells(study: StudyTables) -> dict[Where, CellRow]:
    return {
        (row.phase, row.cell): row
        for row in study.cell_rows
        if row.config == study.baseline and row.block == POOLED
    }


def all_rates(study: StudyTables) -> list[Load]:
    """Return rate and shape of each cell that the taxes over all rates include."""
    sweep = [row for (phase, _), row in _cells(study).items() if phase == "A" and row.rate_rps]
    sweep.sort(key=lambda row: row.rate_rps or 0.0)
    return [load_of(row) for row in sweep if row.rate_rps in study.judged_rates]


def load_of(row: CellRow) -> Load:
    """Return rate and shape of a cell."""
    return row.rate_rps, row.input_tokens, row.output_tokens


def _load_text(row: CellRow) -> str:
    rate = "at no rate" if row.rate_rps is None else f"at {row.rate_rps:g} requests/s"
    return f"{rate} of {row.input_tokens}x{row.output_tokens} tokens"


def _model(study: StudyTables) -> Any:
    engine = study.settings["engine"]
    try:
        # The embedded engine's model also has lengths, which must be equal.
        definition = engine.get("definition_content")
        if definition:
            return definition["model"]
        served = engine_of(engine).served
        return served["model"], served["vocab_size"]
    except KeyError as error:
        where = study.root / paths.STUDY
        raise ArtifactError(f"{where}: config.engine: key {error} is missing") from None


def what_differs(a: StudyTables, b: StudyTables) -> dict[str, list[str]]:
    """Return the studies' differences by heading, as lines `key: A -> B`.

    Covers design, analysis settings, environment, and the settings that the engines resolved.

    Raises:
        ArtifactError: environment.json of a study is missing.
    """
    of: dict[str, Callable[[StudyTables], Mapping[str, Any]]] = {
        "Design": lambda s: measured_design(s.settings, s.document["configurations"]),
        "Analysis settings": lambda s: analysis_settings(s.settings),
        "Environment": lambda s: read_json(s.root / paths.ENVIRONMENT),
        "What the running engines resolved": _engine_settings,
    }
    return {heading: list(differences(read(a), read(b))) for heading, read in of.items()}


def _engine_settings(study: StudyTables) -> dict[str, dict[str, str]]:
    by_config: dict[str, dict[str, str]] = {}
    for row in study.engine:
        if row.setting and row.value:
            by_config.setdefault(row.config, {})[row.setting] = row.value
    return by_config
