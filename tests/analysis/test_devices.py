"""Test the devices of blocks, and the rejection of split blocks and mixed device types."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from connector_tax.analysis.ingest import block_devices
from connector_tax.artifacts.folder import CellFolder
from connector_tax.artifacts.names import CellKey
from connector_tax.files import ArtifactError
from tests.study_folder import NODE, on_machines

GPU = {"uuid": "GPU-a", "name": "H100", "pci.bus_id": "1", "driver_version": "580"}


def cells_on(*nodes: Sequence[Any]) -> list[CellFolder]:
    """Return a cell of each block, whose launch had attempts on the given nodes."""
    return [
        CellFolder(CellKey("x", block, "A", "r1"), "valid", None, Path("x"), {}, None, 1.0, 1, 1,
             tuple(mine))
        for block, mine in enumerate(nodes)
    ]  # fmt: skip


def on_gpu(**changes: str) -> list[Mapping[str, Any]]:
    gpu = GPU | changes
    return [NODE | {"gpus": [gpu], "devices": [gpu["uuid"]]}]


def test_blocks_on_one_or_unrecorded_devices_have_no_device_names() -> None:
    assert block_devices(cells_on([], [])) == {}
    assert block_devices(cells_on([NODE], [NODE | {"boot": "later", "job": "7"}], [])) == {}


def test_blocks_are_named_by_their_devices() -> None:
    gpus = cells_on(on_gpu(), on_gpu(uuid="GPU-b", **{"pci.bus_id": "2"}), [])
    assert block_devices(gpus) == {
        0: "machine-0123456789ab GPU-a",
        1: "machine-0123456789ab GPU-b",
        2: "a device that was not recorded",
    }
    slots = cells_on([NODE | {"cpus": "0-3"}], [NODE | {"cpus": "4-7"}])
    assert block_devices(slots)[1] == "machine-0123456789ab none, CPUs 4-7"


def with_files(lock: str, sources: str) -> list[Mapping[str, Any]]:
    files = {"envs/x/.venv/bin/python": {"lock_sha256": lock, "sources_sha256": sources}}
    return [NODE | {"engine_files": files}]


def test_two_environments_in_one_study_are_refused_and_named() -> None:
    assert block_devices(cells_on(with_files("a", "b"), with_files("a", "b"))) == {}
    told = "two environments are never pooled: engine_files is .*'b'.* in block 0 and .*'c'.* in bl"
    with pytest.raises(ArtifactError, match=told):
        block_devices(cells_on(with_files("a", "b"), with_files("a", "c")))


def test_a_block_on_two_devices_is_refused() -> None:
    with pytest.raises(ArtifactError, match=r"measured on machine-b none.* on machine-a none"):
        block_devices(cells_on(on_machines("a", "b")))


@pytest.mark.parametrize(
    ("others", "told"),
    [
        (on_gpu(uuid="GPU-b", name="H200"), "gpus is .*H100.* in block 0 and .*H200.* in block 1"),
        ([NODE | {"cpus": "8-9", "cpu": "old"}], "cpu is 'synthetic' in .* and 'old' in block 1"),
        ([NODE | {"cpus": "8-9", "quota_cpus": 2}], "quota_cpus is None in block 0 and 2"),
    ],
)
def test_two_types_of_device_are_refused_and_both_named(
    others: list[Mapping[str, Any]], told: str
) -> None:
    first: Sequence[Mapping[str, Any]] = on_gpu() if others[0]["gpus"] else [NODE]
    with pytest.raises(ArtifactError, match=rf"never pooled: {told}"):
        block_devices(cells_on(first, others))
