"""Test the settings that a CPU build resolves against the log of a running server.

`pytest -m long tests/settings/test_settings_cpu.py`, with the interpreter of tests/vllm/test_real.
"""

import json
import os
import re
import signal
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from connector_tax.config import ROOT
from connector_tax.files import read_json
from connector_tax.servers.vllm import ENTRY_POINT
from connector_tax.settings import request
from connector_tax.settings.__main__ import main
from connector_tax.vllm.tiny_model import write_model
from tests.vllm.test_real import PYTHON

pytestmark = [
    pytest.mark.long,
    pytest.mark.timeout(2400),
    pytest.mark.skipif(not PYTHON.exists(), reason=f"{PYTHON}: no vLLM environment there"),
]
CAPACITY = re.compile(
    r"KV cache size: ([\d,]+) tokens, Maximum concurrency for [\d,]+ tokens per request: ([\d.]+)x"
)
REFUSAL = re.compile(r"EngineCore pid=\d+\).*?\bValueError: (.*)")
LENGTH = 32768
# A shape of each kind: a shipped shape, made so small by these changes that it takes under a
# second.
SMALL = {"hidden_size": 64, "intermediate_size": 64, "vocab_size": 2048}
EXPERTS = {"num_local_experts": 2, "num_experts_per_tok": 1}
SHAPES: Mapping[str, Mapping[str, Any]] = {
    "tiny-qwen3": {},
    "gpt-oss-20b": {
        "num_hidden_layers": 4,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        **EXPERTS,
    },
    "gemma-3-12b-it": {
        "num_hidden_layers": 6,
        "layer_types": ["sliding_attention"] * 5 + ["full_attention"],
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "head_dim": 64,
    },
    "granite-4.0-h-tiny": {
        "num_hidden_layers": 4,
        "layer_types": ["mamba", "mamba", "attention", "mamba"],
        "shared_intermediate_size": 64,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "mamba_n_heads": 4,
        "mamba_d_head": 32,
        "mamba_d_state": 16,
        **EXPERTS,
    },
    "DeepSeek-V2-Lite": {
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "moe_intermediate_size": 64,
        "n_routed_experts": 2,
        "num_experts_per_tok": 1,
    },
    "Qwen3-Next-80B-A3B-Instruct": {
        "num_hidden_layers": 4,
        "num_attention_heads": 2,
        "head_dim": 64,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 2,
        "linear_key_head_dim": 32,
        "linear_value_head_dim": 32,
        "moe_intermediate_size": 64,
        "shared_expert_intermediate_size": 64,
        "num_experts": 2,
        "num_experts_per_tok": 1,
    },
}


def _logged(model: Path, transfer: Mapping[str, Any] | None) -> tuple[str, str] | str:
    """Return the tokens and concurrent requests that a server logs, or its last error line."""
    command = [
        *(str(PYTHON), "-m", ENTRY_POINT, "--model", str(model), "--load-format", "dummy"),
        *("--enforce-eager", "--max-model-len", str(LENGTH), "--port", "0"),
    ]
    if transfer is not None:
        command += ["--kv-transfer-config", json.dumps(transfer)]
    environment = os.environ | {
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_WORKER_MULTIPROC_METHOD": "fork",
        "OMP_NUM_THREADS": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    }
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment,
        cwd=model, start_new_session=True,
    ) as server:  # fmt: skip
        assert server.stdout is not None
        lines: list[str] = []
        try:
            for line in server.stdout:
                lines.append(line)
                if match := CAPACITY.search(line):
                    return match[1], match[2]
                if match := REFUSAL.search(line):
                    return match[1]
        finally:
            os.killpg(server.pid, signal.SIGKILL)
    pytest.fail(f"no capacity in the log: {lines[-5:]}")


def _resolved(
    models: Sequence[Path], capsys: pytest.CaptureFixture[str]
) -> dict[tuple[str, str], Any]:
    names = [word for model in models for word in ("--model", str(model))]
    arguments = ["--python", str(PYTHON), *names, "--connector", "ExampleConnector", "--json"]
    limits = ["--kv-gib", "1", "--max-model-len", str(LENGTH)]
    assert main([*arguments, *limits, "--", "--enforce-eager"]) == 1
    rows = json.loads(capsys.readouterr().out)["rows"]
    return {(row["model"], row["connector"]): row for row in rows}


def test_resolved_capacity_and_refusals_match_a_running_server(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, changes in SHAPES.items():
        shape = read_json(ROOT / "config" / "models" / f"{name}.json")
        small = changes if name == request.PROOF else SMALL | dict(changes)
        write_model(tmp_path / name, shape | small)
    rows = _resolved([tmp_path / name for name in SHAPES], capsys)
    off = request.transfer("ExampleConnector", shared_storage_path=str(tmp_path / "kv"))
    for name in SHAPES:
        for connector, transfer in ((request.PLAIN, None), ("ExampleConnector", off)):
            row, logged = rows[name, connector], _logged(tmp_path / name, transfer)
            print(f"\n{name}, {connector}: {logged}")
            if isinstance(logged, str):
                assert row["state"] == "refuses"
                assert logged.startswith(row["reason"])
            else:
                capacity = row["capacity"][0]
                assert (f"{capacity['tokens']:,}", f"{capacity['requests']:.2f}") == logged
    refused = {key for key, row in rows.items() if row["state"] == "refuses"}
    hybrids = ("granite-4.0-h-tiny", "Qwen3-Next-80B-A3B-Instruct")
    assert refused == {(name, "ExampleConnector") for name in hybrids}
