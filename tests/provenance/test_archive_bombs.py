"""Small hostile archives are refused within 30 s of CPU time and 1 GiB of memory."""

import json
import re
import subprocess
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest

from connector_tax.artifacts import paths
from connector_tax.artifacts.study_file import every_launch
from connector_tax.config import ROOT
from connector_tax.provenance.archive import FORMAT, HEADER, REQUIRED, read_head
from tests.provenance.forged_archives import columns, plain, sized, write_archive

CPU_S, MEMORY_KIB = 30, 1 << 20
LOG = "runs/plain/block0/A/r40/requests_A_r40.jsonl"
TABLE = "tables/requests"
DEFAULT = read_head(ROOT / "results" / "archive" / "default.tar.zst")
STUDY = json.dumps(DEFAULT).encode()
INDEXES = [(launch.folder(Path()) / paths.INDEX).as_posix() for launch in every_launch(DEFAULT)]


def write(
    path: Path,
    files: dict[str, bytes],
    tables: dict[str, bytes],
    logs: dict[str, int],
    header: bytes = b"",
) -> None:
    """Write an archive with these files and tables, and with logs that the header assigns to a
    table.

    Args:
        header: replaces the content of archive.json.
    """
    files = dict.fromkeys((*REQUIRED, *INDEXES), b"{}") | {paths.STUDY: STUDY} | files
    listed = {name: sized(data) for name, data in files.items()}
    listed |= {name: {"bytes": size, "sha256": "0" * 64} for name, size in logs.items()}
    head: dict[str, Any] = {"format": FORMAT, "study": "default", "files": listed}
    head["tables"] = {name: sized(data) | {"files": [*logs]} for name, data in tables.items()}
    study = files.pop(paths.STUDY)
    members = [(HEADER, header or json.dumps(head).encode()), (paths.STUDY, study)]
    members += sorted({**files, **tables}.items())
    write_archive(path, [plain(name, data) for name, data in members])


def entries(count: int) -> bytes:
    """Return an archive.json that lists `count` files without size and hash."""
    listed = ",".join(f'"runs/{number}":{{}}' for number in range(count))
    return f'{{"format":"{FORMAT}","study":"default","tables":{{}},"files":{{{listed}}}}}'.encode()


def table_of(count: int, shapes: Iterable[str], *lines: bytes) -> dict[str, bytes]:
    return {TABLE: columns([[LOG, count]], [*shapes], *lines)}


def companions_of(count: int) -> bytes:
    """Return a study.json with `count` values, each of a type that is not allowed there."""
    study = json.loads(STUDY)
    study["configurations"][0]["companions"] = {"store": [0] * count}
    return json.dumps(study).encode()


def ordered(*launches: dict[str, Any]) -> bytes:
    """Return a study.json whose run order has these launches too."""
    study = json.loads(STUDY)
    study["run_order"]["A"] += launches
    return json.dumps(study).encode()


MANY = 30_000_000
BOMBS: dict[str, tuple[Callable[[], dict[str, Any]], str]] = {
    "entries without a size": (
        lambda: {"header": entries(400_000)}, r"files\.runs/\d+\.sha256: missing"),
    "too large a list": (
        lambda: {"header": entries(4_000_000)}, "archive.json has .* bytes; allowed: 16,777,216"),
    "objects in a list": (
        lambda: {"header": b'{"x":[' + b"{}," * 5_000_000 + b"{}]}"}, "format: missing"),
    "unknown keys": (
        lambda: {"header": b"{%s}" % b",".join(b'"a%d":1' % n for n in range(1_000_000))},
        "format: missing"),
    "a value that no form fits": (
        lambda: {"files": {"study.json": companions_of(5_000_000)}},
        r"companions.store: found \[0, 0"),
    "a launch without files": (
        lambda: {"files": {"study.json": ordered({"config": "plain", "block": 77})}},
        "run_order: found plain/block77/A: archive.json lists no runs/plain/block77/A/index.json"),
    "a launch twice": (
        lambda: {"files": {"study.json": ordered({"config": "plain", "block": 0})}},
        "run_order: found plain/block0/A: twice"),
    "empty lines": (
        lambda: {"tables": table_of(MANY, [""], b"0 " * MANY), "logs": {LOG: MANY}},
        "too many numbers"),
    "numbers": (
        lambda: {"tables": table_of(1, ["\0"], b"0", b"=" + b"7 " * MANY), "logs": {LOG: MANY}},
        "too many numbers"),
    "columns": (
        lambda: {"tables": table_of(1, ["\0" * 3_000_000], b"0", *[b"=7"] * 3_000_000),
                 "logs": {LOG: MANY}},
        r"columns \(3,000,000\)"),
    "shapes": (
        lambda: {"tables": table_of(1, [""] * 3_000_000, b"0"), "logs": {LOG: MANY}},
        "too many shapes"),
    "as many lines as allowed": (
        lambda: {"tables": table_of(4_100_000, [""], b"0 " * 4_100_000),
                 "logs": {LOG: 60_000_000}},
        "sha256 is not"),
    "as many columns as allowed, all begun": (
        lambda: {"tables": table_of(1, ["\0" * 32_000], b"0", *[b"=" + b"7 " * 128] * 32_000),
                 "logs": {LOG: 60_000_000}},
        "sha256 is not"),
    "deep folders": (
        lambda: {"files": {f"runs/{n}{'/x' * 97}": b"" for n in range(900)}},
        "has no place in a study"),
    "files": (
        lambda: {"files": {f"runs/{n}": b"" for n in range(50_000)}},
        rf"{50_000 + len(REQUIRED) + len(INDEXES):,} files; allowed for an archive of its size"),
}  # fmt: skip
# Run by a small process: the memory of its parent counts as the process's own.
UNPACK = """
import os, resource, sys
from pathlib import Path
child = os.fork()
if child == 0:
    resource.setrlimit(resource.RLIMIT_CPU, (int(sys.argv[3]),) * 2)
    from connector_tax.files import ArtifactError
    from connector_tax.provenance.archive import unpack
    try:
        unpack(Path(sys.argv[1]), Path(sys.argv[2]))
    except ArtifactError as error:
        print(error)
        os._exit(sys.stdout.flush() or 2)
    os._exit(0)
_, status, used = os.wait4(child, 0)
print(os.waitstatus_to_exitcode(status), used.ru_maxrss, used.ru_utime + used.ru_stime)
"""


@pytest.mark.workflow
@pytest.mark.parametrize("what", BOMBS)
def test_small_bomb_is_refused_in_bounded_time_and_memory(tmp_path: Path, what: str) -> None:
    content, message = BOMBS[what]
    path, out = tmp_path / "bomb.tar.zst", tmp_path / "out" / "x"
    write(path, **{"files": {}, "tables": {}, "logs": {}} | content())
    assert path.stat().st_size < 4 << 20
    command = [sys.executable, "-c", UNPACK, str(path), str(out), str(CPU_S)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    told, _, numbers = done.stdout.strip().rpartition("\n")
    status, memory_kib, _ = numbers.split()
    assert int(status) == 2, done
    assert re.search(message, told), told
    assert len(told) < 10_000
    assert int(memory_kib) < MEMORY_KIB
    assert [*out.parent.iterdir()] == []


WORK = """
import sys
import numpy as np
from connector_tax import commands
commands.CPU_S = 0.2
def endless(_):
    while True:
        pass
def large(_):
    np.ones(1 << 28)
def small(_):
    print("done")
parser = commands.study_parser("x", "")
sys.exit(commands.run_command(parser, sys.argv[2:], globals()[sys.argv[1]]))
"""


# Uses the CPU time of the limit before the limit begins.
LIMITED = """
import sys, time
from importlib import import_module
from connector_tax import commands
commands.CPU_S, commands.CPU_S_PER_MB = -1.0, 0.0
main = import_module(sys.argv[1]).main
while time.process_time() < 3:
    pass
sys.exit(main(sys.argv[2:]))
"""


@pytest.mark.workflow
@pytest.mark.parametrize(
    ("module", "status", "arguments"),
    [
        ("connector_tax.compare.__main__", 2, [str(ROOT / "results/archive/default.tar.zst")]),
        ("connector_tax.compare.gate", 3, ["--max=5%", "--config=noop_connector"]),
    ],
)
def test_compare_and_gate_are_bounded_by_the_archives_size(
    packed: Path, tmp_path: Path, module: str, status: int, arguments: list[str]
) -> None:
    command = [sys.executable, "-c", LIMITED, module, str(packed), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, cwd=tmp_path)
    assert done.returncode == status, done
    assert f"{packed}: its archive of" in done.stderr
    assert "took more than -1 s of CPU time" in done.stderr


@pytest.mark.parametrize(
    ("work", "status", "message"),
    [
        (
            "endless",
            2,
            "study.json: its archive of 0.0 MB took more than 0 s of CPU time, the limit",
        ),
        ("large", 2, "study.json: takes too much memory for its archive's size\n"),
        ("small", 0, "done\n"),
    ],
)
def test_commands_on_an_unpacked_archive_have_limits_from_the_archives_size(
    tmp_path: Path, work: str, status: int, message: str
) -> None:
    (tmp_path / paths.ORIGIN).write_text("0123  an archive.tar.zst 123\n")
    command = [sys.executable, "-c", WORK, work, "--study", str(tmp_path / "study.json")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == status, done
    assert message in done.stdout + done.stderr
