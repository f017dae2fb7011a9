"""Records that stand in a table come out of it to the byte, or they stay as they are."""

import io
import json
import tarfile
from pathlib import Path
from typing import Any

import polars as pl
import pytest
import zstandard
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from connector_tax.artifacts import paths
from connector_tax.provenance.archive import HEADER, packed
from connector_tax.provenance.tables import decode, encode, read_table

keys = st.sampled_from(
    ["t_ns", "t_intended_ns", "t_send_ns", "seq", "us", "hooks", "ok", 'a{b="c"}']
)
leaves = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(0, 2**53),
    st.floats(allow_nan=False, allow_infinity=False),
    st.integers(0, 10**6).map(lambda n: n / 10),
    st.text(max_size=8),
    st.lists(st.lists(st.integers(0, 10**9), min_size=2, max_size=2), max_size=3),
)
lines = st.dictionaries(keys, leaves | st.dictionaries(keys, leaves, max_size=3), max_size=5)


def text(records: list[dict[str, Any]], spaced: bool) -> bytes:
    separators = (", ", ": ") if spaced else (",", ":")
    dumped = (json.dumps(r, separators=separators, ensure_ascii=False) for r in records)
    return "".join(f"{line}\n" for line in dumped).encode()


def decoded(table: bytes, sizes: dict[str, int], path: Path) -> dict[str, bytes]:
    path.write_bytes(table)
    return decode(read_table(path, 10**6), sizes)


# A busy machine draws slowly.
@settings(suppress_health_check=[HealthCheck.too_slow])
@given(st.lists(st.tuples(st.lists(lines, max_size=6), st.booleans()), min_size=1, max_size=3))
def test_what_is_in_the_table_comes_out_to_the_byte(
    tmp_path_factory: pytest.TempPathFactory, given_files: list[tuple[list[Any], bool]]
) -> None:
    files = {f"f{n}": text(records, spaced) for n, (records, spaced) in enumerate(given_files)}
    table, kept = encode(files)
    if kept:
        sizes = {name: len(data) for name, data in files.items()}
        restored = decoded(table, sizes, tmp_path_factory.getbasetemp() / "x.parquet")
        assert restored == {name: files[name] for name in kept}


STEP = {"t_ns": 10, "step_id": 1, "process": "scheduler", "step_duration_us": 252.2, "a": None}
REQUEST = {"seq": 0, "t_intended_ns": 10**12, "t_first_token_ns": 10**12 + 9, "ok": True}


def test_records_as_they_are_written_are_kept(tmp_path: Path) -> None:
    steps = [STEP | {"t_ns": 10 + n, "hooks_us": {"x": n / 10}} for n in range(5)]
    steps.append({**STEP, "hooks_us": None, "exact": 2410.7200000000003})
    reads = [[10**12 + 9, 1], [10**12 + 12, 1]]
    requests = [REQUEST | {"seq": n, "reads": reads} for n in range(3)] + [REQUEST | {"seq": 3}]
    files = {"steps": text(steps, False), "requests": text(requests, True)}
    table, kept = encode(files)
    assert sorted(kept) == ["requests", "steps"]
    assert decoded(table, dict.fromkeys(files, 10**6), tmp_path / "x") == files
    columns = pl.read_parquet(tmp_path / "x").columns
    assert "step_duration_us:e" in columns
    assert "hooks_us\tx:e" in columns


DEVICE = {"t_ns": 10**12, "step_id": 7, "t_start_ns": 10**12 + 5, "t_wait_ns": None, "kv_tokens": 3}


def test_an_archive_has_a_table_of_each_kind_of_log() -> None:
    name = "runs/plain/block0/A/r1/{}_A_r1.jsonl"
    lines = text([DEVICE, DEVICE | {"t_wait_ns": 10**12 + 9}], False)
    files = {name.format(kind): lines for kind in paths.ALL_LOGS}
    content = zstandard.ZstdDecompressor().decompressobj().decompress(packed({}, files))
    with tarfile.open(fileobj=io.BytesIO(content)) as tar:
        head = tar.extractfile(HEADER)
        assert head is not None
        tables = json.load(head)["tables"]
    kinds = {table: entry["files"] for table, entry in tables.items()}
    assert kinds == {f"tables/{kind}.parquet": [name.format(kind)] for kind in paths.ALL_LOGS}


@pytest.mark.parametrize(
    "data", [b"", b"{}", b"no json\n", b"[1]\n", b'{"a": 1 }\n', b'{"a":1e5}\n', b'{"a":1,"a":2}\n']
)
def test_what_a_table_cannot_give_back_is_left_out(data: bytes) -> None:
    assert encode({"x": data})[1] == []


def test_more_than_is_listed_is_refused(tmp_path: Path) -> None:
    table, _ = encode({"x": text([STEP] * 50, False)})
    with pytest.raises(ValueError, match="x: more than the 100 bytes that are listed"):
        decoded(table, {"x": 100}, tmp_path / "x")
    with pytest.raises(ValueError, match=r"50 rows of \d+ columns; allowed: 99 values"):
        read_table(tmp_path / "x", 99)
