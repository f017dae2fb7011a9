"""One process of a calibration: what it is asked to simulate, as JSON lines (study.child)."""

import json
import sys
from collections.abc import Callable, Mapping
from typing import Any

from connector_tax.calibration.studies import virtual_study
from connector_tax.calibration.truth import log_ratios

# `study` gives outcomes, `truth` logs of many launches.
SIMULATIONS: Mapping[str, Callable[..., Any]] = {
    "study": virtual_study,
    "truth": log_ratios,
}


def answer(do: str, **task: Any) -> dict[str, Any]:
    """What a command gives; `task` are the arguments of its function."""
    return {"result": SIMULATIONS[do](**task)}


if __name__ == "__main__":
    for line in sys.stdin:
        print(json.dumps(answer(**json.loads(line))), flush=True)
