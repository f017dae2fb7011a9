"""The calibration's report: one text with its tables, from the parts' results."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from connector_tax.calibration.design import SPREADS
from connector_tax.files import read_json, write_text
from connector_tax.rehearsal.noise import NOISES

Part = Mapping[str, Any]
STAMPS = {
    "first_us": "first token",
    "last_us": "last token",
    "late_us": "server's first write after the step's end (emulation's own lateness)",
}


def write(out: Path) -> str:
    """Write `calibration.txt` from the parts that are there; the text.

    Raises:
        ArtifactError: a part's file is not JSON.
    """
    lines = ["Calibration of the pipeline on the embedded engine (emulated)", ""]
    for name, section in {"virtual": _virtual, "http": _http, "faults": _faults}.items():
        path = out / f"{name}.json"
        if path.exists():
            part = read_json(path)
            first, *others = section(part)
            lines += [f"{name}: {first}", f"machine: {part['machine']}", "", *others, ""]
        else:
            lines += [f"{name}: not run", ""]
    text = "\n".join(lines)
    write_text(out / "calibration.txt", text)
    return text


def _virtual(part: Part) -> list[str]:
    return [
        f"{part['studies']} seeded studies in virtual time for each spread and arrival process",
        *(f"spread {name}: {NOISES[name].source}" for name in SPREADS),
        "",
        "All in %. covered: 95% intervals of the seven known taxes that hold the true one, aim 93",
        "to 97, `within` by study. aa: plain's last launch against the others, intervals without",
        "0, aim at most 5; aa_costs: said to. half_width: of the A/A intervals. smallest: the tax",
        "found (it costs, after Šidák over seven) in 80% of the studies; NaN: above the largest.",
        "",
        _table(part["rows"], ["spread", "arrivals", "metric", "blocks", "studies"]),
    ]


def _http(part: Part) -> list[str]:
    return [
        f"{part['studies']} studies over real HTTP, {part['blocks']} blocks each",
        f"{part['cells'] - len(part['not_valid'])} of {part['cells']} cells valid;"
        f" {len(part['again'])} were void at first and measured again.",
        *part["not_valid"],
        f"Stamps of {part['requests']} requests, client's minus server's write, µs"
        " (p50 / p90 / p99):",
        *(
            f"  {STAMPS[name]}: " + " / ".join(f"{value:.1f}" for value in values)
            for name, values in part["stamps"].items()
        ),
        *(
            f"  error of a cell's {metric.upper()} p90: median {100 * np.median(values):.3f} %, "
            f"worst {100 * max(values, key=abs):.3f} %"
            for metric, values in part["p90_errors"].items()
        ),
        "Taxes in %, measured and true in virtual time:",
        _table(part["taxes"], ["study", "config", "metric", "verdict", "covered", "p_adjusted"]),
    ]


def _faults(part: Part) -> list[str]:
    return [
        "injected into one cell each over real HTTP",
        "stamps_us: client minus server's write, p50 of the first and of the last token, over the",
        "successes the fault struck (over all where it struck none).",
        pd.DataFrame(part["faults"]).to_string(index=False),
    ]


def _table(rows: list[dict[str, Any]], other: list[str]) -> str:
    """The rows with what is not `other` in %."""
    table = pd.DataFrame(rows).set_index(other)
    return (100 * table.astype(float)).round(2).reset_index().to_string(index=False)
