"""Test that verify.py confirms every number of an archive and detects changes."""

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from connector_tax.config import ROOT
from connector_tax.provenance import verify
from connector_tax.provenance.archive import Limits, decode, encode
from tests.analysis.tables import edit_csv, one

ARCHIVE = ROOT / "results" / "archive" / "default.tar.zst"
CELL = "plain/block0/A/r40"
TABLE = "tables/requests"


@pytest.fixture(scope="module")
def unpacked(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("archive")
    subprocess.run(["tar", "--zstd", "-xf", ARCHIVE, "-C", folder], check=True)
    shutil.copy(verify.__file__, folder)
    return folder


def verified(folder: Path) -> subprocess.CompletedProcess[str]:
    """Run the folder's copy of verify.py, without this project's package."""
    command = [sys.executable, "-I", "-c", _ALONE, str(folder / "verify.py")]
    return subprocess.run(command, capture_output=True, text=True, check=False, cwd=folder)


Verified = Callable[[Path], str]


@pytest.fixture
def refuted(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Verified:
    """Return a function that runs verify.py, which must find differences; it returns the output."""

    def verify_here(folder: Path) -> str:
        monkeypatch.setattr(sys, "argv", ["verify.py", str(folder)])
        assert verify.main() == 1
        return capsys.readouterr().out

    return verify_here


@pytest.fixture
def refused(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Verified:
    """Return a function that runs verify.py, which must refuse the folder; it returns the error."""

    def verify_here(folder: Path) -> str:
        monkeypatch.setattr(sys, "argv", ["verify.py", str(folder)])
        with pytest.raises(SystemExit) as ended:
            verify.main()
        assert ended.value.code == 2
        return capsys.readouterr().err

    return verify_here


_ALONE = """
import runpy, sys
class Refused:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "connector_tax":
            raise ImportError(f"{name} is not to be imported")
sys.meta_path.insert(0, Refused())
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def changed(unpacked: Path, tmp_path: Path, name: str, *more: str) -> Path:
    """Copy these files of the folder, and link all others; return the path of `name`."""
    folder = tmp_path / "archive"
    shutil.copytree(unpacked, folder, copy_function=lambda a, b: Path(b).symlink_to(a))
    for own in (name, *more, "verify.py"):
        (folder / own).unlink()
        shutil.copy(unpacked / own, folder / own)
    return folder / name


def test_verify_recomputes_every_number_of_the_archive(unpacked: Path) -> None:
    result = verified(unpacked)
    assert result.returncode == 0, result.stdout + result.stderr
    assert " 0 differ." in result.stdout
    assert "DIFFERS" not in result.stdout
    assert max(len(line) for line in result.stdout.splitlines()) <= 100


def test_printed_command_runs_no_code_from_the_archive(tmp_path: Path) -> None:
    page = (ROOT / "docs" / "reviewers.md").read_text()
    (command,) = re.findall(r"`(mkdir X.*verify\.py X)`", page)
    unpacking, verifying = (
        command.replace("FILE", str(ARCHIVE))
        .replace(" X", f" {tmp_path / 'X'}")
        .replace(".venv/bin/python", sys.executable)
        .rsplit(" && ", 1)
    )
    subprocess.run(["bash", "-c", unpacking], check=True)
    for name in ("verify.py", "pandas.py", "json.py", "sitecustomize.py"):
        (tmp_path / "X" / name).write_text("print('planted')\nraise SystemExit(0)\n")
    environment = {**os.environ, "PYTHONPATH": str(tmp_path / "X")}
    result = subprocess.run(
        ["bash", "-c", verifying], capture_output=True, text=True, check=False, cwd=ROOT,
        env=environment,
    )  # fmt: skip
    assert result.returncode == 0, result.stdout + result.stderr
    assert "planted" not in result.stdout
    assert " 0 differ." in result.stdout


@pytest.mark.workflow
def test_shipped_archive_without_phase_b_passes_verification(tmp_path: Path) -> None:
    archive = ARCHIVE.with_name("emulated-controls.tar.zst")
    subprocess.run(["tar", "--zstd", "-xf", archive, "-C", tmp_path], check=True)
    result = verified(tmp_path)
    assert result.returncode == 0, result.stdout + result.stderr
    assert " 0 differ." in result.stdout


def test_changed_digit_of_a_published_tax_is_named(
    unpacked: Path, tmp_path: Path, refuted: Verified
) -> None:
    table = changed(unpacked, tmp_path, "published/analysis/effects.csv")

    def change(rows: list[dict[str, str]]) -> None:
        where = {"quantity": "tax", "config": "mooncake_both", "cell": "r40", "metric": "ttft_p90"}
        row = one(rows, **where)
        row["hi"] = row["hi"][:5] + str((int(row["hi"][5]) + 1) % 10) + row["hi"][6:]

    edit_csv(table, change)
    output = refuted(tmp_path / "archive")
    assert "DIFFERS taxes mooncake_both A r40 ttft_p90 hi" in output
    assert " 1 differ." in output


def test_widened_intervals_overwritten_flags_and_forged_identities_are_reported(
    unpacked: Path, tmp_path: Path, refuted: Verified
) -> None:
    table = changed(unpacked, tmp_path, "published/analysis/effects.csv", "study.json")

    def change(rows: list[dict[str, str]]) -> None:
        for row in rows:
            if row["family_lo"]:
                row["family_lo"] = str(float(row["family_lo"]) - 0.5)
        row = next(row for row in rows if row["huber_differs"])
        row["huber_differs"] = str(row["huber_differs"].lower() != "true").lower()

    edit_csv(table, change)
    path = tmp_path / "archive" / "study.json"
    study = json.loads(path.read_text())
    entries = {entry["id"]: entry for entry in study["configurations"]}
    mooncake, nixl = entries["mooncake_both"], entries["nixl_both"]
    mooncake["label"], nixl["label"] = nixl["label"], mooncake["label"]
    study["engine_label"] = "NVIDIA H20"
    # A margin that is raised after the measurement.
    study["config"]["statistics"]["margins"]["ttft_p50"] = 0.5
    path.write_text(json.dumps(study))
    output = refuted(tmp_path / "archive")
    assert "DIFFERS taxes mooncake_both A r40 ttft_p90 family_lo" in output
    assert re.search(r"DIFFERS taxes .* huber_differs", output)
    for place in ("mooncake_both/block0/A names", "plain/block0/A engine", "settings statistics"):
        assert f"DIFFERS study.json {place}" in output


def test_changed_timestamp_of_a_request_is_named(
    unpacked: Path, tmp_path: Path, refuted: Verified
) -> None:
    path, name = changed(unpacked, tmp_path, TABLE), f"runs/{CELL}/requests_A_r40.jsonl"
    listed = json.loads((unpacked / "archive.json").read_text())
    sizes = {name: listed["files"][name]["bytes"] for name in listed["tables"][TABLE]["files"]}
    files = dict(decode(path.read_bytes(), sizes, Limits.of(ARCHIVE.stat().st_size)))
    requests = [json.loads(line) for line in files[name].splitlines()]
    measured = [r for r in requests if not r["warmup"] and not r["cooldown"]]
    measured.sort(key=lambda r: r["t_first_token_ns"] - r["t_intended_ns"])
    measured[(len(measured) - 1) // 2]["t_first_token_ns"] += 1000
    files[name] = "".join(json.dumps(r) + "\n" for r in requests).encode()
    path.write_bytes(encode(files))
    output = refuted(tmp_path / "archive")
    assert "plain 0 A r40 ttft_p50_ms" in output
    assert "DIFFERS taxes" in output


def test_folder_that_is_not_an_archive_is_refused(tmp_path: Path) -> None:
    shutil.copy(verify.__file__, tmp_path)
    result = verified(tmp_path)
    assert result.returncode == 2
    assert f"{tmp_path} is not an unpacked archive: study.json is missing" in result.stderr


@pytest.mark.parametrize("share", [0.001, 0.5, 0.99])
def test_a_damaged_table_is_refused(
    unpacked: Path, tmp_path: Path, share: float, refused: Verified
) -> None:
    path = changed(unpacked, tmp_path, TABLE)
    whole = path.read_bytes()
    path.write_bytes(whole[: int(share * len(whole))])
    assert "a file is damaged or missing" in refused(tmp_path / "archive")


@pytest.mark.parametrize("name", ["study.json", "seals.jsonl", TABLE])
def test_error_for_a_duplicate_key_names_file_and_key(
    unpacked: Path, tmp_path: Path, name: str, refused: Verified
) -> None:
    path = changed(unpacked, tmp_path, name)
    path.write_bytes(b'{"twice": 1, "twice": 2, ' + path.read_bytes()[1:])
    (line,) = refused(tmp_path / "archive").splitlines()
    assert f"{name}: key 'twice' twice in one object" in line


def test_table_that_lists_a_file_twice_is_refused(
    unpacked: Path, tmp_path: Path, refused: Verified
) -> None:
    path = changed(unpacked, tmp_path, TABLE)
    head, rest = path.read_bytes().split(b"\n", 1)
    header = json.loads(head)
    header["files"].append(header["files"][0])
    path.write_bytes(json.dumps(header).encode() + b"\n" + rest)
    (line,) = refused(tmp_path / "archive").splitlines()
    assert f"key '{header['files'][0][0]}' twice in one object" in line


@pytest.mark.parametrize("name", ["x" * 300, "a folder for study.json"])
def test_folder_that_cannot_be_read_is_named_in_one_line(
    tmp_path: Path, name: str, refused: Verified
) -> None:
    if len(name) < 256:
        for part in ("study.json", "tables", "published/analysis"):
            (tmp_path / name / part).mkdir(parents=True)
        (tmp_path / name / "reference_rates.json").write_text("{}")
    (line,) = refused(tmp_path / name).splitlines()
    assert f"{tmp_path / name}: a file is damaged or missing: " in line
