"""A manifest can be read back, keeps other studies, and says once what all launches share."""

import subprocess
import sys
import time
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from connector_tax.config import ROOT
from connector_tax.files import ArtifactError
from connector_tax.provenance.manifest import (
    COLUMNS,
    LEFT_OUT,
    artifacts_sha256,
    merge,
    name_archive,
    parse,
    section,
    write_page,
)

Row = dict[str, str]

MARKS = st.sampled_from(list("-|\\<>u{} \r\n\x85\u2028\x1f\t"))
fields = st.text(st.one_of(MARKS, st.characters()), max_size=20)
row = st.lists(fields, min_size=len(COLUMNS), max_size=len(COLUMNS)).map(
    lambda values: dict(zip(COLUMNS, values, strict=True))
)


def shown(study: str, rows: list[Row]) -> list[Row]:
    """What a manifest tells of rows: the launch's folder and command follow or stand elsewhere."""
    return [
        {
            k: study if k == "study" else v
            for k, v in row.items()
            if k == "study" or k not in LEFT_OUT
        }
        for row in rows
    ]


@settings(max_examples=40)
@given(st.lists(row, max_size=4))
def test_rows_survive_being_written_and_parsed(rows: list[Row]) -> None:
    assert parse(merge("", "s", section("s", rows))) == shown("s", rows)


def test_what_all_launches_share_is_said_once() -> None:
    rows = [
        dict.fromkeys(COLUMNS, "x") | {"study": "s", "phase": "A", "block": block, "gpu": gpu}
        for block, gpu in (("0", "H20"), ("1", "H200"))
    ]
    text = section("s", rows)
    assert "- engine: x\n- vLLM: x\n" in text
    assert "| date (UTC) | configuration | block | phase | GPU | cells" in text
    assert "| x | x | 1 | A | H200 | x | x |\n" in text


@settings(max_examples=40)
@given(st.lists(row, min_size=1, max_size=2), st.lists(row, min_size=1, max_size=2))
def test_a_re_run_replaces_its_own_rows_only(first: list[Row], second: list[Row]) -> None:
    text = merge("", "b", section("b", first))
    text = merge(text, "a", section("a", second))
    assert parse(text) == [*shown("a", second), *shown("b", first)]
    again = merge(text, "b", section("b", second))
    assert parse(again) == [*shown("a", second), *shown("b", second)]
    assert merge(text, "a", section("a", second)) == text


def test_a_carriage_return_in_a_reason_is_read_back_from_the_file(tmp_path: Path) -> None:
    reason = "died:\rTraceback | <b>\u2028 - \\u{d}"
    rows = [dict.fromkeys(COLUMNS, "x") | {"reason": reason}]
    write_page(tmp_path, [row | {"study": "s"} for row in rows])
    text = (tmp_path / "manifest.md").read_text()
    assert parse(text) == shown("s", rows)
    assert len([line for line in text.splitlines() if line.startswith("| x")]) == 1


def test_the_file_is_updated_in_place(tmp_path: Path) -> None:
    archive = tmp_path / "x.tar.zst"
    archive.write_bytes(b"x")
    manifest = tmp_path / "MANIFEST.md"
    for name in ("b", "a", "b"):
        name_archive(manifest, name, archive, section(name, [dict.fromkeys(COLUMNS, "x")]))
    text = manifest.read_text()
    assert text.index("## a") < text.index("## b")
    assert text.count("Archive: `results/archive/x.tar.zst`, 1 bytes") == 2
    assert len(parse(text)) == 2
    files = {path.name for path in tmp_path.iterdir()}
    assert files == {"MANIFEST.md", ".MANIFEST.md.lock", "x.tar.zst"}


# Names the archive of so many studies, one after the other, once it is told to begin.
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
    name_archive(folder / "MANIFEST.md", name, folder / "x.tar.zst", section(name, [row]))
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
    """A process that has said its first line."""
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
    """Those of its rows; the file is not torn."""
    text = manifest.read_text(encoding="utf-8")
    assert text.count("<!-- study ") == text.count("<!-- end of study ")
    return [row["reason"] for row in parse(text)]


def test_two_processes_that_write_at_once_lose_nothing_and_tear_nothing(tmp_path: Path) -> None:
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


def test_a_process_that_is_killed_holds_the_manifest_no_longer(tmp_path: Path) -> None:
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


def test_a_table_written_before_a_column_existed_keeps_its_own_columns() -> None:
    older = {key: heading for key, heading in COLUMNS.items() if key != "adapters"}
    text = merge("", "new", section("new", [dict.fromkeys(COLUMNS, "x")]))
    lines = ["<!-- study old -->", "## old", "", "| " + " | ".join(older.values()) + " |"]
    lines += ["|" + " --- |" * len(older), "| " + " | ".join(["y"] * len(older)) + " |"]
    text = merge(text, "old", "\n".join([*lines, "<!-- end of study old -->", ""]))
    new = shown("new", [dict.fromkeys(COLUMNS, "x")])
    assert parse(text) == [*new, {"study": "old", **dict.fromkeys(older, "y")} | {"study": "y"}]


def test_a_launch_s_adapter_is_in_its_row_and_a_skipped_launch_has_none(audited: Path) -> None:
    rows = parse((audited / "results" / "synthetic" / "manifest.md").read_text())
    adapters = {row["status"]: row["adapters"] for row in rows}
    assert adapters == {"done": "connector_tax_cpu_adapter", "SKIPPED": ""}


def test_the_shipped_manifest_parses() -> None:
    rows = parse((ROOT / "MANIFEST.md").read_text())
    assert {row["study"] for row in rows} >= {"default"}
    assert all(set(row) <= set(COLUMNS) for row in rows)


def test_an_unknown_column_is_named() -> None:
    text = merge("", "s", section("s", [dict.fromkeys(COLUMNS, "x")]))
    with pytest.raises(ArtifactError, match="study s: unknown column 'colour'; allowed: date"):
        parse(text.replace("- LMCache:", "- colour:"))


def test_the_artifact_digest_sees_content_and_names(tmp_path: Path) -> None:
    (tmp_path / "a").write_text("1")
    digests = {artifacts_sha256(tmp_path)}
    (tmp_path / "a").write_text("2")
    digests.add(artifacts_sha256(tmp_path))
    (tmp_path / "a").rename(tmp_path / "b")
    digests.add(artifacts_sha256(tmp_path))
    assert len(digests) == 3
