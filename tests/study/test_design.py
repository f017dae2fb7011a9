"""Test the resolved design: complete randomised blocks, named seeds, one design per folder."""

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import chisquare

from connector_tax.artifacts.names import Launch
from connector_tax.config import ROOT, ConfigError, filled, load_yaml
from connector_tax.files import write_json
from connector_tax.servers.embedded import launch_seed
from connector_tax.study.design import (
    cell_order,
    differences,
    refuse_changed_design,
    resolve,
    run_order,
)


def default_config() -> Any:
    return filled(load_yaml(ROOT / "config" / "config.yaml"), "config")


@given(
    seed=st.integers(0, 2**63 - 1),
    blocks=st.integers(1, 5),
    plains=st.integers(1, 4),
    phase=st.sampled_from(["A", "B", "Bp"]),
    of_b=st.sampled_from([None, ["plain"], ["plain", "nixl_both"]]),
)
@settings(max_examples=50)
def test_each_block_has_every_configuration_once_and_plain_as_configured(
    seed: int, blocks: int, plains: int, phase: str, of_b: list[str] | None
) -> None:
    config = default_config() | {"seed": seed, "blocks": blocks, "plain_launches": plains}
    grid = {key: value for key, value in config["phase_b"].items() if key != "configurations"}
    config["phase_b"] = grid if of_b is None else grid | {"configurations": of_b}
    order = run_order(config)[phase]
    everything = config["configurations"]
    of_bp = config["phase_bp"]["configurations"]
    members = {"A": everything, "B": of_b or everything, "Bp": of_bp}[phase]
    assert [entry["block"] for entry in order] == sorted(entry["block"] for entry in order)
    further = [f"plain_{number}" for number in range(2, plains + 1)]
    for block in range(blocks):
        names = [entry["config"] for entry in order if entry["block"] == block]
        assert sorted(names) == sorted([*members, *further])
        started = [Launch(name, block, phase).configuration for name in names]
        assert started.count("plain") == plains


def test_named_baseline_is_launched_as_often_as_configured() -> None:
    config = default_config() | {
        "blocks": 1,
        "baseline": "noop_connector",
        "plain_launches": 3,
    }
    names = [entry["config"] for entry in run_order(config)["A"]]
    again = ["noop_connector_2", "noop_connector_3"]
    assert sorted(names) == sorted([*config["configurations"], *again])
    assert Launch("noop_connector_3", 0, "A").configuration == "noop_connector"


def test_launch_positions_are_balanced_over_blocks() -> None:
    config = default_config() | {"blocks": 50, "plain_launches": 2}
    places: dict[str, list[int]] = {}
    for seed in range(40):
        order = run_order(config | {"seed": seed})["A"]
        for position, entry in enumerate(order):
            places.setdefault(entry["config"], []).append(position % 9)
    assert len(places) == 9
    for positions in places.values():
        counts = [positions.count(place) for place in range(9)]
        # 2,000 blocks: a fair shuffle is above this once in 10,000 such tests.
        assert chisquare(counts).pvalue > 1e-4 / 9


def test_each_launch_runs_every_cell_in_its_own_seeded_order() -> None:
    study = resolve(default_config(), "config.yaml")
    names = [c["cell"] for c in study["cells"]["A"]]
    orders = set()
    for entry in study["run_order"]["A"]:
        launch = Launch(entry["config"], entry["block"], "A")
        order = [c["cell"] for c in cell_order(study, launch)]
        assert sorted(order) == sorted(names)
        orders.add(tuple(order))
    assert len(orders) > 1


def test_launch_seeds_differ_between_plain_and_its_repetition() -> None:
    study = resolve(default_config(), "config.yaml")
    assert launch_seed(study, Launch("plain", 0, "A")) != launch_seed(
        study, Launch("plain_2", 0, "A")
    )


@pytest.mark.parametrize(
    ("section", "key", "value"),
    [("cell", "floor_s", 4), ("phase_a", "output_tokens", 16), ("server", "release_s", 1)],
)
def test_a_changed_design_is_refused_with_the_keys_that_differ(
    tmp_path: Path, section: str, key: str, value: Any
) -> None:
    config = default_config()
    write_json(tmp_path / "study.json", resolve(config, "config.yaml"))
    config[section][key] = value
    # The folder holds only the design, as after a rehearsal, so the design can still change.
    refuse_changed_design(tmp_path / "study.json", resolve(config, "config.yaml"), "config.yaml")
    (tmp_path / "preflight").mkdir()
    with pytest.raises(ConfigError) as error:
        refuse_changed_design(
            tmp_path / "study.json", resolve(config, "config.yaml"), "config.yaml"
        )
    assert f"{section}.{key}: " in str(error.value)
    assert str(error.value).count("->") == 1


@pytest.mark.parametrize("section", ["statistics", "hypotheses", "saturation", "reference"])
def test_analysis_settings_are_not_part_of_the_measured_design(
    tmp_path: Path, section: str
) -> None:
    config = default_config()
    write_json(tmp_path / "study.json", resolve(config, "config.yaml"))
    (tmp_path / "runs").mkdir()
    key = next(k for k, v in config[section].items() if isinstance(v, int | float) or v is None)
    config[section][key] = 0.5 if section != "saturation" else 0.9
    if (section, key) == ("statistics", "confidence"):
        config[section][key] = 0.9
    refuse_changed_design(tmp_path / "study.json", resolve(config, "config.yaml"), "config.yaml")


def test_build_settings_of_an_environment_do_not_change_the_design() -> None:
    config = load_yaml(ROOT / "config/h20.yaml")
    one = resolve(config, "h20")
    config["engine"]["build_python"] = "/opt/python/bin/python3.11"
    other = resolve(config, "h20")
    assert other["config"]["engine"]["build_python"] == "/opt/python/bin/python3.11"
    assert other["design_sha256"] == one["design_sha256"]


def test_differences_of_designs_name_nested_keys_and_list_positions() -> None:
    old = {"a": {"b": [1, 2], "c": 3}, "d": [1]}
    new = {"a": {"b": [1, 5], "c": 3}, "d": [1, 2], "e": None}
    assert list(differences(old, new)) == ["a.b[1]: 2 -> 5", "d: [1] -> [1, 2]"]
