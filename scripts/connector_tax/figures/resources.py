"""Draw figure 10, the resources of an idle connector besides latency, and the scorecard."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from matplotlib.ticker import MaxNLocator

from connector_tax import text
from connector_tax.artifacts.metrics import (
    ALL_METRICS,
    THROUGHPUT_METRICS,
    change_of,
    judged_metrics,
)
from connector_tax.artifacts.names import ALL_RATES
from connector_tax.artifacts.tables import DECODE, MIXED, PREFILL, RESOURCE, EffectRow
from connector_tax.artifacts.verdicts import COSTS, GAINS, JUDGED, LESS, in_words, less, sign_of
from connector_tax.figures import rows, style
from connector_tax.figures.tables import (
    StudyTables,
    exposed_over_plain,
    frame,
    records,
    steps_over_plain,
)

PANELS: Mapping[str, str] = {
    "idle_cpu": "CPU while idle, cores",
    "cpu_s_per_1000": "CPU s/1,000 req.",
    "memory_pss_mib": "memory (PSS), MiB",
    "gpu_memory_mib": "GPU memory, MiB",
    "kv_blocks": "KV blocks",
    "startup_s": "start-up, s",
}
ENDS = ["difference", "difference_lo", "difference_hi"]
# A row with a name of one line, or two; the longest line, of two panels beside each other.
RESOURCE_IN, TWO_LINES_IN, NAME_IN = 0.15, 0.22, 1.2


def resources(study: StudyTables) -> Figure:
    """Draw a panel for each measured resource, with a row for each configuration."""
    measured = _differences(study)
    noise = measured[measured["config"] == study.aa].set_index("resource")[ENDS]
    measured = measured[measured["config"] != study.aa]
    known = set(measured[measured["difference"].notna()]["resource"])
    shown = [name for name in PANELS if name in known]
    if not shown:
        reasons = [reason for reason in measured["reason"] if reason]
        raise style.AbsentError(next(iter(reasons), "no launch of Phase A was measured"))
    keys = ["resource", "config"]
    wanted = pd.MultiIndex.from_product([shown, [item.id for item in study.connectors]], names=keys)
    table = wanted.to_frame(index=False).merge(measured, how="left", on=keys)
    bands = {name: rows.band(*ends) for name, *ends in noise.itertuples()}
    is_known = zip(table["resource"], table["difference"].notna(), strict=True)
    band = [bands.get(name, (None, None)) if known else (None, None) for name, known in is_known]
    table[rows.BAND] = pd.DataFrame(band, dtype=object)
    notes = [study.against("differences from plain; grey: A/A, plain against plain")]
    row_in = TWO_LINES_IN if "\n" in "".join(_names(study)) else RESOURCE_IN
    height = math.ceil(len(shown) / 2) * (row_in * len(study.connectors) + 0.6)
    figure = style.new_figure(study, style.COLUMN_IN, height, notes)
    grid = style.panels(figure, len(shown), 2, share_x=False)
    for axes, (name, panel) in zip(grid.flat, table.groupby("resource", sort=False), strict=False):
        _panel(study, axes, PANELS[str(name)], panel)
    return style.laid_out(figure)


def _differences(study: StudyTables) -> pd.DataFrame:
    """Return the resources that have a panel, as differences from plain, with the A/A row."""
    of = [row for row in study.of(RESOURCE) if row.metric in PANELS]
    named = {"metric": "resource", "base": "plain_mean"}
    table = frame(of, EffectRow).rename(columns=named)
    differences = [row.difference for row in of]
    table[ENDS] = pd.DataFrame(differences, columns=ENDS, dtype=object)
    return table


def decimals(values: Sequence[float]) -> int:
    """Return how many decimals show three digits of the largest value; 0 for whole numbers."""
    largest = max(map(abs, values), default=0.0)
    if not largest or all(value == round(value) for value in values):
        return 0
    return max(0, 2 - math.floor(math.log10(largest)))


def _panel(study: StudyTables, axes: Axes, name: str, panel: pd.DataFrame) -> None:
    drawn = panel[panel["difference"].notna()]
    rows.scale(axes, rows.numbers(drawn, [*ENDS, *rows.BAND]), room=0.08)
    # A narrow panel has room for zero and one number.
    far = max(reversed(axes.get_xlim()), key=abs)
    ticks = MaxNLocator(3, steps=[1, 2, 5, 10]).tick_values(0, far)
    axes.set_xticks([0, max((t for t in ticks if abs(t) <= abs(far)), key=abs)])
    rows.shade(axes, drawn)
    digits = decimals(rows.numbers(drawn, ENDS[:1]))
    for y, row in enumerate(records(panel)):
        row |= {"status": row["status"] or "not launched", "reason": ""}
        if rows.value(axes, y, row, ENDS, style.marks(study)[row["config"]]):
            rows.beside(axes, y, text.signed(row["difference"], digits))
    plain = next(iter(rows.numbers(drawn, ["plain_mean"])), 0.0)
    value = text.signed(plain, decimals([plain])).removeprefix("+")
    title = f"{name}\n{study.against('plain')}: {value}"
    rows.prepare(axes, _names(study), title)


def _names(study: StudyTables) -> list[str]:
    """Return each connector's label, in two lines if it is long."""
    return [style.in_two_lines(item.label, NAME_IN, style.TEXT_PT) for item in study.connectors]


# ---- the scorecard

# Sign and colours (paper, ink) of each kind of answer.
UNSURE, LOST, NONE = "unsure", "lost", ""
SIGNS = {COSTS: "▲ ", GAINS: "▼ ", LESS: "● ", UNSURE: "? ", LOST: "", NONE: ""}
LOOKS = {
    COSTS: ("#fbe3d3", "#8f3500"),
    GAINS: ("#dce9f7", "#0b4a8f"),
    LESS: ("#d8efe6", "#005a41"),
    UNSURE: ("#fdf3cf", "#6b5200"),
}
RESOURCES = {
    "idle_cpu": "idle CPU, cores",
    "memory_pss_mib": "memory, MiB",
    "startup_s": "start-up, s",
}
# A resource is marked if it reaches these shares of its column's maximum and plain's value.
OF_MOST, OF_PLAIN = 0.5, 0.1
KV_CAPACITY = "KV cache, requests, (blocks)"
SCORE_IN = 0.3


@dataclass(frozen=True)
class Score:
    """A cell of the scorecard: text, kind of result, verdict, and interval for the margin.

    `sign` is costs, gains or neither, whatever the margin.
    """

    size: str
    kind: str = NONE
    verdict: str = ""
    sign: str = ""
    narrow: tuple[float, float] | None = None
    margin: float | None = None

    @property
    def words(self) -> tuple[str, str]:
        """Return two lines, verdict and numbers; the sign precedes the first line that has text."""
        sign = SIGNS[self.kind]
        return (sign + self.verdict, self.size) if self.verdict else ("", sign + self.size)


def scores(study: StudyTables) -> tuple[list[str], list[tuple[str, list[Score]]]]:
    """Return the headings, and each connector's label with its cells."""
    columns = {}
    for metric in judged_metrics(study.settings["statistics"]):
        taxes = study.at(ALL_RATES, metric)
        column = [_latency(taxes.get(item.id)) for item in study.connectors]
        columns[ALL_METRICS[metric].label] = column
    # With asynchronous scheduling an engine step includes the wait for the device.
    rate, exposed = exposed_over_plain(study)
    steps = exposed or steps_over_plain(study)
    # Prompts are computed in separate steps or mixed with decoding.
    kinds = [DECODE, PREFILL if PREFILL in steps else MIXED]
    unit = f"µs exposed, at {rate:g}/s" if exposed else "µs/step"
    measured = {f"{kind}, {unit}": steps.get(kind, {}) for kind in kinds}
    for name, heading in RESOURCES.items():
        rows = (r for r in study.of(RESOURCE) if r.metric == name and r.status == "valid")
        measured[heading] = {row.config: row for row in rows}
    columns |= {heading: _scored(study, of) for heading, of in measured.items() if of}
    capacities = [_kv_capacity(study, item.id) for item in study.connectors]
    # Most servers of a comparison record none, unlike a study's.
    if "commands" not in study.settings["engine"] or any(c.kind != LOST for c in capacities):
        columns[KV_CAPACITY] = capacities
    cells = zip(study.connectors, *columns.values(), strict=True)
    return list(columns), [(item.label, list(column)) for item, *column in cells]


def exposed_words(study: StudyTables) -> str:
    """Return the meaning of the scorecard's exposed steps; "" without an emulated device."""
    words = "exposed: for how long the emulated device waits for the host before a step"
    return words if exposed_over_plain(study)[1] else ""


def requests_of_cells(study: StudyTables) -> str:
    """Return a note on the smallest cell behind the latencies over all rates; "" if unknown."""
    least = [row.n_cell for metric in judged_metrics(study.settings["statistics"])
             for row in study.at(ALL_RATES, metric).values() if row.n_cell]  # fmt: skip
    return f"at least {min(least):,} requests in a cell" if least else ""


def _latency(row: EffectRow | None) -> Score:
    if row is None or row.estimate is None:
        return Score("not measured" if row is None else row.status, LOST)
    size, verdict = text.tax(row.change[0]), in_words(row.verdict, row.margin)
    if row.narrow_lo is None or row.narrow_hi is None or row.mark:
        return Score(size, LOST, verdict)
    beyond = "at worst" if row.metric in THROUGHPUT_METRICS else "at most"
    size += f", {beyond} {text.tax(change_of(row.metric, row.narrow_hi))}"
    narrow = (row.narrow_lo, row.narrow_hi) if row.verdict in JUDGED else None
    sign = sign_of(row.verdict)
    kind = LESS if less(row.verdict) else sign or UNSURE
    return Score(size, kind, verdict, sign, narrow, row.margin)


def _scored(study: StudyTables, of: dict[str, EffectRow]) -> list[Score]:
    """Return differences from plain in the row's unit, marked if large and significant."""
    rows = [of.get(item.id) for item in study.connectors]
    values = [row.difference[0] for row in rows if row and row.difference[0] is not None]
    digits, most = min(2, decimals(values)), max(values, default=0.0)
    return [_difference(row, digits, OF_MOST * most) for row in rows]


def _difference(row: EffectRow | None, digits: int, least: float) -> Score:
    value, low, _ = (None, None, None) if row is None else row.difference
    if row is None or value is None:
        return Score(text.DASH, LOST)
    much = value >= max(least, OF_PLAIN * (row.base or 0)) and (low or 0) > 0
    return Score(text.signed(value, digits), COSTS if much else NONE)


def _kv_capacity(study: StudyTables, config: str) -> Score:
    """Return how many requests of `max_model_len` fit into the KV cache, and its blocks.

    Returns only the blocks if the engine has no limit of a request's length. The text is marked if
    the capacity is below plain's.
    """
    rows = {row.metric: row for row in study.of(RESOURCE)
            if row.config == config and row.own is not None}  # fmt: skip
    blocks, tokens = rows.get("kv_blocks"), rows.get("kv_tokens")
    if blocks is None or blocks.own is None:
        return Score("recorded", LOST, "not")
    requests = ""
    longest = {row.setting: row.value for row in study.engine if row.config == config}.get(
        "max_model_len", ""
    )
    if longest.isdecimal() and tokens is not None and tokens.own is not None:
        requests = text.number(tokens.own / int(longest), 2)
    ends = [row.difference for row in (blocks, tokens) if row is not None]
    # A count that is equal in all launches has no interval.
    fewer = any((d if high is None else high) < 0 for d, _, high in ends if d is not None)
    return Score(f"({blocks.own:,.0f})", COSTS if fewer else NONE, requests)


def scorecard(study: StudyTables) -> Figure:
    """Draw the scorecard as a picture: a coloured cell for each result, with its sign."""
    names, lines = scores(study)
    gains = "▼ gains; " * any(cell.kind == GAINS for _, cells in lines for cell in cells)
    notes = [
        study.against(
            f"Change from plain. Latency: ▲ costs; {gains}● less than the margin; ? cannot tell."
        ),
        study.against(
            f"Other columns: ▲ significant, at least {OF_MOST:.0%} of the column's maximum and"
            f" {OF_PLAIN:.0%} of plain's value."
        ),
    ]
    figure = style.new_figure(study, style.PAGE_IN, SCORE_IN * (len(lines) + 1), notes)
    axes = figure.subplots()
    axes.set_axis_off()
    # The other columns share the remaining width by their longest heading line.
    judged = len(judged_metrics(study.settings["statistics"]))
    rest = [max(8, *map(len, name.split(", "))) for name in names[judged:]]
    verdicts = [words for _, cells in lines for cell in cells[:judged] for words in cell.words]
    names_in = min(1.3, _widest_in([label for label, _ in lines]))
    latency = [min(1.45, _widest_in(verdicts))] * judged
    room = min(0.62 * len(rest), style.PAGE_IN - names_in - sum(latency))
    widths = [names_in, *latency, *(room * n / sum(rest) for n in rest)]
    starts = [sum(widths[:k]) for k in range(len(widths))]
    axes.set(xlim=(0, sum(widths)), ylim=(len(lines) + 0.5, -0.5))
    for x, name in zip(starts[1:], names, strict=True):
        axes.text(x + 0.05, 0, name.replace(", ", ",\n"), fontweight="bold", va="center")
    for y, (label, cells) in enumerate(lines, 1):
        axes.text(0, y, style.in_two_lines(label, names_in, style.TEXT_PT), va="center")
        for x, width, cell in zip(starts[1:], widths[1:], cells, strict=True):
            paper, ink = LOOKS.get(cell.kind, ("white", "black"))
            place = (x + 0.02, y - 0.46)
            axes.add_patch(Rectangle(place, width - 0.04, 0.92, color=paper, lw=0))
            cell_text = "\n".join(
                style.fitted(words, width - 0.07) for words in cell.words if words
            )
            axes.text(x + 0.05, y, cell_text, color=ink, va="center")
    return style.laid_out(figure)


def _widest_in(texts: Sequence[str]) -> float:
    """Return the column width in inches for the widest text."""
    return 0.12 + max(style.text_width_in(text, style.TEXT_PT) for text in texts)
