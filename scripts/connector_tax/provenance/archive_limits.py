"""What an archive may hold, and how much: nothing that comes from someone else is believed."""

import io
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any, BinaryIO

import zstandard

from connector_tax.artifacts import paths
from connector_tax.artifacts.study_records import StudyDocument
from connector_tax.files import ArtifactError

FORMAT = "connector-tax archive 3"
# Release 0.2 wrote the second: without verify.py and the report's text.
FORMAT_OF_0_2 = "connector-tax archive 2"
HEADER = "archive.json"
# Beside what was unpacked: of which archive it is.
ORIGIN = "archive.sha256"
README, VERIFY, CRATE = "README.md", "verify.py", "ro-crate-metadata.json"
PUBLISHED, WORKFLOW = "published", "workflow"
REPORT_TEXT = "report.txt"
# What lies beside a study that was unpacked.
BESIDE = (HEADER, ORIGIN, README, VERIFY, CRATE, PUBLISHED, WORKFLOW)
REQUIRED = (
    paths.STUDY,
    paths.ENVIRONMENT,
    paths.ENV_TEXT,
    paths.REFERENCE_RATES,
    paths.MANIFEST,
    paths.SEALS,
    README,
)
SINGLE = (*REQUIRED, paths.COMPLETE, paths.MODEL, paths.LOOKS, paths.ARGUMENTS, VERIFY, CRATE)
TREES = (paths.PREFLIGHT, paths.PATCH, paths.RUNS, PUBLISHED, WORKFLOW)
# What `connector-tax remeasure --all` keeps of an earlier design.
OLD_DESIGN = re.compile(r"(study|environment|env|model|preflight|patch)\.superseded\d+(\.\w+)?")
# An honest study is 15 to 40 times its archive.
FLOOR_BYTES = 64 << 20
MOST_TIMES = 200
MAX_WINDOW_BYTES = 1 << 27
# Compressed bytes at a time: each of them can be 32,768 bytes of content.
CHUNK_BYTES = 1 << 10
BLOCK, RECORD = 512, 10240
NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,99}")
STUDY_NAME = re.compile(r"[a-z0-9][a-z0-9._-]{0,63}")
SHA256 = re.compile(r"[0-9a-f]{64}")


class ArchiveError(ArtifactError):
    """An archive is refused; the text names it and says why."""


@dataclass(frozen=True, slots=True)
class ArchiveHeader:
    """archive.json, checked.

    Attributes:
        study: its name.
        files: size and SHA-256 of every file of the study, by name.
        members: the same of every other member.
        tables: the files that are made of a table, by the table's name.
    """

    study: str
    files: Mapping[str, tuple[int, str]]
    members: Mapping[str, tuple[int, str]]
    tables: Mapping[str, Sequence[str]]

    def tar_bytes(self, own: int) -> int:
        """The length of the whole tar archive, when archive.json itself has `own` bytes."""
        sizes = [own, *(size for size, _ in self.members.values())]
        blocks = sum(1 + -(-size // BLOCK) for size in sizes) + 2
        return -(-blocks * BLOCK // RECORD) * RECORD


def check_header(value: Mapping[str, Any], most_bytes: int) -> ArchiveHeader:
    """archive.json as a header.

    Raises:
        ValueError, KeyError, TypeError, AttributeError: it is not one.
    """
    if value["format"] not in (FORMAT, FORMAT_OF_0_2):
        raise ValueError(f"format is {value['format']!r}, this version reads {FORMAT!r}")
    if not STUDY_NAME.fullmatch(value["study"]):
        raise ValueError(f"study {value['study']!r} is no study name")
    tables = value.get("tables", {})
    files = {name: _entry(name, entry, most_bytes) for name, entry in value["files"].items()}
    members = dict(files)
    for table, entry in tables.items():
        if table not in [f"tables/{kind}.parquet" for kind in paths.ALL_LOGS]:
            raise ValueError(f"{table!r} is no table of a study")
        for name in entry["files"]:
            if members.pop(name, None) is None:
                raise ValueError(f"{name!r} is in no or in two tables, and not a file")
        members[table] = _entry(table, entry, most_bytes)
    for name in files:
        check_name(name)
    for listed in (files, members):
        if sum(size for size, _ in listed.values()) > most_bytes:
            raise ValueError(
                f"more than {most_bytes} bytes in all, which is {MOST_TIMES} times the archive"
            )
    missing = [name for name in REQUIRED if name not in members]
    if missing:
        raise ValueError(f"{missing[0]!r} is not among the members")
    return ArchiveHeader(
        value["study"], files, members, {t: list(e["files"]) for t, e in tables.items()}
    )


def _entry(name: str, entry: Mapping[str, Any], most_bytes: int) -> tuple[int, str]:
    size, digest = entry["bytes"], entry["sha256"]
    if type(size) is not int or not 0 <= size <= most_bytes:
        raise ValueError(f"member {name!r}: {size!r} bytes; allowed: up to {most_bytes}")
    if not SHA256.fullmatch(digest):
        raise ValueError(f"member {name!r}: {digest!r} is no SHA-256")
    return size, digest


def kind_of(name: str) -> str | None:
    """Which table the file is in; None for one that is in none."""
    file = name.rpartition("/")[2]
    fits = name.startswith("runs/") and file.endswith(".jsonl")
    return next((kind for kind in paths.ALL_LOGS if fits and file.startswith(f"{kind}_")), None)


def check_name(name: str) -> None:
    """Refuse a member name that is not one of a study's.

    Raises:
        ValueError: names it.
    """
    parts = PurePosixPath(name).parts
    plain = "/".join(parts) == name and all(NAME.fullmatch(part) for part in parts)
    known = name in SINGLE or OLD_DESIGN.fullmatch(parts[0]) or (parts[0] in TREES and parts[1:])
    if not plain or not known or len(name) > 200:
        raise ValueError(f"member {name!r} has no place in a study")


def readme(study: StudyDocument, form: str) -> str:
    """README.md of an archive of this format: what it is, and how to check it."""
    verify = f"""- `python {VERIFY}` computes percentiles, taxes and hypotheses anew from
  `tables/`, beside the published ones: one file to read; it needs pandas, scipy and pyarrow.
"""
    verify = "" if form == FORMAT_OF_0_2 else verify
    return f"""# Connector-tax study {study["study"]}

Engine: {study["engine_label"]}. Package {study["package_version"]}.
Design {study["design_sha256"]}.

- `runs/` raw records of every server launch, `published/` the tables and the numbers under each
  figure as they were published, `archive.json` the size and SHA-256 of every file.
- `tables/` holds the lines of `runs/*/*/*/*/*.jsonl` as parquet, a table for each kind of record;
  unpacked, each is a file again, to the byte. With the project's package installed,
  `python -c "from connector_tax.provenance.unpack import table; print(table('FILE', 'requests'))"`
  reads them.
{verify}\
- In a checkout of the project, `snakemake --cores 1 replot --config archive=FILE` checks every
  hash, redraws all figures and the report, and audits each published number against the raw
  records. It starts no server and needs no network.
"""


class Frame(io.RawIOBase):
    """The content of an archive's one zstd frame, up to a limit.

    Attributes:
        limit: how many bytes may be read in all; to be lowered once the list of members is known.
        total: how many were.
    """

    def __init__(self, archive: Path) -> None:
        try:
            self._file: BinaryIO = archive.open("rb")
        except OSError as error:
            raise ArchiveError(f"{archive}: {error.strerror}") from None
        self.archive = archive
        self.most_bytes = FLOOR_BYTES + MOST_TIMES * archive.stat().st_size
        self.limit = self.most_bytes
        self.total = 0
        decompressor = zstandard.ZstdDecompressor(max_window_size=MAX_WINDOW_BYTES)
        self._frame = decompressor.decompressobj()
        self._ready = bytearray()
        self._begun = False

    def close(self) -> None:
        """Close the file."""
        self._file.close()
        super().close()

    def readable(self) -> bool:
        """Yes."""
        return True

    def read(self, size: int = -1) -> bytes:
        """Exactly `size` bytes, fewer only at the end.

        Raises:
            ArchiveError: the file is damaged, cut off, goes on behind the frame, or holds more
                than `limit`.
        """
        while len(self._ready) < size and not self._frame.eof:
            data = self._file.read(CHUNK_BYTES)
            if not data:
                raise self.refused("it is cut off" if self._begun else "not a zstd file")
            try:
                content = self._frame.decompress(data)
            except zstandard.ZstdError as error:
                damage = f"the compressed data is damaged: {error}"
                raise self.refused(damage if self._begun else "not a zstd file") from None
            self._begun = self._begun or bool(content)
            self._ready += content
            if self._frame.eof and (self._frame.unused_data or self._file.read(1)):
                raise self.refused("there is data behind its end")
        data = bytes(self._ready[:size])
        del self._ready[:size]
        self.total += len(data)
        if self.total > self.limit:
            raise self.refused("there is data behind the end of the tar archive")
        return data

    def drain(self) -> bytes:
        """What is left, up to the end of the file."""
        return self.read(self.limit - self.total + 1)

    def refused(self, reason: str) -> ArchiveError:
        """The error that says so."""
        return ArchiveError(f"{self.archive}: refused: {reason}")
