"""The numbers under each figure (figures/*.csv), by key, against the recomputed tables."""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from connector_tax.artifacts import paths
from connector_tax.files import read_json
from connector_tax.provenance.audit_study import RawStudy
from connector_tax.provenance.claims import Ledger
from connector_tax.provenance.comparison import field_differences, read_csv
from connector_tax.provenance.recompute import Row
from connector_tax.provenance.recompute_tables import STEP_TAX_COLUMNS, Recomputed

PARTS, STACKED, SUM = ("mooncake_both", "lmcache_only"), "multi_mooncake_lmcache", "sum of the two"
NOOP = "noop_connector"
BARS = ("ttft_p90", "tpot_p90")
ENDS = ("tax", "tax_lo", "tax_hi")
GAP = ("gap", "gap_lo", "gap_hi")
DRAWN_RESOURCES = (
    "idle_cpu", "cpu_s_per_1000", "memory_pss_mib", "gpu_memory_mib", "kv_blocks", "threads",
    "startup_s",
)  # fmt: skip


# Drawn of every study; the others show one of the reference rates.
WITHOUT_REFERENCE = (
    "fig1_ttft_vs_rate", "fig2_tpot_vs_rate", "fig3_throughput", "fig5_shape_heatmap",
    "fig11_tax_vs_rate",
)  # fmt: skip


@dataclass(frozen=True)
class Declared:
    """A figure's table: the columns that name a row, and what it may not lack besides."""

    keys: tuple[str, ...]
    columns: tuple[str, ...]


_CURVE = Declared(
    ("config", "rate_rps"), ("value", "lo", "hi", "unit", "n", "status", "reason", "knee_rps")
)
_LATENCY = Declared(_CURVE.keys, (*_CURVE.columns, *ENDS))
_BAR = (
    "rate_rps", *ENDS, "aa_lo", "aa_hi", "n_blocks", "n_config", "n_plain", "family", "verdict",
    "mark", "status", "reason",
)  # fmt: skip
FIGURES = {
    "fig1_ttft_vs_rate": _LATENCY,
    "fig2_tpot_vs_rate": _LATENCY,
    "fig3_throughput": _CURVE,
    "fig4_tax_bars": Declared(
        ("config", "metric", "reference"), (*_BAR, *GAP)
    ),
    "fig5_shape_heatmap": Declared(
        ("config", "cell"),
        ("rate_rps", *ENDS, "interval_includes_0", "aa_lo", "aa_hi", "n_config", "n_plain", "mark",
         "status", "reason"),
    ),
    "fig6_step_cdf": Declared(
        ("config", "cdf"), ("step_duration_us", "engine_step_us", "status", "reason")
    ),
    "fig7_decomposition": Declared(
        ("config", "metric"), (*_BAR, "framework_tax", "implementation_tax", "step_tax_us")
    ),
    "fig8_additivity": Declared(("config", "metric"), (*_BAR, "tolerance_lo", "tolerance_hi")),
    "fig9_forest": Declared(("config", "metric"), (*_BAR, "prior_tax", "margin")),
    "fig10_resources": Declared(
        ("config", "resource"),
        ("unit", "plain_mean", "difference", "difference_lo", "difference_hi", "tax", "aa_lo",
         "aa_hi", "interval_method", "n_blocks", "status", "reason"),
    ),
    "fig11_tax_vs_rate": Declared(
        ("config", "metric", "rate_rps"), (*ENDS, "verdict", "mark", "status", "reason")
    ),
}  # fmt: skip


class FigureNumbers:
    """What each figure should show, from recomputed rows."""

    def __init__(
        self, study: RawStudy, numbers: Recomputed, tables: Mapping[str, list[Row]]
    ) -> None:
        self.study = study
        self.cell = numbers.cell_at("ref_safe")
        self.tables = tables
        self.connectors = [c for c in study.ids if c != study.baseline]
        self.bars = [
            _bar(row)
            for row in tables["taxes.csv"]
            if row["phase"] == "A" and row["reference"] and row["metric"] in BARS
        ]
        self.at_safe = [bar for bar in self.bars if bar["reference"] == "ref_safe"]

    def rows(self, name: str) -> Iterable[Row]:
        """The rows of a figure."""
        ours = [bar for bar in self.at_safe if bar["config"] in self.connectors]
        rows: dict[str, Callable[[], Iterable[Row]]] = {
            "fig1_ttft_vs_rate": lambda: self._latencies("ttft_p90"),
            "fig2_tpot_vs_rate": lambda: self._latencies("tpot_p90"),
            "fig3_throughput": lambda: self._curves("effective_throughput_rps", "requests/s"),
            "fig4_tax_bars": self._both_rates,
            "fig5_shape_heatmap": self._shapes,
            "fig6_step_cdf": self._distribution,
            "fig7_decomposition": lambda: [*_parted(ours), *self._steps(ours)],
            "fig8_additivity": lambda: self._sums(ours),
            "fig9_forest": lambda: [bar | self._expectation(bar) for bar in self.at_safe],
            "fig10_resources": self._resources,
            "fig11_tax_vs_rate": lambda: [self._plotted(row) for row in self._over_rates()],
        }
        return rows[name]()

    def absent(self, name: str) -> str | None:
        """Why a figure is not there; None if it must be."""
        if name == "fig10_resources":
            return None if self._resources() else "no resource is known"
        if name in ("fig6_step_cdf", "fig7_decomposition") and not self.study.step_timing:
            return "step timing is not available"
        if name not in WITHOUT_REFERENCE and self.cell is None:
            return "ref_safe is not a rate of Phase A"
        missing = {*PARTS, STACKED} - set(self.study.ids)
        if name == "fig8_additivity" and missing:
            return f"not in this study: {', '.join(sorted(missing))}"
        return None

    def _over_rates(self) -> list[Row]:
        """The taxes of Phase A, of what is compared."""
        compared = (*self.connectors, *self.study.aa_launch("A"))
        return [
            row
            for row in self.tables["taxes.csv"]
            if row["phase"] == "A" and row["metric"] in BARS and row["config"] in compared
        ]

    def _plotted(self, row: Row) -> Row:
        return row if row["status"] == "valid" else row | dict.fromkeys(ENDS)

    def _latencies(self, metric: str) -> list[Row]:
        """A latency against the offered rate, with its tax."""
        taxes = {
            (row["config"], row["rate_rps"]): {name: row.get(name) for name in ENDS}
            for row in self._over_rates()
            if row["metric"] == metric
        }
        none = dict.fromkeys(ENDS)
        return [
            row | taxes.get((row["config"], row["rate_rps"]), none)
            for row in self._curves(f"{metric}_{{}}ms", "ms")
        ]

    def _both_rates(self) -> list[Row]:
        """The taxes at the reference rates, with the gap between the two."""
        gaps = {(r["config"], r["metric"]): r for r in self.tables["amplification.csv"]}
        return [
            bar | {name: gaps[bar["config"], bar["metric"]].get(name) for name in GAP}
            for bar in self.bars
            if bar["config"] in self.connectors
        ]

    def _curves(self, column: str, unit: str) -> list[Row]:
        """A quantity against the offered rate."""
        cells = [row for row in self.tables["aggregate.csv"] if row["phase"] == "A"]
        gone = {
            (row["configuration"], row["rate_rps"], row["block"])
            for row in cells
            if row["block"] != "all" and row["status"] != "valid"
        }
        lost = [(configuration, rate) for configuration, rate, _ in gone]
        ends = ("", "lo_", "hi_") if "{}" in column else ("",)
        return [
            {name: row.get(name) for name in ("config", "rate_rps", "n", "status", "reason",
                                              "saturation_criteria")}
            | {
                name: row.get(column.format(end))
                for name, end in zip(("value", "lo", "hi"), ends, strict=False)
            }
            | {"unit": unit, "blocks_lost": lost.count((row["config"], row["rate_rps"])),
               "knee_rps": self._knee([r for r in cells if r["config"] == row["config"]])}
            for row in cells
            if row["block"] == "all"
        ]  # fmt: skip

    def _knee(self, cells: Sequence[Row]) -> str:
        """The saturation rate of a configuration as the figures write it."""
        pooled = [row for row in cells if row["block"] == "all"]
        if not any(row["status"] == "valid" for row in pooled):
            return "–"
        knee = self.study.rates["saturation_rate_rps"].get(pooled[0]["config"])
        saturated = [row["rate_rps"] for row in pooled if row.get("saturated")]
        if knee is None and not saturated:
            return f">{max(row['rate_rps'] for row in pooled):.10g}"
        return f"{min(saturated) if knee is None else knee:.10g}"

    def _shapes(self) -> list[Row]:
        compared = (*self.connectors, *self.study.aa_launch("B"))
        return [
            row | {"interval_includes_0": None if None in (row.get("tax_lo"), row.get("tax_hi"))
                   else row["tax_lo"] <= 0 <= row["tax_hi"]}
            for row in self.tables["taxes.csv"]
            if row["phase"] == "B" and row["metric"] == "ttft_p90" and row["config"] in compared
        ]  # fmt: skip

    def _distribution(self) -> list[Row]:
        rows = [row | {"status": "valid"} for row in self.tables["step_cdf.csv"]]
        gates = read_json(self.study.root / paths.PREFLIGHT_STATUS)
        for config in dict.fromkeys(self.study.ids).keys() - {row["config"] for row in rows}:
            skipped = not gates.get(config, {"include": True})["include"]
            rows.append(
                {"config": config, "cdf": "", "status": "skipped" if skipped else "missing"}
            )
        return rows

    def _steps(self, bars: Sequence[Row]) -> Iterator[Row]:
        """Microseconds of schedule() and of the engine step, and what of them is in no callback."""
        at_safe = {
            (row["config"], row["metric"]): row
            for row in self.tables["step_taxes.csv"]
            if (row["phase"], row["cell"]) == ("A", self.cell)
        }
        mine = [bar for bar in bars if bar["metric"] == "ttft_p90"]
        for metric in ("step_p50", "engine_step_p50"):
            taxes = {c: at_safe[c, f"tax_{metric}"] for c in self.connectors}
            if metric != "step_p50" and all(row.get("us") is None for row in taxes.values()):
                continue
            for bar in mine:
                row = taxes[bar["config"]]
                us, callback = row.get("us"), at_safe[bar["config"], "tax_callback_p50"].get("us")
                known = us is not None
                yield bar | dict.fromkeys((*ENDS, "verdict")) | {
                    "metric": metric, "aa_lo": row.get("aa_lo_us") if known else None,
                    "aa_hi": row.get("aa_hi_us") if known else None, "step_tax_us": us,
                    "step_tax_lo_us": row.get("lo_us"), "step_tax_hi_us": row.get("hi_us"),
                    "callback_us": callback if known else None,
                    "unattributed_us": us - callback if known and callback is not None else None,
                }  # fmt: skip

    def _sums(self, bars: Sequence[Row]) -> Iterator[Row]:
        """The parts, their sum and the stack."""
        tolerance = self.study.config["hypotheses"]["h4_tolerance"]
        for metric in BARS:
            mine = {bar["config"]: bar for bar in bars if bar["metric"] == metric}
            parts, stack = [mine[config] for config in PARTS], mine[STACKED]
            yield from (*parts, stack)
            total: Row = {name: stack[name] for name in ("metric", "reference", "aa_lo", "aa_hi")}
            total |= {"config": SUM, "status": "missing"}
            if all(part["tax"] is not None for part in parts):
                marks = "; ".join(filter(None, (part["mark"] for part in parts)))
                total |= {"status": "valid", "mark": marks}
                total |= {name: parts[0][name] for name in ("rate_rps", "family")}
                for name in ENDS:
                    ends = [part[name] for part in parts]
                    total[name] = None if None in ends else sum(ends)
                if stack["tax"] is not None:
                    ends = sorted(f * stack["tax"] for f in (1 - tolerance, 1 + tolerance))
                    total["tolerance_lo"], total["tolerance_hi"] = ends
            yield total

    def _expectation(self, bar: Row) -> Row:
        given = self.study.config["hypotheses"]["prior"]
        priors = {
            "mooncake_both": given["mooncake_both_ttft_p90_s"],
            "nixl_both": given["nixl_ttft_p90_s"],
        }
        seconds = priors.get(bar["config"]) if bar["metric"] == "ttft_p90" else None
        prior = None if seconds is None else seconds / given["plain_ttft_p90_s"] - 1
        margin = self.study.config["statistics"]["margins"][bar["metric"]]
        return {"prior_tax": prior, "margin": margin}

    def _resources(self) -> list[Row]:
        drawn = [r for r in self.tables["resources.csv"] if r["resource"] in DRAWN_RESOURCES]
        known = {row["resource"] for row in drawn if row["status"] == "valid"}
        return [
            row | _band(row, "aa_difference", "aa_difference")
            for row in drawn
            if row["resource"] in known
        ]


def _bar(row: Row) -> Row:
    """A tax with the A/A band beside it."""
    known: Row = {} if row["status"] == "valid" else dict.fromkeys(ENDS)
    # Figure 7 has columns of these names, filled in its panels of steps only.
    return row | known | dict.fromkeys(STEP_TAX_COLUMNS) | _band(row, "aa", "aa_tax")


def _band(row: Row, ends: str, point: str) -> Row:
    """The A/A interval, or where there is none the size of its difference both ways."""
    low, high, size = (row.get(name) for name in (f"{ends}_lo", f"{ends}_hi", point))
    if low is None or high is None:
        low, high = (None, None) if size is None else (-abs(size), abs(size))
    return {"aa_lo": low, "aa_hi": high}


def _parted(bars: Sequence[Row]) -> Iterator[Row]:
    """The framework's part of a tax is the no-op connector's; the implementation has the rest."""
    noop = {bar["metric"]: bar["tax"] for bar in bars if bar["config"] == NOOP}
    for bar in bars:
        framework = noop.get(bar["metric"])
        if framework is None or bar["tax"] is None:
            yield bar
        else:
            yield bar | {"framework_tax": framework, "implementation_tax": bar["tax"] - framework}


def check_figures(
    study: RawStudy, numbers: Recomputed, tables: Mapping[str, list[Row]], ledger: Ledger
) -> None:
    """A claim for the numbers under each figure."""
    figures = FigureNumbers(study, numbers, tables)
    for name, declared in FIGURES.items():
        path = study.numbers / paths.FIGURES / f"{name}.csv"
        if study.published != study.root and not path.exists():
            ledger.not_checkable("figure", name, "published before it was made")
        else:
            ledger.check("figure", name, _figure(figures, name, declared))


def _figure(figures: FigureNumbers, name: str, declared: Declared) -> Iterator[str]:
    for kind in ("png", "svg"):
        if not (figures.study.root / paths.FIGURES / f"{name}.{kind}").is_file():
            yield f"{name}.{kind} is missing"
    table = read_csv(figures.study.numbers / paths.FIGURES / f"{name}.csv")
    reason = figures.absent(name)
    if (list(table[0]) == ["absent_because"]) != (reason is not None):
        yield "absent without a cause" if reason is None else f"drawn, though {reason}"
        return
    if reason is not None:
        return
    if lacking := [c for c in (*declared.keys, *declared.columns) if c not in table[0]]:
        yield f"columns missing: {', '.join(lacking)}"
        return
    rows = {_key(row, declared.keys): row for row in figures.rows(name)}
    seen = [_key(row, declared.keys) for row in table]
    times = Counter(seen)
    for key in [key for key in rows if times[key] != 1]:
        yield f"{' '.join(key)}: {times[key]} rows"
    for row, key in zip(table, seen, strict=True):
        if key not in rows:
            yield f"{' '.join(key)}: no such row among the recomputed"
            continue
        yield from field_differences(row, rows[key], " ".join(key))


def _key(row: Mapping[str, object], keys: Sequence[str]) -> tuple[str, ...]:
    """Rates as numbers, everything else as text."""
    return tuple(f"{float(str(row[k])):g}" if k == "rate_rps" else str(row[k]) for k in keys)
