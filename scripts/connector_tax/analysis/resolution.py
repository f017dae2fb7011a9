"""What a cell of n requests can resolve: the half-width of the interval of a p90 ratio.

Source: docs/method.md, "What 200 requests can resolve". The standard error of a sample quantile is
sqrt(p (1 - p) / n) / f(x_p); for a lognormal with log standard deviation s it is, relative to the
quantile, s sqrt(p (1 - p) / n) / phi(z_p). A ratio of two independent ones has sqrt(2) times that.
Requests are autocorrelated and launches differ, so this is a lower bound.
"""

from collections.abc import Mapping, Sequence

import numpy as np
from scipy.stats import norm

from connector_tax.analysis.ingest import Cell
from connector_tax.analysis.measure import Requests
from connector_tax.artifacts.names import CellKey
from connector_tax.artifacts.stage_records import RatesRecord
from connector_tax.artifacts.study_file import Study
from connector_tax.artifacts.tables import Row

METHOD = "docs/method.md"
METHOD_ROWS = (("tpot", "light load", 0.1), ("ttft", "light load", 0.3), ("ttft", "saturated", 0.8))
METHOD_N = 200


def half_width(sigma: float, n: int, percent: float = 90, confidence: float = 0.95) -> float:
    """Half-width of the interval of a percentile ratio, as a fraction.

    Args:
        sigma: standard deviation of the log of the latencies.
        n: requests in each of the two cells.
    """
    p = percent / 100
    density = float(norm.pdf(norm.ppf(p)))
    z = float(norm.ppf((1 + confidence) / 2))
    return float(z * np.sqrt(2) * sigma * np.sqrt(p * (1 - p) / n) / density)


def resolution_rows(
    cells: Sequence[Cell],
    requests: Mapping[CellKey, Requests],
    rates: RatesRecord,
    study: Study,
) -> list[Row]:
    """The table of docs/method.md, then the same with the baseline's sigma at every Phase A rate.

    With several blocks sigma is their mean and n the smallest: one launch's worth of requests.

    Returns:
        rows of source (METHOD | this study), metric, where, sigma, n, half_width (fraction).
    """
    confidence = study.config["statistics"]["confidence"]
    rows = [
        _row(METHOD, metric, where, sigma, METHOD_N, confidence)
        for metric, where, sigma in METHOD_ROWS
    ]
    marks = {rates[name]: f" ({name})" for name in ("ref_load", "ref_safe")}
    plain: dict[float, list[Requests]] = {}
    for cell in cells:
        key = cell.key
        if (key.config, key.phase) == (study.baseline, "A") and key in requests:
            assert cell.rate_rps is not None
            plain.setdefault(cell.rate_rps, []).append(requests[key])
    for rate, launches in plain.items():
        for metric in ("ttft", "tpot"):
            samples = [getattr(launch, f"{metric}_ms") for launch in launches]
            # All tokens in one read make a TPOT of 0, which has no logarithm.
            samples = [values for values in samples if len(values) > 1 and values.min() > 0]
            if samples:
                sigma = float(np.mean([np.std(np.log(values), ddof=1) for values in samples]))
                n = min(len(values) for values in samples)
                where = f"{rate:g} req/s{marks.get(rate, '')}"
                rows.append(_row("this study", metric, where, sigma, n, confidence))
    return rows


def _row(source: str, metric: str, where: str, sigma: float, n: int, confidence: float) -> Row:
    return {
        "source": source,
        "metric": metric,
        "where": where,
        "sigma": sigma,
        "n": n,
        "half_width": half_width(sigma, n, confidence=confidence),
    }
