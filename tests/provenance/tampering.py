"""Ways to change a study that passes the audit: numbers, records, hashes made to fit again."""

import base64
import csv
import io
import json
import re
from collections.abc import Callable
from pathlib import Path

from connector_tax.artifacts.study_file import load_study
from connector_tax.figures.tables import StudyTables
from connector_tax.files import sha256_json
from connector_tax.provenance import audit
from connector_tax.provenance.claims import FAIL, Claim, Ledger
from connector_tax.provenance.remade import check_remade
from connector_tax.report.page import render
from connector_tax.study.design import measured_design
from tests.provenance.audited_study import (
    edited_json,
    edited_lines,
    replace,
    seal,
    seal_manifest,
)

Tamper = Callable[[Path], None]
NOOP_CELL = "runs/noop_connector/block0/A/r40"
PLAIN_CELL = "runs/plain/block0/A/r40"
CELLS, EFFECTS = "analysis/cells.csv", "analysis/effects.csv"
INDEX = "runs/noop_connector/block0/A/index.json"


def failures(study_file: Path, made: Path | None = None) -> list[Claim]:
    """The claims that fail.

    Args:
        made: everything derived, made again of the study before it was changed; None: such claims
            are left out.
    """
    ledger = Ledger()
    with ledger.guarded("study", "study.json"):
        study = load_study(study_file)
        audit.check_study(study, study_file.parents[2] / "MANIFEST.md", ledger)
    if made is not None:
        check_remade(study_file.parent, made, ledger)
    return [claim for claim in ledger.claims if claim.verdict == FAIL]


def csv_field(
    name: str, column: str, value: str, row: int = 0, given: bool = True, **where: str
) -> Tamper:
    """Change a field of the n-th row that has a value there, or has none, and matches `where`."""

    def tamper(root: Path) -> None:
        path = root / name
        table = list(csv.DictReader(io.StringIO(path.read_text())))
        matching = [
            r
            for r in table
            if bool(r[column]) == given and all(r[k] == v for k, v in where.items())
        ]
        assert matching[row][column] != value
        matching[row][column] = value
        replace(path, _csv(table))

    return tamper


def columns_gone(name: str, *columns: str) -> Tamper:
    def tamper(root: Path) -> None:
        table = list(csv.DictReader(io.StringIO((root / name).read_text())))
        replace(root / name, _csv([{k: r[k] for k in r if k not in columns} for r in table]))

    return tamper


def csv_row_twice(name: str) -> Tamper:
    def tamper(root: Path) -> None:
        table = list(csv.DictReader(io.StringIO((root / name).read_text())))
        replace(root / name, _csv([*table, table[3]]))

    return tamper


def list_entry_gone(name: str, *path: str) -> Tamper:
    def tamper(root: Path) -> None:
        with edited_json(root / name) as content:
            for key in path:
                content = content[key]
            del content[-1]

    return tamper


def add_key(name: str, key: str, value: str) -> Tamper:
    def tamper(root: Path) -> None:
        with edited_json(root / name) as content:
            content[key] = value

    return tamper


def report_text(pattern: str, text: str) -> Tamper:
    def tamper(root: Path) -> None:
        old = (root / "report.html").read_text()
        new, count = re.subn(pattern, text, old, flags=re.DOTALL)
        assert count
        replace(root / "report.html", new)

    return tamper


def relabelled(root: Path) -> None:
    """A measurement of the embedded engine that says it is one of vLLM, everywhere."""
    label = "real vLLM, H20"
    with edited_json(root / "study.json") as study:
        study["engine_label"] = study["config"]["engine"]["label"] = label
        study["emulated"] = False
        design = measured_design(study["config"], study["configurations"])
        study["design_sha256"] = sha256_json(design)


def csv_row_gone(name: str) -> Tamper:
    def tamper(root: Path) -> None:
        table = list(csv.DictReader(io.StringIO((root / name).read_text())))
        replace(root / name, _csv(table[:-1]))

    return tamper


def _csv(table: list[dict[str, str]]) -> str:
    stream = io.StringIO()
    writer = csv.DictWriter(stream, list(table[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows(table)
    return stream.getvalue()


def json_value(name: str, *path: str | int, value: object) -> Tamper:
    def tamper(root: Path) -> None:
        with edited_json(root / name) as content:
            for key in path[:-1]:
                content = content[key]
            assert content[path[-1]] != value
            content[path[-1]] = value

    return tamper


def forged(cell: str, kind: str, change: Callable[[list[dict[str, object]]], None]) -> Tamper:
    """Change a cell's records and make every hash fit again."""

    def tamper(root: Path) -> None:
        with edited_lines(next((root / cell).glob(f"{kind}_*"))) as records:
            change(records)
        seal(root, root / cell)

    return tamper


def forged_record(cell: str, *path: str, value: object) -> Tamper:
    def tamper(root: Path) -> None:
        name = next((root / cell).glob("cell_*")).relative_to(root)
        json_value(str(name), *path, value=value)(root)
        seal(root, root / cell)

    return tamper


def set_in(number: int, key: str, value: object) -> Callable[[list[dict[str, object]]], None]:
    def change(records: list[dict[str, object]]) -> None:
        assert records[number][key] != value
        records[number][key] = value

    return change


def add_to(number: int, amount: int, *keys: str) -> Callable[[list[dict[str, object]]], None]:
    def change(records: list[dict[str, object]]) -> None:
        for key in keys:
            records[number][key] += amount  # type: ignore[operator]

    return change


def delete(number: int) -> Callable[[list[dict[str, object]]], None]:
    def change(records: list[dict[str, object]]) -> None:
        del records[number]

    return change


def delay_all(records: list[dict[str, object]]) -> None:
    for record in records:
        for key in list(record):
            if key.startswith("t_"):
                record[key] += 1_000_000  # type: ignore[operator]


def cache_hit(records: list[dict[str, object]]) -> None:
    name = 'vllm:prefix_cache_hits_total{engine="0"}'
    records[-1]["values"][name] = 16.0  # type: ignore[index]


def rename_requests(cell: str, attempt: str) -> Callable[[list[dict[str, object]]], None]:
    def change(records: list[dict[str, object]]) -> None:
        for number, record in enumerate(records):
            record["request_id"] = f"{cell.removeprefix('runs/')}/{attempt}/{number}"

    return change


def second_step(records: list[dict[str, object]]) -> None:
    records.insert(1, dict(records[0]))


def cut_off(root: Path) -> None:
    path = next((root / NOOP_CELL).glob("requests_*"))
    replace(path, path.read_text()[:-40])
    seal(root, root / NOOP_CELL)


def delete_request_unsealed(root: Path) -> None:
    with edited_lines(next((root / NOOP_CELL).glob("requests_*"))) as records:
        del records[7]


def swap_files(root: Path) -> None:
    """The other configuration's requests, under this one's name, all hashes fitting."""
    mine, other = (next((root / c).glob("requests_*")) for c in (NOOP_CELL, PLAIN_CELL))
    left, right = mine.read_text(), other.read_text()
    replace(mine, right)
    replace(other, left)
    seal(root, root / NOOP_CELL)
    seal(root, root / PLAIN_CELL)


def copy_request_id(root: Path) -> None:
    taken = json.loads(next((root / PLAIN_CELL).glob("requests_*")).read_text().split("\n")[0])
    forged(NOOP_CELL, "requests", set_in(3, "request_id", taken["request_id"]))(root)


def claim_validity(root: Path) -> None:
    """A cell with late requests that says it is valid."""
    late = [f"t_{n}_ns" for n in ("conn", "send", "headers", "first_token", "last_token", "done")]

    def change(records: list[dict[str, object]]) -> None:
        for number in range(25, len(records)):
            add_to(number, 300_000_000, *late)(records)

    forged(NOOP_CELL, "requests", change)(root)


def remove(name: str) -> Tamper:
    def tamper(root: Path) -> None:
        (root / name).unlink()

    return tamper


def removed_and_sealed(name: str) -> Tamper:
    def tamper(root: Path) -> None:
        (root / name).unlink()
        seal_manifest(root)

    return tamper


def no_skip_reason(root: Path) -> None:
    json_value("runs/mooncake_consumer/block0/A/index.json", "reason", value="")(root)
    seal_manifest(root)


def add_file(root: Path) -> None:
    (root / NOOP_CELL / "notes.txt").write_text("trust me\n")
    seal_manifest(root)


def other_launch_script(root: Path) -> None:
    path = root / "runs/noop_connector/block0/A/launch.sh"
    replace(path, path.read_text().replace("noop_connector", "plain"))
    seal_manifest(root)


def other_environment(root: Path) -> None:
    replace(root / "runs/plain/block0/A/env.txt", "other\n")
    seal_manifest(root)


def other_picture(root: Path) -> None:
    path = root / "figures" / "fig1_ttft_vs_rate.png"
    for kind in ("png", "svg"):
        data = path.with_suffix(f".{kind}").read_bytes()
        path.with_suffix(f".{kind}").unlink()
        path.with_suffix(f".{kind}").write_bytes(data + b"\n")


def other_picture_in_report(root: Path) -> None:
    path = root / "report.html"
    head = base64.b64encode(b"<svg").decode()[:4]
    text = path.read_text()
    start = text.index("base64,") + len("base64,")
    assert head
    replace(path, text[:start] + "AAAA" + text[start + 4 :])


def markdown_row(root: Path) -> None:
    path = root / "manifest.md"
    replace(path, path.read_text().replace("| 2/0/0/0 |", "| 9/0/0/0 |", 1))


def swap_cells(root: Path) -> None:
    cells = [root / "runs/noop_connector/block0/A" / name for name in ("r40", "r80")]
    cells[0].rename(cells[0].with_name("x"))
    cells[1].rename(cells[0])
    cells[0].with_name("x").rename(cells[1])


def labels_exchanged(root: Path) -> None:
    """Two configurations take each other's name, and everything derived is made again."""
    with edited_json(root / "study.json") as study:
        entries = {entry["id"]: entry for entry in study["configurations"]}
        one, other = entries["nixl_both"], entries["noop_connector"]
        for key in ("label", "purpose"):
            one[key], other[key] = other[key], one[key]
    render_again(root)


def render_again(root: Path) -> None:
    replace(root / "report.html", render(StudyTables(root / "study.json")))


def planted(name: str) -> Tamper:
    return lambda root: replace(root / name, "x,y\n1,2\n")


def text_replaced(name: str, old: str, new: str) -> Tamper:
    def tamper(root: Path) -> None:
        text = (root / name).read_text()
        assert old in text
        replace(root / name, text.replace(old, new, 1))

    return tamper
