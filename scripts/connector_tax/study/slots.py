"""The slots of one machine: devices on which blocks are measured side by side.

`devices` of a study's file lists them; it is no part of the design. A slot is a set of CPUs and,
with GPUs, what CUDA_VISIBLE_DEVICES is to be. The blocks take the slots in turn, and a block that
was begun stays on the slot of the CPUs that its claim names. Whatever starts a server enters a slot
first; Snakemake runs one block on each at a time (`block_slots` of workflow/rules/common.smk).
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from connector_tax.config import ConfigError
from connector_tax.linux import format_cpus, parse_cpus
from connector_tax.study.device import VISIBLE_VARIABLE, DeviceError
from connector_tax.study.node import read_claim

if TYPE_CHECKING:
    from connector_tax.artifacts.study_records import SlotSection, StudyConfig, StudyDocument


def check_slots(config: StudyConfig, source: str) -> None:
    """Check what a schema cannot say of `devices`.

    Args:
        config: a study's configuration that keeps to the schema.
        source: the configuration file's name, for errors.

    Raises:
        ConfigError: a slot has no CPU or, with GPUs, none of them; two share something; or the
            study sets CUDA_VISIBLE_DEVICES itself.
    """
    slots, engine = config.get("devices", []), config["engine"]
    owners: dict[tuple[str, str], int] = {}
    for position, slot in enumerate(slots):
        where = f"{source}: devices[{position}]"
        if (engine.get("device") == "cuda") != ("visible" in slot):
            raise ConfigError(
                f"{where}.visible: found {slot.get('visible')!r}; allowed: the slot's GPUs with "
                "engine.device cuda, and no such key without"
            )
        for key, value in _uses(slot, where):
            owner = owners.setdefault((key, value), position)
            if owner != position:
                raise ConfigError(
                    f"{where}.{key}: found {value} of {slot.get(key)!r}, which is "
                    f"devices[{owner}]'s; allowed: slots that share nothing"
                )
    environments = [engine, *engine.get("forms", {}).values()]
    if slots and any(VISIBLE_VARIABLE in e.get("environment", {}) for e in environments):
        raise ConfigError(
            f"{source}: engine.environment.{VISIBLE_VARIABLE}: found with `devices`; allowed: one "
            "of the two, since each slot sets it"
        )


def _uses(slot: SlotSection, where: str) -> Iterator[tuple[str, str]]:
    """What belongs to a slot alone: key and value."""
    yield "id", slot["id"]
    for part in slot["cpus"].split(","):
        cpus = parse_cpus(part)
        if not cpus:
            raise ConfigError(f"{where}.cpus: found {part!r}; allowed: ranges such as 0-3")
        yield from (("cpus", str(cpu)) for cpu in sorted(cpus))
    yield from (("visible", gpu) for gpu in slot.get("visible", "").split(",") if gpu)


def slot_of(study: StudyDocument, study_folder: Path, block: int) -> SlotSection | None:
    """The slot a block is measured on; None where the study names none."""
    slots: list[SlotSection] = study["config"].get("devices", [])
    if slots and (held := read_claim(study_folder, block, study["design_sha256"])):
        begun = parse_cpus(held["node"]["cpus"])
        for slot in slots:
            if parse_cpus(slot["cpus"]) == begun:
                return slot
    return slots[block % len(slots)] if slots else None


def enter_block_slot(study: StudyDocument, study_folder: Path, block: int = 0) -> StudyDocument:
    """Enter the slot of a block, where the study names slots; the study as it is there.

    Raises:
        DeviceError: this process may not use a CPU of the slot.
    """
    slot = slot_of(study, study_folder, block)
    return study if slot is None else enter_slot(study, slot)


def enter_slot(study: StudyDocument, slot: SlotSection) -> StudyDocument:
    """Confine this thread, and what it starts, to a slot; the study with the slot's device.

    Raises:
        DeviceError: this process may not use a CPU of the slot.
    """
    cpus, usable = parse_cpus(slot["cpus"]), os.sched_getaffinity(0)
    if not cpus <= usable:
        raise DeviceError(
            f"devices: cpus of {slot['id']}: found {slot['cpus']}; allowed: some of "
            f"{format_cpus(tuple(usable))}, which this process may use"
        )
    os.sched_setaffinity(0, cpus)
    config = study["config"]
    server, engine = config["server"].copy(), config["engine"].copy()
    # The same CPUs are one device, whatever a study calls them: on CPUs the lock has this name.
    server["device"] += f"/{format_cpus(tuple(cpus))}"
    if "visible" in slot:
        engine["environment"] = {**engine["environment"], VISIBLE_VARIABLE: slot["visible"]}
    return {**study, "config": {**config, "server": server, "engine": engine}}
