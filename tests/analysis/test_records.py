"""Test the strict reader: every malformed line is reported with file and line number."""

import hashlib
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from connector_tax.analysis.records import NESTED, REQUESTS, STEPS, RecordKind, Table, whole_table
from connector_tax.artifacts import folder
from connector_tax.artifacts.folder import read_blocks
from connector_tax.files import ArtifactError
from tests.analysis.test_steps import scheduler

STEP = scheduler(1, step_duration_us=900.5)
del STEP["engine_step_us"]
GOOD = json.dumps(STEP).encode() + b"\n"


def read_whole(path: Path, kind: RecordKind[Any], sha256: str | None) -> Table:
    return whole_table(kind, kind.rows(path, read_blocks(path, sha256)))


def line(**changes: Any) -> bytes:
    """Return a step record with some values changed."""
    return json.dumps({**STEP, **changes}).encode() + b"\n"


def without(key: str) -> bytes:
    """Return a step record that lacks a key."""
    return json.dumps({k: v for k, v in STEP.items() if k != key}).encode() + b"\n"


def read(path: Path, data: bytes) -> Table:
    """Write and read step records."""
    path.write_bytes(data)
    digest = hashlib.sha256(data).hexdigest()
    return read_whole(path, STEPS, digest)


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        (GOOD[:30] + b"\n", "Input data was truncated"),
        (GOOD[:-1] + GOOD, "trailing characters"),
        (b"\n", "truncated"),
        (b"[1, 2]\n", "Expected `object`, got `array`"),
        (GOOD.replace(b"900.5", b"NaN"), "JSON is malformed"),
        (GOOD.replace(b"scheduler", b"sched\xff"), "can't decode byte 0xff"),
        (line(hooks_us={"a": 1.5}, prefill_tokens=None), "prefill_tokens is null"),
        (line(step_id=1.5), "Expected `int`, got `float` - at `$.step_id`"),
        (line(step_id=True), "Expected `int`, got `bool` - at `$.step_id`"),
        (line(step_id=10**30), "Expected `int` <= 9223372036854775807"),
        (line(engine_step_us="fast"), "Expected `float | null`, got `str` - at `$.engine_step_us`"),
        (line(step_duration_us=None), "step_duration_us is null"),
        (line(t_ns=None), "Expected `int`, got `null` - at `$.t_ns`"),
        (line(process="gpu"), "Invalid enum value 'gpu' - at `$.process`"),
        (without("step_id"), "missing required field `step_id`"),
        (without("build_meta_us"), "missing required field `build_meta_us`"),
        (line(hooks_us=[1.0]), "Expected `object | null`, got `array` - at `$.hooks_us`"),
        (line(hooks_us={"take_events": -1.0}), "Expected `float` >= 0.0 - at `$.hooks_us[...]`"),
        (line(children_us={"A": 1.5}), "Expected `object`, got `float` - at `$.children_us[...]`"),
    ],
)
def test_a_bad_line_is_named_with_its_number(tmp_path: Path, bad: bytes, message: str) -> None:
    path = tmp_path / "engine_step_A_r1.jsonl"
    with pytest.raises(ArtifactError) as error:
        read(path, GOOD * 2 + bad + GOOD)
    assert f"{path}:3: " in str(error.value)
    assert message in str(error.value)


def test_step_record_without_engine_step_is_accepted(tmp_path: Path) -> None:
    steps = read(tmp_path / "s.jsonl", GOOD + line(engine_step_us=1000.5) + GOOD)
    assert np.array_equal(steps["engine_step_us"], [np.nan, 1000.5, np.nan], equal_nan=True)


def test_file_truncated_in_its_last_line_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ArtifactError, match=r":2: the last line has no newline"):
        read(tmp_path / "s.jsonl", GOOD + GOOD[:-1])
    with pytest.raises(ArtifactError, match=r":2: Input data was truncated"):
        read(tmp_path / "s.jsonl", GOOD + GOOD[:-9])


def test_line_numbers_count_across_blocks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(folder, "BLOCK_BYTES", 100)
    with pytest.raises(ArtifactError, match=r"s\.jsonl:41: "):
        read(tmp_path / "s.jsonl", GOOD * 40 + b"{\n" + GOOD)


def test_changed_byte_is_detected_by_hash(tmp_path: Path) -> None:
    path = tmp_path / "s.jsonl"
    path.write_bytes(GOOD.replace(b"900.5", b"900.6"))
    with pytest.raises(ArtifactError, match="the file changed after it was measured"):
        read_whole(path, STEPS, hashlib.sha256(GOOD).hexdigest())


def test_a_success_without_its_stamps_is_refused(tmp_path: Path) -> None:
    record: dict[str, Any] = dict.fromkeys(REQUESTS.columns, 1)
    path = tmp_path / "r.jsonl"
    path.write_text(json.dumps({**record, "status": "ok", "t_first_token_ns": None}) + "\n")
    with pytest.raises(ArtifactError, match=r":1: t_first_token_ns is null"):
        read_whole(path, REQUESTS, None)
    path.write_text(json.dumps({**record, "status": "timeout", "t_first_token_ns": None}) + "\n")
    assert read_whole(path, REQUESTS, None)["t_first_token_ns"][0] != 1


duration = st.floats(min_value=0, max_value=1e9) | st.integers(0, 10**9)
names = st.text("abzé_0 ", max_size=8)
hooks = st.dictionaries(names, duration, max_size=3)
step_records = st.fixed_dictionaries(
    {
        "t_ns": st.integers(0, 2**62),
        "step_id": st.integers(0, 2**62),
        "process": st.sampled_from(["scheduler", "worker"]),
        "step_duration_us": duration,
        "engine_step_us": st.none() | duration,
        "build_meta_us": st.none() | duration,
        "get_finished_us": st.none() | duration,
        "start_load_kv_us": st.none() | duration,
        "prefill_tokens": st.integers(0, 10**6),
        "decode_tokens": st.integers(0, 10**6),
        "hooks_us": st.none() | hooks,
        "children_us": st.none() | st.dictionaries(names, hooks, max_size=2),
        "note": st.text(),
    }
)


@given(st.lists(step_records, min_size=1, max_size=20), st.integers(1, 4000))
def test_records_round_trip_at_any_block_size(
    tmp_path_factory: pytest.TempPathFactory, written: list[dict[str, Any]], block: int
) -> None:
    path = tmp_path_factory.mktemp("records") / "s.jsonl"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(folder, "BLOCK_BYTES", block)
        table = read(path, b"".join(json.dumps(r).encode() + b"\n" for r in written))
        blocks = STEPS.rows(path, folder.read_blocks(path, None))
        nested = [{key: getattr(row, key) for key in NESTED} for rows in blocks for row in rows]
    for name, column in table.items():
        values = [None if value != value else value for value in column.tolist()]
        assert values == [record[name] for record in written]
    assert nested == [{key: record[key] for key in NESTED} for record in written]
