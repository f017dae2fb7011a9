"""Test `make vllm-history`: lock, records, and one version from wheel to record."""

import hashlib
import json
import sys
import zipfile
from pathlib import Path

import pytest

from connector_tax.settings import history
from connector_tax.settings.history import (
    CAPACITY,
    CONNECTORS,
    FLAG,
    LOCK,
    RECORDS,
    Record,
    locks,
    record,
)
from connector_tax.settings.run import UnresolvedError
from tests.settings.test_settings import MESSAGES
from tests.shared import interpreter

VERSIONS = locks(LOCK.read_text())
HISTORY: dict[str, Record] = {
    path.stem: json.loads(path.read_text()) for path in RECORDS.glob("*.json")
}


def _minor(version: str) -> int:
    return int(version.split(".")[1])


def _row(version: str, connector: str) -> dict[str, object] | None:
    """Return a connector's row, with plain's settings for those that it does not change."""
    rows = {row["connector"]: row for row in HISTORY[version]["rows"]}
    if connector not in rows:
        return None
    return {**rows[connector], **rows["plain"]["settings"], **rows[connector]["settings"]}


# ---- the records


def test_lock_has_each_minor_version_with_hashes_and_a_record() -> None:
    assert [*map(_minor, VERSIONS)] == list(range(11, 34))
    assert HISTORY.keys() == VERSIONS.keys()
    assert all(lock.count("==") == lock.count("--hash=sha256:") for lock in VERSIONS.values())
    for version, found in HISTORY.items():
        assert found["vllm"]["version"].partition("+")[0] == version


@pytest.mark.parametrize("version", VERSIONS)
def test_hybrid_manager_follows_the_rule_of_the_vllm_version(version: str) -> None:
    minor = _minor(version)
    since = {"NixlConnector": 18, "SimpleCPUOffloadConnector": 19, "MooncakeConnector": 20,
             "OffloadingConnector": 21, "MooncakeStoreConnector": 22,
             "LMCacheMPConnector": 22}  # fmt: skip
    for connector in CONNECTORS:
        default, asked = _row(version, connector), _row(version, f"{connector} {FLAG}")
        if default is None or asked is None:
            continue
        supported = minor >= since.get(connector, 99)
        assert default["hybrid_manager"] is (supported and minor >= 22)
        if minor <= 12:
            assert asked["hybrid_manager"] is False
        else:
            assert asked["state"] == ("resolves" if supported else "refuses")


@pytest.mark.parametrize("version", VERSIONS)
def test_async_scheduling_is_on_from_0_14_with_and_without_a_connector(version: str) -> None:
    rows = [row for name in ("plain", *CONNECTORS) if (row := _row(version, name)) is not None]
    assert {row["async_scheduling"] for row in rows} == {_minor(version) >= 14}


@pytest.mark.parametrize("version", VERSIONS)
def test_switching_the_hybrid_manager_off_halves_the_blocks_of_gpt_oss(version: str) -> None:
    for row in HISTORY[version]["rows"]:
        if version.rpartition(".")[0] not in CAPACITY or row["state"] == "refuses":
            assert row["capacity"] == []
            continue
        (capacity,) = row["capacity"]
        if row["settings"].get("hybrid_manager", True):
            requests = 5.92 if _minor(version) >= 26 else 6.268
            assert (capacity["blocks"], capacity["requests"]) == (54613, requests)
        else:
            assert (capacity["blocks"], capacity["requests"]) == (27306, 3.333)


# ---- the command


def _wheel(folder: Path) -> str:
    """Write a wheel of vLLM 9.9.9 with a compiled file, and return its pin."""
    info = "vllm-9.9.9.dist-info"
    files = {
        "vllm/__init__.py": "",
        "vllm/_C.abi3.so": "compiled",
        f"{info}/METADATA": "Metadata-Version: 2.1\nName: vllm\nVersion: 9.9.9\n",
        f"{info}/WHEEL": "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        f"{info}/RECORD": "",
    }
    wheel = folder / "vllm-9.9.9-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        for name, content in files.items():
            archive.writestr(name, content)
    digest = hashlib.sha256(wheel.read_bytes()).hexdigest()
    return f"vllm==9.9.9 \\\n    --hash=sha256:{digest}\n"


def _vllm(folder: Path, version: str) -> str:
    """Return an interpreter that runs pip; for other programs it answers as a vLLM."""
    answers = folder / "answers.jsonl"
    head = MESSAGES[0] | {"version": version}
    answers.write_text("".join(json.dumps(m) + "\n" for m in [head, *MESSAGES[1:]]))
    script = f'''[ "$1" = -m ] && exec {sys.executable} "$@"
find "$PYTHONPATH" -name "*.*" -path "*vllm/*" > {folder}/packages
cat {answers} > "/proc/self/fd/$3"'''
    return str(interpreter(folder, script))


def test_version_is_unpacked_without_compiled_files_resolved_and_deleted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    pin = _wheel(tmp_path)
    found = record(_vllm(tmp_path, "9.9.9"), "9.9.9", pin)
    assert found["vllm"]["version"] == "9.9.9"
    assert found["rows"][0]["connector"] == "plain"
    (unpacked,) = (tmp_path / "packages").read_text().split()
    assert unpacked.endswith("/packages/vllm/__init__.py")
    assert not Path(unpacked).exists()
    with pytest.raises(UnresolvedError, match=r"vLLM 9\.9\.8 answers for 9\.9\.9"):
        record(_vllm(tmp_path, "9.9.8"), "9.9.9", pin)
    other = pin.replace("sha256:", "sha256:00", 1)[:-3] + "\n"
    with pytest.raises(UnresolvedError, match="pip download: status 1; vllm==9"):
        record(_vllm(tmp_path, "9.9.9"), "9.9.9", other)


def test_version_that_cannot_be_fetched_has_no_record(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(history, "RECORDS", tmp_path)
    monkeypatch.setattr(history, "own_python", lambda: str(interpreter(tmp_path, "exit 1")))
    assert history.main(["0.33.0"]) == 3
    assert "pip download: status 1; vllm==0.33.0" in capsys.readouterr().err
    assert not list(tmp_path.glob("*.json"))
