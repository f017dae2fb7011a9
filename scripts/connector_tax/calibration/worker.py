"""One process of a calibration: what it is asked to simulate, as JSON lines (study.child)."""

import json
import sys
from typing import Any

from connector_tax.calibration.studies import virtual_study
from connector_tax.calibration.truth import log_ratios


def answer(command: dict[str, Any]) -> dict[str, Any]:
    """What a command gives: `study` its outcomes, `truth` its log ratios."""
    task = dict(command)
    simulate = {"study": virtual_study, "truth": log_ratios}[task.pop("do")]
    return {"result": simulate(**task)}


if __name__ == "__main__":
    for line in sys.stdin:
        print(json.dumps(answer(json.loads(line))), flush=True)
