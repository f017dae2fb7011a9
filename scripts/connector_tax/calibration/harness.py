"""The harness' own error: the client's stamps against the server's truth log, request by request.

Server and client stamp one clock (CLOCK_MONOTONIC), so their stamps subtract directly. The server
stamps right before it writes; what lies between is the kernel, the wake-up and the client.
"""

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
from numpy.typing import NDArray

from connector_tax.analysis.validity import in_window
from connector_tax.artifacts.cell_records import AnsweredRequest, is_answered
from connector_tax.calibration.live import LiveCell
from connector_tax.engine.truth import RequestTruth

Floats = NDArray[np.float64]
PERCENTS = (50, 90, 99)


@dataclass(frozen=True)
class Errors:
    """Of the measured successes of a cell, each (n,).

    Attributes:
        first_us, last_us: client's stamp of the first and last token minus the server's write.
        ttft_ms, tpot_ms: as the client measured them.
        true_ttft_ms, true_tpot_ms: from the server's writes; TTFT from the intended time.
        late_us: the server's first write minus the end of the step that made the token.
    """

    first_us: Floats
    last_us: Floats
    ttft_ms: Floats
    tpot_ms: Floats
    true_ttft_ms: Floats
    true_tpot_ms: Floats
    late_us: Floats


def errors(cell: LiveCell) -> Errors:
    """Compare every measured success of a cell with the server's truth."""
    measured = in_window(cell.requests, cell.record["window"])
    rows = [
        _row(request, cell.truth[request["request_id"]])
        for request in measured
        if is_answered(request)
    ]
    return Errors(*np.array(rows, dtype=np.float64).reshape(-1, len(fields(Errors))).T)


def _row(request: AnsweredRequest, truth: RequestTruth) -> tuple[float, ...]:
    writes = [(t, deadline) for t, tokens, deadline in truth.writes if tokens]
    (first, deadline), (last, _) = writes[0], writes[-1]
    gaps = request["completion_tokens"] - 1
    t_first, t_last = request["t_first_token_ns"], request["t_last_token_ns"]
    intended = request["t_intended_ns"]
    return (
        (t_first - first) / 1e3,
        (t_last - last) / 1e3,
        (t_first - intended) / 1e6,
        (t_last - t_first) / gaps / 1e6,
        (first - intended) / 1e6,
        (last - first) / gaps / 1e6,
        (first - deadline) / 1e3,
    )


def summary(cells: Sequence[Errors]) -> dict[str, Any]:
    """Percentiles of the stamps' errors over all requests, and the error of each cell's p90s."""
    summary: dict[str, Any] = {"cells": len(cells)}
    for name in ("first_us", "last_us", "late_us"):
        pooled = np.concatenate([getattr(cell, name) for cell in cells])
        summary["requests"] = len(pooled)
        summary |= {f"{name}_p{p}": float(np.percentile(pooled, p)) for p in PERCENTS}
        summary[f"{name}_min"] = float(pooled.min())
    for metric in ("ttft", "tpot"):
        off = p90_errors(cells, metric)
        summary[f"{metric}_p90_error_median"] = float(np.median(off))
        summary[f"{metric}_p90_error_worst"] = float(off[np.argmax(np.abs(off))])
    return summary


def p90_errors(cells: Sequence[Errors], metric: str) -> Floats:
    """Relative error of the p90 TTFT or TPOT of each cell: measured over true, minus 1."""
    return np.array(
        [
            np.percentile(getattr(cell, f"{metric}_ms"), 90)
            / np.percentile(getattr(cell, f"true_{metric}_ms"), 90)
            - 1
            for cell in cells
        ]
    )
