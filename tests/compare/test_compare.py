"""Test comparisons: the error of a ratio, verdicts, incomparable studies, the page."""

import csv
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from scipy.stats import sem, ttest_ind

from connector_tax.analysis.effect import Effect
from connector_tax.artifacts.names import ALL_RATES
from connector_tax.artifacts.tables import POOLED, TAX
from connector_tax.artifacts.verdicts import (
    CANNOT_TELL,
    COSTS,
    COSTS_LESS,
    GAINS,
    GAINS_LESS,
    LESS,
    MARKED,
    TOO_FEW,
)
from connector_tax.compare.__main__ import main
from connector_tax.compare.page import look
from connector_tax.compare.rows import (
    AA,
    LATENCY,
    ComparedRow,
    Side,
    compare_rows,
    compared,
    difference,
    judged,
)
from connector_tax.compare.studies import (
    NotComparableError,
    left_out,
    refuse_unlike,
    what_differs,
)
from connector_tax.figures.resources import LOST, UNSURE
from connector_tax.figures.tables import StudyTables
from connector_tax.text import tax
from tests.analysis.tables import edit, edit_csv, select
from tests.compare.conftest import small_study


def known(point: float, error: float | None, df: float, blocks: int = 3) -> Effect:
    return Effect(point, error, df, tuple(range(blocks)))


BLANK = ComparedRow(TAX, "x", "A", "r1", 1.0, 8, 8, "ttft_p90", "fraction", "log", margin=0.03)


@given(
    st.lists(st.floats(-1, 1), min_size=2, max_size=12),
    st.lists(st.floats(-1, 1), min_size=2, max_size=12),
)
def test_difference_of_two_studies_uses_welch(a: list[float], b: list[float]) -> None:
    assume(min(np.std(a), np.std(b)) > 1e-3)
    sides = [known(float(np.mean(v)), float(sem(v)), len(v) - 1) for v in (a, b)]
    ours, welch = difference(*sides), ttest_ind(b, a, equal_var=False)
    interval = welch.confidence_interval(0.95)
    assert (ours.p, ours.df) == pytest.approx((welch.pvalue, welch.df))
    half = ours.half_width(0.95)
    assert (ours.contrast - half, ours.contrast + half) == pytest.approx(
        (interval.low, interval.high)
    )


def test_exact_values_are_compared_without_an_interval() -> None:
    exact = known(0.5, 0.0, np.inf)
    assert difference(exact, exact).p == 1
    assert difference(exact, known(0.6, 0.0, np.inf)).p == 0
    assert difference(exact, known(0.6, 0.0, np.inf)).half_width(0.95) == 0
    assert difference(exact, known(0.6, 0.1, 4)).df == pytest.approx(4)


def side(point: float, error: float | None, df: float = 10, blocks: int = 3) -> Side:
    return Side(point, None, None, known(point, error, df, blocks))


def marked(one: Side) -> Side:
    return one._replace(known=replace(one.known, mark="plain saturated"))


@pytest.mark.parametrize(
    ("b", "verdict"),
    [
        (side(0.2, 0.01), COSTS),
        (side(-0.2, 0.01), GAINS),
        (side(0.0, 0.001), LESS),
        (side(0.03, 0.02), CANNOT_TELL),
        (side(0.2, None), TOO_FEW),
        (side(0.2, 0.01, blocks=2), TOO_FEW),
        (marked(side(0.2, 0.01)), MARKED),
    ],
)
def test_verdict_and_mark_follow_from_both_studies(b: Side, verdict: str) -> None:
    (row,) = judged([(BLANK, side(0.0, 0.001), b)], 0.95)
    assert row.verdict == verdict
    assert row.effect == pytest.approx(1 + b.known.point)
    assert row.mark == (f"B: {b.mark}" if b.mark else "")


def test_configurations_of_a_cell_are_adjusted_jointly_without_the_aa_row() -> None:
    sides = side(0.0, 0.01), side(0.035, 0.01)
    gap = compared(BLANK, *sides, 0.95)
    rows = judged([(replace(BLANK, config=c), *sides) for c in ("1", "2", "3", "4", "5", AA)], 0.95)
    assert gap.p_value is not None
    assert gap.effect_lo is not None
    assert rows[0].effect_lo is not None
    assert rows[-1].effect_lo == gap.effect_lo > 1 > rows[0].effect_lo
    assert (gap.verdict, rows[0].verdict) == (COSTS, CANNOT_TELL)
    assert rows[0].p_adjusted == pytest.approx(1 - (1 - gap.p_value) ** 5)
    assert rows[-1].p_adjusted == pytest.approx(gap.p_value)


def test_injected_differences_are_recovered_and_inverted_by_swapping_studies(
    a: Path, b: Path
) -> None:
    first, second = StudyTables(a / "study.json"), StudyTables(b / "study.json")
    rows = compare_rows(first, second)
    here = [r for r in rows if (r.quantity, r.phase, r.metric) == (TAX, "A", "tpot_p90")]
    taxes = {r.config: r for r in here if r.cell != ALL_RATES}
    # Both studies have one rate: the tax over all rates equals that rate's.
    over_all = {r.config: r.effect for r in here if r.cell == ALL_RATES}
    assert over_all == pytest.approx({config: row.effect for config, row in taxes.items()})
    assert taxes["nixl_both"].verdict == GAINS
    assert taxes["lmcache_only"].verdict == COSTS
    assert taxes["nixl_both"].effect == pytest.approx(1.20 / 1.38, rel=0.03)
    assert {taxes[c].verdict for c in ("mooncake_both", AA)} <= {LESS, CANNOT_TELL}
    assert (taxes["nixl_both"].blocks_a, taxes["nixl_both"].blocks_b) == (3, 4)
    there = next(r for r in compare_rows(second, first) if r.config == "nixl_both"
                 and (r.quantity, r.phase, r.metric) == (TAX, "A", "tpot_p90"))  # fmt: skip
    assert there.effect is not None
    assert 1 / there.effect == pytest.approx(taxes["nixl_both"].effect)
    assert there.p_value == pytest.approx(taxes["nixl_both"].p_value)


def test_comparison_uses_the_degrees_of_freedom_of_each_study(a: Path, b: Path) -> None:
    studies = [StudyTables(root / "study.json") for root in (a, b)]
    where = ("nixl_both", "A", "tpot_p90")
    tables = [next(r for r in s.of(TAX) if (r.config, r.phase, r.metric) == where) for s in studies]
    row = next(r for r in compare_rows(studies[0], studies[1])
               if r.quantity == TAX and (r.config, r.phase, r.metric) == where)  # fmt: skip
    errors: Any = [(table.error, table.df) for table in tables]
    assert errors[0][1] != errors[1][1]
    whole = sum(e**2 for e, _ in errors) ** 2 / sum(e**4 / df for e, df in errors)
    assert row.error_df == pytest.approx(whole, rel=1e-6)


def test_percentile_equal_to_zero_has_no_ratio_and_a_reason(
    a: Path, b: Path, tmp_path: Path
) -> None:
    one = shutil.copytree(a, tmp_path / "one")
    zeros = dict.fromkeys(("tpot_p90_ms", "tpot_p90_lo_ms", "tpot_p90_hi_ms"), "0.0")

    def all_in_one_read(rows: list[dict[str, str]]) -> None:
        for row in select(rows, config="plain", phase="A", block=POOLED):
            row.update(zeros)

    edit_csv(one / "analysis" / "cells.csv", all_in_one_read)
    rows = compare_rows(*(StudyTables(root / "study.json") for root in (one, b)))
    (zero,) = (r for r in rows if r.config == "plain" and r.phase == "A"
               and r.quantity == LATENCY and r.metric == "tpot_p90")  # fmt: skip
    assert zero.effect is None
    assert "tpot_p90 is 0" in zero.reason


def test_constant_resources_are_compared_exactly_and_others_with_a_standard_error(
    a: Path, b: Path
) -> None:
    rows = compare_rows(*(StudyTables(root / "study.json") for root in (a, b)))
    by_name = {r.metric: r for r in rows if (r.quantity, r.config) == ("resource", "nixl_both")}
    assert (by_name["kv_blocks"].verdict, by_name["kv_blocks"].effect) == (LESS, 1.0)
    assert by_name["idle_cpu"].scale == "raw"
    assert by_name["cpu_s_per_1000"].error_df is not None
    assert by_name["gpu_memory_mib"].reason.startswith("A: the server runs in virtual time")


def test_one_block_has_no_interval_and_no_verdict(a: Path, tmp_path: Path) -> None:
    single = small_study(tmp_path / "single", blocks=1, seed=3)
    rows = compare_rows(*(StudyTables(root / "study.json") for root in (a, single)))
    taxes = [r for r in rows if r.quantity == TAX and r.effect is not None]
    assert taxes
    assert {r.effect_lo for r in taxes} == {None}
    assert {r.verdict for r in taxes} == {TOO_FEW}


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda d: d.update(emulated=False), "emulated"),
        (lambda d: d["config"]["arrivals"].update(process="poisson"), "arrival process"),
        (lambda d: d["config"]["statistics"].update(confidence=0.9), "confidence"),
        (lambda d: d["config"]["engine"].update(definition_content={"model": {"served_name": 1}}),
         "model"),
        (lambda d: d.update(configurations=d["configurations"][:1]), "no configuration in common"),
    ],
)  # fmt: skip
def test_incomparable_studies_are_refused(
    a: Path, b: Path, change: Any, reason: str, tmp_path: Path
) -> None:
    (tmp_path / "study.json").write_text((b / "study.json").read_text())
    (tmp_path / "analysis").symlink_to(b / "analysis")
    edit(tmp_path / "study.json", change)
    with pytest.raises(NotComparableError, match=reason):
        refuse_unlike(StudyTables(a / "study.json"), StudyTables(tmp_path / "study.json"))


@pytest.mark.parametrize("key", ["definition_content", "model"])
def test_study_without_a_key_of_its_engine_is_refused_in_one_line(
    a: Path, b: Path, key: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    study = shutil.copytree(b, tmp_path / "study")

    def drop(document: Any) -> None:
        engine = document["config"]["engine"]
        del (engine if key in engine else engine["definition_content"])[key]

    edit(study / "study.json", drop)
    assert main([str(a), str(study), "--out", str(tmp_path / "out")]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.endswith(f"study.json: config.engine: key '{key}' is missing")


def test_a_study_is_not_compared_with_itself(a: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(a), str(a / "study.json")]) == 2
    assert "the same study" in capsys.readouterr().err


def test_differing_settings_are_named_key_by_key(a: Path, b: Path) -> None:
    told = what_differs(*(StudyTables(root / "study.json") for root in (a, b)))
    design = told.pop("Design")
    assert "engine.definition_content.step_cost.delta_us: 400.0 -> 500.0" in design
    assert "blocks: 3 -> 4" in design
    assert list(told.values()) == [[], [], []]


@pytest.mark.parametrize(
    ("verdict", "kind"),
    [
        (COSTS_LESS, COSTS), (GAINS_LESS, GAINS), (LESS, LESS), (CANNOT_TELL, UNSURE),
        (MARKED, LOST), (TOO_FEW, LOST), ("", LOST),
    ],
)  # fmt: skip
def test_cost_below_the_margin_counts_as_a_cost(verdict: str, kind: str) -> None:
    assert look(replace(BLANK, verdict=verdict)) == kind


def test_compare_writes_a_self_contained_page(
    a: Path, b: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    assert main([str(a), str(b), "--out", str(out)]) == 0
    assert ": costs 2 (most LMCache, " in capsys.readouterr().out
    page = (out / "compare.html").read_text()
    assert "other-study" in page
    assert "EMULATED" in page
    # Configurations that cost more in B come first.
    assert page.index('class="costs"') < page.index('class="gains"') < page.index('class="less"')
    assert "http" not in page.replace("http-equiv", "").replace("http://www.w3.org", "")
    with (out / "compare.csv").open(newline="") as stream:
        table = list(csv.DictReader(stream))
    assert {row["quantity"] for row in table} == {"tax", "latency", "resource"}
    assert {(row["study_a"], row["study_b"]) for row in table} == {("synthetic", "other-study")}


def test_page_of_three_studies_compares_each_with_the_first(
    a: Path, b: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    third = shutil.copytree(b, tmp_path / "third")
    edit(third / "study.json", lambda document: document.update(study="third-study"))
    assert main([str(a), str(b), str(third), "--out", str(tmp_path / "out")]) == 0
    told = capsys.readouterr().out
    assert ", third-study against " in told
    rows = StudyTables(b / "study.json").at(ALL_RATES, "tpot_p50")
    page = (tmp_path / "out" / "compare.html").read_text()
    assert page.count(tax(*rows["nixl_both"].shown).partition(" ")[0]) >= 2
    with (tmp_path / "out" / "compare.csv").open(newline="") as stream:
        pairs = {row["study_b"] for row in csv.DictReader(stream)}
    assert pairs == {"other-study", "third-study"}


def test_taxes_over_other_rates_are_named_and_not_compared(
    a: Path, b: Path, tmp_path: Path
) -> None:
    other = shutil.copytree(b, tmp_path / "b")

    def faster(rows: list[dict[str, str]]) -> None:
        for row in select(rows, phase="A"):
            row["rate_rps"] = "25"

    edit_csv(other / "analysis" / "cells.csv", faster)
    studies = [StudyTables(root / "study.json") for root in (a, other)]
    assert ALL_RATES not in {row.cell for row in compare_rows(*studies)}
    assert any(line.startswith(ALL_RATES) for line in left_out(*studies))


def test_folder_without_tables_is_refused_with_advice(
    a: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "study.json").write_text((a / "study.json").read_text())
    assert main([str(a), str(tmp_path)]) == 2
    assert "connector-tax aggregate --study" in capsys.readouterr().err


@pytest.mark.long
def test_archives_are_compared_and_different_engines_refused(
    capsys: pytest.CaptureFixture[str],
) -> None:
    archives = [f"results/archive/{name}.tar.zst" for name in ("default", "vllm-cpu")]
    assert main(archives) == 2
    assert "emulated costs were set by hand" in capsys.readouterr().err


def test_latency_of_few_requests_is_compared_without_a_verdict(
    a: Path, b: Path, tmp_path: Path
) -> None:
    study = shutil.copytree(a, tmp_path / "study")

    def fewer(rows: list[dict[str, str]]) -> None:
        select(rows, config="plain", block="1", phase="A")[0]["n"] = "49"

    edit_csv(study / "analysis" / "cells.csv", fewer)
    rows = compare_rows(*(StudyTables(root / "study.json") for root in (study, b)))
    marks = {
        (row.phase, row.metric): (row.mark, row.verdict == MARKED)
        for row in rows
        if (row.quantity, row.config) == (LATENCY, "plain")
    }
    assert marks["A", "tpot_p90"] == ("A: few requests", True)
    assert marks["A", "tpot_p50"] == ("", False)
    assert marks["B", "tpot_p90"] == ("", False)
