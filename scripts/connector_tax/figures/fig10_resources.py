"""Figure 10: what an idle connector takes besides latency, as differences from plain.

One panel for each resource; what a user of the machine pays for even when no request comes.
"""

import math
from collections.abc import Mapping, Sequence

import pandas as pd
from matplotlib.axes import Axes

from connector_tax.artifacts.tables import LOG, RESOURCE, EffectRow
from connector_tax.figures import rows, style
from connector_tax.figures.tables import StudyTables, frame, records
from connector_tax.text import signed

PANELS: Mapping[str, str] = {
    "idle_cpu": "CPU while idle, cores",
    "cpu_s_per_1000": "CPU s per 1,000 req.",
    "memory_pss_mib": "memory (PSS), MiB",
    "gpu_memory_mib": "GPU memory, MiB",
    "kv_blocks": "KV blocks",
    "threads": "threads",
    "startup_s": "start-up, s",
}
ENDS = ["difference", "difference_lo", "difference_hi"]
COLUMNS = [
    "config", "resource", "unit", "plain_mean", *ENDS, "tax", *rows.BAND, "interval_method",
    "n_blocks", "status", "reason",
]  # fmt: skip
ROW_IN = 0.15


def draw(study: StudyTables) -> style.Picture:
    """A panel for each resource that was read in some launch, rows of configurations."""
    measured = resources(study)
    noise = measured[measured["config"] == study.aa].set_index("resource")[ENDS]
    measured = measured[measured["config"] != study.aa]
    known = set(measured[measured["difference"].notna()]["resource"])
    shown = [name for name in PANELS if name in known]
    if not shown:
        reasons = [reason for reason in measured["reason"] if reason]
        reason = next(iter(reasons), "no launch of Phase A was measured")
        return style.absent(study, "fig10_resources", reason)
    keys = ["resource", "config"]
    wanted = pd.MultiIndex.from_product([shown, [item.id for item in study.connectors]], names=keys)
    table = wanted.to_frame(index=False).merge(measured, how="left", on=keys)
    bands = {name: rows.band(*ends) for name, *ends in noise.itertuples()}
    own = zip(table["resource"], table["difference"].notna(), strict=True)
    band = [bands.get(name, (None, None)) if known else (None, None) for name, known in own]
    table[rows.BAND] = pd.DataFrame(band, dtype=object)
    notes = [study.against("differences from plain; grey: A/A, plain against plain")]
    height = math.ceil(len(shown) / 3) * (ROW_IN * len(study.connectors) + 0.55)
    figure = style.new_figure(study, style.PAGE_IN, height, notes)
    grid = style.panels(figure, len(shown), 3, share_x=False)
    for axes, (name, panel) in zip(grid.flat, table.groupby("resource", sort=False), strict=False):
        _panel(study, axes, PANELS[str(name)], panel)
    return style.picture(figure, table[table["status"].notna()][COLUMNS])


def resources(study: StudyTables) -> pd.DataFrame:
    """The resources that have a panel, with their differences from plain; A/A too."""
    of = [row for row in study.of(RESOURCE) if row.metric in PANELS]
    named = {"metric": "resource", "base": "plain_mean"}
    table = frame(of, EffectRow).rename(columns=named)
    differences = [row.difference for row in of]
    table[ENDS] = pd.DataFrame(differences, columns=ENDS, dtype=object)
    table["interval_method"] = [row.method.partition(" (")[0] for row in of]
    table["tax"] = table["estimate"].where(table["scale"] == LOG, None)
    return table


def decimals(values: Sequence[float]) -> int:
    """How many decimals give the largest of these three digits; none for whole numbers."""
    largest = max(map(abs, values), default=0.0)
    if not largest or all(value == round(value) for value in values):
        return 0
    return max(0, 2 - math.floor(math.log10(largest)))


def _panel(study: StudyTables, axes: Axes, name: str, panel: pd.DataFrame) -> None:
    drawn = panel[panel["difference"].notna()]
    rows.scale(axes, rows.numbers(drawn, [*ENDS, *rows.BAND]), room=0.08, ticks=3)
    rows.shade(axes, drawn)
    digits = decimals(rows.numbers(drawn, ENDS[:1]))
    for y, row in enumerate(records(panel)):
        row["status"] = row["status"] or "not launched"
        if rows.value(axes, y, row, ENDS, style.marks(study)[row["config"]]):
            rows.beside(axes, y, signed(row["difference"], digits))
    plain = next(iter(rows.numbers(drawn, ["plain_mean"])), 0.0)
    value = signed(plain, decimals([plain])).removeprefix("+")
    title = f"{name} ({study.against('plain')} {value})"
    rows.prepare(axes, [item.label for item in study.connectors], title)
