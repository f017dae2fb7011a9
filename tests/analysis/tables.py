"""Read the tables of an analysed study for the tests."""

import csv
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

FILES = (
    "cells.csv",
    "effects.csv",
    "hypotheses.json",
    "step_cdf.csv",
)


def table(root: Path, name: str) -> list[dict[str, str]]:
    """Return the rows of a CSV under analysis/."""
    with (root / "analysis" / name).open(newline="") as stream:
        return list(csv.DictReader(stream))


def effects(root: Path, quantity: str) -> list[dict[str, str]]:
    """Return the rows of effects.csv for one quantity."""
    return select(table(root, "effects.csv"), quantity=quantity)


def select(rows: list[dict[str, str]], **where: str) -> list[dict[str, str]]:
    """Return the rows with the given values."""
    return [row for row in rows if all(row[k] == v for k, v in where.items())]


def one(rows: list[dict[str, str]], **where: str) -> dict[str, str]:
    """Return the only row with the given values."""
    selected = select(rows, **where)
    assert len(selected) == 1, (where, len(selected))
    return selected[0]


def edit_csv(path: Path, change: Callable[[list[dict[str, str]]], None]) -> None:
    """Apply `change` to the rows of a CSV file; the first row gives the columns."""
    with path.open(newline="") as stream:
        rows = list(csv.DictReader(stream))
    change(rows)
    with path.open("w", newline="") as stream:
        writer = csv.DictWriter(stream, list(rows[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)


def edit(path: Path, change: Callable[[Any], None]) -> None:
    """Apply `change` to the content of a JSON file."""
    value = json.loads(path.read_text())
    change(value)
    path.write_text(json.dumps(value))
