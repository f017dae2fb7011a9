"""The study that is calibrated: one cell, plain, and seven configurations of known step tax.

Seven taxed configurations, as in the real study, so that the adjustment for them costs what it
costs there. Cell and statistics rules are those of config/config.yaml, the step costs those of
config/embedded.yaml; the prompt is shorter, so that two cores can emulate the cell over HTTP.
"""

from collections.abc import Mapping, Sequence
from copy import deepcopy
from functools import cache
from typing import Any, Literal, cast

from connector_tax.artifacts.names import PHASES, PLAIN, plain_names
from connector_tax.artifacts.study_records import CellSection, StudyDocument
from connector_tax.config import DEFAULTS, load_yaml, validate
from connector_tax.rehearsal.machine import Machine, machine_of
from connector_tax.rehearsal.noise import NOISES
from connector_tax.study.design import cells_of, resolve, run_order

PLAIN_LAUNCHES = 2
AA = plain_names(PLAIN_LAUNCHES)[-1]  # the launch of plain that is compared with the others
PHASE = "A"
RATE_RPS = 60.0
CELL = "r60"
SHAPE = (64, 8)


Arrivals = Literal["jittered", "poisson"]
ARRIVALS: tuple[Arrivals, ...] = ("jittered", "poisson")
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
# How launches differ: rows of `rehearsal.noise.NOISES`.
SPREADS = ("engine", "vllm-cpu", "hostile")
# The engine knows a tax by its callbacks; the shares are arbitrary, the sum is what counts here.
CALLBACK_SHARES = {"build_meta_us": 0.5, "get_finished_us": 0.3, "start_load_kv_us": 0.2}


def study_document(
    arrivals: Arrivals,
    seed: int,
    blocks: int,
    taxed: Sequence[str] = tuple(STEP_TAX_US),
    *,
    cell: Mapping[str, float] | None = None,
    faults: Sequence[Mapping[str, Any]] = (),
) -> StudyDocument:
    """The content of `study.json` of one calibration study.

    Args:
        arrivals: jittered or poisson.
        seed: the study's seed; everything random in it follows.
        blocks: launches of each configuration.
        taxed: ids of STEP_TAX_US.
        cell: values that replace those of the `cell` section.
        faults: rules of the engine's `faults` section; none: no such section.
    """
    document = deepcopy(_default())
    config = document["config"]
    config["engine"]["definition_content"] = engine_definition(faults)
    config["seed"], config["blocks"], config["plain_launches"] = seed, blocks, PLAIN_LAUNCHES
    config["configurations"] = [PLAIN, *taxed]
    config["arrivals"]["process"] = arrivals
    config["phase_a"] = {
        "rates_rps": [RATE_RPS],
        "input_tokens": SHAPE[0],
        "output_tokens": SHAPE[1],
    }
    config["cell"] = cast(CellSection, {**config["cell"], **(cell or {})})
    config.pop("phase_b", None)
    config.pop("phase_bp", None)
    entry = document["configurations"][0]
    document["configurations"] = [
        {**entry, "id": name, "label": name} for name in config["configurations"]
    ]
    document["seed"], document["blocks"], document["run_order"] = seed, blocks, run_order(config)
    document["cells"] = {phase: cells_of(config, phase) for phase in PHASES}
    return document


@cache
def _default() -> StudyDocument:
    return resolve({**load_yaml(DEFAULTS / "config.yaml"), "study": "calibration"}, "calibration")


def engine_definition(faults: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
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


@cache
def machine_with(spread: str) -> Machine:
    """The engine of `engine_definition` with launches that differ as `spread` of SPREADS says."""
    return machine_of(study_document("jittered", 0, 1)).noisy(NOISES[spread])
