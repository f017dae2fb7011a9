"""What the benchmark of the rehearsal reads from a study: the launch to fit, and its noise."""

from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import pandas as pd
import pytest
import yaml

from benchmarks.rehearsal import launch_cells, middle_launch
from connector_tax.artifacts.study_file import launches, load_study
from connector_tax.files import read_json, read_jsonl
from connector_tax.rehearsal.machine import Noise, noise_of, slowness
from connector_tax.study.design import resolve
from tests.analysis.synthetic import write_synthetic_study
from tests.workflow.harness import TINY, smaller


@pytest.mark.parametrize(
    "noise", [Noise(0.03), Noise(0.01, bad_share=0.1, slow_by=(0.4,)), Noise(0.01, drift_sd=0.1)]
)
def test_noise_is_found_again_in_what_was_measured(noise: Noise) -> None:
    config = yaml.safe_load(smaller(TINY.read_text()))
    study = resolve({**config, "blocks": 60}, "tiny.yaml")
    rng = np.random.default_rng(1)
    rows: list[dict[str, Any]] = []
    for launch in launches(study, "A"):
        slow = slowness(noise, study, launch) * np.exp(rng.normal(0, noise.launch_sd))
        where = {"config": launch.config, "configuration": launch.configuration}
        rows += [
            {**where, "block": launch.block, "phase": "A", "cell": planned["cell"],
             "tpot_p50_ms": 3 * slow * (1 + 0.1 * launch.block)}
            for planned in study["cells"]["A"]
        ]  # fmt: skip
    found = noise_of(pd.DataFrame(rows), study["run_order"])
    assert found.bad_share == pytest.approx(noise.bad_share, abs=0.05)
    assert found.drift_sd == pytest.approx(noise.drift_sd, abs=0.03)
    if not noise.bad_share and not noise.drift_sd:
        assert found.launch_sd == pytest.approx(noise.launch_sd, rel=0.15)


def test_the_middle_one_of_plains_launches_is_fitted(tmp_path: Path) -> None:
    small = {
        "phase_a": {"rates_rps": [20.0, 40.0]},
        "phase_b": {"input_tokens": [128], "output_tokens": [8]},
    }
    write_synthetic_study(
        tmp_path, blocks=3, plain_launches=1, launch_sigma=0.3, step_timing=False, config=small
    )
    cells = read_json(tmp_path / "study.json")["cells"]["A"]
    lightest = min(cells, key=lambda cell: cell["rate_rps"])["cell"]
    ttft = {}
    for launch in (f"plain/block{block}/A" for block in range(3)):
        log = tmp_path / "runs" / launch / lightest / f"requests_A_{lightest}.jsonl"
        ok = [r for r in read_jsonl(log) if r["status"] == "ok"]
        ttft[launch] = median(r["t_first_token_ns"] - r["t_intended_ns"] for r in ok)
    study = load_study(tmp_path / "study.json")
    middle = middle_launch(study, launch_cells(study))
    assert middle == sorted(ttft, key=lambda launch: ttft[launch])[1]
