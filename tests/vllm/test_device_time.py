"""Test the emulated device: its queue and log, its patches, and the study's requirements."""

import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from snakemake.utils import update_config

from connector_tax.analysis.device_time import device_values, of_lines
from connector_tax.artifacts import paths
from connector_tax.artifacts.cell_records import DeviceLine
from connector_tax.artifacts.launch_files import SettingRecord
from connector_tax.artifacts.names import Launch
from connector_tax.config import ROOT, ConfigError, load_yaml
from connector_tax.servers.kinds import command_for
from connector_tax.study.design import resolve
from connector_tax.vllm import overlay
from connector_tax.vllm.device_time.clock import Batch, Device, Step, event_class
from connector_tax.vllm.evidence import unproved_device
from connector_tax.vllm.step_probe.log import Log, mark
from connector_tax.vllm.step_records import device_records
from tests.shared import interpreter
from tests.vllm import stub

ONE = Batch(0, 1, 100, 0)


def emulated(**engine: Any) -> dict[str, Any]:
    config: dict[str, Any] = load_yaml(ROOT / "config/h20-emulated.yaml")
    config["engine"] |= engine
    return config


# ---- the queue


def test_step_starts_when_queued_or_when_the_previous_one_ends() -> None:
    steps: list[Step] = []
    device = Device(0, steps.append)
    event = event_class(device)
    waits: list[Any] = []
    for duration_us in (20_000, 500, 500):
        device.begin(len(waits) + 1, ONE, 0, duration_us)
        device.launched()
        waits.append(event())
        waits[-1].record()
    assert not waits[0].query()
    for wait in waits:
        wait.synchronize()
    assert waits[-1].query()
    assert [step.step_id for step in steps] == [1, 2, 3]
    assert steps[0].start_ns == steps[0].queued_ns
    assert [s.start_ns for s in steps[1:]] == [s.end_ns for s in steps[:-1]]
    assert all(step.woken_ns >= step.end_ns for step in steps)
    assert waits[0].elapsed_time(waits[2]) == pytest.approx(1.0)
    time.sleep(0.002)
    device.begin(4, ONE, 0, 1.0)
    assert device.last is not None
    assert device.last.start_ns == device.last.queued_ns > steps[-1].end_ns


def test_a_step_ends_no_earlier_than_its_last_kernel_is_launched() -> None:
    device = Device(3000.0, lambda _: None)
    device.begin(1, ONE, 0, 10.0)
    device.launched()
    assert device.last is not None
    assert device.last.end_ns >= device.last.queued_ns + 3_000_000
    assert device.free_ns == device.last.end_ns


def test_step_without_a_waiter_is_recorded_with_the_next_one() -> None:
    steps: list[Step] = []
    device = Device(0, steps.append)
    event = event_class(device)()
    device.begin(1, ONE, 0, 1.0)
    device.begin(2, ONE, 0, 1.0)
    event.record()
    assert steps == []
    event.synchronize()
    event.synchronize()
    assert [(step.step_id, step.wait_ns > 0) for step in steps] == [(1, False), (2, True)]


def test_waiting_for_a_step_uses_no_cpu() -> None:
    device = Device(0, lambda _: None)
    device.begin(1, ONE, 0, 200_000.0)
    event = event_class(device)()
    event.record()
    used = []

    def wait() -> None:
        before = time.thread_time()
        event.synchronize()
        used.append(time.thread_time() - before)

    thread = threading.Thread(target=wait)
    thread.start()
    thread.join()
    assert used[0] < 0.05


# ---- requirements on the study


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"label": "real vLLM, GPU"}, "engine.label: found 'real vLLM, GPU'; allowed: one with"),
        ({"device": "cpu"}, "engine.device_time: found with engine.device cpu; required with"),
        ({"model": "./build/models/other"}, "engine.model: found './build/models/other'; allowed:"),
        (
            {"flags": {"--tensor-parallel-size": 2}},
            "engine.flags.--tensor-parallel-size: found 2; allowed: 1",
        ),
    ],
)  # fmt: skip
def test_study_that_contradicts_the_emulated_device_is_refused(
    change: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        resolve(emulated(**change), "x")


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("accelerator", "H21", "engine.device_time.accelerator: found 'H21'; allowed: H20"),
        ("accelerator", "L4", "engine.device_time.accelerator: found L4; allowed: one whose"),
        ("model_config", "none.json", "engine.device_time.model_config: .*none.json"),
        ("launch_us", -1, "engine.device_time.launch_us: found -1"),
        ("link_gb_s", 0, "engine.device_time.link_gb_s: found 0"),
    ],
)
def test_unusable_device_description_is_refused(key: str, value: Any, message: str) -> None:
    config = emulated()
    config["engine"]["device_time"][key] = value
    if key == "model_config":
        config["engine"]["model"] = "./build/models/none"
    with pytest.raises(ConfigError, match=message):
        resolve(config, "x")


def test_launch_on_an_emulated_device_has_its_coefficients_and_gpu_flags() -> None:
    study = resolve(emulated(), "x")
    engine = study["config"]["engine"]
    command = command_for(study, Launch("plain", 0, "A"), 9000, ROOT / "overlay")
    content = engine["device_time_content"]
    assert command.files == {paths.DEVICE_TIME: content}
    assert command.environment["CONNECTOR_TAX_DEVICE_TIME"] == paths.DEVICE_TIME
    # Left to vLLM: if the flag were given, an incompatible connector would end the server.
    assert not any("async-scheduling" in argument for argument in command.argv)
    size = command.argv[command.argv.index("--kv-cache-memory-bytes") + 1]
    assert int(size) == 17168 * 16 * content["kv_bytes"]
    engine["forms"]["plain"] = {"flags": {"--async-scheduling": False}}
    sync = command_for(study, Launch("plain", 0, "A"), 9000, ROOT / "overlay")
    assert "--no-async-scheduling" in sync.argv


def test_lmcache_beside_an_emulated_device_runs_with_the_overlays_server(
    tmp_path: Path,
) -> None:
    config = emulated()
    update_config(config, load_yaml(ROOT / "config/emulated-connectors.yaml"))
    study = resolve(config, "x")
    command = command_for(study, Launch("lmcache_only", 0, "A"), 9000, ROOT / "overlay")
    assert command.environment["LMCACHE_MP_TRANSFER_MODE"] == "lmcache_driven"
    (companion,) = command.companions
    module = companion.argv[companion.argv.index("-m") + 1]
    package, _, name = module.rpartition(".")
    assert f"{package}/{name}.py" in overlay.install(tmp_path)
    content = study["config"]["engine"]["device_time_content"]
    assert (content["link_bytes_s"], content["copy_us"], content["copy_piece_ns"]) == (50e9, 10, 0)


# ---- a vLLM that it does not fit


@pytest.mark.parametrize(
    ("triton", "lacks"),
    [
        ("", r"vllm\.triton_utils\.HAS_TRITON"),
        (
            "from types import SimpleNamespace\nHAS_TRITON, triton = False, SimpleNamespace()\n",
            r"CPUWorker\.determine_available_memory",
        ),
    ],
)
def test_error_of_a_vllm_without_a_patched_target_names_the_target(
    tmp_path: Path, triton: str, lacks: str
) -> None:
    site = stub.write(tmp_path / "site")
    (site / "vllm" / "triton_utils.py").write_text(triton)
    python = interpreter(tmp_path, f'PYTHONPATH="$PYTHONPATH:{site}" exec {sys.executable} "$@"')
    with pytest.raises(overlay.OverlayError, match=lacks):
        overlay.refuse_unfit_for_device_time(python, {})


# ---- the log


def written(folder: Path, *steps: Step) -> bytes:
    log = Log(str(folder / "engine_step"), "device", print)
    for step in steps:
        log.numbers.extend((*step.numbers(), mark(0)))
    log.write()
    return (folder / "engine_step.device.steps").read_bytes()


def test_device_log_round_trips_recorded_steps(tmp_path: Path) -> None:
    step = Step(7, Batch(4096, 2, 9000, 123), 5, 10**15 + 1, 10**15 + 3, 10**15 + 9)
    step.wait_ns, step.woken_ns = 10**15 + 4, 10**15 + 11
    later = Step(8, Batch(0, 3, 9003, 0), 0, 10**15 + 20, 10**15 + 20, 10**15 + 30)
    first, second = device_records(written(tmp_path, step, later))
    assert first == {
        "t_ns": 10**15 + 1, "step_id": 7, "t_start_ns": 10**15 + 3, "t_end_ns": 10**15 + 9,
        "t_since_ns": 5, "prefill_tokens": 4096, "decode_seqs": 2, "kv_tokens": 9000,
        "prefill_pairs": 123, "t_wait_ns": 10**15 + 4, "t_woken_ns": 10**15 + 11,
    }  # fmt: skip
    assert (second["t_since_ns"], second["t_wait_ns"]) == (None, None)


# ---- reading the log


def line(step_id: int, queued: int, start: int, end: int, **rest: Any) -> DeviceLine:
    known: Any = {
        "step_id": step_id, "t_ns": queued * 1000, "t_start_ns": start * 1000,
        "t_end_ns": end * 1000, "t_since_ns": None, "prefill_tokens": 0, "decode_seqs": 1,
        "kv_tokens": 0, "prefill_pairs": 0, "t_wait_ns": None, "t_woken_ns": None,
    }  # fmt: skip
    known |= {k: v * 1000 if k.endswith("_ns") else v for k, v in rest.items()}
    step: DeviceLine = known
    return step


def changed(step: DeviceLine, **fields: Any) -> DeviceLine:
    content: Any = {**step, **fields}
    new: DeviceLine = content
    return new


# A request finds an idle device at 100 and is computed from 300 on; of the two steps that follow,
# the host queues the second one late.
LINES = [
    line(1, 300, 300, 1300, t_since_ns=100, prefill_tokens=9, decode_seqs=0, t_wait_ns=400,
         t_woken_ns=1310),
    line(2, 380, 1300, 2300, t_wait_ns=1400, t_woken_ns=2350),
    line(3, 2450, 2450, 3450, t_wait_ns=2500, t_woken_ns=3460),
]  # fmt: skip
PROBED = [
    {"process": "scheduler", "step_id": i, "prefill_tokens": 0, "decode_tokens": 1}
    for i in (1, 2, 3)
]


def test_exposed_time_counts_from_the_engines_receipt_of_the_previous_step() -> None:
    steps = of_lines(LINES)
    assert steps["exposed_us"].tolist() == [200, 0, 150]
    assert steps["host_busy_us"][1:].tolist() == [90, 150]
    assert steps["period_us"][1:].tolist() == [1000, 1150]
    assert steps["woken_late_us"].tolist() == [10, 50, 10]
    assert not steps["misplaced"].any()


def test_device_checks_count_faults_in_the_device_log() -> None:
    values = device_values(LINES, PROBED, is_baseline=True)
    assert values == {
        "device_log_faults": 0,
        "device_woken_late_ms": 0.01,
        "device_exposed_share": 0.5,
    }
    assert device_values(LINES, PROBED[:2], is_baseline=True)["device_log_faults"] == 1
    assert device_values(LINES[:2], PROBED, is_baseline=True)["device_log_faults"] == 1
    early = [LINES[0], changed(LINES[1], t_start_ns=1_299_000), LINES[2]]
    assert device_values(early, PROBED, is_baseline=True)["device_log_faults"] == 1
    idle = [LINES[0], changed(LINES[1], t_start_ns=1_400_000, t_end_ns=2_400_000), LINES[2]]
    assert device_values(idle, PROBED, is_baseline=True)["device_log_faults"] == 1
    slow = [changed(step, t_wait_ns=step["t_end_ns"] + 1) for step in LINES]
    assert device_values(slow, PROBED, is_baseline=False)["device_woken_late_ms"] == 0
    unknown = [changed(step, t_wait_ns=None) for step in LINES]
    assert device_values(unknown, PROBED, is_baseline=False)["device_woken_late_ms"] is None
    assert set(device_values([], PROBED, is_baseline=True).values()) == {None}


# ---- the proof of a gate


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({}, None),
        ({"model_runner": "vllm.v1.worker.cpu_model_runner.CPUModelRunner"}, "model_runner is"),
        ({"async_scheduling": False}, "async_scheduling is False"),
        ({"kv_blocks": 1}, "kv_blocks is 1, but with a GPU it is 17168"),
        ({"kv_cache_layout": None}, "kv_cache_layout is None; allowed: LBNHC, LBHNC"),
        ({"executor": "mp"}, "executor is 'mp'"),
    ],
)  # fmt: skip
def test_server_without_the_emulated_device_fails_its_gate(
    change: dict[str, Any], message: str | None
) -> None:
    engine = resolve(emulated(), "x")["config"]["engine"]
    values = {
        "model_runner": "vllm.v1.worker.cpu.model_runner.CPUModelRunner",
        "async_scheduling": True, "kv_blocks": 17168, "block_size": 16, "executor": "uni",
        "kv_cache_layout": "LBNHC", **change,
    }  # fmt: skip
    settings: dict[str, SettingRecord] = {
        name: {"value": value, "source": "probe", "reason": None} for name, value in values.items()
    }
    found = unproved_device(engine, settings, LINES, {"async_scheduling": True})
    assert found is None if message is None else message in str(found)
    assert "no step" in str(unproved_device(engine, settings, [], {})) or change
    unwaited = [changed(LINES[0], t_wait_ns=None)]
    if not change:
        reason = unproved_device(engine, settings, unwaited, {})
        assert "did not wait for 1 of 1 steps" in str(reason)
