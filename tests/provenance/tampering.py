"""Tamper with a study that passes the audit: change numbers and records, recompute hashes."""

import csv
import io
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from connector_tax.artifacts.folder import StudyFolder
from connector_tax.artifacts.names import Launch
from connector_tax.figures.tables import StudyTables
from connector_tax.files import read_json, sha256_json
from connector_tax.provenance import audit, manifest
from connector_tax.provenance.claims import FAIL, Claim, Ledger
from connector_tax.provenance.remade import check_claims, check_views
from connector_tax.report.page import render
from connector_tax.seals import read_links, seal_launch, seal_settings
from connector_tax.servers.kinds import ServerCommand
from connector_tax.study.design import measured_design
from connector_tax.study.launch import launch_title
from connector_tax.study.server_command import launch_script
from tests.study_folder import edited_json, edited_lines, replace, seal_cell

Lines = list[dict[str, Any]]
Change = Callable[[Lines], object]
Tamper = Callable[[Path], None]
NOOP_CELL = "runs/noop_connector/block0/A/r40"
PLAIN_CELL = "runs/plain/block0/A/r40"
LAUNCH = "runs/noop_connector/block0/A"
INDEX = f"{LAUNCH}/index.json"
CELLS, EFFECTS = "analysis/cells.csv", "analysis/effects.csv"
SEALS = "seals.jsonl"


def failures(study_file: Path) -> list[Claim]:
    """Return the failed claims, except those on derived files (`derived_failures`)."""
    ledger = Ledger()
    with ledger.guarded("study", "study.json"):
        study = StudyFolder.load(study_file)
        audit.check_study(study, study_file.parents[2] / "MANIFEST.md", ledger)
    return _failed(ledger)


def derived_failures(root: Path, made: Path) -> list[Claim]:
    """Return the failed claims on derived files; `made` holds the unchanged study's derived
    files."""
    ledger = Ledger()
    with ledger.guarded("made again", "study"):
        check_views(root, ledger)
        check_claims(StudyFolder.load(root / "study.json"), made, ledger)
    return _failed(ledger)


def _failed(ledger: Ledger) -> list[Claim]:
    return [claim for claim in ledger.claims if claim.verdict == FAIL]


# ---- any file


def remove(name: str) -> Tamper:
    return lambda root: (root / name).unlink()


def planted(name: str) -> Tamper:
    def tamper(root: Path) -> None:
        (root / name).parent.mkdir(exist_ok=True)
        replace(root / name, "x,y\n1,2\n")

    return tamper


def link(name: str, target: str) -> Tamper:
    def tamper(root: Path) -> None:
        (root / name).parent.mkdir(exist_ok=True)
        (root / name).unlink(missing_ok=True)
        (root / name).symlink_to(target)

    return tamper


def text_replaced(name: str, old: str, new: str) -> Tamper:
    def tamper(root: Path) -> None:
        text = (root / name).read_text()
        assert old in text
        replace(root / name, text.replace(old, new, 1))

    return tamper


def json_value(name: str, *path: str | int, value: object) -> Tamper:
    def tamper(root: Path) -> None:
        with edited_json(root / name) as content:
            for key in path[:-1]:
                content = content[key]
            assert content[path[-1]] != value
            content[path[-1]] = value

    return tamper


def key_twice(name: str, first: str) -> Tamper:
    """Insert `first`, a key with a value, before the same key in the file's first object."""

    def tamper(root: Path) -> None:
        text = (root / name).read_text()
        assert f"{first.partition(':')[0]}:" in text
        replace(root / name, text.replace("{", "{" + first + ",", 1))

    return tamper


def list_entry_gone(name: str, *path: str) -> Tamper:
    def tamper(root: Path) -> None:
        with edited_json(root / name) as content:
            for key in path:
                content = content[key]
            del content[-1]

    return tamper


# ---- what is made of the records


def table_changed(name: str, change: Callable[[list[dict[str, str]]], object]) -> Tamper:
    def tamper(root: Path) -> None:
        table = list(csv.DictReader(io.StringIO((root / name).read_text())))
        change(table)
        stream = io.StringIO()
        writer = csv.DictWriter(stream, list(table[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows(table)
        replace(root / name, stream.getvalue())

    return tamper


def csv_field(
    name: str, column: str, value: str, row: int = 0, given: bool = True, **where: str
) -> Tamper:
    """Change `column` in the n-th row that matches `where` and has a value there (`given`)."""

    def change(table: list[dict[str, str]]) -> None:
        matching = [
            r
            for r in table
            if bool(r[column]) == given and all(r[k] == v for k, v in where.items())
        ]
        assert matching[row][column] != value
        matching[row][column] = value

    return table_changed(name, change)


def columns_gone(name: str, *columns: str) -> Tamper:
    return table_changed(name, lambda table: [row.pop(c) for row in table for c in columns])


def csv_row_twice(name: str) -> Tamper:
    return table_changed(name, lambda table: table.append(table[3]))


def csv_row_gone(name: str) -> Tamper:
    return table_changed(name, list.pop)


def report_text(pattern: str, text: str) -> Tamper:
    def tamper(root: Path) -> None:
        old = (root / "report.html").read_text()
        new, count = re.subn(pattern, text, old, flags=re.DOTALL)
        assert count
        replace(root / "report.html", new)

    return tamper


def other_picture(root: Path) -> None:
    path = root / "figures" / "fig1_ttft_vs_rate.png"
    data = path.read_bytes()
    path.unlink()
    path.write_bytes(data + b"\n")


def other_picture_in_report(root: Path) -> None:
    path = root / "report.html"
    before, mark, picture = path.read_text().partition("base64,")
    replace(path, f"{before}{mark}AAAA{picture[4:]}")


def pictures_exchanged_in_report(root: Path) -> None:
    """Exchange the first two pictures of the report."""
    text = (root / "report.html").read_text()
    one, other = re.findall(r"data:image[^\s\"]+", text)[:2]
    assert one != other
    swapped = text.replace(one, "FIRST").replace(other, one).replace("FIRST", other)
    replace(root / "report.html", swapped)


def plain_picture_in_report(root: Path) -> None:
    """Replace the report's first picture with another, unencoded one."""
    text = (root / "report.html").read_text()
    replace(
        root / "report.html",
        re.sub(r"data:image[^\s\"]+", "data:image/svg+xml,%3C/%3E", text, count=1),
    )


def labels_exchanged(root: Path) -> None:
    """Exchange the labels of two configurations, and remake all derived files."""
    with edited_json(root / "study.json") as study:
        entries = {entry["id"]: entry for entry in study["configurations"]}
        one, other = entries["nixl_both"], entries["noop_connector"]
        for key in ("label", "purpose"):
            one[key], other[key] = other[key], one[key]
    replace(root / "report.html", render(StudyTables(root / "study.json")))


def relabelled(root: Path) -> None:
    """Label a measurement of the embedded engine as one of vLLM, everywhere."""
    label = "real vLLM, H20"
    with edited_json(root / "study.json") as study:
        study["engine_label"] = study["config"]["engine"]["label"] = label
        study["emulated"] = False
        design = measured_design(study["config"], study["configurations"])
        study["design_sha256"] = sha256_json(design)


# ---- records


def forged(cell: str, kind: str, change: Change) -> Tamper:
    """Change a cell's records and update the hashes of its launch."""

    def tamper(root: Path) -> None:
        with edited_lines(next((root / cell).glob(f"{kind}_*"))) as records:
            change(records)
        seal_cell(root / cell)

    return tamper


def records(kind: str, change: Change) -> Tamper:
    return forged(NOOP_CELL, kind, change)


def forged_record(cell: str, *path: str, value: object) -> Tamper:
    def tamper(root: Path) -> None:
        name = next((root / cell).glob("cell_*")).relative_to(root)
        json_value(str(name), *path, value=value)(root)
        seal_cell(root / cell)

    return tamper


def set_in(number: int, key: str, value: object) -> Change:
    def change(records: Lines) -> None:
        assert records[number][key] != value
        records[number][key] = value

    return change


def add_to(number: int, amount: int, *keys: str) -> Change:
    def change(records: Lines) -> None:
        for key in keys:
            records[number][key] += amount

    return change


def delete(number: int) -> Change:
    return lambda records: records.pop(number)


def delay_all(records: Lines) -> None:
    for record in records:
        for key in list(record):
            if key.startswith("t_"):
                record[key] += 1_000_000


def answered_earlier(records: Lines) -> None:
    """Let the requests of the window be answered 2 ms earlier."""
    for record in records:
        if not (record["warmup"] or record["cooldown"]):
            for key in ("t_headers_ns", "t_first_token_ns"):
                record[key] -= 2_000_000


def late(records: Lines) -> None:
    """Delay requests so much that the cell would not be valid."""
    keys = [f"t_{n}_ns" for n in ("conn", "send", "headers", "first_token", "last_token", "done")]
    for number in range(25, len(records)):
        add_to(number, 300_000_000, *keys)(records)


def shorter(name: str, share: float) -> Change:
    def change(lines: Lines) -> None:
        for line in lines:
            took = line[f"t_{name}_token_ns"] - line["t_send_ns"]
            line[f"t_{name}_token_ns"] = line["t_send_ns"] + int(share * took)

    return change


def rename_requests(cell: str, attempt: str) -> Change:
    def change(records: Lines) -> None:
        for number, record in enumerate(records):
            record["request_id"] = f"{cell.removeprefix('runs/')}/{attempt}/{number}"

    return change


def copy_request_id(root: Path) -> None:
    taken = json.loads(next((root / PLAIN_CELL).glob("requests_*")).read_text().split("\n")[0])
    records("requests", set_in(3, "request_id", taken["request_id"]))(root)


def cut_off(root: Path) -> None:
    path = next((root / NOOP_CELL).glob("requests_*"))
    replace(path, path.read_text()[:-40])
    seal_cell(root / NOOP_CELL)


def delete_request_unsealed(root: Path) -> None:
    with edited_lines(next((root / NOOP_CELL).glob("requests_*"))) as records:
        del records[7]


def swap_files(root: Path) -> None:
    """Replace a configuration's requests with another's, and recompute all hashes."""
    mine, other = (next((root / c).glob("requests_*")) for c in (NOOP_CELL, PLAIN_CELL))
    left, right = mine.read_text(), other.read_text()
    replace(mine, right)
    replace(other, left)
    seal_cell(root / NOOP_CELL)
    seal_cell(root / PLAIN_CELL)


def swap_cells(root: Path) -> None:
    cells = [root / LAUNCH / name for name in ("r40", "r80")]
    cells[0].rename(cells[0].with_name("x"))
    cells[1].rename(cells[0])
    cells[0].with_name("x").rename(cells[1])


def cache_hit(lines: Lines) -> None:
    (key,) = (k for k in lines[-1]["values"] if k.startswith("vllm:prefix_cache_hits_total"))
    lines[-1]["values"][key] = 16.0


def fewer_success(lines: Lines) -> None:
    for key in lines[-1]["values"]:
        if key.startswith("vllm:generation_tokens_total"):
            lines[-1]["values"][key] -= 1


def no_histogram(lines: Lines) -> None:
    for line in (lines[0], lines[-1]):
        line["raw"] = re.sub(r"vllm:e2e_request_latency.*\n", "", line["raw"])


def no_preemptions(lines: Lines) -> None:
    for line in lines:
        line["values"] = {k: v for k, v in line["values"].items() if "preemptions" not in k}


def every_other_step(lines: Lines) -> None:
    del lines[::2]


def faster_steps(lines: Lines) -> None:
    for line in lines:
        line["step_duration_us"] *= 0.5
        if line.get("engine_step_us") is not None:
            line["engine_step_us"] *= 0.5


def no_health(root: Path) -> None:
    with edited_json(next((root / NOOP_CELL).glob("cell_*"))) as record:
        del record["load_generator"]["processes"]["worker0"]["oversized"]
    seal_cell(root / NOOP_CELL)


# ---- launches, and the chain


def hidden_configuration(root: Path) -> None:
    """Hide a configuration with unwelcome numbers: claim that it did not pass its gate."""
    reason = "verify_nixl: not ready after 30 s"
    with edited_json(root / "preflight/preflight_status.json") as gates:
        gates["nixl_both"] |= {"include": False, "reason": reason}
    for index_file in root.glob("runs/nixl_both/block0/*/index.json"):
        with edited_json(index_file) as index:
            index |= {"status": "skipped", "reason": f"pre-flight: {reason}"}
            for entry in index["cells"]:
                entry |= {"status": "skipped", "reason": index["reason"], "files": {}}


def launch_gone(root: Path) -> None:
    """Remove a launch, from the design too."""
    with edited_json(root / "study.json") as study:
        study["run_order"]["Bp"] = [e for e in study["run_order"]["Bp"] if e["config"] != "plain_2"]


def other_command(change: Callable[[dict[str, Any]], object]) -> Tamper:
    """Change a launch's command consistently in config.json and launch.sh."""

    def tamper(root: Path) -> None:
        with edited_json(root / LAUNCH / "config.json") as config:
            change(config)
        command = ServerCommand(config["argv"], config["environment"])
        study = read_json(root / "study.json")
        title = launch_title(study, Launch("noop_connector", 0, "A"))
        replace(root / LAUNCH / "launch.sh", launch_script(command, title, "../.."))

    return tamper


def links(change: Change) -> Tamper:
    def tamper(root: Path) -> None:
        with edited_lines(root / SEALS) as chain:
            change(chain)

    return tamper


def last_links_gone(chain: Lines) -> None:
    del chain[-5:]


def other_margin_sealed(chain: Lines) -> None:
    chain[0]["settings"]["statistics"]["margins"]["ttft_p90"] = 0.5


def whole_chain_forged(root: Path) -> None:
    """Halve the steps and recompute every hash except MANIFEST.md's seal."""
    records("engine_step", faster_steps)(root)
    manifest.write(root / "study.json")
    seal_anew(root)


def resealed(*tampers: Tamper) -> Tamper:
    """Change a study, re-seal it from the first link, and remake the manifest."""

    def tamper(root: Path) -> None:
        for change in tampers:
            change(root)
        seal_anew(root)
        manifest.write(root / "study.json")

    return tamper


def seal_anew(root: Path) -> None:
    """Rebuild the chain from its first link for the present files."""
    names = [link.get("launch") for _, link in read_links(root)]
    indexes = {name: read_json(root / "runs" / name / "index.json") for name in names if name}
    for name in indexes:
        (root / "runs" / name / "index.json").unlink()
    (root / SEALS).unlink()
    seal_settings(root, read_json(root / "study.json"))
    for name, index in indexes.items():
        del index["seal"]
        seal_launch(root, name, root / "runs" / name / "index.json", index)
