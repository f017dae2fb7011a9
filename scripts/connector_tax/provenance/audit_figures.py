"""The numbers under each figure (figures/*.csv) against the recomputed tables."""

from collections.abc import Callable, Iterator, Mapping, Sequence

from connector_tax.artifacts import paths
from connector_tax.files import read_json
from connector_tax.provenance.audit_study import RawStudy
from connector_tax.provenance.claims import Ledger
from connector_tax.provenance.comparison import read_csv, text_differs
from connector_tax.provenance.recompute import Row
from connector_tax.provenance.recompute_tables import Recomputed

FIGURES = (
    "fig1_ttft_vs_rate",
    "fig2_tpot_vs_rate",
    "fig3_throughput",
    "fig4_tax_bars",
    "fig5_shape_heatmap",
    "fig6_step_cdf",
    "fig7_decomposition",
    "fig8_additivity",
    "fig9_forest",
)
PARTS, STACKED, SUM = ("mooncake_both", "lmcache_only"), "multi_mooncake_lmcache", "sum of the two"
NOOP = "noop_connector"
BARS = ("ttft_p90", "tpot_p90")
BAR = (
    "config", "metric", "reference", "rate_rps", "tax", "tax_lo", "tax_hi", "aa_lo", "aa_hi",
    "n_blocks", "n_config", "n_plain", "family", "verdict", "mark", "status", "reason",
)  # fmt: skip
CURVE = ("config", "rate_rps", "value", "lo", "hi", "unit", "n", "status", "reason", "knee_rps")
# What a figure's table may not lack.
REQUIRED = {
    "fig1_ttft_vs_rate": CURVE,
    "fig2_tpot_vs_rate": CURVE,
    "fig3_throughput": CURVE,
    "fig4_tax_bars": BAR,
    "fig5_shape_heatmap": (
        "config", "cell", "rate_rps", "tax", "tax_lo", "tax_hi", "interval_includes_0", "aa_lo",
        "aa_hi", "n_config", "n_plain", "mark", "status", "reason",
    ),
    "fig6_step_cdf": ("config", "step_duration_us", "engine_step_us", "cdf", "status", "reason"),
    "fig7_decomposition": (*BAR, "framework_tax", "implementation_tax", "step_tax_us"),
    "fig8_additivity": (*BAR, "tolerance_lo", "tolerance_hi"),
    "fig9_forest": (*BAR, "prior_tax", "margin"),
}  # fmt: skip
# Where a point is drawn, not what it says.
LAYOUT = ("x_drawn_rps",)

Expected = dict[tuple[str, ...], Row]


class FigureNumbers:
    """What each figure should show, from recomputed rows."""

    def __init__(
        self, study: RawStudy, numbers: Recomputed, found: Mapping[str, list[Row]]
    ) -> None:
        self.study = study
        self.numbers = numbers
        self.pooled = {
            (row["config"], row["rate_rps"]): row
            for row in found["aggregate.csv"]
            if row["phase"] == "A" and row["block"] == "all"
        }
        self.lost = [
            (row["config"], row["rate_rps"])
            for row in found["aggregate.csv"]
            if row["phase"] == "A" and row["block"] != "all" and row["status"] != "valid"
        ]
        self.taxes = found["taxes.csv"]
        self.step_taxes = found["step_taxes.csv"]
        self.cdf = found["step_cdf.csv"]

    # ---- figures 1 to 3

    def rates(self, value: str, low: str, high: str, unit: str) -> Expected:
        """A quantity against the offered rate."""
        expected: Expected = {}
        for (config, rate), row in self.pooled.items():
            expected[config, f"{rate:g}"] = {
                "config": config,
                "rate_rps": rate,
                "value": row.get(value),
                "lo": row.get(low),
                "hi": row.get(high),
                "unit": unit,
                "n": row.get("n"),
                "status": row["status"],
                "reason": row["reason"],
                "blocks_lost": self.lost.count((config, rate)),
                "saturation_criteria": row.get("saturation_criteria"),
                "knee_rps": self.knee(config),
            }
        return expected

    def knee(self, config: str) -> str:
        """The saturation rate as the figures write it."""
        mine = {rate: row for (name, rate), row in self.pooled.items() if name == config}
        if not any(row["status"] == "valid" for row in mine.values()):
            return "–"
        knee = self.study.rates["saturation_rate_rps"].get(config)
        if knee is None:
            saturated = [rate for rate, row in mine.items() if row.get("saturated")]
            if not saturated:
                return f">{max(mine):.10g}"
            knee = min(saturated)
        return f"{knee:.10g}"

    # ---- figures of taxes

    def row_at(self, config: str, reference: str, metric: str) -> Row:
        """The Phase A tax of a configuration at a reference rate; empty where there is none."""
        wanted = (config, "A", reference, metric)
        return next(
            (
                row
                for row in self.taxes
                if (row["config"], row["phase"], row["reference"], row["metric"]) == wanted
            ),
            {},
        )

    def bar(self, config: str, reference: str, metric: str) -> Row:
        """A bar's numbers with the A/A band beside it."""
        row = self.row_at(config, reference, metric)
        valid = row.get("status") == "valid"
        names = ("tax", "tax_lo", "tax_hi")
        record: Row = {name: row.get(name) if valid else None for name in names}
        kept = (
            "rate_rps", "n_blocks", "n_config", "n_plain", "verdict", "reason", "mark", "family",
            "p_adjusted", "interval_method", "blocks_needed",
        )  # fmt: skip
        record |= {name: row.get(name) for name in kept}
        record |= {"config": config, "metric": metric, "reference": reference}
        record["status"] = row.get("status", "missing")
        record["aa_lo"], record["aa_hi"] = self.band(reference, metric)
        return record

    def band(self, reference: str, metric: str) -> tuple[float | None, float | None]:
        """The A/A band: the last plain launch's interval, or its size both ways."""
        row = next((self.row_at(n, reference, metric) for n in self.study.aa_launch("A")), {})
        if row.get("status") != "valid":
            return None, None
        if row["tax_lo"] is None or row["tax_hi"] is None:
            return -abs(row["tax"]), abs(row["tax"])
        return row["tax_lo"], row["tax_hi"]

    @property
    def connectors(self) -> list[str]:
        """Every configuration but plain."""
        return [c for c in self.study.ids if c != "plain"]

    @property
    def compared(self) -> list[str]:
        """Every configuration that is compared with plain, its own last launch among them."""
        return [*self.connectors, *self.study.aa_launch("A")]

    def fig4(self) -> Expected:
        """Taxes at both reference rates."""
        rates = self.study.rates
        both = rates["ref_load"] not in (None, rates["ref_safe"])
        references = ("ref_safe", "ref_load") if both else ("ref_safe",)
        return {
            (config, metric, reference): self.bar(config, reference, metric)
            for metric in BARS
            for reference in references
            for config in self.connectors
        }

    def fig5(self) -> Expected:
        """TTFT p90 taxes over the shapes of Phase B."""
        expected: Expected = {}
        for row in self.taxes:
            if (
                row["phase"] == "B"
                and row["metric"] == "ttft_p90"
                and row["config"] in self.compared
            ):
                record = dict(row)
                ends = [row[name] for name in ("tax_lo", "tax_hi") if row.get(name) is not None]
                record["interval_includes_0"] = ends[0] <= 0 <= ends[1] if len(ends) == 2 else None
                expected[row["config"], row["cell"]] = record
        return expected

    def fig6(self) -> Expected:
        """The distribution of the step duration."""
        expected: Expected = {
            (row["config"], repr(row["cdf"])): {**row, "status": "valid", "reason": None}
            for row in self.cdf
        }
        shown = {row["config"] for row in self.cdf}
        gates = read_json(self.study.root / paths.PREFLIGHT_STATUS)
        for config in self.study.ids:
            if config not in shown:
                skipped = config in gates and not gates[config]["include"]
                status = "skipped" if skipped else "missing"
                expected[config, ""] = {"config": config, "status": status}
        return expected

    def fig7(self) -> Expected:
        """Framework and implementation; microseconds per schedule() and per engine step."""
        expected: Expected = {}
        for metric in BARS:
            noop = self.bar(NOOP, "ref_safe", metric)["tax"]
            for config in self.connectors:
                record = self.bar(config, "ref_safe", metric)
                if noop is not None and record["tax"] is not None:
                    rest = record["tax"] - noop
                    record |= {"framework_tax": noop, "implementation_tax": rest}
                expected[config, metric] = record
        cell = self.numbers.cell_at("ref_safe")
        at_safe = {
            (row["config"], row["metric"]): row
            for row in self.step_taxes
            if (row["phase"], row["cell"]) == ("A", cell)
        }
        for tax, metric in (
            ("tax_step_p50", "step_p50"),
            ("tax_engine_step_p50", "engine_step_p50"),
        ):
            rows = {config: at_safe[config, tax] for config in self.connectors}
            if metric == "step_p50" or any(row.get("us") is not None for row in rows.values()):
                for config, row in rows.items():
                    callback = at_safe[config, "tax_callback_p50"].get("us")
                    expected[config, metric] = self._step_bar(metric, row, callback)
        return expected

    def _step_bar(self, metric: str, row: Row, callback: float | None) -> Row:
        record = self.bar(row["config"], "ref_safe", "ttft_p90") | {"metric": metric}
        record |= dict.fromkeys(("tax", "tax_lo", "tax_hi", "aa_lo", "aa_hi", "verdict"))
        if row.get("us") is None:
            return record
        record |= {"aa_lo": row.get("aa_lo_us"), "aa_hi": row.get("aa_hi_us")}
        record |= {"step_tax_us": row["us"], "step_tax_lo_us": row["lo_us"]}
        rest = None if callback is None else row["us"] - callback
        return record | {
            "step_tax_hi_us": row["hi_us"], "callback_us": callback, "unattributed_us": rest,
        }  # fmt: skip

    def fig8(self) -> Expected:
        """The parts, their sum and the stack."""
        expected: Expected = {}
        tolerance = self.study.config["hypotheses"]["h4_tolerance"]
        for metric in BARS:
            for config in (*PARTS, STACKED):
                expected[config, metric] = self.bar(config, "ref_safe", metric)
            total = self.bar(SUM, "ref_safe", metric)
            parts = [expected[config, metric] for config in PARTS]
            if all(part["tax"] is not None for part in parts):
                total |= {"status": "valid", "rate_rps": parts[0]["rate_rps"]}
                total["family"] = parts[0]["family"]
                total["mark"] = "; ".join(filter(None, (part["mark"] for part in parts)))
                for name in ("tax", "tax_lo", "tax_hi"):
                    ends = [part[name] for part in parts]
                    total[name] = None if None in ends else sum(ends)
                stack = expected[STACKED, metric]["tax"]
                if stack is not None:
                    ends = sorted(f * stack for f in (1 - tolerance, 1 + tolerance))
                    total["tolerance_lo"], total["tolerance_hi"] = ends
            expected[SUM, metric] = total
        return expected

    def fig9(self) -> Expected:
        """Every tax at ref_safe with prior and margin."""
        given = self.study.config["hypotheses"]["prior"]
        plain = given["plain_ttft_p90_s"]
        prior = {
            ("mooncake_both", "ttft_p90"): given["mooncake_both_ttft_p90_s"] / plain - 1,
            ("nixl_both", "ttft_p90"): given["nixl_ttft_p90_s"] / plain - 1,
        }
        margins = self.study.config["statistics"]["margins"]
        return {
            (config, metric): self.bar(config, "ref_safe", metric)
            | {"prior_tax": prior.get((config, metric)), "margin": margins[metric]}
            for metric in BARS
            for config in self.compared
        }

    def expected(self) -> dict[str, tuple[tuple[str, ...], Callable[[], Expected]]]:
        """Per figure: the columns that name a row, and its rows."""
        p90 = "{0}_p90_ms {0}_p90_lo_ms {0}_p90_hi_ms ms"
        bars = ("config", "metric")
        curve = ("config", "rate_rps")
        throughput = ("effective_throughput_rps", "-", "-", "requests/s")
        return {
            "fig1_ttft_vs_rate": (curve, lambda: self.rates(*p90.format("ttft").split())),
            "fig2_tpot_vs_rate": (curve, lambda: self.rates(*p90.format("tpot").split())),
            "fig3_throughput": (curve, lambda: self.rates(*throughput)),
            "fig4_tax_bars": ((*bars, "reference"), self.fig4),
            "fig5_shape_heatmap": (("config", "cell"), self.fig5),
            "fig6_step_cdf": (("config", "cdf"), self.fig6),
            "fig7_decomposition": (bars, self.fig7),
            "fig8_additivity": (bars, self.fig8),
            "fig9_forest": (bars, self.fig9),
        }

    def may_be_absent(self, name: str) -> str | None:
        """Why a figure need not be there; None if it must."""
        if name in ("fig6_step_cdf", "fig7_decomposition") and not self.study.step_timing:
            return "step timing is not available"
        number = int(name[3])
        if number in (4, 6, 7, 8, 9) and self.numbers.cell_at("ref_safe") is None:
            return "ref_safe is not a rate of Phase A"
        missing = {*PARTS, STACKED} - set(self.study.ids)
        if number == 8 and missing:
            return f"not in this study: {', '.join(sorted(missing))}"
        return None


def check_figures(
    study: RawStudy, numbers: Recomputed, found: Mapping[str, list[Row]], ledger: Ledger
) -> None:
    """A claim for the numbers under each figure."""
    figures = FigureNumbers(study, numbers, found)
    for name, (keys, expected) in figures.expected().items():
        ledger.check("figure", name, _figure(figures, name, keys, expected))


def _figure(
    figures: FigureNumbers, name: str, keys: Sequence[str], expected: Callable[[], Expected]
) -> Iterator[str]:
    for kind in ("png", "svg"):
        if not (figures.study.root / paths.FIGURES / f"{name}.{kind}").is_file():
            yield f"{name}.{kind} is missing"
    table = read_csv(figures.study.numbers / paths.FIGURES / f"{name}.csv")
    reason = figures.may_be_absent(name)
    if (list(table[0]) == ["absent_because"]) != (reason is not None):
        yield "absent without a cause" if reason is None else f"drawn, though {reason}"
        return
    if reason is not None:
        return
    if lacking := [column for column in REQUIRED[name] if column not in table[0]]:
        yield f"columns missing: {', '.join(lacking)}"
        return
    rows = expected()
    seen = [_key(row, keys) for row in table]
    for key in [k for k in rows if seen.count(k) != 1]:
        yield f"{' '.join(key)}: {seen.count(key)} rows"
    for row, key in zip(table, seen, strict=True):
        if key not in rows:
            yield f"{' '.join(key)}: no such row among the recomputed"
            continue
        for column, text in row.items():
            wrong = column not in LAYOUT and _wrong(column, text, rows[key])
            if wrong:
                yield f"{' '.join(key)}: {column}: published {text!r}, recomputed {wrong}"


def _key(row: Mapping[str, str], keys: Sequence[str]) -> tuple[str, ...]:
    return tuple(f"{float(row[k]):g}" if k == "rate_rps" and row[k] else row[k] for k in keys)


def _wrong(column: str, text: str, row: Row) -> str | None:
    """The recomputed value where a field differs from it, else None."""
    value = row.get(column)
    if column == "reason" and value is None:
        return None
    if isinstance(value, list):
        fields = text.split()
        differs = len(fields) != len(value) or any(map(text_differs, fields, value))
        return repr(value) if differs else None
    return repr(value) if text_differs(text, value) else None
