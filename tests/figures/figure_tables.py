"""The tables of a small finished study, made from a design.

The numbers follow a queue-like model (TTFT grows as 1/(1 - load)) with a known tax per
configuration, so a test can say what a figure must show.
"""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from connector_tax.artifacts import paths
from connector_tax.artifacts.names import configuration_of, plain_names
from connector_tax.artifacts.tables import COLUMNS

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


def aggregate_rows(design: Design) -> Iterable[dict[str, Any]]:
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


def _tax_row(design: Design, config: str, cell: tuple[str, str, float, int, int], metric: str,
             reference: str) -> dict[str, Any]:  # fmt: skip
    phase, name, rate, input_tokens, output_tokens = cell
    status, reason = state(design, config, phase, name)
    plain = _values_ms("plain", rate, input_tokens, output_tokens)[metric]
    own = _values_ms(config, rate, input_tokens, output_tokens)[metric]
    tax = own / plain - 1
    half = 0.03 + 0.04 * abs(tax)
    noise = _values_ms("plain_2", rate, input_tokens, output_tokens)[metric] / plain - 1
    row: dict[str, Any] = {
        "config": config, "phase": phase, "cell": name, "rate_rps": rate, "reference": reference,
        "input_tokens": input_tokens, "output_tokens": output_tokens, "metric": metric,
        "tax": tax, "tax_lo": tax - half, "tax_hi": tax + half,
        "abs_ms": own - plain, "abs_lo_ms": own - plain - half * plain,
        "abs_hi_ms": own - plain + half * plain, "plain_ms": plain, "config_ms": own,
        "n_blocks": design.blocks, "n_config": 240 * design.blocks, "n_plain": 240 * design.blocks,
        "interval_method": "block model (df 17)", "error_df": 17,
        "verdict": "TAX" if tax - half > 0.03 else "INCONCLUSIVE",
        "p_value": 0.01, "p_adjusted": 0.02,
        "blocks_needed": None, "margin": 0.03, "mark": design.overloaded.get((config, name), ""),
        "family": "confirmatory" if phase == "A" and reference else "exploratory",
        "aa_tax": noise, "aa_lo": noise - 0.03, "aa_hi": noise + 0.03,
        "capacity_ratio": _capacity_rps(config) / _capacity_rps("plain"),
        "step_tax_us": STEP_COST_US[config], "engine_step_tax_us": 1.5 * STEP_COST_US[config],
        "callback_us": 0.7 * STEP_COST_US[config],
        "unattributed_us": 0.3 * STEP_COST_US[config], "status": status, "reason": reason,
    }  # fmt: skip
    if design.blocks == 1:
        row["verdict"] = "point estimate, no verdict"
        row["interval_method"] = "one launch; launches not included"
        row |= dict.fromkeys(("aa_lo", "aa_hi", "p_value", "p_adjusted", "error_df"))
        row |= dict.fromkeys(("tax_lo", "tax_hi", "abs_lo_ms", "abs_hi_ms"))
    if row["mark"]:
        row |= {"verdict": "no verdict (marked)", "p_adjusted": None}
    if design.plain_launches == 1:
        row |= {"aa_tax": None, "aa_lo": None, "aa_hi": None}
    if config == "plain_2":
        row["callback_us"] = row["unattributed_us"] = None
    if not design.step_timing:
        row |= {"step_tax_us": None, "callback_us": None, "unattributed_us": None}
    if not (design.step_timing and design.engine_steps):
        row["engine_step_tax_us"] = None
    if status != "valid":
        keep = {"config", "phase", "cell", "rate_rps", "reference", "input_tokens", "output_tokens",
                "metric", "family", "margin", "status", "reason"}  # fmt: skip
        row = {key: value if key in keep else None for key, value in row.items()}
    return row


def tax_rows(design: Design) -> Iterable[dict[str, Any]]:
    rates = {"ref_safe": design.ref_safe, "ref_load": design.ref_load}
    for config in configs(design):
        if config == "plain":
            continue
        for cell in grid(design):
            if cell[0] == "A":
                at = [name for name, rate in rates.items() if rate == cell[2]] or [""]
            else:
                at = ["ref_safe" if cell[0] == "B" else "ref_load"]
            for metric in METRICS:
                for reference in at:
                    yield _tax_row(design, config, cell, metric, reference)


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


def amplification_rows(design: Design) -> Iterable[dict[str, Any]]:
    for config in configs(design):
        for metric in METRICS if config != "plain" else ():
            yield {
                "config": config, "metric": metric, "ref_safe_rps": design.ref_safe,
                "ref_load_rps": design.ref_load, "tax_ref_safe": 0.3, "tax_ref_load": 0.5,
                "gap": 0.2, "gap_lo": 0.1, "gap_hi": 0.3, "n_blocks": design.blocks,
                "interval_method": "block model (df 17)", "mark": "",
                "status": "valid", "reason": "",
            }  # fmt: skip


def step_rows(design: Design) -> Iterable[dict[str, Any]]:
    for config in configs(design):
        for phase, cell, *_ in grid(design):
            valid = design.step_timing and state(design, config, phase, cell)[0] == "valid"
            for block in range(design.blocks):
                tax = STEP_COST_US[config] * (1 + 0.03 * (block - 1))
                yield {
                    "config": config, "block": block, "phase": phase, "cell": cell,
                    "tax_step_p50": tax if valid else None,
                    "tax_engine_step_p50": 1.5 * tax if valid and design.engine_steps else None,
                    "tax_callback_p50": 0.7 * tax if valid and config != "plain_2" else None,
                    "unattributed": 0.3 * tax if valid and config != "plain_2" else None,
                }  # fmt: skip


def step_tax_rows(design: Design) -> Iterable[dict[str, Any]]:
    repeats = design.blocks > 1
    shares = {"tax_step_p50": 1.0, "tax_engine_step_p50": 1.5, "tax_callback_p50": 0.7,
              "unattributed": 0.3}  # fmt: skip
    for config in design.labels:
        for phase, cell, *_ in grid(design):
            valid = design.step_timing and state(design, config, phase, cell)[0] == "valid"
            for metric, share in shares.items() if config != "plain" else ():
                known = valid and (design.engine_steps or metric != "tax_engine_step_p50")
                tax, noise = share * STEP_COST_US[config], share * STEP_COST_US["plain_2"]
                row: dict[str, Any] = {"config": config, "phase": phase, "cell": cell}
                row |= {"metric": metric, "us": tax, "lo_us": tax - 60, "hi_us": tax + 70,
                        "p": 0.01, "n_blocks": design.blocks, "method": "x", "aa_us": noise,
                        "aa_lo_us": noise - 20, "aa_hi_us": noise + 20}  # fmt: skip
                if not repeats:
                    row |= dict.fromkeys(("lo_us", "hi_us", "p", "method", "aa_lo_us", "aa_hi_us"))
                if design.plain_launches == 1 or metric == "tax_callback_p50":
                    row |= dict.fromkeys(("aa_us", "aa_lo_us", "aa_hi_us"))
                if not known:
                    row |= dict.fromkeys(list(row)[4:])
                yield row | {"reason": "" if known else "no step tax"}


def hook_rows(design: Design) -> Iterable[dict[str, Any]]:
    for config in design.labels if design.step_timing else ():
        for phase, cell, *_ in grid(design):
            if config == "plain" or state(design, config, phase, cell)[0] != "valid":
                continue
            for process, hook, part in (("scheduler", "build_meta", 0.2),
                                        ("worker", "get_finished", 0.4),
                                        ("worker", "wait_for_save", 0.01)):  # fmt: skip
                us = part * STEP_COST_US[config]
                values = (config, phase, cell, process, "", hook, us, 0.9 * us, 1.1 * us, "x",
                          us, 0.9 * us, 1.1 * us, "x", us / 4800, 0.9 * us / 4800, 1.1 * us / 4800,
                          "x", 0.0, 900, 900, design.blocks)  # fmt: skip
                yield dict(zip(COLUMNS[paths.HOOKS], values, strict=True))


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
