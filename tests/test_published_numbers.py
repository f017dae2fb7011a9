"""Test intervals and pictures of the shipped pages against their archives."""

import csv
import functools
import io
import json
import re
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import pytest

from connector_tax.config import ROOT
from connector_tax.files import sha256_file
from tests.shared import members_of

ARCHIVES = ROOT / "results" / "archive"
RESULTS = ROOT / "docs" / "results"
PAGES = [RESULTS / f"{s}.md" for s in ("vllm-cpu", "h20-emulated", "h200")]
# A paragraph or table whose intervals come from the archive that the comment before it names. A
# table row belongs to the configuration in its first cell.
MARKED = re.compile(r"<!-- intervals of ([\w-]+) -->\s*(.+?)(?=\n\n|\Z)", re.DOTALL)
NUMBER = r"[+−]?\d[\d,]*(?:\.\d+)?"
INTERVAL = re.compile(rf"({NUMBER})(?:%| points)? \[({NUMBER}), ({NUMBER})\]")
Interval = tuple[float, float, float]


@functools.cache
def members(archive: str) -> dict[str, bytes]:
    """Return the published tables and study.json of an archive."""
    return {
        name: data
        for name, data in members_of(ARCHIVES / f"{archive}.tar.zst")
        if re.fullmatch(r"study\.json|published/analysis/.*", name)
    }


@functools.cache
def intervals(archive: str) -> dict[str, list[Interval]]:
    """Return every interval of the archive's published tables, by the label of its
    configuration.
    """
    study = json.loads(members(archive)["study.json"])
    label = {c["id"]: c["label"] for c in study["configurations"]}
    found: dict[str, list[Interval]] = defaultdict(list)
    for name, data in members(archive).items():
        if name.endswith(".csv"):
            for row in csv.DictReader(io.StringIO(data.decode())):
                again = "A/A" if row["config"].startswith("plain_") else ""
                found[label.get(row["config"], again)] += _of_row(row)
                found["A/A"] += _of_row({k[3:]: v for k, v in row.items() if k[:3] == "aa_"})
        elif name.endswith("hypotheses.json"):
            found[""] += _of_tree(json.loads(data))
    return found


def _of_row(row: dict[str, str]) -> Iterator[Interval]:
    for column in row:
        words = column.split("_")
        # A tax with a verdict shows the interval that decides the verdict.
        decides = column != "lo" or row.get("quantity") != "tax" or not row["family_lo"]
        if "lo" in words and decides:
            middle = "_".join(word for word in words if word != "lo")
            estimate = "tax" if "tax" in row else "estimate"
            # The family's interval belongs to the estimate, not to the column `family`.
            estimate = middle if middle in row and middle != "family" else estimate
            values = [row.get(name, "") for name in (estimate, column, column.replace("lo", "hi"))]
            if all(values):
                yield float(values[0]), float(values[1]), float(values[2])


def _of_tree(value: object) -> Iterator[Interval]:
    if isinstance(value, dict):
        if {"point", "lo", "hi"} <= value.keys() and value["lo"] is not None:
            yield value["point"], value["lo"], value["hi"]
        value = list(value.values())
    for item in value if isinstance(value, list) else ():
        yield from _of_tree(item)


def printed(text: str) -> Iterator[tuple[str, tuple[str, str, str]]]:
    """Yield the intervals of a marked text, each with the first cell of its row, or "" in a
    sentence.
    """
    for line in text.splitlines():
        row = line.split("|")[1].strip(" *`") if line.startswith("|") else ""
        for found in INTERVAL.finditer(line if row else text):
            yield row, (found[1], found[2], found[3])
        if not row:
            return


def stands(numbers: tuple[str, str, str], published: list[Interval]) -> bool:
    """Return whether three printed numbers equal three published ones after rounding; ratios are
    printed in per cent.
    """
    values = [float(n.replace("−", "-").replace(",", "")) for n in numbers]
    halves = [0.5 / 10 ** len(n.partition(".")[2]) + 1e-9 for n in numbers]
    return any(
        all(
            abs(p * scale - value) <= half
            for p, value, half in zip(interval, values, halves, strict=True)
        )
        for interval in published
        for scale in (1, 100)
    )


def wrong(archive: str, text: str) -> list[str]:
    """Return the printed intervals of a marked text that the archive does not have."""
    known = intervals(archive)
    every = [interval for group in known.values() for interval in group]
    return [
        f"{row}: {numbers}"
        for row, numbers in printed(text)
        if not stands(numbers, known.get("A/A" if "A/A" in row else row or "any", every))
    ]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_marked_interval_equals_the_archive(page: Path) -> None:
    marked = MARKED.findall(page.read_text("utf-8"))
    assert marked
    for archive, text in marked:
        assert list(printed(text)), text
        assert wrong(archive, text) == []


def test_wrong_digit_or_wrong_configuration_of_an_interval_is_detected() -> None:
    text = "\n\n".join(page.read_text("utf-8") for page in PAGES)
    archive, table = next((a, t) for a, t in MARKED.findall(text) if t.startswith("|"))
    intact = list(printed(table))
    row, (first, *_) = intact[0]
    digit = first[-1]
    other = str((int(digit) + 5) % 10)
    assert wrong(archive, table.replace(first, first[:-1] + other, 1)) != []
    label = next(other for other, _ in intact if other != row)
    lines = [line for line in table.splitlines() if line.startswith(f"| {row} |")]
    assert wrong(archive, lines[0].replace(row, label)) != []


def test_shipped_pictures_have_the_hashes_of_the_manifest() -> None:
    named = set(re.findall(r"`\w+\.png` ([0-9a-f]{64})", (ROOT / "MANIFEST.md").read_text()))
    pictures = sorted((RESULTS / "figures").iterdir())
    assert pictures
    assert [p.name for p in pictures if sha256_file(p) not in named] == []
