"""Which of the host's work a request waits for, in a real vLLM beside an emulated device.

Conditions alternate from request to request within one launch, one request at a time, so that what
the machine does meanwhile falls on all of them alike. A condition is compared with the first one in
the same round; the median over the rounds stands with its bootstrap interval (95%, percentiles).

`sleeps` has a hook of a connector sleep before a step is launched, or after it
(sleeping_connector); the device's steps take 0.6 and 3 ms in turn. `scheduling` has the API server
on the engine core's CPU, or on another, with asynchronous scheduling and without; steps take 0.3
and 2.8 ms. `threads` has the engine core's other threads, a connector's among them, on its CPU or
on another, where a call into one of them wakes that CPU.

Of each request: its TTFT less the device's time; for how long the device had nothing to do before
its prefill, and before a decode (median); for how much of a step the engine core's thread was ready
and had no CPU.
"""

import argparse
import contextlib
import os
import random
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import numpy as np
from numpy.typing import NDArray
from rich.console import Console
from rich.table import Table
from scipy import stats

from connector_tax.analysis.device_time import of_lines
from connector_tax.artifacts.names import Launch
from connector_tax.artifacts.study_records import StudyDocument
from connector_tax.commands import run_command
from connector_tax.config import ROOT, load_yaml
from connector_tax.files import ArtifactError, read_json
from connector_tax.machine import cpu
from connector_tax.study.cell import planned_requests
from connector_tax.study.design import resolve
from connector_tax.study.device import DeviceError, devices_of, hold_devices
from connector_tax.study.preflight import GateError, gated_server
from connector_tax.study.processes import ServerProcesses
from connector_tax.study.server import Server
from connector_tax.study.server_command import affinity_plan
from connector_tax.study.steplog import LaunchStepLog
from connector_tax.vllm import overlay
from connector_tax.vllm.tiny_model import write_model

INPUT_TOKENS, OUTPUT_TOKENS = 64, 200
MIN_ROUNDS = 3
# us: of the device's steps, and of the sleeps.
SLEEP_STEPS, SCHEDULING_STEPS = (600, 3000), (300, 2800)
SLEEPS = ((0, 0), (100, 0), (500, 0), (0, 100), (0, 500))
Conditions = Mapping[str, Callable[[], Any]]


def sleeps(folder: Path, rounds: int) -> None:
    """A hook that sleeps, by where and for how long."""
    shutil.copy(Path(__file__).with_name("sleeping_connector.py"), folder)
    file = folder / "sleeps"
    study = _study(SLEEP_STEPS, pythonpath=[str(folder)])
    entry = next(e for e in study["configurations"] if e["id"] == "noop_connector")
    entry |= {
        "connector": "SleepingConnector", "module_path": "sleeping_connector",
        "extra_config": {"sleeps": str(file)},
    }  # fmt: skip

    def write(sleeps: tuple[int, int]) -> None:
        with file.open("r+b") as stream:
            stream.write(np.array(sleeps, float).tobytes())

    file.write_bytes(bytes(16))
    conditions = {
        f"{before} us before, {after} us after": lambda both=(before, after): write(both)
        for before, after in SLEEPS
    }
    _measure(study, "noop_connector", folder, rounds, lambda _: conditions)


def scheduling(folder: Path, rounds: int) -> None:
    """Asynchronous scheduling or none, and where the API server runs."""
    for asynchronous in (True, False):
        study = _study(SCHEDULING_STEPS, flags={"--async-scheduling": asynchronous})
        plan = affinity_plan(study)
        if not plan.enabled:
            raise ArtifactError("the server is not pinned: this machine has too few CPUs")

        def conditions(server: Server, plan: Any = plan, said: Any = asynchronous) -> Conditions:
            place = f"{'' if said else 'no '}async, API server on {{}} CPU"
            return {
                place.format("the engine's"): lambda: _move(server.pid, plan.server),
                place.format("another"): lambda: _move(server.pid, plan.loadgen),
            }

        _measure(study, "plain", folder, rounds, conditions)


def threads(folder: Path, rounds: int) -> None:
    """Where the threads of the engine core run that take none of its steps."""
    for configuration in ("plain", "mooncake_both", "nixl_both"):
        study = _study(SLEEP_STEPS)
        plan = affinity_plan(study)

        def conditions(server: Server, plan: Any = plan) -> Conditions:
            core = ServerProcesses(server.pid, {}).read().engine
            if core is None or not plan.enabled:
                raise ArtifactError("no engine core, or too few CPUs to pin it")
            places = {"the engine's": plan.server, "another": plan.loadgen}
            return {
                f"its other threads on {name} CPU": partial(_move, core.pid, cpus, but=core.pid)
                for name, cpus in places.items()
            }

        _measure(study, configuration, folder, rounds, conditions)
        shutil.rmtree(folder / "launch")


def _study(sweep_us: Sequence[float], **engine: Any) -> StudyDocument:
    """The study of the emulated H20, whose steps take these times."""
    config = load_yaml(ROOT / "config/h20-emulated.yaml")
    config["engine"]["device_time"]["sweep_us"] = list(sweep_us)
    config["engine"]["flags"] |= engine.pop("flags", {})
    config["engine"] |= engine
    model = ROOT / config["engine"]["model"]
    if not (model / "config.json").exists():
        write_model(model, read_json(ROOT / config["engine"]["device_time"]["model_config"]))
    return resolve(config, "h20-emulated")


def _move(pid: int, cpus: Collection[int], but: int | None = None) -> None:
    """Keep each thread of a process `but` one on these CPUs."""
    for task in Path(f"/proc/{pid}/task").iterdir():
        if int(task.name) == but:
            continue
        with contextlib.suppress(ProcessLookupError):
            os.sched_setaffinity(int(task.name), cpus)


def _measure(
    study: StudyDocument, configuration: str, folder: Path, rounds: int,
    conditions_of: Callable[[Server], Conditions],
) -> None:  # fmt: skip
    """Launch the configuration, and print what its requests saw under each condition."""
    launch = Launch(configuration, 0, "A")
    overlay.install(folder / "overlay")
    where, random_order = folder / "launch", random.Random(study["seed"])
    everywhere = os.sched_getaffinity(0)
    with gated_server(
        study, launch, "host_work", where, lambda _: None, folder / "overlay"
    ) as server:
        os.sched_setaffinity(0, affinity_plan(study).loadgen)
        conditions = conditions_of(server)
        engine = study["config"]["engine"]
        shape, count = (INPUT_TOKENS, OUTPUT_TOKENS), (rounds + 1) * len(conditions)
        requests = iter(planned_requests(study, "host_work", shape, count))
        log, processes = LaunchStepLog(where, engine), ServerProcesses(server.pid, {})
        sweep = engine["device_time"]["sweep_us"]
        values: dict[str, list[NDArray[np.float64]]] = {name: [] for name in conditions}
        headers = {"Content-Type": "application/json"}
        with httpx.Client(
            base_url=server.url, headers=headers, trust_env=False, timeout=60.0
        ) as client:
            for _ in range(rounds + 1):
                for name in random_order.sample(list(conditions), len(conditions)):
                    conditions[name]()
                    body = next(requests).body
                    values[name].append(_request(client, body, log, processes, sweep))
    os.sched_setaffinity(0, everywhere)
    # In the first round the interpreter finds its way.
    _print(f"{configuration}, {rounds} rounds", sweep, {n: v[1:] for n, v in values.items()})


def _request(
    client: httpx.Client, body: bytes, log: LaunchStepLog, processes: ServerProcesses,
    sweep: Sequence[float],
) -> NDArray[np.float64]:  # fmt: skip
    """A row of the table: TTFT in ms, the rest in us.

    Raises:
        GateError: the engine core's thread, or the device's log, is not known.
    """
    log.mark()
    before, began = processes.read().engine, time.monotonic_ns()
    with client.stream("POST", "/v1/completions", content=body) as answer:
        answer.raise_for_status()
        stamps = [time.monotonic_ns() for line in answer.iter_lines() if line]
    after = processes.read().engine
    log.take(began, time.monotonic_ns())
    steps = of_lines(log.take_device())
    if before is None or after is None or before.queued_ns is None or after.queued_ns is None:
        raise GateError("the engine core's thread has no account of its run queue here")
    if not (len(steps) and steps["prefill_tokens"][0]):
        raise GateError(f"a request has {len(steps)} steps of the device and no prefill first")
    device_us, exposed_us = (steps[name].to_numpy() for name in ("device_us", "exposed_us"))
    given = np.array(sweep)[np.abs(device_us[:, None] - sweep).argmin(axis=1)]
    steady = given[1:] == given[:-1]
    exposed = [float(np.median(exposed_us[1:][steady & (given[1:] == us)])) for us in sweep]
    ttft = (stamps[0] - began) / 1e6 - device_us[0] / 1e3
    queued = (after.queued_ns - before.queued_ns) / 1e3 / len(steps)
    return np.array([ttft, exposed_us[0], *exposed, queued])


def _print(
    title: str, sweep: Sequence[float], values: Mapping[str, Sequence[NDArray[np.float64]]]
) -> None:
    table = Table(title=title, box=None)
    first = ("", "TTFT less device, ms", "exposed, prefill, us")
    exposed = (f"at {us / 1e3:g} ms, us" for us in sweep)
    for column in (*first, *exposed, "no CPU, us a step"):
        table.add_column(column, justify="right")
    taken = {name: np.array(rows) for name, rows in values.items()}
    base = next(iter(taken.values()))
    for name, rows in taken.items():
        table.add_row(name, *(f"{value:.1f}" for value in np.median(rows, axis=0)))
        if rows is not base:
            table.add_row("less the first", *map(_interval, (rows - base).T))
    Console(width=160).print(table)


def _interval(differences: NDArray[np.float64]) -> str:
    middle = float(np.median(differences))
    bounds = stats.bootstrap(
        (differences,), np.median, method="percentile", rng=0
    ).confidence_interval
    return f"{middle:+.1f} [{bounds.low:+.1f}, {bounds.high:+.1f}]"


def _run(arguments: argparse.Namespace) -> None:
    print(f"{cpu()}; {INPUT_TOKENS} + {OUTPUT_TOKENS} tokens, one request at a time")
    with (
        hold_devices(devices_of(_study(SLEEP_STEPS)["config"])),
        tempfile.TemporaryDirectory(prefix="host-") as folder,
    ):
        arguments.measure(Path(folder), arguments.rounds)


def _rounds(text: str) -> int:
    rounds = int(text)
    if rounds < MIN_ROUNDS:
        raise argparse.ArgumentTypeError(f"found {text}; allowed: {MIN_ROUNDS} or more")
    return rounds


def main(argv: Sequence[str] | None = None) -> int:
    """Measure which of the host's work a request waits for."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.host_work", description=__doc__)
    commands = parser.add_subparsers(required=True)
    for measure in (sleeps, scheduling, threads):
        command = commands.add_parser(measure.__name__, help=measure.__doc__)
        command.add_argument("--rounds", type=_rounds, default=40, help="default: 40")
        command.set_defaults(measure=measure)
    return run_command(parser, argv, _run, (ArtifactError, DeviceError, GateError))


if __name__ == "__main__":
    sys.exit(main())
