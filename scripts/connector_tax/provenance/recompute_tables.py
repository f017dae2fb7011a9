"""The published tables a second time: from the raw records to the rows of analysis/*.

Column names are CONTRACTS.md's; the numbers come from `recompute` and `recompute_taxes`.
"""

import math
from collections.abc import Sequence
from datetime import datetime
from statistics import NormalDist
from typing import Any

import numpy as np

from connector_tax.files import read_json
from connector_tax.provenance.audit_machine import quiet_columns, quiet_successes
from connector_tax.provenance.audit_records import RUN_FILES
from connector_tax.provenance.audit_study import CLOSING_PLAIN, PHASES, RawCell, RawStudy
from connector_tax.provenance.recompute import (
    Measured,
    Row,
    Steps,
    cdf_points,
    request_columns,
    resampled_logs,
    stationarity_columns,
    t_quantile,
    waiting_p50,
)
from connector_tax.provenance.recompute_taxes import (
    METRICS,
    Effect,
    Key,
    Lost,
    Sample,
    Taxes,
    Where,
    hypotheses,
    judge,
    labels,
)

STEP_SAMPLES = (
    "step_duration_us",
    "engine_step_us",
    "build_meta_us",
    "get_finished_us",
    "start_load_kv_us",
    "connector_total_us",
)
STEP_COLUMNS = tuple(f"{name}_p{p}" for name in STEP_SAMPLES for p in (50, 90))
COUNT_COLUMNS = ("n_steps", "n_empty_steps", "n_incomplete_steps")
QUANTILES = tuple(f"{m}_p{p}" for m in ("ttft", "tpot", "e2e") for p in (50, 90, 99))
CRITERIA = ("throughput_ratio", "waiting", "ttft_ratio")
AVERAGED = (
    "ttft_from_send_p90_ms",
    "requested_throughput_rps",
    "effective_throughput_rps",
    "throughput_ratio",
    "error_rate",
    "quiet_share",
    "memory_ns_p50",
    "waiting_p50",
    *STEP_COLUMNS,
)
SUMMED = ("n", "window_s", "dropped", "n_disturbed", *COUNT_COLUMNS)
STEP_TAXES = {
    "step_tax_us": "tax_step_p50",
    "engine_step_tax_us": "tax_engine_step_p50",
    "callback_us": "tax_callback_p50",
    "unattributed_us": "unattributed",
}


class Recomputed:
    """Every number of the study, made from the raw records of its valid cells."""

    def __init__(self, study: RawStudy) -> None:
        self.study = study
        self.statistics: Row = study.config["statistics"]
        self.cell_rows: dict[Key, Row] = {}
        self.summaries: dict[str, Row] = {}
        self.steps: dict[Key, Steps] = {}
        self._ttft_p90: dict[Key, float] = {}
        self._quarters: dict[Key, list[float | None]] = {}
        self._plain_cells: dict[str, list[Measured]] = {}
        samples: dict[Key, dict[str, Sample]] = {}
        for cell in study.cells:
            self.cell_rows[cell.key] = self._identity(cell)
            if cell.status == "valid":
                samples[cell.key] = self._measure(cell)
            elif cell.status == "void":
                kept = quiet_successes(study, cell)
                self._summarise(cell, Measured(cell.requests, cell.record["window"], kept))
        self._judge_saturation()
        self.taxes = Taxes(
            samples, self.statistics, study.document["seed"], study.document["blocks"]
        )

    # ---- cells

    def _identity(self, cell: RawCell) -> Row:
        row: Row = dict(zip(("config", "block", "phase", "cell"), cell.key, strict=True))
        launch = cell.launch
        rate = cell.planned["rate_rps"]
        if rate is None and launch.index is not None:
            rate = launch.index["rate_rps"]
        row |= {
            "configuration": "plain" if launch.config == CLOSING_PLAIN else launch.config,
            "rate_rps": cell.record["schedule"]["rate_rps"] if cell.measured else rate,
            "input_tokens": cell.planned["input_tokens"],
            "output_tokens": cell.planned["output_tokens"],
            "status": cell.status,
            "reason": cell.reason,
            "label": self.study.document["engine_label"],
        }
        if cell.status == "void":
            window = cell.record["window"]
            row["n"] = cell.record["counts"]["measured_ok"]
            row["dropped"] = cell.record["counts"]["dropped"]
            row["window_s"] = (window["t_stop_ns"] - window["t_warmup_end_ns"]) / 1e9
        return row

    def _measure(self, cell: RawCell) -> dict[str, Sample]:
        window, settings = cell.record["window"], self.statistics
        measured = Measured(cell.requests, window, quiet_successes(self.study, cell))
        self._summarise(cell, measured)
        row = self.cell_rows[cell.key]
        row |= request_columns(measured, settings["confidence"], settings["p99_min_samples"])
        row |= {"waiting_p50": waiting_p50(cell.metrics, window)}
        row |= {"n_disturbed": measured.all_n - measured.n, **quiet_columns(self.study, cell)}
        row |= stationarity_columns(measured.tpot, settings["margin"])
        if measured.all_n:
            self._ttft_p90[cell.key] = float(np.percentile(measured.all_ttft, 90))
            self._quarters[cell.key] = measured.quarters_s
        if self.study.step_timing:
            steps = Steps(cell.steps(), window)
            row |= steps.columns()
            self.steps[cell.key] = steps
        if cell.key[0] == "plain" and cell.key[2] == "A":
            self._plain_cells.setdefault(cell.cell, []).append(measured)
        _, block, phase, name = cell.key
        seed_name = f"{self.study.document['seed']}/bootstrap/block{block}/{phase}/{name}"
        return resampled_logs(measured, settings, seed_name)

    def _summarise(self, cell: RawCell, measured: Measured) -> None:
        # summary.json is written while measuring, with METHOD.md's own confidence and p99 bound.
        self.summaries.setdefault(cell.launch.name, {})[cell.cell] = request_columns(
            measured, 0.95, 1000
        )

    # ---- saturation

    def _judge_saturation(self) -> None:
        bounds = self.study.config["saturation"]
        for key, row in self.cell_rows.items():
            if row["status"] != "valid":
                continue
            row |= {"saturated": None, "saturation_criteria": ""}
            if key not in self._ttft_p90:
                continue
            row["ttft_ratio"] = self._ttft_ratio(key)
            fired = {
                "throughput_ratio": row["throughput_ratio"] < bounds["throughput_ratio_min"],
                "waiting": row["waiting_p50"] > bounds["waiting_p50_max"],
                "ttft_ratio": None
                if row["ttft_ratio"] is None
                else row["ttft_ratio"] > bounds["ttft_p90_ratio_max"],
            }
            row["fired"] = fired
            row["saturated"] = any(fired.values())
            row["saturation_criteria"] = ";".join(name for name in CRITERIA if fired[name])

    def _ttft_ratio(self, key: Key) -> float | None:
        """TTFT p90 over that of the same launch at half the rate; None where there is none."""
        config, block, phase, _ = key
        if phase != "A":
            return None
        rate = self.cell_rows[key]["rate_rps"]
        for other, row in self.cell_rows.items():
            if other[:3] == (config, block, phase) and row["rate_rps"] == rate / 2:
                half = self._ttft_p90.get(other)
                return None if half is None else self._ttft_p90[key] / half
        return None

    def reference_rates(self) -> Row:
        """The content of reference_rates.json."""
        study = self.study
        planned = study.document["cells"]["A"]
        rates = [float(c["rate_rps"]) for c in planned]
        criteria = {
            config: {f"{c['rate_rps']:g}": self._criteria(config, c["cell"]) for c in planned}
            for config in study.configs("A")
        }
        states = {
            config: [entry["saturated"] for entry in entries.values()]
            for config, entries in criteria.items()
        }
        left_out = self._left_out(states, rates)
        included = [states[c] for c in study.ids if c not in left_out]
        with_plain = "plain" not in left_out
        safe = _highest(rates, included) if with_plain else None
        load = _highest(rates, [states["plain"]]) if with_plain else None
        fallback = study.config["reference"]["fallback_rps"]
        return {
            "ref_safe": fallback if safe is None else safe,
            "ref_load": fallback if load is None else load,
            "rates_rps": rates,
            "saturation_rate_rps": {
                config: next((r for r, s in zip(rates, known, strict=True) if s), None)
                for config, known in states.items()
            },
            "criteria": criteria,
            "left_out": left_out,
            "fallback_used": safe is None or load is None,
        }

    def _criteria(self, config: str, cell: str) -> Row:
        """One rate of one configuration over its launches: median values, majorities."""
        bounds = self.study.config["saturation"]
        keys = [
            key
            for key, row in self.cell_rows.items()
            if (key[0], key[2], key[3]) == (config, "A", cell) and row.get("fired")
        ]
        rows = [self.cell_rows[key] for key in keys]
        entry: Row = {
            "saturated": _half([r["saturated"] for r in rows]),
            "n_launches": len(rows),
            "n_saturated": sum(r["saturated"] for r in rows),
        }
        columns = {"throughput_ratio": "throughput_ratio_min", "waiting": "waiting_p50_max",
                   "ttft_ratio": "ttft_p90_ratio_max"}  # fmt: skip
        for name, bound in columns.items():
            column = "waiting_p50" if name == "waiting" else name
            values = [r[column] for r in rows if r[column] is not None]
            fired = [r["fired"][name] for r in rows if r["fired"][name] is not None]
            entry[name] = {
                "value": float(np.median(values)) if values else None,
                "bound": bounds[bound],
                "fired": _half(fired),
            }
        quarters = zip(*(self._quarters[key] for key in keys), strict=True)
        entry["backlog_growth"] = [_median(list(q)) for q in quarters]
        return entry

    def _left_out(self, states: dict[str, list[bool | None]], rates: list[float]) -> Row:
        left_out: Row = {}
        for config in self.study.ids:
            seen = [(r, s) for r, s in zip(rates, states[config], strict=True) if s is not None]
            if not seen:
                reasons = (c.reason for c in self.study.cells
                           if c.key[0] == config and c.key[2] == "A" and c.reason)  # fmt: skip
                left_out[config] = f"no valid Phase A cell: {next(reasons, None)}"
            elif seen[0][1]:
                left_out[config] = f"saturated at {seen[0][0]:g} req/s, its lowest valid rate"
        return left_out

    # ---- tables

    def aggregate_rows(self) -> list[Row]:
        """aggregate.csv: every planned cell, then its groups pooled over blocks."""
        groups: dict[tuple[str, str, str], list[Row]] = {}
        for row in self.cell_rows.values():
            groups.setdefault((row["phase"], row["config"], row["cell"]), []).append(row)
        pooled = [self._pooled(group) for group in groups.values()]
        return [*self.cell_rows.values(), *pooled]

    def _pooled(self, group: Sequence[Row]) -> Row:
        valid = [row for row in group if row["status"] == "valid"]
        lost = [(row["block"], row["reason"]) for row in group if row["status"] != "valid"]
        keys = ("config", "configuration", "phase", "cell", "rate_rps", "input_tokens",
                "output_tokens", "status", "label")  # fmt: skip
        row: Row = {key: group[0][key] for key in keys} | {"block": "all"}
        row["reason"] = merged(lost) or None
        if not valid:
            return row
        row |= {"status": "valid", "rate_rps": valid[0]["rate_rps"]}
        for name in QUANTILES:
            row |= self._pooled_quantile(name, valid)
        for name in AVERAGED:
            row[name] = _mean([r.get(name) for r in valid])
        for name in SUMMED:
            known = [r[name] for r in valid if r.get(name) is not None]
            row[name] = sum(known) if known else None
        row["p99_reason"] = next((r["p99_reason"] for r in valid if r["p99_reason"]), None)
        judged = [r for r in valid if r["saturated"] is not None]
        row["saturated"] = _half([r["saturated"] for r in judged])
        fired = [r["saturation_criteria"].split(";") for r in judged]
        row["saturation_criteria"] = ";".join(
            name for name in CRITERIA if _half([name in f for f in fired])
        )
        warming = [r["warming_up"] for r in valid if r["warming_up"] is not None]
        row["warming_up"] = any(warming) if warming else None
        return row

    def _pooled_quantile(self, name: str, valid: Sequence[Row]) -> Row:
        columns = (f"{name}_ms", f"{name}_lo_ms", f"{name}_hi_ms")
        values = [row[columns[0]] for row in valid if row[columns[0]] is not None]
        if len(valid) == 1 or not values:
            return {column: valid[0][column] for column in columns}
        logs = np.log(values)
        mean, n = float(logs.mean()), len(values)
        if n == 1:
            return dict(zip(columns, (math.exp(mean), None, None), strict=True))
        confidence = self.statistics["confidence"]
        half = t_quantile(confidence, n - 1) * float(logs.std(ddof=1)) / math.sqrt(n)
        bounds = (math.exp(mean), math.exp(mean - half), math.exp(mean + half))
        return dict(zip(columns, bounds, strict=True))

    def step_taxes(self, key: Key) -> Row:
        """Taxes of schedule(), engine step and callbacks, and the design's rest, in us."""
        names = tuple(STEP_TAXES.values())
        row, plain = self.cell_rows[key], self.cell_rows.get(("plain", *key[1:]), {})
        if "n_steps" not in row or "n_steps" not in plain:
            return dict.fromkeys(names)
        step = _minus(row["step_duration_us_p50"], plain["step_duration_us_p50"])
        engine = _minus(row["engine_step_us_p50"], plain["engine_step_us_p50"])
        callback = 0.0 if key[0].startswith("plain") else row["connector_total_us_p50"]
        return dict(zip(names, (step, engine, callback, _minus(step, callback)), strict=True))

    def steps_rows(self) -> list[Row]:
        """steps.csv: the step percentiles and taxes of every planned cell."""
        empty: Row = dict.fromkeys((*STEP_COLUMNS, *COUNT_COLUMNS))
        return [{**empty, **row, **self.step_taxes(key)} for key, row in self.cell_rows.items()]

    def step_cdf_rows(self) -> list[Row]:
        """step_cdf.csv: schedule() and the engine step at ref_safe, blocks pooled."""
        cell = self.cell_at("ref_safe")
        rows: list[Row] = []
        for config in self.study.configs("A"):
            found = [
                steps
                for key, steps in self.steps.items()
                if (key[0], key[2], key[3]) == (config, "A", cell)
            ]
            if found:
                durations = np.concatenate([steps.duration for steps in found])
                engine = np.concatenate([steps.engine for steps in found])
                rows += [{"config": config, **point} for point in cdf_points(durations, engine)]
        return rows

    def cell_at(self, reference: str) -> str | None:
        """The Phase A cell at a reference rate."""
        rate = self.study.rates[reference]
        cells = self.study.document["cells"]["A"]
        return next((c["cell"] for c in cells if c["rate_rps"] == rate), None)

    def tax_rows(self) -> list[Row]:
        """taxes.csv: every configuration but plain, cell and metric."""
        rows: list[Row] = []
        for phase in PHASES:
            configs = [c for c in self.study.configs(phase) if c != "plain"]
            for planned in self.study.document["cells"][phase]:
                for metric in METRICS:
                    wheres = [(config, phase, str(planned["cell"])) for config in configs]
                    effects = [self.taxes.tax(where, metric) for where in wheres]
                    family = [
                        self._tax_row(where, metric, planned, found)
                        for where, found in zip(wheres, effects, strict=True)
                    ]
                    judge(family, effects, self.statistics)
                    rows += family
        return rows

    def _tax_row(self, where: Where, metric: str, planned: Row, found: Effect | None) -> Row:
        config, phase, cell = where
        rates = self.study.rates
        names = [n for n in ("ref_safe", "ref_load") if rates[n] == planned["rate_rps"]]
        reference = {"B": "ref_safe", "Bp": "ref_load"}.get(phase, names[0] if names else "")
        ours, plain = (rates["saturation_rate_rps"].get(c) for c in (config, "plain"))
        row: Row = {
            "config": config, "phase": phase, "cell": cell, "metric": metric,
            "rate_rps": planned["rate_rps"] if phase == "A" else rates[reference],
            "reference": reference, "input_tokens": planned["input_tokens"],
            "output_tokens": planned["output_tokens"], "n_blocks": 0, "n_config": 0, "n_plain": 0,
            "p_value": None, "p_holm": None,
            "capacity_ratio": None if ours is None or plain is None else ours / plain,
        }  # fmt: skip
        lost = self.lost(where, metric)
        if found is None:
            status, reason = worst(lost)
            return row | {"status": status, "reason": reason}
        plain_ms, config_ms, apart, n_config, n_plain = self.taxes.absolute(where, metric)
        return row | self._mean_step_taxes(where) | {
            "tax": found.point, "tax_lo": found.lo, "tax_hi": found.hi,
            "abs_ms": config_ms - plain_ms, "abs_lo_ms": apart.lo, "abs_hi_ms": apart.hi,
            "plain_ms": plain_ms, "config_ms": config_ms, "n_blocks": found.n_blocks,
            "n_config": n_config, "n_plain": n_plain, "interval_method": found.method,
            "p_value": found.p, "status": "valid",
            "reason": merged([(block, reason) for _, block, reason in lost]) or None,
        }  # fmt: skip

    def _mean_step_taxes(self, where: Where) -> Row:
        config, phase, cell = where
        keys = [key for key in self.steps if (key[0], key[2], key[3]) == (config, phase, cell)]
        each = [self.step_taxes(key) for key in keys]
        return {name: _mean([t[column] for t in each]) for name, column in STEP_TAXES.items()}

    def lost(self, where: Where, metric: str) -> list[Lost]:
        """(status, block, reason) of every block in which a tax has no number."""
        config, phase, cell = where
        found: list[Lost] = []
        for block in self.taxes.all_blocks:
            for name in (config, "plain"):
                key = (name, block, phase, cell)
                if metric in self.taxes.samples.get(key, {}):
                    continue
                status, reason = self._why(self.cell_rows.get(key), metric)
                found.append((status, block, reason if name == config else f"{name}: {reason}"))
                break
        return found

    @staticmethod
    def _why(row: Row | None, metric: str) -> tuple[str, str]:
        if row is None:
            return "missing", "the launch is not part of the design"
        if row["status"] == "valid":
            return "missing", f"no {metric} in a cell of {row['output_tokens']} output tokens"
        if row["status"] == "failed":
            return "missing", f"the launch failed: {row['reason']}"
        return row["status"], str(row["reason"])

    def amplification_rows(self) -> list[Row]:
        """amplification.csv: tax(ref_load) - tax(ref_safe)."""
        safe, load = self.cell_at("ref_safe"), self.cell_at("ref_load")
        rows = []
        for config in self.study.configs("A"):
            for metric in METRICS if config != "plain" else ():
                row: Row = {"config": config, "metric": metric, "status": "missing", "n_blocks": 0}
                row |= {f"{n}_rps": self.study.rates[n] for n in ("ref_safe", "ref_load")}
                if safe is not None and load is not None and safe != load:
                    row |= self._amplification(config, metric, safe, load)
                rows.append(row)
        return rows

    def _amplification(self, config: str, metric: str, safe: str, load: str) -> Row:
        at_safe, at_load = (config, "A", safe), (config, "A", load)
        gap = self.taxes.combination([(1.0, at_load, metric), (-1.0, at_safe, metric)])
        if gap is None:
            lost = [*self.lost(at_safe, metric), *self.lost(at_load, metric)]
            return {"status": worst(lost)[0]}
        both = (self.taxes.blocks(w, metric) for w in (at_safe, at_load))
        blocks = sorted(set.intersection(*map(set, both)))
        return {
            "tax_ref_safe": self.taxes.point(at_safe, metric, blocks),
            "tax_ref_load": self.taxes.point(at_load, metric, blocks),
            "gap": gap.point, "gap_lo": gap.lo, "gap_hi": gap.hi, "n_blocks": gap.n_blocks,
            "interval_method": gap.method, "status": "valid",
        }  # fmt: skip

    # ---- hypotheses.json

    def findings(self) -> tuple[dict[str, Any], dict[int, tuple[str, str | None]]]:
        """H1 to H6 with their numbers; criteria 1 to 7 with their labels."""
        limits, cell = self.study.config["hypotheses"], self.cell_at("ref_safe")
        found = hypotheses(self.taxes, limits, cell, self.study.document["cells"]["B"])
        criteria = labels(self.taxes, limits, cell, found)
        criteria[6] = ("met" if self._artifacts_complete() else "not met", None)
        span = self.span_hours()
        within = (
            "cannot tell" if span is None else "met" if span < limits["max_hours"] else "not met"
        )
        return found, criteria | {7: (within, None)}

    def span_hours(self) -> float | None:
        """Wall clock from the first arrival to the last drain."""
        starts, ends = [], []
        for cell in self.study.cells:
            if cell.measured:
                window = cell.record["window"]
                start = datetime.fromisoformat(window["started_utc"]).timestamp() / 3600
                starts.append(start)
                ends.append(start + (window["t_drained_ns"] - window["t_origin_ns"]) / 3.6e12)
        return max(ends) - min(starts) if starts else None

    def _artifacts_complete(self) -> bool:
        gates = read_json(self.study.root / "preflight" / "preflight_status.json")
        for launch in self.study.launches:
            if launch.status == "skipped":
                name = "plain" if launch.config == CLOSING_PLAIN else launch.config
                if launch.phase != "Bp" and not gates.get(name, {}).get("reason"):
                    return False
            elif launch.status != "done" or not all(
                (launch.folder / name).exists() for name in RUN_FILES
            ):
                return False
        kinds = ("requests", "metrics", *(("engine_step",) if self.study.step_timing else ()))
        return all(
            cell.status == "skipped"
            or (cell.measured and all(cell.path(k).exists() for k in kinds))
            for cell in self.study.cells
        )

    def resolution_rows(self) -> list[Row]:
        """What a cell of n requests can resolve: METHOD.md's table, then this study's plain."""
        rates = self.study.rates
        marks = {rates["ref_load"]: " (ref_load)"} | {rates["ref_safe"]: " (ref_safe)"}
        given = (
            ("tpot", "light load", 0.1),
            ("ttft", "light load", 0.3),
            ("ttft", "saturated", 0.8),
        )
        rows = [self._resolution("METHOD.md", m, w, s, 200) for m, w, s in given]
        for planned in self.study.document["cells"]["A"]:
            launches = self._plain_cells.get(planned["cell"], [])
            where = f"{planned['rate_rps']:g} req/s{marks.get(planned['rate_rps'], '')}"
            for metric in ("ttft", "tpot"):
                found = [cell.metrics[metric] for cell in launches]
                known = [v for v in found if len(v) > 1 and v.min() > 0]
                if known:
                    sigma = float(np.mean([np.log(values).std(ddof=1) for values in known]))
                    n = min(map(len, known))
                    rows.append(self._resolution("this study", metric, where, sigma, n))
        return rows

    def _resolution(self, source: str, metric: str, where: str, sigma: float, n: int) -> Row:
        normal, confidence = NormalDist(), self.statistics["confidence"]
        density = normal.pdf(normal.inv_cdf(0.9))
        half = normal.inv_cdf((1 + confidence) / 2) * math.sqrt(2) * sigma
        return {
            "source": source, "metric": metric, "where": where, "sigma": sigma, "n": n,
            "half_width": half * math.sqrt(0.9 * 0.1 / n) / density,
        }  # fmt: skip


def merged(reasons: Sequence[tuple[int, str]]) -> str:
    """`block 0, 2: died; block 1: early send`."""
    texts: dict[str, list[str]] = {}
    for block, text in reasons:
        texts.setdefault(text, []).append(str(block))
    return "; ".join(f"block {', '.join(blocks)}: {text}" for text, blocks in texts.items())


def worst(lost: Sequence[Lost]) -> tuple[str, str]:
    """The status of a number nobody has, and its reasons."""
    for status in ("void", "missing", "skipped"):
        reasons = [(block, reason) for found, block, reason in lost if found == status]
        if reasons:
            return status, merged(reasons)
    raise ValueError("no block lost the number, and there is none")


def _half(flags: Sequence[bool]) -> bool | None:
    return 2 * sum(flags) >= len(flags) if flags else None


def _minus(value: float | None, base: float | None) -> float | None:
    return None if value is None or base is None else value - base


def _median(values: Sequence[float | None]) -> float | None:
    known = [v for v in values if v is not None]
    return float(np.median(known)) if known else None


def _mean(values: Sequence[float | None]) -> float | None:
    known = [v for v in values if v is not None]
    return sum(known) / len(known) if known else None


def _highest(rates: Sequence[float], states: Sequence[Sequence[bool | None]]) -> float | None:
    """The highest rate at which nobody is saturated, nor at any lower one, and all are known."""
    best = None
    for position, rate in enumerate(rates):
        here = [known[position] for known in states]
        if True in here:
            break
        if here and None not in here:
            best = rate
    return best
