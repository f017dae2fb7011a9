"""What release 0.2 published of a study's cells, in the form of the present table.

Without the columns that are no more, and without the latencies of cells of which it left requests
out.
"""

import csv
from pathlib import Path
from typing import Any

Key = tuple[str, ...]
Values = dict[str, Any]
CELL_KEY = ("config", "block", "phase", "cell")
GONE = (
    "p99_reason", "mser5_discard", "start_change", "start_p", "n_disturbed", "quiet_share",
)  # fmt: skip
OF_REQUESTS = ("n", "warming_up")
LATENCIES = ("ttft_", "tpot_", "e2e_")


def cells(folder: Path) -> dict[Key, Values]:
    """aggregate.csv by the key of cells.csv."""
    with (folder / "aggregate.csv").open(newline="", encoding="utf-8") as stream:
        return {
            tuple(row[name] for name in CELL_KEY): {k: v for k, v in row.items() if _kept(k, row)}
            for row in csv.DictReader(stream)
        }


def _kept(column: str, row: dict[str, str]) -> bool:
    of_requests = column in OF_REQUESTS or column.startswith(LATENCIES)
    return column not in GONE and not (of_requests and int(row["n_disturbed"] or 0))
