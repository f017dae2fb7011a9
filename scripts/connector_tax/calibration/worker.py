"""One process of a calibration: what it is asked to simulate, as JSON lines (study.child)."""

import json
import sys
from collections.abc import Callable, Mapping
from typing import Any

from connector_tax.calibration.devices import device_study
from connector_tax.calibration.pairs import pair_logs, virtual_pair
from connector_tax.calibration.studies import virtual_study
from connector_tax.calibration.truth import log_ratios

# `study`, `device_study` and `pair` give outcomes, `truth` and `pair_truth` logs of many launches.
SIMULATIONS: Mapping[str, Callable[..., Any]] = {
    "study": virtual_study,
    "truth": log_ratios,
    "device_study": device_study,
    "pair": virtual_pair,
    "pair_truth": pair_logs,
}


def answer(do: str, **task: Any) -> dict[str, Any]:
    """What a command gives; `task` are the arguments of its function."""
    return {"result": SIMULATIONS[do](**task)}


if __name__ == "__main__":
    for line in sys.stdin:
        print(json.dumps(answer(**json.loads(line))), flush=True)
