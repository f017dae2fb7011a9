"""Make the tables of a small finished study from a design.

The numbers follow a queue-like model (TTFT grows as 1/(1 - load)) with a known tax per
configuration, so that tests know what each figure must show.
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from scipy.stats import t as student

from connector_tax.analysis.resources import RESOURCES
from connector_tax.artifacts.metrics import CRITERIA, METRICS
from connector_tax.artifacts.names import (
    ALL_RATES,
    cell_of_rate,
    cell_of_shape,
    configuration_of,
    plain_names,
)
from connector_tax.artifacts.verdicts import CANNOT_TELL, COSTS, MARKED, TOO_FEW
from connector_tax.config import ROOT, load_configurations
from connector_tax.marks import DESIGN_MARKS

KNOWN = load_configurations(ROOT / "config" / "configurations.yaml")
LABELS = {name: KNOWN[name]["label"] for name in DESIGN_MARKS}
STEP_COST_US = {
    "plain": 0.0,
    "noop_connector": 60.0,
    "mooncake_producer": 180.0,
    "mooncake_consumer": 150.0,
    "mooncake_both": 420.0,
    "nixl_both": 330.0,
    "lmcache_only": 240.0,
    "multi_mooncake_lmcache": 700.0,
    "plain_2": 8.0,
}
BASE_STEP_US = 1200.0
# Of every estimate's error.
DF = 17
QUANTILE = float(student.ppf(0.975, DF))
# Phase, cell, rate, input tokens, output tokens.
Grid = tuple[str, str, float, int, int]


@dataclass(frozen=True)
class Design:
    """The synthetic study's properties; the defaults are a complete three-block study."""

    blocks: int = 3
    rates_rps: tuple[float, ...] = (0.5, 1, 2, 4, 8, 16, 32)
    inputs: tuple[int, ...] = (512, 4096, 32768)
    outputs: tuple[int, ...] = (64, 256, 1024)
    ref_safe: float = 4
    ref_load: float = 8
    step_timing: bool = True
    engine_steps: bool = True
    skipped: Mapping[str, str] = field(default_factory=dict)
    void: Mapping[tuple[str, str, str], str] = field(default_factory=dict)
    labels: Mapping[str, str] = field(default_factory=lambda: LABELS)
    engine_label: str = "embedded (emulated)"
    emulated: bool = True
    plain_launches: int = 2
    overloaded: Mapping[tuple[str, str], str] = field(default_factory=dict)


def _capacity_rps(config: str) -> float:
    return 22.0 * BASE_STEP_US / (BASE_STEP_US + STEP_COST_US[config])


def _values_ms(config: str, rate: float, input_tokens: int, output_tokens: int) -> dict[str, float]:
    offered = rate / _capacity_rps(config)
    load = min(offered, 0.995)
    cost_us = STEP_COST_US[config] * (1 + 0.15 * math.log2(input_tokens / 512))
    step_ms = (BASE_STEP_US + cost_us) / 1e3
    ttft = step_ms * (input_tokens / 512) ** 0.8 * 3 / (1 - load) + max(0.0, 900 * (offered - 1))
    tpot = step_ms * (1 + 0.8 * load) * (1 + 0.01 * output_tokens / 1024)
    return {
        "ttft_p90": ttft,
        "tpot_p90": tpot,
        "ttft_p50": 0.8 * ttft,
        "tpot_p50": 0.93 * tpot,
        "e2e_p90": ttft + tpot * output_tokens,
    }


def _criteria(config: str, rate: float, rates: tuple[float, ...]) -> list[str]:
    """Return the saturation criteria that fired at a rate."""
    now, half = (_values_ms(config, r, 4096, 256)["ttft_p90"] for r in (rate, rate / 2))
    fired = {
        "throughput_ratio": _capacity_rps(config) / rate < 0.95,
        "waiting": rate > 0.9 * _capacity_rps(config),
        "ttft_ratio": rate / 2 in rates and now / half > 1.5,
    }
    return [name for name, has_fired in fired.items() if has_fired]


def configs(design: Design) -> list[str]:
    return [*design.labels, *plain_names(design.plain_launches)[1:]]


def state(design: Design, config: str, phase: str, cell: str) -> tuple[str, str]:
    """Return status and reason of a cell."""
    base = configuration_of(config)
    if base in design.skipped:
        return "skipped", design.skipped[base]
    if (config, phase, cell) in design.void:
        return "void", design.void[config, phase, cell]
    return "valid", ""


def grid(design: Design) -> list[Grid]:
    """Yield every cell."""
    cells: list[Grid] = [("A", cell_of_rate(rate), rate, 4096, 256) for rate in design.rates_rps]
    for phase, rate in (("B", design.ref_safe), ("Bp", design.ref_load)):
        if phase == "Bp" and rate == design.ref_safe:
            continue
        shapes = [(i, o) for i in design.inputs for o in design.outputs if phase == "B" or o == 256]
        cells += [(phase, cell_of_shape(*shape), rate, *shape) for shape in shapes]
    return cells


def cell_rows(design: Design) -> Iterator[dict[str, Any]]:
    """Return the rows of cells.csv."""
    for config in configs(design):
        for cell in grid(design):
            phase, name, rate, input_tokens, output_tokens = cell
            status, reason = state(design, config, phase, name)
            row = {
                "config": config, "configuration": configuration_of(config), "phase": phase,
                "cell": name, "rate_rps": rate, "input_tokens": input_tokens,
                "output_tokens": output_tokens, "status": status, "reason": reason,
                "label": design.engine_label,
            }  # fmt: skip
            # Plain's pooled row is over all of its launches.
            pooled = ["all"] if config in design.labels else []
            for block in [*map(str, range(design.blocks)), *pooled]:
                numbers = _measured(design, config, cell, block) if status == "valid" else {}
                yield row | {"block": block} | numbers


def _measured(design: Design, config: str, cell: Grid, block: str) -> dict[str, Any]:
    phase, _, rate, *shape = cell
    low, high = (0.96, 1.05) if block == "all" else (0.93, 1.08)
    n = int(200 + 10 * rate) * (design.blocks if block == "all" else 1)
    row: dict[str, Any] = {
        "n": n,
        "n_steps": 5 * n if design.step_timing else None,
        "effective_throughput_rps": min(rate, _capacity_rps(config)),
    }
    if phase == "A":
        fired = _criteria(config, rate, design.rates_rps)
        row |= {"saturated": bool(fired), "saturation_criteria": ";".join(fired)}
    for metric, value in _values_ms(config, rate, *shape).items():
        ends = {"_lo": low * value, "": value, "_hi": high * value}
        row |= {f"{metric}{end}_ms": number for end, number in ends.items()}
    return row


# ---- effects.csv


def _ends(design: Design, value: float, below: float, above: float) -> dict[str, Any]:
    """Return an estimate with its interval, which is missing for a single block."""
    if design.blocks == 1:
        return {"estimate": value, "status": "valid", "n_blocks": 1}
    return {"estimate": value, "lo": value - below, "hi": value + above, "status": "valid",
            "p": 0.01, "n_blocks": design.blocks, "method": "block differences",
            "df": DF}  # fmt: skip


def _tax(design: Design, config: str, cell: Grid, metric: str) -> dict[str, Any]:
    _, name, rate, *shape = cell
    base, own = (_values_ms(c, rate, *shape)[metric] for c in ("plain", config))
    tax = own / base - 1
    half = 0.03 if config == "plain_2" else 0.03 + 0.04 * abs(tax)
    n = 240 * design.blocks
    row = {"base": base, "own": own, "n": n, "n_base": n, "n_cell": 240,
           "mark": design.overloaded.get((config, name), ""), "p_adjusted": 0.02,
           "verdict": COSTS if tax - half > 0 else CANNOT_TELL}  # fmt: skip
    row |= _ends(design, tax, half, half)
    if design.blocks > 1:
        above = math.log1p(tax + half) - math.log1p(tax)
        row["error"] = above / QUANTILE
    row |= {"narrow_lo": tax - 0.8 * half, "narrow_hi": tax + 0.8 * half}
    if design.blocks == 1:
        row |= {"narrow_lo": None, "narrow_hi": None, "verdict": TOO_FEW, "p_adjusted": None,
                "method": "one launch; launches not included"}  # fmt: skip
    if row["mark"]:
        row |= {"verdict": MARKED, "p_adjusted": None}
    return row


HOOKS = {"scheduler//build_meta": 0.2, "worker//get_finished": 0.4, "worker//wait_for_save": 0.01}
# Cost of a prefill step, as a share of a decode step's.
PREFILL_COST = 10


def _steps(design: Design, config: str) -> Iterator[dict[str, Any]]:
    """Return rows of schedule(), of whole steps (with 1.5 times the tax), of hooks, and of the
    rest.
    """
    below, above = (20, 20) if config == "plain_2" else (60, 70)
    whole = {"quantity": "step", "unit": "us", "scale": "raw"}
    cost = STEP_COST_US[config]
    yield whole | {"metric": "step"} | _ends(design, cost, below, above)
    if not design.engine_steps:
        return
    yield whole | {"metric": "engine_step"} | _ends(design, 1.5 * cost, below, above)
    noop = 0 if config == "noop_connector" else STEP_COST_US["noop_connector"]
    for kind, times in (("decode", 1), ("prefill", PREFILL_COST)):
        group = whole | {"item": f"{kind}/all/", "n": 900, "base": 6000.0}
        values = {"step_us": 1.5 * cost}
        if config != "plain_2":
            in_hooks = sum(HOOKS.values())
            values |= {"hooks_us": in_hooks * cost, "left_us": (1.5 - in_hooks) * (cost - noop)}
            for name, part in HOOKS.items():
                us = times * part * cost
                yield group | {"quantity": "hook", "metric": name, "n_blocks": design.blocks,
                               "estimate": us, "lo": 0.9 * us, "hi": 1.1 * us,
                               "status": "valid"}  # fmt: skip
        for metric, value in values.items():
            yield group | {"metric": metric} | _ends(design, times * value, below, above)


def effect_rows(design: Design) -> Iterator[dict[str, Any]]:
    """Return the rows of effects.csv, except resources."""
    rates = {design.ref_load: "ref_load", design.ref_safe: "ref_safe"}
    all_rates: Grid = ("A", ALL_RATES, *grid(design)[0][2:])
    for config in (config for config in configs(design) if config != "plain"):
        for cell in (*grid(design), all_rates):
            phase, name, rate, *_ = cell
            at = {"B": "ref_safe", "Bp": "ref_load"}.get(phase, rates.get(rate, ""))
            row: dict[str, Any] = {"config": config, "phase": phase, "cell": name,
                                   "rate_rps": rate, "reference": at}  # fmt: skip
            if cell == all_rates:
                row |= {"rate_rps": None, "reference": ALL_RATES}
            family = "confirmatory" if phase == "A" and row["reference"] else "exploratory"
            status, reason = state(design, config, phase, name)
            tax = {"quantity": "tax", "unit": "ms", "scale": "log", "margin": 0.03}
            for metric in METRICS:
                numbers = _tax(design, config, cell, metric) if status == "valid" else {}
                yield {"status": status, "reason": reason, "metric": metric, "family": family,
                       **row, **tax, **numbers}  # fmt: skip
            if design.step_timing and status == "valid" and cell != all_rates:
                yield from (row | own for own in _steps(design, config))
        for metric in METRICS:
            yield {"quantity": "gap", "config": config, "phase": "A", "metric": metric,
                   "scale": "raw", "n_blocks": design.blocks, "status": "valid", "estimate": 0.2,
                   "lo": 0.1, "hi": 0.3, "base": 0.3, "own": 0.5,
                   "method": "mixture"}  # fmt: skip


# Plain's value and the half width of an interval; None: it never changes.
PLAIN: Mapping[str, tuple[float, float | None]] = {
    "idle_cpu": (0.021, 0.004),
    "cpu_s_per_1000": (34.2, 1.3),
    "memory_pss_mib": (1915.7, 12.0),
    "memory_pss_loaded_mib": (1958.5, 14.0),
    "gpu_memory_mib": (88_412.0, 30.0),
    "kv_blocks": (65_536.0, None),
    "kv_tokens": (1_048_576.0, None),
    "startup_s": (21.4, 0.9),
}
ADDED: Mapping[str, Mapping[str, float]] = {
    "noop_connector": {"cpu_s_per_1000": 1.1},
    "mooncake_both": {"kv_blocks": -5120, "startup_s": 2.5, "cpu_s_per_1000": 6.0},
    "nixl_both": {"idle_cpu": 0.452, "memory_pss_mib": 61.0},
    "lmcache_only": {"idle_cpu": 0.03, "memory_pss_mib": 1454.6, "startup_s": 19.0},
}


def resource_rows(design: Design) -> Iterator[dict[str, Any]]:
    """Return a row for each resource of each configuration and of A/A."""
    for config in (config for config in configs(design) if config != "plain"):
        for resource in RESOURCES:
            row: dict[str, Any] = {
                "quantity": "resource", "config": config, "phase": "A", "metric": resource.name,
                "unit": resource.unit, "scale": resource.scale, "n_blocks": 0,
            }  # fmt: skip
            if config in design.skipped:
                yield row | {"status": "missing", "reason": design.skipped[config]}
                continue
            plain, half = PLAIN[resource.name]
            added = ADDED.get(config, {}).get(resource.name, 0.0)
            own = {"base": plain, "own": plain + added, "n_blocks": design.blocks}
            # On the scale of logs a share of plain's.
            whole = plain if resource.scale == "log" else 1.0
            numbers: dict[str, Any] = {"estimate": added / whole, "method": "exact"}
            if half is not None:
                below, above = (1.2 * half, 1.1 * half) if config == "plain_2" else (half, half)
                numbers = _ends(design, added / whole, below / whole, above / whole)
            yield row | own | {"status": "valid"} | numbers


# ---- the other tables


def engine_rows(design: Design) -> Iterator[dict[str, Any]]:
    """Return three settings of each configuration; two connectors force a layout unlike plain."""
    for config in design.labels:
        if config in design.skipped:
            yield {"config": config, "reason": design.skipped[config]}
            continue
        layout = "HND" if config in ("mooncake_both", "nixl_both") else "NHD"
        text = f"kv_cache_layout {layout} (plain NHD)" if layout == "HND" else ""
        for setting, value, plain in (
            ("kv_cache_layout", layout, "NHD"), ("block_size", "16", "16"),
            ("attention_backend", "FLASH_ATTN", "FLASH_ATTN"),
        ):  # fmt: skip
            yield {"config": config, "setting": setting, "value": value, "plain": plain,
                   "differs": value != plain, "source": "probe", "also_differs": text}  # fmt: skip


def cdf_rows(design: Design) -> Iterator[dict[str, Any]]:
    """Return the rows of step_cdf.csv."""
    for config in design.labels if design.step_timing else []:
        if state(design, config, "A", cell_of_rate(design.ref_safe))[0] != "valid":
            continue
        for index in range(1, 201):
            quantile = index / 200
            spread = 0.35 * math.tan(math.pi * (0.94 * quantile - 0.47)) / 3
            duration = (BASE_STEP_US + STEP_COST_US[config]) * math.exp(max(-1.0, spread))
            yield {
                "config": config,
                "step_duration_us": duration,
                "engine_step_us": 4 * duration if design.engine_steps else None,
                "cdf": quantile,
            }


def reference_rates(design: Design) -> dict[str, Any]:
    """Return the content of reference_rates.json."""
    criteria: dict[str, Any] = {}
    saturation: dict[str, float | None] = {}
    for config in (config for config in design.labels if config not in design.skipped):
        fired = {rate: _criteria(config, rate, design.rates_rps) for rate in design.rates_rps}
        criteria[config] = {
            f"{rate:g}": {name: {"value": 1.0, "fired": name in names} for name in CRITERIA}
            for rate, names in fired.items()
        }
        saturation[config] = min((rate for rate, names in fired.items() if names), default=None)
    return {
        "ref_safe": design.ref_safe, "ref_load": design.ref_load,
        "rates_rps": list(design.rates_rps), "saturation_rate_rps": saturation,
        "criteria": criteria, "left_out": dict(design.skipped), "fallback_used": False,
    }  # fmt: skip
