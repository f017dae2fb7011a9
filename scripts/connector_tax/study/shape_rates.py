"""Measure how much of each shape plain can serve: the rates of Phases B and B' above ref_safe.

Run once, between Phase A and Phase B, on a separate server of plain. Requests of a shape arrive
at once, and the time until all are completed is taken: four of them, then four times as many, up
to `cell.inflight_cap`, while a burst takes less than a quarter of `shape_rates.probe_s`. The burst
that is served fastest counts. Its ends serve less than its middle, so that the number errs on the
safe side. Whatever the rate comes to, it is the same for all configurations.
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
from connector_tax.loadgen import CellRule, Load, LoadGenerator, LoadGeneratorError
from connector_tax.loadgen.sessions import Node, Singles
from connector_tax.study.cell import load_generator, planned_requests
from connector_tax.study.device import DeviceError, devices_of, enter_block_slot, hold_devices
from connector_tax.study.guard import kill_leftovers
from connector_tax.study.preflight import GateError, gated_server
from connector_tax.study.server import PortTakenError
from connector_tax.study.server_command import affinity_plan, probe_overlay

NAME = "shape_rates"
# Requests of the first burst, and how many times as many the next one has.
FIRST_BURST = GROWTH = 4


class ShapeRateError(Exception):
    """plain did not serve a shape at all; the text names it."""


def _section(config: StudyConfig) -> ShapeRatesSection:
    section = config.get("shape_rates")
    assert section is not None
    return section


def shapes_of(study: StudyDocument) -> dict[str, tuple[int, int]]:
    """Return cell name to input and output tokens, of Phases B and B'."""
    cells = [cell for phase in ("B", "Bp") for cell in study["cells"][phase]]
    return {cell["cell"]: (cell["input_tokens"], cell["output_tokens"]) for cell in cells}


def fastest_burst(config: StudyConfig, burst: Callable[[int], list[float]]) -> list[float]:
    """Return the completion times, in s, of the burst that was served fastest.

    Args:
        burst: sends so many requests at once; when each was completed, s, ascending. Those that
            outlive `cell.request_timeout_s` are left out.
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
        completed_s: cell name to when its requests were completed, s after all of them arrived.

    Raises:
        ShapeRateError: a shape has none.
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


def burst(
    study: StudyDocument,
    generator: LoadGenerator,
    name: str,
    shape: tuple[int, int],
    count: int,
) -> list[float]:
    """Return the completion times, in s, of `count` requests of a shape that arrive at once."""
    longest_s = study["config"]["cell"]["request_timeout_s"]
    requests = iter(planned_requests(study, f"{NAME}/{name}/{count}", shape, count))
    load = Load(
        Singles(count, Node("0", "", 1)),
        lambda _session, _node, _history: next(requests),
        np.zeros(count, np.int64),
    )
    rule = CellRule(
        warmup_s=0.0, floor_s=0.0, min_completed=count, cap_s=longest_s, drain_s=0.0,
        inflight_cap=None, request_timeout_s=longest_s, cooldown=False,
    )  # fmt: skip
    result = generator.run(load, rule)
    errors = [
        record.error_detail or record.error_kind
        for record in result.records
        if record.status == "error"
    ]
    if errors:
        raise ShapeRateError(f"shape {name}: a request failed: {errors[0]}")
    return sorted(
        (record.t_last_token_ns - result.t_origin_ns) / 1e9
        for record in result.records
        if record.status == "ok" and record.t_last_token_ns is not None
    )


def probe_shapes(study_file: Path) -> ShapeRatesRecord:
    """Launch plain and probe every shape; the content of shape_rates.json.

    Raises:
        GateError: the baseline did not start, or failed.
        ShapeRateError: it did not serve a shape.
    """
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
            sends = functools.partial(burst, study, generator, name, shape)
            completed_s[name] = fastest_burst(study["config"], sends)
            server.check_alive(f"after the probe of {name}")
    return shape_rates_content(study, completed_s)


def main(argv: Sequence[str] | None = None) -> int:
    """Write shape_rates.json: how much of each shape plain can serve."""
    parser = study_parser("study.shape_rates", main.__doc__)
    refusals = (ArtifactError, ConfigError, DeviceError, GateError, LoadGeneratorError,
                PortTakenError, ShapeRateError, OSError)  # fmt: skip
    return run_command(parser, argv, _write, refusals, label="shape rates: ")


def _write(arguments: argparse.Namespace) -> None:
    content = probe_shapes(arguments.study)
    write_json(arguments.study.parent / paths.SHAPE_RATES, content)
    for name, shape in content["shapes"].items():
        served, most = shape["served_rps"], shape["most_rps"]
        print(f"{name}: plain serves {served:.3g}/s, offered at most {most:g}/s")


if __name__ == "__main__":
    sys.exit(main())
