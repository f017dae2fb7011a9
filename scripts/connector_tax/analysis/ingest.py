"""Find the devices that a study's cells were measured on.

A block is measured on one device, so its effects include the device (docs/method.md, "Several
devices"). If all launches ran on one device, or did not record it, devices are not distinguished.
"""

from collections.abc import Iterable, Sequence
from typing import Any

from connector_tax.artifacts.folder import CellFolder
from connector_tax.artifacts.launch_files import ClaimedNode, NodeRecord
from connector_tax.files import ArtifactError

NOT_RECORDED = "a device that was not recorded"
# Fields that distinguish a GPU from others of its type.
OWN = ("uuid", "pci.bus_id")
# Fields of a node with the hashes of the lock and of vLLM's sources.
FILES = "engine_files"


def merged_reasons(reasons: Sequence[tuple[int, str]]) -> str:
    """Return the reasons of several blocks as one text: `block 0, 2: died; block 1: early send`."""
    by_text: dict[str, list[int]] = {}
    for block, text in reasons:
        by_text.setdefault(text, []).append(block)
    return "; ".join(
        f"block {', '.join(map(str, blocks))}: {text}" for text, blocks in by_text.items()
    )


def block_devices(cells: Iterable[CellFolder]) -> dict[int, str]:
    """Return the name of each block's device; empty if all blocks have the same device.

    Args:
        cells: cells of any phases of the study.

    Raises:
        ArtifactError: a block has launches on two devices, or the study has two types of device or
            two environments.
    """
    cells = list(cells)
    measured = [(cell, node) for cell in cells for node in cell.nodes]
    names: dict[int, str] = {}
    for cell, node in measured:
        name = device_name(node)
        known = names.setdefault(cell.key.block, name)
        if known != name:
            raise ArtifactError(
                f"{cell.folder.parent}: measured on {name}, the block's other launches on {known}:"
                " launches of one block are compared, and must be of one device (docs/devices.md)"
            )
    _check_types(measured)
    if len(set(names.values())) < 2:
        return {}
    return {cell.key.block: names.get(cell.key.block, NOT_RECORDED) for cell in cells}


def device_name(node: ClaimedNode) -> str:
    """Return a device's name: the machine's alias with GPU UUIDs, or `server.device` and CPUs."""
    name = " ".join([node["machine"], *node["devices"]])
    return name if node["gpus"] else f"{name}, CPUs {node['cpus']}"


def _check_types(measured: Iterable[tuple[CellFolder, NodeRecord]]) -> None:
    known: dict[str, tuple[CellFolder, Any]] = {}
    for cell, node in measured:
        for key, value in device_type(node).items():
            first, wanted = known.setdefault(key, (cell, value))
            if value == wanted:
                continue
            what = "environments" if key == FILES else "types of device"
            raise ArtifactError(
                f"two {what} are never pooled: {key} is {wanted!r} in block {first.key.block} and"
                f" {value!r} in block {cell.key.block}. Measure a study with one; two studies are"
                " compared by `snakemake compare` (docs/compare.md)"
            )


def device_type(node: NodeRecord) -> dict[str, Any]:
    """Return the properties of a device that must be equal for all launches."""
    gpus = [{k: v for k, v in gpu.items() if k not in OWN} for gpu in node["gpus"]]
    return {
        "gpus": gpus, "cpu": node["cpu"], "quota_cpus": node["quota_cpus"],
        FILES: node["engine_files"],
    }  # fmt: skip
