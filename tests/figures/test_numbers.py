"""Test each figure's numbers against the tables it was drawn from."""

import re
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
import pytest
from matplotlib.patches import Rectangle

from connector_tax.artifacts.tables import DEVICE, GAP, RESOURCE, STEP, TAX, table_text
from connector_tax.artifacts.verdicts import COSTS
from connector_tax.figures import rows, style
from connector_tax.figures.names import draw
from connector_tax.figures.resources import scores
from connector_tax.figures.tables import StudyTables, records
from connector_tax.report import answer
from connector_tax.text import number, size
from tests.analysis.tables import edit_csv, select
from tests.figures.figure_study import write_study
from tests.figures.figure_tables import Design

VOID = {
    ("lmcache_only", "A", "r4"): "error_rate 0.2 > 0.01",
    ("mooncake_both", "B", "4096x64"): "late",
}
SKIPPED = {"nixl_both": "NIXL is not installed"}


def _rows(tmp_path: Path, design: Design, name: str) -> tuple[StudyTables, list[dict[str, Any]]]:
    study = StudyTables(write_study(tmp_path / "s", design))
    return study, records(draw(study, name).table)


@pytest.mark.parametrize(
    ("name", "field"),
    [
        ("fig1_ttft_vs_rate", "ttft_p90_ms"),
        ("fig2_tpot_vs_rate", "tpot_p90_ms"),
        ("fig3_throughput", "effective_throughput_rps"),
    ],
)
def test_rate_figures_plot_the_pooled_value_of_every_cell(
    tmp_path: Path, name: str, field: str
) -> None:
    study, rows = _rows(tmp_path, Design(void=VOID, skipped=SKIPPED), name)
    pooled = {(row.config, row.cell): row for row in study.pooled}
    taxes = {(row.config, row.cell): row.estimate for row in study.of(TAX, "A")
             if f"{row.metric}_ms" == field}  # fmt: skip
    assert len(rows) == len(pooled) == 8 * 7
    for row in rows:
        cell = pooled[row["config"], f"r{row['rate_rps']:g}"]
        assert row["value"] == getattr(cell, field)
        assert (row["status"], row["reason"], row["n"]) == (cell.status, cell.reason, cell.n)
        assert (row["value"] is None) == (row["status"] != "valid")
        assert row.get("tax") == taxes.get((cell.config, cell.cell))
    drawn = _svg(tmp_path, study, "fig3_throughput")
    assert ">void<" in drawn
    assert ">skipped: NIXL is not installed<" in drawn


def test_the_knee_is_the_lowest_saturated_rate_and_stands_beside_what_fired(tmp_path: Path) -> None:
    study, rows = _rows(tmp_path, Design(rates_rps=(0.5, 1, 2, 4, 8)), "fig3_throughput")
    knees = {row["config"]: row["knee_rps"] for row in rows}
    assert knees.pop("multi_mooncake_lmcache") == "8"
    assert set(knees.values()) == {">8"}
    drawn = _svg(tmp_path, study, "fig1_ttft_vs_rate")
    assert ">saturated: TTFT<" in drawn
    said = "knee, req/s: Mooncake + LMCache 8 (TTFT); others &gt;8 95\u00a0% intervals"
    assert said in _words(drawn)


def test_tax_bars_carry_both_references_with_intervals_band_and_gap(tmp_path: Path) -> None:
    study, rows = _rows(tmp_path, Design(void=VOID, skipped=SKIPPED), "fig4_tax_bars")
    assert {(row["metric"], row["reference"]) for row in rows} == {
        (metric, reference)
        for metric in ("ttft_p90", "tpot_p90")
        for reference in ("ref_safe", "ref_load")
    }
    gaps = {(row.config, row.metric): row for row in study.of(GAP)}
    for row in rows:
        taxes = study.at(row["reference"], row["metric"])
        tax, noise, gap = taxes[row["config"]], taxes["plain_2"], gaps[row["config"], row["metric"]]
        assert (row["tax"], row["tax_lo"], row["tax_hi"]) == (tax.estimate, tax.lo, tax.hi)
        assert (row["aa_lo"], row["aa_hi"]) == (noise.lo, noise.hi)
        assert (row["gap"], row["gap_lo"], row["gap_hi"]) == (gap.estimate, gap.lo, gap.hi)
    assert "gap, pp" in _svg(tmp_path, study, "fig4_tax_bars")
    lost = {(row["config"], row["reference"]): row for row in rows if row["tax"] is None}
    assert lost["lmcache_only", "ref_safe"]["reason"] == "error_rate 0.2 > 0.01"
    assert lost["nixl_both", "ref_load"]["status"] == "skipped"


def test_one_reference_rate_gives_one_bar_per_configuration(tmp_path: Path) -> None:
    _, rows = _rows(tmp_path, Design(ref_load=4), "fig4_tax_bars")
    assert {row["reference"] for row in rows} == {"ref_safe"}
    assert len(rows) == 2 * 7


def test_heat_maps_mark_cells_whose_interval_includes_zero(tmp_path: Path) -> None:
    study, rows = _rows(tmp_path, Design(void=VOID, skipped=SKIPPED), "fig5_shape_heatmap")
    assert len(rows) == 8 * 9
    taxes = {(row.config, row.cell): row for row in study.of(TAX, "B") if row.metric == "ttft_p90"}
    for row in rows:
        tax = taxes[row["config"], row["cell"]]
        if tax.lo is None or tax.hi is None:
            assert row["interval_includes_0"] is None
            assert row["status"] in ("void", "skipped")
        else:
            assert row["interval_includes_0"] == (tax.lo <= 0 <= tax.hi)
    marked = {row["config"] for row in rows if row["interval_includes_0"]}
    assert marked == {"plain_2"}


def test_the_step_cdf_holds_every_point_and_names_who_has_none(tmp_path: Path) -> None:
    study, rows = _rows(tmp_path, Design(skipped=SKIPPED), "fig6_step_cdf")
    drawn = [(row["config"], row["step_duration_us"]) for row in rows if row["status"] == "valid"]
    assert sorted(drawn) == sorted((p.config, p.step_duration_us) for p in study.step_cdf)
    (lost,) = [row for row in rows if row["status"] != "valid"]
    assert (lost["config"], lost["status"]) == ("nixl_both", "skipped")


def _svg(folder: Path, study: StudyTables, name: str) -> str:
    style.save(draw(study, name), folder, name)
    return (folder / f"{name}.svg").read_text()


def _words(drawn: str) -> str:
    """The texts of a picture, on and back: a footer is drawn from its last line upwards."""
    texts = re.findall(r"<text[^>]*>([^<]*)</text>", drawn)
    return " ".join([*texts, *reversed(texts)])


def test_step_taxes_are_drawn_with_their_intervals_in_both_figures(tmp_path: Path) -> None:
    study, rows = _rows(tmp_path, Design(), "fig7_decomposition")
    taxes = {
        (row.config, row.item.split("/")[0]): row
        for row in study.of(STEP, "A")
        if row.reference == "ref_safe" and row.metric == "step_us"
    }
    noise = {kind: taxes.pop(("plain_2", kind)) for kind in ("decode", "prefill")}
    assert {(row["config"], row["kind"]) for row in rows} == set(taxes)
    for row in rows:
        tax, aa = taxes[row["config"], row["kind"]], noise[row["kind"]]
        assert (row["step_us"], row["step_lo_us"], row["step_hi_us"]) == (
            tax.estimate, tax.lo, tax.hi,
        )  # fmt: skip
        parts = [row[f"{part}_us"] or 0.0 for part in ("framework", "implementation", "left")]
        assert sum(parts) == pytest.approx(tax.estimate)
        assert (row["aa_lo"], row["aa_hi"]) == (aa.lo, aa.hi)
        if row["config"] == "noop_connector":
            assert parts[1:] == [0.0, 0.0]
    assert ">+630 [+570, +700]<" in _svg(tmp_path, study, "fig7_decomposition")
    curves = _svg(tmp_path, study, "fig6_step_cdf")
    assert "whole engine step (µs)" in curves
    assert ">+630 [+570, +700]<" in curves  # 1.5 times the 420 us of mooncake_both
    assert ">+12 [−8, +32]<" in curves  # plain over plain


def test_one_block_is_drawn_without_intervals(tmp_path: Path) -> None:
    study, rows = _rows(tmp_path, Design(blocks=1), "fig7_decomposition")
    assert {row["step_lo_us"] for row in rows} == {None}
    # The band is the size of the A/A point both ways.
    assert {(row["aa_lo"], row["aa_hi"]) for row in rows if row["kind"] == "decode"} == {(-12, 12)}
    assert ">+630<" in _svg(tmp_path, study, "fig6_step_cdf")


def test_without_a_connector_no_step_is_split(tmp_path: Path) -> None:
    study = StudyTables(write_study(tmp_path / "s"))
    study.unconnected.add("lmcache_only")
    drawn = draw(study, "fig7_decomposition")
    (own,) = {
        (row["framework_us"], row["implementation_us"], row["left_us"])
        for row in records(drawn.table)
        if row["config"] == "lmcache_only"
    }
    assert own == (None, None, None)
    said = [text.get_text() for text in drawn.figure.texts]
    assert f"no connector, so not split: {study.label('lmcache_only')}" in said


def test_what_is_below_zero_stands_left_of_it(tmp_path: Path) -> None:
    study_file = write_study(tmp_path / "s")

    def negative(table: list[dict[str, str]]) -> None:
        for row in select(table, config="mooncake_both", metric="left_us", item="decode/all/"):
            row["estimate"] = "-50"

    edit_csv(tmp_path / "s" / "analysis" / "effects.csv", negative)
    axes = draw(StudyTables(study_file), "fig7_decomposition").figure.axes[0]
    bars = [p for p in axes.patches if isinstance(p, Rectangle) and 0.6 < p.get_height() < 0.7]
    (left,) = [bar for bar in bars if bar.get_width() < 0]
    assert (left.get_x(), left.get_width()) == (0, -50)


def test_a_study_without_a_no_op_is_split_into_hooks_and_the_rest(tmp_path: Path) -> None:
    design = Design(skipped={"noop_connector": "gate failed"})
    study, rows = _rows(tmp_path, design, "fig7_decomposition")
    valid = [row for row in rows if row["status"] == "valid"]
    assert {row["framework_us"] for row in valid} == {None}
    assert all(row["implementation_us"] > 0 for row in valid)
    assert {row["status"] for row in rows if row["config"] == "noop_connector"} == {"skipped"}
    drawn = _svg(tmp_path, study, "fig7_decomposition")
    assert "not split into framework and implementation" in drawn


@pytest.mark.parametrize(
    ("name", "design", "said"),
    [
        ("fig6_step_cdf", Design(step_timing=False), "no step timing"),
        ("fig7_decomposition", Design(step_timing=False), "no step timing"),
        ("fig7_decomposition", Design(engine_steps=False), "no whole engine steps"),
        ("fig9_forest", Design(ref_safe=3, ref_load=3), "ref_safe, 3 req/s, is not a rate of"),
    ],
)
def test_a_picture_that_cannot_be_drawn_says_why(
    tmp_path: Path, name: str, design: Design, said: str
) -> None:
    _, rows = _rows(tmp_path, design, name)
    (row,) = rows
    assert said in row["absent_because"]


def test_the_sum_of_the_parts_has_the_conservative_interval(tmp_path: Path) -> None:
    study, rows = _rows(tmp_path, Design(), "fig8_additivity")
    taxes = study.at("ref_safe", "ttft_p90")
    parts = [taxes["mooncake_both"], taxes["lmcache_only"]]
    (total,) = [row for row in rows if row["config"] == "sum of the two"][:1]
    for field, end in (("tax", "estimate"), ("tax_lo", "lo"), ("tax_hi", "hi")):
        assert total[field] == pytest.approx(sum(getattr(part, end) for part in parts))
    whole = taxes["multi_mooncake_lmcache"].estimate
    assert whole is not None
    assert (total["tolerance_lo"], total["tolerance_hi"]) == pytest.approx(
        (0.7 * whole, 1.3 * whole)
    )


def test_no_sum_without_both_parts(tmp_path: Path) -> None:
    _, rows = _rows(tmp_path, Design(void=VOID), "fig8_additivity")
    total = [row for row in rows if row["config"] == "sum of the two"]
    assert {(row["tax"], row["status"]) for row in total} == {(None, "missing")}


def test_the_forest_shows_the_prior_beside_the_measurement(tmp_path: Path) -> None:
    _, rows = _rows(tmp_path, Design(), "fig9_forest")
    priors = {row["config"]: row["prior_tax"] for row in rows if row["prior_tax"] is not None}
    assert priors == pytest.approx(
        {"mooncake_both": 10.67 / 7.35 - 1, "nixl_both": 10.1 / 7.35 - 1}
    )
    assert {row["config"] for row in rows} >= {"plain_2", "noop_connector"}


OVERLOADED = {
    ("mooncake_both", "r4"): "mooncake_both saturated",
    ("mooncake_both", "r8"): "mooncake_both saturated",
    ("nixl_both", "4096x256"): "plain dropped 65 arrivals",
}


@pytest.mark.parametrize(
    ("name", "config", "mark"),
    [
        ("fig4_tax_bars", "mooncake_both", "mooncake_both saturated"),
        ("fig5_shape_heatmap", "nixl_both", "plain dropped 65 arrivals"),
        ("fig8_additivity", "mooncake_both", "mooncake_both saturated"),
        ("fig8_additivity", "sum of the two", "mooncake_both saturated"),
        ("fig9_forest", "mooncake_both", "mooncake_both saturated"),
    ],
)
def test_a_tax_of_survivors_carries_its_mark(
    tmp_path: Path, name: str, config: str, mark: str
) -> None:
    study, rows = _rows(tmp_path, Design(overloaded=OVERLOADED), name)
    assert {row["mark"] for row in rows if row["config"] == config} - {""} == {mark}
    assert all(row["tax"] is not None for row in rows)
    drawn = _svg(tmp_path, study, name)
    assert "saturated or dropped arrivals: no verdict" in _words(drawn)
    clean = StudyTables(write_study(tmp_path / "clean", Design()))
    assert "saturated or dropped" not in _svg(tmp_path, clean, name)


@pytest.mark.parametrize("name", ["fig4_tax_bars", "fig5_shape_heatmap", "fig8_additivity"])
def test_one_block_is_said_to_have_no_intervals(tmp_path: Path, name: str) -> None:
    study, rows = _rows(tmp_path, Design(blocks=1), name)
    assert {row["tax_lo"] for row in rows} == {None}
    drawn = _svg(tmp_path, study, name)
    assert "no intervals: one launch; launches not included" in drawn
    assert f"{'exploratory' if 'heatmap' in name else 'confirmatory'} taxes" in drawn


def test_resources_are_plotted_as_differences_with_their_noise(tmp_path: Path) -> None:
    study, rows = _rows(tmp_path, Design(skipped=SKIPPED), "fig10_resources")
    by_key = {(row["config"], row["resource"]): row for row in rows}
    table = {(row.config, row.metric): row for row in study.of(RESOURCE)}
    assert {config for config, _ in by_key} == {item.id for item in study.connectors}
    for key, row in by_key.items():
        effect = table[key]
        ends = tuple(row[f"difference{end}"] for end in ("", "_lo", "_hi"))
        assert ends == effect.difference
        assert (row["plain_mean"], row["status"]) == (effect.base, effect.status)
    idle = by_key["lmcache_only", "idle_cpu"]
    assert (idle["aa_lo"], idle["aa_hi"]) == (-1.2 * 0.004, 1.1 * 0.004)
    skipped = by_key["nixl_both", "idle_cpu"]
    assert (skipped["difference"], skipped["reason"]) == (None, SKIPPED["nixl_both"])
    drawn = _svg(tmp_path, study, "fig10_resources")
    assert ">+1,455<" in drawn
    assert ">CPU while idle, cores<" in drawn
    assert ">plain: 0.0210<" in drawn


def test_resources_that_no_launch_recorded_are_said_to_be_absent(tmp_path: Path) -> None:
    study_file = write_study(tmp_path / "s")
    path = study_file.parent / "analysis" / "effects.csv"
    missing = {
        "quantity": "resource", "config": "noop_connector", "phase": "A", "metric": "idle_cpu",
        "scale": "raw", "status": "missing", "reason": "not recorded: too old",
    }  # fmt: skip
    path.write_text(table_text(path.name, [missing]))
    picture = draw(StudyTables(study_file), "fig10_resources")
    assert picture.table.to_dict("records") == [{"absent_because": "not recorded: too old"}]


@pytest.mark.parametrize(
    ("values", "scale"),
    [([0.1, 0.4], "linear"), ([-0.5, 2.4], "function"), ([-1.9, 2.4], "linear")],
)
def test_a_scale_holds_all_taxes_and_differences_of_taxes(values: list[float], scale: str) -> None:
    """A no-op connector of +240 % beside a connector of +50 %: the difference is -190 points."""
    _, axes = plt.subplots()
    rows.tax_scale(axes, values)
    low, high = axes.get_xlim()
    assert axes.get_xscale() == scale
    assert low < min(values) <= max(values) < high
    plt.close()


def test_a_number_that_rounds_to_zero_has_no_sign() -> None:
    assert size(-0.04, -0.4, 12.0) == "0 [0, +12]"
    assert number(-0.001) == "0.00"
    assert size(0.04, -0.4, 1.2) == "0.0 [−0.4, +1.2]"


def test_the_scorecard_marks_what_takes_much_of_a_column_and_of_plain(tmp_path: Path) -> None:
    study = StudyTables(write_study(tmp_path / "s", Design()))
    named, lines = scores(study)
    marked = {name: [label for label, cells in lines if cells[k].kind == COSTS]
              for k, name in enumerate(named)}  # fmt: skip
    assert marked["idle CPU, cores"] == ["NIXL both"]
    # NIXL's 61 MiB are 3% of plain's.
    assert marked["memory, MiB"] == ["LMCache"]
    assert marked["start-up, s"] == ["LMCache"]
    assert len(marked["TTFT p50"]) == len(study.connectors)
    assert ">▲ +1,455<" in _svg(tmp_path, study, "scorecard")


def test_beside_an_emulated_device_the_scorecard_has_what_it_waits_for(tmp_path: Path) -> None:
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
    assert dict(lines)["NIXL both"][waits].said == "+132"
    assert answer.notes(study)[-1].startswith("Exposed: for how long the emulated device waits")
