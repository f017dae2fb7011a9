"""A launch of Phase A that fails at each of its cells: no rate without it, no study is stuck."""

from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from connector_tax.artifacts.names import Launch
from connector_tax.artifacts.study_file import read_study
from connector_tax.files import read_json
from connector_tax.study.design import cell_order
from tests.workflow.harness import gone, of_this_study, prepare, start, wait_for
from tests.workflow.small import smaller

pytestmark = [pytest.mark.workflow, pytest.mark.timeout(600)]
LAUNCH = Launch("noop_connector", 0, "A")


def processes(folder: Path, module: str) -> Iterator[psutil.Process]:
    """The processes of the launch's driver, itself included, that run a module of the package."""
    named = {f"connector_tax.{module}"}
    driver = {"connector_tax.study.launch", LAUNCH.config, LAUNCH.phase}
    for process in of_this_study(folder):
        try:
            if driver <= {*process.cmdline()}:
                family = [process, *process.children(recursive=True)]
                yield from (member for member in family if named <= {*member.cmdline()})
        except psutil.Error:
            continue


def kill_in(
    folder: Path, cell: str, module: str, times: int, target: str = "all"
) -> tuple[int, str]:
    """Run the study, killing a process of the launch in a cell in so many of its attempts.

    Returns:
        exit status and output of the run.
    """
    launch = LAUNCH.folder(folder / "results" / "tiny")
    victims: list[psutil.Process] = []

    def is_measuring() -> bool:
        if not list(launch.glob(f"{cell}.partial/metrics_*")):
            return False
        new = [process for process in processes(folder, module) if process not in victims]
        victims.extend(new)
        return bool(new)

    run = start(folder, target)
    for _ in range(times):
        wait_for(is_measuring, run)
        victims[-1].kill()
    return run.wait(timeout=300), (folder / "snakemake.log").read_text()


def test_a_launch_that_fails_at_each_of_its_cells_is_measured_before_a_rate_is_derived(
    tmp_path: Path,
) -> None:
    folder = prepare(tmp_path / "study", smaller)
    results = folder / "results" / "tiny"
    worker = "loadgen.worker"

    def refused(status: int, output: str, why: str) -> None:
        assert status != 0
        assert why in output
        assert not (results / "reference_rates.json").exists()
        assert not list(results.glob("runs/*/block0/B"))
        assert not (LAUNCH.folder(results) / "index.json").exists()

    # Killed in the first cell, and again when it is run once more.
    prepared = start(folder, "results/tiny/study.json")
    assert prepared.wait(timeout=60) == 0
    first, second = [
        cell["cell"] for cell in cell_order(read_study(results / "study.json"), LAUNCH)
    ]
    again = "noop_connector/block0/A failed, and is run once more"
    status, output = kill_in(folder, first, worker, times=2)
    assert again in output
    refused(status, output, "not derived, since launches of Phase A failed")
    assert "  noop_connector/block0/A: " in output
    # In the second.
    status, output = kill_in(folder, second, worker, times=2)
    refused(status, output, "not derived, since launches of Phase A failed")
    # Its driver.
    refused(*kill_in(folder, second, "study.launch", times=1), "Error in rule phase_a")
    # Once: the same run goes on, and derives the rates.
    status, output = kill_in(
        folder, second, worker, times=1, target="results/tiny/reference_rates.json"
    )
    assert status == 0, output
    assert again in output
    rates = read_json(results / "reference_rates.json")
    assert "derived_now" not in rates
    assert rates["criteria"]["noop_connector"]["20"]["n_launches"] == 1
    assert rates["criteria"]["noop_connector"]["40"]["n_launches"] == 1
    assert gone(folder, timeout_s=5) == []
