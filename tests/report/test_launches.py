"""The report's launches: how long the study took beside what it needed."""

import pytest

from connector_tax.artifacts.index import launch_index
from connector_tax.artifacts.names import Launch
from connector_tax.artifacts.study_records import DesignLabel
from connector_tax.report.launches import LaunchReport, overhead


def test_overhead_counts_what_lies_between_launches_but_not_an_interruption() -> None:
    label: DesignLabel = {"engine_label": "embedded (emulated)", "design_sha256": "0" * 64}

    def launch(started: str, ended: str | None) -> LaunchReport:
        index = launch_index(
            label, Launch("plain", 0, "A"), [],
            started_utc=f"2026-05-26T{started}+00:00",
            ended_utc=None if ended is None else f"2026-05-26T{ended}+00:00",
            timing={"wall_s": 60.0, "startup_s": 5.0, "cells_s": 50.0, "release_s": 1.0},
        )  # fmt: skip
        return LaunchReport("A", "plain", 0, index, [])

    spent = overhead(
        [
            launch("10:01:02", "10:02:02"),  # two seconds after the first
            launch("10:00:00", "10:01:00"),
            launch("12:00:00", None),  # resumed two hours later; the power went after its last cell
            launch("12:01:30", "12:02:30"),
            LaunchReport("A", "plain", 0, None, []),
        ]
    )
    assert spent.wall_s == 4 * 60 + 2
    assert spent.ratio == pytest.approx((4 * 60 + 2) / (4 * 56))
