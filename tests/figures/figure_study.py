"""A small finished study, written as tables: what the analysis would have left for the figures.

The numbers follow a queue-like model (TTFT grows as 1/(1 - load)) with a known tax per
configuration, so a test can say what a figure must show.
"""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from connector_tax.artifacts import paths
from connector_tax.artifacts.index import CellEntry, launch_index, write_index
from connector_tax.artifacts.names import PHASES, Launch, configuration_of, plain_names
from connector_tax.artifacts.tables import COLUMNS, empty_row, table_text
from connector_tax.files import write_json, write_text
from tests.figures.resource_tables import engine_rows, resource_rows
from tests.study_folder import rate_cell, shape_cell, study_document, write_stages

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


def _configs(design: Design) -> list[str]:
    return [*design.labels, *plain_names(design.plain_launches)[1:]]


def _state(design: Design, config: str, phase: str, cell: str) -> tuple[str, str]:
    base = configuration_of(config)
    if base in design.skipped:
        return "skipped", design.skipped[base]
    if (config, phase, cell) in design.void:
        return "void", design.void[config, phase, cell]
    return "valid", ""


def _grid(design: Design) -> list[tuple[str, str, float, int, int]]:
    """(phase, cell, rate, input tokens, output tokens) of every cell."""
    grid = [("A", _cell(rate), rate, 4096, 256) for rate in design.rates_rps]
    for phase, rate in (("B", design.ref_safe), ("Bp", design.ref_load)):
        if rate is None or (phase == "Bp" and rate == design.ref_safe):
            continue
        shapes = [(i, o) for i in design.inputs for o in design.outputs if phase == "B" or o == 256]
        grid += [(phase, f"{i}x{o}", rate, i, o) for i, o in shapes]
    return grid


def _aggregate_rows(design: Design) -> Iterable[dict[str, Any]]:
    for config in _configs(design):
        for phase, cell, rate, input_tokens, output_tokens in _grid(design):
            status, reason = _state(design, config, phase, cell)
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
    status, reason = _state(design, config, phase, name)
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


def _tax_rows(design: Design) -> Iterable[dict[str, Any]]:
    rates = {"ref_safe": design.ref_safe, "ref_load": design.ref_load}
    for config in _configs(design):
        if config == "plain":
            continue
        for cell in _grid(design):
            if cell[0] == "A":
                at = [name for name, rate in rates.items() if rate == cell[2]] or [""]
            else:
                at = ["ref_safe" if cell[0] == "B" else "ref_load"]
            for metric in METRICS:
                for reference in at:
                    yield _tax_row(design, config, cell, metric, reference)


def _cdf_rows(design: Design) -> Iterable[dict[str, Any]]:
    for config in design.labels if design.step_timing else []:
        if _state(design, config, "A", _cell(design.ref_safe or 0))[0] != "valid":
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


def _amplification_rows(design: Design) -> Iterable[dict[str, Any]]:
    for config in _configs(design):
        for metric in METRICS if config != "plain" else ():
            yield {
                "config": config, "metric": metric, "ref_safe_rps": design.ref_safe,
                "ref_load_rps": design.ref_load, "tax_ref_safe": 0.3, "tax_ref_load": 0.5,
                "gap": 0.2, "gap_lo": 0.1, "gap_hi": 0.3, "n_blocks": design.blocks,
                "interval_method": "block model (df 17)", "mark": "",
                "status": "valid", "reason": "",
            }  # fmt: skip


def _step_rows(design: Design) -> Iterable[dict[str, Any]]:
    for config in _configs(design):
        for phase, cell, *_ in _grid(design):
            valid = design.step_timing and _state(design, config, phase, cell)[0] == "valid"
            for block in range(design.blocks):
                tax = STEP_COST_US[config] * (1 + 0.03 * (block - 1))
                yield {
                    "config": config, "block": block, "phase": phase, "cell": cell,
                    "tax_step_p50": tax if valid else None,
                    "tax_engine_step_p50": 1.5 * tax if valid and design.engine_steps else None,
                    "tax_callback_p50": 0.7 * tax if valid and config != "plain_2" else None,
                    "unattributed": 0.3 * tax if valid and config != "plain_2" else None,
                }  # fmt: skip


def _step_tax_rows(design: Design) -> Iterable[dict[str, Any]]:
    repeats = design.blocks > 1
    shares = {"tax_step_p50": 1.0, "tax_engine_step_p50": 1.5, "tax_callback_p50": 0.7,
              "unattributed": 0.3}  # fmt: skip
    for config in design.labels:
        for phase, cell, *_ in _grid(design):
            valid = design.step_timing and _state(design, config, phase, cell)[0] == "valid"
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


def _hook_rows(design: Design) -> Iterable[dict[str, Any]]:
    for config in design.labels if design.step_timing else ():
        for phase, cell, *_ in _grid(design):
            if config == "plain" or _state(design, config, phase, cell)[0] != "valid":
                continue
            for process, hook, part in (("scheduler", "build_meta", 0.2),
                                        ("worker", "get_finished", 0.4),
                                        ("worker", "wait_for_save", 0.01)):  # fmt: skip
                us = part * STEP_COST_US[config]
                values = (config, phase, cell, process, "", hook, us, 0.9 * us, 1.1 * us, "x",
                          us, 0.9 * us, 1.1 * us, "x", us / 4800, 0.9 * us / 4800, 1.1 * us / 4800,
                          "x", 0.0, 900, 900, design.blocks)  # fmt: skip
                yield dict(zip(COLUMNS[paths.HOOKS], values, strict=True))


def _reference(design: Design) -> dict[str, Any]:
    bounds = {"throughput_ratio": 0.95, "waiting": 1.0, "ttft_ratio": 1.5}
    criteria: dict[str, Any] = {}
    saturation: dict[str, float | None] = {}
    for config in design.labels:
        if _state(design, config, "A", "")[0] == "skipped":
            continue
        criteria[config] = {}
        saturation[config] = None
        for rate in design.rates_rps:
            fired = _criteria(config, rate, design.rates_rps)
            criteria[config][f"{rate:g}"] = {
                "saturated": bool(fired),
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


def _settings(design: Design) -> dict[str, Any]:
    return {
        "saturation": {"throughput_ratio_min": 0.95, "waiting_p50_max": 1.0,
                       "ttft_p90_ratio_max": 1.5},
        "reference": {"fallback_rps": None},
        "statistics": {"confidence": 0.95, "resamples": 2000, "chunk_s": 1.0,
                       "margins": dict.fromkeys(METRICS, 0.03),
                       "confirmatory": ["ref_safe", "ref_load"], "p99_min_samples": 1000},
        "plain_launches": design.plain_launches,
        "hypotheses": {
            "h1_min_tax": 0.10, "h1_prior_band": [0.25, 0.60], "h2_prior_gap_pp": 7.0,
            "h2_gap_band_pp": [5, 10], "h3_framework_share": 0.5, "h3_implementation_share": 0.3,
            "h4_tolerance": 0.3, "max_hours": 6.0,
            "prior": {"plain_ttft_p90_s": 7.35, "nixl_ttft_p90_s": 10.1,
                      "mooncake_both_ttft_p90_s": 10.67},
        },
        "phase_a": {"rates_rps": list(design.rates_rps), "input_tokens": 4096,
                    "output_tokens": 256},
        "phase_b": {"input_tokens": list(design.inputs), "output_tokens": list(design.outputs)},
    }  # fmt: skip


def _hypotheses() -> dict[str, Any]:
    return {
        "hypotheses": [
            {"id": f"H{number}", "verdict": verdict, "sentence": f"Sentence of H{number}.",
             "numbers": {"tax": 0.31, "tax_lo": 0.27, "tax_hi": 0.35}}
            for number, verdict in enumerate(
                ("supported", "refuted", "cannot tell", "supported", "supported", "refuted"), 1)
        ],
        "criteria": [
            {"id": number, "verdict": "met" if number != 6 else "not met",
             "sentence": f"Sentence of criterion {number}.", "numbers": {}}
            for number in range(1, 8)
        ],
        "resolution": [
            {"source": "docs/method.md", "metric": "tpot", "where": "light load", "sigma": 0.1,
             "n": 200, "half_width": 0.034},
        ],
    }  # fmt: skip


def _launches(design: Design, phase: str) -> list[tuple[str, int]]:
    if phase not in {cell[0] for cell in _grid(design)}:
        return []
    return [(config, block) for block in range(design.blocks) for config in _configs(design)
            if phase != "Bp" or config in ("plain", "mooncake_both", "plain_2")]  # fmt: skip


def _write_runs(root: Path, design: Design) -> None:
    for phase in sorted({cell[0] for cell in _grid(design)}):
        for position, (config, block) in enumerate(_launches(design, phase)):
            _write_launch(root, design, phase, config, block, position)


def _write_launch(
    root: Path, design: Design, phase: str, config: str, block: int, position: int
) -> None:
    folder = Launch(config, block, phase).folder(root)
    cells: list[CellEntry] = []
    for _, cell, rate, input_tokens, output_tokens in (c for c in _grid(design) if c[0] == phase):
        status, reason = _state(design, config, phase, cell)
        cells.append(CellEntry(cell, status, reason or None, {}))
        if status == "skipped":
            continue
        values = {
            "phase": phase, "cell": cell, "config": config, "block": block,
            "input_tokens": input_tokens, "output_tokens": output_tokens,
            "schedule": {"kind": "fixed", "rate_rps": rate, "seed": "s", "n": 240},
            "window": {"t_origin_ns": 0, "t_warmup_end_ns": 10**9, "t_stop_ns": 61 * 10**9,
                       "t_drained_ns": 62 * 10**9,
                       "started_utc": f"2026-05-26T0{position % 10}:00:00Z"},
            "counts": {"planned": 240, "sent": 240, "ok": 240, "dropped": 0, "failed": {},
                       "measured_ok": 230},
            "achieved_rate_rps": rate,
            "health": {
                "schedule_lag_p99_ms": {"value": 0.4, "bound": 2.0, "pass": True},
                "error_rate": {"value": 0.2 if status == "void" else 0.0, "bound": 0.01,
                               "pass": status != "void"},
            },
            "files": {}, "valid": status == "valid", "void_reasons": [reason] if reason else [],
        }  # fmt: skip
        write_json(folder / cell / f"cell_{phase}_{cell}.json", values)
    skipped = all(cell.status == "skipped" for cell in cells)
    document = {"engine_label": design.engine_label, "design_sha256": "0" * 64}
    index = launch_index(
        document, Launch(config, block, phase), cells,
        status="skipped" if skipped else "done",
        reason=cells[0].reason if skipped else None,
        started_utc="2026-05-26T00:00:00+00:00", ended_utc="2026-05-26T00:01:44+00:00",
        timing={"startup_s": 2.0, "cells_s": 100.0, "release_s": 1.0, "wall_s": 104.0},
    )  # fmt: skip
    write_index(folder, index)


def write_study(root: Path, design: Design | None = None, runs: bool = False) -> Path:
    """Write the tables of a study into `root`, and the records of its launches if `runs`.

    Returns the path of its study.json.
    """
    design = design or Design()
    cells: dict[str, list[dict[str, Any]]] = {}
    for phase, _, rate, i, o in _grid(design):
        planned = rate_cell(rate, i, o) if phase == "A" else shape_cell(i, o)
        cells.setdefault(phase, []).append(planned)
    order = [Launch(*launch, phase) for phase in PHASES for launch in _launches(design, phase)]
    document = study_document(
        {**_settings(design), "seed": 1, "blocks": design.blocks}, design.labels, cells, order,
        study=root.name, engine_label=design.engine_label, emulated=design.emulated,
    )  # fmt: skip
    environment = {
        "python": "3.11.7", "cpu": "Example CPU", "packages": ["numpy==2.4.6", "pyzmq==27.0"],
    }  # fmt: skip
    study_file = write_stages(
        root, document, design.skipped, step_timing=design.step_timing, environment=environment
    )
    configurations, skipped = list(design.labels), design.skipped
    tables = {
        paths.AGGREGATE: _aggregate_rows(design),
        paths.TAXES: _tax_rows(design),
        paths.AMPLIFICATION: _amplification_rows(design),
        paths.STEPS: _step_rows(design),
        paths.STEP_TAXES: _step_tax_rows(design),
        paths.HOOKS: _hook_rows(design),
        paths.STEP_CDF: _cdf_rows(design),
        paths.RESOURCE_TABLE: resource_rows(configurations, skipped, design.blocks),
        paths.ENGINE_TABLE: engine_rows(configurations, skipped),
    }
    for name, rows in tables.items():
        text = table_text(name, [empty_row(name) | row for row in rows])
        write_text(root / paths.ANALYSIS / name, text)
    write_json(root / "analysis" / "hypotheses.json", _hypotheses())
    write_json(root / "reference_rates.json", _reference(design))
    if runs:
        _write_runs(root, design)
    return study_file
