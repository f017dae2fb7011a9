"""Test the effects of an emulated device's steps with known exposed time."""

from pathlib import Path

import numpy as np
import pytest

from connector_tax.analysis.device_time import of_lines
from connector_tax.analysis.records import Table
from connector_tax.analysis.step_tables import device_rows
from connector_tax.artifacts import paths
from connector_tax.artifacts.cell_records import DeviceLine
from connector_tax.artifacts.names import CellKey
from connector_tax.artifacts.study_file import Study
from connector_tax.artifacts.study_records import DeviceTimeSection
from connector_tax.artifacts.tables import EffectRow, StepGroup, read_table, table_text
from tests.shared import known
from tests.study_folder import study_design

CONFIGURATIONS = ("plain", "plain_2", "nixl_both")
Groups = dict[tuple[str, StepGroup], dict[str, EffectRow]]


def steps(
    count: int, device_us: float, host_us: float, decode_seqs: int = 1, prefill: bool = False
) -> Table:
    """Return steps; the host queues each `host_us` after it continued from the previous step."""
    rows: list[DeviceLine] = []
    queued = end = woken = 0
    for step_id in range(1, count + 1):
        queued = woken + round(host_us * 1000)
        start = max(queued, end)
        end = start + round(device_us * 1000)
        woken = end
        rows.append(
            {
                "t_ns": queued, "step_id": step_id, "t_start_ns": start, "t_end_ns": end,
                "t_since_ns": None, "prefill_tokens": 9 * prefill, "decode_seqs": decode_seqs,
                "t_wait_ns": queued, "t_woken_ns": woken, "kv_tokens": 0, "prefill_pairs": 0,
            }
        )  # fmt: skip
    return of_lines(rows)


def rows(folder: Path, cells: dict[CellKey, Table]) -> Groups:
    """Return the effects by metric, for each configuration and group of steps."""
    study = Study(folder, study_design(blocks=2))
    asked: DeviceTimeSection = {
        "accelerator": "H20", "model_config": "x", "launch_us": 0, "besides_us": 0,
    }  # fmt: skip
    study.config["engine"]["device_time"] = asked
    path = folder / paths.EFFECTS
    path.write_text(table_text(paths.EFFECTS, device_rows(study, cells)))
    found: Groups = {}
    for row in read_table(path, EffectRow):
        found.setdefault((row.config, StepGroup.of(row.item)), {})[row.metric] = row
    return found


def launches(host_us: dict[str, float]) -> dict[CellKey, Table]:
    """Return the launches of two blocks; in the second block the host takes 2 us more."""
    return {
        CellKey(config, block, "A", "r1"): steps(50, 1000, us + 2 * block)
        for block in (0, 1)
        for config, us in host_us.items()
    }


def test_exposed_time_is_averaged_over_launches_and_contrasted_within_blocks(
    tmp_path: Path,
) -> None:
    cells = launches({"plain": 100, "plain_2": 100, "nixl_both": 150})
    by_row = rows(tmp_path, cells)
    one = StepGroup("decode", "1")
    assert by_row.keys() == {
        (config, group) for config in CONFIGURATIONS for group in (StepGroup("decode", "all"), one)
    }
    plain, nixl = by_row["plain", one], by_row["nixl_both", one]
    exposed = nixl["exposed_us"]
    assert [(r.n_blocks, r.n) for r in (plain["exposed_us"], exposed)] == [(4, 200), (2, 100)]
    assert plain["exposed_us"].estimate == pytest.approx(101)
    assert exposed.estimate == pytest.approx(151)
    assert nixl["exposed_share"].estimate == 1
    assert nixl["host_busy_us"].estimate == pytest.approx(151)
    assert nixl["period_us"].estimate == pytest.approx(1151)
    assert known(exposed.lo) < 151 < known(exposed.hi)
    assert "over_plain_us" not in plain
    assert nixl["over_plain_us"].estimate == pytest.approx(50)
    assert by_row["plain_2", one]["over_plain_us"].estimate == pytest.approx(0)


def test_device_steps_are_grouped_by_kind_and_size_with_a_minimum_count(tmp_path: Path) -> None:
    tables = [
        steps(30, 1000, 10), steps(30, 1000, 20, decode_seqs=3),
        steps(30, 1000, 40, decode_seqs=2, prefill=True), steps(5, 1000, 9, decode_seqs=4),
        steps(30, 1000, 70, decode_seqs=0, prefill=True),
    ]  # fmt: skip
    mixed = {name: np.concatenate([table[name] for table in tables]) for name in tables[0]}
    cells = {CellKey("plain", block, "A", "r1"): mixed for block in (0, 1)}
    found = {(g.kind, g.batch): of for (_, g), of in rows(tmp_path, cells).items()}
    assert list(found) == [
        ("decode", "all"), ("decode", "1"), ("decode", "2-3"), ("prefill", "all"),
        ("mixed", "all"), ("mixed", "2-3"),
    ]  # fmt: skip
    assert found["decode", "2-3"]["exposed_us"].estimate == pytest.approx(20)
    assert found["mixed", "all"]["exposed_us"].estimate == pytest.approx(40)
    assert found["prefill", "all"]["exposed_us"].estimate == pytest.approx(70)
