"""Render the page of a run: one self-contained HTML file, with charts as inline SVG."""

from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

import numpy as np

from connector_tax.loadgen.charts import Chart, Line
from connector_tax.loadgen.generator import CellResult
from connector_tax.loadgen.latency import latencies_ms
from connector_tax.loadgen.show import check_lines, failures, headlines, notes
from connector_tax.loadgen.sweep import highest_unsaturated, verdict
from connector_tax.loadgen.table import distinct, short

Summary = Mapping[str, Any]
MOST_DOTS = 1500
"""Largest number of dots in a chart over time; for more requests, every second, third, ... is
drawn.
"""
STYLE = """
:root { color-scheme: light dark; --ink: #1b1f24; --paper: #fff; --muted: #59636e; --line: #d5dae0;
  --soft: #f4f6f8; --good: #005a41; --bad: #8f3500; --a: #0b5cad; --b: #a34700; --c: #005a41; }
@media (prefers-color-scheme: dark) { :root { --ink: #e6e9ed; --paper: #14181d; --muted: #a3adb8;
  --line: #39424c; --soft: #1d232a; --good: #7fe0be; --bad: #ffb78a; --a: #79b8ff; --b: #ffb78a;
  --c: #7fe0be; } }
* { box-sizing: border-box; }
body { margin: 0 auto; max-width: 84rem; padding: 1rem 1.2rem 4rem; color: var(--ink);
  background: var(--paper); overflow-wrap: break-word;
  font: 16px/1.5 system-ui, -apple-system, "Segoe UI", "DejaVu Sans", sans-serif; }
h1 { font-size: 1.5rem; line-height: 1.2; margin: .8rem 0 .2rem; }
h2 { font-size: 1.2rem; margin: 2.4rem 0 .6rem; padding-top: .8rem;
  border-top: 1px solid var(--line); }
p { margin: .5rem 0; max-width: 50rem; }
.headline { font-size: 1.12rem; font-weight: 600; }
.muted, figcaption { color: var(--muted); font-size: .87rem; }
.good { color: var(--good); } .bad { color: var(--bad); font-weight: 600; }
pre { background: var(--soft); padding: .6rem .8rem; overflow-x: auto; white-space: pre-wrap;
  font: .87em/1.5 ui-monospace, "DejaVu Sans Mono", monospace; }
.scroll { overflow-x: auto; max-width: 100%; }
table { border-collapse: collapse; font-size: .84rem; font-variant-numeric: tabular-nums; }
th, td { text-align: right; padding: .26rem .7rem .26rem 0; white-space: nowrap;
  border-bottom: 1px solid var(--line); }
th:first-child, td.text { text-align: left; } tbody th { font-weight: 400; }
td.text { white-space: normal; }
thead th { border-bottom: 1.5px solid var(--muted); } td small { color: var(--muted); }
.figures { display: grid; gap: 1.4rem 2rem; align-items: start;
  grid-template-columns: repeat(auto-fit, minmax(min(100%, 22rem), 1fr)); }
figure { margin: 1rem 0; min-width: 0; max-width: 34rem; } figcaption b { color: var(--ink); }
svg { display: block; width: 100%; height: auto; font-size: 12px; fill: var(--muted); }
svg .frame, svg .grid { stroke: var(--line); fill: none; }
svg .knee { stroke: var(--muted); stroke-dasharray: 4 3; }
svg .a { stroke: var(--a); } svg .b { stroke: var(--b); } svg .c { stroke: var(--c); }
svg polyline { fill: none; stroke-width: 1.8; } svg .dash { stroke-dasharray: 5 3; }
svg circle { stroke: none; } svg circle.a, svg text.a { fill: var(--a); stroke: none; }
svg circle.b, svg text.b { fill: var(--b); stroke: none; }
svg circle.c, svg text.c { fill: var(--c); stroke: none; }
@media print { :root { --ink: #000; --paper: #fff; } figure, tr { break-inside: avoid; } }
"""


def page(summaries: Sequence[Summary], results: Sequence[CellResult]) -> str:
    """Return the page of one load, or of several rates with their charts over the rate."""
    first = summaries[0]
    place = first["configuration"]["url"]
    parts = [f"<h1>Load on {escape(place)}</h1>"]
    parts += [_muted(f"{first['configuration']['model']}, {first['started_utc'][:19]} UTC")]
    if len(summaries) > 1:
        parts += [f'<p class="headline">{escape(verdict(summaries))}.</p>', _curves(summaries)]
    for summary, result in zip(summaries, results, strict=True):
        if len(summaries) > 1:
            parts.append(f"<h2>Rate {summary['configuration']['rate']:g}</h2>")
        parts += _one(summary, result)
    parts += ["<h2>Command</h2>", f"<pre>{escape(first['command'])}</pre>"]
    parts += [_muted(f"connector-tax {first['version']}; latencies begin at the due time.")]
    body = "\n".join(parts)
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>Load on {escape(place)}</title><style>{STYLE}</style></head>"
        f"<body>\n{body}\n</body></html>\n"
    )


def _one(summary: Summary, result: CellResult) -> list[str]:
    """Return the HTML parts of one load."""
    lines = [*headlines(summary), *failures(summary)]
    parts = [f"<p>{'<br>'.join(map(escape, lines))}</p>"]
    parts += [_muted(f"Note: {note}") for note in notes(summary)]
    if summary["latency_ms"]:
        parts += [_table(summary), _figures(result)]
    return [*parts, _checks(summary)]


def _muted(text: str) -> str:
    return f'<p class="muted">{escape(text)}</p>'


def _table(summary: Summary) -> str:
    """Return the table of latencies, one row each, with intervals in small print."""
    keys = [f"p{percent:g}" for percent in summary["configuration"]["percentiles"]]
    names = ["ms", "n", "mean", "std", *keys, "max"]
    rows = []
    for name, row in distinct(summary["latency_ms"]).items():
        cells = [str(row["n"]), short(row["mean"]), short(row["std"])]
        for key in keys:
            ends = row[f"{key}_interval"]
            small = f" <small>{short(ends[0])}–{short(ends[1])}</small>" if ends else ""
            cells.append(short(row[key]) + small)
        cells.append(short(row["max"]))
        tds = "".join(f"<td>{cell}</td>" for cell in cells)
        rows.append(f"<tr><th>{name}</th>{tds}</tr>")
    head = "".join(f"<th>{name}</th>" for name in names)
    return (
        f'<div class="scroll"><table><thead><tr>{head}</tr></thead>'
        f"<tbody>{''.join(rows)}</tbody></table></div>"
        + _muted("Successful requests only; small print: 95% interval of each percentile.")
    )


def _figures(result: CellResult) -> str:
    """Return charts of the latencies over time and of their distribution."""
    records = [record for record in result.records if record.measured and record.status == "ok"]
    begin_ns = result.t_warmup_end_ns
    rows = [((r.t_intended_ns - begin_ns) / 1e9, latencies_ms(r)) for r in records]
    step = -(-len(rows) // MOST_DOTS) if rows else 1
    every = f" One dot for every {step} requests." if step > 1 else ""
    figures = []
    for name, style in (("TTFT", "a"), ("TPOT", "b")):
        dots = [(at, row[name]) for at, row in rows if name in row]
        if dots:
            line = Line(name, style, dots[::step], dots=True)
            chart = Chart([line], "arrival (s)", "ms", y_log=True)
            figures.append(_figure(chart, f"{name} over time.", every))
    lines = []
    for name, style in (("TTFT", "a"), ("TPOT", "b"), ("E2E", "c")):
        values = np.sort([row[name] for _, row in rows if name in row])
        if len(values) > 1:
            shares = np.linspace(0, 100, 101)
            at = np.percentile(values, shares)
            lines.append(Line(name, style, list(zip(at.tolist(), shares.tolist(), strict=True))))
    if lines:
        chart = Chart(lines, "ms", "% of answers within", x_log=True)
        figures.append(
            _figure(chart, "Distribution.", " Share of answers that took at most this long.")
        )
    return f'<div class="figures">{"".join(figures)}</div>'


def _curves(summaries: Sequence[Summary]) -> str:
    """Return charts of latencies and throughput over the rate, with a line at the highest sustained
    rate.
    """
    rates = [summary["configuration"]["rate"] for summary in summaries]
    ms = [summary["saturation"]["ms"] for summary in summaries]
    knee = highest_unsaturated(summaries)
    figures = []
    for name, style in (("TTFT", "a"), ("TPOT", "b")):
        lines = [
            Line(
                f"p{percent}",
                style,
                [(x, row[key]) for x, row in zip(rates, ms, strict=True) if key in row],
                marked=True,
                dashed=percent == 50,
            )
            for percent in (50, 90)
            for key in (f"{name.lower()}_p{percent}",)
        ]
        lines = [line for line in lines if line.points]
        if lines:
            chart = Chart(lines, "requests/s requested", "ms", x_log=True, y_log=True, knee=knee)
            figures.append(_figure(chart, f"{name} over the rate.", ""))
    ended = [(x, s["requests_per_s"]) for x, s in zip(rates, summaries, strict=True)]
    target = Line("asked for", "b", [(x, x) for x in rates], dashed=True)
    lines = [Line("ended", "c", ended, marked=True), target]
    chart = Chart(lines, "requests/s requested", "requests/s", x_log=True, y_log=True, knee=knee)
    figures.append(_figure(chart, "Throughput over the rate.", ""))
    note = "Dashed vertical line: the highest rate that the server sustains." if knee else ""
    return f'<div class="figures">{"".join(figures)}</div>{_muted(note) if note else ""}'


def _figure(chart: Chart, title: str, text: str) -> str:
    return (
        f"<figure>{chart.svg(title)}<figcaption><b>{escape(title)}</b>{escape(text)}"
        "</figcaption></figure>"
    )


def _checks(summary: Summary) -> str:
    """Return the table of checks, failed checks first."""
    rows = []
    advice = "<br>".join(escape(line) for line in check_lines(summary)[1:])
    for check in sorted(summary["checks"], key=lambda check: bool(check["passed"])):
        value = "no data" if check["value"] is None else f"{check['value']:.4g}"
        state, word = ("good", "passed") if check["passed"] else ("bad", "FAILED")
        rows.append(
            f"<tr><th>{escape(check['name'])}</th><td>{value}</td><td>{escape(check['bound'])}</td>"
            f'<td class="{state}">{word}</td></tr>'
        )
    head = "<th>check of the load generator</th><th>value</th><th>allowed</th><th></th>"
    return (
        f'<div class="scroll"><table><thead><tr>{head}</tr></thead>'
        f"<tbody>{''.join(rows)}</tbody></table></div>"
        + (f'<p class="bad">{advice}</p>' if advice else "")
    )
