"""Virtual studies on devices that treat connectors differently, and what their intervals are of."""

from pathlib import Path

import numpy as np
import pytest
from numpy.polynomial import Polynomial

from connector_tax.calibration import device_report, devices
from connector_tax.calibration.design import AA
from connector_tax.calibration.virtual import serve
from connector_tax.files import read_json


def test_a_device_adds_to_every_step_of_a_connector_and_to_none_of_plain() -> None:
    shifted, bare = devices.engines({"step_tax_60us": 500.0}), devices.engines({})
    arrivals = list(range(0, 10**9, 5 * 10**7))
    for name, more_us in (("step_tax_60us", 500.0), ("plain", 0.0), (AA, 0.0)):
        (_, last), (_, without) = (
            serve(own[name], 1, arrivals, (64, 8)) for own in (shifted, bare)
        )
        assert np.median(last - without) == pytest.approx(8 * more_us * 1000, abs=1000)


def test_the_truth_is_that_of_two_devices_or_of_all_there_could_be() -> None:
    curves = {"tpot_p90": Polynomial([0.0, 0.001, 1e-6])}
    row = {"metric": "tpot_p90", "config": "step_tax_60us", "effect_us": 40.0}
    two = device_report.truth(row | {"shifts_us": [10.0, -30.0]}, curves)
    assert two == pytest.approx(np.expm1(0.05 + 1e-6 * (70**2 + 30**2) / 2))
    many = device_report.truth(row | {"shifts_us": [10.0, -30.0, 0.0, 90.0]}, curves)
    assert many == pytest.approx(np.expm1(0.06 + 1e-6 * (60**2 + 40**2)), rel=1e-3)
    assert device_report.truth(row | {"config": AA, "shifts_us": [0.0]}, curves) == 0.0


@pytest.mark.long
def test_the_short_calibration_of_devices(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    argv = ["--studies", "2", "--truth-launches", "4", "--out", str(tmp_path)]
    assert device_report.main(argv) == 0
    assert "covered on a device" in capsys.readouterr().out
    rows = read_json(tmp_path / "devices.json")["rows"]
    assert {(r["effect_us"], r["design"]) for r in rows} == {
        (effect, design) for effect in devices.EFFECTS_US for design in devices.DESIGNS
    }
    assert all(0 <= r["model_covered"] <= 1 for r in rows)
    lone = [r for r in rows if "1 block" in r["design"]]
    assert {r["covered_on_a_device"] for r in lone} == {None}
    # 40 us of 3 ms, over half a per cent of launches.
    wide, narrow = (
        [r["half_width"] for r in rows if "4 devices" in r["design"] and r["effect_us"] == effect]
        for effect in (40.0, 0.0)
    )
    assert np.mean(wide) > np.mean(narrow)
