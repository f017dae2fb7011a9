"""Test a block's device: its holder, description, slot and memory."""

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from connector_tax.artifacts import paths
from connector_tax.artifacts.names import Launch
from connector_tax.artifacts.study_file import launches
from connector_tax.artifacts.study_records import StudyDocument
from connector_tax.config import ROOT, ConfigError, load_yaml
from connector_tax.files import read_json, write_json
from connector_tax.loadgen.plan import Progress
from connector_tax.rehearsal import plan as plan_command
from connector_tax.servers.kinds import command_for
from connector_tax.study import device, launch, plan, preflight, progress
from connector_tax.study.design import resolve
from connector_tax.study.device import (
    DeviceError,
    claim_device,
    describe_node,
    devices_of,
    enter_block_slot,
    enter_slot,
    gpu_node,
    hold_devices,
    slot_of,
)
from connector_tax.study.server_command import launch_script
from connector_tax.text import duration
from tests.study.conftest import StandIn
from tests.study.driving import (
    arguments,
    as_user,
    failed_index_of,
    launch_folder,
    write_study,
)
from tests.workflow.harness import TINY

HOLD = """
import sys
from connector_tax.study.device import hold_devices
with hold_devices([sys.argv[1]]):
    print("held", flush=True)
    sys.stdin.read()
"""


# A device that only this process uses.
DEVICE = f"test{os.getpid()}"


@contextlib.contextmanager
def held(tmp_path: Path, user: int | None = None) -> Iterator[subprocess.Popen[str]]:
    """Yield another process, with its own temporary folder, that holds the device."""
    process = subprocess.Popen(
        [*([] if user is None else as_user(user)), sys.executable, "-c", HOLD, DEVICE],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "TMPDIR": str(tmp_path)},
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "held\n"
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


@pytest.fixture
def holder(tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    with held(tmp_path) as process:
        yield process


def test_second_measurement_names_the_holder_of_the_device_until_it_is_killed(
    holder: subprocess.Popen[str],
) -> None:
    wanted = rf"'{DEVICE}' is in use .*\(pid {holder.pid}, user \w+: .*{DEVICE}\).*--device"
    with pytest.raises(DeviceError, match=wanted), hold_devices([DEVICE], wait_s=0.1):
        pytest.fail("two measurements hold one device")
    holder.kill()
    with hold_devices([DEVICE]):
        pass


@pytest.mark.skipif(os.geteuid() != 0, reason="becoming another user needs root")
def test_device_lock_holds_across_users(tmp_path: Path) -> None:
    tmp_path.chmod(0o777)
    with (
        held(tmp_path, user=65534) as process,
        pytest.raises(DeviceError, match=rf"pid {process.pid}, user nobody: .*{DEVICE}"),
        hold_devices([DEVICE], wait_s=0.1),
    ):
        pytest.fail("two users hold one device")


def test_refused_lock_releases_the_devices_it_had_locked(
    holder: subprocess.Popen[str],
) -> None:
    first = f"a{DEVICE}"
    with pytest.raises(DeviceError), hold_devices([DEVICE, first], wait_s=0.1):
        pytest.fail("held twice")
    with hold_devices([first], wait_s=0.0):
        pass
    assert holder.poll() is None


SMI = "echo 0, GPU-aaaa; echo 1, GPU-bbbb"


def on_gpus(visible: str | None = None, **engine: Any) -> Any:
    """Return the configuration of a study on the GPUs that the engine's environment selects."""
    environment = {} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}
    section = {"device": "cuda", "environment": environment, **engine}
    return {"engine": section, "server": {"device": "gpu"}}


@pytest.mark.parametrize(
    ("visible", "uuids"),
    [
        (None, ["GPU-aaaa", "GPU-bbbb"]),
        ("1", ["GPU-bbbb"]),
        ("GPU-a", ["GPU-aaaa"]),
        ("1,0", ["GPU-aaaa", "GPU-bbbb"]),
        ("MIG-cccc", ["MIG-cccc"]),
    ],
)
def test_gpus_are_locked_by_uuid(
    stand_in: StandIn, monkeypatch: pytest.MonkeyPatch, visible: str | None, uuids: list[str]
) -> None:
    stand_in("nvidia-smi", SMI)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert devices_of(on_gpus(visible)) == uuids
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "7")
    with pytest.raises(DeviceError, match=r"found '7'; allowed: some of .*GPU-aaaa"):
        devices_of(on_gpus())


def test_a_gpu_study_without_nvidia_smi_is_refused(
    stand_in: StandIn, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = stand_in("nvidia-smi", "echo No devices were found")
    monkeypatch.setenv("PATH", str(program.parent))
    with pytest.raises(DeviceError, match=r"found 'No devices.*'; allowed: lines of index"):
        devices_of(on_gpus())
    program.unlink()
    with pytest.raises(DeviceError, match=r"the GPUs are not known.*nvidia-smi"):
        devices_of(on_gpus())


# ---- the machine of a launch

NODE_SMI = """case $1 in
*index,uuid*) echo "0, GPU-aaaa"; echo "1, GPU-bbbb" ;;
*) for gpu in aaaa bbbb; do
  echo "GPU-$gpu, NVIDIA H100, 00000000:18:00.0, 580.1, 700.00 W, 1980 MHz, 2619 MHz, Enabled, N/A"
done ;;
esac"""
CPU_STUDY: Any = {"engine": {"kind": "embedded"}, "server": {"device": "cpu"}}


@pytest.mark.parametrize(
    ("oversubscribe", "exclusive"), [("NO", True), ("OK", False), ("YES", False), ("", None)]
)
def test_launch_record_describes_its_gpus_and_job(
    stand_in: StandIn,
    monkeypatch: pytest.MonkeyPatch,
    oversubscribe: str,
    exclusive: bool | None,
) -> None:
    stand_in("nvidia-smi", NODE_SMI)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    monkeypatch.setenv("SLURM_JOB_ID", "17")
    shared = f"OverSubscribe={oversubscribe}"
    stand_in(
        "scontrol",
        '[ "$*" = "show job --oneliner 17" ] || exit 9\n'
        f'echo "JobId=17 JobName=x NumNodes=1 {shared} Contiguous=0"',
    )
    node = describe_node(on_gpus())
    assert node["devices"] == ["GPU-bbbb"]
    assert [(gpu["uuid"], gpu["name"], gpu["power.limit"]) for gpu in node["gpus"]] == [
        ("GPU-bbbb", "NVIDIA H100", "700.00 W")
    ]
    # The stand-in reports a bus id that this machine does not have.
    assert node["gpu_numa_nodes"] == [None]
    assert (node["job"], node["exclusive"]) == ("17", exclusive)


def test_no_host_name_is_recorded() -> None:
    node = describe_node(CPU_STUDY)
    assert os.uname().nodename not in str(node)
    assert node["machine"] == describe_node(CPU_STUDY)["machine"]
    assert node["devices"] == ["cpu"]
    assert node["gpu_numa_nodes"] == []
    assert node["exclusive"] is None


def test_a_block_belongs_to_the_device_of_its_first_launch(tmp_path: Path) -> None:
    here = describe_node(CPU_STUDY)
    claim_device(tmp_path, 0, "a", here)
    claim_device(tmp_path, 0, "a", {**here, "boot": "the next", "job": "18", "exclusive": True})
    # A claim from a version that recorded more fields.
    newer: Any = {**here, "recorded_since": 1}
    claim_device(tmp_path, 0, "a", newer)
    claim_device(tmp_path, 1, "a", {**here, "machine": "machine-b"})
    with pytest.raises(DeviceError, match=r"block 0 .*machine: 'machine-.*', here 'machine-b'"):
        claim_device(tmp_path, 0, "a", {**here, "machine": "machine-b"})
    # Block 0 of another design may be on another device.
    claim_device(tmp_path, 0, "b", {**here, "machine": "machine-b"})
    with pytest.raises(DeviceError):
        claim_device(tmp_path, 0, "b", here)


def test_driver_on_another_device_exits_without_measuring(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    study_file = write_study(tmp_path)
    study = read_json(study_file)
    elsewhere = describe_node(study["config"]) | {"machine": "machine-b"}
    claim_device(tmp_path, 0, study["design_sha256"], elsewhere)
    assert launch.main(arguments(study_file)) == 2
    message = "".join(capsys.readouterr())
    assert "block 0 was begun on another device (machine: 'machine-b', here" in message
    assert not list(launch_folder(study_file).iterdir())


# ---- slots of one machine

CPU = min(os.sched_getaffinity(0))
TWO = [{"id": "a", "cpus": "0"}, {"id": "b", "cpus": "1"}]


def tiny(slots: Sequence[dict[str, Any]] | None, **changes: Any) -> StudyDocument:
    config: dict[str, Any] = load_yaml(TINY) | changes
    return resolve(config if slots is None else {**config, "devices": slots}, "tiny.yaml")


def test_slots_do_not_change_the_design_hash() -> None:
    assert tiny(TWO)["design_sha256"] == tiny(None)["design_sha256"]


@pytest.mark.parametrize(
    ("second", "message"),
    [
        ({"id": "a", "cpus": "1"}, r"devices\[1\].id: found a of 'a', also in devices\[0\]"),
        ({"id": "b", "cpus": "5,3-4"}, r"devices\[1\].cpus: found 3 of '5,3-4', also in devices"),
        ({"id": "b", "cpus": "9-8"}, r"devices\[1\].cpus: found '9-8'; allowed: ranges such as"),
        ({"id": "b", "cpus": "all"}, r"devices\[1\].cpus: found 'all'; allowed: text matching"),
        ({"id": "b"}, r"devices\[1\].cpus: missing; it is required"),
        ({"id": "b", "cpus": "8", "visible": "0"}, r"\[1\].visible: found '0'; allowed: the slot"),
    ],
)
def test_invalid_slots_are_refused(second: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        tiny([{"id": "a", "cpus": "0-3"}, second])


def gpu_study(*visible: str | None, own: dict[str, str] | None = None) -> StudyDocument:
    config: dict[str, Any] = load_yaml(ROOT / "config/h20.yaml")
    config["engine"]["environment"] |= own or {}
    named = [{} if v is None else {"visible": v} for v in visible]
    slots = [{"id": f"gpu{k}", "cpus": str(k), **gpus} for k, gpus in enumerate(named)]
    return resolve({**config, "devices": slots}, "h20.yaml")


def test_each_gpu_belongs_to_one_slot() -> None:
    gpu_study("0", "1,2", "GPU-5ca1ab1e")
    with pytest.raises(ConfigError, match=r"devices\[1\].visible: found 0 of '1,0', also in d"):
        gpu_study("0", "1,0")
    with pytest.raises(ConfigError, match=r"devices\[0\].visible: found None; allowed: the slot's"):
        gpu_study(None)
    with pytest.raises(ConfigError, match=r"engine.environment.CUDA_VISIBLE_DEVICES: found with"):
        gpu_study("0", own={"CUDA_VISIBLE_DEVICES": "0"})


def test_blocks_are_assigned_to_slots_in_turn_and_stay_there(tmp_path: Path) -> None:
    study = tiny(TWO, blocks=4)

    def slots() -> list[str]:
        chosen = [slot_of(study, tmp_path, block) for block in range(4)]
        return [slot["id"] for slot in chosen if slot is not None]

    assert slots() == ["a", "b", "a", "b"]
    node = describe_node(study["config"]) | {"cpus": "1"}
    claim_device(tmp_path, 2, study["design_sha256"], node)
    assert slots() == ["a", "b", "b", "b"]
    claim_device(tmp_path, 0, "another design", node)
    assert slots() == ["a", "b", "b", "b"]
    # The slots have changed since the block was begun: the slot stays, and the claim is refused
    # later.
    claim_device(tmp_path, 3, study["design_sha256"], {**node, "cpus": "0-1"})
    assert slots() == ["a", "b", "b", "b"]


@pytest.mark.usefixtures("affinity")
def test_process_in_a_slot_has_its_cpus_and_device(tmp_path: Path) -> None:
    study = tiny([{"id": "one", "cpus": str(CPU)}])
    before = devices_of(study["config"])
    inside = enter_block_slot(study, tmp_path, block=5)
    assert os.sched_getaffinity(0) == {CPU}
    assert devices_of(inside["config"]) == [f"{before[0]}/{CPU}"]
    assert describe_node(inside["config"])["cpus"] == str(CPU)
    assert devices_of(study["config"]) == before


@pytest.mark.usefixtures("affinity")
def test_server_in_a_slot_sees_only_the_gpus_of_the_slot() -> None:
    study = gpu_study("1")
    inside = enter_slot(study, {"id": "x", "cpus": str(CPU), "visible": "1"})
    for which, exported in ((study, False), (inside, True)):
        script = launch_script(command_for(which, Launch("plain", 0, "A"), 8000), "x", ".")
        assert ("\nexport CUDA_VISIBLE_DEVICES=1\n" in script) is exported


def test_slot_with_absent_cpus_is_refused(affinity: set[int]) -> None:
    with pytest.raises(DeviceError, match=r"cpus of x: found 7000; allowed: some of \d"):
        enter_slot(tiny(None), {"id": "x", "cpus": "7000"})
    assert os.sched_getaffinity(0) == affinity


def test_slots_run_in_parallel_and_phase_a_ends_before_phase_b(tmp_path: Path) -> None:
    study_file = write_study(tmp_path)
    left = {}
    for name, slots in (("one", None), ("two", TWO), ("three", [*TWO, {"id": "c", "cpus": "2"}])):
        study = tiny(slots, blocks=3)
        write_json(study_file, study)
        left[name] = plan.remaining(study, tmp_path)
    one_s = left["one"].wall_s
    # Three blocks on two slots: one slot measures two blocks, one after the other.
    assert left["two"].wall_s == pytest.approx(one_s * 2 / 3)
    assert left["three"].wall_s == pytest.approx(one_s / 3)
    assert [left[name].devices for name in left] == [1, 2, 3]
    assert [left[name].device_s for name in left] == pytest.approx([one_s] * 3)


def test_remaining_time_counts_nodes_that_measure_in_parallel(tmp_path: Path) -> None:
    study = tiny(None, blocks=4)
    # The gates are done; they use one device, however many there are.
    write_json(tmp_path / paths.PREFLIGHT_STATUS, {})
    one = plan.remaining(study, tmp_path)
    node = describe_node(study["config"])
    for block, machine in enumerate("abb"):
        claim_device(tmp_path, block, study["design_sha256"], {**node, "machine": machine})
    left = plan.remaining(study, tmp_path)
    # The fourth block goes to the node that has one block.
    assert left == pytest.approx((one.wall_s / 2, one.wall_s, 2))
    claim_device(tmp_path, 3, "of another design", node)
    assert plan.remaining(study, tmp_path) == left


def test_remaining_time_on_several_devices_is_given_in_device_hours(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(progress, "PLAIN_INTERVAL_S", 0.0)
    study_file = write_study(tmp_path)
    for slots in (None, TWO):
        study = tiny(slots, blocks=2)
        write_json(study_file, study)
        left = plan.remaining(study, tmp_path)
        device_hours = f", {left.device_s / 3600:.2f} device hours on 2 devices" if slots else ""
        assert plan_command.main(["--study", str(study_file)]) == 0
        assert f"about {duration(left.wall_s)}{device_hours} (design" in capsys.readouterr().out
        # The remaining time of the launch's own phase.
        order = launches(study, "B")
        with progress.LaunchProgress(study, tmp_path, order[1], tmp_path / "x.log") as seen:
            seen.start_cell("32x8", 1, 1, 1.0)
            seen.update(Progress(0.0, 0, 0, 0, 0, 0, 0))
        message = capsys.readouterr().err
        assert f" Phase B  launch 2 of {len(order)}  {order[1].config}  cell 32x8 (1/1)" in message
        assert f"study {duration(left.wall_s)} left{device_hours}\n" in message
    half = left.after(left.wall_s / 2)
    assert half == pytest.approx((left.wall_s / 2, left.device_s / 2, 2))
    assert left.after(2 * left.wall_s)[:2] == (0, 0)


# ---- free memory

GPU_CONFIG = on_gpus("1", flags={"--gpu-memory-utilization": 0.9})


@pytest.fixture
def readings(tmp_path: Path, stand_in: StandIn, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a file with used memory of GPU 1, in MiB, a line for each reading; the last line
    repeats."""
    looks = tmp_path / "looks"
    stand_in(
        "nvidia-smi",
        'case "$1" in\n'
        '*index,uuid*) echo "0, GPU-a"; echo "1, GPU-b"; exit;;\n'
        '*clocks.max.sm*) rest="x, 0:1, 580, 1, 1, 1, 1, 1"\n'
        '    echo "GPU-a, $rest"; echo "GPU-b, $rest"; exit;;\n'
        "esac\n"
        f"used=$(head -n 1 {looks})\n"
        f"if [ $(wc -l < {looks}) -gt 1 ]; then sed -i 1d {looks}; fi\n"
        'echo "GPU-a, 9000, 10000"; echo "GPU-b, $used, 10000"',
    )
    monkeypatch.setattr(device, "POLL_S", 0.01)
    return looks


def test_launch_waits_for_free_memory_of_its_gpu_only(readings: Path) -> None:
    readings.write_text("8000\n5000\n300\n")
    device.await_free_memory(GPU_CONFIG)
    assert readings.read_text() == "300\n"
    # A GPU that does not report its memory is not waited for.
    readings.write_text("[N/A]\n")
    device.await_free_memory(GPU_CONFIG)


@pytest.mark.parametrize(
    "engine",
    [
        {"kind": "vllm", "device": "cpu", "flags": {}},
        # The memory that a command line's server takes is unknown.
        {"kind": "command", "device": "cuda", "commands": {"plain": "serve"}},
    ],
)
def test_free_memory_is_not_read_without_a_gpu_or_flags(
    readings: Path, engine: dict[str, Any]
) -> None:
    config: Any = {"engine": engine, "server": {"device": "gpu"}}
    device.await_free_memory(config)
    assert not readings.exists()


@pytest.fixture
def occupied(readings: Path, study_file: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return study.json of a small study on GPU 1, whose memory stays in use."""
    readings.write_text("1001\n")
    monkeypatch.setattr(device, "FREE_WAIT_S", 0.0)
    study = read_json(study_file)
    study["config"]["engine"] |= GPU_CONFIG["engine"]
    write_json(study_file, study)
    return study_file


def test_launch_does_not_start_while_gpu_memory_is_in_use(occupied: Path) -> None:
    assert launch.main(arguments(occupied)) == 1
    assert "GPU-b: 1001 of 10000 MiB; 90% of it must be" in failed_index_of(occupied)["reason"]
    assert not (launch_folder(occupied) / paths.LAUNCH_CONFIG).exists()


def test_gate_does_not_start_while_gpu_memory_is_in_use(occupied: Path, tmp_path: Path) -> None:
    gate = preflight.gated_server(
        read_json(occupied), Launch("plain", 0, "A"), "verify_plain", tmp_path / "gate", print, None
    )
    # Not a GateError, which would leave the configuration out of the study for good.
    with pytest.raises(DeviceError, match="GPU-b: 1001 of 10000 MiB"), gate:
        pass


# ---- NUMA


@pytest.fixture
def machine(tmp_path: Path, stand_in: StandIn) -> Path:
    """Return three GPUs, on the nodes 0, 1 and an unknown one."""
    stand_in(
        "nvidia-smi",
        'case "$1" in\n'
        '*index,uuid*) echo "0, GPU-a"; echo "1, GPU-b"; echo "2, GPU-c";;\n'
        '*) for gpu in "a, 00000000:3B:00.0" "b, 00000000:AF:00.0" "c, 00000001:D8:00.0"; do\n'
        '  echo "GPU-$gpu"; done;;\n'
        "esac",
    )
    for address, node in (("0000:3b:00.0", 0), ("0000:af:00.0", 1), ("0001:d8:00.0", -1)):
        device = tmp_path / "sys/bus/pci/devices" / address
        device.mkdir(parents=True)
        (device / "numa_node").write_text(f"{node}\n")
    return tmp_path


@pytest.mark.parametrize(
    ("visible", "node"), [("0", 0), ("GPU-b", 1), ("0,1", None), ("2", None), ("7", None)]
)
def test_gpu_node_is_the_numa_node_of_the_visible_gpus(
    machine: Path, visible: str, node: int | None
) -> None:
    assert gpu_node(on_gpus(visible), machine) == node
