"""Test that archives are reproducible, round-trip, and are rejected if anything is wrong."""

import io
import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st

from connector_tax.artifacts import paths
from connector_tax.artifacts.tables import FIRST_METHOD
from connector_tax.compare.__main__ import main as compare_studies
from connector_tax.compare.gate import main as gate
from connector_tax.files import ArtifactError, read_json, sha256_file, write_json
from connector_tax.provenance import manifest, verify
from connector_tax.provenance import pack as packing
from connector_tax.provenance import remade as remade_module
from connector_tax.provenance.archive import (
    HEADER,
    Limits,
    decode,
    encode,
    fits,
    read_head,
    unpack,
)
from connector_tax.provenance.archive import packed as packed_bytes
from connector_tax.provenance.audit import audit
from connector_tax.provenance.audit import main as audit_study
from connector_tax.provenance.claims import FAIL, NOT_CHECKABLE, PASS, Claim
from connector_tax.provenance.pack import pack
from tests.provenance import forged_archives as by
from tests.provenance.forged_archives import Edit, Members
from tests.provenance.tampering import (
    NOOP_CELL,
    Tamper,
    csv_field,
    failures,
    other_picture,
    text_replaced,
)
from tests.provenance.tampering import planted as planted_file
from tests.study_folder import linked_copy, replace

REQUESTS = "runs/plain/block0/A/r40/requests_A_r40.jsonl"
NOT_PLAIN = "'runs/plain/block0/A/x': missing, out of order, or not a regular file of 0 bytes"
HOSTILE: dict[str, tuple[Edit, str]] = {
    "a path upwards": (by.listed("runs/../../../evil"), "has no place in a study"),
    "a path upwards, not listed": (by.unlisted("../evil"), "data behind the end"),
    "an absolute path": (by.listed("/etc/cron.d/evil"), "has no place in a study"),
    "a hidden file": (by.listed("runs/.bashrc"), "has no place in a study"),
    "a line break in a name": (by.listed("runs/a\nb"), "has no place in a study"),
    "an unknown place": (by.listed("bin/evil"), "has no place in a study"),
    **{
        f"a member of type {kind!r}": (by.special(kind), NOT_PLAIN)
        for kind in (
            tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.CHRTYPE, tarfile.BLKTYPE, tarfile.FIFOTYPE,
            tarfile.DIRTYPE, tarfile.XHDTYPE, tarfile.GNUTYPE_LONGNAME, tarfile.GNUTYPE_SPARSE,
        )
    },
    "a file where a folder is": (by.listed("runs/plain/block0/A"), "cannot be unpacked"),
    "a launch that is a path": (
        by.in_study("run_order", "A", 0, "config", value="/etc/cron.d/x"),
        "run_order.A.0..config: fo",
    ),
    "a launch that goes upwards": (
        by.in_study("run_order", "B", 1, "config", value="../../default/runs/plain"),
        "text matching",
    ),
    "a block that is a path": (
        by.in_study("run_order", "A", 0, "block", value="0/../.."),
        "allowed: integer",
    ),
    "a study with a line end": (by.in_header("study", value="synthetic\n"), "text matching"),
    "a cell with a line end": (
        by.in_study("cells", "A", 0, "cell", value="r40\n"), "text matching"),
    "a cell that is a path": (by.in_study("cells", "A", 0, "cell", value="../x"), "text matching"),
    "a study in study.json that is a path": (by.in_study("study", value="../x"), "text matching"),
    "a study without cells": (by.in_study("cells", value={}), "cells: found {}; allowed: at"),
    "a million blocks": (by.in_study("blocks", value=10**6), "allowed: <= 100"),
    "a study that is a list": (by.whole_study(b"[]"), "allowed: object"),
    "a study of brackets": (by.whole_study(b"[" * 200_000), "study.json"),
    "a table that is none": (by.other_table(b"PAR1" * 100), "member 'tables/requests'"),
    "a table of nothing": (by.other_table(by.columns([], [], b"")), "member 'tables/requests'"),
    "a table of another file": (
        by.other_table(by.columns([["study.json", 1]], ["{}"], b"0")),
        "its files differ from those that archive.json lists",
    ),
    "a table of huge lines": (
        by.other_table(by.columns([[REQUESTS, 10**6]], ["x" * 10**6], b"0 " * 10**6), REQUESTS),
        "more than the .* bytes that are listed",
    ),
    "a table without a column": (
        by.other_table(by.columns([[REQUESTS, 1]], ["\0" * 9], b"0"), REQUESTS),
        "member 'tables/requests'",
    ),
    "a table without a place": (by.table_named("tables/../x"), "is not a table of a study"),
    "the study in a table": (by.study_in_table, "'study.json' is not among the members"),
    "a file in two tables": (by.in_two_tables, "a file is in two tables"),
    "an oversized member": (by.grown, "not a regular file of"),
    "a member twice": (by.twice, "data behind the end"),
    "a member missing": (by.one_gone, "'verify.py': missing"),
    "another content": (by.other_content, "sha256 is not what archive.json says"),
    "a study name that is a path": (
        by.in_header("study", value="../../home"),
        "study: found .* allowed: text",
    ),
    "the name of another study": (
        by.in_header("study", value="another"),
        "archive.json says 'another'",
    ),
    "the list not first": (by.header_later, "first member is not archive.json"),
    "another format": (
        by.in_header("format", value="connector-tax archive 9"),
        "format: found .* allowed: one of",
    ),
    "a list that is none": (by.in_header("files", value=["study.json"]), "archive.json"),
}  # fmt: skip


def assert_refused(path: Path, folder: Path, message: str) -> None:
    """Check the error message, and that the target folder is still empty."""
    folder.mkdir()
    with pytest.raises(ArtifactError, match=re.escape(str(path))) as error:
        unpack(path, folder / "replot" / "x")
    assert re.search(message, str(error.value)), error.value
    assert [p for p in folder.rglob("*") if p.name != "replot"] == []


@pytest.mark.parametrize("what", HOSTILE)
def test_a_hostile_archive_is_refused(packed: Path, tmp_path: Path, what: str) -> None:
    edit, message = HOSTILE[what]
    path = by.forged(packed, tmp_path / "bad.tar.zst", edit)
    assert_refused(path, tmp_path / "here", message)


DAMAGE: dict[str, tuple[Callable[[bytes], bytes], str]] = {
    "one byte short": (lambda data: data[:-1], r"cut off after [\d,]+ bytes; copy it again"),
    "ten bytes of it": (lambda data: data[:10], "cut off after 10 bytes"),
    "empty": (lambda _: b"", "it is empty"),
    "no archive at all": (lambda _: b"PK\x03\x04" + bytes(1000), "not a zstd file"),
    "a tail": (lambda data: data + b"#!/bin/sh\n", "data behind its end"),
    "a second frame": (
        lambda data: data + zstandard.ZstdCompressor().compress(b"more"), "data behind its end"),
    "a skippable frame": (
        lambda data: data + b"\x50\x2a\x4d\x18\x04\x00\x00\x00evil", "data behind its end"),
    "a flipped byte": (
        lambda data: data[:-2000] + bytes([data[-2000] ^ 255]) + data[-1999:],
        "damaged|cut off|sha256"),
}  # fmt: skip


@pytest.mark.parametrize("what", DAMAGE)
def test_a_damaged_archive_is_refused(packed: Path, tmp_path: Path, what: str) -> None:
    damage, message = DAMAGE[what]
    path = tmp_path / "bad.tar.zst"
    path.write_bytes(damage(packed.read_bytes()))
    assert_refused(path, tmp_path / "here", message)


def test_truncated_archive_is_detected_at_every_length(packed: Path, tmp_path: Path) -> None:
    data = packed.read_bytes()
    path = tmp_path / "bad.tar.zst"
    for length in range(1, len(data), len(data) // 40):
        path.write_bytes(data[:length])
        with pytest.raises(ArtifactError, match="cut off"):
            unpack(path, tmp_path / "x")


@pytest.mark.parametrize(
    ("tail", "message"),
    [
        (bytes(512) + b"evil", "data behind the end of the tar archive"),
        (bytes(1 << 20), "data behind the end of the tar archive"),
        (bytes(1 << 30), "more than .* bytes in all"),
    ],
    ids=["content", "zeros", "many zeros"],
)
def test_data_behind_the_tar_is_refused(
    packed: Path, tmp_path: Path, tail: bytes, message: str
) -> None:
    path = by.write_archive(tmp_path / "bad.tar.zst", by.members_of(packed), tail=tail)
    assert path.stat().st_size < 2 * packed.stat().st_size + 100_000
    assert_refused(path, tmp_path / "here", message)


def test_text_with_a_secret_is_not_packed_and_its_place_is_named(
    audited: Path, tmp_path: Path
) -> None:
    root = linked_copy(audited, tmp_path / "copy") / "results" / "synthetic"
    log = root / "preflight" / "verify_kv_consumer.log"
    replace(log, "one\nDB_PASS=hunter2\n")
    with pytest.raises(ArtifactError, match=re.escape(f"{log}:2: found what looks")) as refused:
        packing.packed_study(root)
    assert "hunter2" not in str(refused.value)


def test_secret_that_a_server_quotes_in_an_error_is_not_packed(
    audited: Path, tmp_path: Path
) -> None:
    root = linked_copy(audited, tmp_path / "copy") / "results" / "synthetic"
    records = next(root.glob("runs/**/requests_*.jsonl"))
    first, *others = records.read_text().splitlines(keepends=True)
    quoted = first.replace('"error_detail": null', '"error_detail": "not allowed: DB_PASS=hunter2"')
    assert quoted != first
    replace(records, "".join([quoted, *others]))
    with pytest.raises(ArtifactError, match=re.escape(f"{records}:1: found what looks")) as refused:
        packing.packed_study(root)
    assert "hunter2" not in str(refused.value)


def test_killed_unpack_leaves_no_folder(packed: Path, tmp_path: Path) -> None:
    pipe, target = tmp_path / "archive.tar.zst", tmp_path / "replot" / "x"
    os.mkfifo(pipe)
    command = [sys.executable, "-m", "connector_tax.provenance.pack", "unpack"]
    process = subprocess.Popen([*command, "--archive", str(pipe), "--out", str(target)])
    data = packed.read_bytes()
    with pipe.open("wb") as stream:
        # A pipe holds less, so the process has read and unpacked the part that does not fit.
        stream.write(data[: len(data) - 1000])
        stream.flush()
        assert [path.name[:3] for path in target.parent.iterdir()] == [".x."]
        process.kill()
        process.wait()
    deadline = time.monotonic() + 20
    while list(target.parent.iterdir()) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert list(target.parent.iterdir()) == []


def test_archive_bomb_is_refused_before_it_fills_the_disk(packed: Path, tmp_path: Path) -> None:
    def edit(_: Members, header: dict[str, Any]) -> None:
        for number in range(20):
            header["files"][f"runs/zeros{number}"] = {"bytes": 50_000_000, "sha256": "0" * 64}

    path = by.forged(packed, tmp_path / "bad.tar.zst", edit)
    assert_refused(path, tmp_path / "here", "more than .* bytes in all")


@pytest.mark.long
def test_archive_of_the_same_study_has_the_same_bytes(
    audited: Path, packed: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "elsewhere"
    shutil.copytree(audited, folder)
    for path in folder.rglob("*"):
        path.chmod(0o755 if path.is_dir() else 0o600)
        os.utime(path, (1, 1))
    target = tmp_path / "again.tar.zst"
    pack(folder / "results" / "synthetic" / "study.json", folder / "MANIFEST.md", target)
    assert target.read_bytes() == packed.read_bytes()


def test_archive_round_trips(audited: Path, packed: Path, tmp_path: Path) -> None:
    target = tmp_path / "replot" / "synthetic"
    header = unpack(packed, target)
    source = audited / "results" / "synthetic"
    for path in source.glob("runs/**/*"):
        if path.is_file():
            assert sha256_file(target / path.relative_to(source)) == sha256_file(path)
    published = target / "published" / "analysis" / "effects.csv"
    assert published.read_bytes() == (source / "analysis" / published.name).read_bytes()
    assert header["files"].keys() == {
        p.relative_to(target).as_posix() for p in target.rglob("*") if p.is_file()
    } - {"archive.json", "archive.sha256"}
    assert [p.name for p in target.parent.iterdir()] == ["synthetic"]
    unpack(packed, target)
    assert read_head(packed) == read_json(source / "study.json")


@pytest.fixture(scope="module")
def replotted(audited: Path, packed: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the archive's unpacked study, with the tables and figures that `replot` makes."""
    folder = tmp_path_factory.mktemp("replotted")
    root, source = folder / "results" / "synthetic", audited / "results" / "synthetic"
    unpack(packed, root)
    shutil.copy(packed.with_name("MANIFEST.md"), folder)
    for tree in ("analysis", "figures"):
        linked_copy(source / tree, root / tree)
    shutil.copy(source / "report.html", root)
    return folder


def claims_of(root: Path) -> dict[str, Claim]:
    """Return the claims about a study that do not pass, by kind and subject."""
    ledger = audit(root / "study.json", root.parents[1] / "MANIFEST.md").ledger
    return {f"{c.kind} {c.subject}": c for c in ledger.claims if c.verdict != PASS}


def test_replotted_archive_passes_the_audit(replotted: Path) -> None:
    assert claims_of(replotted / "results" / "synthetic") == {}


LISTED, VIEWS = "archive files", "views figures, report.html"
# The change, the claim about the changed file, and the claim's verdict and message.
ARCHIVE_TAMPERING: dict[str, tuple[Tamper, str, str, str]] = {
    "README.md": (text_replaced("README.md", "#", "##"), LISTED, FAIL, "README.md: "),
    "verify.py": (text_replaced("verify.py", "import", "x"), LISTED, FAIL, "verify.py: "),
    **{
        f"{name} planted": (planted_file(name), LISTED, FAIL, f"{name} is not listed")
        for name in ("published/figures/x.png", "published/x.html")
    },
    "table planted": (
        planted_file("analysis/note.txt"), "made again tables of replot", FAIL, "note.txt: not a"),
    "forged published table": (
        csv_field("published/analysis/effects.csv", "estimate", "0.02"),
        "made again analysis/effects.csv", FAIL, "estimate: published 0.02",
    ),
    "forged picture": (
        other_picture, VIEWS, NOT_CHECKABLE, "fig1_ttft_vs_rate.png is not the published file"),
    "forged page": (
        text_replaced("report.html", "</h1>", "!</h1>"), VIEWS, NOT_CHECKABLE,
        "drawn by other code (or altered here); 1 of ",
    ),
    "picture planted": (
        planted_file("figures/fig99.png"), VIEWS, NOT_CHECKABLE,
        "fig99.png is not the published file",
    ),
}  # fmt: skip


@pytest.mark.workflow
@pytest.mark.parametrize("what", ARCHIVE_TAMPERING)
def test_changed_file_of_a_replotted_archive_is_named(
    replotted: Path, tmp_path: Path, what: str
) -> None:
    tamper, subject, verdict, message = ARCHIVE_TAMPERING[what]
    root = linked_copy(replotted, tmp_path / "copy") / "results" / "synthetic"
    tamper(root)
    claim = claims_of(root)[subject]
    assert claim.verdict == verdict
    assert message in claim.message


def test_archive_from_before_release_0_4_has_no_failing_claim(
    replotted: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Use a manifest that lists only launches, with report and figures' tables in published/."""
    root = linked_copy(replotted, tmp_path / "copy") / "results" / "synthetic"
    record, header = read_json(root / "manifest.json"), read_json(root / "archive.json")
    pictures = {n: sha256 for n, sha256 in record["files"].items() if n.endswith((".png", ".svg"))}
    header |= {"redrawn": pictures, "versions": {"connector-tax": "0.3.0", "drawing": "x"}}
    changed = ("published/report.html", "published/figures/fig12.csv", "README.md")
    for name in changed:
        planted_file(name)(root)
    replace(root / "manifest.json", json.dumps(record["launches"]))
    for name in (*changed, "manifest.json"):
        header["files"][name] = {"bytes": 0, "sha256": sha256_file(root / name)}
    write_json(root / "archive.json", header)
    page = root.parents[1] / "MANIFEST.md"
    named = r"^- (analysed by method|sha256 of the digests).*\n"
    replace(page, re.sub(named, "", page.read_text(), flags=re.M))
    claims = claims_of(root)
    assert FAIL not in {claim.verdict for claim in claims.values()}
    assert "report.html is not the published file" in claims[VIEWS].message
    csv_field("published/analysis/effects.csv", "estimate", "0.02")(root)
    monkeypatch.setattr(remade_module, "METHOD", FIRST_METHOD)
    assert claims_of(root)["made again analysis/effects.csv"].verdict == FAIL


def test_archive_with_a_file_that_only_a_measured_study_has_fails_the_audit(
    packed: Path, tmp_path: Path
) -> None:
    root = tmp_path / "results" / "synthetic"
    unpack(packed, root)
    shutil.copy(packed.with_name("MANIFEST.md"), tmp_path)
    planted_file("logs/replot.log")(root)
    assert failures(root / "study.json") == []
    for name in ("owners/plain.block0.A.json", "manifest.md"):
        planted_file(name)(root)
    (claim,) = failures(root / "study.json")
    assert "manifest.md is no file of a study; owners/plain.block0.A.json is no" in claim.message


def test_other_seal_or_picture_hash_in_manifest_md_fails_the_audit(
    packed: Path, tmp_path: Path
) -> None:
    root = tmp_path / "results" / "synthetic"
    unpack(packed, root)
    text = packed.with_name("MANIFEST.md").read_text()
    page = tmp_path / "MANIFEST.md"
    for pattern, subject in (("Seal: sha256 `", "MANIFEST.md"), ("`scorecard.png` ", "figures")):
        page.write_text(re.sub(rf"({pattern})\w{{64}}", rf"\g<1>{'0' * 64}", text))
        assert [claim.subject for claim in failures(root / "study.json")] == [subject]


def test_the_manifest_names_the_archive_and_its_pictures(packed: Path, tmp_path: Path) -> None:
    path = Path(shutil.copy(packed.with_name("MANIFEST.md"), tmp_path))
    text = path.read_text()
    pictures = packed.parent / "results" / "synthetic" / "figures"
    for picture in pictures.glob("*.png"):
        assert f"`{picture.name}` {sha256_file(picture)}" in text
    body = manifest.section_of(text, "synthetic")
    assert manifest.named(body, "Archive") == sha256_file(packed)
    page = (pictures.parent / "manifest.md").read_text()
    assert manifest.published_body(body) == manifest.section_of(page, "synthetic")


def test_unpack_does_not_replace_a_foreign_folder(packed: Path, tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.tex").write_text("\\documentclass{article}")
    with pytest.raises(ArtifactError, match=r"holds thesis\.tex"):
        unpack(packed, tmp_path / "mine")
    assert (tmp_path / "mine" / "thesis.tex").exists()


def test_a_study_that_fails_the_audit_is_not_archived(root: Path, tmp_path: Path) -> None:
    replace(root / NOOP_CELL / "requests_A_r40.jsonl", "x\n")
    changed = r"claims fail the audit:(.|\n)*requests_A_r40.jsonl changed"
    with pytest.raises(ArtifactError, match=changed):
        pack(root / "study.json", root.parents[1] / "MANIFEST.md", tmp_path / "x.tar.zst")
    assert not (tmp_path / "x.tar.zst").exists()


def test_archive_command_names_the_error(
    packed: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "bad.tar.zst"
    path.write_bytes(packed.read_bytes()[:-9])
    arguments = ["unpack", "--archive", str(path), "--out", str(tmp_path / "x")]
    assert packing.main(arguments) == 2
    assert "bad.tar.zst: refused: it is cut off" in capsys.readouterr().err
    assert packing.main(["unpack", "--archive", "nowhere", "--out", str(tmp_path / "x")]) == 2
    assert "nowhere" in capsys.readouterr().err


UNREADABLE: dict[str, Callable[[Path], object]] = {
    "no file": lambda _: None,
    "a folder": lambda path: path.mkdir(),
    "a link to nothing": lambda path: path.symlink_to("nothing"),
    "a link to itself": lambda path: path.symlink_to(path.name),
}
TOO_LONG = "a name too long"


@pytest.mark.parametrize("what", [*UNREADABLE, TOO_LONG])
def test_archive_that_cannot_be_opened_is_named_in_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], what: str
) -> None:
    path = tmp_path / f"{'x' * (300 if what == TOO_LONG else 1)}.tar.zst"
    if what != TOO_LONG:
        UNREADABLE[what](path)
    with pytest.raises(ArtifactError, match=re.escape(f"{path}: ")):
        read_head(path)
    out, page = str(tmp_path / "out"), str(tmp_path / "MANIFEST.md")
    bounds = ["--max=5%", "--config=noop_connector"]
    commands: list[tuple[Callable[[list[str]], int], list[str], int]] = [
        (packing.main, ["unpack", "--archive", str(path), "--out", out], 2),
        (audit_study, ["--study", str(path), "--manifest", page], 2),
    ]
    givens = (str(path), str(path.with_suffix("")))
    commands += [(compare_studies, [given, given, "--out", out], 2) for given in givens]
    commands += [(gate, [given, *bounds], 3) for given in givens]
    for command, arguments, status in commands:
        assert command(arguments) == status
        (line,) = capsys.readouterr().err.splitlines()
        assert path.name.removesuffix(".zst") in line
    assert not Path(out).exists()


# ---- lines by column

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=8,
)
LINES = st.builds(
    lambda value, unicode: json.dumps(value, ensure_ascii=not unicode).encode(),
    VALUES,
    st.booleans(),
) | st.binary().filter(lambda line: not {0, 10} & {*line})
FILES = st.dictionaries(st.text(), st.lists(LINES, min_size=1), max_size=4)


def decoded(table: bytes, files: dict[str, bytes]) -> dict[str, bytes]:
    return dict(decode(table, {name: len(data) for name, data in files.items()}, Limits.of(0)))


@given(FILES)
def test_logs_round_trip_byte_for_byte(lines: dict[str, list[bytes]]) -> None:
    files = {name: b"".join(line + b"\n" for line in of) for name, of in lines.items()}
    assert all(map(fits, files.values()))
    assert decoded(encode(files), files) == files


def test_all_number_forms_and_rising_columns_round_trip() -> None:
    lines = [
        *(b'{"t_ns":%d,"us":%d.50}' % (585793010000 + 7 * k, k) for k in range(50)),
        b'{"t_ns":null,"us":-0}', b'{"t_ns":007,"us":1e-7}', b'{"n":%d}' % 10**40,
    ]  # fmt: skip
    files = {"x": b"\n".join(lines) + b"\n"}
    assert decoded(encode(files), files) == files
    assert b"\n+585793010000 7 7 7" in encode(files)


def test_log_without_final_newline_or_with_nul_is_not_encoded() -> None:
    assert not fits(b"{}")
    assert not fits(b'{"a":"\0"}\n')


def test_verify_py_decodes_the_same_lines(tmp_path: Path) -> None:
    rows = [{"t_ns": 10**11 + k, "us": k / 10, "of": "Grüße 7", "reads": [k, 3]} for k in range(9)]
    text = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
    (tmp_path / "tables").mkdir()
    (tmp_path / "tables" / "requests").write_bytes(encode({"a": text.encode(), "b": b"{}\n"}))
    assert verify.read_table(tmp_path, "requests") == {"a": rows, "b": [{}]}


def test_archive_has_a_table_for_each_kind_of_log() -> None:
    name = "runs/plain/block0/A/r1/{}_A_r1.jsonl"
    files = {name.format(kind): b'{"t_ns":7}\n' for kind in paths.ALL_LOGS}
    content = zstandard.ZstdDecompressor().decompressobj().decompress(packed_bytes({}, files))
    with tarfile.open(fileobj=io.BytesIO(content)) as tar:
        head = tar.extractfile(HEADER)
        assert head is not None
        tables = json.load(head)["tables"]
    kinds = {table: entry["files"] for table, entry in tables.items()}
    assert kinds == {f"tables/{kind}": [name.format(kind)] for kind in paths.ALL_LOGS}
