"""The layout figures 1-3 share: a quantity against the offered rate, over a strip of cell states.

The strip has one row per configuration and one column per rate. It is the legend, and it shows what
the curves cannot: which saturation criteria fired where, each configuration's knee, and every cell
that has no number, with its reason.
"""

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

from connector_tax.artifacts.names import REFERENCES
from connector_tax.artifacts.tables import POOLED, AggregateRow
from connector_tax.figures import style
from connector_tax.figures.tables import StudyTables
from connector_tax.marks import Mark

CRITERIA = ("throughput_ratio", "waiting", "ttft_ratio")
COLUMNS = (
    "config", "rate_rps", "x_drawn_rps", "value", "lo", "hi", "unit", "n", "status", "reason",
    "blocks_lost", "saturation_criteria", "knee_rps",
)  # fmt: skip
ROW_IN = 0.117
BOTTOM_IN = 0.5
GAP_IN = 0.14
KNEE_IN = 0.36
KEY_IN = 1.4  # least room left of the axes: the key, the axis label and the tick labels
SPREAD = 0.14  # of the distance between neighbouring rates, all configurations together


@dataclass(frozen=True)
class Quantity:
    """What is drawn against the rate: its name with unit, value, interval and scale."""

    label: str
    unit: str
    value: Callable[[AggregateRow], float | None]
    low: Callable[[AggregateRow], float | None]
    high: Callable[[AggregateRow], float | None]
    log: bool
    spread: bool = True  # set the configurations' points slightly apart sideways
    height_in: float = 1.62
    room_below_in: float = 0.0  # for a further panel between this one and the strip


def plain_number(value: float, _position: int | None = None) -> str:
    """A tick label without powers of ten: 0.5, 20, 1500."""
    return f"{value:.10g}"


def knee_text(study: StudyTables, config: str, row: dict[str, AggregateRow]) -> str:
    """The configuration's saturation rate as text; '>32' when no rate of the grid saturates it."""
    if not any(cell.status == "valid" for cell in row.values()):
        return "–"
    knee = study.reference["saturation_rate_rps"].get(config)
    if knee is None:
        rates = [cell.rate_rps for cell in row.values() if cell.rate_rps is not None]
        saturated = [c.rate_rps for c in row.values() if c.saturated and c.rate_rps is not None]
        return plain_number(min(saturated)) if saturated else f">{plain_number(max(rates))}"
    return plain_number(knee)


def n_range(counts: list[int]) -> str:
    """Sample counts as text: 'n = 200 to 612'."""
    if not counts:
        return "n = 0"
    low, high = min(counts), max(counts)
    return f"n = {low}" if low == high else f"n = {low} to {high}"


class RateFigure:
    """The figure under construction: curves above, strip below, one x axis."""

    def __init__(self, study: StudyTables, quantity: Quantity) -> None:
        self.study = study
        self.quantity = quantity
        self.marks = style.marks(study)
        cells = study.pooled("A")
        self.cells = {
            item.id: {cell: row for (config, cell), row in cells.items() if config == item.id}
            for item in study.configurations
        }
        lost = [row for row in study.aggregate if row.phase == "A" and row.block != POOLED]
        self.lost = Counter((row.configuration, row.cell) for row in lost if row.status != "valid")
        self.rates = sorted({float(rate) for rate in study.settings["phase_a"]["rates_rps"]})
        counts = [row.n for row in cells.values() if row.n]
        launched = study.configurations
        labels = style.label_margin_in([item.label for item in launched], 6)
        self.left = max(KEY_IN, 0.45 + labels)
        strip = ROW_IN * len(launched)
        below = BOTTOM_IN + strip + GAP_IN + quantity.room_below_in
        self.figure: Figure = style.new_figure(
            study, style.COLUMN_IN, below + quantity.height_in + 0.2, f"{n_range(counts)} per point"
        )
        self.strip = self.panel(BOTTOM_IN, strip)
        self.axes = self.panel(below, quantity.height_in)
        self.panels = [self.strip, self.axes]

    def panel(self, bottom_in: float, height_in: float) -> Axes:
        """Axes over the common rate axis, placed in inches."""
        width = style.COLUMN_IN - self.left - KNEE_IN
        axes = style.axes_in(self.figure, self.left, bottom_in, width, height_in)
        self._prepare_x(axes)
        return axes

    def _prepare_x(self, axes: Axes) -> None:
        step = self._step()
        axes.set_xscale("log", base=2)
        axes.set_xlim(self.rates[0] / step**0.55, self.rates[-1] * step**0.55)
        axes.xaxis.set_major_locator(FixedLocator(self.rates))
        axes.xaxis.set_minor_locator(NullLocator())
        axes.xaxis.set_major_formatter(FuncFormatter(plain_number))

    def _step(self) -> float:
        """The smallest ratio between neighbouring rates."""
        pairs = zip(self.rates, self.rates[1:], strict=False)
        return min((high / low for low, high in pairs), default=2.0)

    def x(self, config: str, rate: float) -> float:
        """Where a configuration's point at `rate` is drawn: slightly aside, so that none hides."""
        if not self.quantity.spread:
            return rate
        order = [item.id for item in self.study.configurations].index(config)
        middle = (len(self.study.configurations) - 1) / 2
        share = (order - middle) / max(1.0, 2 * middle)
        return rate * float(self._step() ** (SPREAD * share))

    def curves(self) -> None:
        """Each configuration's line with intervals; × over a saturated point; void points open."""
        for config, row in self.cells.items():
            mark = self.marks[config]
            points = sorted((c for c in row.values() if c.rate_rps), key=lambda c: c.rate_rps or 0)
            for valid in (True, False):
                chosen = [c for c in points if (c.status == "valid") == valid]
                line = mark.line if valid else "none"
                filled = mark.filled and valid
                self._points(config, chosen, Mark(mark.color, mark.marker, line, filled))

    def _points(self, config: str, cells: list[AggregateRow], mark: Mark) -> None:
        """Points, intervals and line; the line breaks where a rate between two points is lost."""
        values = {cell.rate_rps: self.quantity.value(cell) for cell in cells}
        known = [rate for rate in self.rates if values.get(rate) is not None]
        if not known:
            return
        span = [rate for rate in self.rates if known[0] <= rate <= known[-1]]
        self.axes.plot(
            [self.x(config, rate) for rate in span],
            [math.nan if (y := values.get(rate)) is None else y for rate in span],
            color=mark.color, linestyle=mark.line, marker=mark.marker, zorder=3,
            markerfacecolor=mark.color if mark.filled else "white", markeredgewidth=0.6,
        )  # fmt: skip
        for cell in cells:
            x, y = self.x(config, cell.rate_rps or 0), self.quantity.value(cell)
            low, high = self.quantity.low(cell), self.quantity.high(cell)
            if low is not None and high is not None:
                self.axes.plot([x, x], [low, high], color=mark.color, lw=0.7, zorder=2)
            if cell.saturated and self.quantity.spread and y is not None:
                self.axes.plot(x, y, "x", color="black", ms=3.8, mew=0.6, zorder=4)

    def references(self) -> None:
        """Vertical lines through both panels at the reference rates, named above the plot."""
        rates = {name: self.study.reference[name] for name in REFERENCES}
        step = self._step()
        for name, rate in rates.items():
            if rate is None or (name == "ref_load" and rate == rates["ref_safe"]):
                continue
            line = "-" if name == "ref_safe" else (0, (3, 2))
            for axes in self.panels:
                axes.axvline(rate, color="#9aa7b5", linestyle=line, lw=0.8, zorder=0.5)
            both = name == "ref_safe" and rates["ref_load"] == rate
            text = "ref_safe = ref_load" if both else name
            close = not both and rates["ref_load"] and rates["ref_load"] / rate <= step * 1.01
            align = {"ref_safe": "right" if close else "center"}.get(name, "left")
            nudge = {"right": step**0.2, "left": step**-0.2}.get(align, 1.0)
            self.axes.text(
                rate * nudge, 1.01, text, ha=align, va="bottom", fontsize=style.SMALL_PT,
                color="#4f6073", transform=self.axes.get_xaxis_transform(),
            )  # fmt: skip

    def states(self) -> None:
        """The strip: criteria that fired, blocks lost, cells without a number, knees, legend."""
        launched = self.study.configurations
        axes = self.strip
        axes.set_ylim(len(launched) - 0.5, -0.5)
        axes.set_yticks([])
        axes.spines["left"].set_visible(False)
        for index, item in enumerate(launched):
            if index % 2 == 0:
                axes.axhspan(index - 0.5, index + 0.5, color="#f5f6f8", zorder=0)
            self._legend_entry(index, item.id, item.label)
            self._state_row(index, item.id)
            axes.text(
                1 + 0.5 * KNEE_IN / self._width(), index, self._knee(item.id), ha="center",
                va="center_baseline", fontsize=6, transform=axes.get_yaxis_transform(),
            )  # fmt: skip
        axes.text(
            1 + 0.5 * KNEE_IN / self._width(), -0.62, "knee\n(req/s)", ha="center", va="bottom",
            fontsize=5, linespacing=1.0, color=style.MUTED, transform=axes.get_yaxis_transform(),
        )  # fmt: skip
        axes.set_xlabel("offered rate (requests/s)")

    def _width(self) -> float:
        return style.COLUMN_IN - self.left - KNEE_IN

    def _knee(self, config: str) -> str:
        return knee_text(self.study, config, self.cells[config])

    def _legend_entry(self, index: int, config: str, label: str) -> None:
        rows = len(self.study.configurations)
        y = 1 - (index + 0.5) / rows
        width = self._width()
        style.line_sample(self.strip, (-0.32 / width, -0.05 / width), y, self.marks[config])
        self.strip.text(
            -0.37 / width, y, style.fitted(label, self.left - 0.43, 6), ha="right",
            va="center_baseline", fontsize=6, transform=self.strip.transAxes,
        )  # fmt: skip

    def _state_row(self, index: int, config: str) -> None:
        row = {cell.rate_rps: cell for cell in self.cells[config].values()}
        reasons = {cell.reason for cell in row.values()}
        alike = {cell.status for cell in row.values()}
        if len(row) == len(self.rates) and len(alike) == 1 and "valid" not in alike:
            self._empty(index, self.rates[0], self.rates[-1])
            reason = ", ".join(sorted(reasons - {""}))
            text = f"{alike.pop()}{': ' if reason else ''}{reason}"
            middle = (self.rates[0] * self.rates[-1]) ** 0.5
            self._word(index, middle, text, self._width() - 0.1)
            return
        for rate in self.rates:
            cell = row.get(rate)
            if cell is None or cell.status != "valid":
                self._empty(index, rate, rate)
                self._word(index, rate, "missing" if cell is None else cell.status, 1.0)
            else:
                if self.lost[config, cell.cell]:
                    self._empty(index, rate, rate, height=0.3)
                self._criteria(index, rate, cell)

    def _empty(self, index: int, first: float, last: float, height: float = 0.8) -> None:
        half = self._step() ** 0.46
        low = index + 0.4 - height
        style.hatched(self.strip, first / half, low, last * half - first / half, height)

    def _word(self, index: int, rate: float, text: str, width_in: float) -> None:
        self.strip.text(
            rate, index, style.fitted(text, width_in, 5), ha="center", va="center_baseline",
            fontsize=5, zorder=3, color="#333333",
            bbox={"facecolor": "white", "edgecolor": "none", "pad": 0.4, "alpha": 0.9},
        )  # fmt: skip

    def _criteria(self, index: int, rate: float, cell: AggregateRow) -> None:
        fired = cell.saturation_criteria.split(";")
        for slot, criterion in enumerate(CRITERIA):
            if criterion == "ttft_ratio" and rate / 2 not in self.rates:
                continue
            x = rate * self._step() ** (0.24 * (slot - 1))
            if criterion in fired:
                self.strip.plot(x, index, "x", color=self.marks[cell.config].color, ms=3.0, mew=0.9)
            else:
                self.strip.plot(x, index, ".", color="#bdbdbd", ms=1.2, mew=0)

    def key(self, lines: Sequence[str] = ()) -> None:
        """What the marks mean, in the free space left of the plot; `lines` come first."""
        bounds = self.study.settings["saturation"]
        text = (
            *lines,
            "× saturated",
            "in the rows below,",
            "by slot of three:",
            "· left: throughput",
            f"\u00a0 / rate < {bounds['throughput_ratio_min']:g}",
            "· middle: median",
            f"\u00a0 queue > {bounds['waiting_p50_max']:g}",
            "· right: TTFT p90(r)",
            f"\u00a0 / p90(r/2) > {bounds['ttft_p90_ratio_max']:g}",
            "\u00a0 (no r/2: no dot)",
            "hatched: no number",
            "(half: in some blocks)",
        )
        self.figure.text(
            0.06 / style.COLUMN_IN, 1 - 0.2 / self.figure.get_figheight(), "\n".join(text),
            fontsize=5, color="#333333", va="top", linespacing=1.3,
        )  # fmt: skip

    def picture(self) -> style.Picture:
        """The finished figure and its numbers, configuration by configuration, rate by rate."""
        listed: list[dict[str, object]] = []
        for config, row in self.cells.items():
            for cell in sorted(row.values(), key=lambda cell: cell.rate_rps or 0):
                rate = cell.rate_rps or 0.0
                listed.append(
                    {
                        "config": config, "rate_rps": rate, "x_drawn_rps": self.x(config, rate),
                        "value": self.quantity.value(cell), "lo": self.quantity.low(cell),
                        "hi": self.quantity.high(cell), "unit": self.quantity.unit, "n": cell.n,
                        "status": cell.status, "reason": cell.reason,
                        "blocks_lost": self.lost[config, cell.cell],
                        "saturation_criteria": cell.saturation_criteria,
                        "knee_rps": self._knee(config),
                    }
                )  # fmt: skip
        return style.Picture(self.figure, COLUMNS, listed)


def draw(study: StudyTables, quantity: Quantity) -> RateFigure:
    """Draw `quantity` against the offered rate, with everything but references and key."""
    drawing = RateFigure(study, quantity)
    drawing.curves()
    drawing.states()
    axes = drawing.axes
    axes.tick_params(labelbottom=False)
    axes.set_ylabel(quantity.label)
    axes.grid(axis="y")
    if quantity.log:
        axes.set_yscale("log")
        low, high = axes.get_ylim()
        style.log_ticks(axes, low, high)
    return drawing


def curves(study: StudyTables, quantity: Quantity) -> style.Picture:
    """The whole figure of a quantity that needs nothing beside its curves."""
    drawing = draw(study, quantity)
    drawing.references()
    drawing.key()
    return drawing.picture()
