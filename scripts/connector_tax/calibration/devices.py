"""Virtual studies on several devices, on each of which each connector has a step tax of its own."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from connector_tax.artifacts.names import CellKey
from connector_tax.artifacts.study_records import StudyDocument
from connector_tax.calibration.design import STEP_TAX_US, engine_configs, study_document
from connector_tax.calibration.studies import Samples, model_interval, simulate, tax_table
from connector_tax.engine.config import EngineConfig
from connector_tax.seeds import named_generator

# The device of each block, and which of these blocks a study has.
DEVICE_OF = "abcdabcd"
DESIGNS: Mapping[str, Sequence[int]] = {
    "2 devices, 2 blocks each": (0, 1, 4, 5),
    "4 devices, 1 block each": (0, 1, 2, 3),
    "4 devices, 2 blocks each": range(8),
}
# Standard deviation of a connector's step tax from device to device; a step takes 3.03 ms.
EFFECTS_US = (0.0, 40.0)


def engines(shifts: Mapping[str, float]) -> dict[str, EngineConfig]:
    """The engines of a device, by launch name, with that much more of a step tax (us)."""
    configs = engine_configs("equal")
    for name, shift in shifts.items():
        tax = configs[name].tax
        assert tax is not None
        tax = replace(tax, build_meta_us=tax.build_meta_us + shift)
        configs[name] = replace(configs[name], tax=tax)
    return configs


def device_study(number: int, seed: int, effect_us: float) -> list[dict[str, Any]]:
    """Study `number`: each tax of each design, over its devices (`device` empty) and on each.

    `shifts_us` are what its devices, or its device, have more of the step tax; `model_lo` and
    `model_hi` the interval without the bootstrap, of the taxes over devices.
    """
    document = study_document("poisson", seed + number, len(DEVICE_OF))
    names = sorted(set(DEVICE_OF))
    rng = named_generator(f"{seed}/devices/study{number}")
    shifts = {d: dict.fromkeys(STEP_TAX_US, 0.0) for d in names}
    for device in names:
        drawn = rng.normal(0.0, effect_us, len(STEP_TAX_US))
        shifts[device] = dict(zip(STEP_TAX_US, drawn.tolist(), strict=True))
    samples: Samples = {}
    for device in names:
        order = [e for e in document["run_order"]["A"] if DEVICE_OF[e["block"]] == device]
        part = document | {"run_order": {**document["run_order"], "A": order}}
        samples = {**samples, **simulate(part, engines(shifts[device]))}
    rows = []
    for design, blocks in DESIGNS.items():
        chosen = {
            CellKey(key.config, list(blocks).index(key.block), *key[2:]): sample
            for key, sample in samples.items()
            if key.block in blocks
        }
        devices = [DEVICE_OF[block] for block in blocks]
        told = _outcomes(document | {"blocks": len(blocks)}, chosen, devices, shifts)
        rows += [{"study": number, "effect_us": effect_us, "design": design} | row for row in told]
    return rows


def _outcomes(
    document: StudyDocument,
    samples: Samples,
    devices: Sequence[str],
    shifts: Mapping[str, Mapping[str, float]],
) -> list[dict[str, Any]]:
    table, rows = tax_table(document, samples, devices)
    outcomes = []
    for row in rows:
        where = (row["config"], row["phase"], row["cell"], row["metric"])
        of = {"config": row["config"], "metric": row["metric"]}
        same_p, _ = table.device_test(*where)
        own = {d: shifts[d].get(row["config"], 0.0) for d in dict.fromkeys(devices)}
        tax = {"tax": row["tax"], "lo": row["tax_lo"], "hi": row["tax_hi"]}
        lo, hi = model_interval(table, row["config"], row["metric"])
        judged = {"verdict": row["verdict"], "same_p": same_p, "model_lo": lo, "model_hi": hi}
        outcomes.append({**of, "device": "", "shifts_us": list(own.values()), **tax, **judged})
        for name, device in zip(dict.fromkeys(table.device_of.values()), own, strict=True):
            on = table.tax_on(name, *where)
            assert on is not None
            tax = {"tax": on.point, "lo": on.interval.lo, "hi": on.interval.hi}
            judged = {"verdict": "", "same_p": None, "model_lo": None, "model_hi": None}
            outcomes.append({**of, "device": device, "shifts_us": [own[device]], **tax, **judged})
    return outcomes
