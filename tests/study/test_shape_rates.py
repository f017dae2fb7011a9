"""Test shape rates: probed on plain, equal for all configurations, refused for another design."""

import json
from pathlib import Path
from typing import Any

import pytest

from connector_tax.artifacts import paths
from connector_tax.artifacts.folder import StudyFolder
from connector_tax.artifacts.names import Launch
from connector_tax.artifacts.study_file import cell_rates, shape_limits
from connector_tax.artifacts.study_records import StudyDocument
from connector_tax.files import ArtifactError, read_json, write_json
from connector_tax.rehearsal.launch import rehearse_launch
from connector_tax.rehearsal.machine import machine_of
from connector_tax.rehearsal.study import rehearse_shapes
from connector_tax.study import launch, shape_rates
from connector_tax.study.shape_rates import ShapeRateError, fastest_burst, shape_rates_content
from tests.study.driving import arguments

REFERENCE = {"ref_safe": 1000.0, "ref_load": 1000.0, "rates_rps": [], "criteria": {},
             "saturation_rate_rps": {}, "left_out": {}, "fallback_used": False}  # fmt: skip


@pytest.fixture
def study_file(study_file: Path) -> Path:
    study = read_json(study_file)
    study["config"]["shape_rates"] = {"max_share": 0.5, "probe_s": 0.5}
    write_json(study_file, study)
    write_json(study_file.parent / paths.REFERENCE_RATES, REFERENCE)
    return study_file


def probed(study: StudyDocument, root: Path, completed_s: list[float]) -> None:
    content = shape_rates_content(study, {"32x8": completed_s})
    write_json(root / paths.SHAPE_RATES, content)


def test_shape_rate_is_at_most_reference_rate_and_share_of_throughput(study_file: Path) -> None:
    study, root = read_json(study_file), study_file.parent
    with pytest.raises(ArtifactError, match=r"shape_rates\.json"):
        shape_limits(study, root, "B")
    assert shape_limits(study, root, "A") == {}  # plain is probed after Phase A
    # Ten completed in two seconds, half of which is offered.
    probed(study, root, [0.2 * (n + 1) for n in range(10)])
    limits = shape_limits(study, root, "B")
    assert cell_rates(study, "B", 4.0, limits) == {"32x8": 2.5}
    assert cell_rates(study, "B", 2.0, limits) == {"32x8": 2.0}
    assert cell_rates(study, "B", None, limits) == {"32x8": None}
    assert cell_rates(study, "A", None, limits) == {"r20": 20.0, "r40": 40.0}
    with pytest.raises(ArtifactError, match="for another design"):
        shape_limits(study | {"design_sha256": "1" * 64}, root, "B")
    del study["config"]["shape_rates"]
    assert cell_rates(study, "B", 4.0, shape_limits(study, root, "B")) == {"32x8": 4.0}


def test_shape_without_any_served_request_is_an_error(study_file: Path) -> None:
    with pytest.raises(ShapeRateError, match="completed no request of 32x8 in 10 s"):
        shape_rates_content(read_json(study_file), {"32x8": []})


def test_bursts_grow_until_one_takes_the_probe_time_and_the_fastest_counts() -> None:
    config: Any = {"cell": {"inflight_cap": 100}, "shape_rates": {"probe_s": 40}}
    sent: list[int] = []

    def served_in(seconds: dict[int, float]) -> list[float]:
        def burst(count: int) -> list[float]:
            sent.append(count)
            return [seconds[count]] * count

        sent.clear()
        return fastest_burst(config, burst)

    # 0.5, 2, 4 and 3 a second: the cap ends it.
    assert len(served_in({4: 8.0, 16: 8.0, 64: 9.0, 100: 33.0})) == 64
    assert sent == [4, 16, 64, 100]
    assert len(served_in({4: 9.0, 16: 11.0})) == 16
    assert sent == [4, 16]
    assert fastest_burst(config, lambda _count: []) == []


def test_rehearsed_shape_rate_is_used_and_refused_after_a_new_probe(
    study_file: Path,
) -> None:
    study, root = read_json(study_file), study_file.parent
    machine = machine_of(study)
    completed_s, took_s = rehearse_shapes(study, machine)
    assert len(completed_s["32x8"]) in (4, 16, 64)
    assert max(completed_s["32x8"]) <= took_s < 1.0
    probed(study, root, completed_s["32x8"])
    rehearse_launch(study, Launch("plain", 0, "B"), root, machine)
    served = len(completed_s["32x8"]) / max(completed_s["32x8"])
    cells = StudyFolder.load(study_file).cells("B", 1000.0)
    (cell,) = (cell for cell in cells if cell.key.config == "plain")
    assert cell.rate_rps == pytest.approx(served / 2, rel=0.01)
    assert cell.status == "valid"
    # After a new probe the cell's rate is outdated.
    probed(study, root, [1.0])
    with pytest.raises(ArtifactError, match=r"the rate of this cell is now 0\.5"):
        StudyFolder.load(study_file).cells("B", 1000.0)


@pytest.mark.long
def test_shape_probe_measures_plain_on_a_server(
    study_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert shape_rates.main(["--study", str(study_file)]) == 0
    assert "32x8: plain serves" in capsys.readouterr().out
    content = json.loads((study_file.parent / paths.SHAPE_RATES).read_text())
    shape = content["shapes"]["32x8"]
    assert len(shape["completed_s"]) in (4, 16, 64)
    assert shape["completed_s"] == sorted(shape["completed_s"])
    assert shape["most_rps"] == pytest.approx(shape["served_rps"] / 2, rel=0.01)


@pytest.mark.long
def test_overloaded_cell_is_void_and_not_retried(
    study_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    study = read_json(study_file)
    del study["config"]["shape_rates"]
    study["config"]["cell"] |= {"end_overloaded": True, "inflight_cap": 1}
    write_json(study_file, study)
    assert launch.main(arguments(study_file, phase="B")) == 0
    assert "overloaded; not retried, since it would overload again" in capsys.readouterr().err
    folder = study_file.parent / "runs" / "plain" / "block0" / "B"
    assert read_json(folder / "32x8" / "cell_B_32x8.json")["cooldown"]["ended_by"] == "overloaded"
    assert [entry["status"] for entry in read_json(folder / "index.json")["cells"]] == ["void"]
    assert not list(folder.glob("32x8.*"))
