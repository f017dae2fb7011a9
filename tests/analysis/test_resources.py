"""Test resource taxes and engine settings from the records of launches."""

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from connector_tax.analysis.block_model import Launches, LaunchId
from connector_tax.analysis.effect import ONE_LAUNCH
from connector_tax.analysis.resources import (
    NOT_RECORDED,
    RESOURCES,
    LaunchRecords,
    engine_rows,
    read_launch_records,
    resource_rows,
)
from connector_tax.artifacts.folder import StudyFolder
from connector_tax.artifacts.study_file import load_study
from connector_tax.artifacts.tables import Row
from connector_tax.files import ArtifactError, read_json, sha256_file, write_json
from tests.shared import known
from tests.study_folder import edited_json, write_virtual_study

PLAINS = ("plain", "plain_2")
BLANK: Row = dict.fromkeys(("estimate", "lo", "hi", "p", "method", "item"))


def quantity(value: Any) -> dict[str, Any]:
    """Return a quantity from a number, (value, reason) or (value, reason, parts)."""
    value, reason, *parts = value if isinstance(value, tuple) else (value, None)
    whole = {} if value is None else {"server": value}
    return {"value": value, "parts": parts[0] if parts else whole, "reason": reason}


def resources_record(**given: Any) -> Any:
    """Return resources.json, in which quantities that are not given are 1."""
    names = ("memory_pss_mib", "gpu_memory_mib")
    taken = {name: quantity(given.pop(name, 1.0)) for name in names}
    idle = {
        "from_ns": 1_000 - 2_000_000_000,
        "to_ns": 1_000,
        **quantity(given.pop("idle_cpu", 1.0)),
    }
    return {
        "startup_s": given.pop("startup_s", 1.0),
        "idle_cpu": idle,
        "before_load": taken,
        "after_load": taken,
        "after_load_reason": None,
    }


def settings_record(layout: str = "NHD", backend: str | None = None) -> Any:
    """Return the settings of settings.json: three known, one that may be missing."""

    def setting(value: Any) -> dict[str, Any]:
        known = value is not None
        reason = None if known else "no such setting"
        return {"value": value, "source": "probe" if known else None, "reason": reason}

    return {
        "kv_blocks": setting(8192),
        "kv_tokens": setting(16 * 8192),
        "layout": setting(layout),
        "backend": setting(backend),
        "prefix_caching": setting(True),
    }


def launch(name: str, block: int, reason: str | None = None, **quantities: Any) -> LaunchRecords:
    """Return a launch with the given resources and settings; the other resources are 1."""
    own = {key: quantities.pop(key) for key in ("layout", "backend") if key in quantities}
    return LaunchRecords(
        launch=LaunchId(name, block),
        configuration="plain" if name in PLAINS else name,
        cells={},
        resources=None if reason else resources_record(**quantities),
        settings=None if reason else settings_record(**own),
        reason=reason,
    )


def study_of(values: Mapping[tuple[str, int], float], resource: str) -> list[LaunchRecords]:
    return [
        launch(name, block, None, **{resource: value}) for (name, block), value in values.items()
    ]


def row_of(launches: list[LaunchRecords], config: str, resource: str) -> Row:
    rows = resource_rows(launches, "plain", None, 0.95)
    return BLANK | next(r for r in rows if (r["config"], r["metric"]) == (config, resource))


SEEDS = st.integers(0, 2**32)
BLOCKS = st.lists(st.floats(0.1, 9), min_size=3, max_size=3)
NAMES = (*PLAINS, "a", "b")


def noise_of(seed: int) -> dict[tuple[str, int], float]:
    """Return normal noise of each launch of three blocks."""
    keys = [(name, block) for block in range(3) for name in NAMES]
    return dict(zip(keys, np.random.default_rng(seed).normal(0, 0.1, len(keys)), strict=True))


@pytest.mark.parametrize("resource", ["memory_pss_mib", "idle_cpu"])
@settings(max_examples=20, deadline=None)
@given(SEEDS, BLOCKS)
def test_block_offset_common_to_all_changes_no_effect(
    resource: str, seed: int, blocks: list[float]
) -> None:
    """Multiply quantities on log scales by a common factor; add a common difference to idle CPU."""
    is_log = resource != "idle_cpu"
    even = {key: math.exp(e) if is_log else abs(e) for key, e in noise_of(seed).items()}
    uneven = {
        (name, block): value * blocks[block] if is_log else value + blocks[block]
        for (name, block), value in even.items()
    }
    for config in ("a", "plain_2"):
        first, second = (row_of(study_of(of, resource), config, resource) for of in (even, uneven))
        for column in ("estimate", "lo", "hi", "p"):
            assert second[column] == pytest.approx(first[column], rel=1e-6, abs=1e-9), column
        assert first["method"] == second["method"]
        assert first["scale"] == ("log" if is_log else "raw")
        change = first["own"] / first["base"] - 1 if is_log else first["own"] - first["base"]
        assert change == pytest.approx(first["estimate"])


def test_resource_tax_interval_and_p_come_from_the_error_model() -> None:
    values = {
        (name, block): base * (1 + 0.01 * ((7 * block + 3 * i) % 5))
        for block in range(4)
        for i, (name, base) in enumerate({"plain": 100.0, "plain_2": 100.0, "a": 130.0}.items())
    }
    row = row_of(study_of(values, "startup_s"), "a", "startup_s")
    launches = Launches.of({LaunchId(*key): math.log(value) for key, value in values.items()})
    estimate = known(launches.contrast("a", PLAINS))
    half = known(estimate.half_width(0.95))
    assert row["estimate"] == pytest.approx(estimate.point)
    assert row["lo"] == pytest.approx(math.expm1(estimate.contrast - half))
    assert (row["p"], row["df"], row["method"]) == (estimate.p, estimate.df, estimate.method)
    assert row["own"] == pytest.approx(row["base"] * (1 + row["estimate"]))
    assert row["n_blocks"] == 4
    noise = known(launches.contrast("plain_2", ("plain",)))
    again = row_of(study_of(values, "startup_s"), "plain_2", "startup_s")
    assert again["estimate"] == pytest.approx(noise.point)


def test_constant_count_is_exact_and_has_no_interval() -> None:
    values = {
        (name, block): 65 if name in PLAINS else 75 for name in (*PLAINS, "a") for block in (0, 1)
    }
    row = row_of(study_of(values, "startup_s"), "a", "startup_s")
    assert (row["estimate"], row["method"]) == (75 / 65 - 1, "exact")
    assert (row["base"], row["own"]) == (65, 75)
    assert (row["lo"], row["hi"], row["p"]) == (None, None, None)
    assert row_of(study_of(values, "startup_s"), "plain_2", "startup_s")["estimate"] == 0
    once = row_of(study_of({**values, ("a", 1): 76}, "startup_s"), "a", "startup_s")
    assert once["method"] != "exact"
    assert once["lo"] < once["estimate"] < once["hi"]


def test_one_block_has_neither_an_interval_nor_an_exact_difference() -> None:
    values = {("plain", 0): 65.0, ("plain_2", 0): 66.0, ("a", 0): 75.0}
    row = row_of(study_of(values, "startup_s"), "a", "startup_s")
    assert row["own"] - row["base"] == pytest.approx(75 - math.sqrt(65 * 66))
    assert (row["lo"], row["p"], row["method"]) == (None, None, ONE_LAUNCH)


def test_unread_quantity_is_missing_with_a_reason() -> None:
    reason = "no GPU: the engine's device is a CPU"
    launches = [
        launch(name, b, gpu_memory_mib=(None, reason)) for name in (*PLAINS, "a") for b in (0, 1)
    ]
    row = row_of(launches, "a", "gpu_memory_mib")
    assert (row["status"], row["reason"], row["n_blocks"]) == ("missing", reason, 0)
    # A launch without a value removes its block; the other blocks stay.
    launches[0] = launch("plain", 0, gpu_memory_mib=(None, "nvidia-smi does not tell"))
    for at in range(1, len(launches)):
        name, block = launches[at].launch
        launches[at] = launch(name, block, gpu_memory_mib=1000 + 7 * at)
    row = row_of(launches, "a", "gpu_memory_mib")
    assert row["status"] == "valid"
    assert row["n_blocks"] == 2
    assert row["reason"] == "block 0: plain: nvidia-smi does not tell"


def test_a_launch_that_ended_early_has_no_memory_under_load() -> None:
    launches = [launch(name, b) for name in (*PLAINS, "a") for b in (0, 1)]
    for records in launches:
        assert isinstance(records.resources, dict)
        records.resources["after_load"] = None
        records.resources["after_load_reason"] = "ended before its last cell"
    row = row_of(launches, "a", "memory_pss_loaded_mib")
    assert (row["status"], row["reason"]) == ("missing", "ended before its last cell")


def test_companion_share_is_listed_with_the_total() -> None:
    parts = {"server": 3.0, "lmcache_server": 1.5}
    launches = [launch(name, b) for name in PLAINS for b in (0, 1)]
    launches += [launch("a", b, memory_pss_mib=(4.5, None, parts)) for b in (0, 1)]
    assert row_of(launches, "a", "memory_pss_mib")["item"] == "lmcache_server 1.5"
    assert row_of(launches, "a", "startup_s")["item"] is None


def test_settings_that_differ_from_plain_are_named_together() -> None:
    launches = [launch(name, b, layout="NHD") for name in PLAINS for b in (0, 1)]
    launches += [launch("a", b, layout="HND") for b in (0, 1)]
    launches += [launch("b", 0, "skipped for a reason"), launch("b", 1, "skipped for a reason")]
    rows = engine_rows(launches, "plain")
    of_a = {row["setting"]: row for row in rows if row["config"] == "a"}
    assert (of_a["layout"]["value"], of_a["layout"]["plain"]) == ("HND", "NHD")
    assert of_a["layout"]["differs"] is True
    assert of_a["kv_blocks"]["differs"] is False
    assert of_a["backend"]["differs"] is None
    assert of_a["backend"]["reason"] == "no such setting"
    assert {row["also_differs"] for row in of_a.values()} == {"layout HND (plain NHD)"}
    of_b = [row for row in rows if row["config"] == "b"]
    assert of_b == [{"config": "b", "reason": "skipped for a reason"}]
    assert all(row["also_differs"] is None for row in rows if row["config"] == "plain")


def test_disagreeing_settings_of_one_configuration_are_reported() -> None:
    launches = [launch("plain", 0, layout="NHD"), launch("plain", 1, layout="HND")]
    row = next(row for row in engine_rows(launches, "plain") if row["setting"] == "layout")
    assert (row["value"], row["reason"]) == ("HND | NHD", "differs between launches")


@pytest.fixture
def study_file(tmp_path: Path) -> Path:
    names = ["plain", "noop_connector"]
    return write_virtual_study(
        tmp_path, blocks=2, configurations=names, phase_b=None, phase_bp=None
    )


def rows_of(study_file: Path) -> tuple[list[Row], list[Row]]:
    study = load_study(study_file)
    launches = read_launch_records(StudyFolder(study))
    return resource_rows(launches, "plain", "r40", 0.95), engine_rows(launches, "plain")


def test_study_without_launch_records_reports_the_reason(study_file: Path) -> None:
    for path in study_file.parent.glob("runs/*/*/*/index.json"):
        with edited_json(path) as index:
            del index["files"]
    resources, engine = rows_of(study_file)
    of_launches = [row for row in resources if row["metric"] != "cpu_s_per_1000"]
    assert {(row["status"], row["reason"]) for row in of_launches} == {("missing", NOT_RECORDED)}
    assert {row["metric"] for row in resources} == {resource.name for resource in RESOURCES}
    assert {row["reason"] for row in engine} == {NOT_RECORDED}


def test_launch_records_are_read_and_a_changed_one_is_refused(study_file: Path) -> None:
    resources, engine = rows_of(study_file)
    of_noop = {r["metric"]: r for r in resources if r["config"] == "noop_connector"}
    assert {name for name, r in of_noop.items() if r["status"] == "valid"} == {
        r.name for r in RESOURCES if "memory" not in r.name
    }
    assert of_noop["cpu_s_per_1000"]["n_blocks"] == 2
    assert all("setting" in row for row in engine)
    path = study_file.parent / "runs" / "plain" / "block0" / "A" / "resources.json"
    write_json(path, read_json(path) | {"startup_s": 0.5})
    with pytest.raises(ArtifactError, match=r"resources\.json: missing, or changed after"):
        rows_of(study_file)
    index_file = path.with_name("index.json")
    index = read_json(index_file)
    write_json(path, {"startup_s": 0.5})
    index["files"]["resources.json"] = sha256_file(path)
    write_json(index_file, index)
    with pytest.raises(ArtifactError, match=r"plain/block0/A: idle_cpu: malformed"):
        rows_of(study_file)


def test_idle_cpu_time_lists_busy_threads_by_name() -> None:
    launches = study_of({("plain", 0): 0.0, ("a", 0): 1.0}, "idle_cpu")
    resources = known(launches[1].resources)
    resources["idle_cpu"]["threads"] = {"python (7)": 0.5, "python (8)": 0.25, "poll me (9)": 0.2}
    assert row_of(launches, "a", "idle_cpu")["item"] == "thread poll me 0.2; thread python 0.75"
