"""hypotheses.json a second time: hypotheses, criteria, prior and resolution."""

import math
from datetime import datetime
from statistics import NormalDist

import numpy as np

from connector_tax.artifacts import paths
from connector_tax.files import read_json
from connector_tax.provenance.recompute import Row
from connector_tax.provenance.recompute_hypotheses import Finding, hypotheses, labels
from connector_tax.provenance.recompute_tables import Recomputed


class Findings:
    """What the study concludes, from its recomputed tables."""

    def __init__(self, numbers: Recomputed) -> None:
        self.numbers = numbers
        self.study = numbers.study
        self.statistics = numbers.statistics

    def criteria(self) -> tuple[dict[str, Finding], dict[int, tuple[str, str | None]]]:
        """H1 to H6 with their numbers; criteria 1 to 7 with their labels."""
        limits, cell = self.study.config["hypotheses"], self.numbers.cell_at("ref_safe")
        findings = hypotheses(self.numbers.taxes, limits, cell, self.study.document["cells"]["B"])
        criteria = labels(self.numbers.taxes, limits, cell, findings)
        criteria[6] = ("met" if self._artifacts_complete() else "not met", None)
        span = self.span_hours()
        within = (
            "cannot tell" if span is None else "met" if span < limits["max_hours"] else "not met"
        )
        return findings, criteria | {7: (within, None)}

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
        gates = read_json(self.study.root / paths.PREFLIGHT_STATUS)
        for launch in self.study.launches:
            if launch.status == "skipped":
                gate = gates.get(launch.configuration, {})
                if launch.phase != "Bp" and not gate.get("reason"):
                    return False
            elif launch.status != "done" or not all(
                (launch.folder / name).exists() for name in paths.LAUNCH_FILES
            ):
                return False
        kinds = ("requests", "metrics", *(("engine_step",) if self.study.step_timing else ()))
        return all(
            cell.status == "skipped"
            or (cell.measured and all(cell.path(k).exists() for k in kinds))
            for cell in self.study.cells
        )

    def resolution_rows(self) -> list[Row]:
        """What a cell of n requests can resolve: the method's table, then this study's plain."""
        rates = self.study.rates
        marks = {rates["ref_load"]: " (ref_load)"} | {rates["ref_safe"]: " (ref_safe)"}
        given = (
            ("tpot", "light load", 0.1),
            ("ttft", "light load", 0.3),
            ("ttft", "saturated", 0.8),
        )
        rows = [self._resolution("docs/method.md", m, w, s, 200) for m, w, s in given]
        for planned in self.study.document["cells"]["A"]:
            launches = self.numbers.plain_cells.get(planned["cell"], [])
            where = f"{planned['rate_rps']:g} req/s{marks.get(planned['rate_rps'], '')}"
            for metric in ("ttft", "tpot"):
                samples = [cell.metrics[metric] for cell in launches]
                known = [v for v in samples if len(v) > 1 and v.min() > 0]
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
