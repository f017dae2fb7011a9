"""The tables of a small finished study, made from a design.

The numbers follow a queue-like model (TTFT grows as 1/(1 - load)) with a known tax per
configuration, so a test can say what a figure must show.
"""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from connector_tax.artifacts.names import ALL_RATES, configuration_of, plain_names
from connector_tax.artifacts.verdicts import CANNOT_TELL, COSTS, MARKED, TOO_FEW

LABELS = {
    "plain": "plain",
    "noop_connector": "no-op connector",
    "mooncake_producer": "Mooncake producer",
    "mooncake_consumer": "Mooncake consumer",
    "mooncake_both": "Mooncake both",
    "nixl_both": "NIXL both",
    "lmcache_only": "LMCache",
    "multi_mooncake_lmcache": "Mooncake + LMCache",
}
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
METRICS = ("ttft_p90", "tpot_p90", "ttft_p50", "tpot_p50", "e2e_p90")


@dataclass(frozen=True)
class Design:
    """What the synthetic study is like; the defaults are a complete three-block study."""

    blocks: int = 3
    rates_rps: tuple[float, ...] = (0.5, 1, 2, 4, 8, 16, 32)
    inputs: tuple[int, ...] = (512, 4096, 32768)
    outputs: tuple[int, ...] = (64, 256, 1024)
    ref_safe: float | None = 4
    ref_load: float | None = 8
    step_timing: bool = True
    engine_steps: bool = True
    skipped: Mapping[str, str] = field(default_factory=dict)
    void: Mapping[tuple[str, str, str], str] = field(default_factory=dict)
    labels: Mapping[str, str] = field(default_factory=lambda: LABELS)
    engine_label: str = "embedded (emulated)"
    emulated: bool = True
    plain_launches: int = 2
    overloaded: Mapping[tuple[str, str], str] = field(default_factory=dict)


def _cell(rate: float) -> str:
    return f"r{rate:g}"


def _capacity_rps(config: str) -> float:
    return 22.0 * BASE_STEP_US / (BASE_STEP_US + STEP_COST_US[config])


def _values_ms(config: str, rate: float, input_tokens: int, output_tokens: int) -> dict[str, float]:
    load = min(rate / _capacity_rps(config), 0.995)
    step_ms = (
        BASE_STEP_US + STEP_COST_US[config] * (1 + 0.15 * math.log2(input_tokens / 512))
    ) / 1e3
    ttft = step_ms * (input_tokens / 512) ** 0.8 * 3 / (1 - load) + max(
        0.0, 900 * (rate / _capacity_rps(config) - 1)
    )
    tpot = step_ms * (1 + 0.8 * load) * (1 + 0.01 * output_tokens / 1024)
    return {
        "ttft_p90": ttft,
        "tpot_p90": tpot,
        "ttft_p50": 0.8 * ttft,
        "tpot_p50": 0.93 * tpot,
        "e2e_p90": ttft + tpot * output_tokens,
    }


def _criteria(config: str, rate: float, rates: tuple[float, ...]) -> list[str]:
    fired = []
    ratio = min(1.0, _capacity_rps(config) / rate)
    if ratio < 0.95:
        fired.append("throughput_ratio")
    if rate > 0.9 * _capacity_rps(config):
        fired.append("waiting")
    if rate / 2 in rates:
        now = _values_ms(config, rate, 4096, 256)["ttft_p90"]
        if now / _values_ms(config, rate / 2, 4096, 256)["ttft_p90"] > 1.5:
            fired.append("ttft_ratio")
    return fired


def configs(design: Design) -> list[str]:
    return [*design.labels, *plain_names(design.plain_launches)[1:]]


def state(design: Design, config: str, phase: str, cell: str) -> tuple[str, str]:
    base = configuration_of(config)
    if base in design.skipped:
        return "skipped", design.skipped[base]
    if (config, phase, cell) in design.void:
        return "void", design.void[config, phase, cell]
    return "valid", ""


def grid(design: Design) -> list[tuple[str, str, float, int, int]]:
    """(phase, cell, rate, input tokens, output tokens) of every cell."""
    grid = [("A", _cell(rate), rate, 4096, 256) for rate in design.rates_rps]
    for phase, rate in (("B", design.ref_safe), ("Bp", design.ref_load)):
        if rate is None or (phase == "Bp" and rate == design.ref_safe):
            continue
        shapes = [(i, o) for i in design.inputs for o in design.outputs if phase == "B" or o == 256]
        grid += [(phase, f"{i}x{o}", rate, i, o) for i, o in shapes]
    return grid


def cell_rows(design: Design) -> Iterable[dict[str, Any]]:
    for config in configs(design):
        for phase, cell, rate, input_tokens, output_tokens in grid(design):
            status, reason = state(design, config, phase, cell)
            base = {
                "config": config,
                "configuration": configuration_of(config),
                "phase": phase,
                "cell": cell,
                "rate_rps": rate,
                "input_tokens": input_tokens,
                "output_tokens": output_tokens,
                "status": status,
                "reason": reason,
                "label": design.engine_label,
            }
            valid = status == "valid"
            fired = _criteria(config, rate, design.rates_rps) if phase == "A" and valid else []
            values = _values_ms(config, rate, input_tokens, output_tokens)
            # Plain's pooled row is over all of its launches.
            pooled = ["all"] if config in design.labels else []
            for block in [*map(str, range(design.blocks)), *pooled]:
                row: dict[str, Any] = {**base, "block": block}
                for metric in METRICS:
                    low, high = (0.96, 1.05) if block == "all" else (0.93, 1.08)
                    value = values[metric]
                    row[f"{metric}_ms"] = value if valid else None
                    row[f"{metric}_lo_ms"] = low * value if valid else None
                    row[f"{metric}_hi_ms"] = high * value if valid else None
                done = min(rate, _capacity_rps(config))
                row |= {
                    "n": int(200 + 10 * rate) * (design.blocks if block == "all" else 1),
                    "requested_throughput_rps": rate,
                    "effective_throughput_rps": done if valid else None,
                    "throughput_ratio": done / rate if valid else None,
                    "error_rate": 0.0 if valid else None,
                    "saturated": bool(fired) if phase == "A" and valid else None,
                    "saturation_criteria": ";".join(fired),
                    "warming_up": False if valid else None,
                }
                row["n"] = row["n"] if valid else None
                row["n_steps"] = 5 * row["n"] if valid and design.step_timing else None
                yield row


Grid = tuple[str, str, float, int, int]


def _lost(design: Design, config: str, cell: Grid) -> dict[str, Any] | None:
    """Status and reason of a cell without a number; None where it has one."""
    status, reason = state(design, config, cell[0], cell[1])
    return None if status == "valid" else {"status": status, "reason": reason}


def _ends(design: Design, value: float, below: float, above: float) -> dict[str, Any]:
    """An estimate with its interval; without one in a single block."""
    if design.blocks == 1:
        return {"estimate": value, "status": "valid", "n_blocks": 1}
    return {"estimate": value, "lo": value - below, "hi": value + above, "status": "valid",
            "p": 0.01, "n_blocks": design.blocks, "method": "block model (df 17)",
            "df": 17}  # fmt: skip


def _tax(design: Design, config: str, cell: Grid, metric: str) -> dict[str, Any]:
    _, name, rate, *shape = cell
    base, own = (_values_ms(c, rate, *shape)[metric] for c in ("plain", config))
    tax = own / base - 1
    half = 0.03 if config == "plain_2" else 0.03 + 0.04 * abs(tax)
    row = {"base": base, "own": own, "n": 240 * design.blocks, "n_base": 240 * design.blocks,
           "mark": design.overloaded.get((config, name), ""), "p_adjusted": 0.02,
           "verdict": COSTS if tax - half > 0 else CANNOT_TELL}  # fmt: skip
    row |= _ends(design, tax, half, half)
    row |= {"narrow_lo": tax - 0.8 * half, "narrow_hi": tax + 0.8 * half}
    if design.blocks == 1:
        row |= {"narrow_lo": None, "narrow_hi": None, "verdict": TOO_FEW, "p_adjusted": None,
                "method": "one launch; launches not included"}  # fmt: skip
    if row["mark"]:
        row |= {"verdict": MARKED, "p_adjusted": None}
    return row


def _step(design: Design, config: str, cell: Grid, metric: str) -> dict[str, Any]:
    share = {"step": 1.0, "engine_step": 1.5, "callbacks": 0.7}[metric]
    if not design.step_timing or (metric == "engine_step" and not design.engine_steps):
        return {"status": "missing", "reason": "no step tax"}
    if _lost(design, config, cell):
        return {"status": "missing", "reason": "no step tax"}
    below, above = (20, 20) if config == "plain_2" else (60, 70)
    return _ends(design, share * STEP_COST_US[config], below, above)


HOOKS = {"scheduler//build_meta": 0.2, "worker//get_finished": 0.4, "worker//wait_for_save": 0.01}
# Of the cost of a decode step that of a prefill step.
PREFILL_COST = 10


def _kinds(design: Design, config: str, lost: bool) -> Iterable[dict[str, Any]]:
    """The steps by kind: 1.5 times the cost over plain's, and all hooks and what is left of it."""
    if lost or not design.step_timing or not design.engine_steps:
        return
    noop = STEP_COST_US["noop_connector"]
    for kind, times in (("decode", 1), ("prefill", PREFILL_COST)):
        cost = times * STEP_COST_US[config]
        both = {"item": f"{kind}/all/", "unit": "us", "scale": "raw", "status": "valid", "n": 900}
        below, above = (20, 20) if config == "plain_2" else (60, 70)
        values = {"step_us": 1.5 * cost}
        if config != "plain_2":
            values |= {"hooks_us": sum(HOOKS.values()) * cost}
            outside = 1.5 - sum(HOOKS.values())
            framework = 0 if config == "noop_connector" else times * noop
            values |= {"left_us": outside * (cost - framework)}
            for name, part in HOOKS.items():
                us = part * cost
                ends = {"estimate": us, "lo": 0.9 * us, "hi": 1.1 * us}
                yield both | {"quantity": "hook", "metric": name, "n_blocks": design.blocks, **ends}
        for metric, value in values.items():
            own = {"quantity": "step", "metric": metric, "base": 6000.0}
            yield both | own | _ends(design, value, below, above)


def effect_rows(design: Design) -> Iterable[dict[str, Any]]:
    """effects.csv but for the resources."""
    rates = {"ref_safe": design.ref_safe, "ref_load": design.ref_load}
    for config in (config for config in configs(design) if config != "plain"):
        for cell in grid(design):
            at = {"B": "ref_safe", "Bp": "ref_load"}.get(cell[0]) or next(
                (name for name, rate in rates.items() if rate == cell[2]), ""
            )
            row: dict[str, Any] = {"config": config, "phase": cell[0], "cell": cell[1],
                                   "rate_rps": cell[2], "reference": at}  # fmt: skip
            family = "confirmatory" if cell[0] == "A" and at else "exploratory"
            for metric in METRICS:
                numbers = _lost(design, config, cell) or _tax(design, config, cell, metric)
                yield row | numbers | {"quantity": "tax", "metric": metric, "unit": "ms",
                                       "scale": "log", "margin": 0.03,
                                       "family": family}  # fmt: skip
            for metric in ("step", "engine_step", "callbacks"):
                if config != "plain_2" or metric != "callbacks":
                    yield row | _step(design, config, cell, metric) | {
                        "quantity": "step", "metric": metric, "unit": "us", "scale": "raw",
                    }  # fmt: skip
            for own in _kinds(design, config, bool(_lost(design, config, cell))):
                yield row | own
        lowest = ("A", ALL_RATES, *grid(design)[0][2:])
        for metric in METRICS:
            numbers = _lost(design, config, lowest) or _tax(design, config, lowest, metric)
            yield {"config": config, "phase": "A", "cell": ALL_RATES, "reference": ALL_RATES,
                   "quantity": "tax", "metric": metric, "unit": "ms", "scale": "log",
                   "margin": 0.03, "family": "confirmatory", **numbers}  # fmt: skip
        for metric in METRICS:
            gap = {"estimate": 0.2, "lo": 0.1, "hi": 0.3, "base": 0.3, "own": 0.5}
            yield {"quantity": "gap", "config": config, "phase": "A", "metric": metric,
                   "scale": "raw", "n_blocks": design.blocks, "status": "valid", **gap,
                   "method": "block model (df 17)"}  # fmt: skip


def cdf_rows(design: Design) -> Iterable[dict[str, Any]]:
    for config in design.labels if design.step_timing else []:
        if state(design, config, "A", _cell(design.ref_safe or 0))[0] != "valid":
            continue
        for index in range(1, 201):
            quantile = index / 200
            middle = BASE_STEP_US + STEP_COST_US[config]
            spread = 0.35 * math.tan(math.pi * (0.94 * quantile - 0.47)) / 3
            duration = middle * math.exp(max(-1.0, spread))
            yield {
                "config": config,
                "step_duration_us": duration,
                "engine_step_us": 4 * duration if design.engine_steps else None,
                "cdf": quantile,
            }


def reference_rates(design: Design) -> dict[str, Any]:
    bounds = {"throughput_ratio": 0.95, "waiting": 1.0, "ttft_ratio": 1.5}
    criteria: dict[str, Any] = {}
    saturation: dict[str, float | None] = {}
    for config in design.labels:
        if state(design, config, "A", "")[0] == "skipped":
            continue
        criteria[config] = {}
        saturation[config] = None
        for rate in design.rates_rps:
            fired = _criteria(config, rate, design.rates_rps)
            criteria[config][f"{rate:g}"] = {
                "saturated": bool(fired),
                "n_launches": 1,
                "n_saturated": int(bool(fired)),
                **{
                    name: {"value": 1.0, "bound": bound, "fired": name in fired}
                    for name, bound in bounds.items()
                },
                "backlog_growth": [0.0, 0.0, 0.0, 0.0],
            }
            if fired and saturation[config] is None:
                saturation[config] = rate
    return {
        "ref_safe": design.ref_safe, "ref_load": design.ref_load,
        "rates_rps": list(design.rates_rps), "saturation_rate_rps": saturation,
        "criteria": criteria, "left_out": dict(design.skipped), "fallback_used": False,
    }  # fmt: skip
