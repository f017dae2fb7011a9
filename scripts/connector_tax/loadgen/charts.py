"""Charts as SVG text: axes, lines, dots, and a label for each line."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape

WIDTH, HEIGHT = 440, 270
LEFT, RIGHT, TOP, BOTTOM = 52, 14, 24, 40


@dataclass(frozen=True, slots=True)
class Line:
    """A named series of points, drawn as a line or as dots; `style` is a CSS class of the page."""

    name: str
    style: str
    points: Sequence[tuple[float, float]]
    dots: bool = False
    marked: bool = False
    dashed: bool = False


@dataclass(frozen=True, slots=True)
class Axis:
    """A linear or logarithmic scale from a range of values to a range of pixels."""

    low: float
    high: float
    start: float
    end: float
    log: bool

    @classmethod
    def over(cls, values: Sequence[float], start: float, end: float, log: bool) -> "Axis":
        """Return an axis that contains all values; a linear axis begins at 0 or below."""
        if log:
            positive = [value for value in values if value > 0] or [1.0]
            low, high = min(positive) / 1.1, max(positive) * 1.1
        else:
            low, high = min(0.0, *values), max(values)
            high = high if high > low else low + 1
        return cls(low, high, start, end, log)

    def at(self, value: float) -> float:
        """Return the pixel of a value; a value below a logarithmic axis gets the axis's start."""
        low, high = self.low, self.high
        if self.log:
            low, high, value = math.log(low), math.log(high), math.log(max(value, low))
        return self.start + (self.end - self.start) * (value - low) / (high - low)

    def ticks(self) -> list[float]:
        """Return about five round values; on a long logarithmic axis 1, 2 and 5 of each decade."""
        if not self.log or self.high < 5 * self.low:
            step = 10 ** math.floor(math.log10((self.high - self.low) / 4))
            step *= next((m for m in (1, 2, 5) if (self.high - self.low) / (step * m) <= 6), 10)
            first = math.ceil(self.low / step)
            return [
                min(k * step, self.high) for k in range(first, math.floor(self.high / step) + 1)
            ]
        decades = range(math.floor(math.log10(self.low)), math.ceil(math.log10(self.high)) + 1)
        for digits in ((1, 2, 5), (1,)):
            ticks = [m * 10.0**d for d in decades for m in digits]
            ticks = [tick for tick in ticks if self.low <= tick <= self.high]
            if len(ticks) <= 7:
                break
        return ticks[:: -(-len(ticks) // 7)] if ticks else [math.sqrt(self.low * self.high)]


@dataclass(frozen=True, slots=True)
class Chart:
    """Lines over common axes; `knee` is the x value of a dashed vertical line."""

    lines: Sequence[Line]
    x_label: str
    y_label: str
    x_log: bool = False
    y_log: bool = False
    knee: float | None = None

    def svg(self, title: str) -> str:
        """Return the chart as SVG; `title` is its text for screen readers."""
        xs = [x for line in self.lines for x, _ in line.points]
        ys = [y for line in self.lines for _, y in line.points]
        x = Axis.over(xs, LEFT, WIDTH - RIGHT, self.x_log)
        y = Axis.over(ys, HEIGHT - BOTTOM, TOP, self.y_log)
        parts = [f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{escape(title)}">']
        parts += self._axes(x, y)
        if self.knee is not None:
            at = x.at(self.knee)
            parts.append(f'<path class="knee" d="M{at:.1f} {TOP}V{HEIGHT - BOTTOM}"/>')
        place = float(LEFT)
        for line in self.lines:
            parts += _drawn(line, x.at, y.at)
            dash = "– – " if line.dashed else ""
            label = f"{dash}{line.name}"
            parts.append(
                f'<text class="{line.style}" x="{place:.0f}" y="15">{escape(label)}</text>'
            )
            place += 7.5 * len(label) + 16
        return "".join([*parts, "</svg>"])

    def _axes(self, x: Axis, y: Axis) -> list[str]:
        bottom, right = HEIGHT - BOTTOM, WIDTH - RIGHT
        parts = [f'<path class="frame" d="M{LEFT} {TOP}V{bottom}H{right}"/>']
        for tick in y.ticks():
            at = y.at(tick)
            parts.append(f'<path class="grid" d="M{LEFT} {at:.1f}H{right}"/>')
            parts.append(
                f'<text x="{LEFT - 6}" y="{at + 4:.1f}" text-anchor="end">{_number(tick)}</text>'
            )
        for tick in x.ticks():
            at = x.at(tick)
            parts.append(f'<path class="grid" d="M{at:.1f} {bottom}v4"/>')
            parts.append(
                f'<text x="{at:.1f}" y="{bottom + 17}" text-anchor="middle">{_number(tick)}</text>'
            )
        middle = (LEFT + right) / 2
        parts.append(
            f'<text x="{middle:.0f}" y="{HEIGHT - 5}" text-anchor="middle">{self.x_label}</text>'
        )
        parts.append(f'<text x="{right}" y="15" text-anchor="end">{escape(self.y_label)}</text>')
        return parts


def _drawn(line: Line, x: Callable[[float], float], y: Callable[[float], float]) -> list[str]:
    places = [(x(a), y(b)) for a, b in line.points]
    circles = [
        f'<circle class="{line.style}" cx="{a:.1f}" cy="{b:.1f}" r="{1.6 if line.dots else 3}"/>'
        for a, b in (places if line.dots or line.marked else ())
    ]
    if line.dots:
        return circles
    path = " ".join(f"{a:.1f},{b:.1f}" for a, b in places)
    dash = " dash" if line.dashed else ""
    return [f'<polyline class="{line.style}{dash}" points="{path}"/>', *circles]


def _number(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"
