"""The published tables a second time: from recomputed cells to the rows of analysis/*."""

import math
from collections.abc import Sequence
from functools import cached_property

import numpy as np

from connector_tax.artifacts.names import (
    INCONCLUSIVE,
    MARKED,
    METRICS,
    PHASES,
    REFERENCES,
    no_number,
)
from connector_tax.artifacts.study_records import CellPlan
from connector_tax.artifacts.tables import QUANTILES, STEP_COLUMNS, STEP_COUNTS, STEP_TAXES
from connector_tax.provenance.audit_study import RawStudy
from connector_tax.provenance.blocks_wanted import blocks_wanted
from connector_tax.provenance.distributions import t_quantile
from connector_tax.provenance.recompute import Row
from connector_tax.provenance.recompute_cells import CRITERIA, Cells, half_or_more
from connector_tax.provenance.recompute_steps import StepNumbers
from connector_tax.provenance.recompute_taxes import (
    Compared,
    TaxEstimate,
    Where,
    adjusted,
    verdict,
)

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
SUMMED = ("n", "window_s", "dropped", "n_disturbed", *STEP_COUNTS)
# Of taxes.csv, in the order of STEP_TAXES.
STEP_TAX_COLUMNS = ("step_tax_us", "engine_step_tax_us", "callback_us", "unattributed_us")

Lost = tuple[str, int, str]  # status, block, reason


class Recomputed(Cells):
    """Every published number of the study."""

    def __init__(self, study: RawStudy) -> None:
        super().__init__(study)
        self.rates: Row = study.rates

    # ---- pooled cells and steps

    def aggregate_rows(self) -> list[Row]:
        """aggregate.csv: every planned cell, then those of each configuration pooled."""
        groups: dict[tuple[str, str, str], list[Row]] = {}
        for row in self.cell_rows.values():
            groups.setdefault((row["phase"], row["configuration"], row["cell"]), []).append(row)
        pooled = [self._pooled(group) for group in groups.values()]
        return [*self.cell_rows.values(), *pooled]

    def _pooled(self, group: Sequence[Row]) -> Row:
        valid = [row for row in group if row["status"] == "valid"]
        lost = [(row["block"], row["reason"]) for row in group if row["status"] != "valid"]
        keys = ("configuration", "phase", "cell", "rate_rps", "input_tokens", "output_tokens",
                "status", "label")  # fmt: skip
        row: Row = {key: group[0][key] for key in keys} | {"block": "all"}
        row["config"] = row["configuration"]
        row["reason"] = merged(lost) or None
        if self.study.devices:
            on = dict.fromkeys(r["device"] for r in valid or group)
            row["device"] = next(iter(on)) if len(on) == 1 else f"{len(on)} devices"
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
        row["saturated"] = half_or_more([r["saturated"] for r in judged])
        fired = [r["saturation_criteria"].split(";") for r in judged]
        row["saturation_criteria"] = ";".join(
            name for name in CRITERIA if half_or_more([name in f for f in fired])
        )
        warming = [r["warming_up"] for r in valid if r["warming_up"] is not None]
        row["warming_up"] = any(warming) if warming else None
        return row

    def _pooled_quantile(self, name: str, valid: Sequence[Row]) -> Row:
        columns = (f"{name}_ms", f"{name}_lo_ms", f"{name}_hi_ms")
        values = [row[columns[0]] for row in valid if row[columns[0]] is not None]
        if len(valid) == 1 or not values:
            return {column: valid[0][column] for column in columns}
        if not all(values):
            return dict(zip(columns, (0.0, None, None), strict=True))
        blocks = dict.fromkeys(row["block"] for row in valid if row[columns[0]] is not None)
        logs = np.array(
            [
                np.mean(
                    [math.log(r[columns[0]]) for r in valid if r["block"] == b and r[columns[0]]]
                )
                for b in blocks
            ]
        )
        mean, n = float(logs.mean()), len(logs)
        if n == 1:
            return dict(zip(columns, (math.exp(mean), None, None), strict=True))
        half = t_quantile(self.taxes.confidence, n - 1) * float(logs.std(ddof=1)) / math.sqrt(n)
        bounds = (math.exp(mean), math.exp(mean - half), math.exp(mean + half))
        return dict(zip(columns, bounds, strict=True))

    @cached_property
    def step_numbers(self) -> StepNumbers:
        """Step taxes, hooks and curves."""
        return StepNumbers(self.study, self.steps)

    def steps_rows(self) -> list[Row]:
        """steps.csv: the step percentiles and taxes of every planned cell."""
        empty: Row = dict.fromkeys((*STEP_COLUMNS, *STEP_COUNTS))
        return [
            {**empty, **row, **self.step_numbers.launch_taxes(key)}
            for key, row in self.cell_rows.items()
        ]

    def cell_at(self, reference: str) -> str | None:
        """The Phase A cell at a reference rate."""
        rate = self.rates[reference]
        cells = self.study.document["cells"]["A"]
        return next((c["cell"] for c in cells if c["rate_rps"] == rate), None)

    # ---- taxes

    def tax_rows(self) -> list[Row]:
        """taxes.csv: every configuration but plain and the A/A row, by cell and metric."""
        rows: list[Row] = []
        for phase in PHASES:
            for planned in self.study.document["cells"][phase]:
                for metric in METRICS:
                    rows += self._family(phase, planned, metric)
        return rows

    def _family(self, phase: str, planned: CellPlan, metric: str) -> list[Row]:
        """The rows of one cell and metric, judged together."""
        cell = str(planned["cell"])
        aa = self.study.aa_launch(phase)
        names = [
            c for c in self.study.ids if c != self.study.baseline and c in self.study.configs(phase)
        ]
        effects = {n: self.taxes.tax((n, phase, cell), metric) for n in (*names, *aa)}
        rows = {name: self._tax_row((name, phase, cell), metric, planned, effect)
                for name, effect in effects.items()}  # fmt: skip
        compared = [
            Compared(name, effect, self._plain_counts((name, phase, cell), metric))
            for name, effect in effects.items()
            if effect is not None and effect.p is not None
            and name not in aa and not rows[name]["mark"]
        ]  # fmt: skip
        for member, p in zip(compared, adjusted(compared), strict=True):
            rows[member.config]["p_adjusted"] = p
        noise = rows[aa[0]] if aa else {}
        margin = self.statistics["margins"][metric]
        for name, row in rows.items():
            row |= {f"aa_{key}": noise.get(f"tax_{key}") for key in ("lo", "hi")}
            row |= {"aa_tax": noise.get("tax"), "margin": margin}
            effect = effects[name]
            if effect is None:
                continue
            if name in aa and not row["mark"]:
                row["p_adjusted"] = effect.p
            row["verdict"] = (
                MARKED
                if row["mark"]
                else verdict(effect, row["p_adjusted"], margin, self.taxes.confidence)
            )
            if row["verdict"] == INCONCLUSIVE:
                family = [] if name in aa else compared
                row["blocks_needed"] = blocks_wanted(
                    effect, margin, family, len(self.study.plains(phase)), self.taxes.confidence
                )
        return list(rows.values())

    def device_rows(self, taxes: Sequence[Row]) -> list[Row]:
        """devices.csv: each row of taxes.csv on each device."""
        devices = dict.fromkeys(self.study.devices.values())
        return [self._device_row(row, device) for row in taxes for device in devices]

    def _device_row(self, tax: Row, device: str) -> Row:
        where, metric = (tax["config"], tax["phase"], tax["cell"]), tax["metric"]
        lost = [(b, r) for _, b, r in self.lost(where, metric) if self.study.devices[b] == device]
        row: Row = {name: tax[name] for name in ("config", "phase", "cell", "metric")}
        row |= {"device": device, "n_blocks": 0, "reason": merged(lost) or None}
        row["same_p"], _ = self.taxes.device_test(where, metric)
        effect = self.taxes.tax_on(device, where, metric)
        if effect is None:
            return row
        return row | {
            "tax": effect.point, "tax_lo": effect.lo, "tax_hi": effect.hi, "p_value": effect.p,
            "n_blocks": effect.n_blocks, "interval_method": effect.method,
            "error_df": effect.df, "mark": effect.mark,
        }  # fmt: skip

    def _plain_counts(self, where: Where, metric: str) -> dict[int, int]:
        """Launches of plain a configuration is compared with, by block."""
        name, phase, cell = where
        return {
            block: len(self.taxes.plains([name], block, phase, [cell], metric))
            for block in self.taxes.shared_blocks([name], phase, [cell], metric)
        }

    def _tax_row(
        self, where: Where, metric: str, planned: CellPlan, effect: TaxEstimate | None
    ) -> Row:
        config, phase, cell = where
        at = [n for n in REFERENCES if self.rates[n] == planned["rate_rps"]]
        reference = {"B": "ref_safe", "Bp": "ref_load"}.get(phase, at[0] if at else "")
        confirmed = phase == "A" and set(at) & set(self.statistics["confirmatory"])
        row: Row = {
            "config": config, "phase": phase, "cell": cell, "metric": metric,
            "rate_rps": self.study.offered_rps(phase, planned),
            "reference": reference, "input_tokens": planned["input_tokens"],
            "output_tokens": planned["output_tokens"], "n_blocks": 0, "n_config": 0, "n_plain": 0,
            "family": "confirmatory" if confirmed else "exploratory", "mark": "",
            "p_value": None, "p_adjusted": None, "blocks_needed": None,
            "capacity_ratio": self._capacity_ratio(config),
        }  # fmt: skip
        if self.study.devices:
            row["device"] = None
        lost = self.lost(where, metric)
        if effect is None:
            status, reason = worst(lost)
            return row | {"status": status, "reason": reason}
        if self.study.devices:
            blocks = self.taxes.shared_blocks([config], phase, [cell], metric)
            on = dict.fromkeys(self.study.devices[block] for block in blocks)
            row["device"] = next(iter(on)) if len(on) == 1 else f"{len(on)} devices"
        plain_ms, config_ms, n_config, n_plain = self.levels(where, metric)
        without = self.taxes_without_rule
        whole = None if without is None else without.tax(where, metric)
        if whole is not None:
            row |= {"tax_all": whole.point, "tax_all_lo": whole.lo, "tax_all_hi": whole.hi}
        return row | self._step_taxes(where) | {
            "tax": effect.point, "tax_lo": effect.lo, "tax_hi": effect.hi,
            "abs_ms": config_ms - plain_ms,
            "abs_lo_ms": None if effect.lo is None else plain_ms * effect.lo,
            "abs_hi_ms": None if effect.hi is None else plain_ms * effect.hi,
            "plain_ms": plain_ms, "config_ms": config_ms, "n_blocks": effect.n_blocks,
            "n_config": n_config, "n_plain": n_plain, "interval_method": effect.method,
            "error_df": effect.df, "p_value": effect.p, "mark": effect.mark,
            "status": "valid",
            "reason": merged([(block, reason) for _, block, reason in lost]) or None,
        }  # fmt: skip

    def levels(self, where: Where, metric: str) -> tuple[float, float, int, int]:
        """plain and configuration in ms (geometric means over blocks), and both sample sizes."""
        config, phase, cell = where
        ours, plain, n_config, n_plain = [], [], 0, 0
        for block in self.taxes.shared_blocks([config], phase, [cell], metric):
            mine = self.taxes.samples[config, block, phase, cell][metric]
            others = [
                self.taxes.samples[name, block, phase, cell][metric]
                for name in self.taxes.plains([config], block, phase, [cell], metric)
            ]
            ours.append(mine[0])
            plain.append(float(np.mean([other[0] for other in others])))
            n_config += mine[2]
            n_plain += sum(other[2] for other in others)
        return math.exp(np.mean(plain)), math.exp(np.mean(ours)), n_config, n_plain

    def plain_ms(self, phase: str, cell: str, metric: str) -> float | None:
        """Geometric mean over the blocks of plain, over its valid launches within each."""
        logs = [
            np.mean([self.taxes.samples[name, block, phase, cell][metric][0] for name in names])
            for block in self.taxes.all_blocks
            if (names := self.taxes.plains([], block, phase, [cell], metric))
        ]
        return math.exp(np.mean(logs)) if logs else None

    def _capacity_ratio(self, config: str) -> float | None:
        rates = self.rates["saturation_rate_rps"]
        ours, plain = rates.get(config), rates.get(self.study.baseline)
        return None if ours is None or plain is None else ours / plain

    def _step_taxes(self, where: Where) -> Row:
        config, phase, cell = where
        taxes = {
            name: self.step_numbers.tax(config, (phase, cell), metric)
            for name, metric in zip(STEP_TAX_COLUMNS, STEP_TAXES, strict=True)
        }
        return {name: None if tax is None else tax.point for name, tax in taxes.items()}

    def lost(self, where: Where, metric: str) -> list[Lost]:
        """(status, block, reason) of every block in which a tax has no number."""
        config, phase, cell = where
        lost: list[Lost] = []
        for block in self.taxes.all_blocks:
            if not self.taxes.has(config, block, phase, [cell], metric):
                status, reason = self._why(self.cell_rows.get((config, block, phase, cell)), metric)
                lost.append((status, block, reason))
            elif not self.taxes.plains([config], block, phase, [cell], metric):
                baseline = self.study.baseline
                row = self.cell_rows.get((baseline, block, phase, cell))
                status, reason = self._why(row, metric)
                lost.append((status, block, f"{baseline}: {reason}"))
        return lost

    @staticmethod
    def _why(row: Row | None, metric: str) -> tuple[str, str]:
        if row is None:
            return "missing", "the launch is not part of the design"
        if row["status"] == "valid":
            return "missing", no_number(metric, row["output_tokens"])
        if row["status"] == "failed":
            return "missing", f"the launch failed: {row['reason']}"
        return row["status"], str(row["reason"])

    def amplification_rows(self) -> list[Row]:
        """amplification.csv: tax(ref_load) - tax(ref_safe)."""
        safe, load = self.cell_at("ref_safe"), self.cell_at("ref_load")
        rows = []
        for config in [*self.study.ids, *self.study.aa_launch("A")]:
            if config == self.study.baseline or config not in self.study.configs("A"):
                continue
            for metric in METRICS:
                row: Row = {"config": config, "metric": metric, "status": "missing", "n_blocks": 0}
                row |= {f"{n}_rps": self.rates[n] for n in REFERENCES}
                if safe is not None and load is not None and safe != load:
                    row |= self._amplification(config, metric, safe, load)
                rows.append(row)
        return rows

    def _amplification(self, config: str, metric: str, safe: str, load: str) -> Row:
        at_safe, at_load = (config, "A", safe), (config, "A", load)
        gap = self.taxes.combination([(1.0, at_load), (-1.0, at_safe)], metric)
        if gap is None:
            lost = [*self.lost(at_safe, metric), *self.lost(at_load, metric)]
            # Each rate has a launch of plain, and none has both.
            return {"status": worst(lost)[0] if lost else "missing"}
        blocks = self.taxes.shared_blocks([config], "A", [safe, load], metric)
        taxes = [
            math.expm1(self.taxes.log_ratio(where, metric, blocks, [safe, load])[0])
            for where in (at_safe, at_load)
        ]
        return {
            "tax_ref_safe": taxes[0], "tax_ref_load": taxes[1],
            "gap": gap.point, "gap_lo": gap.lo, "gap_hi": gap.hi, "n_blocks": gap.n_blocks,
            "interval_method": gap.method, "error_df": gap.df,
"mark": gap.mark, "status": "valid",
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
        reasons = [(block, reason) for state, block, reason in lost if state == status]
        if reasons:
            return status, merged(reasons)
    raise ValueError("no block lost the number, and there is none")


def _mean(values: Sequence[float | None]) -> float | None:
    known = [v for v in values if v is not None]
    return sum(known) / len(known) if known else None
