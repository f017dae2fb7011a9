"""A torn block fails the audit: in another order, beside itself, on two devices."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from connector_tax.artifacts.names import Launch
from connector_tax.files import write_json
from connector_tax.provenance.audit_blocks import (
    DEVICE,
    FILES_CLAIM,
    LEVEL,
    ORDER,
    OVERLAP,
    check_blocks,
)
from connector_tax.provenance.audit_study import RawStudy
from connector_tax.provenance.claims import FAIL, NOT_CHECKABLE, Claim, Ledger
from tests.study_folder import NODE, rate_cell, study_document

PROVED = "50ce"
DRAWN = ("plain_2", "noop_connector", "plain")
Attempts = dict[str, list[dict[str, Any]]]
PYTHON = "envs/vllm-gpu/.venv/bin/python"
FILES = {PYTHON: {"lock_sha256": "a10c", "sources_sha256": "50ce"}}
GPU = {"uuid": "GPU-a", "name": "H100", "pci.bus_id": "1", "driver_version": "580"}


def measured() -> Attempts:
    """A block of Phase A as it should be: launch name to its attempts."""
    return {
        name: [
            {
                "started_utc": f"2026-05-26T09:0{minute}:00.000+00:00",
                "ended_utc": f"2026-05-26T09:0{minute}:50.000+00:00",
                "supersedes": None,
                "node": {
                    **NODE,
                    "boot": f"b{minute}",
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
    config = {"seed": 1, "blocks": 1, "plain_launches": 2, "configurations": list(DRAWN)}
    config["engine"] = {"kind": "vllm", "label": "a vLLM", "python": PYTHON}
    labels = {"plain": "plain", "noop_connector": "no-op"}
    document = study_document(config, labels, {"A": [rate_cell(1, 1, 1)]}, order, emulated=False)
    write_json(root / "study.json", document)
    write_json(root / "patch/patch_status.json", {"vllm_sources_sha256_before": PROVED})
    for launch in order:
        write_json(
            launch.folder(root) / "index.json",
            {
                **{"config": launch.config, "configuration": launch.configuration, "block": 0},
                **{"phase": "A", "label": "", "status": "done", "reason": None, "rate_rps": None},
                **{"depends": {}, "cells": [], "timing": {}, "attempts": attempts[launch.config]},
                **{"started_utc": "", "ended_utc": ""},
            },
        )
    ledger = Ledger()
    check_blocks(RawStudy(root / "study.json"), ledger)
    return ledger.claims


def wrong(root: Path, attempts: Attempts) -> dict[str, str]:
    """Kind and message of what fails; an overlap is told for the block and for the device."""
    return {c.kind: c.message for c in claims(root, attempts) if c.verdict == FAIL}


def test_a_block_as_drawn_passes_over_reboots_and_jobs(tmp_path: Path) -> None:
    told = claims(tmp_path, measured())
    assert [c for c in told if c.verdict == FAIL] == []
    assert [c.kind for c in told] == [ORDER, OVERLAP, OVERLAP, DEVICE, "device type", FILES_CLAIM]


def exchanged(attempts: Attempts) -> None:
    attempts["plain"], attempts["plain_2"] = attempts["plain_2"], attempts["plain"]


def beside(attempts: Attempts) -> None:
    attempts["noop_connector"][0]["ended_utc"] = "2026-05-26T09:02:01.000+00:00"


def elsewhere(key: str, value: object) -> Callable[[Attempts], None]:
    def change(attempts: Attempts) -> None:
        attempts["plain"][0]["node"][key] = value

    return change


def other_gpu(attempts: Attempts) -> None:
    for name, gpu in zip(DRAWN, (GPU, GPU, {**GPU, "uuid": "GPU-b"}), strict=True):
        attempts[name][0]["node"] |= {"gpus": [gpu], "devices": [gpu["uuid"]]}


def judged_by_another_level(attempts: Attempts) -> None:
    for name, memory_ns in zip(DRAWN, (80.0, 80.0, 81.0), strict=True):
        attempts[name][0]["quiet_level"] = {"memory_ns": memory_ns}


def other_than_proved(attempts: Attempts) -> None:
    for (attempt,) in attempts.values():
        attempt["node"]["engine_files"] = {PYTHON: FILES[PYTHON] | {"sources_sha256": "07e5"}}


def killed_and_resumed_elsewhere(attempts: Attempts) -> None:
    first = attempts["plain"][0]
    later = {**first, "node": {**first["node"], "machine": "machine-b"}}
    attempts["plain"] = [{**first, "ended_utc": None}, later]


TORN: dict[str, tuple[Callable[[Attempts], None], dict[str, str]]] = {
    "two launches exchanged": (exchanged, {ORDER: "noop_connector/block0/A began at"}),
    "two launches at once": (beside, {OVERLAP: "noop_connector/block0/A ended at"}),
    "another machine": (elsewhere("machine", "machine-b"), {DEVICE: "machine: plain_2/block0/A"}),
    "other CPUs": (elsewhere("cpus", "8-15"), {DEVICE: "cpus: .*'0-7', plain/block0/A on '8-15'"}),
    "another GPU of the machine": (other_gpu, {DEVICE: "devices: "}),
    "another processor": (
        elsewhere("cpu", "another"), {DEVICE: "cpu: ", "device type": "cpu: .* on 'another'"}),
    "another vLLM": (
        elsewhere("engine_files", {PYTHON: FILES[PYTHON] | {"sources_sha256": "07e5"}}),
        {DEVICE: "engine_files: .*50ce.* on .*07e5", FILES_CLAIM: "plain_2.*50ce.*, plain.*07e5"}),
    "another vLLM than step timing was proved on": (
        other_than_proved, {FILES_CLAIM: "sources are 07e5, 50ce where step timing was proved"}),
    "another quiet level": (judged_by_another_level, {LEVEL: "plain/block0/A: .*81.0"}),
    "resumed elsewhere": (killed_and_resumed_elsewhere, {DEVICE: "machine: "}),
}  # fmt: skip


@pytest.mark.parametrize("what", TORN)
def test_a_torn_block_fails(tmp_path: Path, what: str) -> None:
    tear, told = TORN[what]
    attempts = measured()
    tear(attempts)
    failed = wrong(tmp_path, attempts)
    assert failed.keys() == told.keys()
    for kind, pattern in told.items():
        assert re.search(pattern, failed[kind]), failed[kind]


def test_a_launch_measured_again_on_request_may_be_late_and_is_named(tmp_path: Path) -> None:
    attempts = measured()
    again = attempts["plain_2"][0]
    again |= {key: again[key].replace("T09:00", "T09:30") for key in ("started_utc", "ended_utc")}
    assert ORDER in wrong(tmp_path, attempts)
    again["supersedes"] = "A.superseded1"
    order = next(c for c in claims(tmp_path, attempts) if c.kind == ORDER)
    assert order.message == "as drawn, plain_2/block0/A again on request"


def test_an_older_study_of_vllm_recorded_no_files_of_it(tmp_path: Path) -> None:
    attempts = measured()
    for (attempt,) in attempts.values():
        del attempt["node"]["engine_files"]
    told = {c.kind: c.verdict for c in claims(tmp_path, attempts)}
    assert told[FILES_CLAIM] == NOT_CHECKABLE
    assert FAIL not in told.values()


def test_an_older_study_names_no_device(tmp_path: Path) -> None:
    attempts = measured()
    for (attempt,) in attempts.values():
        del attempt["node"], attempt["supersedes"]
    told = claims(tmp_path, attempts)
    assert [(c.kind, c.verdict) for c in told if c.kind == DEVICE] == [(DEVICE, NOT_CHECKABLE)]
    beside(attempts)
    assert list(wrong(tmp_path, attempts)) == [OVERLAP]
