"""Test that manifest rows stay whole, other studies are kept, and common values are listed once."""

import re
import subprocess
import sys
import time
from pathlib import Path

from hypothesis import given, settings
from hypothesis import strategies as st

from connector_tax.artifacts.folder import StudyFolder
from connector_tax.provenance.manifest import (
    COLUMNS,
    merge,
    name_archive,
    rows,
    section_of,
)
from connector_tax.provenance.manifest import section as section_of_record
from connector_tax.servers.vllm import CPU_ADAPTER
from tests.study_folder import edited_json

Row = dict[str, str]


def section(study: str, launches: list[Row], package: str | None = None) -> str:
    """Return the section of a study with these rows."""
    return section_of_record(
        study, {"method": 1, "package": package, "files": {}, "launches": launches}
    )


MARKS = st.sampled_from(list("-|\\<>u{} \r\n\x85\u2028\x1f\t"))
fields = st.text(st.one_of(MARKS, st.characters()), max_size=20)
row = st.lists(fields, min_size=len(COLUMNS), max_size=len(COLUMNS)).map(
    lambda values: dict(zip(COLUMNS, values, strict=True))
)


def cells(text: str) -> list[list[str]]:
    """Return the cells of a manifest's table rows."""
    lines = [line for line in text.split("\n") if line.startswith("|")]
    return [line.removeprefix("| ").removesuffix(" |").split(" | ") for line in lines]


@settings(max_examples=40)
@given(st.lists(row, min_size=1, max_size=4))
def test_field_text_cannot_end_its_cell_row_or_section(rows: list[Row]) -> None:
    text = merge("", "s", section("s", rows))
    assert section_of(text, "s") == section("s", rows)
    head, _, *table = cells(text)
    assert len(table) == len(rows)
    assert {len(line) for line in table} == {len(head)}
    assert text.count("<!--") == 2


def test_values_common_to_all_launches_are_listed_once() -> None:
    rows = [
        dict.fromkeys(COLUMNS, "x") | {"study": "s", "phase": "A", "block": block, "gpu": gpu}
        for block, gpu in (("0", "H20"), ("1", "H200"))
    ]
    text = section("s", rows)
    assert "- engine: x\n- vLLM: x\n" in text
    assert "| date (UTC) | configuration | block | phase | GPU | cells" in text
    assert "| x | x | 1 | A | H200 | x | x |\n" in text


def test_manifest_section_names_the_method_if_recorded() -> None:
    launches = [dict.fromkeys(COLUMNS, "x")]
    assert "- analysed by method: 1\n" in section("s", launches, "0.4")
    assert "method" not in section("s", launches)


@settings(max_examples=40)
@given(st.lists(row, min_size=1, max_size=2), st.lists(row, min_size=1, max_size=2))
def test_rerun_replaces_only_the_rows_of_its_study(first: list[Row], second: list[Row]) -> None:
    text = merge("", "b", section("b", first))
    text = merge(text, "a", section("a", second))
    again = merge(text, "b", section("b", second))
    assert section_of(again, "a") == section("a", second)
    assert section_of(again, "b") == section("b", second)
    assert merge(text, "a", section("a", second)) == text


def test_manifest_file_is_updated_in_place(tmp_path: Path) -> None:
    archive = tmp_path / "x.tar.zst"
    archive.write_bytes(b"x")
    manifest = tmp_path / "MANIFEST.md"
    for name in ("b", "a", "b"):
        name_archive(
            manifest, name, archive, section(name, [dict.fromkeys(COLUMNS, "x")]), {"p.png": "0"}
        )
    text = manifest.read_text()
    assert text.index("## a") < text.index("## b")
    assert text.count("Archive: `results/archive/x.tar.zst`, 1 bytes") == 2
    assert text.count("Pictures: `p.png` 0.") == 2
    assert len(cells(text)) == 6
    files = {path.name for path in tmp_path.iterdir()}
    assert files == {"MANIFEST.md", ".MANIFEST.md.lock", "x.tar.zst"}


# Names the archives of this many studies, one after the other, after a start signal.
WRITER = """
import sys
from pathlib import Path
from connector_tax.provenance.manifest import COLUMNS, name_archive, section
folder, prefix, count = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])
print("ready", flush=True)
sys.stdin.readline()
for number in range(count):
    name = f"{prefix}{number}"
    row = dict.fromkeys(COLUMNS, "x") | {"reason": name}
    record = {"method": 1, "package": None, "files": {}, "launches": [row]}
    name_archive(folder / "MANIFEST.md", name, folder / "x.tar.zst", section(name, record), {})
"""
HOLDER = """
import signal, sys
from pathlib import Path
from connector_tax.files import locked
with locked(Path(sys.argv[1]) / ".MANIFEST.md.lock"):
    print("held", flush=True)
    signal.pause()
"""


def started(script: str, *arguments: object) -> subprocess.Popen[str]:
    """Return a process that has printed its first line."""
    process = subprocess.Popen(
        [sys.executable, "-c", script, *map(str, arguments)],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert process.stdout is not None
    assert process.stdout.readline()
    return process


def begin(process: subprocess.Popen[str]) -> None:
    assert process.stdin is not None
    process.stdin.write("\n")
    process.stdin.flush()


def waits_for_a_lock(pid: int) -> bool:
    lines = Path("/proc/locks").read_text().splitlines()
    return any("->" in line and str(pid) in line.split() for line in lines)


def reasons(manifest: Path) -> list[str]:
    """Return the reasons in the file's rows; check that the file is whole."""
    text = manifest.read_text(encoding="utf-8")
    assert text.count("<!-- study ") == text.count("<!-- end of study ")
    return re.findall(r"^- reason: (.*)$", text, re.MULTILINE)


def test_concurrent_manifest_writers_lose_no_section(tmp_path: Path) -> None:
    (tmp_path / "x.tar.zst").write_bytes(b"x")
    manifest = tmp_path / "MANIFEST.md"
    writers = [started(WRITER, tmp_path, prefix, 15) for prefix in "ab"]
    for writer in writers:
        begin(writer)
    seen: set[str] = set()
    while any(writer.poll() is None for writer in writers):
        now = set(reasons(manifest)) if manifest.exists() else set()
        assert seen <= now
        seen = now
    assert [writer.wait() for writer in writers] == [0, 0]
    assert sorted(reasons(manifest)) == sorted(f"{p}{n}" for p in "ab" for n in range(15))
    assert not list(tmp_path.glob("*.tmp"))


def test_killed_process_releases_the_manifest_lock(tmp_path: Path) -> None:
    (tmp_path / "x.tar.zst").write_bytes(b"x")
    holder, writer = started(HOLDER, tmp_path), started(WRITER, tmp_path, "a", 1)
    begin(writer)
    while not waits_for_a_lock(writer.pid):
        assert writer.poll() is None
        time.sleep(0.01)
    assert not (tmp_path / "MANIFEST.md").exists()
    holder.kill()
    assert writer.wait(timeout=30) == 0
    holder.wait()
    assert reasons(tmp_path / "MANIFEST.md") == ["a0"]


def test_manifest_row_names_the_adapter_unless_the_launch_was_skipped(root: Path) -> None:
    for path in root.glob("runs/*/*/*/config.json"):
        with edited_json(path) as config:
            config["environment"]["PYTHONPATH"] += f":{CPU_ADAPTER}"
    adapters = {
        row["status"]: row["adapters"] for row in rows(StudyFolder.load(root / "study.json"))
    }
    assert adapters == {"done": "connector_tax_cpu_adapter", "SKIPPED": ""}
