"""The settings matrix: how each connector changes each model's settings, compared with `plain`."""

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Literal, NotRequired, TypedDict

from connector_tax.files import read_json
from connector_tax.settings.request import (
    PLAIN,
    Case,
    Request,
    connectors_in,
    package_of,
    was_started,
)
from connector_tax.settings.run import Message, UnresolvedError

# A link to docs/results/records.
SHIPPED = Path(__file__).with_name("records") / "settings.json"
# vLLM versions whose whole matrix this project has made and checked: 0.33.0 on its CPU build.
TESTED = ("0.32.0", "0.33.0")

State = Literal["resolves", "refuses", "not resolved"]
RESOLVES: State = "resolves"
REFUSES: State = "refuses"
NOT_RESOLVED: State = "not resolved"

# Types of programming errors and of interruptions, which are not decisions of vLLM.
_DEFECTS = {
    "AttributeError",
    "ContractError",
    "ImportError",
    "KeyboardInterrupt",
    "MemoryError",
    "ModuleNotFoundError",
    "NameError",
    "RecursionError",
    "SystemExit",
    "TypeError",
    "UnboundLocalError",
}
# Files of vLLM that determine the configuration and the KV cache.
_DECIDES = (
    "vllm/config/",
    "vllm/distributed/kv_transfer/",
    "vllm/engine/arg_utils.py",
    "vllm/model_executor/models/config.py",
    "vllm/platforms/",
    "vllm/v1/attention/backends/utils.py",
    "vllm/v1/core/",
    "vllm/v1/engine/core.py",
    "vllm/v1/kv_cache_interface.py",
)
# vLLM's configuration classes check their fields inside these.
_CHECKERS = ("pydantic/", "pydantic_core/", "dataclasses.py")


class Capacity(TypedDict):
    """The capacity of the KV cache at one length.

    Attributes:
        length: tokens of a request.
        requests: number of concurrent requests of that length; absent with a `reason`.
        blocks: KV cache blocks.
        tokens: tokens of the KV cache as vLLM reports them; null if this version does not.
    """

    length: int
    requests: NotRequired[float]
    blocks: NotRequired[int]
    tokens: NotRequired[int | None]
    reason: NotRequired[str]


class Row(TypedDict):
    """One model with one connector.

    Attributes:
        reason: vLLM's error line if it rejects the case, or why the row is not resolved.
        at: the last frame of that error.
        settings: for plain all settings; for connectors those that differ from plain's.
        notes: lines that vLLM logged with this connector but not without one.
    """

    model: str
    connector: str
    state: State
    reason: NotRequired[str]
    at: NotRequired[str]
    settings: dict[str, Any]
    capacity: list[Capacity]
    notes: list[str]


class Connector(TypedDict):
    """A connector of the matrix.

    Attributes:
        transfer: its configuration.
        packages: whether each module that it needs to start is installed; absent: not recorded.
        started: whether a server of this project's studies has started with it; absent: not
            recorded.
    """

    name: str
    transfer: dict[str, Any] | None
    packages: NotRequired[dict[str, bool]]
    started: NotRequired[bool]


class Matrix(TypedDict):
    """The answer of `connector-tax settings`, as `--json` prints it."""

    vllm: dict[str, Any]
    request: dict[str, Any]
    connectors: list[Connector]
    rows: list[Row]


def shipped() -> Matrix:
    """Return the matrix of docs/results/settings.md, which is part of the package."""
    matrix: Matrix = read_json(SHIPPED)
    return matrix


def release_of(version: str) -> str:
    """Return a vLLM version without its build, such as 0.32.0 of 0.32.0+cpu."""
    return version.partition("+")[0]


def state_of(cell: Message, plain: State | None) -> State:
    """Return whether a cell resolves, is rejected by vLLM, or is not resolved.

    Args:
        cell: a message of the program.
        plain: the state of the same model without a connector; None for that cell itself.
    """
    error = cell.get("error")
    if "died" in cell:
        return NOT_RESOLVED
    if error is None:
        return RESOLVES
    defect = {error["type"], *error["causes"]} & _DEFECTS
    frames = [frame for frame in error["frames"] if not frame.startswith(_CHECKERS)]
    decided = bool(frames) and frames[-1].startswith(_DECIDES)
    return REFUSES if plain == RESOLVES and decided and not defect else NOT_RESOLVED


def _reason(cell: Mapping[str, Any]) -> tuple[str, str]:
    """Return why a cell has no result, and the last frame of the error."""
    if "died" in cell:
        return f"the process ended with {cell['died']}", "unknown"
    error = cell["error"]
    text = ""
    if error["type"] in ("ValueError", "ValidationError"):
        text = error["text"]
    return text or f"{error['type']}: {error['text']}", (error["frames"] or ["unknown"])[-1]


def _capacity(entry: Mapping[str, Any]) -> Capacity:
    if "requests" in entry:
        return {"length": entry["length"], "requests": entry["requests"],
                "blocks": entry["blocks"], "tokens": entry["tokens"]}  # fmt: skip
    return {"length": entry["length"], "reason": _reason(entry)[0]}


def rows_of(cells: Iterable[Message]) -> Iterator[Row]:
    """Yield a row for each cell; a model's first row is plain.

    Raises:
        UnresolvedError: vLLM does not register a requested connector.
    """
    settings: dict[str, Any] = {}
    notes: set[str] = set()
    plain: State | None = None
    for cell in cells:
        if cell.get("absent"):
            raise UnresolvedError(f"{cell['case']}: not registered by this vLLM")
        resolved = cell.get("settings", {})
        if cell["case"] == PLAIN:
            settings, notes, plain = resolved, set(cell.get("notes", ())), None
        row: Row = {
            "model": cell["model"],
            "connector": cell["case"],
            "state": state_of(cell, plain),
            "settings": resolved
            if cell["case"] == PLAIN
            else {n: v for n, v in resolved.items() if v != settings.get(n) and v is not None},
            "capacity": [_capacity(entry) for entry in cell.get("capacity", ())],
            "notes": [note for note in cell.get("notes", ()) if note not in notes],
        }
        failed = [entry for entry in cell.get("capacity", ()) if "requests" not in entry]
        lost = [entry for entry in failed if state_of(entry, RESOLVES) == NOT_RESOLVED]
        if row["state"] != NOT_RESOLVED and lost:
            row["state"], (row["reason"], row["at"]) = NOT_RESOLVED, _reason(lost[0])
        elif row["state"] != RESOLVES:
            row["reason"], row["at"] = _reason(cell)
        if cell["case"] == PLAIN:
            plain, row["notes"] = row["state"], sorted(notes)
        yield row


def connectors_of(cases: Iterable[Case], packages: Mapping[str, bool]) -> list[Connector]:
    """Return the connectors of the cases, with the packages that they need to start."""
    connectors: list[Connector] = []
    for case in cases:
        names = connectors_in(case["transfer"])
        modules = {module for name in names if (module := package_of(name)) is not None}
        connectors.append(
            {
                "name": case["name"],
                "transfer": case["transfer"],
                "packages": {module: packages[module] for module in sorted(modules)},
                "started": was_started(case["transfer"]),
            }
        )
    return connectors


def answer_key(request: Request) -> dict[str, Any]:
    """Return the parts of a request that determine its answer."""
    return {
        "gpu": request["gpu"],
        "kv_gib": request["kv_gib"],
        "lengths": request["lengths"],
        "max_model_len": request["max_model_len"],
        "tp": request["tp"],
        "arguments": request["arguments"],
    }


def differs(row: Row, plain: Row) -> bool:
    """Return whether a connector changes a setting or the capacity, or is rejected by vLLM."""
    return bool(row["settings"]) or row["capacity"] != plain["capacity"] or row["state"] == REFUSES


def plain_of(matrix: Matrix, model: str) -> Row:
    """Return a model's row without a connector."""
    return next(r for r in matrix["rows"] if (r["model"], r["connector"]) == (model, PLAIN))


def models_of(matrix: Matrix) -> list[str]:
    """Return the names of the models in the order of their rows."""
    return list(dict.fromkeys(row["model"] for row in matrix["rows"]))


def status_of(matrix: Matrix) -> int:
    """Return the exit status: 3 if a row is not resolved, 1 if a row differs, else 0."""
    rows = matrix["rows"]
    if any(row["state"] == NOT_RESOLVED for row in rows):
        return 3
    others = [row for row in rows if row["connector"] != PLAIN]
    return int(any(differs(row, plain_of(matrix, row["model"])) for row in others))
