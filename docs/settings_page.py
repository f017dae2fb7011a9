"""Write the tables of docs/results/settings.md from the records beside it.

After `connector-tax settings --json > docs/results/records/settings.json` or `make vllm-history`:
`python docs/settings_page.py`. With `--check` it only compares the page with the records.
"""

import argparse
import json
import re
import sys
from collections.abc import Mapping
from pathlib import Path

from connector_tax import text
from connector_tax.settings import history, table
from connector_tax.settings.history import CONNECTORS, FLAG, Record
from connector_tax.settings.matrix import REFUSES, Matrix, Row, models_of, plain_of
from connector_tax.settings.request import PLAIN

PAGE = Path(__file__).parent / "results" / "settings.md"
RECORDS = Path(__file__).parent / "results" / "records"
_PART = "<!-- {} -->\n"
_END = "<!-- end -->\n"


def summary(matrix: Matrix) -> str:
    """Return plain's capacity by model, then a line for connectors with the same outcomes."""
    models = models_of(matrix)
    plains = {model: plain_of(matrix, model) for model in models}
    outcomes: dict[str, list[str]] = {}
    for row in matrix["rows"]:
        if row["connector"] != PLAIN:
            outcomes.setdefault(row["connector"], []).append(_outcome(row, plains[row["model"]]))
    merged: dict[tuple[str, ...], list[str]] = {}
    for connector, cells in outcomes.items():
        merged.setdefault(tuple(cells), []).append(connector)
    capacities = [plains[model]["capacity"][0] for model in models]
    lines = text.markdown_table(
        ["", *models],
        ["tokens", *(f"{entry['length']:,}" for entry in capacities)],
        ["plain: blocks", *(f"{entry['blocks']:,}" for entry in capacities)],
        ["plain: requests at once", *(text.number(entry["requests"], 2) for entry in capacities)],
        *([", ".join(names), *cells] for cells, names in merged.items()),
    )
    return "\n".join(lines) + "\n"


def _outcome(row: Row, plain: Row) -> str:
    if row["state"] == REFUSES:
        needed = re.search(r"([\d.]+) GiB KV cache is needed", row["reason"])
        return f"**refuses: {needed[1]} GiB needed**" if needed else "**refuses**"
    if row["capacity"] == plain["capacity"]:
        return "same"
    capacity, usual = row["capacity"][0], plain["capacity"][0]
    share = text.signed(100 * (capacity["requests"] / usual["requests"] - 1), 0)
    return f"**{capacity['blocks']:,}; {text.number(capacity['requests'], 2)} ({share}%)**"


def versions(records: Mapping[str, Record]) -> str:
    """Return a line for each range of versions: the KV cache manager by connector, async
    scheduling.

    Args:
        records: by version, in order.
    """
    merged: list[tuple[list[str], list[str]]] = []
    for version, record in records.items():
        cells = _of_version(record)
        if merged and merged[-1][1] == cells:
            merged[-1][0].append(version)
        else:
            merged.append(([version], cells))
    rows = [
        [covered[0] if len(covered) == 1 else f"{covered[0]} to {covered[-1]}", *cells]
        for covered, cells in merged
    ]
    headings = ["vLLM", *CONNECTORS, "async scheduling"]
    return "\n".join(text.markdown_table(headings, *rows)) + "\n"


def capacities(records: Mapping[str, Record]) -> str:
    """Return a line for each version with a resolved KV cache: plain, then each connector."""
    lines = []
    for version, record in records.items():
        rows = {row["connector"]: row for row in record["rows"]}
        plain = rows[PLAIN]
        if not plain["capacity"]:
            continue
        for row in rows.values():  # the manager alone decides
            manager = row["settings"].get("hybrid_manager", True)
            same = row["capacity"] == plain["capacity"]
            assert row["state"] == REFUSES or same == manager, (version, row["connector"])
        known = plain["capacity"][0]
        cells = [version, f"{known['blocks']:,}", text.number(known["requests"], 2)]
        cells += [_outcome(rows[name], plain) if name in rows else text.DASH for name in CONNECTORS]
        lines.append(cells)
    headings = ["vLLM", "plain: blocks", "requests at once", *CONNECTORS]
    return "\n".join(text.markdown_table(headings, *lines)) + "\n"


def _of_version(record: Record) -> list[str]:
    rows = {row["connector"]: row for row in record["rows"]}
    plain = rows[PLAIN]["settings"]
    changes = {key for row in record["rows"][1:] for key in row["settings"]}
    assert plain["hybrid_manager"], record["vllm"]
    assert not changes & {"async_scheduling", "scheduler"}, record["vllm"]
    cells = [_manager(rows.get(name), rows.get(f"{name} {FLAG}")) for name in CONNECTORS]
    return [*cells, "on" if plain["async_scheduling"] else "off"]


def _manager(default: Row | None, requested: Row | None) -> str:
    """Return whether a connector leaves vLLM's hybrid KV cache manager on, and the flag's effect.

    Args:
        default: without the flag; None where the version does not register the connector.
        requested: with the flag.
    """
    if default is None or requested is None:
        return text.DASH
    if default["settings"].get("hybrid_manager", True):
        return "on"
    if requested["state"] == REFUSES:
        return "off; flag refused"
    ignored = requested["settings"].get("hybrid_manager", True) is False
    return "off; flag ignored" if ignored else "off; on with flag"


def parts() -> dict[str, str]:
    """Return the page's parts by name."""
    matrix: Matrix = json.loads((RECORDS / "settings.json").read_text("utf-8"))
    locked = history.locks(history.LOCK.read_text("utf-8"))
    records = {v: json.loads((history.RECORDS / f"{v}.json").read_text("utf-8")) for v in locked}
    return {
        "summary": summary(matrix),
        "matrix": table.as_markdown(matrix),
        "history": versions(records),
        "capacity history": capacities(records),
    }


def page(old: str) -> str:
    """Return the page with each part replaced by its new content."""
    for name, content in parts().items():
        begin = re.escape(_PART.format(name))
        pattern = re.compile(rf"({begin}).*?({re.escape(_END)})", re.DOTALL)
        if not pattern.search(old):
            sys.exit(f"{PAGE.name}: no part {_PART.format(name).strip()}")
        old = pattern.sub(lambda match, c=content: f"{match[1]}\n{c}\n{match[2]}", old)  # type: ignore[misc]
    return old


def main() -> int:
    """Write the page; with `--check` exit with 1 if the page differs from the records."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true")
    check = parser.parse_args().check
    old = PAGE.read_text("utf-8")
    new = page(old)
    if check and new != old:
        sys.exit(f"{PAGE.name} differs from its records; run python docs/settings_page.py")
    PAGE.write_text(new, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
