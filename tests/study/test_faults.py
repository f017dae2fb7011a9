"""Test a cell with each fault of the embedded engine: it is void, failed, or valid with right
stamps.

Server and client use one clock (CLOCK_MONOTONIC), so their stamps can be subtracted. The server
stamps right before it writes; the difference is kernel, wake-up and client.
"""

import contextlib
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np
import pytest

from connector_tax.analysis.validity import in_window
from connector_tax.artifacts import paths
from connector_tax.artifacts.cell_records import CellRecord, is_answered
from connector_tax.artifacts.names import PLAIN, Launch
from connector_tax.artifacts.study_file import read_study
from connector_tax.artifacts.study_records import StudyDocument
from connector_tax.engine.faults import FaultKind
from connector_tax.engine.logs import LaunchTruth, RequestTruth
from connector_tax.files import read_jsonl
from connector_tax.servers.kinds import ServerError, command_for, free_port
from connector_tax.study import cell as cells
from connector_tax.study.processes import ServerProcesses
from connector_tax.study.scraper import MetricsSampler
from connector_tax.study.server import Server
from connector_tax.study.server_command import affinity_plan, server_cpus
from connector_tax.study.steplog import LaunchStepLog
from tests.study.driving import write_study

VOID, VALID, FAILED = "void", "valid", "failed"
CELL = {
    "warmup_s": 0.3,
    "floor_s": 1.5,
    "cap_s": 1.5,
    "min_completed": 1,
    "request_timeout_s": 3.0,
}
# Only the fault may void a cell here, whatever else this machine is doing.
VALIDITY = {
    "schedule_lag_p99_ms": 1000.0,
    "schedule_lag_ttft_fraction": 1.0,
    "sent_rate_tolerance": 0.9,
    "loop_lag_p99_ms": 1000.0,
    "loop_lag_max_ms": 10_000.0,
    "max_cpu_share": 1.0,
}
# A stamp taken at the wrong event is off by at least a step, 3 ms.
STAMP_ERROR_MAX_US = 1500.0


class Case(NamedTuple):
    """A fault rule and the state of its cell.

    Attributes:
        name: the kind, with the difference between cases of one kind.
        rule: of the engine's `faults` section.
        expected: state of the cell, or failed: the launch fails and keeps no cell.
        must_name: part of the void reason or of the launch's failure; for a valid cell, why it is.
    """

    name: str
    rule: Mapping[str, Any]
    expected: str
    must_name: str


def _struck(kind: str, **parameters: Any) -> dict[str, Any]:
    return {"kind": kind, "probability": 0.2, **parameters}


CASES = (
    Case("fin", _struck("fin", after_tokens=2), VOID, "error_rate"),
    Case("rst", _struck("rst", after_tokens=2), VOID, "error_rate"),
    Case("error_event", _struck("error_event", after_tokens=2), VOID, "error_rate"),
    Case("no_done", _struck("no_done"), VOID, "error_rate"),
    Case("http_429", _struck("http_429"), VOID, "error_rate"),
    Case("http_500", _struck("http_500"), VOID, "error_rate"),
    Case("wrong_length +1", _struck("wrong_length", tokens=1), VOID, "error_rate"),
    Case("wrong_length -1", _struck("wrong_length", tokens=-1), VOID, "error_rate"),
    Case("delay_headers > time-out", _struck("delay_headers", ms=4500.0), VOID, "error_rate"),
    Case("stall > time-out", _struck("stall", after_tokens=2, ms=4500.0), VOID, "error_rate"),
    Case("prefix_hit", {"kind": "prefix_hit", "at": [40]}, VOID, "prefix_cache_hits"),
    Case("slow_metrics > time-out", {"kind": "slow_metrics", "at": [2], "ms": 6000.0}, VOID,
         "metrics_scrapes"),
    Case("malformed_metrics", {"kind": "malformed_metrics", "at": [2]}, VOID, "metrics_scrapes"),
    Case("refuse_start", {"kind": "refuse_start"}, FAILED, "before it was ready"),
    Case("die", {"kind": "die", "at": [40]}, FAILED, "ended with status"),
    Case("none (control)", _struck("crlf") | {"probability": 0.0}, VALID, "nothing is injected"),
    Case("coalesce", _struck("coalesce", tokens=4), VALID,
         "every token arrives; a read's stamp is that of its write, and events are not counted"),
    Case("split_event", _struck("split_event", at_byte=12, ms=2.0), VALID,
         "an event is complete, and stamped, with its last byte"),
    Case("crlf", _struck("crlf"), VALID, "CR LF ends a line of an event stream as LF does"),
    Case("delay_headers < time-out", _struck("delay_headers", ms=20.0), VALID,
         "a slower server is what is measured: the delay is in TTFT, as it should be"),
    Case("stall < time-out", _struck("stall", after_tokens=2, ms=20.0), VALID,
         "a slower server is what is measured: the stall is in TPOT, as it should be"),
    Case("slow_metrics < time-out", {"kind": "slow_metrics", "at": [2], "ms": 200.0}, VALID,
         "the sampler is a process of its own; a late scrape delays no request"),
)  # fmt: skip
MARKS: dict[str, pytest.MarkDecorator | tuple[pytest.MarkDecorator, ...]] = {
    **dict.fromkeys(("fin", "refuse_start"), ()),
    **dict.fromkeys(("prefix_hit", "crlf"), pytest.mark.workflow),
}


def test_every_fault_switch_has_a_case() -> None:
    assert {case.rule["kind"] for case in CASES} == set(FaultKind)


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(case, id=case.name, marks=MARKS.get(case.name, pytest.mark.long))
        for case in CASES
    ],
)
def test_each_fault_gives_its_cell_the_expected_state(case: Case, tmp_path: Path) -> None:
    document = _document(tmp_path, case.rule)
    launch = Launch(PLAIN, 0, "A")
    folder = launch.folder(tmp_path)
    if case.expected == FAILED:
        with pytest.raises(ServerError, match=case.must_name):
            _measure(document, launch, folder)
        return
    record = _measure(document, launch, folder)
    assert (VALID if record["valid"] else VOID) == case.expected, record["void_reasons"]
    if case.expected == VOID:
        assert case.must_name in "; ".join(record["void_reasons"])
    else:
        assert _stamp_errors_us(record, folder) < STAMP_ERROR_MAX_US


def _document(root: Path, rule: Mapping[str, Any]) -> StudyDocument:
    """Return a study of one cell: 60 requests/s of 64 and 8 tokens."""
    document = read_study(write_study(root, [dict(rule)]))
    config: Any = document["config"]
    config["cell"] |= CELL
    config["validity"] |= VALIDITY
    config["metrics"]["interval_s"] = 0.25
    planned = document["cells"]["A"][0]
    shape = {"rate_rps": 60.0, "input_tokens": 64, "output_tokens": 8}
    document["cells"]["A"] = [{**planned, "cell": "r60", **shape}]  # type: ignore[typeddict-item]
    return document


def _measure(document: StudyDocument, launch: Launch, folder: Path) -> CellRecord:
    """Launch the engine with its truth log and measure its only cell once, as a driver does."""
    folder.mkdir(parents=True)
    config, planned = document["config"], document["cells"][launch.phase][0]
    assert planned["rate_rps"] is not None
    plan, port = affinity_plan(document), free_port()
    command = command_for(document, launch, port)
    command = replace(command, argv=[*command.argv, "--truth-log", "truth.jsonl"])
    with contextlib.ExitStack() as stack:
        server = Server(folder, command, launch.name, port, server_cpus(plan))
        server.start()
        stack.callback(server.stop, config["server"]["stop_grace_s"])
        sampler = MetricsSampler(server.endpoint, config["metrics"]["interval_s"], ())
        stack.enter_context(sampler)
        server.wait_ready(30.0)
        generator = stack.enter_context(cells.load_generator(document, server, plan))
        step_log = LaunchStepLog(folder, config["engine"])
        processes = ServerProcesses(server.pid, {})
        prepared = cells.prepare(
            document, folder, launch, planned, planned["rate_rps"], attempt=1, measurement=1
        )
        instruments = cells.Instruments(server, processes, generator, sampler, step_log, watch=None)
        return cells.measure(document, launch, prepared, instruments, lambda _: None)


def _stamp_errors_us(record: CellRecord, folder: Path) -> float:
    """Return the median of client minus server stamps (us), the larger of first and last token's.

    It counts the answers that the fault struck, or all answers if it struck none.
    """
    decoder = msgspec.json.Decoder(LaunchTruth | RequestTruth)
    truth = {
        line.request_id: line
        for line in decoder.decode_lines((folder / "truth.jsonl").read_bytes())
        if isinstance(line, RequestTruth)
    }
    cell = record["cell"]
    requests = list(read_jsonl(folder / cell / paths.cell_log("requests", "A", cell)))
    answered = [r for r in in_window(requests, record["window"]) if is_answered(r)]
    struck = [r for r in answered if truth[r["request_id"]].fault is not None] or answered
    errors = []
    for request in struck:
        writes = [t for t, tokens, _ in truth[request["request_id"]].writes if tokens]
        first = request["t_first_token_ns"] - writes[0]
        errors.append((first, request["t_last_token_ns"] - writes[-1]))
    return float(np.abs(np.median(errors, axis=0)).max()) / 1e3
