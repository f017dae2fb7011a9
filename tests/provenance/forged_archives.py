"""Make archives that no packer would write: members, lists and tables changed by hand."""

import hashlib
import io
import json
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import zstandard

Members = list[tuple[tarfile.TarInfo, bytes]]
Edit = Callable[[Members, dict[str, Any]], None]


def members_of(packed: Path) -> Members:
    data = zstandard.ZstdDecompressor().stream_reader(io.BytesIO(packed.read_bytes())).read()
    with tarfile.open(fileobj=io.BytesIO(data)) as tar:
        return [(info, tar.extractfile(info).read()) for info in tar]  # type: ignore[union-attr]


def write_archive(target: Path, members: Members, tail: bytes = b"") -> Path:
    stream = io.BytesIO()
    with tarfile.open(fileobj=stream, mode="w", format=tarfile.USTAR_FORMAT) as tar:
        for info, data in members:
            tar.addfile(info, io.BytesIO(data))
    target.write_bytes(zstandard.ZstdCompressor().compress(stream.getvalue() + tail))
    return target


def forged(packed: Path, target: Path, edit: Edit) -> Path:
    """Return the archive with members and header changed; the header is written back."""
    members = members_of(packed)
    header = json.loads(members[0][1])
    edit(members, header)
    if members[0][0].name == "archive.json":
        data = json.dumps(header).encode()
        members[0][0].size = len(data)
        members[0] = (members[0][0], data)
    return write_archive(target, members)


def plain(name: str, data: bytes) -> tuple[tarfile.TarInfo, bytes]:
    info = tarfile.TarInfo(name)
    info.size = len(data)
    return info, data


def put(members: Members, member: tuple[tarfile.TarInfo, bytes]) -> None:
    """Add a member in its place: archive.json and study.json first, then by name."""
    members[2:] = sorted([*members[2:], member], key=lambda each: each[0].name)


def special(kind: bytes) -> Edit:
    def edit(members: Members, header: dict[str, Any]) -> None:
        info = tarfile.TarInfo(name := "runs/plain/block0/A/x")
        info.type, info.linkname = kind, "/etc/passwd"
        header["files"][name] = {"bytes": 0, "sha256": "0" * 64}
        put(members, (info, b""))

    return edit


def listed(name: str, data: bytes = b"x") -> Edit:
    """Return a listed member with the right size and hash, under a forbidden name."""

    def edit(members: Members, header: dict[str, Any]) -> None:
        header["files"][name] = sized(data)
        put(members, plain(name, data))

    return edit


def unlisted(name: str) -> Edit:
    return lambda members, _: members.append(plain(name, b"x"))


def grown(members: Members, _: dict[str, Any]) -> None:
    info, data = members[5]
    info.size = len(data) + 10_000_000
    members[5] = (info, data + bytes(10_000_000))


def twice(members: Members, _: dict[str, Any]) -> None:
    members.append(members[5])


def one_gone(members: Members, _: dict[str, Any]) -> None:
    del members[-1]


def other_content(members: Members, _: dict[str, Any]) -> None:
    info, data = members[-1]
    members[-1] = (info, bytes([data[0] ^ 1]) + data[1:])


def header_later(members: Members, _: dict[str, Any]) -> None:
    members.append(members.pop(0))


def in_header(*path: str, value: Any) -> Edit:
    """Change a value in archive.json."""
    return lambda _, header: put_value(header, path, value)


def in_study(*path: str | int, value: Any) -> Edit:
    """Return an edit that changes a value of study.json, and lists the new size and hash."""

    def edit(members: Members, header: dict[str, Any]) -> None:
        study = json.loads(members[1][1])
        put_value(study, path, value)
        whole_study(json.dumps(study).encode())(members, header)

    return edit


def put_value(content: Any, path: tuple[str | int, ...], value: Any) -> None:
    for key in path[:-1]:
        content = content[key]
    content[path[-1]] = value


def whole_study(data: bytes) -> Edit:
    def edit(members: Members, header: dict[str, Any]) -> None:
        members[1] = plain("study.json", data)
        header["files"]["study.json"] = sized(data)

    return edit


def sized(data: bytes) -> dict[str, Any]:
    return {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}


def other_table(content: bytes, only: str | None = None) -> Edit:
    """Replace the table of requests; `only` is the one file that it then holds."""

    def edit(members: Members, header: dict[str, Any]) -> None:
        name = "tables/requests"
        number = next(n for n, (info, _) in enumerate(members) if info.name == name)
        members[number] = plain(name, content)
        header["tables"][name] |= sized(content)
        if only is not None:
            for gone in {*header["tables"][name]["files"]} - {only}:
                del header["files"][gone]
            header["tables"][name]["files"] = [only]

    return edit


def columns(files: list[Any], shapes: list[str], *lines: bytes) -> bytes:
    """Return a table with these files and shapes, and with added lines."""
    return b"\n".join([json.dumps({"files": files, "shapes": shapes}).encode(), *lines])


def table_named(name: str) -> Edit:
    def edit(members: Members, header: dict[str, Any]) -> None:
        header["tables"][name] = sized(b"x") | {"files": []}
        members.append(plain(name, b"x"))

    return edit


def study_in_table(_: Members, header: dict[str, Any]) -> None:
    header["tables"]["tables/requests"]["files"].append("study.json")


def in_two_tables(_: Members, header: dict[str, Any]) -> None:
    requests, steps = (header["tables"][f"tables/{name}"] for name in ("requests", "engine_step"))
    steps["files"].append(requests["files"][0])
