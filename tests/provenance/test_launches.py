"""Test that the audit fails for blocks out of order, in parallel, or on two devices."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from connector_tax.artifacts.folder import StudyFolder
from connector_tax.artifacts.index import launch_index, write_index
from connector_tax.artifacts.names import PHASES, Launch
from connector_tax.artifacts.study_file import read_study
from connector_tax.files import read_json, write_json
from connector_tax.provenance.archive import readme
from connector_tax.provenance.claims import FAIL, NOT_CHECKABLE, PASS, Claim, Ledger
from connector_tax.provenance.launches import _comparable, check_launches
from connector_tax.study.server_command import MARKS
from tests.provenance.tampering import LAUNCH, other_command
from tests.study_folder import NODE, edited_json, replace, study_design

PROVED = "50ce"
SECOND = 10**9
DRAWN = ("plain_2", "noop_connector", "plain")
Attempts = dict[str, list[dict[str, Any]]]
PYTHON = "envs/vllm-gpu/.venv/bin/python"
FILES = {PYTHON: {"lock_sha256": "a10c", "sources_sha256": "50ce"}}
GPU = {"uuid": "GPU-a", "name": "H100", "pci.bus_id": "1", "driver_version": "580"}


def measured() -> Attempts:
    """Return a correct block of Phase A: attempts by launch name."""
    return {
        name: [
            {
                "started_ns": 60 * minute * SECOND + 1,
                "ended_ns": (60 * minute + 50) * SECOND,
                "supersedes": None,
                "node": {
                    **NODE,
                    "job": str(minute),
                    "exclusive": minute < 2,
                    "engine_files": FILES,
                },
            }
        ]
        for minute, name in enumerate(DRAWN)
    }


def claims(root: Path, attempts: Attempts) -> list[Claim]:
    order = [Launch(name, 0, "A") for name in DRAWN]
    document: Any = study_design(configurations=["plain", "noop_connector"], phase_bp=None)
    document["config"]["engine"] = {"kind": "vllm", "label": "a vLLM", "python": PYTHON}
    document["run_order"] = {phase: [] for phase in PHASES} | {
        "A": [{"config": name, "block": 0} for name in DRAWN]
    }
    write_json(root / "study.json", document)
    write_json(root / "patch/patch_status.json", {"vllm_sources_sha256_before": PROVED})
    write_json(root / "preflight/preflight_status.json", {})
    for launch in order:
        index = launch_index(document, launch, [], attempts=attempts[launch.config], started_utc="")
        write_index(launch.folder(root), index)
    ledger = Ledger()
    check_launches(StudyFolder.load(root / "study.json"), ledger)
    return [c for c in ledger.claims if c.kind in ("order", "overlap", "device")]


def wrong(root: Path, attempts: Attempts) -> dict[str, str]:
    """Return kind and message of each failed claim."""
    return {c.kind: c.message for c in claims(root, attempts) if c.verdict == FAIL}


def test_block_in_drawn_order_passes_every_claim(tmp_path: Path) -> None:
    assert wrong(tmp_path, measured()) == {}


def test_timestamps_of_different_boots_are_not_compared(tmp_path: Path) -> None:
    attempts = measured()
    attempts["plain"][0]["node"]["boot"] = "another"
    attempts["plain"][0] |= {"started_ns": 1, "ended_ns": 2}
    assert wrong(tmp_path, attempts) == {}


def exchanged(attempts: Attempts) -> None:
    attempts["plain"], attempts["plain_2"] = attempts["plain_2"], attempts["plain"]


def beside(attempts: Attempts) -> None:
    attempts["noop_connector"][0]["ended_ns"] = 121 * SECOND


def elsewhere(key: str, value: object) -> Callable[[Attempts], None]:
    def change(attempts: Attempts) -> None:
        attempts["plain"][0]["node"][key] = value

    return change


def on_gpu(*gpus: dict[str, str], **last: object) -> Callable[[Attempts], None]:
    def change(attempts: Attempts) -> None:
        for name, gpu in zip(DRAWN, gpus, strict=True):
            attempts[name][0]["node"] |= {"gpus": [gpu], "devices": [gpu["uuid"]]}
        attempts[DRAWN[-1]][0]["node"] |= last

    return change


def other_than_proved(attempts: Attempts) -> None:
    for (attempt,) in attempts.values():
        attempt["node"]["engine_files"] = {PYTHON: FILES[PYTHON] | {"sources_sha256": "07e5"}}


def killed_and_resumed_elsewhere(attempts: Attempts) -> None:
    first = attempts["plain"][0]
    later = {**first, "node": {**first["node"], "machine": "machine-b"}}
    attempts["plain"] = [{**first}, later]


TORN: dict[str, tuple[Callable[[Attempts], None], str, str]] = {
    "two launches exchanged": (exchanged, "order", "noop_connector/block0/A began before plain_2"),
    "two launches at once": (beside, "overlap", "plain/block0/A began 1.0 s before noop_conn"),
    "another machine": (elsewhere("machine", "machine-b"), "device", "measured on .* machine-b"),
    "other CPUs": (elsewhere("cpus", "8-15"), "device", "measured on .*CPUs 0-7.* CPUs 8-15"),
    "another GPU of the machine": (
        on_gpu(GPU, GPU, {**GPU, "uuid": "GPU-b"}), "device", "measured on .*GPU-a.* GPU-b"),
    "other CPUs beside one GPU": (
        on_gpu(GPU, GPU, GPU, cpus="8-15"), "device", "cpus: .* on '0-7', plain/.* on '8-15'"),
    "a GPU's other NUMA node": (
        on_gpu(GPU, GPU, GPU, gpu_numa_nodes=[1]), "device", r"gpu_numa_nodes: .* on \[1\]"),
    "another processor": (elsewhere("cpu", "another"), "device", "types of device.* cpu is"),
    "another vLLM": (
        elsewhere("engine_files", {PYTHON: FILES[PYTHON] | {"sources_sha256": "07e5"}}),
        "device", "two environments .*07e5"),
    "another vLLM than step timing was proved on": (
        other_than_proved, "device", "sources are 07e5, but 50ce where step timing was proved"),
    "resumed elsewhere": (killed_and_resumed_elsewhere, "device", "measured on .*machine-b"),
}  # fmt: skip


@pytest.mark.parametrize("what", TORN)
def test_incomplete_or_reordered_block_fails_the_audit(tmp_path: Path, what: str) -> None:
    tear, kind, message = TORN[what]
    attempts = measured()
    tear(attempts)
    failed = [c.message for c in claims(tmp_path, attempts) if (c.kind, c.verdict) == (kind, FAIL)]
    assert any(re.search(message, text) for text in failed), failed


def test_launch_remeasured_on_request_may_run_out_of_order(tmp_path: Path) -> None:
    attempts = measured()
    attempts["plain_2"][0] |= {"started_ns": 1800 * SECOND, "ended_ns": 1850 * SECOND}
    assert "order" in wrong(tmp_path, attempts)
    attempts["plain_2"][0]["supersedes"] = "A.superseded1"
    assert wrong(tmp_path, attempts) == {}


def of_launch(root: Path) -> dict[str, tuple[str, str]]:
    """Return verdict and message of the claims about one launch, by kind."""
    ledger = Ledger()
    check_launches(StudyFolder.load(root / "study.json"), ledger)
    name = LAUNCH.removeprefix("runs/")
    return {c.kind: (c.verdict, c.message) for c in ledger.claims if c.subject == name}


def test_launch_on_a_slot_uses_the_gpus_of_the_slot(root: Path) -> None:
    with edited_json(root / "study.json") as study:
        study["config"]["engine"]["environment"] = {}
        study["config"]["devices"] = [{"id": "a", "cpus": NODE["cpus"], "visible": "3"}]
    with edited_json(root / LAUNCH / "config.json") as config:
        config["engine"]["environment"] = {"CUDA_VISIBLE_DEVICES": "3"}
        config["design_sha256"] = read_json(root / "study.json")["design_sha256"]
    assert of_launch(root)["launch"][0] == PASS
    with edited_json(root / LAUNCH / "config.json") as config:
        config["engine"]["environment"] = {"CUDA_VISIBLE_DEVICES": "4"}
    assert "CUDA_VISIBLE_DEVICES: published '4', made again '3'" in of_launch(root)["launch"][1]


@pytest.mark.parametrize("mark", MARKS)
def test_variables_of_launch_sh_are_expanded_for_comparison(root: Path, mark: str) -> None:
    other_command(lambda config: config["environment"].update(PLACE=f"{mark}/x"))(root)
    assert of_launch(root)["launch"][0] == of_launch(root)["script"][0] == PASS


@pytest.mark.parametrize("version", ["0.1.0", None])
def test_command_of_another_or_no_version_is_not_checkable(root: Path, version: str | None) -> None:
    with edited_json(root / "study.json") as study:
        del study["package_version"]
        if version is not None:
            study["package_version"] = version
    assert "# Connector-tax study synthetic" in readme(read_study(root / "study.json"))
    assert of_launch(root)["command"][0] == PASS
    other_command(lambda config: config["argv"].append("--new"))(root)
    replace(root / LAUNCH / "launch.sh", (root / LAUNCH / "launch.sh").read_text() + "# end\n")
    verdicts = of_launch(root)
    assert verdicts["command"][0] == verdicts["script"][0] == NOT_CHECKABLE


@pytest.mark.parametrize("separators", [(",", ":"), (", ", ": ")])
def test_port_numbers_of_commands_are_not_compared(separators: tuple[str, str]) -> None:
    def command(port: int, size: int) -> Any:
        extra = json.dumps({"mp.port": str(port), "size": size}, separators=separators)
        argv = ["serve", "--port", str(port), f"--at=127.0.0.1:{port}", extra]
        return _comparable(argv, {"A_PORT": str(port)})

    assert command(49183, 1) == command(36609, 1)
    assert command(49183, 1) != command(49183, 2)
