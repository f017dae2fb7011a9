"""Test that one declaration adds a metric to all tables, and a criterion to the rates."""

import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from connector_tax.analysis.aggregate import main as aggregate
from connector_tax.artifacts.metrics import METRICS
from connector_tax.files import read_json, write_json
from tests.analysis.tables import effects, one, select, table
from tests.study_folder import ONE_CONNECTOR, write_virtual_study

# Adds an entry to each of the two dictionaries in a separate process, then runs a command.
DECLARED = """
import sys
from connector_tax.artifacts import metrics
metrics.LATENCY_METRICS["ttft_p75"] = metrics.Metric("TTFT p75", "ttft_ms", 75, 0.04)
metrics.METRICS = (*metrics.METRICS, "ttft_p75")
metrics.CRITERIA["unloaded"] = metrics.SaturationCriterion(
    lambda cell, sweep: cell.over(sweep.get(min(sweep)), "e2e_p99"),
    "e2e_p99_ratio_max", 3.0, True, "E2E", "p99(r) / p99 unloaded",
)
from connector_tax.analysis import aggregate, reference
from connector_tax.compare import gate
command, *arguments = sys.argv[1:]
sys.exit({"aggregate": aggregate, "reference": reference, "gate": gate}[command].main(arguments))
"""


@pytest.fixture(scope="module")
def study(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("metrics") / "s"
    given = ONE_CONNECTOR | {"reference": {"fallback_rps": 40.0}}
    return write_virtual_study(root, blocks=3, step_timing=False, **given)


def declared(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", DECLARED, *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_metric_needs_only_one_declaration(study: Path) -> None:
    assert aggregate(["--study", str(study)]) == 0
    before = {q: len(effects(study.parent, q)) for q in ("tax", "gap")}
    done = declared("aggregate", "--study", str(study))
    assert done.returncode == 0, done.stderr
    for quantity, count in before.items():
        rows = effects(study.parent, quantity)
        assert len(select(rows, metric="ttft_p75")) * len(METRICS) == count
        assert len(rows) * len(METRICS) == (len(METRICS) + 1) * count
    tax = one(effects(study.parent, "tax"), config="nixl_both", metric="ttft_p75", phase="A",
              cell="r40")  # fmt: skip
    assert (tax["verdict"], tax["margin"]) == ("costs", "0.04")
    cells = select(table(study.parent, "cells.csv"), config="plain", phase="A", cell="r40")
    logs = [np.log(float(row["ttft_p75_ms"])) for row in cells if row["block"] != "all"]
    assert len(logs) == 3
    asked = ("--max=ttft_p75=90%", "--config=nixl_both")
    answer = declared("gate", str(study.parent), *asked)
    assert answer.returncode == 0, answer.stderr
    assert "nixl_both ttft_p75: " in answer.stdout


def test_saturation_criterion_needs_only_one_declaration(study: Path, tmp_path: Path) -> None:
    file = shutil.copytree(study.parent, tmp_path / "s") / "study.json"

    def criteria_at(rate: str) -> dict[str, Any]:
        done = declared("reference", "--study", str(file))
        assert done.returncode == 0, done.stderr
        rates = read_json(file.parent / "reference_rates.json")
        criteria: dict[str, Any] = rates["criteria"]["plain"][rate]
        return criteria

    assert "unloaded" not in criteria_at("40"), "the study was not judged by it"
    document = read_json(file)
    document["config"]["saturation"]["e2e_p99_ratio_max"] = 0.5
    file.unlink()
    write_json(file, document)
    lowest = f"{min(rate for rate in document['config']['phase_a']['rates_rps']):g}"
    assert criteria_at(lowest)["unloaded"] == {"value": 1.0, "bound": 0.5, "fired": True}
