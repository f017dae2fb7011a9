"""Test `connector-tax settings` with the environment of `make vllm-settings`, against the
records.
"""

import json
import re
import shutil
from pathlib import Path

import pytest

from connector_tax.config import ROOT
from connector_tax.settings import run
from connector_tax.settings.__main__ import main
from connector_tax.settings.matrix import Matrix

BUILT = ROOT / "envs/vllm-settings/.venv/built.json"
MATRIX: Matrix = json.loads((ROOT / "docs/results/records/settings.json").read_text())
MODELS = ("Qwen3-8B", "gpt-oss-20b", "gemma-3-12b-it")
CONNECTORS = ("NixlConnector", "OffloadingConnector", "LMCacheConnectorV1")
# The method that a test removes from the executor's stand-in.
METHOD = re.compile(r"    def determine_available_memory.*?(?=\n    def )", re.DOTALL)

pytestmark = [
    pytest.mark.long,
    pytest.mark.timeout(1200),
    pytest.mark.skipif(not BUILT.exists(), reason="make vllm-settings is not built"),
]


def test_three_models_with_four_connectors_resolve_as_recorded(
    capsys: pytest.CaptureFixture[str],
) -> None:
    models = [word for name in MODELS for word in ("--model", name)]
    connectors = [word for name in CONNECTORS for word in ("--connector", name)]
    assert main([*models, *connectors, "--json"]) == 1
    rows = json.loads(capsys.readouterr().out)["rows"]
    names = ("plain", *CONNECTORS)
    recorded = [r for r in MATRIX["rows"] if r["model"] in MODELS and r["connector"] in names]
    key = [(row["model"], row["connector"]) for row in rows]
    assert rows == sorted(recorded, key=lambda row: key.index((row["model"], row["connector"])))


def test_hybrid_manager_forced_on_is_refused_for_a_connector_without_support(
    capsys: pytest.CaptureFixture[str],
) -> None:
    flag = ["--", "--no-disable-hybrid-kv-cache-manager"]
    names = ["--connector", "LMCacheConnectorV1", "--connector", "NixlConnector"]
    assert main(["--model", "gpt-oss-20b", *names, "--json", *flag]) == 1
    rows = {row["connector"]: row for row in json.loads(capsys.readouterr().out)["rows"]}
    reason = "Connector LMCacheConnectorV1 does not support HMA but HMA is enabled."
    assert rows["LMCacheConnectorV1"]["reason"].startswith(reason)
    assert rows["LMCacheConnectorV1"]["capacity"] == []
    assert rows["NixlConnector"]["state"] == "resolves"


def test_stand_in_without_a_method_fails_the_proof(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "inside"
    shutil.copytree(run.PROGRAM.parent, folder, ignore=shutil.ignore_patterns("__pycache__"))
    program = folder / run.PROGRAM.name
    whole = program.read_text()
    program.write_text(METHOD.sub("", whole))
    assert program.read_text() != whole
    monkeypatch.setattr(run, "PROGRAM", program)
    assert main(["--model", "gpt-oss-20b", "--connector", "LMCacheConnectorV1"]) == 3
    err = capsys.readouterr().err
    assert "lacks what this command uses: plain of tiny-qwen3: ContractError: Executor.det" in err


def test_unknown_architecture_gives_one_line_as_reason(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = json.loads((ROOT / "config/models/tiny-qwen3.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"architectures": ["NoSuchModel"]}))
    assert main(["--model", str(tmp_path), "--connector", "NixlConnector"]) == 3
    lines = [line for line in capsys.readouterr().out.splitlines() if "not resolved: " in line]
    assert len(lines) == 1
    assert "NoSuchModel" in lines[0]
