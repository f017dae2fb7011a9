"""Record how each minor version of vLLM resolves connectors: `make vllm-history`.

One version at a time from envs/vllm-history/versions.lock is unpacked, without compiled files, over
the environment vllm-settings. It resolves the configuration of gpt-oss-20b's shape with each
connector, with and without the flag for the hybrid KV cache manager, and is then deleted. Some
versions resolve the KV cache too. The record is kept: docs/results/records/history/VERSION.json.
"""

import argparse
import re
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypedDict

from connector_tax.config import ROOT
from connector_tax.files import write_text
from connector_tax.settings import request as requests
from connector_tax.settings.__main__ import ENVIRONMENT_VARIABLES, lines, own_python
from connector_tax.settings.matrix import NOT_RESOLVED, Row, release_of, rows_of
from connector_tax.settings.request import Request
from connector_tax.settings.run import UnresolvedError, started
from connector_tax.vllm.environment import unpack_python_files

LOCK = ROOT / "envs" / "vllm-history" / "versions.lock"
RECORDS = ROOT / "docs" / "results" / "records" / "history"
MODEL = "gpt-oss-20b"
FLAG = "--no-disable-hybrid-kv-cache-manager"
CONNECTORS = (
    "NixlConnector",
    "MooncakeConnector",
    "OffloadingConnector",
    "SimpleCPUOffloadConnector",
    "MooncakeStoreConnector",
    "LMCacheConnectorV1",
    "LMCacheMPConnector",
    "ExampleConnector",
)
# Minor versions whose KV cache is resolved too.
CAPACITY = ("0.18", "0.24", "0.28", "0.32", "0.33")
_LMCACHE = re.compile(r"(Import|ModuleNotFound)Error: .* '?lmcache\.")
_VERSION = re.compile(r"^vllm(?:-cpu)?==([\w.]+)")


class Record(TypedDict):
    """The rows of one version; connectors that the version does not register have no row."""

    vllm: dict[str, Any]
    rows: list[Row]


def locks(text: str) -> dict[str, str]:
    """Return the pins of each version: vLLM, and packages whose versions depend on it."""
    lock_of: dict[str, str] = {}
    version = ""
    for entry in re.split(r"^(?=\w)", text, flags=re.MULTILINE)[1:]:
        if match := _VERSION.match(entry):
            version = match[1]
        lock_of[version] = lock_of.get(version, "") + entry
    return lock_of


def unpack(lock: str, python: str, folder: Path) -> None:
    """Unpack a lock's packages into a folder; from vLLM, only the Python files.

    Raises:
        UnresolvedError: a wheel cannot be fetched, or differs from the lock.
    """
    with tempfile.TemporaryDirectory() as name:
        wheels = Path(name)
        (wheels / "own.lock").write_text(lock, encoding="utf-8")
        command = [python, "-m", "pip", "download", "-qq", "--no-deps", "--only-binary", ":all:",
                   "--require-hashes", "-d", name, "-r", str(wheels / "own.lock")]  # fmt: skip
        if status := subprocess.run(command, check=False).returncode:
            raise UnresolvedError(f"pip download: status {status}; {lock.partition(' ')[0]}")
        for wheel in wheels.glob("*.whl"):
            if wheel.name.startswith("vllm"):
                unpack_python_files(wheel, folder)
            else:
                zipfile.ZipFile(wheel).extractall(folder)


def request_of(version: str, scratch: Path) -> Request:
    """Return the request that is resolved with a version."""
    connectors = [requests.connector(name) for name in CONNECTORS]
    cases = [requests.plain()]
    for case in connectors:
        cases += [case, {**case, "name": f"{case['name']} {FLAG}", "arguments": [FLAG]}]
    return {
        "gpu": "h200",
        "proof": requests.model(requests.PROOF, scratch),
        "models": [requests.model(MODEL, scratch)],
        "cases": cases,
        "every": False,
        "capacity": version.rpartition(".")[0] in CAPACITY,
        "kv_gib": 20.0,
        "lengths": [],
        "max_model_len": None,
        "tp": 1,
        "arguments": [],
        "packages": [],
        "environment": ENVIRONMENT_VARIABLES | {"CUDA_VISIBLE_DEVICES": ""},
    }


def record(python: str, version: str, lock: str) -> Record:
    """Return the settings that a vLLM version resolves, as rows.

    Raises:
        UnresolvedError: the version cannot be fetched or run, or leaves a row unresolved.
    """
    with tempfile.TemporaryDirectory(prefix="connector-tax-history-") as name:
        folder, scratch = Path(name, "packages"), Path(name, "models")
        for made in (folder, scratch):
            made.mkdir()
        unpack(lock, python, folder)
        with started(python, request_of(version, scratch), folder) as messages:
            head = next(messages)
            if release_of(head["version"]) != version:
                raise UnresolvedError(f"vLLM {head['version']} answers for {version}")
            second = next(messages)
            if second["kind"] == "missing":
                raise UnresolvedError(f"vLLM {version} lacks {'; '.join(second['names'])}")
            cells = (m for m in messages if m["kind"] == "cell" and not m.get("absent"))
            rows = [row for row in rows_of(cells) if not _lacks_lmcache(row)]
    for row in rows:
        if row["state"] == NOT_RESOLVED:
            raise UnresolvedError(
                f"vLLM {version}: {row['connector']}: {row['reason']} ({row['at']})"
            )
        row["notes"] = []
    return {"vllm": {key: value for key, value in head.items() if key != "kind"}, "rows": rows}


def _lacks_lmcache(row: Row) -> bool:
    """Return whether a row needs an earlier lmcache than the environment has."""
    return row["state"] == NOT_RESOLVED and bool(_LMCACHE.match(row["reason"]))


def main(argv: Sequence[str] | None = None) -> int:
    """Record the named versions, by default all of the lock."""
    by_version: Mapping[str, str] = locks(LOCK.read_text(encoding="utf-8"))
    parser = argparse.ArgumentParser(
        prog="python -m connector_tax.settings.history", description=main.__doc__
    )
    parser.add_argument("version", nargs="*", choices=[[], *by_version], metavar="VERSION")
    status = 0
    for version in parser.parse_args(argv).version or by_version:
        began = time.monotonic()
        try:
            result = record(own_python(), version, by_version[version])
        except UnresolvedError as error:
            print(f"vllm-history: {error}", file=sys.stderr)
            status = 3
            continue
        text = f'{{"vllm": {lines([result["vllm"]])},\n "rows": [\n  {lines(result["rows"])}]}}\n'
        write_text(RECORDS / f"{version}.json", text)
        print(f"{version}: {len(result['rows'])} rows in {time.monotonic() - began:.0f} s")
    return status


if __name__ == "__main__":
    sys.exit(main())
