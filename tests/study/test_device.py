"""One measurement at a time on a device, whichever user begins it."""

import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from connector_tax.study.device import DeviceError, devices_of, hold_devices
from tests.study.driving import as_user

HOLD = """
import sys
from connector_tax.study.device import hold_devices
with hold_devices([sys.argv[1]]):
    print("held", flush=True)
    sys.stdin.read()
"""


@pytest.fixture
def device() -> str:
    """A device of this process's own."""
    return f"test{os.getpid()}"


def hold(device: str, tmp_path: Path, user: int | None = None) -> subprocess.Popen[str]:
    """Another process, with a temporary folder of its own, that holds the device."""
    process = subprocess.Popen(
        [*([] if user is None else as_user(user)), sys.executable, "-c", HOLD, device],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "TMPDIR": str(tmp_path)},
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "held\n"
    return process


def end(process: subprocess.Popen[str]) -> None:
    process.kill()
    process.communicate()


@pytest.fixture
def holder(device: str, tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    process = hold(device, tmp_path)
    yield process
    end(process)


def test_a_second_measurement_is_refused_and_told_who_holds_the_device(
    device: str, holder: subprocess.Popen[str]
) -> None:
    wanted = rf"'{device}' is in use .*\(pid {holder.pid}, user \w+: .*{device}\)"
    with pytest.raises(DeviceError, match=wanted), hold_devices([device], wait_s=0.1):
        pytest.fail("two measurements hold one device")


@pytest.mark.skipif(os.geteuid() != 0, reason="becoming another user needs root")
def test_another_users_measurement_holds_the_device_too(device: str, tmp_path: Path) -> None:
    tmp_path.chmod(0o777)
    process = hold(device, tmp_path, user=65534)
    try:
        with (
            pytest.raises(DeviceError, match=rf"pid {process.pid}, user nobody: .*{device}"),
            hold_devices([device], wait_s=0.1),
        ):
            pytest.fail("two users hold one device")
    finally:
        end(process)


def test_a_killed_holder_frees_the_device(device: str, holder: subprocess.Popen[str]) -> None:
    holder.kill()
    with hold_devices([device]):
        pass


@pytest.mark.usefixtures("holder")
def test_two_devices_do_not_exclude_each_other(device: str) -> None:
    with hold_devices([f"{device}b"], wait_s=0.1):
        pass


def test_what_was_taken_before_a_refusal_is_free_again(
    device: str, holder: subprocess.Popen[str]
) -> None:
    first = f"a{device}"
    with pytest.raises(DeviceError), hold_devices([device, first], wait_s=0.1):
        pytest.fail("held twice")
    with hold_devices([first], wait_s=0.0):
        pass
    assert holder.poll() is None


SMI = """#!/bin/sh
echo "0, GPU-aaaa"
echo "1, GPU-bbbb"
"""


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
def test_gpus_are_held_by_their_uuids(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, visible: str | None, uuids: list[str]
) -> None:
    program = tmp_path / "nvidia-smi"
    program.write_text(SMI)
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    own: Mapping[str, str] = {} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}
    engine = {"kind": "vllm", "device": "cuda", "environment": own}
    config: Any = {"engine": engine, "server": {"device": "gpu0"}}
    assert devices_of(config) == uuids
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "7")
    engine["environment"] = {}
    with pytest.raises(DeviceError, match=r"found '7'; allowed: some of .*GPU-aaaa"):
        devices_of(config)


def test_a_gpu_study_without_nvidia_smi_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    program = tmp_path / "nvidia-smi"
    program.write_text("#!/bin/sh\necho No devices were found")
    program.chmod(0o755)
    engine = {"kind": "vllm", "device": "cuda", "environment": {}}
    config: Any = {"engine": engine, "server": {"device": "gpu0"}}
    with pytest.raises(DeviceError, match=r"found 'No devices.*'; allowed: lines of index"):
        devices_of(config)
    program.unlink()
    with pytest.raises(DeviceError, match=r"the GPUs are not known.*nvidia-smi"):
        devices_of(config)


def test_a_cpu_study_holds_the_device_it_names() -> None:
    config: Any = {"engine": {"kind": "embedded"}, "server": {"device": "cpu"}}
    assert devices_of(config) == ["cpu"]
