"""Test the command line of each configuration, on a CPU and on a GPU."""

import copy
import itertools
import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
from snakemake.utils import update_config

from connector_tax.artifacts.names import Launch
from connector_tax.artifacts.study_records import StudyDocument
from connector_tax.config import ROOT, load_yaml, pythons_of
from connector_tax.provenance.manifest import adapters_of
from connector_tax.servers import vllm
from connector_tax.servers.kinds import ServerCommand, ServerError, command_for
from connector_tax.servers.vllm import DEAD_ENGINE, connector_classes, transfer_of
from connector_tax.study.design import resolve
from connector_tax.study.server_command import launch_script

STUDIES = {
    name: resolve(load_yaml(ROOT / f"config/{name}.yaml"), name) for name in ("vllm-cpu", "h20")
}
IDS = [entry["id"] for entry in STUDIES["h20"]["configurations"]]


def made(study: StudyDocument, configuration: str, probe: Path | None = None) -> ServerCommand:
    """Return the command of a configuration, with companions' ports from 9001 on."""
    ports = itertools.count(9001)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(vllm, "free_port", lambda: next(ports))
        return command_for(study, Launch(configuration, 0, "A"), 9000, probe)


def command(
    name: str, configuration: str, probe: Path | None = None, **engine: Any
) -> ServerCommand:
    study = copy.deepcopy(STUDIES[name])
    changed: Any = study["config"]["engine"] | engine
    study["config"]["engine"] = changed
    return made(study, configuration, probe)


def transfer(study: str, configuration: str) -> dict[str, Any]:
    transfer_config = transfer_of(command(study, configuration).argv)
    assert transfer_config is not None
    return transfer_config


@pytest.mark.parametrize(
    "names",
    [("h20",), ("h20", "h20-verdicts"), ("h20", "gpu-small"), ("vllm-cpu",)]
    + [("vllm-cpu", name) for name in ("short-cpu", "extras")],
)
def test_launch_ignores_the_sampling_defaults_of_its_model(names: tuple[str, ...]) -> None:
    config = load_yaml(ROOT / f"config/{names[0]}.yaml")
    for name in names[1:]:
        update_config(config, load_yaml(ROOT / f"config/{name}.yaml"))
    study = resolve(config, names[-1])
    for entry in study["configurations"]:
        argv = made(study, entry["id"]).argv
        assert argv.count("--generation-config") == 1
        assert argv[argv.index("--generation-config") + 1] == "vllm"


def test_study_can_override_the_sampling_parameters() -> None:
    flags = {**STUDIES["h20"]["config"]["engine"]["flags"], "--generation-config": "auto"}
    argv = command("h20", "plain", flags=flags).argv
    assert argv[argv.index("--generation-config") + 1] == "auto"


def test_gpu_command_has_the_connectors_of_the_design() -> None:
    def mooncake(role: str) -> dict[str, Any]:
        # Its own bootstrap server would listen on every interface.
        extra = {"bootstrap_server_address": "127.0.0.1:9001", "mooncake_protocol": "tcp"}
        return {
            "kv_connector": "MooncakeConnector",
            "kv_role": role,
            "kv_connector_extra_config": extra,
        }

    wanted: dict[str, dict[str, Any]] = {
        "noop_connector": {
            "kv_connector": "NoOpConnector",
            "kv_connector_module_path": "connector_tax.vllm.noop_connector",
            "kv_role": "kv_both",
        },
        "mooncake_producer": mooncake("kv_producer"),
        "mooncake_consumer": mooncake("kv_consumer"),
        "mooncake_both": mooncake("kv_both"),
        "nixl_both": {"kv_connector": "NixlConnector", "kv_role": "kv_both"},
        "lmcache_only": {"kv_connector": "LMCacheConnectorV1", "kv_role": "kv_both"},
        "multi_mooncake_lmcache": {
            "kv_connector": "MultiConnector",
            "kv_role": "kv_both",
            "kv_connector_extra_config": {
                "connectors": [
                    mooncake("kv_both"),
                    {"kv_connector": "LMCacheConnectorV1", "kv_role": "kv_both"},
                ]
            },
        },
    }
    assert transfer_of(command("h20", "plain").argv) is None
    assert {i: transfer("h20", i) for i in IDS if i != "plain"} == wanted


def test_cpu_command_has_the_connectors_cpu_settings() -> None:
    for role in ("producer", "consumer", "both"):
        extra = transfer("vllm-cpu", f"mooncake_{role}")["kv_connector_extra_config"]
        assert extra["mooncake_protocol"] == "tcp"
    assert transfer("vllm-cpu", "nixl_both")["kv_buffer_device"] == "cpu"
    lmcache = {"lmcache.mp.host": "tcp://localhost", "lmcache.mp.port": 9001}
    alone = transfer("vllm-cpu", "lmcache_only")
    assert alone["kv_connector"] == "LMCacheMPConnector"
    assert alone["kv_connector_extra_config"] == lmcache
    both = transfer("vllm-cpu", "multi_mooncake_lmcache")
    assert list(connector_classes(both)) == [
        "MultiConnector",
        "MooncakeConnector",
        "LMCacheMPConnector",
    ]
    # The LMCache server has the next port after the bootstrap server.
    assert both["kv_connector_extra_config"]["connectors"] == [
        transfer("vllm-cpu", "mooncake_both"),
        alone | {"kv_connector_extra_config": lmcache | {"lmcache.mp.port": 9002}},
    ]


def test_control_changes_only_engine_flags_and_environment() -> None:
    config = load_yaml(ROOT / "config/vllm-cpu.yaml")
    form = {
        "flags": {"--distributed-executor-backend": "mp"},
        "environment": {"VLLM_ENABLE_V1_MULTIPROCESSING": "1"},
    }
    own = {"configurations": ["plain", "plain_mp"], "engine": {"forms": {"plain_mp": form}}}
    update_config(config, own)
    del config["phase_b"], config["phase_bp"]
    study = resolve(config, "executors.yaml")
    plain, control = (made(study, name) for name in ("plain", "plain_mp"))
    position = plain.argv.index("--distributed-executor-backend") + 1
    assert plain.argv[position] == "uni"
    assert control.argv == [*plain.argv[:position], "mp", *plain.argv[position + 1 :]]
    changed = {"VLLM_ENABLE_V1_MULTIPROCESSING": "1"}
    assert plain.environment["VLLM_ENABLE_V1_MULTIPROCESSING"] == "0"
    assert control.environment == plain.environment | changed


def test_custom_connector_adds_its_module_companion_and_interpreter() -> None:
    config = load_yaml(ROOT / "config/vllm-cpu.yaml")
    argv = ["{python}", "-m", "mine.server", "--listen", "127.0.0.1:{port}"]
    config["connectors"] = [
        {"id": "mine", "connector": "Mine", "module_path": "mine.connector",
         "extra_config": {"url": "tcp://127.0.0.1:{cache.port}"}, "companions": {"cache": argv}},
        {"id": "stack", "connector": "MultiConnector", "children": ["mine", "nixl_both"]},
    ]  # fmt: skip
    config["configurations"] = ["plain", "nixl_both", "mine", "stack"]
    config["phase_b"]["configurations"] = ["plain"]
    config["phase_bp"]["configurations"] = ["plain"]
    config["engine"]["forms"]["mine"] = {
        "python": "other/bin/python",
        "flags": {"--dtype": None},
        "environment": {"OMP_NUM_THREADS": None},
    }
    config["engine"]["pythonpath"] = ["my/modules", "/elsewhere"]
    study = resolve(config, "mine.yaml")
    commands = {name: made(study, name) for name in config["configurations"]}
    assert commands["mine"].argv[0] == "{root}/other/bin/python"
    assert "--dtype" in commands["plain"].argv
    assert "--dtype" not in commands["mine"].argv
    assert commands["plain"].environment.keys() - commands["mine"].environment == {
        "OMP_NUM_THREADS"
    }
    assert commands["plain"].argv[0] == "{root}/envs/vllm-cpu/.venv/bin/python"
    path = commands["plain"].environment["PYTHONPATH"]
    assert path.endswith(":{root}/my/modules:/elsewhere")
    (companion,) = commands["mine"].companions
    wanted = ["{root}/other/bin/python", "-m", "mine.server", "--listen", "127.0.0.1:9001"]
    assert (companion.name, companion.argv, companion.port) == ("cache", wanted, 9001)
    assert [c.name for c in commands["stack"].companions] == ["cache"]
    transfer_config = transfer_of(commands["mine"].argv)
    assert transfer_config == {
        "kv_connector": "Mine", "kv_connector_module_path": "mine.connector", "kv_role": "kv_both",
        "kv_connector_extra_config": {"url": "tcp://127.0.0.1:9001"},
    }  # fmt: skip
    assert pythons_of(study["config"]["engine"]) == [
        "envs/vllm-cpu/.venv/bin/python", "other/bin/python",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("configuration", "names"),
    [
        ("plain", []),
        ("mooncake_producer", ["dummy_bootstrap"]),
        ("mooncake_both", ["dummy_bootstrap"]),
        ("mooncake_consumer", ["dummy_bootstrap"]),
        ("lmcache_only", ["lmcache_server"]),
        ("multi_mooncake_lmcache", ["dummy_bootstrap", "lmcache_server"]),
    ],
)
def test_companion_is_started_if_its_connector_needs_it(
    configuration: str, names: list[str]
) -> None:
    companions = command("vllm-cpu", configuration).companions
    assert [c.name for c in companions] == names
    for companion in companions:
        position = companion.argv.index("--port")
        assert companion.argv[position + 1] == str(companion.port)


@pytest.mark.parametrize("study", STUDIES)
def test_commands_of_two_configurations_differ_only_in_the_connector(study: str) -> None:
    def common(configuration: str) -> tuple[list[str], dict[str, str]]:
        whole = command(study, configuration, ROOT / "overlay")
        argv = whole.argv
        if "--kv-transfer-config" in argv:
            position = argv.index("--kv-transfer-config")
            argv = argv[:position] + argv[position + 2 :]
        ports = {"VLLM_MOONCAKE_BOOTSTRAP_PORT", "VLLM_NIXL_SIDE_CHANNEL_PORT"}
        return argv, {k: v for k, v in whole.environment.items() if k not in ports}

    assert all(common(i) == common("plain") for i in IDS)


def test_flags_keep_their_order_and_can_be_bare_or_negated() -> None:
    flags = {"--enforce-eager": True, "--enable-prefix-caching": False, "--max-model-len": 10}
    argv = command("vllm-cpu", "plain", flags=flags).argv
    assert argv[-4:] == ["--enforce-eager", "--no-enable-prefix-caching", "--max-model-len", "10"]


@pytest.mark.parametrize(
    ("study", "adapters"), [("vllm-cpu", ["connector_tax_cpu_adapter"]), ("h20", [])]
)
def test_manifest_adapters_are_read_from_the_command(study: str, adapters: list[str]) -> None:
    for probe in (None, ROOT / "results/s/patch/overlay"):
        assert adapters_of(command(study, "plain", probe).environment) == adapters
    assert adapters_of({}) == []


def test_command_requests_no_step_log_without_the_probe() -> None:
    assert "AGENTIC_STEP_LOG_PATH" not in command("vllm-cpu", "plain").environment
    with_probe = command("vllm-cpu", "plain", ROOT / "here").environment
    assert with_probe["AGENTIC_STEP_LOG_PATH"] == "engine_step"
    assert with_probe["PYTHONPATH"].startswith("{root}/here:")


@pytest.mark.parametrize("study", STUDIES)
def test_api_key_of_the_caller_does_not_reach_the_server(study: str) -> None:
    assert command(study, "plain").environment["VLLM_API_KEY"] == ""


def test_command_holds_no_path_of_this_machine() -> None:
    for study, configuration in itertools.product(STUDIES, IDS):
        whole = command(study, configuration, ROOT / "overlay")
        text = json.dumps([whole.argv, whole.environment, [c.argv for c in whole.companions]])
        assert str(ROOT) not in text


def test_launches_of_one_configuration_share_vllms_compile_cache_key() -> None:
    study = STUDIES["h20"]
    first, again = (command_for(study, Launch("plain", b, "A"), 9000 + b) for b in (0, 1))
    assert first.environment == again.environment


def test_an_unknown_companion_and_a_missing_child_are_refused() -> None:
    forms = {"nixl_both": {"extra_config": {"port": "{nothing.port}"}}}
    with pytest.raises(
        ServerError, match=r"nothing\.port.*allowed: dummy_bootstrap, lmcache_server"
    ):
        command("vllm-cpu", "nixl_both", forms=forms)
    study = copy.deepcopy(STUDIES["vllm-cpu"])
    entries = study["configurations"]
    study["configurations"] = [e for e in entries if e["id"] != "lmcache_only"]
    with pytest.raises(ServerError, match="multi_mooncake_lmcache is made of lmcache_only"):
        made(study, "multi_mooncake_lmcache")


def test_launch_script_resolves_the_root_and_quotes_all_arguments(tmp_path: Path) -> None:
    hostile = "{root}/a b;$(touch pwned):{root}'x\""
    whole = ServerCommand(["printf", "%s\\n", hostile], {"VALUE": hostile})
    for folder in ("launch", "up here"):
        (tmp_path / folder).mkdir()
    script = tmp_path / "launch/launch.sh"
    script.write_text(launch_script(whole, "title", "../up here"))
    done = subprocess.run(["bash", script], check=True, capture_output=True, text=True)
    assert done.stdout == hostile.replace("{root}", f"{tmp_path}/up here") + "\n"
    whole = ServerCommand(["printf", "%s", '{"path":"{tmp}/x"}'], {})
    script.write_text(launch_script(whole, "title", "."))
    environment = {"TMPDIR": "/a b", "PATH": os.environ["PATH"]}
    done = subprocess.run(
        ["bash", script], check=True, capture_output=True, text=True, env=environment
    )
    assert json.loads(done.stdout) == {"path": "/a b/x"}
    assert not list(tmp_path.rglob("pwned"))


@pytest.mark.parametrize(
    "line",
    [
        "vllm.v1.engine.exceptions.EngineDeadError: EngineCore encountered an issue.",
        "ERROR 11-21 [core.py:1] EngineCore encountered a fatal error.",
        "ERROR 11-21 [core.py:1] EngineCore failed to start.",
    ],
)
def test_log_lines_of_a_dead_engine_are_recognised(line: str) -> None:
    assert DEAD_ENGINE.search(line)
