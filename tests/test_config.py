"""Test that shipped configurations are valid, and broken ones get a precise error."""

import copy
import itertools
import re
import shlex
from pathlib import Path
from typing import Any

import pytest
from snakemake.utils import update_config

from connector_tax.ab.arguments import parse
from connector_tax.artifacts.checks import BOUNDS, DEVICE_BOUNDS
from connector_tax.config import (
    ROOT,
    ConfigError,
    check_study,
    load_configurations,
    load_yaml,
)
from connector_tax.config import shipped as shipped_file
from connector_tax.provenance.archive import read_head
from connector_tax.study.design import resolve

KNOWN = list(load_configurations(ROOT / "config" / "configurations.yaml"))


def shipped(name: str) -> dict[str, Any]:
    config: dict[str, Any] = load_yaml(ROOT / "config" / name)
    return config


def replaced(config: dict[str, Any], path: str, value: Any) -> dict[str, Any]:
    changed = copy.deepcopy(config)
    *parents, last = path.split(".")
    target = changed
    for key in parents:
        target = target.setdefault(key, {})
    target[last] = value
    return changed


def test_missing_keys_get_defaults_and_given_ones_are_kept() -> None:
    given = shipped("config.yaml")
    before = copy.deepcopy(given)
    config = check_study(given, "config.yaml", KNOWN)
    assert given == before
    assert config["metrics"] == {"interval_s": 0.5}
    assert config["hypotheses"]["prior"]["plain_ttft_p90_s"] == 7.35
    assert check_study(config | {"engine": given["engine"]}, "again", KNOWN) == config


@pytest.mark.xfail(reason="the shorter default study has no archive yet", strict=True)
def test_default_study_equals_the_archived_one() -> None:
    archived: Any = read_head(ROOT / "results" / "archive" / "default.tar.zst")
    study: Any = resolve(shipped("config.yaml"), "config.yaml")
    # Release 0.3 had a section that is gone.
    del archived["config"]["quiet"]
    for key in ("config", "configurations", "run_order", "cells"):
        assert study[key] == archived[key]


def test_validity_bound_has_its_default_unless_the_study_sets_it() -> None:
    config = shipped("config.yaml")
    assert resolve(config, "config.yaml")["config"]["validity"] == BOUNDS
    stricter = {**config, "validity": {"max_error_rate": 0.0}}
    assert resolve(stricter, "x")["config"]["validity"] == {**BOUNDS, "max_error_rate": 0.0}
    emulated = resolve(shipped("h20-emulated.yaml"), "x")["config"]["validity"]
    assert emulated == {**BOUNDS, **DEVICE_BOUNDS["emulated"]}


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        ("cell.floor_s", -1, "cell.floor_s: found -1; allowed: > 0"),
        ("phase_a.rates_rps", [float("nan")], "phase_a.rates_rps[0]: found nan; allowed: a number"),
        ("phase_a.rates_rps", [float("inf")], "phase_a.rates_rps[0]: found inf; allowed: a number"),
        ("phase_a.rates_rps", [1e9], "phase_a.rates_rps[0]: found 1000000000.0; allowed: a numb"),
        ("phase_a.rates_rps", [9e5], "found 900000; allowed: at most 4e+05 with cell.cap_s 5"),
        ("cell.floor_s", 1e300, "cell.floor_s: found 1e+300; allowed: a number of at most 604800"),
        ("cell.cap_s", 6e5, "phase_a.rates_rps: found 80; allowed: at most 3.333 with cell.cap"),
        ("blocks", 10**30, "blocks: found 1000000000000000000000000000000; allowed: a number"),
        (
            "cell.flor_s",
            3,
            "cell.flor_s: unknown key; did you mean floor_s? allowed here: cap_s, drain_s, end_",
        ),
        ("phase_a.rates_rps", [1, -2], "phase_a.rates_rps[1]: found -2; allowed: > 0"),
        ("phase_a.rates_rps", [2, 1], "phase_a.rates_rps: found [2, 1]; allowed: ascending"),
        ("phase_a.rates_rps", [], "phase_a.rates_rps: found []; allowed: at least 1"),
        ("arrivals.process", "uniform", "arrivals.process: found 'uniform'; allowed: one of fixed"),
        ("arrivals.gamma_shape", 2.0, "arrivals.gamma_shape: found 2.0; allowed: null"),
        ("arrivals.process", "gamma", "arrivals.gamma_shape: found None; allowed: a number > 0"),
        ("arrivals.process", "fixd", "found 'fixd'; did you mean fixed? allowed: one of"),
        ("engine.device", "cpu", "engine.device: not allowed with engine.kind embedded"),
        ("engine", {"kind": "embedded", "label": "x"}, "engine.definition: missing; it is"),
        ("rehearsal", {"accelerator": "L4"}, "rehearsal: found accelerator; allowed: acc"),
        ("validity", {"max_foreign": 1}, "max_foreign: unknown key; did you mean max_foreign_cpu"),
        ("engine.kind", "kinds", "engine.kind: found 'kinds'; allowed: one of command, embedded"),
        ("engine.kind", "../x", "engine.kind: found '../x'; allowed: text matching"),
        ("engine.kind", "sglang", "engine.kind: found 'sglang'; allowed: one of command"),
        (
            "configurations",
            ["plain", "mooncake"],
            "configurations[1]: found 'mooncake'; did you mean mooncake_both? allowed: plain",
        ),
        (
            "configurations",
            ["noop_connector", "nixl_both"],
            "allowed: a list that contains 'plain'",
        ),
        (
            "configurations",
            ["plain", "$(rm -rf ~)"],
            "configurations[1]: found '$(rm -rf ~)'; allowed",
        ),
        *(
            ("server.host", host, f"server.host: found {host!r}; allowed: '127.0.0.1'")
            for host in ("localhost", "::1", "0.0.0.0", "192.0.2.1")
        ),
        ("study", "../elsewhere", "study: found '../elsewhere'; allowed: text matching"),
        ("study", "elsewhere\n", "study: found 'elsewhere\\n'; allowed: text matching"),
        ("server.device", "$(rm -rf ~)", "device: found '$(rm -rf ~)'; allowed: text matching"),
        ("cell.cap_s", 0.9, "cell.cap_s: found 0.9; allowed: at least cell.floor_s"),
        ("metrics.interval_s", 0.7, "found 0.7; allowed: at most cell.floor_s / 1.5 (0.66"),
        ("load_generator.connections_per_worker", 8, "must be at least cell.inflight_cap (256)"),
        ("phase_bp.configurations", ["plain", "x"], "phase_bp.configurations[1]: found 'x'"),
        ("phase_b.configurations", ["plain", "x"], "phase_b.configurations[1]: found 'x'"),
        ("baseline", "nixl", "configurations: found ['plain', 'noop_connector'"),
        ("phase_bp.configurations", ["nixl_both"], "allowed: a list that contains 'plain'"),
    ],
)
def test_broken_configuration_names_key_found_and_allowed(
    path: str, value: Any, message: str
) -> None:
    with pytest.raises(ConfigError) as error:
        resolve(replaced(shipped("config.yaml"), path, value), "my.yaml")
    assert message in str(error.value)
    assert all(line.startswith("my.yaml: ") for line in str(error.value).splitlines())


def test_mistyped_required_key_gives_one_error() -> None:
    config = shipped("config.yaml")
    config["phase_a"]["rate_rps"] = config["phase_a"].pop("rates_rps")
    with pytest.raises(ConfigError) as error:
        resolve(config, "my.yaml")
    (line,) = str(error.value).splitlines()
    assert "phase_a.rate_rps: unknown key; did you mean rates_rps?" in line


OWN = {"id": "mine", "connector": "Mine", "module_path": "mine.connector"}


def test_study_can_define_configurations() -> None:
    config = shipped("vllm-cpu.yaml")
    stacked = {"id": "both", "connector": "MultiConnector", "children": ["mine", "nixl_both"]}
    config["connectors"] = [OWN, stacked]
    config["configurations"] = ["plain", "nixl_both", "mine", "both"]
    config["phase_b"]["configurations"] = ["plain", "mine"]
    config["phase_bp"]["configurations"] = ["plain", "mine"]
    study = resolve(config, "my.yaml")
    mine = study["configurations"][2]
    assert (mine["label"], mine["role"], mine["gate"]) == ("mine", "kv_both", None)
    assert [entry["id"] for entry in study["configurations"]] == config["configurations"]
    other = copy.deepcopy(config)
    other["connectors"][0]["extra_config"] = {"depth": 2}
    assert resolve(other, "my.yaml")["design_sha256"] != study["design_sha256"]


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        ({"id": "nixl_both"}, "connectors[0].id: found 'nixl_both' twice"),
        ({"children": ["nobody"]}, "connectors: mine.children: found 'nobody'; allowed: plain"),
        ({"id": "plain_2"}, "connectors[0].id: found 'plain_2'; allowed: text matching"),
        ({"id": "$(rm -rf ~)"}, "connectors[0].id: found '$(rm -rf ~)'; allowed: text matching"),
        ({"id": "mine_20"}, "connectors[0].id: found 'mine_20'; allowed: text matching"),
        ({"companions": {"x": {"command": ["x"]}}}, "connectors[0].companions.x"),
        ({"clas": "x"}, "connectors[0].clas: unknown key"),
        ({"companions": {"x": []}}, "connectors[0].companions.x: found []"),
    ],
)
def test_broken_configuration_of_a_study_is_refused(entry: dict[str, Any], message: str) -> None:
    config = shipped("vllm-cpu.yaml")
    config["connectors"] = [{**OWN, **entry}]
    with pytest.raises(ConfigError) as error:
        resolve(config, "my.yaml")
    assert message in str(error.value)


def test_custom_connector_on_the_embedded_engine_is_refused_with_advice() -> None:
    config = replaced(shipped("config.yaml"), "configurations", ["plain", "mine"])
    config |= {"connectors": [OWN], "study": "mine"}
    for phase in ("phase_b", "phase_bp"):
        config[phase]["configurations"] = ["plain", "mine"]
    with pytest.raises(ConfigError) as error:
        resolve(config, "mine.yaml")
    assert "no entry for mine" in str(error.value)
    for way_out in ("config/vllm-cpu.yaml MINE.yaml", "`mine: null`", "engine.definition"):
        assert way_out in str(error.value)


def test_command_lines_of_measure_your_server_are_accepted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for folder in ("my_modules", "scripts"):
        (tmp_path / folder).mkdir()
    text = (ROOT / "docs" / "measure-your-server.md").read_text().replace("\\\n", "")
    # As the shell expands them.
    text = text.replace("$SERVE", "vllm serve M --port").replace("$(cat slow.json)", "{}")
    lines = re.findall(r"^connector-tax ab (--.*)$", text, re.M)
    assert lines
    for line in lines:
        options = parse(shlex.split(line))
        assert [name for name, _ in options.candidate]


OVERLAYS = {
    "mine.example.yaml": ("config.yaml", "vllm-cpu.yaml"),
    "short-cpu.yaml": ("vllm-cpu.yaml",),
    "extras.yaml": ("vllm-cpu.yaml",),
    "h100.yaml": ("h20.yaml",),
    "h200-emulated.yaml": ("h20-emulated.yaml",),
    "emulated-controls.yaml": ("h20-emulated.yaml",),
    "emulated-connectors.yaml": ("h20-emulated.yaml",),
    "emulated-saturation.yaml": ("h20-emulated.yaml",),
    "emulated-knee.yaml": ("h20-emulated.yaml",),
    "gpu-short-8b.yaml": ("gpu-short.yaml",),
}


@pytest.mark.parametrize(
    ("overlay", "base"), [(name, base) for name, bases in OVERLAYS.items() for base in bases]
)
def test_overlay_is_merged_over_a_complete_configuration(overlay: str, base: str) -> None:
    config, own = shipped(base), shipped(overlay)
    update_config(config, own)
    study = resolve(config, overlay)
    assert study["study"] == own["study"] != shipped(base)["study"]
    base_configurations = resolve(shipped(base), base)["config"]["configurations"]
    assert study["config"]["configurations"] == own.get("configurations", base_configurations)
    # Keys that the overlay lacks keep the base's values.
    assert study["config"]["resources"] == resolve(shipped(base), base)["config"]["resources"]


@pytest.mark.parametrize("key", ["study", "blocks", "engine", "phase_a", "cell"])
def test_study_without_an_essential_key_is_refused(key: str) -> None:
    config = shipped("config.yaml")
    del config[key]
    with pytest.raises(ConfigError, match=rf"my\.yaml: {key}: missing; it is required"):
        check_study(config, "my.yaml", KNOWN)


def test_study_that_takes_more_than_a_week_is_refused() -> None:
    config = shipped("config.yaml")
    config |= {"blocks": 100, "cell": {**config["cell"], "floor_s": 1000, "cap_s": 2000}}
    with pytest.raises(ConfigError, match=r"cell.floor_s: found 1000 for .* days; allowed: a week"):
        resolve(config, "my.yaml")


def test_unparsable_yaml_names_file_and_line(tmp_path: Path) -> None:
    path = tmp_path / "broken.yaml"
    for text, message in (
        ("a: 1\nb: [1,\n", "line 3: not valid YAML: "),
        ("a:\n\tb: 1\n", "line 2: not valid YAML: found character that cannot start any token"),
        ("a: {b: 1}\nc: {d: 1,\n  d: 2}\n", "line 3: not valid YAML: found key 'd' a second time"),
        # No tag builds an object.
        ("a: !!python/object/apply:os.system [true]\n", "line 1: not valid YAML: could not det"),
    ):
        path.write_text(text)
        with pytest.raises(ConfigError) as error:
            load_yaml(path)
        assert str(error.value).startswith(f"{path}: {message}")
        assert "\n" not in str(error.value)


def test_unknown_child_of_a_stacked_connector_is_refused(tmp_path: Path) -> None:
    text = (ROOT / "config" / "configurations.yaml").read_text()
    path = tmp_path / "configurations.yaml"
    path.write_text(text.replace("[mooncake_both, lmcache_only]", "[mooncake_both, lmcache]"))
    with pytest.raises(ConfigError, match=r"multi_mooncake_lmcache\.children: found 'lmcache'"):
        load_configurations(path)


def bomb(opening: str, closing: str) -> str:
    """Return YAML in which each of nine values names the one before nine times."""
    lines = [f"a: &a {opening}x: x{closing}"]
    for before, name in itertools.pairwise("abcdefghi"):
        aliases = (f"{f'k{n}: ' if opening == '{' else ''}*{before}" for n in range(9))
        lines.append(f"{name}: &{name} {opening}{', '.join(aliases)}{closing}")
    return "\n".join(lines)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (bomb("[", "]"), "line 5: found more than 20,000 values or 40 levels"),
        (bomb("{", "}"), "line 5: found more than 20,000 values or 40 levels"),
        (bomb("{<<: [", "]}").replace("k0: ", ""), "found more than 20,000 values or 40 levels"),
        ("cell: &c {a: {b: *c}}", "line 1: found alias *c inside the value that it names"),
        ("a: &a [*a]", "line 1: found alias *a inside the value that it names"),
        ("[" * 5000 + "]" * 5000, "found more than 20,000 values or 40 levels"),
        ("x" * 300_000, "found more than 262,144 bytes"),
        ("study: 2026-01-01", "study: found 2026-01-01, which YAML reads as date; allowed: text"),
        ("2026-01-01: 1", "the file: found key 2026-01-01; allowed: text, in quotes where YAML"),
        ("study: !!binary aGVsbG8=", "study: found b'hello', which YAML reads as bytes"),
        ("configurations: !!set {plain}", "which YAML reads as set"),
        ("blocks: !!int x", "not valid YAML: invalid literal for int()"),
        ("study: !!timestamp 2026-13-45", "not valid YAML: month must be in 1..12"),
        ("blocks: " + "9" * 5000, "not valid YAML: Exceeds the limit"),
        ("study: !!python/object/apply:os.abort []", "could not determine a constructor"),
        ("blocks: 3\x00", "not valid YAML: unacceptable character #x0000"),
        ("__use_yte__: true", "__use_yte__: found a key that makes Snakemake run code"),
    ],
)
def test_unusable_yaml_is_refused_in_one_line(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "odd.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=r"^[^\n]{,600}$") as refused:
        load_yaml(path)
    assert str(refused.value).startswith(f"{path}: ")
    assert message in str(refused.value)


@pytest.mark.parametrize(
    ("path", "message"),
    [("/dev/zero", "found no regular file"), ("/" + "x" * 5000, "too long"), ("a\0b", "null byte")],
)
def test_path_that_names_no_file_to_read_is_refused(path: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_yaml(Path(path))


@pytest.mark.parametrize("section", [None, 5, "vllm", [], True])
def test_engine_that_is_not_a_section_is_refused(section: Any) -> None:
    with pytest.raises(ConfigError, match=r"engine: found .*; allowed: object"):
        resolve(shipped("config.yaml") | {"engine": section}, "my.yaml")


def test_grid_of_a_million_shapes_is_refused() -> None:
    config = shipped("config.yaml")
    config["phase_b"] |= {key: list(range(2, 2000)) for key in ("input_tokens", "output_tokens")}
    with pytest.raises(ConfigError, match=r"cells in 39 launches, .* days; allowed: a week"):
        resolve(config, "my.yaml")


def test_escape_sequence_in_a_key_is_not_printed() -> None:
    with pytest.raises(ConfigError, match=r"my\.yaml: evil line: unknown key") as refused:
        resolve(shipped("config.yaml") | {"\x1b[2Jevil\nline": 1}, "my.yaml")
    assert "\x1b" not in str(refused.value)


def test_files_of_the_package_are_found_from_another_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("config/accelerators.yaml", "config/models/Qwen3-0.6B.json"):
        assert shipped_file(name).read_bytes() == (ROOT / name).read_bytes()
    assert shipped_file("config/../config/config.yaml") == Path("config/../config/config.yaml")
