"""Test that launches and cells have one state for all readers, and files are checked once."""

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from connector_tax.analysis.measure import measure_requests, measure_waiting
from connector_tax.artifacts import folder as folder_module
from connector_tax.artifacts.folder import LaunchFolder, StudyFolder
from connector_tax.artifacts.names import CellKey, Launch
from connector_tax.files import ArtifactError, digests_kept, sha256_file, write_json
from tests.study_folder import write_virtual_study

VOID = CellKey("nixl_both", 0, "A", "r40")


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_virtual_study(
        tmp_path_factory.mktemp("study") / "s",
        configurations=["plain", "mooncake_both", "nixl_both"],
        step_timing=False,
        void={VOID: "late"},
        skipped={"mooncake_both": "the gate"},
        phase_b=None,
        phase_bp=None,
    )


@pytest.fixture
def study_file(written: Path, tmp_path: Path) -> Path:
    return shutil.copytree(written.parent, tmp_path / "s") / "study.json"


def test_every_planned_cell_has_a_state_and_a_reason_unless_valid(study_file: Path) -> None:
    shutil.rmtree(study_file.parent / "runs/plain_2")
    study = StudyFolder.load(study_file)
    states = {c.key: (c.status, c.reason) for c in study.cells("A")}
    assert len(states) == len(study.of_phase("A")) * 2
    assert states[VOID][0] == "void"
    missing, skipped = (CellKey(name, 0, "A", "r40") for name in ("plain_2", "mooncake_both"))
    assert states[missing] == ("missing", "the launch has no index.json")
    assert states[skipped] == ("skipped", "pre-flight: the gate")
    for launch in study.of_phase("A"):
        for cell in ("r40", "r80"):
            assert launch.state(cell) == states[launch.key(cell)]
    assert {status for status, reason in states.values() if reason is None} == {"valid"}


def test_parsed_file_is_cached(study_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    opened: list[Path] = []
    read = folder_module.read_blocks

    def counted(path: Path, digest: str | None) -> Iterator[bytes]:
        opened.append(path)
        return read(path, digest)

    monkeypatch.setattr(folder_module, "read_blocks", counted)
    study = StudyFolder.load(study_file)
    (cell, *_) = [c for c in study.cells("A") if c.status == "valid"]
    lines = cell.lines("requests"), cell.lines("metrics")
    first = measure_requests(cell), measure_waiting(cell)
    cell.release()
    again = next(c for c in study.cells("A") if c.key == cell.key)
    assert (measure_requests(again), measure_waiting(again)) == first
    name = f"A_{cell.key.cell}.jsonl"
    assert [path.name for path in opened] == [f"requests_{name}", f"metrics_{name}"]
    assert len(lines[0]) >= first[0].n


def test_changed_files_and_files_without_a_hash_are_refused(study_file: Path) -> None:
    (cell, *_) = [c for c in StudyFolder.load(study_file).cells("A") if c.status == "valid"]
    path = cell.file("requests")
    path.write_text(path.read_text().replace('"ok"', '"OK"', 1))
    with pytest.raises(
        ArtifactError, match=r"requests_A_r\d+\.jsonl: sha256 is .* index\.json says"
    ):
        cell.lines("requests")
    with pytest.raises(ArtifactError, match=r"no hash of device_A_r\d+\.jsonl"):
        cell.lines("device")


@pytest.mark.parametrize(
    "line",
    [
        '{"a": 1, "a": 2}',
        '{"a" : 1, "a": 2}',
        '{"b": "x\\":", "a" :1, "a":2}',
        '{"o": {"a":1,"a":2}}',
    ],
)
def test_line_with_a_duplicate_key_is_refused(line: str) -> None:
    content = f'{{"a": 0, "text": "{{\\"a\\":"}}\n{line}\n'.encode()
    decode = folder_module._decoder_of(content)
    assert decode(content.split(b"\n")[0]) == json.loads(content.split(b"\n")[0])
    with pytest.raises(ArtifactError, match=r"x:2: found key 'a' twice"):
        list(folder_module.decoded(Path("x"), iter([content]), decode))


def test_digest_is_cached_until_the_file_changes(tmp_path: Path) -> None:
    path = tmp_path / "x"
    path.write_bytes(b"1")
    with digests_kept():
        before = sha256_file(path)
        assert sha256_file(path) == before
        path.write_bytes(b"22")
        assert sha256_file(path) != before


def test_launch_without_index_has_attempts_and_finished_cells(tmp_path: Path) -> None:
    launch = Launch("plain", 0, "A.superseded1")
    run, folder = LaunchFolder(tmp_path, launch), launch.folder(tmp_path)
    assert (run.attempts, run.measured) == ([], [])
    write_json(folder / "attempts.json", [{"attempt": 1}])
    for cell in ("r80", "r40"):
        write_json(folder / cell / f"cell_A_{cell}.json", {"cell": cell})
    assert [attempt["attempt"] for attempt in run.attempts] == [1]
    assert [record["cell"] for record in run.measured] == ["r40", "r80"]
