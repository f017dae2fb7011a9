"""A kind of engine is one module; a command line becomes a server's command."""

import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from connector_tax import servers
from connector_tax.files import read_json, write_json
from connector_tax.servers.command import server_command, split_command
from connector_tax.servers.kinds import ServerError
from tests.study.driving import arguments, index_of, launch_folder, write_study

STUB = """
from connector_tax.artifacts.names import Launch
from connector_tax.servers.kinds import Engine, ServerCommand

class Stub(Engine):
    @property
    def served(self):
        return {"model": "embedded-model", "vocab_size": 32000}

    def command(self, study, launch, port, probe):
        argv = ["python", "-m", "connector_tax.engine", "--config", self.section["file"]]
        argv += ["--configuration", launch.configuration, "--launch-seed", "1"]
        return ServerCommand([*argv, "--port", str(port)], {"PYTHONPATH": "{root}/scripts"})

KIND = Stub
"""


def test_a_kind_of_engine_is_one_file(tmp_path: Path) -> None:
    study_file = write_study(tmp_path / "study")
    document = read_json(study_file)
    definition = tmp_path / "engine.json"
    write_json(definition, document["config"]["engine"]["definition_content"])
    label = document["config"]["engine"]["label"]
    document["config"]["engine"] = {"kind": "stub", "label": label, "file": str(definition)}
    write_json(study_file, document)
    (tmp_path / "stub.py").write_text(STUB)
    program = f"""
        import sys
        from connector_tax import servers
        servers.__path__.append({str(tmp_path)!r})
        from connector_tax.study.launch import main
        sys.exit(main({arguments(study_file)!r}))
    """
    subprocess.run([sys.executable, "-c", textwrap.dedent(program)], check=True, timeout=120)
    index = index_of(study_file)
    assert index["status"] == "done", index
    assert [cell["status"] for cell in index["cells"]] == ["valid"] * len(index["cells"])
    settings = read_json(launch_folder(study_file) / "settings.json")["settings"]
    assert settings["dtype"]["value"] is None
    assert Path(servers.__file__).parent.name == "servers"


def test_a_command_line_is_taken_apart_and_goes_through_no_shell(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("PYTHONPATH", "/theirs")
    made = server_command(
        "LEVEL=debug serve --port {port} --cache tcp://x:{beside1.port} '$(touch x); {a}'",
        8123,
        beside=["cache --port {port}"],
        environment={"FIRST": "1"},
        pythonpath=["mine"],
        probe=None,
    )
    (companion,) = made.companions
    assert made.argv == [
        "serve", "--port", "8123", "--cache", f"tcp://x:{companion.port}", "$(touch x); {a}",
    ]  # fmt: skip
    assert companion.argv == ["cache", "--port", str(companion.port)]
    assert made.environment == {"FIRST": "1", "LEVEL": "debug", "PYTHONPATH": "mine:/theirs"}
    assert made.callers


def test_json_in_a_command_line_is_one_word() -> None:
    config = '{"kv_connector": "Nixl", "extra": {"a b": 1}}'
    line = f"serve --kv {config} --other={config} '{config}' {{port}} \"a {{b\""
    other = f"--other={config}"
    assert split_command(line) == ["serve", "--kv", config, other, config, "{port}", "a {b"]


def test_a_companion_that_is_not_there_is_named() -> None:
    with pytest.raises(ServerError, match=r"\{beside2\.port\}"):
        server_command("serve {beside2.port}", 1, beside=["a {port}"], environment={},
                       pythonpath=[], probe=None)  # fmt: skip
