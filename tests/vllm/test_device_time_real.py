"""Test a real vLLM with an emulated device: `pytest -m long
tests/vllm/test_device_time_real.py`.
"""

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest
from snakemake.utils import update_config

from connector_tax.config import ROOT, load_yaml
from connector_tax.files import read_json
from connector_tax.study import preflight
from connector_tax.study.design import resolve
from connector_tax.vllm import overlay
from connector_tax.vllm.tiny_model import write_model
from tests.vllm.test_real import PYTHON

# Five requests of a gate have prompts of two blocks: 48 layers, keys and values of 4 heads of 128.
KV_BLOCK_BYTES = 16 * 48 * 2 * 4 * 128 * 2
pytestmark = [
    pytest.mark.long,
    pytest.mark.timeout(600),
    pytest.mark.skipif(not PYTHON.exists(), reason=f"{PYTHON}: no vLLM environment there"),
]


def gate(
    folder: Path,
    configuration: str,
    environment: Mapping[str, str] = MappingProxyType({}),
    overlay_file: str | None = None,
    **flags: Any,
) -> list[str]:
    """Return the notes of a configuration's gate in the study of the emulated H20, or in a changed
    one.
    """
    config = load_yaml(ROOT / "config/h20-emulated.yaml")
    if overlay_file is not None:
        update_config(config, load_yaml(ROOT / overlay_file))
    if configuration not in config["configurations"]:
        config["configurations"].append(configuration)
    config["engine"]["python"] = str(PYTHON)
    config["engine"]["flags"] |= flags
    config["engine"]["environment"] |= dict(environment)
    config["server"] = {"device": "vllm_tests", "ready_timeout_s": 500}
    model = ROOT / config["engine"]["model"]
    if not (model / "config.json").exists():
        write_model(model, read_json(ROOT / config["engine"]["device_time"]["model_config"]))
    overlay.install(folder / "overlay")
    notes: list[str] = []
    preflight.run_gate(
        resolve(config, "h20-emulated"), configuration, f"verify_{configuration}",
        folder / "launch", notes.append, folder / "overlay",
    )  # fmt: skip
    return notes


def test_installed_vllm_has_every_patched_target_and_runs_a_step() -> None:
    engine = resolve(load_yaml(ROOT / "config/h20-emulated.yaml"), "x")["config"]["engine"]
    overlay.refuse_unfit_for_device_time(PYTHON, engine["device_time_content"])


@pytest.mark.parametrize("start", ["spawn", "fork"])
@pytest.mark.parametrize("configuration", ["plain", "mooncake_both", "nixl_both"])
def test_emulated_device_runs_the_host_path_of_a_gpu(
    tmp_path: Path, configuration: str, start: str
) -> None:
    notes = gate(tmp_path, configuration, {"VLLM_WORKER_MULTIPROC_METHOD": start})
    proof = next(note for note in notes if note.startswith("device time emulated"))
    ready = next(note for note in notes if "answered 200 after" in note)
    print(f"\n{configuration}, {start}: {ready}; {proof}")
    assert "160 steps" in proof
    assert "vllm.v1.worker.cpu.model_runner.CPUModelRunner, async_scheduling True" in proof


@pytest.mark.parametrize(
    ("configuration", "copied"),
    [
        ("offloading", 5 * 2 * KV_BLOCK_BYTES),
        ("nixl_offloading", 5 * 2 * KV_BLOCK_BYTES),
        ("offloading_second", 0),
        ("simple_offload", None),
        ("lmcache_only", None),
        ("multi_mooncake_lmcache", None),
        ("mooncake_store", None),
    ],
)
def test_connector_that_copies_to_the_host_passes_its_gate(
    tmp_path: Path, configuration: str, copied: int | None
) -> None:
    notes = gate(tmp_path, configuration, overlay_file="config/emulated-connectors.yaml")
    line = next(note for note in notes if note.startswith("copied over the emulated link"))
    print(f"\n{configuration}: {line}")
    assert copied is None or line.endswith(f": {copied} bytes")


def test_executor_that_a_gpu_does_not_use_is_refused(tmp_path: Path) -> None:
    flags: dict[str, Any] = {"--distributed-executor-backend": "mp"}
    with pytest.raises(preflight.GateError, match="executor is 'mp', but with a GPU it is 'uni'"):
        gate(tmp_path, "plain", **flags)
