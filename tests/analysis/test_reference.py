"""Test saturation criteria and the choice of reference rates."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from connector_tax.analysis.measure import Requests
from connector_tax.analysis.reference import (
    NoReferenceRateError,
    combine,
    judge_cells,
    main,
    reference_rates,
)
from connector_tax.artifacts.folder import CellFolder
from connector_tax.artifacts.metrics import CellLoad
from connector_tax.artifacts.names import CellKey
from connector_tax.artifacts.saturation import Judgement, judge
from connector_tax.artifacts.stage_records import RatesRecord
from connector_tax.artifacts.study_file import Study
from tests.study_folder import CONFIG, DEFAULT, ONE_CONNECTOR, fail_launch, write_virtual_study

BOUNDS = DEFAULT["saturation"]
RATES = [1.0, 2.0, 4.0, 8.0]


def load(ratio: float = 1.0, waiting: float = 0.0, ttft: float = 100.0) -> CellLoad:
    """Return the load of a cell, which by default sustains its rate."""
    return CellLoad(2.0, ratio, waiting, {"ttft_p90": ttft}, [0.0, 0.0, 0.0, 0.0])


@pytest.mark.parametrize(
    ("cell", "half", "names"),
    [
        (load(), load(), ""),
        (load(ratio=0.949), load(), "throughput_ratio"),
        (load(ratio=0.95), load(), ""),
        (load(waiting=1.5), load(), "waiting"),
        (load(waiting=1.0), load(), ""),
        (load(ttft=151.0), load(), "ttft_ratio"),
        (load(ttft=150.0), load(), ""),
        (load(0.5, 9.0, 900.0), load(), "throughput_ratio;waiting;ttft_ratio"),
        (load(ttft=900.0), None, ""),
    ],
)
def test_each_saturation_criterion_fires_beyond_its_bound(
    cell: CellLoad, half: CellLoad | None, names: str
) -> None:
    judgement = judge(cell, {} if half is None else {1.0: half, 4.0: load(ttft=1e9)}, BOUNDS)
    assert judgement.names == names
    assert judgement.saturated == bool(names)


def test_criterion_is_not_applicable_without_half_the_rate_in_the_grid() -> None:
    cells = [cell_of("x", 0, rate) for rate in (1.0, 3.0)]
    loads = {cell.key: load(ttft=900.0)._replace(rate_rps=cell.rate_rps) for cell in cells}
    judged = judge_cells(study_of(["x"]), cells, loads)
    assert judged[cells[1].key].fired["ttft_ratio"] is None
    entry = combine([judged[cells[1].key]], BOUNDS)
    assert entry["ttft_ratio"] == {"value": None, "bound": 1.5, "fired": None}
    assert entry["saturated"] is False


@pytest.mark.parametrize(
    ("saturated", "expected"),
    [([True, False, False], False), ([True, True, False], True), ([True, False], True), ([], None)],
)
def test_rate_is_saturated_if_half_of_the_valid_launches_are(
    saturated: list[bool], expected: bool | None
) -> None:
    judged = [judge(load(waiting=5.0 if s else 0.0), {}, BOUNDS) for s in saturated]
    assert combine(judged, BOUNDS)["saturated"] is expected


def study_of(configs: list[str], fallback: float | None = None) -> Study:
    """Return a study document with one block of the given configurations at RATES."""
    document: Any = {
        "config": {
            "phase_a": {"rates_rps": RATES},
            "saturation": BOUNDS,
            "reference": {"fallback_rps": fallback},
        },
        "configurations": [{"id": c} for c in configs if not c.startswith("plain_")],
        "run_order": {"A": [{"config": c, "block": 0} for c in configs]},
        "cells": {"A": [{"cell": f"r{r:g}", "rate_rps": r} for r in RATES]},
    }
    return Study(Path("x"), document)


def cell_of(config: str, block: int, rate: float, reason: str | None = None) -> CellFolder:
    """Return a cell of Phase A."""
    key = CellKey(config, block, "A", f"r{rate:g}")
    return CellFolder(key, "", reason, Path(), {}, None, rate, 1, 1)


def choose(fallback: float | None = None, **marks: str) -> RatesRecord:
    """Return reference rates from a mark per rate: `.` sustained, `#` saturated, `?` not valid."""
    return rates_of({(config, 0): text for config, text in marks.items()}, fallback=fallback)


def rates_of(marks: Mapping[tuple[str, int], str], fallback: float | None = None) -> RatesRecord:
    """Return the reference rates of launches with these marks per rate (see `choose`)."""
    judgements = {".": judge(load(), {}, BOUNDS), "#": judge(load(0.5), {}, BOUNDS)}
    judged: dict[CellKey, Judgement] = {}
    cells = []
    for (config, block), text in marks.items():
        for rate, mark in zip(RATES, text, strict=True):
            cells.append(cell_of(config, block, rate, "lagged" if mark == "?" else None))
            if mark != "?":
                judged[cells[-1].key] = judgements[mark]
    configs = dict.fromkeys(config for config, _ in marks)
    return reference_rates(study_of(list(configs), fallback), cells, judged, {})


def test_ref_safe_needs_every_configuration_and_ref_load_only_plain() -> None:
    rates = choose(plain="...#", x="..##", y="...#")
    assert (rates["ref_safe"], rates["ref_load"]) == (2.0, 4.0)
    assert rates["saturation_rate_rps"] == {"plain": 8.0, "x": 4.0, "y": 8.0}
    assert not rates["left_out"]


def test_a_rate_above_a_saturated_one_never_qualifies() -> None:
    assert choose(plain="....", x=".#..")["ref_safe"] == 1.0


def test_connector_saturated_at_the_lowest_rate_does_not_lower_ref_safe() -> None:
    rates = choose(plain="...#", broken="####", gone="????")
    assert rates["ref_safe"] == 4.0
    assert rates["left_out"] == {
        "broken": "saturated at 1 req/s, its lowest valid rate",
        "gone": "no valid Phase A cell: lagged",
    }


def test_rate_without_a_valid_cell_does_not_qualify_but_higher_rates_can() -> None:
    assert choose(plain="....", x="..?#")["ref_safe"] == 2.0
    assert choose(plain="....", x=".?.#")["ref_safe"] == 4.0


def test_all_launches_of_plain_decide_the_reference_rates() -> None:
    rates = choose(plain="...#", plain_2=".###", plain_3=".###", x="...#")
    assert (rates["ref_safe"], rates["ref_load"]) == (1.0, 1.0)
    assert rates["saturation_rate_rps"] == {"plain": 2.0, "x": 8.0}
    assert rates["criteria"]["plain"]["2"]["n_launches"] == 3
    assert choose(plain="...#", plain_2=".?.#", x="...#")["ref_safe"] == 4.0


def test_error_without_a_qualifying_rate_names_the_configurations() -> None:
    with pytest.raises(NoReferenceRateError) as error:
        choose(plain="####", x="....")
    assert "plain left out: saturated at 1 req/s" in str(error.value)
    with pytest.raises(NoReferenceRateError, match="1 req/s: x without a valid cell"):
        choose(plain=".###", x="?.##")


def test_configured_fallback_rate_is_used_and_recorded() -> None:
    rates = choose(0.5, plain="####", x="....")
    assert (rates["ref_safe"], rates["ref_load"], rates["fallback_used"]) == (0.5, 0.5, True)
    assert choose(0.5, plain="..##", x="..##")["fallback_used"] is False


def test_growing_backlog_lowers_throughput_even_if_all_requests_are_served() -> None:
    n = 200
    at_s = np.arange(n) / 20

    def requests(e2e_ms: np.ndarray, failed: int = 0, dropped: int = 0) -> Requests:
        one = np.full(n, 1.0)
        return Requests(one, one, one, e2e_ms, at_s, 10.0, n + failed + dropped, failed, dropped)

    behind = requests(100 + 150 * at_s)
    assert behind.throughput_ratio == pytest.approx(10 / (10 + 0.15 * 9), rel=1e-3)
    assert behind.backlog_by_quarter_s == pytest.approx([0, 0.375, 0.75, 1.125])
    assert requests(np.full(n, 100.0)).throughput_ratio == 1.0
    dropped = requests(np.full(n, 100.0), failed=5, dropped=15)
    assert dropped.throughput_ratio == pytest.approx(n / (n + 20))
    assert dropped.error_rate == pytest.approx(5 / (n + 5))


def test_command_explains_a_missing_reference_rate_and_writes_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    study = write_virtual_study(tmp_path / "x", **ONE_CONNECTOR)
    (study.parent / "reference_rates.json").unlink()
    document = json.loads(study.read_text())
    document["config"]["saturation"]["throughput_ratio_min"] = 2.0
    study.write_text(json.dumps(document))
    assert main(["--study", str(study)]) == 2
    message = capsys.readouterr().err
    assert "no rate qualifies" in message
    assert "reference.fallback_rps" in message
    assert not (study.parent / "reference_rates.json").exists()


def test_error_for_void_plain_names_the_remeasure_command(
    tmp_path: Path,
) -> None:
    names, rates = ("plain", "plain_2"), ("r40", "r80")
    plains = {(name, 0, "A", rate): "late" for name in names for rate in rates}
    with pytest.raises(NoReferenceRateError) as error:
        write_virtual_study(tmp_path / "x", void=plains, **ONE_CONNECTOR)
    again = "--launch plain/block0/A plain_2/block0/A"
    assert f"connector-tax remeasure {tmp_path / 'x'} {again}" in str(error.value)
    assert "Add lower rates" not in str(error.value)


def test_no_rate_is_derived_while_a_launch_of_phase_a_is_failed_or_missing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    died = "a worker of the load generator died in cell r40"
    study = write_virtual_study(tmp_path / "x", **ONE_CONNECTOR)
    fail_launch(tmp_path / "x/runs/nixl_both/block0/A", died)
    rates = study.parent / "reference_rates.json"
    rates.unlink()
    assert main(["--study", str(study)]) == 2
    message = capsys.readouterr().err
    assert f"nixl_both/block0/A: {died}" in message
    assert "The same command measures their missing cells first" in message
    index = study.parent / "runs" / "nixl_both" / "block0" / "A" / "index.json"
    index.rename(index.with_name("index.failed.json"))
    assert main(["--study", str(study)]) == 2
    assert "nixl_both/block0/A: not measured yet" in capsys.readouterr().err
    assert not rates.exists()


def test_reference_rates_of_several_blocks_skip_a_void_cell(tmp_path: Path) -> None:
    sweep = CONFIG["phase_a"] | {"rates_rps": [40.0, 80.0, 160.0]}
    void = {("plain", 1, "A", "r80"): "late"}
    study = write_virtual_study(
        tmp_path / "x", blocks=3, void=void, **ONE_CONNECTOR | {"phase_a": sweep}
    )
    entry = json.loads((study.parent / "reference_rates.json").read_text())["criteria"]["plain"]
    assert [entry[rate]["n_launches"] for rate in ("40", "80")] == [6, 5]
    assert entry["160"]["saturated"] is True
    assert len(entry["160"]["backlog_growth"]) == 4
    # Of 160 requests/s, plain serves about 100: one second of arrivals takes 1.6 s.
    assert entry["160"]["backlog_growth"][3] > 0.3
