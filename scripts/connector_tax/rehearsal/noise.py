"""What launches of one configuration differ by: models of it, and what a measured study shows."""

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np
import pandas as pd

from connector_tax.analysis.measure import Requests
from connector_tax.artifacts.names import CellKey, Launch, configuration_of
from connector_tax.artifacts.study_records import StudyDocument
from connector_tax.seeds import named_generator

# A launch is bad where its steps take this much longer than those of its configuration.
BAD = 0.10


class Noise(NamedTuple):
    """How launches of one configuration differ, relative to a step's time.

    Attributes:
        launch_sd: standard deviation from launch to launch.
        bad_share: of launches that are slow from start to end.
        slow_by: what such a launch is slower by, one of these.
        drift_sd: of how much slower a block's last launch is than its first.
        source: where the numbers are from.
    """

    launch_sd: float
    bad_share: float = 0.0
    slow_by: tuple[float, ...] = (0.2, 0.4)
    drift_sd: float = 0.0
    source: str = ""


QUIET = Noise(0.0)
# The measured ones: `python -m connector_tax.rehearsal.accuracy --archive`, "launches".
NOISES: Mapping[str, Noise] = {
    "engine": Noise(0.005, source="config/embedded.yaml: what the engine itself draws"),
    "embedded": Noise(0.006, source="results/archive/default.tar.zst"),
    "vllm-cpu": Noise(0.026, drift_sd=0.017, source="results/archive/vllm-cpu.tar.zst"),
    "hostile": Noise(
        0.026, 0.05, drift_sd=0.05, source="assumed: vllm-cpu's, one launch in 20 bad, more drift"
    ),
}


def slowness(noise: Noise, study: StudyDocument, launch: Launch) -> float:
    """What the launch's steps take over those of a good one in the middle of its block."""
    order = [
        entry["config"]
        for entry in study["run_order"][launch.phase]
        if entry["block"] == launch.block
    ]
    place = order.index(launch.config) / max(1, len(order) - 1) - 0.5
    name = f"{study['seed']}/noise"
    slope = named_generator(f"{name}/block{launch.block}/{launch.phase}").normal(0, noise.drift_sd)
    own = named_generator(f"{name}/{launch.name}")
    bad = own.random() < noise.bad_share
    return float(np.exp(slope * place) * (1 + bad * own.choice(noise.slow_by)))


def shown(study: StudyDocument, requests: Mapping[CellKey, Requests]) -> Noise:
    """The noise of a measured study, of the TPOT p50 of its cells.

    launch_sd: the residual of configuration and block in each cell, over all cells. bad_share: of
    launches that are BAD in the mean of their cells. drift_sd: of the slope over a block, beyond
    what launch_sd alone makes of it; 0 where it is not.
    """
    rows = [
        (*key, configuration_of(key.config), float(np.log(np.median(r.tpot_ms))))
        for key, r in requests.items()
        if len(r.tpot_ms)
    ]
    columns = ["config", "block", "phase", "cell", "configuration", "log"]
    table = pd.DataFrame(rows, columns=columns)
    free = 0
    of_cells: list[pd.DataFrame] = []
    for _, part in table.groupby(["phase", "cell"]):
        design = pd.get_dummies(part[["configuration", "block"]].astype(str)).to_numpy(float)
        fitted, _, rank, _ = np.linalg.lstsq(design, part.log.to_numpy(), rcond=None)
        residual = part.log - design @ fitted
        free += len(part) - int(rank)
        of_cells.append(part.assign(residual=residual))
    cells = pd.concat(of_cells)
    order = {
        (phase, entry["block"], entry["config"]): place
        for phase, entries in study["run_order"].items()
        for place, entry in enumerate(entries)
    }
    of_launch = cells.groupby(["phase", "block", "config"]).residual.mean()
    launches = of_launch.reset_index()
    launches["place"] = [order[key] for key in of_launch.index]
    return Noise(
        float(np.sqrt((cells.residual**2).sum() / free)),
        float((launches.residual > np.log1p(BAD)).mean()),
        drift_sd=_drift_sd(launches),
    )


def _drift_sd(launches: pd.DataFrame) -> float:
    slopes, errors = [], []
    for _, part in launches.groupby(["phase", "block"]):
        if len(part) < 3:
            continue
        place = np.argsort(np.argsort(part.place.to_numpy())) / (len(part) - 1) - 0.5
        residual = part.residual.to_numpy()
        slope, level = np.polyfit(place, residual, 1)
        left = residual - slope * place - level
        slopes.append(slope)
        errors.append(left @ left / (len(part) - 2) / (place @ place))
    return float(np.sqrt(max(0.0, float(np.mean(np.square(slopes)) - np.mean(errors)))))
