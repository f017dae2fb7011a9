"""Test security: loopback only, private sockets, quoted shell values, no secret in a file."""

import re
from pathlib import Path
from typing import Any

import psutil
import pytest
import yaml

from connector_tax.artifacts.names import Launch
from connector_tax.config import ROOT, ConfigError, check_study, load_configurations, load_yaml
from connector_tax.files import read_json, write_json
from connector_tax.foreign import REDACTED
from connector_tax.loadgen.generator import LoadGenerator, LoadGeneratorOptions
from connector_tax.loadgen.messages import Target
from connector_tax.servers.kinds import command_for, free_port
from connector_tax.study.launch import Attempts, clear_interrupted
from connector_tax.study.server import Server
from tests.study.driving import write_study

CONFIGURATIONS = load_configurations(ROOT / "config" / "configurations.yaml")


def test_workflow_rules_quote_every_shell_value() -> None:
    """Check that configuration values reach a shell only through Snakemake's `:q`."""
    fixed = {"input.study", "log", "output", "params.study", "params.folder"}
    for path in sorted((ROOT / "workflow" / "rules").glob("*.smk")):
        for text in re.findall(r'^ +"(.*)"$', path.read_text(), re.MULTILINE):
            for name in re.findall(r"(?<!\{)\{([a-z._]+(?:!r)?)\}(?!\})", text):
                assert name in fixed, f"{path.name}: {{{name}}} is not quoted: {text}"


def config() -> dict[str, Any]:
    value: dict[str, Any] = load_yaml(ROOT / "config" / "config.yaml")
    return value


def test_hostile_identifier_is_not_executed_by_the_shell(tmp_path: Path) -> None:
    """Start a launch whose configuration id is a shell command, bypassing all schemas."""
    hostile = "$(touch pwned)`touch pwned`;touch pwned"
    study = read_json(write_study(tmp_path / "results" / "tiny"))
    command = command_for(study, Launch(hostile, 0, "A"), free_port())
    server = Server(tmp_path, command, f"{hostile}\ntouch pwned", 1)
    server.start()
    assert server._process is not None
    server._process.wait(30)
    assert hostile in (tmp_path / "vllm_stderr.log").read_text()
    assert not list(tmp_path.rglob("pwned"))


def with_engine(path: str, value: Any) -> dict[str, Any]:
    """Return the default study with an engine of kind vllm in which `path` is `value`."""
    study = config()
    study["engine"] = load_yaml(ROOT / "config" / "vllm-cpu.yaml")["engine"]
    *sections, key = path.split("/")
    section = study["engine"]
    for name in sections:
        section = section.setdefault(name, {})
    section[key] = value
    return study


SECRETS = [
    ("environment/HF_TOKEN", "TheSecret"),
    ("environment/VLLM_API_KEY", "TheSecret"),
    ("environment/AWS_SECRET_ACCESS_KEY", "TheSecret"),
    ("environment/PASSWORD", "TheSecret"),
    ("environment/MOONCAKE_PWD", "TheSecret"),
    ("environment/NIXL_AUTH", "TheSecret"),
    ("environment/HTTP_AUTHORIZATION", "TheSecret"),
    ("environment/LMCACHE_REMOTE_URL", "redis://user:TheSecret@cache:6379"),
    ("environment/LMCACHE_REMOTE_URL", "https://TheSecret@cache"),
    ("environment/HF_ENDPOINT", "https://hub.example/?a=1&X-Amz-Signature=TheSecret"),
    ("environment/LMCACHE_EXTRA_CONFIG", '{"remote": {"password": "TheSecret"}}'),
    ("environment/LMCACHE_EXTRA_CONFIG", '[{"remote": "hf_TheSecretTheSecretTheSecret"}]'),
    ("flags/--api-key", "TheSecret"),
    ("flags/--api-key", 12345678),
    ("flags/--api-keys", "TheSecret"),
    ("flags/--hf-token", "TheSecret"),
    ("flags/--kv-transfer-config", '{"connector": "hf_TheSecretTheSecretTheSecret"}'),
    ("flags/--hf-overrides", '{"auth": {"user": "TheSecret"}}'),
    ("forms/plain/extra_config", {"store": {"accessKey": "TheSecret"}}),
    ("forms/plain/extra_config", {"api_keys": ["TheSecret"]}),
    ("forms/plain/transfer_config", {"header": "Authorization: Bearer TheSecret01"}),
    ("model", "https://user:TheSecret@hub.example/model"),
]


@pytest.mark.parametrize(("path", "value"), SECRETS, ids=lambda v: str(v).replace("/", "."))
def test_study_with_a_secret_is_refused_without_showing_it(path: str, value: Any) -> None:
    with pytest.raises(ConfigError) as refused:
        check_study(with_engine(path, value), "mine.yaml", list(CONFIGURATIONS))
    key = re.escape("engine." + path.replace("/", "."))
    assert re.match(rf"mine\.yaml: {key}\S*: found what looks like a secret", str(refused.value))
    assert "TheSecret" not in str(refused.value)
    assert "12345678" not in str(refused.value)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    "command",
    [
        ["store", "--password", "TheSecret"],
        ["store", "--password=TheSecret"],
        ["bash", "-c", "STORE_TOKEN=TheSecret exec store"],
        ["bash", "-c", "exec store --api-key TheSecret"],
        ["bash", "-c", 'printf \'{"password": "TheSecret"}\' > x'],
    ],
    ids=" ".join,
)
def test_companion_with_a_secret_is_refused(command: list[str]) -> None:
    entry = {"id": "mine", "connector": None, "companions": {"store": command}}
    with pytest.raises(ConfigError, match=r"connectors\[0\]\.companions\.store\[\d\]: found what"):
        check_study({**config(), "connectors": [entry]}, "mine.yaml", list(CONFIGURATIONS))


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("flags/--tokenizer", "./build/models/tiny-qwen3"),
        ("flags/--max-num-batched-tokens", 8192),
        ("flags/--return-tokens-as-token-ids", True),
        ("flags/--hf-token", None),
        ("flags/--hf-overrides", '{"num_key_value_heads": 8}'),
        ("flags/--kv-transfer-config", '{"kv_connector_extra_config": {"backends": ["UCX"]}}'),
        ("environment/TOKENIZERS_PARALLELISM", "false"),
        ("environment/VLLM_MAX_TOKENS_PER_EXPERT_FP4_MOE", "163840"),
        ("environment/UCX_IB_PKEY", "0x8001"),
        ("environment/VLLM_API_KEY", ""),
        ("environment/LMCACHE_REMOTE_URL", "redis://127.0.0.1:6379"),
        ("forms/plain/extra_config", {"stop_token_ids": [1, 2]}),
        ("forms/plain/extra_config", {"url": "redis://:$STORE@127.0.0.1"}),
    ],
    ids=lambda v: str(v).replace("/", "."),
)
def test_value_that_only_resembles_a_secret_is_accepted(path: str, value: Any) -> None:
    check_study(with_engine(path, value), "mine.yaml", list(CONFIGURATIONS))


def test_shipped_connector_configurations_hold_no_secret(tmp_path: Path) -> None:
    value = load_yaml(ROOT / "config" / "configurations.yaml")
    value["configurations"][1]["extra_config"] = {"password": "TheSecret"}
    path = tmp_path / "configurations.yaml"
    path.write_text(yaml.safe_dump(value))
    with pytest.raises(
        ConfigError, match=r"configurations\[1\]\.extra_config\.password: found what"
    ):
        load_configurations(path)


def test_engine_and_load_generator_listen_on_loopback_and_private_sockets_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", None)
    study = read_json(write_study(tmp_path / "results" / "tiny"))
    port = free_port()
    server = Server(tmp_path, command_for(study, Launch("plain", 0, "A"), port), "test", port)
    server.start()
    try:
        server.wait_ready(30)
        target = Target(host="127.0.0.1", port=port)
        with LoadGenerator(target, LoadGeneratorOptions(workers=1)) as generator:
            pids = [psutil.Process().pid, server.pid, *generator.worker_pids]
            mine = [c for c in psutil.net_connections("inet") if c.pid in pids]
            assert any(c.status == psutil.CONN_LISTEN for c in mine)
            for connection in mine:
                assert connection.laddr[:1] == ("127.0.0.1",), connection
            paths = {
                Path(str(c.laddr))
                for c in psutil.net_connections("unix")
                if c.pid in pids and str(c.laddr).startswith("/")
            }
            assert paths
            # Once everybody is connected the folder is gone; a folder that is there is private.
            for folder in {path.parent for path in paths if path.parent.exists()}:
                assert folder.stat().st_mode & 0o077 == 0, folder
                assert folder.stat().st_uid == psutil.Process().uids().effective
            assert all(tmp_path in path.parents for path in paths)
    finally:
        server.stop(5)


def test_secrets_in_the_logs_of_a_killed_launch_are_removed_and_counted(tmp_path: Path) -> None:
    folder = tmp_path / "study" / "raw" / "plain" / "block0" / "A"
    folder.mkdir(parents=True)
    write_json(folder / "attempts.json", [{"attempt": 1, "started_utc": "x"}])
    log = folder / "vllm_stdout.log"
    log.write_text("ready\nenviron({'DB_PASS': 'hunter2'})\nDB_PASS=hunter2\n")
    clear_interrupted(folder, Attempts(folder), print)
    assert log.read_text() == f"ready\n{REDACTED}\n{REDACTED}\n"
    assert read_json(folder / "attempts.json")[0]["redacted"] == {log.name: 2}
