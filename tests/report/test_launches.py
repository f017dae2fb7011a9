"""The report's launches: how long the study took beside what it needed."""

import pytest

from connector_tax.report.launches import LaunchReport, overhead


def test_overhead_counts_what_lies_between_launches_but_not_an_interruption() -> None:
    def launch(started: str, ended: str | None) -> LaunchReport:
        end = None if ended is None else f"2026-05-26T{ended}+00:00"
        span = (f"2026-05-26T{started}+00:00", end)
        timing = {"wall_s": 60.0, "startup_s": 5.0, "cells_s": 50.0, "release_s": 1.0}
        return LaunchReport("A", "plain", 0, 1, "done", "", None, "", span, timing)

    spent = overhead(
        [
            launch("10:01:02", "10:02:02"),  # two seconds after the first
            launch("10:00:00", "10:01:00"),
            launch("12:00:00", None),  # resumed two hours later; the power went after its last cell
            launch("12:01:30", "12:02:30"),
        ]
    )
    assert spent.wall_s == 4 * 60 + 2
    assert spent.ratio == pytest.approx((4 * 60 + 2) / (4 * 56))
