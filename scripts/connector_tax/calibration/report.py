"""The calibration's report: one text with its tables, and one figure, from the parts' results."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from connector_tax.artifacts import paths
from connector_tax.calibration.coverage import BLOCKS
from connector_tax.calibration.design import ARRIVALS, NOISY, study_document
from connector_tax.calibration.figure import draw
from connector_tax.calibration.parts import NAMES
from connector_tax.figures.style import save
from connector_tax.figures.tables import StudyTables
from connector_tax.files import read_json, write_json, write_text

Row = Mapping[str, Any]


def write(out: Path) -> str:
    """Write `calibration.txt` and the figure from the parts that are there; the text.

    Raises:
        ArtifactError: a part's file is not JSON.
    """
    parts = {name: read_json(path) for name in NAMES if (path := out / f"{name}.json").exists()}
    sections = {"virtual": _virtual, "http": _http, "faults": _faults}
    lines = ["Calibration of the pipeline on the embedded engine (emulated)", ""]
    for name in NAMES:
        lines += sections[name](parts[name]) if name in parts else [f"{name}: not run", ""]
    text = "\n".join(lines)
    write_text(out / "calibration.txt", text)
    if "virtual" in parts:
        document = study_document(ARRIVALS[0], parts["virtual"]["seed"], max(BLOCKS))
        write_json(out / paths.STUDY, document)
        picture = draw(StudyTables(out / paths.STUDY), parts["virtual"])
        save(picture, out, "calibration", "Calibration: coverage and power")
    return text


# The columns that say which studies a row is about.
_STUDIES: Mapping[str, Callable[[Row], str]] = {
    "spread": lambda r: r["spread"],
    "arrivals": lambda r: r["arrivals"],
    "metric": lambda r: r["metric"],
    "R": lambda r: str(r["blocks"]),
}


def _virtual(part: Row) -> list[str]:
    studies = part["scale"]["studies"]
    return [
        f"1. {studies} seeded studies in virtual time for each spread and arrival process",
        f"   machine: {part['machine']}",
        "",
        "Spread: launches of all configurations differ equally, or those of one three times as",
        f"much ({NOISY}).",
        "Coverage of the 95% intervals over the seven known taxes, in %, target 93 to 97. In",
        "brackets the 95% interval of the coverage (by study: its taxes share plain). The analysis",
        "prints the wider of the block model's interval and the within-launch bootstrap's; beside",
        "it the model's alone, and the noisy configuration's by itself. The truth is the tax in",
        "cells of the studies' length; how often the printed interval covers the tax of cells",
        "without end stands beside, and has no target.",
        *table_lines(
            part["coverage"],
            {
                **_STUDIES,
                "printed": lambda r: _bounded(r, "covered"),
                "model alone": lambda r: _bounded(r, "model_covered"),
                "noisy one": lambda r: (
                    _percent(r["noisy_covered"]) if r["spread"] == "unequal" else "-"
                ),
                "printed, long run": lambda r: _bounded(r, "long_run_covered"),
                "bootstrap wider": lambda r: _percent(r["bootstrap_printed"]),
                "own spread": lambda r: _percent(r["own_printed"]),
                "in target": lambda r: "yes" if r["in_target"] else "NO",
            },
        ),
        "A/A: plain's last launch against the others. Intervals that exclude 0, target at most 5%,",
        "with Clopper-Pearson's interval; and the share that is called TAX.",
        *table_lines(
            part["aa"],
            {
                **_STUDIES,
                "excludes 0": lambda r: _bounded(r, "excludes_zero"),
                "verdict TAX": lambda r: _percent(r["verdict_tax"]),
                "within target": lambda r: "yes" if r["within_target"] else "NO",
            },
        ),
        "Power: the smallest tax detected (positive, p < 0.05 after Dunnett over seven) in 80% of",
        "the studies, by a straight line between the levels; and the smallest level that is.",
        *table_lines(
            part["power"],
            {
                **_STUDIES,
                "smallest tax": lambda r: _found(r["smallest_tax_detected"], r["largest_tax"]),
                "smallest level": lambda r: _found(r["smallest_level_detected"], r["largest_tax"]),
            },
        ),
        "Each level (all in %): true tax in cells of the studies' length and long-run tax, each",
        "with its Monte-Carlo standard error; of the former, coverage with Clopper-Pearson's",
        "interval and bias of the estimate with its standard error; median half-width, share",
        "detected. What the two taxes differ by comes with the length of the cell.",
        *table_lines(
            part["levels"],
            {
                **_STUDIES,
                "configuration": lambda r: r["config"],
                "true tax": lambda r: f"{_percent(r['truth'], 2)} ± {_percent(r['truth_se'], 2)}",
                "long-run tax": lambda r: (
                    f"{_percent(r['long_run'], 2)} ± {_percent(r['long_run_se'], 2)}"
                ),
                "covered": lambda r: _bounded(r, "covered"),
                "half-width": lambda r: _percent(r["half_width"], 2),
                "bias": lambda r: f"{_percent(r['log_bias'], 2)} ± {_percent(r['log_bias_se'], 2)}",
                "detected": lambda r: _percent(r["detected"]),
            },
        ),
    ]


def _http(part: Row) -> list[str]:
    harness, cells = part["harness"], part["cells"]
    return [
        f"2. {part['scale']['http_studies']} studies over real HTTP,"
        f" {part['scale']['http_blocks']} blocks each",
        f"   machine: {part['machine']}",
        "",
        f"{cells['valid']} of {cells['cells']} cells valid;"
        f" {len(cells['measured_again'])} were void at first and measured again.",
        *(
            f"  {c['status']}: study {c['study']}, {c['config']}, block {c['block']}: {c['reason']}"
            for c in cells["not_valid"]
        ),
        f"Harness error over {harness['requests']} requests, client's stamp minus server's write,"
        " µs (p50 / p90 / p99):",
        *(
            f"  {label}: " + " / ".join(f"{harness[f'{name}_p{p}']:.1f}" for p in (50, 90, 99))
            for name, label in (
                ("first_us", "first token"),
                ("last_us", "last token"),
                ("late_us", "server's first write after the step's end (emulation's own lateness)"),
            )
        ),
        *(
            f"  error of a cell's {metric.upper()} p90: median "
            f"{_percent(harness[f'{metric}_p90_error_median'], 3)} %, "
            f"worst {_percent(harness[f'{metric}_p90_error_worst'], 3)} %"
            for metric in ("ttft", "tpot")
        ),
        "",
        "Taxes in %: as measured, by the server's own stamps, and true in virtual time.",
        *table_lines(
            part["taxes"],
            {
                "study": lambda r: str(r["study"]),
                "configuration": lambda r: r["config"],
                "metric": lambda r: r["metric"],
                "tax": lambda r: _percent(r["tax"], 2),
                "interval": lambda r: (
                    "none"
                    if r["lo"] is None
                    else f"{_percent(r['lo'], 2)} to {_percent(r['hi'], 2)}"
                ),
                "by truth log": lambda r: _percent(r["tax_by_truth_log"], 2),
                "virtual": lambda r: _percent(r["virtual_truth"], 2),
                "covered": lambda r: {True: "yes", False: "NO", None: "-"}[r["covered"]],
                "verdict": lambda r: str(r["verdict"]),
            },
        ),
    ]


def _faults(part: Row) -> list[str]:
    return [
        "3. Injected faults, one cell each over real HTTP",
        f"   machine: {part['machine']}",
        "",
        "Stamps: client minus server's write, µs, p50 of the first and of the last token, over the",
        "successes the fault struck (over all where it struck none).",
        *table_lines(
            part["faults"],
            {
                "fault": lambda r: r["fault"],
                "struck": lambda r: (
                    "-" if r["struck"] is None else f"{r['struck']}/{r['requests']}"
                ),
                "cell": lambda r: r["outcome"],
                "as designed": lambda r: "yes" if r["as_designed"] else "NO",
                "stamps": _stamps,
                "why": lambda r: r["why"],
            },
        ),
    ]


def _stamps(row: Row) -> str:
    first, last = row["first_token_error_us_p50"], row["last_token_error_us_p50"]
    return "-" if first is None else f"{first:.0f}, {last:.0f}"


def table_lines(rows: Sequence[Row], columns: Mapping[str, Callable[[Row], str]]) -> list[str]:
    """The lines of a table of `rows`; a column is a name and how a row is shown in it."""
    texts = [list(columns), *([show(row) for show in columns.values()] for row in rows)]
    widths = [max(len(line[i]) for line in texts) for i in range(len(columns))]
    lines = [
        "  ".join(text.ljust(width) for text, width in zip(line, widths, strict=True)).rstrip()
        for line in texts
    ]
    return ["", lines[0], "-" * (sum(widths) + 2 * len(widths) - 2), *lines[1:], ""]


def _percent(value: float | None, decimals: int = 1) -> str:
    return "-" if value is None else f"{100 * value:.{decimals}f}"


def _bounded(row: Row, name: str) -> str:
    low, high = row[f"{name}_lo"], row[f"{name}_hi"]
    return f"{_percent(row[name])} [{_percent(low)}, {_percent(high)}]"


def _found(value: float | None, largest: float) -> str:
    return f"> {_percent(largest, 2)}" if value is None else _percent(value, 2)
