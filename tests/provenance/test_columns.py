"""Files by column come back to the byte, and verify.py reads what they say."""

import io
import json
import tarfile
from pathlib import Path

import zstandard
from hypothesis import given
from hypothesis import strategies as st

from connector_tax.artifacts import paths
from connector_tax.provenance import verify
from connector_tax.provenance.archive import HEADER, decode, encode, fits, packed

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


def sizes(files: dict[str, bytes]) -> dict[str, int]:
    return {name: len(data) for name, data in files.items()}


@given(FILES)
def test_files_come_back_to_the_byte(lines: dict[str, list[bytes]]) -> None:
    files = {name: b"".join(line + b"\n" for line in of) for name, of in lines.items()}
    assert all(map(fits, files.values()))
    assert decode(encode(files), sizes(files)) == files


def test_numbers_of_every_form_and_a_column_that_rises_come_back() -> None:
    lines = [
        *(b'{"t_ns":%d,"us":%d.50}' % (585793010000 + 7 * k, k) for k in range(50)),
        b'{"t_ns":null,"us":-0}', b'{"t_ns":007,"us":1e-7}', b'{"n":%d}' % 10**40,
    ]  # fmt: skip
    files = {"x": b"\n".join(lines) + b"\n"}
    assert decode(encode(files), sizes(files)) == files
    assert b"\n+585793010000 7 7 7" in encode(files)


def test_a_file_without_a_last_line_break_or_with_a_nul_does_not_fit() -> None:
    assert not fits(b"{}")
    assert not fits(b'{"a":"\0"}\n')


def test_verify_py_reads_the_same_lines(tmp_path: Path) -> None:
    rows = [{"t_ns": 10**11 + k, "us": k / 10, "of": "Grüße 7", "reads": [k, 3]} for k in range(9)]
    text = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
    (tmp_path / "tables").mkdir()
    (tmp_path / "tables" / "requests").write_bytes(encode({"a": text.encode(), "b": b"{}\n"}))
    assert verify.read_table(tmp_path, "requests") == {"a": rows, "b": [{}]}


def test_an_archive_has_a_table_of_each_kind_of_log() -> None:
    name = "runs/plain/block0/A/r1/{}_A_r1.jsonl"
    files = {name.format(kind): b'{"t_ns":7}\n' for kind in paths.ALL_LOGS}
    content = zstandard.ZstdDecompressor().decompressobj().decompress(packed({}, files))
    with tarfile.open(fileobj=io.BytesIO(content)) as tar:
        head = tar.extractfile(HEADER)
        assert head is not None
        tables = json.load(head)["tables"]
    kinds = {table: entry["files"] for table, entry in tables.items()}
    assert kinds == {f"tables/{kind}": [name.format(kind)] for kind in paths.ALL_LOGS}
