"""Test each figure's drawn numbers against its tables."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
import numpy as np
import pytest
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.text import Text

from connector_tax.artifacts.tables import (
    DEVICE,
    GAP,
    RESOURCE,
    STEP,
    TAX,
    EffectRow,
    table_text,
)
from connector_tax.artifacts.verdicts import COSTS
from connector_tax.figures import rows, style
from connector_tax.figures.names import draw
from connector_tax.figures.resources import KV_CAPACITY, LOST, NONE, scores
from connector_tax.figures.tables import StudyTables
from connector_tax.report import answer
from connector_tax.text import number, size
from tests.analysis.tables import edit_csv, select
from tests.figures.conftest import TablesOf
from tests.figures.figure_study import write_study
from tests.figures.figure_tables import Design

VOID = {
    ("lmcache_only", "A", "r4"): "error_rate 0.2 > 0.01",
    ("mooncake_both", "B", "4096x64"): "late",
}
SKIPPED = {"nixl_both": "NIXL is not installed"}


def _drawn(tables_of: TablesOf, design: Design, name: str) -> tuple[StudyTables, Figure]:
    study = tables_of(design)
    return study, draw(study, name).figure


def _bars(axes: Axes) -> list[tuple[float, float]]:
    """Return the line and the width of each bar, in the order of drawing."""
    bars = [bar for container in axes.containers for bar in container]
    return [(round(bar.get_y() + bar.get_height() / 2), bar.get_width()) for bar in bars]


def _lines(axes: Axes) -> list[Any]:
    return list(axes.lines)


def _intervals(axes: Axes) -> list[tuple[float, ...]]:
    """Return the ends of each interval, in the order of drawing."""
    return [tuple(line.get_xdata()) for line in _lines(axes) if line.get_marker() == "|"]


def _ends(effects: Iterable[EffectRow]) -> list[tuple[float | None, float | None]]:
    return [(row.lo, row.hi) for row in effects if row.lo is not None]


def _band(axes: Axes) -> tuple[float, float]:
    """Return the ends of the A/A band."""
    (band,) = (patch.get_extents() for patch in axes.patches if patch.get_zorder() == 0.5)
    left, right = axes.transData.inverted().transform([band.min, band.max])
    return left[0], right[0]


def _texts(figure: Figure | Axes) -> list[str]:
    found = (artist for artist in figure.findobj() if isinstance(artist, Text))
    return [artist.get_text() for artist in found if artist.get_text()]


@pytest.mark.parametrize(
    ("name", "field"),
    [
        ("fig1_ttft_vs_rate", "ttft_p90_ms"),
        ("fig2_tpot_vs_rate", "tpot_p90_ms"),
        ("fig3_throughput", "effective_throughput_rps"),
    ],
)
def test_rate_figures_plot_the_pooled_value_of_each_cell(
    tables_of: TablesOf, tmp_path: Path, name: str, field: str
) -> None:
    study, figure = _drawn(tables_of, Design(void=VOID, skipped=SKIPPED), name)
    rates = study.settings["phase_a"]["rates_rps"]
    pooled = {(row.config, row.cell): getattr(row, field) for row in study.pooled}
    taxes = {(row.config, row.cell): row.estimate for row in study.of(TAX, "A")
             if f"{row.metric}_ms" == field}  # fmt: skip
    shown = study.configurations if name == "fig3_throughput" else study.launched
    for axes, values in zip(figure.axes, (pooled, taxes) if taxes else (pooled,), strict=False):
        curves = [line for line in _lines(axes) if len(line.get_xdata()) == len(rates)]
        for item, curve in zip(shown, curves, strict=True):
            wanted = [values.get((item.id, f"r{rate:g}")) for rate in rates]
            np.testing.assert_array_equal(curve.get_ydata(), np.array(wanted, dtype=float))
    drawn = _svg(tmp_path, study, "fig3_throughput")
    assert ">void<" in drawn
    assert ">skipped: NIXL is not installed<" in drawn


def test_knee_is_the_lowest_saturated_rate_with_its_criteria(tables_of: TablesOf) -> None:
    design = Design(rates_rps=(0.5, 1, 2, 4, 8))
    study, figure = _drawn(tables_of, design, "fig3_throughput")
    beside = [text.get_text() for text in figure.axes[2].texts if text.get_text() in ("8", ">8")]
    stack = [item.id for item in study.configurations].index("multi_mooncake_lmcache")
    assert [place for place, knee in enumerate(beside) if knee == "8"] == [stack]
    assert len(beside) == len(study.configurations)
    words = _words(draw(study, "fig1_ttft_vs_rate").figure)
    assert "saturated: TTFT" in words
    assert "knee, req/s: Mooncake + LMCache 8; others >8; 95\u00a0% intervals" in words


def test_tax_bars_show_both_references_with_intervals_band_and_gap(tables_of: TablesOf) -> None:
    study, figure = _drawn(tables_of, Design(void=VOID, skipped=SKIPPED), "fig4_tax_bars")
    gaps = {(row.config, row.metric): row for row in study.of(GAP)}
    for axes, metric in zip(figure.axes, ("ttft_p90", "tpot_p90"), strict=True):
        taxes = [
            study.at(reference, metric)[item.id]
            for reference in ("ref_safe", "ref_load")
            for item in study.connectors
        ]
        widths = [row.estimate for row in taxes if row.estimate is not None]
        assert [width for _, width in _bars(axes)] == widths
        assert _intervals(axes) == _ends(taxes)
        noise = study.at("ref_safe", metric)["plain_2"]
        assert _band(axes) == pytest.approx((noise.lo, noise.hi))
        gap = gaps["mooncake_both", metric]
        ends = (100 * value for value in (gap.estimate, gap.lo, gap.hi) if value is not None)
        assert size(*ends) in _texts(axes)
    texts = " ".join(_texts(figure))
    assert "gap, pp" in texts
    assert "void: error_rate" in texts
    assert "skipped: NIXL" in texts


def test_tax_bars_have_one_bar_per_configuration_with_one_reference_rate(
    tables_of: TablesOf,
) -> None:
    _, figure = _drawn(tables_of, Design(ref_load=4), "fig4_tax_bars")
    assert [line for line, _ in _bars(figure.axes[0])] == [*range(7)]


def test_heat_maps_mark_cells_whose_interval_includes_zero(tables_of: TablesOf) -> None:
    study, figure = _drawn(tables_of, Design(void=VOID, skipped=SKIPPED), "fig5_shape_heatmap")
    taxes = {(row.config, row.cell): row for row in study.of(TAX, "B") if row.metric == "ttft_p90"}
    maps = [axes for axes in figure.axes if axes.get_title(loc="left")]
    assert len(maps) == len(study.compared) == 8
    for axes, item in zip(maps, study.compared, strict=True):
        own = [taxes[item.id, f"{i}x{o}"].estimate for i in (32768, 4096, 512)
               for o in (64, 256, 1024)]  # fmt: skip
        drawn: Any = axes.collections[0].get_array()
        values = np.ma.filled(drawn.astype(float), np.nan).ravel()
        np.testing.assert_array_equal(values, np.array(own, dtype=float))
        marked = [text for text in _texts(axes) if "○" in text]
        assert len(marked) == (9 if item.id == study.aa else 0)


def test_step_cdf_plots_every_point_and_names_configurations_without_steps(
    tables_of: TablesOf,
) -> None:
    study, figure = _drawn(tables_of, Design(skipped=SKIPPED), "fig6_step_cdf")
    for item, curve in zip(study.configurations, figure.axes[0].lines, strict=False):
        own = sorted(p.step_duration_us for p in study.step_cdf if p.config == item.id)
        drawn = np.asarray(curve.get_xdata(), dtype=float)
        assert list(drawn[~np.isnan(drawn)]) == own
    assert _texts(figure.axes[1]).count("skipped") == 1


def _svg(folder: Path, study: StudyTables, name: str) -> str:
    style.save(draw(study, name), folder, name)
    return (folder / f"{name}.svg").read_text()


def _words(figure: Figure) -> str:
    """Return a figure's texts in both orders: a footer is drawn from its last line up."""
    texts = _texts(figure)
    return " ".join([*texts, *reversed(texts)])


def _steps(study: StudyTables, kind: str) -> dict[str, EffectRow]:
    found = study.of(STEP, "A")
    return {row.config: row for row in found if row.item == f"{kind}/all/"
            and (row.reference, row.metric) == ("ref_safe", "step_us")}  # fmt: skip


def test_step_taxes_are_drawn_with_their_intervals_in_both_figures(
    tables_of: TablesOf, tmp_path: Path
) -> None:
    study, figure = _drawn(tables_of, Design(), "fig7_decomposition")
    assert [axes.get_title(loc="left") for axes in figure.axes] == ["decode step", "prefill step"]
    for axes, kind in zip(figure.axes, ("decode", "prefill"), strict=True):
        taxes, bars = _steps(study, kind), _bars(axes)
        for y, item in enumerate(study.connectors):
            parts = [width for line, width in bars if line == y]
            assert sum(parts) == pytest.approx(taxes[item.id].estimate)
            assert (len(parts) == 1) == (item.id == "noop_connector")
        assert _intervals(axes) == _ends(taxes[item.id] for item in study.connectors)
        assert _band(axes) == pytest.approx((taxes["plain_2"].lo, taxes["plain_2"].hi))
    assert ">+630 [+570, +700]<" in _svg(tmp_path, study, "fig7_decomposition")
    curves = _svg(tmp_path, study, "fig6_step_cdf")
    assert "whole engine step (µs)" in curves
    assert ">+630 [+570, +700]<" in curves  # 1.5 times the 420 us of mooncake_both
    assert ">+12 [−8, +32]<" in curves  # plain over plain


def test_one_block_is_drawn_without_intervals(tables_of: TablesOf, tmp_path: Path) -> None:
    study, figure = _drawn(tables_of, Design(blocks=1), "fig7_decomposition")
    assert _intervals(figure.axes[0]) == []
    # The band is the size of the A/A point both ways.
    assert _band(figure.axes[0]) == pytest.approx((-12, 12))
    assert ">+630<" in _svg(tmp_path, study, "fig6_step_cdf")


def test_step_is_not_split_if_no_hook_is_called(tmp_path: Path) -> None:
    study_file = write_study(tmp_path / "s")

    def without_hooks(table: list[dict[str, str]]) -> None:
        for row in select(table, config="lmcache_only", metric="hooks_us"):
            row["estimate"] = "0.0"

    edit_csv(tmp_path / "s" / "analysis" / "effects.csv", without_hooks)
    study = StudyTables(study_file)
    figure = draw(study, "fig7_decomposition").figure
    own = [item.id for item in study.connectors].index("lmcache_only")
    assert own not in {line for line, _ in _bars(figure.axes[0])}
    assert f"not split, since no hook was called: {study.label('lmcache_only')}" in _texts(figure)


def test_negative_parts_are_drawn_left_of_zero(tmp_path: Path) -> None:
    study_file = write_study(tmp_path / "s")

    def negative(table: list[dict[str, str]]) -> None:
        for row in select(table, config="mooncake_both", metric="left_us", item="decode/all/"):
            row["estimate"] = "-50"

    edit_csv(tmp_path / "s" / "analysis" / "effects.csv", negative)
    axes = draw(StudyTables(study_file), "fig7_decomposition").figure.axes[0]
    (left,) = [bar for container in axes.containers for bar in container if bar.get_width() < 0]
    assert (left.get_x(), left.get_width()) == (0, -50)


def test_step_without_a_no_op_is_split_into_hooks_and_rest(tables_of: TablesOf) -> None:
    design = Design(skipped={"noop_connector": "gate failed"})
    study, figure = _drawn(tables_of, design, "fig7_decomposition")
    lines = [line for line, _ in _bars(figure.axes[0])]
    noop = [item.id for item in study.connectors].index("noop_connector")
    others = {*range(len(study.connectors))} - {noop}
    assert sorted(lines) == sorted([*others, *others])  # the hooks and the rest
    texts = " ".join(_texts(figure))
    assert "skipped" in texts
    assert "not split into framework and implementation" in texts


@pytest.mark.parametrize(
    ("name", "design", "reason"),
    [
        ("fig6_step_cdf", Design(step_timing=False), "no step timing"),
        ("fig7_decomposition", Design(step_timing=False), "no step timing"),
        ("fig7_decomposition", Design(engine_steps=False), "no whole engine steps"),
        ("fig9_forest", Design(ref_safe=3, ref_load=3), "ref_safe, 3 req/s, is not a rate of"),
    ],
)
def test_figure_without_data_gives_a_reason(
    tables_of: TablesOf, tmp_path: Path, name: str, design: Design, reason: str
) -> None:
    study = tables_of(design)
    assert reason in style.absent_because(_svg(tmp_path, study, name).encode())


def test_the_sum_of_the_parts_has_the_conservative_interval(tables_of: TablesOf) -> None:
    study, figure = _drawn(tables_of, Design(), "fig8_additivity")
    taxes, axes = study.at("ref_safe", "ttft_p90"), figure.axes[0]
    parts = [taxes["mooncake_both"], taxes["lmcache_only"]]
    both = sum(width for line, width in _bars(axes) if line == 2)
    assert both == pytest.approx(sum(part.estimate or 0 for part in parts))
    ends = [sum(getattr(part, end) for part in parts) for end in ("lo", "hi")]
    assert _intervals(axes)[2] == pytest.approx(ends)
    whole = taxes["multi_mooncake_lmcache"].estimate
    assert whole is not None
    dotted = [line.get_xdata()[0] for line in _lines(axes) if line.get_zorder() == 4.5]
    assert dotted == pytest.approx([0.7 * whole, 1.3 * whole])


def test_sum_is_absent_without_both_parts(tables_of: TablesOf) -> None:
    _, figure = _drawn(tables_of, Design(void=VOID), "fig8_additivity")
    assert "missing: a part has no" in " ".join(_texts(figure.axes[0]))


def test_forest_plot_shows_prior_and_measurement(tables_of: TablesOf) -> None:
    study, figure = _drawn(tables_of, Design(), "fig9_forest")
    priors = {
        study.compared[line.get_ydata()[0]].id: line.get_xdata()[0]
        for axes in figure.axes
        for line in _lines(axes)
        if line.get_marker() == "D" and line.get_markerfacecolor() == "white"
        and line.get_markersize() == 4
    }  # fmt: skip
    assert priors == pytest.approx(
        {"mooncake_both": 10.67 / 7.35 - 1, "nixl_both": 10.1 / 7.35 - 1}
    )
    taxes = study.at("ref_safe", "ttft_p90")
    assert _intervals(figure.axes[0]) == _ends(taxes[item.id] for item in study.compared)


OVERLOADED = {
    ("mooncake_both", "r4"): "mooncake_both saturated",
    ("mooncake_both", "r8"): "mooncake_both saturated",
    ("nixl_both", "4096x256"): "plain dropped 65 arrivals",
}


@pytest.mark.parametrize(
    ("name", "count"),
    # Two metrics, at one rate or two; the stack's sum has a marked part.
    [("fig4_tax_bars", 4), ("fig5_shape_heatmap", 1), ("fig8_additivity", 4), ("fig9_forest", 2)],
)
def test_tax_of_an_overloaded_cell_is_marked_in_figures(
    tables_of: TablesOf, name: str, count: int
) -> None:
    _, figure = _drawn(tables_of, Design(overloaded=OVERLOADED), name)
    sizes = [line.get_markersize() for axes in figure.axes for line in axes.lines]
    circled = [text for axes in figure.axes for text in axes.texts if "▽" in text.get_text()]
    assert sizes.count(rows.OVERLOAD["ms"]) + len(circled) == count
    assert "marked: no verdict" in _words(figure)
    _, clean = _drawn(tables_of, Design(), name)
    assert "marked: no verdict" not in _words(clean)


@pytest.mark.parametrize("name", ["fig4_tax_bars", "fig5_shape_heatmap", "fig8_additivity"])
def test_figures_of_one_block_state_that_intervals_are_missing(
    tables_of: TablesOf, name: str
) -> None:
    _, figure = _drawn(tables_of, Design(blocks=1), name)
    assert [end for axes in figure.axes for end in _intervals(axes)] == []
    words = _words(figure)
    assert "no intervals: one launch; launches not included" in words
    assert f"; {'exploratory' if 'heatmap' in name else 'confirmatory'}; n = " in words


def test_resources_are_plotted_as_differences_with_their_noise(tables_of: TablesOf) -> None:
    study, figure = _drawn(tables_of, Design(skipped=SKIPPED), "fig10_resources")
    table = {(row.config, row.metric): row for row in study.of(RESOURCE)}
    axes = figure.axes[0]
    assert axes.get_title(loc="left") == "CPU while idle, cores\nplain: 0.0210"
    launched = [table[item.id, "idle_cpu"] for item in study.connectors]
    wanted = [row.difference[1:] for row in launched if row.difference[0] is not None]
    assert _intervals(axes) == wanted
    assert _band(axes) == pytest.approx((-1.2 * 0.004, 1.1 * 0.004))
    texts = [text for axes in figure.axes for text in _texts(axes)]
    assert "+1,455" in texts
    assert "missing" in texts


def test_resources_without_records_are_reported_as_absent(tmp_path: Path) -> None:
    study_file = write_study(tmp_path / "s")
    path = study_file.parent / "analysis" / "effects.csv"
    missing = {
        "quantity": "resource", "config": "noop_connector", "phase": "A", "metric": "idle_cpu",
        "scale": "raw", "status": "missing", "reason": "not recorded: too old",
    }  # fmt: skip
    path.write_text(table_text(path.name, [missing]))
    picture = draw(StudyTables(study_file), "fig10_resources")
    assert picture.absent_because == "not recorded: too old"


@pytest.mark.parametrize(
    ("values", "scale"),
    [([0.1, 0.4], "linear"), ([-0.5, 2.4], "function"), ([-1.9, 2.4], "linear")],
)
def test_tax_scale_contains_all_taxes_and_differences(values: list[float], scale: str) -> None:
    """Draw a no-op connector of +240 % and another of +50 %, whose difference is -190 points."""
    _, axes = plt.subplots()
    rows.tax_scale(axes, values)
    low, high = axes.get_xlim()
    assert axes.get_xscale() == scale
    assert low < min(values) <= max(values) < high
    plt.close()


def test_number_that_rounds_to_zero_has_no_sign() -> None:
    assert size(-0.04, -0.4, 12.0) == "0 [0, +12]"
    assert number(-0.001) == "0.00"
    assert size(0.04, -0.4, 1.2) == "0.0 [−0.4, +1.2]"


def test_scorecard_marks_values_that_are_large_compared_with_plain(
    tables_of: TablesOf, tmp_path: Path
) -> None:
    study = tables_of(Design())
    named, lines = scores(study)
    marked = {name: [label for label, cells in lines if cells[k].kind == COSTS]
              for k, name in enumerate(named)}  # fmt: skip
    assert marked["idle CPU, cores"] == ["NIXL both"]
    # NIXL's 61 MiB are 3% of plain's.
    assert marked["memory, MiB"] == ["LMCache"]
    assert marked["start-up, s"] == ["LMCache"]
    assert len(marked["TTFT p50"]) == len(study.connectors)
    assert ">▲ +1,455<" in _svg(tmp_path, study, "scorecard")


def test_scorecard_marks_a_lower_kv_block_count_and_shows_how_many_longest_requests_fit(
    tmp_path: Path,
) -> None:
    study = StudyTables(write_study(tmp_path / "s", Design()))

    def capacities() -> dict[str, tuple[str, str]]:
        named, lines = scores(StudyTables(study.root / "study.json"))
        at = named.index(KV_CAPACITY)
        return {label: (" ".join(cells[at].words), cells[at].kind) for label, cells in lines}

    assert capacities()["Mooncake both"] == (" ▲ (60,416)", COSTS)
    assert capacities()["NIXL both"] == (" (65,536)", NONE)

    def resolved(rows: list[dict[str, str]]) -> None:
        own = {"config": "nixl_both", "setting": "max_model_len", "value": "131072"}
        rows.append(dict.fromkeys(rows[0], "") | own)

    def tokens(rows: list[dict[str, str]]) -> None:
        blocks = next(r for r in rows if r["metric"] == "kv_blocks" and r["config"] == "nixl_both")
        level = {"own": "436906.67", "base": "776000", "estimate": "-0.437", "lo": "", "hi": ""}
        rows.append(blocks | {"metric": "kv_tokens"} | level)
        rows[:] = [r for r in rows if (r["metric"], r["config"]) != ("kv_blocks", "mooncake_both")]

    edit_csv(study.root / "analysis" / "engine.csv", resolved)
    edit_csv(study.root / "analysis" / "effects.csv", tokens)
    assert capacities()["NIXL both"] == ("▲ 3.33 (65,536)", COSTS)
    assert capacities()["Mooncake both"] == ("not recorded", LOST)

    def nowhere(rows: list[dict[str, str]]) -> None:
        rows[:] = [row for row in rows if not row["metric"].startswith("kv_")]

    edit_csv(study.root / "analysis" / "effects.csv", nowhere)
    unknown = StudyTables(study.root / "study.json")
    assert KV_CAPACITY in scores(unknown)[0]
    commands: Any = unknown.settings["engine"]
    commands["commands"] = {"plain": "serve {port}"}
    assert KV_CAPACITY not in scores(unknown)[0], "servers of a comparison that record none"


def test_scorecard_of_an_emulated_device_has_exposed_time(tmp_path: Path) -> None:
    study = StudyTables(write_study(tmp_path / "s", Design()))

    def waited(rows: list[dict[str, str]]) -> None:
        blank = dict.fromkeys(rows[0], "") | {"quantity": DEVICE, "phase": "A", "status": "valid"}
        for rate, item, us in ((8, "decode/all/", 2), (1, "decode/all/", 132), (1, "decode/1/", 9)):
            own = {"rate_rps": f"{rate}", "item": item, "estimate": f"{us}", "scale": "raw"}
            rows.append(blank | own | {"config": "nixl_both", "metric": "over_plain_us"})

    edit_csv(study.root / "analysis" / "effects.csv", waited)
    named, lines = scores(StudyTables(study.root / "study.json"))
    waits = named.index("decode, µs exposed, at 1/s")
    assert "µs/step" not in " ".join(named)
    assert dict(lines)["NIXL both"][waits].size == "+132"
    assert answer.notes(study)[-1].startswith("Exposed: for how long the emulated device waits")
