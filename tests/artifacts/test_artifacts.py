"""Test a study's artifacts: names, files, index.json, tables."""

import json
from pathlib import Path
from typing import Any, Required, TypedDict

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import to_builtins

from connector_tax.artifacts import paths
from connector_tax.artifacts.index import CellEntry, launch_index, read_index, write_index
from connector_tax.artifacts.names import Launch, configuration_of, launched_plains, plain_names
from connector_tax.artifacts.record_reader import read_record
from connector_tax.artifacts.study_records import DesignLabel
from connector_tax.artifacts.tables import COLUMNS, EffectRow, read_table, table_text
from connector_tax.artifacts.verdicts import (
    CANNOT_TELL,
    VERDICTS,
    costs,
    gains,
    in_words,
    less,
    verdict_of,
)
from connector_tax.files import ArtifactError, read_json, write_json

STUDY: DesignLabel = {"engine_label": "embedded (emulated)", "design_sha256": "0" * 64}
LAUNCH = Launch("plain_2", 1, "A")


def written(folder: Path) -> dict[str, Any]:
    cells = [CellEntry("r1", "valid", None, {"x": "1"}), CellEntry("r2", "missing", "died", {})]
    started = "2026-05-26T09:00:00+00:00"
    write_index(folder, launch_index(STUDY, LAUNCH, cells, started_utc=started))
    content: dict[str, Any] = read_json(folder / paths.INDEX)
    return content


def test_index_round_trips(tmp_path: Path) -> None:
    content = written(tmp_path)
    index = read_index(tmp_path)
    assert index is not None
    assert to_builtins(index) == content
    assert (index.config, index.configuration, index.block) == ("plain_2", "plain", 1)
    assert index.entry("r2") == CellEntry("r2", "missing", "died", {})
    assert index.entry("r3") is None
    assert read_index(tmp_path / "elsewhere") is None


def test_unsealed_index_lists_no_files(tmp_path: Path) -> None:
    assert "files" not in written(tmp_path)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"status": "ok"}, "status: found 'ok'; allowed: text matching ^(done|skipped|failed)$"),
        ({"phase": "C"}, "phase: found 'C'; allowed: text matching ^(A|B|Bp)$"),
        ({"block": "1"}, "block: found '1'; allowed: integer"),
        ({"reason": 3}, "reason: found 3; allowed: "),
    ],
)
def test_error_of_a_malformed_index_names_file_and_key(
    tmp_path: Path, change: dict[str, Any], message: str
) -> None:
    write_json(tmp_path / paths.INDEX, written(tmp_path) | change)
    with pytest.raises(ArtifactError) as error:
        read_index(tmp_path)
    assert str(tmp_path / paths.INDEX) in str(error.value)
    assert message in str(error.value)


def test_truncated_or_incomplete_index_is_refused(tmp_path: Path) -> None:
    content = written(tmp_path)
    (tmp_path / paths.INDEX).write_text(json.dumps(content)[:-5])
    with pytest.raises(ArtifactError, match=r"index\.json: "):
        read_index(tmp_path)
    del content["depends"]
    content["cells"][0]["status"] = "fine"
    write_json(tmp_path / paths.INDEX, content)
    with pytest.raises(ArtifactError, match=r"depends: miss.*cells\[0\]\.status: found 'fine'"):
        read_index(tmp_path)


class Level(TypedDict, total=False):
    memory_ns: Required[float]
    compute_ns: float
    looks: int


def test_record_round_trips_unchanged(tmp_path: Path) -> None:
    content = {"memory_ns": 5, "compute_ns": 2.5, "looks": 3, "of_a_later_version": "x"}
    write_json(tmp_path / "level.json", content)
    level = read_record(tmp_path / "level.json", Level)
    assert level == content
    assert isinstance(level["memory_ns"], int)
    write_json(tmp_path / "levels.json", [content, content])
    assert read_record(tmp_path / "levels.json", list[Level]) == [content, content]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ({"looks": 3}, r"memory_ns: missing; it is required"),
        ({"memory_ns": "5"}, r"memory_ns: found '5'; allowed: number"),
        ([], r"the file: found \[\]; allowed: object"),
    ],
)
def test_record_with_wrong_fields_is_refused_with_file_and_key(
    tmp_path: Path, content: Any, message: str
) -> None:
    path = tmp_path / "level.json"
    write_json(path, content)
    with pytest.raises(ArtifactError, match=rf"level\.json: .*{message}"):
        read_record(path, Level)
    write_json(path, [{"memory_ns": 5}, content])
    of_list = message.replace("the file", "").replace("memory_ns", r"\.memory_ns")
    with pytest.raises(ArtifactError, match=rf"level\.json: \[1\]{of_list}"):
        read_record(path, list[Level])


def test_superseded_file_gets_the_first_free_name(tmp_path: Path) -> None:
    cell, study = tmp_path / "r0.5", tmp_path / "study.json"
    cell.mkdir()
    study.write_text("{}")
    (tmp_path / "r0.5.void1").mkdir()
    assert paths.set_aside(cell, "void").name == "r0.5.void2"
    assert paths.set_aside(study, "superseded").name == "study.superseded1.json"


def test_repeated_plain_launch_belongs_to_plain() -> None:
    assert plain_names(3) == ["plain", "plain_2", "plain_3"]
    assert [configuration_of(n) for n in ("plain_3", "plain_2", "plain_x")] == [
        "plain", "plain", "plain_x",
    ]  # fmt: skip
    assert launched_plains(["nixl_both", "plain_10", "plain_2", "plain", "plain_2"]) == [
        "plain", "plain_2", "plain_10",
    ]  # fmt: skip
    assert LAUNCH.folder(Path("s")) == Path("s/runs/plain_2/block1/A")


def test_table_has_exactly_the_declared_columns_in_order(tmp_path: Path) -> None:
    name = paths.EFFECTS
    row = {"estimate": 1 / 3, "n_blocks": 2, "quantity": "gap", "config": "x"}
    text = table_text(name, [row])
    assert text.splitlines()[0] == ",".join(COLUMNS[name])
    (tmp_path / name).write_text(text)
    (read,) = read_table(tmp_path / name, EffectRow)
    assert (read.estimate, read.lo, read.config, read.n_blocks) == (1 / 3, None, "x", 2)
    with pytest.raises(ValueError, match="colour"):
        table_text(name, [row | {"colour": 1}])


# ---- verdicts: never against the interval, and never stated twice

widths = st.floats(0, 0.5)


@given(st.floats(-0.5, 0.5), widths, st.floats(0, 1), st.floats(1e-3, 0.3))
def test_verdict_never_contradicts_its_interval(
    point: float, half: float, share: float, margin: float
) -> None:
    interval = point - half, point + half
    narrow = point - share * half, point + share * half
    verdict = verdict_of(interval, narrow, margin)
    assert verdict in VERDICTS
    if less(verdict):
        assert max(map(abs, narrow)) <= margin
    if costs(verdict):
        assert interval[0] > 0
    if gains(verdict):
        assert interval[1] < 0
    if interval[0] > 0 or interval[1] < 0:
        assert costs(verdict) or gains(verdict)
    if verdict == CANNOT_TELL:
        assert max(map(abs, narrow)) > margin


@given(st.floats(-0.1, 0.1), widths, st.floats(1e-3, 0.3), st.floats(1, 3))
def test_wider_margin_keeps_every_verdict(
    point: float, half: float, margin: float, factor: float
) -> None:
    interval, narrow = (point - half, point + half), (point - half / 2, point + half / 2)
    near, far = (verdict_of(interval, narrow, m) for m in (margin, factor * margin))
    assert less(far) or not less(near)
    assert (costs(near), gains(near)) == (costs(far), gains(far))


def test_cost_below_the_margin_has_a_verdict_with_both_statements() -> None:
    verdict = verdict_of((0.025, 0.092), (0.031, 0.086), 0.10)
    assert in_words(verdict, 0.10) == "costs, less than 10%"
    assert in_words(verdict_of((0.025, 0.092), (0.031, 0.086), 0.03), 0.03) == "costs"
    assert in_words(verdict_of((0, 0), (0, 0), 0), None) == "equal"
