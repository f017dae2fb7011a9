"""Every cell of a study a second time: from its raw records to its row of the published tables."""

from collections.abc import Mapping, Sequence

import numpy as np

from connector_tax.files import ArtifactError
from connector_tax.provenance.audit_machine import quiet_columns, quiet_successes
from connector_tax.provenance.audit_study import RawCell, RawStudy
from connector_tax.provenance.cell_steps import CellSteps
from connector_tax.provenance.claims import message_of
from connector_tax.provenance.recompute import (
    Measured,
    Row,
    chunk_length_s,
    request_columns,
    resampled_logs,
    stationarity_columns,
    waiting_p50,
)
from connector_tax.provenance.recompute_taxes import Key, Sample, Taxes

CRITERIA = ("throughput_ratio", "waiting", "ttft_ratio")


class Cells:
    """Every number of every cell, made from the raw records."""

    def __init__(self, study: RawStudy) -> None:
        self.study = study
        self.statistics = study.config["statistics"]
        self.cell_rows: dict[Key, Row] = {}
        self.summaries: dict[str, Row] = {}
        self.steps: dict[Key, CellSteps] = {}
        self._ttft_p90: dict[Key, float] = {}
        self._quarters: dict[Key, list[float | None]] = {}
        self.plain_cells: dict[str, list[Measured]] = {}
        valid: dict[Key, Measured] = {}
        for cell in study.cells:
            try:
                self._read(cell, valid)
            except Exception as error:
                raise ArtifactError(f"{cell.name}: {message_of(error)}") from error
        self._judge_saturation()
        loads = {
            key: (bool(row["saturated"]), int(row["dropped"]))
            for key, row in self.cell_rows.items()
            if row["status"] == "valid"
        }
        samples = self._resampled(valid)
        of_study = (self.statistics, study.document["blocks"], study.baseline, study.devices)
        self.taxes = Taxes(samples, loads, *of_study)
        self.taxes_without_rule: Taxes | None = None
        if "quiet" in study.config:
            self.taxes_without_rule = self.taxes
            if any(measured.all_n > measured.n for measured in valid.values()):
                everything = {
                    cell.key: Measured(cell.requests, cell.record["window"])
                    for cell in study.cells
                    if cell.status == "valid"
                }
                self.taxes_without_rule = Taxes(self._resampled(everything), loads, *of_study)

    def _read(self, cell: RawCell, valid: dict[Key, Measured]) -> None:
        self.cell_rows[cell.key] = self._identity(cell)
        if cell.status == "valid":
            valid[cell.key] = self._measure(cell)
        elif cell.status == "void":
            kept = quiet_successes(self.study, cell)
            self._summarise(cell, Measured(cell.requests, cell.record["window"], kept))

    def _resampled(self, valid: Mapping[Key, Measured]) -> dict[Key, dict[str, Sample]]:
        """The percentiles of every valid cell and their resamples."""
        together: dict[tuple[str, str], list[Measured]] = {}
        for key, measured in valid.items():
            together.setdefault(key[2:], []).append(measured)
        lengths = {
            where: chunk_length_s(cells, self.statistics) for where, cells in together.items()
        }
        resamples, seed = self.statistics["resamples"], self.study.document["seed"]
        return {
            key: resampled_logs(
                measured,
                lengths[key[2:]],
                resamples,
                f"{seed}/bootstrap/block{key[1]}/{key[2]}/{key[3]}",
            )
            for key, measured in valid.items()
        }

    # ---- cells

    def _identity(self, cell: RawCell) -> Row:
        row: Row = dict(zip(("config", "block", "phase", "cell"), cell.key, strict=True))
        launch = cell.launch
        rate = cell.planned["rate_rps"]
        if rate is None and launch.index is not None and launch.index.rate_rps is not None:
            rate = self.study.offered_rps(launch.phase, cell.planned)
        row |= {
            "configuration": launch.configuration,
            "rate_rps": cell.record["schedule"]["rate_rps"] if cell.measured else rate,
            "input_tokens": cell.planned["input_tokens"],
            "output_tokens": cell.planned["output_tokens"],
            "status": cell.status,
            "reason": cell.reason,
            "label": self.study.document["engine_label"],
        }
        if self.study.devices:
            row["device"] = self.study.devices[launch.block]
        if cell.status == "void":
            window = cell.record["window"]
            row["n"] = cell.record["counts"]["measured_ok"]
            row["dropped"] = cell.record["counts"]["dropped"]
            row["window_s"] = (window["t_stop_ns"] - window["t_warmup_end_ns"]) / 1e9
        return row

    def _measure(self, cell: RawCell) -> Measured:
        window, settings = cell.record["window"], self.statistics
        measured = Measured(cell.requests, window, quiet_successes(self.study, cell))
        self._summarise(cell, measured)
        row = self.cell_rows[cell.key]
        row |= request_columns(measured, settings["confidence"], settings["p99_min_samples"])
        row |= {"waiting_p50": waiting_p50(cell.metrics, window)}
        row |= {"n_disturbed": measured.all_n - measured.n, **quiet_columns(self.study, cell)}
        row |= stationarity_columns(measured.tpot, settings["margins"]["tpot_p50"])
        if measured.all_n:
            self._ttft_p90[cell.key] = float(np.percentile(measured.all_ttft, 90))
            self._quarters[cell.key] = measured.quarters_s
        if self.study.step_timing:
            self.steps[cell.key] = CellSteps(cell.steps(), window)
            row |= self.steps[cell.key].columns()
        if cell.launch.config == self.study.baseline and cell.key[2] == "A":
            self.plain_cells.setdefault(cell.cell, []).append(measured)
        return measured

    def _summarise(self, cell: RawCell, measured: Measured) -> None:
        # summary.json is written while measuring, with its own confidence and p99 bound.
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
        cells = {float(c["rate_rps"]): c["cell"] for c in planned if c["rate_rps"] is not None}
        rates = list(cells)
        criteria = {
            config: {f"{rate:g}": self._criteria(config, name) for rate, name in cells.items()}
            for config in study.reference_names()
        }
        states = {
            config: [entry["saturated"] for entry in entries.values()]
            for config, entries in criteria.items()
        }
        left_out = self._left_out(states, rates)
        included = [states[c] for c in study.ids if c not in left_out]
        with_plain = study.baseline not in left_out
        safe = _highest(rates, included) if with_plain else None
        load = _highest(rates, [states[study.baseline]]) if with_plain else None
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
        """One rate of one configuration over its launches: median values, majorities.

        Majorities of each device's launches, and then what the worst device says. A device on which
        no launch of the configuration could be judged at any rate does not count.
        """
        bounds = self.study.config["saturation"]
        judged = [
            key
            for key, row in self.cell_rows.items()
            if self.study.reference_name(key[0]) == config and key[2] == "A" and row.get("fired")
        ]
        keys = [key for key in judged if key[3] == cell]
        rows = [self.cell_rows[key] for key in keys]
        devices = dict.fromkeys(self.study.devices.get(key[1]) for key in judged)
        by_device = [
            [self.cell_rows[key] for key in keys if self.study.devices.get(key[1]) == device]
            for device in devices
        ]
        entry: Row = {
            "saturated": _worst(
                [half_or_more([r["saturated"] for r in mine]) for mine in by_device]
            ),
            "n_launches": len(rows),
            "n_saturated": sum(r["saturated"] for r in rows),
        }
        bound_of = {
            "throughput_ratio": bounds["throughput_ratio_min"],
            "waiting": bounds["waiting_p50_max"],
            "ttft_ratio": bounds["ttft_p90_ratio_max"],
        }
        for name, bound in bound_of.items():
            column = "waiting_p50" if name == "waiting" else name
            values = [r[column] for r in rows if r[column] is not None]
            fired = [
                half_or_more([r["fired"][name] for r in mine if r["fired"][name] is not None])
                for mine in by_device
            ]
            entry[name] = {
                "value": float(np.median(values)) if values else None,
                "bound": bound,
                "fired": _worst([state for state in fired if state is not None]),
            }
        quarters = zip(*(self._quarters[key] for key in keys), strict=True)
        entry["backlog_growth"] = [_median(list(q)) for q in quarters]
        return entry

    def _left_out(self, states: dict[str, list[bool | None]], rates: list[float]) -> Row:
        left_out: Row = {}
        for config in self.study.ids:
            seen = [(r, s) for r, s in zip(rates, states[config], strict=True) if s is not None]
            if not seen:
                reasons = (
                    c.reason
                    for c in self.study.cells
                    if c.launch.config == config and c.key[2] == "A" and c.reason
                )
                left_out[config] = f"no valid Phase A cell: {next(reasons, None)}"
            elif seen[0][1]:
                left_out[config] = f"saturated at {seen[0][0]:g} req/s, its lowest valid rate"
        return left_out


def half_or_more(flags: Sequence[bool]) -> bool | None:
    """Whether at least half are true; None without any."""
    return 2 * sum(flags) >= len(flags) if flags else None


def _worst(states: Sequence[bool | None]) -> bool | None:
    """True where one is; else None where one is not known, or there is none."""
    return True if True in states else None if None in states or not states else False


def _median(values: Sequence[float | None]) -> float | None:
    known = [v for v in values if v is not None]
    return float(np.median(known)) if known else None


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
