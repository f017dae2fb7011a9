"""List what else each connector of a vLLM study changes: settings, capacity, whether it starts.

The values are those that the running servers recorded. A value that a study did not record comes
from the shipped settings matrix (`connector-tax settings`), if the matrix is of the study's vLLM
version and has its model, or a model of the same architecture.
"""

from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Any

from connector_tax import text
from connector_tax.artifacts import paths
from connector_tax.config import DEFAULTS
from connector_tax.figures.tables import StudyTables
from connector_tax.files import read_json
from connector_tax.report.tables import Table, TableCell, TableRow, table
from connector_tax.servers.command import split_command
from connector_tax.servers.kinds import ServerError
from connector_tax.servers.vllm import transfer_config
from connector_tax.settings import table as matrix_table
from connector_tax.settings.matrix import (
    RESOLVES,
    Capacity,
    Matrix,
    Row,
    models_of,
    plain_of,
    release_of,
    shipped,
)
from connector_tax.settings.request import PLAIN, connectors_in, given, identity

# Column of the table -> setting of a running server (engine.csv), and its name in the matrix.
SETTINGS = {
    "hybrid manager": ("hybrid_kv_cache_manager", "hybrid_manager"),
    "layout": ("kv_cache_layout", "layout"),
    "graphs": ("cudagraph_mode", "graphs"),
}
STARTS, REQUESTS = "starts", "requests at once"
COLUMNS = (STARTS, REQUESTS, *SETTINGS)
NOT_RECORDED, SAME, MARK = "not recorded", "same", "*"
_TRUTH = {"true": True, "false": False}
_OPTION = "--kv-transfer-config"

Transfer = dict[str, Any] | None


@dataclass(frozen=True)
class Changes:
    """The table of a study, notes on its values, and further settings unlike the baseline's.

    Attributes:
        others: text on settings without a column, by configuration.
    """

    table: Table
    notes: list[str]
    others: dict[str, str]


def changes_of(study: StudyTables) -> Changes | None:
    """Return what else each connector changes; None unless a vLLM with a known connector ran."""
    transfers = transfers_of(study)
    if not any(transfers.values()):
        return None
    values, matrix = _values(study), shipped()
    model = _model_in(matrix, study)
    resolved = {} if model is None else _rows(matrix, model, transfers, study)
    rows: list[TableRow] = []
    unstarted: list[Row] = []
    unknown: dict[str, str] = {}  # labels of configurations without all values
    for item in study.configurations:
        shown = _recorded(study, values, item.id)
        row = resolved.get(item.id)
        if row is None:
            absent = NOT_RECORDED
            if len(shown) < len(COLUMNS):
                unknown[item.id] = item.label
        else:
            absent = text.DASH
            if STARTS not in shown:
                unstarted.append({**row, "connector": item.label})
            of_matrix = _shown(matrix, row)
            usual = plain_of(matrix, row["model"])
            if item.id != study.baseline and row["capacity"] == usual["capacity"]:
                of_matrix[REQUESTS] = SAME  # its number is for another memory size
            shown = {name: f"{words}{MARK}" for name, words in of_matrix.items()} | shown
        connectors = ", ".join(connectors_in(transfers.get(item.id))) or text.DASH
        cells = [item.label, *(shown.get(name, absent) for name in COLUMNS), connectors]
        rows.append(TableRow([*map(TableCell, cells)]))
    notes = []
    if model is not None and any(cell.text.endswith(MARK) for row in rows for cell in row.cells):
        notes.append(_origin(matrix, model, study))
    notes += _refusals(matrix, unstarted)
    if unknown:
        command = _command(matrix, study, [transfers.get(config) for config in unknown])
        names = ", ".join(unknown.values())
        notes.append(f"Neither recorded nor in the shipped matrix: {names}. To resolve: {command}")
    elif study.settings["engine"].get("device") != "cuda":
        notes.append(
            "These servers ran without a GPU. On a GPU, layout, graphs and the number of requests"
            f" can differ. To resolve: {_command(matrix, study, [])}"
        )
    headings = ["Configuration", *map(str.capitalize, COLUMNS), "Connector"]
    return Changes(table("connector-changes", headings, rows), notes, _others(study))


# ---- the connectors of a study


def transfers_of(study: StudyTables) -> dict[str, Transfer]:
    """Return each known KVTransferConfig by configuration; None for no connector."""
    engine = study.settings["engine"]
    forms = engine.get("forms", {})
    transfers: dict[str, Transfer] = {}
    if engine["kind"] == "vllm":
        by_id = {entry["id"]: entry for entry in study.document["configurations"]}
        for config in by_id:
            with suppress(ServerError):  # a child is not part of the study
                transfers[config] = transfer_config(by_id, config, forms, lambda _: 0)
    for config, line in engine.get("commands", {}).items():
        with suppress(ValueError):
            transfers[config] = _transfer_on(line)
    return transfers


def _transfer_on(line: str) -> Transfer:
    """Return the KVTransferConfig on a user's command line; None without one.

    Raises:
        ValueError: it cannot be read, or the server runs already and has no command.
    """
    if line.startswith(("http://", "https://")):
        raise ValueError(f"{line}: no command")
    words = split_command(line)
    for word, following in zip(words, [*words[1:], ""], strict=True):
        option, equals, value = word.partition("=")
        if option.replace("_", "-") == _OPTION:
            return given(value if equals else following)["transfer"]
    if _OPTION in line.replace("_", "-"):
        raise ValueError(f"{line}: {_OPTION} is not an option by itself")
    return None


# ---- values of the running servers


def _values(study: StudyTables) -> dict[str, dict[str, str]]:
    """Return the recorded settings by configuration."""
    values: dict[str, dict[str, str]] = {}
    for line in study.engine:
        if line.value:
            values.setdefault(line.config, {})[line.setting] = line.value
    return values


def _others(study: StudyTables) -> dict[str, str]:
    """Return the recorded settings without a column that differ from the baseline's, as text."""
    others: dict[str, list[str]] = {}
    for row in study.engine:
        if row.differs and row.setting not in (setting for setting, _ in SETTINGS.values()):
            words = f"{row.setting} {row.value} ({study.baseline} {row.plain})"
            others.setdefault(row.config, []).append(words)
    return {config: "; ".join(words) for config, words in others.items()}


def _recorded(
    study: StudyTables, values: Mapping[str, Mapping[str, str]], config: str
) -> dict[str, str]:
    """Return the columns that a configuration's servers recorded."""
    own = values.get(config, {})
    baseline = _row(study, values.get(study.baseline, {}), PLAIN)
    row = baseline
    if config != study.baseline:
        row = _row(study, own, config)
        usual = baseline["settings"]
        changed = {n: value for n, value in row["settings"].items() if value != usual.get(n)}
        row = {**row, "settings": changed}
    matrix: Matrix = {"vllm": {}, "request": {}, "connectors": [], "rows": [baseline, row]}
    unknown = {column for column, (setting, _) in SETTINGS.items() if setting not in own}
    cells = (cell for cell in study.cell_rows if cell.configuration == config)
    if not any(cell.status in ("valid", "void") for cell in cells):
        unknown.add(STARTS)
    return {name: words for name, words in _shown(matrix, row).items() if name not in unknown}


def _row(study: StudyTables, own: Mapping[str, str], connector: str) -> Row:
    """Return recorded settings as a row of the matrix."""
    served = study.settings["engine"].get("served", {})
    longest = own.get("max_model_len") or str(served.get("max_model_len"))
    numbers = [own.get("kv_tokens", ""), own.get("kv_blocks", ""), longest]
    capacity: list[Capacity] = []
    if all(map(str.isdecimal, numbers)):
        tokens, blocks, length = map(int, numbers)
        capacity.append(
            {"length": length, "requests": tokens / length, "blocks": blocks, "tokens": tokens}
        )
    settings = {
        name: _TRUTH.get(own[setting], own[setting])
        for setting, name in SETTINGS.values()
        if setting in own
    }
    return {"model": study.name, "connector": connector, "state": RESOLVES, "settings": settings,
            "capacity": capacity, "notes": []}  # fmt: skip


def _shown(matrix: Matrix, row: Row) -> dict[str, str]:
    """Return a row's known cells by the columns of this table."""
    names = matrix_table.columns(matrix, row["model"])[1:]
    cells = [cell.text for cell in matrix_table.cells(matrix, row)]
    shown = dict(zip(names, cells, strict=True))
    if plain_of(matrix, row["model"])["capacity"]:
        shown[REQUESTS] = cells[1]  # at the model's own length
    known = {name: shown.get(name, text.DASH) for name in COLUMNS}
    return {name: words for name, words in known.items() if words != text.DASH}


# ---- values of the matrix


def _model_in(matrix: Matrix, study: StudyTables) -> str | None:
    """Return the model of the matrix whose rows are valid for a study; None if it has none."""
    if not _same_release(matrix, study):
        return None
    name, models = PurePosixPath(_model(study)).name, models_of(matrix)
    if name in models or (architecture := _architecture(name)) is None:
        return name if name in models else None
    return next((model for model in models if _architecture(model) == architecture), None)


def _same_release(matrix: Matrix, study: StudyTables) -> bool:
    return release_of(_version(study) or "") == release_of(matrix["vllm"]["version"])


def _version(study: StudyTables) -> str | None:
    version: str | None = read_json(study.root / paths.ENVIRONMENT).get("vllm")
    return version


def _model(study: StudyTables) -> str:
    """Return the model that the servers load, or its served name; MODEL if neither is recorded."""
    engine = study.settings["engine"]
    if "model" in engine:
        return engine["model"]
    return engine["served"]["model"] if "served" in engine else "MODEL"


def _architecture(name: str) -> list[str] | None:
    """Return the architecture of a shipped shape; None if there is no such shape."""
    shape = DEFAULTS / "models" / f"{name}.json"
    architecture: list[str] | None = read_json(shape)["architectures"] if shape.is_file() else None
    return architecture


def _rows(
    matrix: Matrix, model: str, transfers: Mapping[str, Transfer], study: StudyTables
) -> dict[str, Row]:
    """Return the matrix's row of each configuration; empty if the baseline has a connector."""
    if transfers.get(study.baseline, {}) is not None:
        return {}
    forms = study.settings["engine"].get("forms", {})
    by_name = {c["name"]: c["transfer"] and identity(c["transfer"]) for c in matrix["connectors"]}
    rows = [row for row in matrix["rows"] if row["model"] == model]
    return {
        config: row
        for config, transfer in transfers.items()
        # Another interpreter may have another vLLM.
        if "python" not in forms.get(config, {})
        for row in rows
        if by_name[row["connector"]] == (transfer and identity(transfer))
    }


def _origin(matrix: Matrix, model: str, study: StudyTables) -> str:
    """Return the source of the values that the study did not record."""
    own = PurePosixPath(_model(study)).name
    shape = model if model == own else f"{model}, of the same architecture as {own}"
    length = plain_of(matrix, model)["settings"]["max_model_len"]
    return (
        f"{MARK} Not recorded by this study, but resolved without a server by connector-tax"
        f" settings: {'; '.join(matrix_table.origin(matrix))}; {shape}; {length:,} tokens."
    )


def _refusals(matrix: Matrix, rows: list[Row]) -> Iterator[str]:
    """Yield why vLLM refuses to start, by the labels of the configurations."""
    part: Matrix = {**matrix, "rows": rows}
    for model in models_of(part):
        yield from matrix_table.remarks(part, model)


def _command(matrix: Matrix, study: StudyTables, transfers: list[Transfer]) -> str:
    """Return the command that resolves these connectors for the study's model."""
    words = ["connector-tax settings"]
    if not _same_release(matrix, study):
        words.append(f"--python PYTHON (with vLLM {_version(study) or 'of this study'})")
    name = PurePosixPath(_model(study)).name
    words.append(f"--model {_model(study) if _architecture(name) is None else name}")
    names = [
        f"--connector {transfer['kv_connector']}"
        if identity(transfer)[1:] == [None, False, []]
        else f"{_OPTION} JSON"
        for transfer in transfers
        if transfer is not None
    ]
    return " ".join([*words, *dict.fromkeys(names)])
