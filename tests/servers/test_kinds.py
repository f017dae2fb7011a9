"""Test that an engine kind is one module, and that command lines become server commands."""

import socket
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest

from connector_tax.config import ROOT, load_yaml
from connector_tax.files import read_json, write_json
from connector_tax.servers.command import server_command, split_command
from connector_tax.servers.kinds import ServerError, lasting_port, without_root
from tests.study.driving import arguments, index_of, launch_folder

STUB = """
from connector_tax.artifacts.names import Launch
from connector_tax.servers.kinds import Engine, ServerCommand

class Stub(Engine):
    needs = ("python", "model", "served_model_name", "vocab_size")

    @property
    def served(self):
        section = self.section
        return {"model": section["served_model_name"], "vocab_size": section["vocab_size"]}

    def command(self, study, launch, port, probe):
        argv = [self.section["python"], "-m", "connector_tax.engine"]
        argv += ["--config", self.section["model"]]
        argv += ["--configuration", launch.configuration, "--launch-seed", "1"]
        return ServerCommand([*argv, "--port", str(port)], {"PYTHONPATH": "{root}/scripts"})

KIND = Stub
"""


@pytest.mark.workflow
def test_each_engine_kind_is_one_module(tmp_path: Path) -> None:
    definition, study_file = tmp_path / "engine.json", tmp_path / "study" / "study.json"
    write_json(definition, load_yaml(ROOT / "config" / "embedded.yaml"))
    engine = {
        "kind": "stub", "label": "a stub", "python": sys.executable, "model": str(definition),
        "served_model_name": "embedded-model", "vocab_size": 32000,
    }  # fmt: skip
    (tmp_path / "stub.py").write_text(STUB)
    program = f"""
        import sys
        from pathlib import Path
        from connector_tax import servers
        servers.__path__.append({str(tmp_path)!r})
        from connector_tax.study.launch import main
        from tests.study.driving import write_study
        write_study(Path({str(study_file.parent)!r}), engine={engine!r})
        sys.exit(main({arguments(study_file)!r}))
    """
    command = [sys.executable, "-c", textwrap.dedent(program)]
    subprocess.run(command, check=True, timeout=120, cwd=ROOT)
    index = index_of(study_file)
    assert index["status"] == "done", index
    assert [cell["status"] for cell in index["cells"]] == ["valid"] * len(index["cells"])
    settings = read_json(launch_folder(study_file) / "settings.json")["settings"]
    assert settings["dtype"]["value"] is None


def test_command_line_is_split_without_a_shell(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("PYTHONPATH", "/theirs")
    line = "LEVEL=debug serve --port {port} --cache tcp://x:{beside1.port} '$(touch x); {a}'"
    section: Any = {"commands": {"x": line}, "beside": ["cache --port {port}"],
                    "environment": {"FIRST": "1"}, "pythonpath": ["mine"]}  # fmt: skip
    made = server_command(section, "x", "plain", 8123, None)
    (companion,) = made.companions
    assert made.argv == [
        "serve", "--port", "8123", "--cache", f"tcp://x:{companion.port}", "$(touch x); {a}",
    ]  # fmt: skip
    assert companion.argv == ["cache", "--port", str(companion.port)]
    assert made.environment == {"FIRST": "1", "LEVEL": "debug", "PYTHONPATH": "mine:/theirs"}
    section["environment"] = {"PYTHONPATH": "/given"}
    made = server_command(section, "x", "plain", 8123, None)
    assert made.environment == {"LEVEL": "debug", "PYTHONPATH": "mine:/given"}
    assert made.callers


def test_json_in_a_command_line_stays_one_argument() -> None:
    config = '{"kv_connector": "Nixl", "extra": {"a b": 1}}'
    line = f"serve --kv {config} --other={config} '{config}' {{port}} \"a {{b\""
    other = f"--other={config}"
    assert split_command(line) == ["serve", "--kv", config, other, config, "{port}", "a {b"]


def test_missing_companion_program_is_named() -> None:
    section: Any = {"commands": {"x": "serve {beside2.port}"}, "beside": ["a {port}"]}
    with pytest.raises(ServerError, match=r"\{beside2\.port\}"):
        server_command(section, "x", "plain", 1, None)


def test_lasting_port_is_stable_until_another_process_uses_it() -> None:
    port = lasting_port("study/name")
    assert lasting_port("study/name") == port
    with socket.create_server(("127.0.0.1", port)):
        other = lasting_port("study/name")
    assert 20_000 <= port < other < 30_000


def test_only_the_projects_folder_is_replaced_in_a_text() -> None:
    text = f"{ROOT}/x, {ROOT}: {ROOT}."
    assert without_root(text) == "{root}/x, {root}: {root}."
    for other in (f"{ROOT}-tmp/x", f"{ROOT}2/x", f"{ROOT}.old/x"):
        assert "{root}" not in without_root(other)
