"""The driver of one server launch: start the server, run its cells, stop it, write index.json.

`index.json` is the only output Snakemake knows; it is renamed into place last. Finished cells that
are there and intact are kept, so an interrupted launch resumes at the cell it lost. A launch that
fails (its server dies, a configuration cannot be started) ends as `status: failed` with the end of
the server's log, and the study goes on; `connector_tax.study.complete` makes the run end non-zero.

SIGTERM ends the driver after the current cell, SIGINT at once; neither leaves an index.json.
"""

import argparse
import contextlib
import gc
import importlib
import os
import shutil
import signal
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from pathlib import Path
from types import FrameType
from typing import Any

from connector_tax.commands import run_command, study_parser
from connector_tax.config import ConfigError
from connector_tax.files import ArtifactError, read_json, sha256_file, write_json, write_text
from connector_tax.loadgen import LoadGeneratorError
from connector_tax.loadgen.affinity import AffinityPlan
from connector_tax.seals import seal_launch, seal_settings
from connector_tax.study import cell as cells
from connector_tax.study.child import ChildError
from connector_tax.study.design import PHASES, Launch, cell_order, launches
from connector_tax.study.guard import (
    DeviceBusyError,
    device_lock,
    kill_leftovers,
    watch_parent,
)
from connector_tax.study.machine import MachineWatch
from connector_tax.study.plan import reference_rate
from connector_tax.study.precision import skip_reason
from connector_tax.study.probe import probe_overlay
from connector_tax.study.progress import LaunchProgress
from connector_tax.study.remeasure import refuse_other_design, supersede
from connector_tax.study.sampler import MetricsSampler
from connector_tax.study.server import (
    LOGS,
    PortTakenError,
    Server,
    ServerError,
    affinity_plan,
    command_for,
    free_port,
    hide_root,
    server_cpus,
)
from connector_tax.study.server_use import RESOURCES, SETTINGS, ServerUse
from connector_tax.study.steplog import StepLog

MEASUREMENTS_OF_A_VOID_CELL = 2
PORTS_TRIED = 5
SUMMARY_MODULE = "connector_tax.analysis.measure"


class StopRequested(BaseException):
    """SIGTERM arrived: the driver stops at the next cell boundary."""


class LaunchDriver:
    """Runs one launch of a study."""

    def __init__(self, study_file: Path, launch: Launch, progress: LaunchProgress) -> None:
        self.study: dict[str, Any] = read_json(study_file)
        self.folder = launch.folder(study_file.parent)
        self.launch = launch
        self.progress = progress
        self._study_file = study_file
        self._server: Server | None = None
        self._stop_requested = False
        attempts = self.folder / "attempts.json"
        self._attempts: list[dict[str, Any]] = read_json(attempts) if attempts.exists() else []

    def run(self) -> dict[str, Any]:
        """Run what is missing; the content of index.json, which `seal_launch` completes.

        Raises:
            StopRequested: SIGTERM arrived; finished cells stay.
            DeviceBusyError: another launch holds the device.
        """
        now = _now()
        reason, rate = self._skip_reason(), None
        if reason is None:
            rate = reference_rate(self._study_file.parent, self.launch.phase)
            self.folder.mkdir(parents=True, exist_ok=True)
            with device_lock(self.study["config"]["server"]["device"], self._holder()):
                failure = self._run_cells(rate)
            status, reason = ("failed", failure) if failure else ("done", None)
        else:
            status = "skipped"
            self.progress.say(f"skipped: {reason}")
        return {
            "config": self.launch.config,
            "configuration": self.launch.configuration,
            "block": self.launch.block,
            "phase": self.launch.phase,
            "label": self.study["engine_label"],
            "status": status,
            "reason": reason,
            "rate_rps": rate,
            "depends": {"design_sha256": self.study["design_sha256"]},
            "started_utc": self._attempts[0]["started_utc"] if self._attempts else now,
            "ended_utc": self._attempts[-1]["ended_utc"] if self._attempts else now,
            "attempts": self._attempts,
            "cells": [self._cell_entry(c, status, reason) for c in self._cells()],
            "timing": self._timing(),
        }

    def stop_at_next_boundary(self, *_: object) -> None:
        """SIGTERM handler."""
        self._stop_requested = True
        self.progress.say("SIGTERM: stopping after this cell")

    def die(self) -> None:
        """The parent is gone: take the server along and end at once."""
        if self._server is not None:
            self._server.kill()
        os._exit(1)

    def _cells(self) -> list[dict[str, Any]]:
        return cell_order(self.study, self.launch)

    def _holder(self) -> str:
        return f"pid {os.getpid()}, study {self.study['study']}, {self.launch.name}"

    def _skip_reason(self) -> str | None:
        folder = self._study_file.parent
        gate = read_json(folder / "preflight" / "preflight_status.json")[self.launch.configuration]
        if not gate["include"]:
            return f"pre-flight: {gate['reason']}"
        if self.launch.phase == "A":
            return None
        rates = read_json(folder / "reference_rates.json")
        if self.launch.phase == "Bp" and rates["ref_load"] == rates["ref_safe"]:
            return f"ref_load equals ref_safe ({rates['ref_safe']:g} req/s)"
        return None

    def _run_cells(self, rate_rps: float | None) -> str | None:
        """Measure every missing cell; None, or why the launch failed."""
        killed = kill_leftovers(self.folder)
        if killed:
            self.progress.say(f"killed {killed} processes left over from an interrupted run")
        # An interrupted run has not done it; whether or not anything is left to measure.
        hide_root(self.folder)
        for partial in self.folder.glob("*.partial"):
            shutil.rmtree(partial)
        missing = [
            cell
            for cell in self._cells()
            if not self._is_finished(cell, rate_rps) and self._saturated_below(cell) is None
        ]
        if not missing:
            return None
        attempt = self._new_attempt()
        started = time.monotonic()
        try:
            self._with_a_port(missing, rate_rps, attempt)
        except (ServerError, LoadGeneratorError) as error:
            attempt["failure"] = str(error)
            self.progress.say(f"FAILED: {error}")
            return str(error)
        finally:
            attempt |= {"ended_utc": _now(), "wall_s": time.monotonic() - started}
            self._write_attempts()
        return None

    def _with_a_port(
        self, missing: Sequence[Mapping[str, Any]], rate_rps: float | None, attempt: dict[str, Any]
    ) -> None:
        """Measure; where somebody else takes the port before the server does, on another one."""
        for left in reversed(range(PORTS_TRIED)):
            try:
                with contextlib.ExitStack() as stack:
                    self._measure_all(stack, missing, rate_rps, attempt)
                return
            except PortTakenError as error:
                attempt.setdefault("ports_taken", []).append(attempt["port"])
                if not left:
                    raise
                self.progress.say(f"{str(error).splitlines()[0]}; another port is chosen")

    def _measure_all(
        self,
        stack: contextlib.ExitStack,
        missing: Sequence[Mapping[str, Any]],
        rate_rps: float | None,
        attempt: dict[str, Any],
    ) -> None:
        plan = self._affinity_plan()
        config = self.study["config"]
        step_log = StepLog(self.folder, config["engine"]["kind"])
        step_log.remove()
        server = self._start_server(attempt, plan)
        stack.callback(step_log.remove)
        beside = ThreadPoolExecutor(2)
        # Left last, when the server has been stopped: then the wait for it has ended too.
        stack.callback(beside.shutdown)
        stack.callback(self._stop_server, server, attempt)
        startup_s = beside.submit(server.wait_ready, config["server"]["ready_timeout_s"])
        # What the cells need starts while the server does; none of it is garbage.
        gc.disable()
        summaries = beside.submit(importlib.import_module, SUMMARY_MODULE)
        own_cpus = plan.loadgen if plan.enabled else ()
        interval_s = config["metrics"]["interval_s"]
        sampler = stack.enter_context(MetricsSampler(server.url, interval_s, own_cpus))
        watch = self._machine_watch(stack, plan)
        generator = stack.enter_context(cells.load_generator(self.study, server, plan))
        attempt["load_generator"] = generator.describe()
        summaries.result()
        # Keeps what is there for good out of the collection before every cell.
        gc.freeze()
        gc.enable()
        attempt["startup_s"] = startup_s.result()
        if own_cpus:
            # Not before: what was imported until now could use the server's CPUs too.
            os.sched_setaffinity(0, own_cpus)
        use = ServerUse(self.study, self.launch, server, attempt)
        use.before_load()
        before = server.thread_use()
        stack.callback(lambda: attempt.update(server_threads=_threads(server, before)))
        for position, cell in enumerate(missing, 1):
            rate = cell["rate_rps"] if cell["rate_rps"] is not None else rate_rps
            assert rate is not None
            if (reason := self._saturated_below(cell)) is not None:
                self.progress.say(f"cell {cell['cell']} skipped: {reason}")
                continue
            for measurement in range(1, MEASUREMENTS_OF_A_VOID_CELL + 1):
                if self._stop_requested:
                    raise StopRequested
                prepared = cells.prepare(
                    self.study, self.launch, cell, rate, 10 * attempt["attempt"] + measurement
                )
                self.progress.start_cell(cell["cell"], position, len(missing), rate)
                content = cells.measure(
                    self.study,
                    self.launch,
                    prepared,
                    folder=self.folder,
                    attempt=attempt["attempt"],
                    generator=generator,
                    sampler=sampler,
                    step_log=step_log,
                    watch=watch,
                    server_group=server.pid,
                    check_alive=server.check_alive,
                    read_processes=use.processes.read,
                    on_progress=self.progress.update,
                )
                if content["valid"]:
                    self.progress.say(f"cell {cell['cell']} {_counted(content['counts'])}")
                    break
                self.progress.say(f"cell {cell['cell']} VOID: {'; '.join(content['void_reasons'])}")
                if measurement < MEASUREMENTS_OF_A_VOID_CELL:
                    cells.move_aside(self.folder, cell["cell"], "void")
        use.after_load()

    def _machine_watch(
        self, stack: contextlib.ExitStack, plan: AffinityPlan
    ) -> MachineWatch | None:
        """The process that watches the machine; None in a study without a `quiet` section."""
        config = self.study["config"]
        if "quiet" not in config:
            return None
        gpu = config["engine"].get("device") == "cuda"
        return stack.enter_context(MachineWatch(config["quiet"], plan, gpu=gpu))

    def _affinity_plan(self) -> AffinityPlan:
        """Where server and load generator run."""
        plan = affinity_plan(self.study)
        for line in plan.lines():
            self.progress.note(line)
        return plan

    def _start_server(self, attempt: dict[str, Any], plan: AffinityPlan) -> Server:
        host = self.study["config"]["server"]["host"]
        port = free_port(host)
        attempt["port"] = port
        probe = probe_overlay(self.study, self._study_file.parent)
        command = command_for(self.study, self.launch, port, probe)
        title = f"{self.launch.name} of study {self.study['study']} ({self.study['engine_label']})"
        self._server = server = Server(self.folder, command, title, host, port, server_cpus(plan))
        write_json(
            self.folder / "config.json",
            {
                "study": self.study["study"],
                "design_sha256": self.study["design_sha256"],
                "configuration": next(
                    c for c in self.study["configurations"] if c["id"] == self.launch.configuration
                ),
                "config": self.launch.config,
                "block": self.launch.block,
                "phase": self.launch.phase,
                "engine": self.study["config"]["engine"],
                "argv": command.argv,
                "environment": command.environment,
                "cells": self._cells(),
            },
        )
        environment = self._study_file.parent / "env.txt"
        write_text(self.folder / "env.txt", environment.read_text(encoding="utf-8"))
        server.start()
        return server

    def _stop_server(self, server: Server, attempt: dict[str, Any]) -> None:
        attempt["stopped"] = server.stop(self.study["config"]["server"]["stop_grace_s"])
        self._server = None
        time.sleep(self.study["config"]["server"]["release_s"])

    def _saturated_below(self, cell: Mapping[str, Any]) -> str | None:
        return skip_reason(self.study, self.launch, self.folder, cell)

    def _is_finished(self, cell: Mapping[str, Any], rate_rps: float | None) -> bool:
        name = cell["cell"]
        try:
            content = cells.read_intact(self.folder, self.launch.phase, name)
        except ArtifactError as error:
            aside = cells.move_aside(self.folder, name, "damaged")
            self.progress.say(f"{error}; moved to {aside.name}, measuring the cell again")
            return False
        if content is None:
            return False
        rate = cell["rate_rps"] if cell["rate_rps"] is not None else rate_rps
        if content["schedule"]["rate_rps"] != rate:
            aside = cells.move_aside(self.folder, name, "otherrate")
            self.progress.say(
                f"cell {name} was measured at {content['schedule']['rate_rps']:g} req/s, the "
                f"reference rate is now {rate:g}; kept as {aside.name}, measuring the cell again"
            )
            return False
        self.progress.say(f"cell {name} is there and intact; kept")
        return True

    def _new_attempt(self) -> dict[str, Any]:
        number = len(self._attempts) + 1
        for name in ("launch.sh", RESOURCES, SETTINGS, *LOGS):
            if (self.folder / name).exists():
                stem, suffix = name.rsplit(".", 1)
                (self.folder / name).rename(self.folder / f"{stem}.attempt{number - 1}.{suffix}")
        # `ended_utc` stays as it is when the driver is killed.
        attempt = {"attempt": number, "pid": os.getpid(), "started_utc": _now(), "ended_utc": None}
        self._attempts.append(attempt)
        self._write_attempts()
        return attempt

    def _write_attempts(self) -> None:
        write_json(self.folder / "attempts.json", self._attempts)

    def _cell_entry(
        self, cell: Mapping[str, Any], status: str, reason: str | None
    ) -> dict[str, Any]:
        name = cell["cell"]
        if status == "skipped":
            return {"cell": name, "status": "skipped", "reason": reason, "files": {}}
        content = cells.read_intact(self.folder, self.launch.phase, name)
        if content is None and (saturated := self._saturated_below(cell)) is not None:
            return {"cell": name, "status": "skipped", "reason": saturated, "files": {}}
        if content is None:
            return {"cell": name, "status": "missing", "reason": reason, "files": {}}
        own = cells.cell_file(self.launch.phase, name)
        return {
            "cell": name,
            "status": "valid" if content["valid"] else "void",
            "reason": "; ".join(content["void_reasons"]) or None,
            "files": {**content["files"], own: sha256_file(self.folder / name / own)},
        }

    def _timing(self) -> dict[str, float]:
        # Also the first measurement of a void cell, which stands aside as <cell>.void<k>.
        windows = [read_json(path)["window"] for path in self.folder.glob("*/cell_*.json")]
        return {
            "startup_s": sum(a.get("startup_s", 0.0) for a in self._attempts),
            "cells_s": sum(w["t_drained_ns"] - w["t_origin_ns"] for w in windows) / 1e9,
            "release_s": self.study["config"]["server"]["release_s"] * len(self._attempts),
            "wall_s": sum(a.get("wall_s", 0.0) for a in self._attempts),
        }


def _threads(server: Server, before: Mapping[str, Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Who used the server's CPUs while the cells ran, busiest first; idle threads are left out."""
    rows = [
        {
            "name": name,
            **use,
            "cpu_s": round(use["cpu_s"] - before.get(name, {"cpu_s": 0})["cpu_s"], 2),
        }
        for name, use in server.thread_use().items()
    ]
    return sorted((r for r in rows if r["cpu_s"] > 0), key=lambda r: -r["cpu_s"])


def _counted(counts: Mapping[str, Any]) -> str:
    text = f"valid, {counts['measured_ok']} requests measured"
    others = {**counts["failed"], "dropped": counts["dropped"]}
    return ", ".join([text, *(f"{number} {kind}" for kind, number in others.items() if number)])


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="milliseconds")


def write_summary(driver: LaunchDriver) -> None:
    """summary.json: percentiles of each finished cell."""
    module = importlib.import_module(SUMMARY_MODULE)
    summaries = {
        path.name: module.summarise_cell(path)
        for cell in cell_order(driver.study, driver.launch)
        if (path := driver.folder / cell["cell"]).exists()
    }
    write_json(driver.folder / "summary.json", summaries)


def main(argv: Sequence[str] | None = None) -> int:
    """Run one server launch of a study: every missing cell of (configuration, block, phase)."""
    parser = study_parser("study.launch", main.__doc__)
    parser.add_argument(
        "--config",
        required=True,
        help="configuration id, or plain_2 and so on",
    )
    parser.add_argument("--block", type=int, required=True)
    parser.add_argument("--phase", choices=PHASES, required=True)
    parser.add_argument("--log", type=Path, required=True)
    # A full or read-only disk leaves no index.json: the next run measures what is missing.
    refusals = (ArtifactError, ConfigError, DeviceBusyError, ChildError, OSError)
    return run_command(parser, argv, _drive, refusals)


def _drive(arguments: argparse.Namespace) -> int:
    launch = Launch(arguments.config, arguments.block, arguments.phase)
    try:
        study = read_json(arguments.study)
        if launch not in launches(study, launch.phase):
            print(f"{arguments.study}: no launch {launch.name} in run_order", file=sys.stderr)
            return 2
        with LaunchProgress(study, arguments.study.parent, launch, arguments.log) as progress:
            aside = supersede(launch, arguments.study.parent)
            if aside is not None:
                progress.say(f"measured again on request; the old launch is kept in {aside}")
            refuse_other_design(study, launch, arguments.study.parent)
            seal_settings(arguments.study.parent, study)
            driver = LaunchDriver(arguments.study, launch, progress)
            watch_parent(driver.die)
            signal.signal(signal.SIGTERM, _handler(driver.stop_at_next_boundary))
            index = driver.run()
            write_summary(driver)
            seal_launch(arguments.study.parent, launch.name, driver.folder / "index.json", index)
    except StopRequested:
        return 128 + signal.SIGTERM
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    return 0


def _handler(action: Callable[..., None]) -> Callable[[int, FrameType | None], None]:
    return lambda number, frame: action(number, frame)


if __name__ == "__main__":
    sys.exit(main())
