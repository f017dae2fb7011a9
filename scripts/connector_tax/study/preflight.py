"""Run the pre-flight gates: decide which configurations are measured, and why others are not.

A gate launches its configuration's server, waits for /v1/models, sends the design's requests one
after the other within the design's time and checks that the engine is still alive (docs/study.md,
"Before anything is measured: gates"). vLLM 0.32 has no `engine_core_failed_total`, so liveness
means the process, its log, /health and, where the series exists, its value.

On a real vLLM every configuration has a gate, and its connector must be active: created under its
name, seen by the step probe in every hook, no part of it failed (vllm.evidence).

The baseline is tested first. Every tax is a comparison with it, so a failed baseline is an error
and not a skip, and the next run tests it again.
"""

import argparse
import contextlib
import functools
import json
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import httpx

from connector_tax.artifacts import paths
from connector_tax.artifacts.cell_records import StepLine
from connector_tax.artifacts.names import Launch, baseline_of
from connector_tax.artifacts.stage_records import GateRecord, VllmDescription
from connector_tax.artifacts.study_file import read_study
from connector_tax.artifacts.study_records import EngineSection, StudyDocument
from connector_tax.commands import run_command, study_parser
from connector_tax.config import ROOT, pythons_of
from connector_tax.files import ArtifactError, write_json, write_text
from connector_tax.foreign import printable
from connector_tax.servers.kinds import ServerError, command_for, engine_of, free_port, publishable
from connector_tax.servers.vllm import connector_classes, transfer_of
from connector_tax.study.cell import planned_requests
from connector_tax.study.device import (
    DeviceError,
    await_free_memory,
    devices_of,
    enter_block_slot,
    hold_devices,
)
from connector_tax.study.doctor import require_short_sockets
from connector_tax.study.guard import end_with_parent, kill_leftovers, utc
from connector_tax.study.resources import engine_record
from connector_tax.study.scraper import parse_metrics
from connector_tax.study.server import PortTakenError, Server, on_a_free_port, removed_lines
from connector_tax.study.server_command import affinity_plan, server_cpus
from connector_tax.study.steplog import LaunchStepLog
from connector_tax.vllm import overlay
from connector_tax.vllm.evidence import (
    active_paths,
    fallback_reason,
    inactive_reason,
    uncounted_bytes,
    unproved_device,
    weaker_notes,
)

FAILED_COUNTER = "vllm:engine_core_failed_total"
PROMPT_TOKENS = 32
# Only for gates, not for launches: UCX then logs its transports.
UCX_TELLS = {"UCX_LOG_LEVEL": "info"}


class GateError(Exception):
    """A configuration did not pass its gate; the text is the reason for the skip."""


class NoBaselineError(Exception):
    """The baseline did not pass its gate; the text gives the reason and the remedy."""


@dataclass(frozen=True, slots=True)
class Gate:
    """The requirements of a gate: number of sequential requests, tokens of each, and total time."""

    requests: int
    max_tokens: int
    within_s: float


GATES = {
    "verify_kv_consumer": Gate(requests=1, max_tokens=4, within_s=30.0),
    "verify_multi_connector": Gate(requests=5, max_tokens=32, within_s=60.0),
    "verify_noop_connector": Gate(requests=5, max_tokens=32, within_s=30.0),
}
# For configurations without a gate in the design.
OTHER_GATE = Gate(requests=5, max_tokens=32, within_s=60.0)


def run_gate(
    study: StudyDocument,
    configuration: str,
    name: str,
    folder: Path,
    note: Callable[[str], None],
    probe: Path | None,
) -> GateRecord:
    """Launch `configuration` in `folder` and test it by the gate called `name`; return its record.

    Args:
        probe: the step probe's overlay folder, None if it is not available.

    Raises:
        GateError: the configuration did not pass; the message names the step and the value.
    """
    with gated_server(study, Launch(configuration, 0, "A"), name, folder, note, probe) as server:
        passed: GateRecord = {"include": True, "reason": f"{name} passed", "paths": {}}
        if not engine_of(study["config"]["engine"]).configured:
            return passed
        steps = steps_of(study, folder) if probe else None
        classes = list(connector_classes(transfer_of(server.command.argv)))
        log = server.log_text()
        paths_taken = active_paths(log)
        note(f"paths: {', '.join(map(' '.join, paths_taken.items())) or 'none named'}")
        device = study["config"]["engine"]["device"]
        reason = inactive_reason(classes, log, steps, device) or fallback_reason(paths_taken)
        if device == "emulated":
            reason = reason or _unproved_device(study, configuration, server, note)
            copies = list(LaunchStepLog(folder, study["config"]["engine"]).take_copies())
            note(f"copied over the emulated link: {sum(copy.size for copy in copies)} bytes")
            values = parse_metrics(server.get("/metrics") or "")
            reason = reason or uncounted_bytes(classes, values, copies)
        if reason is not None:
            raise GateError(reason)
        seen = "the step probe is not available" if steps is None else f"{len(steps)} step records"
        note(f"connector: {' > '.join(classes) or 'none'}; {seen}")
        passed["reason"] = "; ".join([passed["reason"], *weaker_notes(log)])
        passed["paths"] = paths_taken
        if steps is not None:
            passed["steps"] = Counter(step["process"] for step in steps)
        return passed


def _unproved_device(
    study: StudyDocument, configuration: str, server: Server, note: Callable[[str], None]
) -> str | None:
    """Return why a gate's server is not proved to use the emulated device, or None if it is."""
    engine = study["config"]["engine"]
    settings = engine_record(server, engine, None)["settings"]
    steps = LaunchStepLog(server.folder, engine).take_device()
    # A connector may switch off asynchronous scheduling, which is a result and not a failure.
    scheduling = {"async_scheduling": "--no-async-scheduling" not in server.command.argv}
    flags = scheduling if configuration == baseline_of(study["config"]) else {}
    proof = ("model_runner", "async_scheduling", "kv_blocks", "kv_cache_layout", "executor")
    settings_text = ", ".join(f"{name} {settings[name]['value']}" for name in proof)
    note(f"device time emulated in {len(steps)} steps; {settings_text}")
    return unproved_device(engine, settings, steps, flags)


@contextlib.contextmanager
def gated_server(
    study: StudyDocument,
    launch: Launch,
    name: str,
    folder: Path,
    note: Callable[[str], None],
    probe: Path | None,
) -> Iterator[Server]:
    """Yield a server that has passed the requests of the gate `name`; stop it afterwards.

    Raises:
        GateError: the server did not start, serve or stop as required.
        PortTakenError: other processes took every port that was tried: nothing is known of the
            configuration.
        DeviceError: other processes hold the GPUs' memory; nothing is known of the configuration.
    """
    title = f"{name} of study {study['study']}"
    start = functools.partial(_ready_server, study, launch, title, folder, note, probe)
    try:
        server = on_a_free_port(start, note)
        try:
            try:
                _send_requests(study, server, GATES.get(name, OTHER_GATE), name, note)
                _check_engine(server, note)
            except (httpx.HTTPError, ValueError, KeyError, TypeError) as error:
                raise GateError(f"{type(error).__name__}: {error}") from error
            yield server
        finally:
            _stop(server, study, note)
            LaunchStepLog(folder, study["config"]["engine"]).remove()
    except PortTakenError:
        raise
    except ServerError as error:
        raise GateError(str(error)) from error


def _stop(server: Server, study: StudyDocument, note: Callable[[str], None]) -> None:
    note(f"stopped by {server.stop(study['config']['server']['stop_grace_s'])}")
    if server.redacted:
        note(removed_lines(server.redacted))


def _ready_server(
    study: StudyDocument,
    launch: Launch,
    title: str,
    folder: Path,
    note: Callable[[str], None],
    probe: Path | None,
) -> Server:
    settings, cpus = study["config"]["server"], server_cpus(affinity_plan(study))
    folder.mkdir(parents=True, exist_ok=True)
    port = free_port()
    command = command_for(study, launch, port, probe)
    command = replace(command, environment={**UCX_TELLS, **command.environment})
    server = Server(folder, command, title, port, cpus)
    # The log of an earlier start that lost its port before it served.
    LaunchStepLog(folder, study["config"]["engine"]).remove()
    note(f"launching {launch.configuration} on port {port}: {' '.join(command.argv)}")
    try:
        await_free_memory(study["config"])
    except ServerError as error:
        # The configuration was not tested; the next run tests it.
        raise DeviceError(str(error)) from error
    server.start()
    try:
        ready = server.wait_ready(settings["ready_timeout_s"])
    except BaseException:
        _stop(server, study, note)
        raise
    note(f"/v1/models answered 200 after {ready:.2f} s")
    return server


def steps_of(study: StudyDocument, folder: Path) -> list[StepLine]:
    """Return the step records that both processes of an idle server have written to `folder`."""
    lines = LaunchStepLog(folder, study["config"]["engine"]).take(0, time.monotonic_ns())
    return [json.loads(line) for line in lines.splitlines()]


def _send_requests(
    study: StudyDocument, server: Server, gate: Gate, name: str, note: Callable[[str], None]
) -> None:
    model = engine_of(study["config"]["engine"]).served["model"]
    shape = PROMPT_TOKENS, gate.max_tokens
    requests = planned_requests(study, f"preflight/{name}", shape, gate.requests)
    deadline = time.monotonic() + gate.within_s
    with httpx.Client(base_url=server.url, trust_env=False) as client:
        models = client.get("/v1/models").json()["data"]
        if model not in [entry["id"] for entry in models]:
            raise GateError(f"/v1/models names {models}, not {model!r}")
        for number, request in enumerate(requests, 1):
            left = deadline - time.monotonic()
            if left <= 0:
                raise GateError(
                    f"request {number} of {gate.requests} was not begun in {gate.within_s} s"
                )
            body = {**json.loads(request.body), "stream": False}
            del body["stream_options"]
            try:
                answer = client.post("/v1/completions", json=body, timeout=left)
            except httpx.HTTPError as error:
                raise GateError(f"request {number}: {type(error).__name__}: {error}") from error
            if answer.status_code != httpx.codes.OK:
                raise GateError(
                    f"request {number}: status {answer.status_code}: {answer.text[:500]}"
                )
            tokens = answer.json()["usage"]["completion_tokens"]
            if tokens != gate.max_tokens:
                raise GateError(f"request {number}: {tokens} tokens, not {gate.max_tokens}")
            note(f"request {number} of {gate.requests}: 200, {tokens} tokens")


def _check_engine(server: Server, note: Callable[[str], None]) -> None:
    server.check_alive("after the gate's requests")
    with httpx.Client(base_url=server.url, trust_env=False, timeout=10.0) as client:
        health = client.get("/health").status_code
        if health != httpx.codes.OK:
            raise GateError(f"/health answered {health}")
        values = parse_metrics(client.get("/metrics").text)
    failed = sum(v for k, v in values.items() if k.split("{")[0] == FAILED_COUNTER)
    if failed:
        raise GateError(f"{FAILED_COUNTER} is {failed:g}")
    note("process alive, /health 200, no failed engine core")


def preflight(study_file: Path) -> dict[str, GateRecord]:
    """Test every configuration; write verify_<gate>.log files and return the records by id.

    Raises:
        NoBaselineError: the baseline did not pass; no other configuration was launched.
        UnfitError: TMPDIR is too long for Unix sockets.
    """
    end_with_parent(print)
    study = enter_block_slot(read_study(study_file), study_file.parent)
    folder = study_file.parent / paths.PREFLIGHT
    require_short_sockets(study["config"]["engine"], study_file.parent)
    kill_leftovers(study_file.parent)
    engine = engine_of(study["config"]["engine"])
    baseline = baseline_of(study["config"])
    status: dict[str, GateRecord] = {}
    with (
        hold_devices(devices_of(study["config"])),
        _probe(study, folder / "overlay") as (probe, probe_note),
    ):
        for entry in sorted(study["configurations"], key=lambda entry: entry["id"] != baseline):
            gate = engine.gate_of(entry)
            if gate is None:
                status[entry["id"]] = {"include": True, "reason": "no gate", "evidence": None}
                continue
            record = ask_gate(study, entry["id"], gate, folder, probe, probe_note)
            include, reason = record["include"], record["reason"]
            verdict = "include" if include else "SKIP"
            print(printable(f"pre-flight {entry['id']}: {verdict} ({reason})"))
            if entry["id"] == baseline and not include:
                raise NoBaselineError(
                    f"{baseline} did not pass its gate, and every tax is a comparison with it: "
                    f"nothing is measured. {reason}\nThe whole log: "
                    f"{folder / gate}.log. Fix the cause and rerun the same "
                    "command."
                )
            status[entry["id"]] = record
    return status


def ask_gate(
    study: StudyDocument,
    configuration: str,
    gate: str,
    folder: Path,
    probe: Path | None,
    probe_note: str | None = None,
) -> GateRecord:
    """Run a configuration's gate; return its record, passed or not, and write <gate>.log into
    `folder`.

    Args:
        probe: as for `run_gate`.
        probe_note: why there is no probe.
    """
    log: list[str] = []

    def note(line: str) -> None:
        log.append(f"{utc()} {line}")

    if probe_note:
        note(probe_note)
    try:
        record = run_gate(study, configuration, gate, folder / configuration, note, probe)
    except GateError as error:
        record = {"include": False, "reason": f"{gate}: {error}", "paths": {}}
    note(f"{'INCLUDE' if record['include'] else 'SKIP'}: {record['reason']}")
    write_text(folder / f"{gate}.log", "\n".join(log) + "\n")
    return {**record, "evidence": f"{paths.PREFLIGHT}/{gate}.log"}


def fitting_vllm(engine: EngineSection) -> VllmDescription:
    """Return `overlay.describe_vllm` of the engine's vLLM, after checking all interpreters of the
    study.

    Raises:
        OverlayError: a vLLM lacks a hook point, or cannot be examined.
    """
    pythons = pythons_of(engine)
    all_described = [overlay.describe_vllm(ROOT / python) for python in pythons]
    for python, described in zip(pythons, all_described, strict=True):
        if described["missing"]:
            lacking = ", ".join(described["missing"])
            raise overlay.OverlayError(f"vLLM {described['vllm']} lacks {lacking} ({python})")
    return all_described[0]


@contextlib.contextmanager
def _probe(study: StudyDocument, folder: Path) -> Iterator[tuple[Path | None, str | None]]:
    """Yield the step probe for the gates of a real vLLM, or None and the reason; remove it at the
    end.
    """
    engine = study["config"]["engine"]
    pythons = pythons_of(engine)
    if not pythons:
        yield None, None
        return
    try:
        fitting_vllm(engine)
        if engine["device"] == "emulated":
            for python in pythons:
                overlay.refuse_unfit_for_device_time(ROOT / python, engine["device_time_content"])
        overlay.install(folder)
    except overlay.OverlayError as error:
        reason = publishable(str(error))
        if engine["device"] == "emulated":
            raise NoBaselineError(f"nothing can be measured: {reason}") from error
        yield None, f"hooks cannot be seen, since the step probe is not available: {reason}"
        return
    try:
        yield folder, None
    finally:
        overlay.remove(folder)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the pre-flight gates of a study and write preflight_status.json."""
    parser = study_parser("study.preflight", main.__doc__)
    # No verdict is left, so that the next run tests again.
    refusals = (ArtifactError, DeviceError, NoBaselineError, PortTakenError, OSError)
    return run_command(parser, argv, _write_status, refusals)


def _write_status(arguments: argparse.Namespace) -> None:
    status = preflight(arguments.study)
    write_json(arguments.study.parent / paths.PREFLIGHT_STATUS, status)


if __name__ == "__main__":
    sys.exit(main())
