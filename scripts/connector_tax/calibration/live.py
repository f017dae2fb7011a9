"""One launch over real HTTP: the study's own server, load generator, sampler and cell, plus the
engine's truth log, which a study does not ask for; and the client's stamps against that log.

Server and client stamp one clock (CLOCK_MONOTONIC), so their stamps subtract directly. The server
stamps right before it writes; what lies between is the kernel, the wake-up and the client.
"""

import contextlib
import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import msgspec
import pandas as pd

from connector_tax.analysis.validity import in_window
from connector_tax.artifacts import paths
from connector_tax.artifacts.cell_records import (
    AnsweredRequest,
    CellRecord,
    RequestLine,
    is_answered,
)
from connector_tax.artifacts.index import finished_cell, launch_index, write_index
from connector_tax.artifacts.names import Launch
from connector_tax.artifacts.study_records import StudyDocument
from connector_tax.calibration.design import PHASE
from connector_tax.engine.logs import LaunchTruth, RequestTruth
from connector_tax.files import read_jsonl
from connector_tax.servers.kinds import command_for, free_port
from connector_tax.study import cell as cells
from connector_tax.study.device import devices_of, hold_devices
from connector_tax.study.processes import ServerProcesses
from connector_tax.study.scraper import MetricsSampler
from connector_tax.study.server import Server
from connector_tax.study.server_command import affinity_plan, server_cpus
from connector_tax.study.steplog import LaunchStepLog

TRUTH_LOG = "truth.jsonl"
READY_S = 30.0


@dataclass(frozen=True)
class LiveCell:
    """A measured cell, its requests, and what the server knows of each (by request id)."""

    record: CellRecord
    requests: list[RequestLine]
    truth: dict[str, RequestTruth]

    def errors(self, of: Callable[[RequestTruth], bool] = lambda _: True) -> pd.DataFrame:
        """A row for each measured success that the server knows as `of` wants it.

        Columns: `first_us`, `last_us`: the client's stamp of the first and the last token minus the
        server's write; `late_us`: the server's first write minus the end of the step that made the
        token; `ttft_ms`, `tpot_ms` as the client measured them, and `true_ttft_ms`, `true_tpot_ms`
        from the server's writes.
        """
        measured = in_window(self.requests, self.record["window"])
        rows = [
            _row(request, self.truth[request["request_id"]])
            for request in measured
            if is_answered(request) and of(self.truth[request["request_id"]])
        ]
        return pd.DataFrame(rows)


def _row(request: AnsweredRequest, truth: RequestTruth) -> dict[str, float]:
    writes = [(t, deadline) for t, tokens, deadline in truth.writes if tokens]
    (first, deadline), (last, _) = writes[0], writes[-1]
    gaps = request["completion_tokens"] - 1
    t_first, t_last = request["t_first_token_ns"], request["t_last_token_ns"]
    intended = request["t_intended_ns"]
    return {
        "first_us": (t_first - first) / 1e3,
        "last_us": (t_last - last) / 1e3,
        "late_us": (first - deadline) / 1e3,
        "ttft_ms": (t_first - intended) / 1e6,
        "tpot_ms": (t_last - t_first) / gaps / 1e6,
        "true_ttft_ms": (first - intended) / 1e6,
        "true_tpot_ms": (last - first) / gaps / 1e6,
    }


def measure_launch(document: StudyDocument, launch: Launch, root: Path) -> LiveCell:
    """Launch the engine, measure its only cell once, stop it, write its index.json.

    Raises:
        ServerError: the server did not start, or ended during the cell.
        DeviceError: something else is measured on the device.
    """
    folder = launch.folder(root)
    folder.mkdir(parents=True)
    planned = document["cells"][PHASE][0]
    rate_rps = planned["rate_rps"]
    assert rate_rps is not None
    with contextlib.ExitStack() as stack:
        stack.enter_context(hold_devices(devices_of(document["config"])))
        plan = affinity_plan(document)
        if plan.enabled:
            stack.callback(os.sched_setaffinity, 0, os.sched_getaffinity(0))
            os.sched_setaffinity(0, plan.loadgen)
        server = _server(document, launch, folder, server_cpus(plan))
        server.start()
        stack.callback(server.stop, document["config"]["server"]["stop_grace_s"])
        interval_s = document["config"]["metrics"]["interval_s"]
        sampler = stack.enter_context(MetricsSampler(server.url, interval_s, ()))
        server.wait_ready(READY_S)
        generator = stack.enter_context(cells.load_generator(document, server, plan))
        record = cells.measure(
            document,
            launch,
            cells.prepare(document, launch, planned, rate_rps, attempt=1, measurement=1),
            cells.Instruments(
                server,
                ServerProcesses(server.pid, {}),
                generator,
                sampler,
                LaunchStepLog(folder, document["config"]["engine"]),
                watch=None,
            ),
            lambda _: None,
        )
    entry = finished_cell(record, folder / planned["cell"])
    started_utc = record["window"]["started_utc"]
    write_index(folder, launch_index(document, launch, [entry], started_utc=started_utc))
    requests = folder / planned["cell"] / paths.cell_log("requests", PHASE, planned["cell"])
    return LiveCell(record, list(read_jsonl(requests)), read_truth(folder / TRUTH_LOG))


def _server(document: StudyDocument, launch: Launch, folder: Path, cpus: tuple[int, ...]) -> Server:
    host = document["config"]["server"]["host"]
    port = free_port(host)
    command = command_for(document, launch, port)
    command = replace(command, argv=[*command.argv, "--truth-log", TRUTH_LOG])
    return Server(folder, command, f"calibration {launch.name}", host, port, cpus)


def read_truth(path: Path) -> dict[str, RequestTruth]:
    """The requests of an engine's truth log, by request id."""
    decoder = msgspec.json.Decoder(LaunchTruth | RequestTruth)
    with path.open("rb") as stream:
        records = [decoder.decode(line) for line in stream]
    return {r.request_id: r for r in records if isinstance(r, RequestTruth)}
