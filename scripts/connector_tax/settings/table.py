"""Render the settings matrix as text, Markdown and CSV."""

import csv
import io
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from connector_tax import text
from connector_tax.settings.matrix import (
    NOT_RESOLVED,
    REFUSES,
    RESOLVES,
    TESTED,
    Capacity,
    Matrix,
    Row,
    differs,
    models_of,
    plain_of,
    release_of,
)
from connector_tax.settings.request import PLAIN

# Settings with a column; other changes are in the last column.
_COLUMNS = {"hybrid_manager": "hybrid manager", "groups": "groups", "layout": "layout",
            "graphs": "graphs"}  # fmt: skip
_AVAILABILITY = "package, started"
_NOT_RECORDED = "not recorded"
# Settings in the line above a table, unless they have a column.
_HEADINGS = {
    "prefix_caching": "prefix caching",
    "chunked_prefill": "chunked prefill",
    "async_scheduling": "async scheduling",
    "scheduler": "",
    "runner": "model runner",
    "executor": "executor",
    "block_size": "block size",
    "attention_backends": "",
    "max_num_batched_tokens": "batched tokens",
    "max_num_seqs": "sequences",
    "mamba_cache_mode": "Mamba cache mode",
}
_STARTS = {RESOLVES: "yes", REFUSES: "refuses", NOT_RESOLVED: "not resolved"}


class Cell(NamedTuple):
    """A table cell, with a flag that its value differs from plain's value."""

    text: str
    differs: bool = False


def _value(value: Any) -> str:
    if isinstance(value, bool):
        return "on" if value else "off"
    if isinstance(value, int):
        return f"{value:,}"
    if isinstance(value, list):
        return ", ".join(map(_value, value))
    if isinstance(value, dict):  # layers by kind
        return ", ".join(f"{number} × ({kind})" for kind, number in value.items())
    return text.DASH if value is None else str(value)


def heading(matrix: Matrix, model: str) -> str:
    """Return a line with the values that all of a model's rows share."""
    settings = plain_of(matrix, model)["settings"]
    words = [model]
    if "max_model_len" in settings:
        words.append(f"{settings['max_model_len']:,} tokens")
    for name, word in _HEADINGS.items():
        if settings.get(name) not in (None, "none"):
            words.append(f"{word} {_value(settings[name])}".strip())
    return ", ".join(words)


def columns(matrix: Matrix, model: str) -> list[str]:
    """Return the names of a model's columns."""
    lengths = [f"requests of {entry['length']:,}" for entry in plain_of(matrix, model)["capacity"]]
    return ["connector", "starts", *lengths, "blocks", *_COLUMNS.values(), _AVAILABILITY, "also"]


def cells(matrix: Matrix, row: Row) -> list[Cell]:
    """Return a row's cells after the connector's name."""
    plain = plain_of(matrix, row["model"])
    line = [Cell(_STARTS[row["state"]], row["state"] != RESOLVES)]
    capacities = dict(enumerate(row["capacity"]))
    for number, baseline in enumerate(plain["capacity"]):
        line.append(_requests(capacities.get(number), baseline))
    blocks, usual = _blocks(row), _blocks(plain)
    line.append(Cell(_value(blocks), blocks is not None and blocks != usual))
    for name in _COLUMNS:
        value = row["settings"].get(name, plain["settings"].get(name))
        changed = row is not plain and name in row["settings"]
        unknown = not (changed or _resolved(row))
        line.append(Cell(text.DASH if unknown else _value(value), changed and not unknown))
    others = [
        f"{_HEADINGS.get(name) or name.replace('_', ' ')} {_value(value)}"
        for name, value in row["settings"].items()
        if row is not plain and name not in _COLUMNS
    ]
    line.append(Cell(", ".join(dict.fromkeys(_availability(matrix, row))) or text.DASH))
    return [*line, Cell("; ".join(others), bool(others))]


def _availability(matrix: Matrix, row: Row) -> list[str]:
    """Return whether the connector's own package is installed, and whether this project started it.

    Empty for plain.
    """
    if row["connector"] == PLAIN:
        return []
    connector = _connector(matrix, row["connector"])
    package = started = _NOT_RECORDED
    if "packages" in connector:
        absent = ", ".join(_absent(connector))
        package = f"no {absent}" if absent else "there"
    if "started" in connector:
        started = "yes" if connector["started"] else "never"
    return [package, started]


def _connector(matrix: Matrix, name: str) -> Mapping[str, Any]:
    """Return the record of a connector; empty if the matrix has none."""
    known: Iterator[Mapping[str, Any]] = (c for c in matrix["connectors"] if c["name"] == name)
    return next(known, {})


def _resolved(row: Row) -> bool:
    """Return whether vLLM resolved the row for at least one length."""
    return row["state"] == RESOLVES or any("requests" in entry for entry in row["capacity"])


def _blocks(row: Row) -> int | None:
    return next((entry["blocks"] for entry in row["capacity"] if "blocks" in entry), None)


def _requests(capacity: Capacity | None, baseline: Capacity) -> Cell:
    if capacity is None or "requests" not in capacity:
        return Cell("none" if capacity is not None else text.DASH, capacity is not None)
    usual = baseline.get("requests")
    number = text.number(capacity["requests"], 2)
    if not usual or capacity["requests"] == usual:
        return Cell(number)
    percent = text.signed(100 * (capacity["requests"] / usual - 1), 0)
    shown = percent not in ("0", "+0", f"{text.MINUS}0")
    return Cell(f"{number} ({percent}%)" if shown else number, shown)


def remarks(matrix: Matrix, model: str) -> Iterator[str]:
    """Yield a line for each reason why rows have no result, with the connectors it applies to."""
    reasons: dict[str, list[str]] = {}
    for row in matrix["rows"]:
        if row["model"] == model and "reason" in row:
            known = NOT_RESOLVED if row["state"] == NOT_RESOLVED else "vLLM refuses"
            where = f" ({row['at']})" if row["state"] == NOT_RESOLVED else ""
            reasons.setdefault(f"{known}: {row['reason']}{where}", []).append(row["connector"])
    yield from (f"{', '.join(names)}: {reason}" for reason, names in reasons.items())


def _noted(matrix: Matrix, *models: str) -> Iterator[str]:
    """Yield once each line that vLLM logged with a connector but not without one."""
    lines: dict[str, dict[str, None]] = {}
    for row in matrix["rows"]:
        for note in row["notes"]:
            if row["model"] in models and row["connector"] != PLAIN:
                lines.setdefault(note, {})[row["connector"]] = None
    yield from (f"{', '.join(names)}: {note}" for note, names in lines.items())


def origin(matrix: Matrix) -> list[str]:
    """Return lines that describe the vLLM and the request from which the matrix was made."""
    vllm, request = matrix["vllm"], matrix["request"]
    stands_in = f" (not there; --gpu {request['gpu']})" if request["gpu"] else ""
    extra = "".join(f" {word}" for word in request["arguments"])
    lines = [
        f"vLLM {vllm['version']}, {vllm['device']}{stands_in}, {request['kv_gib']:g} GiB of KV "
        f"cache{f' on each of {n} GPUs' if (n := request['tp']) > 1 else ''}{extra}"
    ]
    if vllm["platform"] == "cpu":
        lines.insert(0, "the CPU platform: block sizes and numbers of blocks differ from a GPU")
    if release_of(vllm["version"]) not in TESTED:
        lines.append(
            f"this project has not tried the whole matrix on vLLM {vllm['version']}; the proof"
            " passed"
        )
    return lines


def as_text(matrix: Matrix, width: int | None) -> str:
    """Return the matrix as text.

    Args:
        width: of the terminal, on which a wider table becomes a list; None where there is none.
    """
    lines, bold = origin(matrix), width is not None
    for model in models_of(matrix):
        plain = plain_of(matrix, model)
        if plain["state"] != RESOLVES:
            lines += [f"{model}: {remark}" for remark in remarks(matrix, model)]
            continue
        rows = [row for row in matrix["rows"] if row["model"] == model]
        names = columns(matrix, model)
        table = [[Cell(row["connector"]), *cells(matrix, row)] for row in rows]
        if not any(line[-1].text for line in table):
            names, table = names[:-1], [line[:-1] for line in table]
        widths = [
            max(map(len, column))
            for column in zip(names, *([cell.text for cell in line] for line in table), strict=True)
        ]
        lines += ["", heading(matrix, model)]
        if width is None or sum(widths) + 2 * len(widths) <= width:
            lines.append(_line([Cell(name) for name in names], widths))
            lines += [_line(line, widths, bold=bold) for line in table]
        else:
            lines += _listed(columns(matrix, model)[1:], _merged(matrix, model), width)
        lines += [f"  {remark}" for remark in (*remarks(matrix, model), *_noted(matrix, model))]
    return "\n".join([*lines, "", *_footnotes(matrix), summary(matrix)])


def _line(line: Sequence[Cell], widths: Sequence[int], *, bold: bool = False) -> str:
    words = []
    for cell, width in zip(line, widths, strict=True):
        padded = cell.text.ljust(width)
        words.append(f"\x1b[1m{padded}\x1b[0m" if bold and cell.differs else padded)
    return "  ".join(words).rstrip()


def _listed(
    names: Sequence[str], merged: Mapping[tuple[Cell, ...], list[str]], width: int
) -> Iterator[str]:
    """Yield connectors with equal rows and their differences from plain; for plain, all values."""
    usual = [""] * len(names)
    for line, connectors in merged.items():
        words = [
            f"{name}: {cell.text}"
            for name, cell, plain in zip(names, line, usual, strict=True)
            if cell.text not in (plain, "", text.DASH)
        ]
        usual = usual if any(usual) else [cell.text for cell in line]
        yield from textwrap.wrap(", ".join(connectors), width)
        indent = " " * 4
        yield from textwrap.wrap(
            "; ".join(words), width, initial_indent=indent, subsequent_indent=indent
        )


def _merged(matrix: Matrix, model: str) -> dict[tuple[Cell, ...], list[str]]:
    """Group a model's connectors by the cells of their rows, with plain's group first."""
    merged: dict[tuple[Cell, ...], list[str]] = {}
    for row in matrix["rows"]:
        if row["model"] == model:
            merged.setdefault(tuple(cells(matrix, row)), []).append(row["connector"])
    return merged


def _footnotes(matrix: Matrix) -> Iterator[str]:
    """Yield the meaning of the column on packages, and the connectors' extra configuration."""
    yield (
        f"{_AVAILABILITY}: whether the connector's own package is installed beside this vLLM, and"
        " whether a server of this project ever started with the connector; no row started one"
    )
    for connector in matrix["connectors"]:
        extra = (connector["transfer"] or {}).get("kv_connector_extra_config", {})
        if extra and "connectors" not in extra:
            words = ", ".join(f"{key}={value}" for key, value in extra.items())
            yield f"{connector['name']}: with {words}"


def _absent(connector: Mapping[str, Any]) -> list[str]:
    """Return the packages that a connector needs to start and that are not installed."""
    return [module for module, installed in connector["packages"].items() if not installed]


def summary(matrix: Matrix) -> str:
    """Return a line with the numbers of rows by state."""
    rows = [row for row in matrix["rows"] if row["connector"] != PLAIN]
    counts = {state: sum(row["state"] == state for row in matrix["rows"]) for state in _STARTS}
    changed = sum(
        row["state"] != NOT_RESOLVED and differs(row, plain_of(matrix, row["model"]))
        for row in rows
    )
    return (
        f"{len(rows)} connector rows, {len(models_of(matrix))} plain rows: {changed} differ from"
        f" plain ({counts[REFUSES]} of these refused by vLLM), {counts[NOT_RESOLVED]} not resolved"
    )


def as_markdown(matrix: Matrix) -> str:
    """Return a table for each model, where connectors with equal rows share a line."""
    parts = [". ".join(origin(matrix)) + "."]
    for model in models_of(matrix):
        plain = plain_of(matrix, model)
        if plain["state"] != RESOLVES:
            parts.append("\n".join(f"{model}: {remark}" for remark in remarks(matrix, model)))
            continue
        merged, names = _merged(matrix, model), columns(matrix, model)
        used = [n for n in range(1, len(names)) if any(line[n - 1].text for line in merged)]
        lines = [f"### {model}", "", f"{heading(matrix, model)}.", ""]
        lines += text.markdown_table(
            ["connector", *(names[n] for n in used)],
            *([_escaped(", ".join(connectors)), *(_bold(line[n - 1]) for n in used)]
              for line, connectors in merged.items()),
        )  # fmt: skip
        notes = [f"- {remark}" for remark in remarks(matrix, model)]
        parts.append("\n".join([*lines, *(["", *notes] if notes else [])]))
    lines = [f"- {line}" for line in (*_footnotes(matrix), *_noted(matrix, *models_of(matrix)))]
    parts.append("\n".join(["Beside the tables:", "", *lines]))
    return "\n\n".join(parts) + "\n"


def _bold(cell: Cell) -> str:
    shown = _escaped(cell.text)
    return f"**{shown}**" if cell.differs and shown else shown


def _escaped(words: str) -> str:
    return words.replace("|", "\\|")


def as_csv(matrix: Matrix) -> str:
    """Return a line for each model, connector and length."""
    stream = io.StringIO()
    names = [*_COLUMNS, *(name for name in _HEADINGS if name not in _COLUMNS)]
    writer = csv.writer(stream, lineterminator="\n")
    writer.writerow(["model", "connector", "state", "length", "requests", "blocks", "tokens",
                     *names, "also", "missing_packages", "started", "reason"])  # fmt: skip
    for row in matrix["rows"]:
        plain = plain_of(matrix, row["model"])
        also, connector = cells(matrix, row)[-1].text, _connector(matrix, row["connector"])
        absent = " ".join(_absent(connector)) if "packages" in connector else _NOT_RECORDED
        started = connector.get("started", _NOT_RECORDED)
        further = [also, absent, started] if row is not plain else [also, "", ""]
        usual = plain["settings"]
        if not _resolved(row):
            usual = {}  # only the row's own settings are known
        settings = [row["settings"].get(name, usual.get(name)) for name in names]
        shown = [" ".join(map(str, v)) if isinstance(v, list) else v for v in settings]
        entries: Sequence[Mapping[str, Any]] = row["capacity"] or [{}]
        for known in entries:
            numbers = [known.get(key) for key in ("length", "requests", "blocks", "tokens")]
            reason = known.get("reason", row.get("reason"))
            head = [row["model"], row["connector"], row["state"]]
            writer.writerow([*head, *numbers, *shown, *further, reason])
    return stream.getvalue()
