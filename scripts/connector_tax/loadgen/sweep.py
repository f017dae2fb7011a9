"""Judge a sequence of rates, and find the highest rate that a server sustains."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from rich.table import Table

from connector_tax.artifacts.metrics import CRITERIA, LATENCY_METRICS, CellLoad
from connector_tax.artifacts.saturation import DEFAULT_BOUNDS, Judgement, effective_rps, judge
from connector_tax.loadgen.generator import CellResult
from connector_tax.loadgen.latency import latencies_ms
from connector_tax.loadgen.table import short

MOST_RATES = 32
# In place of a judgement of a rate whose run was interrupted.
NOT_JUDGED: dict[str, Any] = {"saturated": None, "criteria": {}, "ms": {}}


def powers_of_two(lowest: float, highest: float) -> list[float]:
    """Return `lowest` and its doublings, up to `highest`.

    Raises:
        ValueError: there are none, or more than MOST_RATES.
    """
    if not 0 < lowest <= highest < float("inf"):
        raise ValueError("not two rates above 0, the lower first")
    rates = [lowest]
    while 2 * rates[-1] <= highest:
        rates.append(2 * rates[-1])
    if len(rates) > MOST_RATES:
        raise ValueError(f"{len(rates)} rates, more than {MOST_RATES}")
    return rates


def load_at(result: CellResult, rate: float) -> CellLoad | None:
    """Return the data by which saturation at a rate is judged; None if no request succeeded.

    The data leave out the server's queue and the backlog by quarter.
    """
    measured = sorted(
        (record for record in result.records if record.measured),
        key=lambda record: record.t_intended_ns,
    )
    rows = [row for record in measured if (row := latencies_ms(record))]
    if not rows:
        return None
    window_s = (result.t_stop_ns - result.t_warmup_end_ns) / 1e9
    effective = effective_rps(np.array([row["E2E"] for row in rows]), window_s)
    ms: dict[str, float] = {}
    for name, metric in LATENCY_METRICS.items():
        latency = metric.latency.removesuffix("_ms").upper()
        if values := [row[latency] for row in rows if latency in row]:
            ms[name] = float(np.percentile(values, metric.percent))
    return CellLoad(rate, effective / (len(measured) / window_s), None, ms, [])


def judge_rate(result: CellResult, rate: float, earlier: dict[float, CellLoad]) -> Judgement | None:
    """Judge a rate by a study's rule, and add its load to `earlier`; None if nothing succeeded."""
    load = load_at(result, rate)
    if load is None:
        return None
    earlier[rate] = load
    return judge(load, earlier, DEFAULT_BOUNDS)


def judgement_record(judgement: Judgement | None) -> dict[str, Any]:
    """Return a judgement by criterion for the summary; None counts as saturated."""
    if judgement is None:
        return {"saturated": True, "criteria": {}, "ms": {}}
    criteria = {
        name: {
            "value": value,
            "bound": DEFAULT_BOUNDS[CRITERIA[name].bound],
            "fired": judgement.fired[name],
        }
        for name, value in judgement.values.items()
    }
    ms = dict(judgement.load.ms)
    return {"saturated": judgement.saturated, "criteria": criteria, "ms": ms}


def highest_unsaturated(summaries: Sequence[Mapping[str, Any]]) -> float | None:
    """Return the highest rate below the first saturated rate; None if the first is saturated."""
    kept = [s["configuration"]["rate"] for s in summaries if s["saturation"]["saturated"] is False]
    return max(kept, default=None)


def verdict(summaries: Sequence[Mapping[str, Any]]) -> str:
    """Return a sentence with the highest sustained rate, and why the next rate saturated the
    server.
    """
    knee, last = highest_unsaturated(summaries), summaries[-1]
    kept = "the server sustains no rate" if knee is None else f"{knee:g} requests/s are sustained"
    if last["saturation"]["saturated"] is None:
        return f"{kept}; {last['configuration']['rate']:g} was interrupted, so it is not judged"
    configuration = last["configuration"]
    if not last["saturation"]["saturated"]:
        if configuration["rate"] < max(configuration["rates"]):
            return f"{kept}; higher rates were not measured"
        return f"{kept}, the highest requested rate; the server's limit is above it"
    reasons = [
        f"{CRITERIA[name].label}: {CRITERIA[name].quantity} is {row['value']:.2f}, "
        f"{'above' if CRITERIA[name].above else 'below'} {row['bound']:g}"
        for name, row in last["saturation"]["criteria"].items()
        if row["fired"]
    ]
    why = "; ".join(reasons) or "nothing succeeded"
    return f"{kept}, {last['configuration']['rate']:g} are not: {why}"


_STATES = {True: "saturated", False: "", None: "interrupted"}


def sweep_table(summaries: Sequence[Mapping[str, Any]]) -> Table:
    """Return a row for each rate, 80 columns wide at most."""
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for name in ("rate", "ended/s", "tokens/s", "TTFT p50", "p90", "TPOT p50", "p90", "ok"):
        table.add_column(name, justify="right")
    table.add_column("")
    for summary in summaries:
        ms = summary["saturation"]["ms"]
        cells = [short(ms.get(name)) for name in ("ttft_p50", "ttft_p90", "tpot_p50", "tpot_p90")]
        table.add_row(
            f"{summary['configuration']['rate']:g}",
            f"{summary['requests_per_s']:.2f}",
            f"{summary['tokens_per_s']:.0f}",
            *cells,
            f"{summary['ok']}",
            _STATES[summary["saturation"]["saturated"]],
        )
    return table
