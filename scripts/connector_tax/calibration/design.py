"""The study that is calibrated: one cell, plain, and seven configurations of known step tax.

Seven taxed configurations, as in the real study, so that Dunnett's adjustment costs what it costs
there. Cell and statistics rules are those of config/config.yaml, the spreads and step costs those
of config/embedded.yaml; the prompt is shorter, so that two cores can emulate the cell over HTTP.
"""

import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, TypedDict

from connector_tax import __version__
from connector_tax.artifacts.checks import BOUNDS
from connector_tax.artifacts.names import PLAIN, plain_names
from connector_tax.artifacts.study_records import StudyConfig, StudyDocument
from connector_tax.config import DEFAULTS, filled, load_yaml, validate
from connector_tax.engine.config import EngineConfig, load_config
from connector_tax.files import sha256_json, write_json
from connector_tax.study.design import cells_of, run_order

PLAIN_LAUNCHES = 2
AA = plain_names(PLAIN_LAUNCHES)[-1]  # the launch of plain that is compared with the others
PHASE = "A"
RATE_RPS = 60.0
CELL = "r60"
SHAPE = (64, 8)


Arrivals = Literal["fixed", "poisson"]
ARRIVALS: tuple[Arrivals, ...] = ("fixed", "poisson")
# Added to every step; 3.03 ms is the emulated step without prefill.
STEP_TAX_US: Mapping[str, float] = {
    "step_tax_15us": 15.0,
    "step_tax_30us": 30.0,
    "step_tax_60us": 60.0,
    "step_tax_90us": 90.0,
    "step_tax_150us": 150.0,
    "step_tax_240us": 240.0,
    "step_tax_360us": 360.0,
}
# What launches of one configuration differ by: the same for all, or three times as much for one.
SPREADS = ("equal", "unequal")
NOISY, NOISE_FACTOR = "step_tax_90us", 3.0
# The engine knows a tax by its callbacks; the shares are arbitrary, the sum is what counts here.
CALLBACK_SHARES = {"build_meta_us": 0.5, "get_finished_us": 0.3, "start_load_kv_us": 0.2}


class CellTimes(TypedDict):
    """What the truths need of a `cell` section."""

    warmup_s: float
    floor_s: float


class OwnCell(CellTimes, total=False):
    """What a study of the calibration may have otherwise in its `cell` section."""

    cap_s: float
    min_completed: int
    request_timeout_s: float


def study_document(
    arrivals: Arrivals,
    seed: int,
    blocks: int,
    taxed: Sequence[str] = tuple(STEP_TAX_US),
    *,
    cell: OwnCell | None = None,
    faults: Sequence[Mapping[str, Any]] = (),
) -> StudyDocument:
    """The content of `study.json` of one calibration study.

    Args:
        arrivals: fixed or poisson.
        seed: the study's seed; everything random in it follows.
        blocks: launches of each configuration.
        taxed: ids of STEP_TAX_US.
        cell: values that replace those of the `cell` section.
        faults: rules of the engine's `faults` section; none: no such section.
    """
    config: StudyConfig = filled(load_yaml(DEFAULTS / "config.yaml"), "config")
    members = [PLAIN, *taxed]
    config |= {
        "study": "calibration",
        "seed": seed,
        "blocks": blocks,
        "plain_launches": PLAIN_LAUNCHES,
        "engine": {
            "kind": "embedded",
            "label": "embedded (emulated)",
            "definition_content": engine_definition(faults),
        },
        "configurations": members,
        "arrivals": {"process": arrivals, "gamma_shape": None},
        "phase_a": {
            "rates_rps": [RATE_RPS],
            "input_tokens": SHAPE[0],
            "output_tokens": SHAPE[1],
        },
        "validity": dict(BOUNDS),
    }
    if cell is not None:
        config["cell"] = {**config["cell"], **cell}
    del config["phase_bp"]
    order = run_order(config)
    return {
        "study": "calibration",
        "design_sha256": sha256_json(config),
        "engine_label": "embedded (emulated)",
        "emulated": True,
        "package_version": __version__,
        "seed": seed,
        "blocks": blocks,
        "config": config,
        "configurations": [
            {
                "id": name,
                "label": name,
                "connector": None,
                "module_path": None,
                "role": None,
                "extra_config": {},
                "children": [],
                "purpose": "",
                "gate": None,
            }
            for name in members
        ],
        "run_order": {PHASE: order[PHASE], "B": [], "Bp": []},
        "cells": {PHASE: cells_of(config, PHASE), "B": [], "Bp": []},
    }


def engine_definition(faults: Sequence[Mapping[str, Any]] = ()) -> dict[str, Any]:
    """The embedded engine's file with the calibration's connectors, checked against its schema."""
    definition: dict[str, Any] = load_yaml(DEFAULTS / "embedded.yaml")
    nothing = {
        "admission_us_per_request": 0.0,
        "build_meta_us_per_cached_block": 0.0,
        "kv_capacity_fraction": 1.0,
        "background_cpu": 0.0,
    }
    definition["connectors"] = {PLAIN: None} | {
        name: {**{key: share * tax for key, share in CALLBACK_SHARES.items()}, **nothing}
        for name, tax in STEP_TAX_US.items()
    }
    if faults:
        definition["faults"] = {"seed": 1, "rules": [dict(rule) for rule in faults]}
    validate(definition, "embedded", "calibration")
    return definition


def engine_configs(spread: str) -> dict[str, EngineConfig]:
    """What the engine makes of `engine_definition`, for each configuration and the A/A launch.

    Args:
        spread: of SPREADS; `unequal`: NOISY's launches differ NOISE_FACTOR times as much.
    """
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "engine.json"
        write_json(path, engine_definition())
        configs = {name: load_config(path, name) for name in (PLAIN, *STEP_TAX_US)}
    if spread == "unequal":
        cost = configs[NOISY].step_cost
        wider = replace(cost, launch_offset_rel_sd=NOISE_FACTOR * cost.launch_offset_rel_sd)
        configs[NOISY] = replace(configs[NOISY], step_cost=wider)
    return configs | {AA: configs[PLAIN]}
