"""Blocks on the slots of one machine: which slot, what is confined to it, and what is refused."""

import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from connector_tax.artifacts import paths
from connector_tax.artifacts.names import Launch
from connector_tax.artifacts.study_file import launches
from connector_tax.artifacts.study_records import StudyDocument
from connector_tax.config import ROOT, ConfigError, load_yaml
from connector_tax.files import write_json
from connector_tax.loadgen import Progress
from connector_tax.rehearsal import plan as plan_command
from connector_tax.servers.kinds import command_for
from connector_tax.study import plan, progress
from connector_tax.study.design import resolve
from connector_tax.study.device import (
    DeviceError,
    claim_device,
    describe_node,
    devices_of,
    enter_block_slot,
    enter_slot,
    slot_of,
)
from connector_tax.study.server_command import launch_script
from tests.study.driving import write_study
from tests.workflow.harness import TINY

CPU = min(os.sched_getaffinity(0))
TWO = [{"id": "a", "cpus": "0"}, {"id": "b", "cpus": "1"}]


def tiny(slots: Sequence[dict[str, Any]] | None, **changes: Any) -> StudyDocument:
    config: dict[str, Any] = load_yaml(TINY) | changes
    return resolve(config if slots is None else {**config, "devices": slots}, "tiny.yaml")


@pytest.fixture
def affinity() -> Iterator[set[int]]:
    """This process's CPUs, which it has again after the test."""
    before = os.sched_getaffinity(0)
    yield before
    os.sched_setaffinity(0, before)


def test_slots_are_no_part_of_the_design() -> None:
    assert tiny(TWO)["design_sha256"] == tiny(None)["design_sha256"]


@pytest.mark.parametrize(
    ("second", "said"),
    [
        ({"id": "a", "cpus": "1"}, r"devices\[1\].id: found a of 'a', which is devices\[0\]'s"),
        ({"id": "b", "cpus": "5,3-4"}, r"devices\[1\].cpus: found 3 of '5,3-4', which is devices"),
        ({"id": "b", "cpus": "9-8"}, r"devices\[1\].cpus: found '9-8'; allowed: ranges such as"),
        ({"id": "b", "cpus": "all"}, r"devices\[1\].cpus: found 'all'; allowed: text matching"),
        ({"id": "b"}, r"devices\[1\].cpus: missing; it is required"),
        ({"id": "b", "cpus": "8", "visible": "0"}, r"\[1\].visible: found '0'; allowed: the slot"),
    ],
)
def test_slots_that_cannot_be_are_refused(second: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        tiny([{"id": "a", "cpus": "0-3"}, second])


def gpu_study(*visible: str | None, own: dict[str, str] | None = None) -> StudyDocument:
    config: dict[str, Any] = load_yaml(ROOT / "config/h20.yaml")
    config["engine"]["environment"] |= own or {}
    named = [{} if v is None else {"visible": v} for v in visible]
    slots = [{"id": f"gpu{k}", "cpus": str(k), **gpus} for k, gpus in enumerate(named)]
    return resolve({**config, "devices": slots}, "h20.yaml")


def test_each_gpu_belongs_to_one_slot() -> None:
    gpu_study("0", "1,2", "GPU-5ca1ab1e")
    with pytest.raises(ConfigError, match=r"devices\[1\].visible: found 0 of '1,0', which is dev"):
        gpu_study("0", "1,0")
    with pytest.raises(ConfigError, match=r"devices\[0\].visible: found None; allowed: the slot's"):
        gpu_study(None)
    with pytest.raises(ConfigError, match=r"engine.environment.CUDA_VISIBLE_DEVICES: found with"):
        gpu_study("0", own={"CUDA_VISIBLE_DEVICES": "0"})


def test_blocks_take_the_slots_in_turn_and_stay_where_they_were_begun(tmp_path: Path) -> None:
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
    # Slots that were listed otherwise when the block was begun: the claim refuses, and says why.
    claim_device(tmp_path, 3, study["design_sha256"], {**node, "cpus": "0-1"})
    assert slots() == ["a", "b", "b", "b"]


@pytest.mark.usefixtures("affinity")
def test_what_enters_a_slot_has_its_cpus_and_its_device(tmp_path: Path) -> None:
    study = tiny([{"id": "one", "cpus": str(CPU)}])
    before = devices_of(study["config"])
    inside = enter_block_slot(study, tmp_path, block=5)
    assert os.sched_getaffinity(0) == {CPU}
    assert devices_of(inside["config"]) == [f"{before[0]}/{CPU}"]
    assert describe_node(inside["config"])["cpus"] == str(CPU)
    assert devices_of(study["config"]) == before


@pytest.mark.usefixtures("affinity")
def test_a_server_in_a_slot_sees_the_slots_gpus() -> None:
    study = gpu_study("1")
    inside = enter_slot(study, {"id": "x", "cpus": str(CPU), "visible": "1"})
    for which, exported in ((study, False), (inside, True)):
        script = launch_script(command_for(which, Launch("plain", 0, "A"), 8000), "x", ".")
        assert ("\nexport CUDA_VISIBLE_DEVICES=1\n" in script) is exported


def test_a_slot_of_cpus_that_are_not_there_is_refused(affinity: set[int]) -> None:
    with pytest.raises(DeviceError, match=r"cpus of x: found 7000; allowed: some of \d"):
        enter_slot(tiny(None), {"id": "x", "cpus": "7000"})
    assert os.sched_getaffinity(0) == affinity


def test_a_study_without_slots_is_left_as_it_is(tmp_path: Path, affinity: set[int]) -> None:
    study = tiny(None)
    assert enter_block_slot(study, tmp_path) is study
    assert os.sched_getaffinity(0) == affinity


def test_slots_work_side_by_side_and_phase_a_ends_before_phase_b(tmp_path: Path) -> None:
    study_file = write_study(tmp_path)
    left = {}
    for name, slots in (("one", None), ("two", TWO), ("three", [*TWO, {"id": "c", "cpus": "2"}])):
        study = tiny(slots, blocks=3)
        write_json(study_file, study)
        left[name] = plan.remaining(study, tmp_path)
    one_s = left["one"].wall_s
    # Three blocks: two of them one after the other on two slots.
    assert left["two"].wall_s == pytest.approx(one_s * 2 / 3)
    assert left["three"].wall_s == pytest.approx(one_s / 3)
    assert [left[name].devices for name in left] == [1, 2, 3]
    assert [left[name].device_s for name in left] == pytest.approx([one_s] * 3)


def test_blocks_that_nodes_have_begun_are_measured_side_by_side(tmp_path: Path) -> None:
    study = tiny(None, blocks=4)
    # The gates are over: they are passed on one device, whatever number there is.
    write_json(tmp_path / paths.PREFLIGHT_STATUS, {})
    one = plan.remaining(study, tmp_path)
    node = describe_node(study["config"])
    for block, machine in enumerate("abb"):
        claim_device(tmp_path, block, study["design_sha256"], {**node, "machine": machine})
    left = plan.remaining(study, tmp_path)
    # The fourth goes to the node that has one block.
    assert left == pytest.approx((one.wall_s / 2, one.wall_s, 2))
    claim_device(tmp_path, 3, "of another design", node)
    assert plan.remaining(study, tmp_path) == left


def test_several_devices_are_told_in_device_hours(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(progress, "PLAIN_INTERVAL_S", 0.0)
    study_file = write_study(tmp_path)
    for slots in (None, TWO):
        study = tiny(slots, blocks=2)
        write_json(study_file, study)
        left = plan.remaining(study, tmp_path)
        told = f", {left.device_s / 3600:.2f} device hours on 2 devices" if slots else ""
        assert plan_command.main(["--study", str(study_file)]) == 0
        assert f"about {left.wall_s / 60:.1f} min{told} (design" in capsys.readouterr().out
        launch = launches(study, "A")[0]
        with progress.LaunchProgress(study, tmp_path, launch, tmp_path / "x.log") as seen:
            seen.start_cell("r1", 1, 1, 1.0)
            seen.update(Progress(0.0, 0, 0, 0, 0, 0, 0))
        assert f"study {progress.duration(left.wall_s)} left{told}\n" in capsys.readouterr().err
    half = left.after(left.wall_s / 2)
    assert half == pytest.approx((left.wall_s / 2, left.device_s / 2, 2))
    assert left.after(2 * left.wall_s)[:2] == (0, 0)
