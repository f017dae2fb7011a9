"""The settings probe in the stub engine: what it writes, and that it disturbs nothing."""

import json
from pathlib import Path
from typing import Any

import pytest

from connector_tax.vllm import overlay, settings_probe
from tests.vllm import stub

# A resolved configuration as vLLM has it; the worker sees more of it than the engine core does.
CONFIG = """
import enum
class Mode(enum.Enum):
    FULL_AND_PIECEWISE = (2, 1)
def space(**values):
    return SimpleNamespace(**values)
class Uniproc:
    pass
config = space(
    cache_config=space(kv_cache_layout="HND", num_gpu_blocks=100, block_size=16, cache_dtype="auto",
                       kv_cache_size_tokens=1600, enable_prefix_caching=True),
    parallel_config=space(distributed_executor_backend=Uniproc, tensor_parallel_size=1),
    scheduler_config=space(async_scheduling=None, disable_hybrid_kv_cache_manager=True,
                           enable_chunked_prefill=True, max_num_batched_tokens=8192),
    model_config=space(max_model_len=4096, enforce_eager=False, dtype="torch.bfloat16"),
    compilation_config=space(cudagraph_mode=Mode.FULL_AND_PIECEWISE, mode=None),
)
class Backend:
    @staticmethod
    def get_name():
        return "FLASH_ATTN"
class ModelRunner:
    attn_groups = [[space(backend=Backend), space(backend=Backend)]]
"""
START = """
scheduler = Scheduler(None, config)
worker.initialize_from_config([(config, ModelRunner())])
"""


@pytest.fixture
def site(tmp_path: Path) -> Path:
    return stub.write(tmp_path / "site")


@pytest.fixture
def probe(tmp_path: Path) -> Path:
    overlay.install(tmp_path / "overlay")
    return tmp_path / "overlay"


def written(prefix: Path, part: str) -> dict[str, Any]:
    settings: dict[str, Any] = json.loads(Path(f"{prefix}.{part}.settings").read_text())["settings"]
    return settings


def test_it_writes_what_the_engine_resolved_and_why_a_value_is_missing(
    tmp_path: Path, site: Path, probe: Path
) -> None:
    stub.drive(site, probe, tmp_path / "log", before=CONFIG + START)
    engine = written(tmp_path / "log", "engine")
    assert engine.keys() == settings_probe.ENGINE.keys()
    assert engine["kv_cache_layout"] == ["HND", None]
    assert engine["kv_blocks"] == [100, None]
    assert engine["executor"] == ["__main__.Uniproc", None]
    assert engine["hybrid_kv_cache_manager"] == [False, None]
    assert engine["async_scheduling"] == [None, "this vLLM leaves it unset"]
    value, reason = engine["max_num_seqs"]
    assert value is None
    assert "max_num_seqs" in reason
    assert written(tmp_path / "log", "worker") == {
        "attention_backend": ["FLASH_ATTN", None],
        "cudagraph_mode": ["FULL_AND_PIECEWISE", None],
        "compilation_mode": [None, "this vLLM leaves it unset"],
        "model_runner": ["__main__.ModelRunner", None],
    }


def test_only_the_first_worker_writes(tmp_path: Path, site: Path, probe: Path) -> None:
    second = "worker.global_rank = 1\nworker.initialize_from_config([0, (config, ModelRunner())])"
    stub.drive(site, probe, tmp_path / "log", before=CONFIG + second)
    assert not Path(f"{tmp_path / 'log'}.worker.settings").exists()


def test_without_a_step_log_it_is_not_there(tmp_path: Path, site: Path, probe: Path) -> None:
    stub.drive(site, probe, None, before=CONFIG + START)
    assert not list(tmp_path.glob("*.settings"))


def test_an_engine_that_cannot_be_written_about_serves_all_the_same(
    tmp_path: Path, site: Path, probe: Path
) -> None:
    output = stub.drive(site, probe, tmp_path / "missing" / "log", before=CONFIG + START, steps=0)
    assert "settings probe: nothing written" in output
    assert "answers 0" in output


def test_of_data_parallel_engine_cores_the_first_writes(
    tmp_path: Path, site: Path, probe: Path
) -> None:
    second = "config.parallel_config.data_parallel_index = 1\n"
    stub.drive(site, probe, tmp_path / "log", before=CONFIG + second + START, rank=1)
    assert not list(tmp_path.glob("*.settings"))
