"""Measure the throughput of `plain` for each shape, which limits the rates of Phases B and B'.

Runs once, between Phases A and B, on a separate server of plain. A burst of requests of one shape
arrives at once, and the time until all are completed is measured. The first burst has four
requests, each further burst four times as many, up to `cell.inflight_cap`, while a burst takes less
than a quarter of `shape_rates.probe_s`. The fastest burst counts. Throughput is lower at a burst's
ends than in its middle, so that the number is conservative. The resulting rate is the same for all
configurations.
"""

import argparse
import functools
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import numpy as np

from connector_tax.artifacts import paths
from connector_tax.artifacts.names import Launch, baseline_of
from connector_tax.artifacts.stage_records import ShapeRatesRecord
from connector_tax.artifacts.study_file import most_of_shape, read_study
from connector_tax.artifacts.study_records import ShapeRatesSection, StudyConfig, StudyDocument
from connector_tax.commands import run_command, study_parser
from connector_tax.config import ConfigError
from connector_tax.files import ArtifactError, write_json
from connector_tax.loadgen.generator import CellResult, LoadGenerator
from connector_tax.loadgen.messages import LoadGeneratorError
from connector_tax.loadgen.plan import CellRule
from connector_tax.loadgen.sessions import Node, Singles
from connector_tax.loadgen.traffic import Load
from connector_tax.study.cell import load_generator, planned_requests, while_alive
from connector_tax.study.device import DeviceError, devices_of, enter_block_slot, hold_devices
from connector_tax.study.guard import end_with_parent, kill_leftovers
from connector_tax.study.preflight import GateError, gated_server
from connector_tax.study.server import PortTakenError
from connector_tax.study.server_command import affinity_plan, probe_overlay

NAME = "shape_rates"
# Requests of the first burst, and the factor from burst to burst.
FIRST_BURST = GROWTH = 4


class ShapeRateError(Exception):
    """The baseline completed no request of a shape; the text names the shape."""


def _section(config: StudyConfig) -> ShapeRatesSection:
    section = config.get("shape_rates")
    assert section is not None
    return section


def shapes_of(study: StudyDocument) -> dict[str, tuple[int, int]]:
    """Return input and output tokens of each cell of Phases B and B', by cell name."""
    cells = [cell for phase in ("B", "Bp") for cell in study["cells"][phase]]
    return {cell["cell"]: (cell["input_tokens"], cell["output_tokens"]) for cell in cells}


def fastest_burst(config: StudyConfig, burst: Callable[[int], list[float]]) -> list[float]:
    """Return the completion times, in s, of the burst with the highest throughput.

    Args:
        burst: sends the given number of requests at once; returns their completion times in s,
            ascending, without those that outlive `cell.request_timeout_s`.
    """
    most, probe_s = config["cell"]["inflight_cap"], _section(config)["probe_s"]
    best: list[float] = []
    count = FIRST_BURST
    while True:
        done = burst(min(count, most))
        if done and (not best or len(done) / done[-1] > len(best) / best[-1]):
            best = done
        if not done or count >= most or done[-1] > probe_s / GROWTH:
            return best
        count *= GROWTH


def shape_rates_content(
    study: StudyDocument, completed_s: Mapping[str, Sequence[float]]
) -> ShapeRatesRecord:
    """Return the content of shape_rates.json.

    Args:
        completed_s: completion times of each cell's requests, in s after their arrival, by cell
            name.

    Raises:
        ShapeRateError: a shape has no completed request.
    """
    config = study["config"]
    none = [name for name, moments in completed_s.items() if not moments]
    if none:
        longest = config["cell"]["request_timeout_s"]
        raise ShapeRateError(
            f"plain completed no request of {', '.join(none)} in {longest:g} s: leave the shape "
            "out of phase_b and phase_bp, or raise cell.request_timeout_s"
        )
    share = _section(config)["max_share"]
    return {
        "design_sha256": study["design_sha256"],
        "label": study["engine_label"],
        "shapes": {
            name: {
                "completed_s": list(moments),
                "served_rps": len(moments) / max(moments),
                "most_rps": most_of_shape(share, moments),
            }
            for name, moments in completed_s.items()
        },
    }


def all_at_once(
    study: StudyDocument,
    generator: LoadGenerator,
    name: str,
    shape: tuple[int, int],
    count: int,
    alive: Callable[[], object] = lambda: None,
) -> CellResult:
    """Send `count` requests of a shape at once; return the result when all are answered.

    Args:
        name: the path-like name of what is sent.
        alive: called every few seconds meanwhile, and before a failed request is reported.

    Raises:
        Exception: any error of `alive`.
        ShapeRateError: a request failed for another reason than `cell.request_timeout_s`.
    """
    longest_s = study["config"]["cell"]["request_timeout_s"]
    requests = iter(planned_requests(study, name, shape, count))
    load = Load(
        Singles(count, Node("0", "", 1)),
        lambda _session, _node, _history: next(requests),
        np.zeros(count, np.int64),
    )
    rule = CellRule(
        warmup_s=0.0, floor_s=0.0, min_completed=count, cap_s=longest_s, drain_s=0.0,
        inflight_cap=None, request_timeout_s=longest_s, cooldown=False,
    )  # fmt: skip
    result = generator.run(load, rule, while_alive(alive))
    errors = [
        record.error_detail or record.error_kind
        for record in result.records
        if record.status == "error"
    ]
    if errors:
        alive()
        raise ShapeRateError(f"{name}: a request of {shape[0]}x{shape[1]} failed: {errors[0]}")
    return result


def burst(
    study: StudyDocument,
    generator: LoadGenerator,
    name: str,
    shape: tuple[int, int],
    count: int,
    alive: Callable[[], object] = lambda: None,
) -> list[float]:
    """Return the completion times, in s, of `count` requests of a shape that arrive at once.

    Raises:
        ShapeRateError, Exception: as in `all_at_once`.
    """
    result = all_at_once(study, generator, f"{NAME}/{name}/{count}", shape, count, alive)
    return sorted(
        (record.t_last_token_ns - result.t_origin_ns) / 1e9
        for record in result.records
        if record.status == "ok" and record.t_last_token_ns is not None
    )


def probe_shapes(study_file: Path) -> ShapeRatesRecord:
    """Launch plain and probe every shape; return the content of shape_rates.json.

    Raises:
        GateError: the baseline did not start, or failed.
        ShapeRateError: the baseline completed no request of a shape.
    """
    end_with_parent(print)
    study = enter_block_slot(read_study(study_file), study_file.parent)
    folder = study_file.parent / paths.PREFLIGHT / NAME
    completed_s: dict[str, list[float]] = {}
    kill_leftovers(study_file.parent)
    with (
        hold_devices(devices_of(study["config"])),
        gated_server(
            study,
            Launch(baseline_of(study["config"]), 0, "B"),
            NAME,
            folder,
            print,
            probe_overlay(study, study_file.parent),
        ) as server,
        load_generator(study, server, affinity_plan(study)) as generator,
    ):
        for name, shape in shapes_of(study).items():
            alive = functools.partial(server.check_alive, f"in the probe of {name}")
            sends = functools.partial(burst, study, generator, name, shape, alive=alive)
            completed_s[name] = fastest_burst(study["config"], sends)
            server.check_alive(f"after the probe of {name}")
    return shape_rates_content(study, completed_s)


def main(argv: Sequence[str] | None = None) -> int:
    """Measure how many requests/s of each shape plain can serve; write shape_rates.json."""
    parser = study_parser("study.shape_rates", main.__doc__)
    refusals = (ArtifactError, ConfigError, DeviceError, GateError, LoadGeneratorError,
                PortTakenError, ShapeRateError, OSError)  # fmt: skip
    return run_command(parser, argv, _write, refusals, label="shape rates: ")


def _write(arguments: argparse.Namespace) -> None:
    content = probe_shapes(arguments.study)
    write_json(arguments.study.parent / paths.SHAPE_RATES, content)
    for name, shape in content["shapes"].items():
        served, most = shape["served_rps"], shape["most_rps"]
        print(f"{name}: plain serves {served:.3g}/s; the study offers at most {most:g}/s")


if __name__ == "__main__":
    sys.exit(main())
