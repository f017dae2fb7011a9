"""`connector-tax ab`: measure the cost of candidate servers against a baseline.

The arguments become an ordinary study of Phase A in results/<name>/: the servers are queried, the
design is resolved, blocks are measured with an interim analysis after each, and the usual results
are made: tables, figures, report, manifest, audited archive.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import json
import math
import os
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

import psutil

from connector_tax.ab.arguments import BASELINE, parse
from connector_tax.ab.ask import Asked, AskError, asked, differing
from connector_tax.ab.design import (
    FIRST_ANALYSIS,
    arguments_of,
    block_s,
    engine_section,
    labels_of,
    planned_blocks,
    planned_load,
    study_config,
    study_name,
)
from connector_tax.ab.load import Load, LoadError
from connector_tax.ab.void_cells import overload, why_void
from connector_tax.artifacts import paths
from connector_tax.artifacts.folder import StudyFolder
from connector_tax.artifacts.metrics import change_of, word_of
from connector_tax.artifacts.names import Launch
from connector_tax.artifacts.study_file import Study, launches, load_study
from connector_tax.artifacts.study_records import EngineSection, StudyDocument
from connector_tax.config import ConfigError
from connector_tax.files import (
    ArtifactError,
    drop_output,
    read_json,
    write_bytes,
    write_json,
    write_text,
)
from connector_tax.foreign import printable
from connector_tax.loadgen.messages import LoadGeneratorError
from connector_tax.servers.command import missing_command, running_url
from connector_tax.study.cell import load_generator
from connector_tax.study.design import differences, resolve
from connector_tax.study.device import DeviceError, devices_of, hold_devices
from connector_tax.study.doctor import require_short_sockets
from connector_tax.study.guard import (
    kill_leftovers,
    kill_started,
    remove_temporaries,
    set_job_environment,
)
from connector_tax.study.launch import LaunchOutcome, conclude
from connector_tax.study.remeasure import withdraw_failed
from connector_tax.study.server import LOGS, Server
from connector_tax.study.server_command import affinity_plan
from connector_tax.study.shape_rates import ShapeRateError, burst
from connector_tax.vllm import overlay
from connector_tax.vllm.evidence import weaker_notes

# Modules that analyse, compare and draw take seconds to import, so they are imported late.
if TYPE_CHECKING:
    from connector_tax.ab.answer import Answer
    from connector_tax.artifacts.looks import Finding

STOPPED = 130
STOPPING = (signal.SIGINT, signal.SIGTERM)
# The exit status of `gate` if a tax has no number.
NO_NUMBER = 3
# Requests of the first burst at the baseline; bursts grow until the rate is reached.
FIRST_BURST, GROWTH, BURST_S = 4, 4, 15.0
# Assumed duration of a request before the burst: at least this, and this for each token, s.
ASSUMED_LIFE_S, ASSUMED_TOKEN_S = 1.0, 0.1
# A server whose burst throughput is this multiple of the rate can serve the rate.
ENOUGH = 1.2

REFUSALS = (
    *(AskError, ArtifactError, ConfigError, DeviceError, LoadError, LoadGeneratorError),
    *(ShapeRateError, overlay.OverlayError, OSError),
)


class Line:
    """The progress line of a terminal; a log file gets a new line for each change."""

    def __init__(self) -> None:
        self._live = sys.stderr.isatty()
        self._shown = ""

    def show(self, text: str, *more: str, passing: bool = False) -> None:
        """Replace the displayed line.

        Args:
            more: further parts, of which a terminal shows those that fit.
            passing: whether only the time has changed.
        """
        if self._live:
            # The cursor needs the last column. A terminal may not report its width.
            with contextlib.suppress(OSError):
                width = os.get_terminal_size(sys.stderr.fileno()).columns - 1
                text = fitted([text, *more], width if width > 0 else 79)
                write(sys.stderr, f"\r\033[K{text}")
            return
        text = printable(", ".join([text, *more]))
        if text and not passing and text != self._shown:
            write(sys.stderr, f"{text}\n")
        self._shown = text

    def say(self, text: str) -> None:
        """Print a permanent line."""
        text = printable(text)
        write(sys.stderr, f"\r\033[K{text}\n" if self._live else f"{text}\n")


def write(stream: TextIO, text: str) -> OSError | None:
    """Write to a standard stream; if that fails, drop its further output and return the error.

    Without a reader a measurement goes on, since its answer is in the report.
    """
    try:
        stream.write(text)
        stream.flush()
    except OSError as error:
        drop_output(stream)
        return error
    return None


def fitted(parts: Sequence[str], width: int) -> str:
    """Return as many of the parts as fit the width; the first is truncated if needed."""
    text = printable(parts[0])[:width]
    for part in map(printable, parts[1:]):
        if len(text) + 2 + len(part) > width:
            break
        text += f", {part}"
    return text


class Failed(Exception):
    """The study cannot continue; the text gives the cause. Measurements are kept."""


def main(argv: Sequence[str] | None = None) -> int:
    """Measure the candidates' costs; return the exit status, which with --max gives the result."""
    line = Line()
    try:
        return _run(parse(argv), line)
    except Exception as error:
        # An uncaught error would exit with status 1: a cost is above its bound.
        line.say(traceback.format_exc().rstrip())
        line.say(f"ab: internal error ({type(error).__name__}); measurements are kept; please"
                 " report the lines above")  # fmt: skip
        return NO_NUMBER


def _run(options: argparse.Namespace, line: Line) -> int:
    root = Path("results", study_name(options))
    if options.dry_run:
        return _dry_run(options, root, line)
    for number in STOPPING:
        signal.signal(number, _stop)
    try:
        return _compare(options, root, line)
    except KeyboardInterrupt:
        # Servers that this process was querying; the launches of another `ab` of this name go on.
        kill_started(root / paths.PREFLIGHT)
        kill_leftovers(root)
        line.say("ab: stopped; measurements are kept; rerun the same command to resume")
        return STOPPED
    except (Failed, *REFUSALS) as error:
        line.say(f"ab: {error}")
        return NO_NUMBER


def _compare(options: argparse.Namespace, root: Path, line: Line) -> int:
    """Measure what is missing, and print the answer; return the exit status."""
    set_job_environment(None)
    remove_temporaries(root)
    with _held_to_its_end(options, root, line):
        study = _study(options, root, line)
        blocks = _measured(options, study, line)
    answer, problem = _finished(study, blocks, line)
    if options.export_markdown is not None:
        try:
            write_text(options.export_markdown, answer.markdown())
        except OSError as error:
            problem = problem or f"--export-markdown: {error}"
    text = json.dumps(answer.as_dict()) if options.json else answer.text()
    failure = write(sys.stdout, f"{text}\n")
    # Who closes the pipe (`| head`) has read enough.
    if failure is not None and not isinstance(failure, BrokenPipeError):
        problem = problem or f"standard output: {failure}"
    if problem:
        line.say(f"ab: {problem}")
    return NO_NUMBER if problem else answer.status(options.max)


def _held_to_its_end(
    options: argparse.Namespace, root: Path, line: Line
) -> contextlib.AbstractContextManager[None]:
    """Lock the devices for the whole comparison; each launch locks them only until it ends."""
    if (root / paths.COMPLETE).exists():
        return contextlib.nullcontext()
    devices = _devices(options, engine_section(options))
    return hold_devices(devices, say=line.show, purpose="comparison")


def _devices(options: argparse.Namespace, section: EngineSection) -> list[str]:
    config: Any = {"engine": section, "server": {"device": options.device or "cpu"}}
    return devices_of(config)


def _dry_run(options: argparse.Namespace, root: Path, line: Line) -> int:
    """Print which cost the planned blocks would prove, by the numbers of an earlier comparison."""
    from connector_tax.ab.forecast import forecast
    from connector_tax.artifacts.looks import read_looks

    try:
        looks = read_looks(root)
        if not looks:
            raise Failed(
                f"--dry-run: found no interim analysis in {root}; allowed: --name of a comparison"
                f" with at least {FIRST_ANALYSIS} blocks"
            )
        study = load_study(root / paths.STUDY)
        _, each_s = _spent_s(study)
        blocks = planned_blocks(options, each_s)
        lines = forecast(looks[-1]["findings"], blocks, each_s, _labels(study))
        write(sys.stdout, "".join(f"{text}\n" for text in lines))
    except (Failed, ArtifactError) as error:
        line.say(f"ab: {error}")
        return NO_NUMBER
    return 0


def _stop(*_: object) -> None:
    """Stop at the first signal, and ignore later signals during the clean-up."""
    for number in STOPPING:
        # Not SIG_IGN, which child processes would inherit.
        signal.signal(number, lambda *_: None)
    raise KeyboardInterrupt


def _study(options: argparse.Namespace, root: Path, line: Line) -> Study:
    """Return the study of these arguments: the existing one, or a new one after querying its
    servers.
    """
    if root.exists() and not root.is_dir():
        raise Failed(f"{root} is not a folder; give this comparison another --name")
    arguments = json.loads(json.dumps(arguments_of(options)))
    if (root / paths.ARGUMENTS).exists():
        changed = list(differences(read_json(root / paths.ARGUMENTS), arguments))
        if changed:
            raise Failed(f"{root} was begun with other arguments: {'; '.join(changed)}; give this"
                         " comparison another --name")  # fmt: skip
        if (root / paths.STUDY).exists():
            _refuse_other_start(options, load_study(root / paths.STUDY))
    elif (root / paths.STUDY).exists():
        raise Failed(f"{root} holds a study that `ab` did not make; give this comparison another"
                     " --name")  # fmt: skip
    if not (root / paths.STUDY).exists():
        document = _resolved(options, root, line)
        write_json(root / paths.ARGUMENTS, arguments)
        write_json(root / paths.STUDY, document)
    _stage("provenance.environment", root, unless=paths.ENVIRONMENT)
    _stage("study.preflight", root, unless=paths.PREFLIGHT_STATUS)
    _stage("study.patch", root, "apply", unless=paths.PATCH_STATUS)
    return load_study(root / paths.STUDY)


def _refuse_other_start(options: argparse.Namespace, study: Study) -> None:
    """Refuse options for starting servers that differ from those the comparison was begun with."""
    server, access = study.config["server"], study.config["engine"].get("access", {})
    for option, given, begun in (
        ("--ready-timeout", options.ready_timeout, server["ready_timeout_s"]),
        ("--device", options.device or "cpu", server["device"]),
        ("--api-key-env", options.api_key_env, access.get("variable")),
        ("--api-key-header", options.api_key_header, access.get("header")),
    ):
        if given != begun:
            raise Failed(f"{option}: found {given}; {study.root} was begun with {begun}; give this"
                         " comparison another --name")  # fmt: skip


def _resolved(options: argparse.Namespace, root: Path, line: Line) -> StudyDocument:
    """Query every server, the candidates first, and return the resolved design."""
    section = engine_section(options)
    commands = {**section["commands"], **{f"--beside {line}": line for line in options.beside}}
    for name, command in commands.items():
        own_path = running_url(command) is not None or "PATH" in dict(options.env)
        if not own_path and (why := missing_command(command)):
            raise AskError(f"{name}: {why}")
    require_short_sockets(section, root)

    def asking(
        name: str, others: Sequence[Asked] = ()
    ) -> contextlib.AbstractContextManager[tuple[Server, Asked]]:
        line.show(f"querying {name} for its properties")
        chat = options.chat or any(other.served["chat"] for other in others)
        ids = all(other.served["vocab_size"] is not None for other in others)
        return asked(name, section, root, timeout_s=options.ready_timeout, model=options.model,
                     chat=chat, ids=ids, say=line.say)  # fmt: skip

    overlay.install(root / paths.PATCH / "overlay")
    candidates: dict[str, Asked] = {}
    with hold_devices(_devices(options, section), say=line.show):
        # Candidates come first: one that does not start is reported before the baseline loads.
        for name, _ in options.candidate:
            with asking(name) as (_, candidates[name]):
                pass
        # The study sends only requests that the baseline and every candidate accept.
        with asking(BASELINE, list(candidates.values())) as (server, baseline):
            assumed_s = ASSUMED_LIFE_S
            if options.shape is not None:
                assumed_s = max(assumed_s, ASSUMED_TOKEN_S * options.shape[1])
            assumed = planned_load(options, baseline.startup_s, assumed_s)
            _refuse_too_long(assumed, BASELINE, baseline)
            for name, candidate in candidates.items():
                _refuse_other(assumed, baseline, name, candidate)
                if changed := differing(baseline, candidate):
                    label = labels_of(options)[name]
                    line.say(f"note: {label} differs from the baseline also in"
                             f" {'; '.join(changed)}")  # fmt: skip
            planned = resolve(study_config(options, section, baseline, assumed), "design")
            life_s, rate_rps = _measured_capacity(assumed, planned, server, line)
            load = planned_load(options, baseline.startup_s, life_s, rate_rps)
    for candidate in candidates.values():
        served = baseline.served
        served["counters"] = served["counters"] and candidate.served["counters"]
        served["no_steps"] = served["no_steps"] or candidate.served["no_steps"]
    document = resolve(study_config(options, section, baseline, load, life_s), "design")
    for note in load.notes:
        line.say(note)
    if load.traffic is not None:
        write_bytes(root / paths.TRAFFIC, load.lines)
    for warning in affinity_plan(document).warnings:
        line.say(f"warning: {warning}")
    minutes = block_s(options, load, baseline.startup_s, life_s) / 60
    if options.minutes is not None and FIRST_ANALYSIS * minutes > options.minutes:
        if options.metric:
            raise Failed(
                f"--minutes: found {options.minutes:g}; allowed: at least"
                f" {math.ceil(FIRST_ANALYSIS * minutes)}, for {FIRST_ANALYSIS} blocks with enough"
                f" requests for {', '.join(options.metric)}"
            )
        line.say(
            f"warning: --minutes: found {options.minutes:g}; the first {FIRST_ANALYSIS} blocks,"
            f" without which nothing is decided, take about {FIRST_ANALYSIS * minutes:.1f}"
        )
    line.say(f"{root}: up to {document['blocks']} blocks of about {minutes:.1f} min")
    return document


def _refuse_other(load: Load, baseline: Asked, name: str, candidate: Asked) -> None:
    """Refuse a candidate that cannot do the baseline's work."""
    if candidate.served["model"] != baseline.served["model"]:
        raise AskError(
            f"{name} serves another model than the baseline: {differing(baseline, candidate)[0]}"
        )
    _refuse_too_long(load, name, candidate)
    if baseline.served["exact_output"] and not candidate.served["exact_output"]:
        raise AskError(
            f"{name}: its answers do not have the requested length, unlike the baseline's"
        )


def _refuse_too_long(load: Load, name: str, answers: Asked) -> None:
    allowed, option = answers.served.get("max_model_len"), "--trace" if load.traffic else "--shape"
    if allowed is not None and load.longest is not None and load.longest > allowed:
        raise Failed(f"{option}: found a request of {load.longest} tokens; allowed: at most"
                     f" {allowed}, by /v1/models of {name}")  # fmt: skip


def _measured_capacity(
    load: Load, study: StudyDocument, server: Server, line: Line
) -> tuple[float, float]:
    """Return the duration of a request under full load (s), and the served requests/s.

    Raises:
        Failed: the rate is beyond the server's capacity, or no request was answered.
    """
    shape, most = load.shape, study["config"]["cell"]["inflight_cap"]
    line.show("measuring the baseline's capacity")
    alive = functools.partial(server.check_alive, "while its capacity was measured")
    if load.concurrency is not None:
        with load_generator(study, server, affinity_plan(study)) as generator:
            # The first requests of a server are slower.
            for name in ("first", "again"):
                done = burst(study, generator, name, shape, load.concurrency, alive)
        alive()
        if not done:
            raise Failed(f"the baseline answered no request of {shape[0]}x{shape[1]}")
        return done[-1], len(done) / done[-1]
    rate, count, best, life_s = max(load.rates), FIRST_BURST, 0.0, 0.0
    with load_generator(study, server, affinity_plan(study)) as generator:
        while True:
            done = burst(study, generator, "rate", shape, min(count, most), alive)
            alive()
            if not done:
                raise Failed(f"the baseline answered no request of {shape[0]}x{shape[1]}")
            life_s = life_s or done[-1]
            best = max(best, len(done) / done[-1])
            # Requests in flight at the rate, if requests take as long as these.
            needed = math.ceil(ENOUGH * rate * done[-1])
            late = done[-1] > BURST_S and count >= needed
            if best >= ENOUGH * rate or count >= most or late:
                break
            count = max(count * GROWTH, min(needed, most))
    if best < rate:
        option = f"--rate: found {rate:g}"
        if load.traffic and load.traffic["kind"] == "trace":
            option = f"--trace-speed: found {rate:g} requests/s"
        raise Failed(f"{option}; the baseline serves about {best:.2g} requests/s of"
                     f" {shape[0]}x{shape[1]}; allowed: a rate that it can serve")  # fmt: skip
    return life_s, best


def _measured(options: argparse.Namespace, study: Study, line: Line) -> int:
    """Measure blocks until every candidate is decided or the time is up; return their number."""
    from connector_tax.ab.forecast import forecast
    from connector_tax.analysis.looks import look, take_look
    from connector_tax.artifacts.looks import decided

    blocks = study.document["blocks"]
    findings: list[Finding] = []
    why = ""
    for block in range(blocks):
        planned = StudyFolder(study).of_phase("A")
        of_block = [launch for launch in planned if launch.launch.block == block]
        missing = [launch for launch in of_block if launch.index is None]
        if not missing and all(launch.status != "done" for launch in of_block):
            # All launches were left out when the study ended: no interim analysis is due.
            break
        spent_s, each_s = _spent_s(study)
        limit_s = math.inf if options.minutes is None else options.minutes * 60
        if missing and block >= FIRST_ANALYSIS and spent_s + each_s > limit_s:
            why = f"{options.minutes:g} minutes are up"
            break
        if missing:
            _refuse_overload(options, study)
            _run_block(options, study, block, limit_s, findings, line)
        if block + 1 >= FIRST_ANALYSIS:
            findings = take_look(study, block + 1)
            if block + 1 == FIRST_ANALYSIS and blocks > FIRST_ANALYSIS:
                each_s = _spent_s(study)[1]
                for forecast_line in forecast(findings, blocks, each_s, _labels(study)):
                    line.say(forecast_line)
            if decided(findings) == {finding.config for finding in findings}:
                why = f"decided after {block + 1} blocks"
                break
        else:
            findings = look(study, block + 1)
    planned = StudyFolder(study).of_phase("A")
    for launch in planned:
        if launch.index is None:
            launch.folder.mkdir(parents=True, exist_ok=True)
            outcome = LaunchOutcome("skipped", why)
            conclude(study.document, launch.launch, launch.folder, outcome)
    return max(launch.launch.block for launch in planned if launch.status == "done") + 1


def _refuse_overload(options: argparse.Namespace, study: Study) -> None:
    """Raise `Failed` if the baseline's first launch shows that it does not serve the load."""
    if refusal := overload(study, named=options.name is not None):
        raise Failed(refusal)


def _labels(study: Study) -> Mapping[str, str]:
    """Return the labels of the servers by name."""
    entries = study.document["configurations"]
    return {entry["id"]: entry.get("label", entry["id"]) for entry in entries}


def _spent_s(study: Study) -> tuple[float, float]:
    """Return the seconds that all launches have taken, and the mean seconds of a block."""
    planned = StudyFolder(study).of_phase("A")
    indexes = (launch.index for launch in planned)
    walls = [i.timing["wall_s"] + AROUND_S for i in indexes if i is not None and i.status == "done"]
    in_block = len({launch.launch.config for launch in planned})
    return sum(walls), sum(walls) / len(walls) * in_block if walls else 0.0


# Seconds of a launch's process before and after the times that it records.
AROUND_S = 2.0


class Clock:
    """An estimate of the longest remaining time: the missing launches times the mean launch
    time."""

    def __init__(self, study: Study, limit_s: float) -> None:
        self._study, self._limit_s = study, limit_s
        self._planned = launches(study.document, "A")
        self._missing: list[Launch] = []
        self._each_s = self._spent_s = 0.0
        self._since = time.monotonic()

    def words(self) -> str:
        """Return the remaining time, as 3:20 or 25 s; "" before the first launch has ended."""
        root = self._study.root
        missing = [la for la in self._planned if not (la.folder(root) / paths.INDEX).exists()]
        if missing != self._missing:
            self._missing, self._since = missing, time.monotonic()
            self._spent_s, block_s = _spent_s(self._study)
            self._each_s = block_s / len({launch.config for launch in self._planned})
        if not self._each_s:
            return ""
        # The first analysis is made however long its blocks take.
        due = sum(launch.block < FIRST_ANALYSIS for launch in missing)
        limit_s = max(self._limit_s - self._spent_s, due * self._each_s)
        left_s = min(len(missing) * self._each_s, limit_s)
        left_s = max(0.0, left_s - (time.monotonic() - self._since))
        minutes, seconds = divmod(round(left_s), 60)
        return f"{minutes}:{seconds:02} min left" if minutes else f"{seconds} s left"


def _so_far(findings: Sequence[Finding]) -> list[str]:
    """Return each judged metric's change so far, with the candidate's name if there are several."""
    several = len({f.config for f in findings}) > 1
    return [
        f"{f.config + ' ' if several else ''}{word_of(f.metric)} "
        f"{100 * change_of(f.metric, f.estimate):+.1f}%"
        for f in findings
        if f.estimate is not None
    ]


def _run_block(
    options: argparse.Namespace,
    study: Study,
    block: int,
    limit_s: float,
    findings: Sequence[Finding],
    line: Line,
) -> None:
    root, clock, so_far = study.root, Clock(study, limit_s), _so_far(findings)
    of_block = [launch for launch in launches(study.document, "A") if launch.block == block]
    earlier, failed = set(_failures(of_block, root)), dict[str, str]()
    arguments = ["--block", str(block), "--phase", "A", "--logs", str(root / paths.LOGS)]
    passing = False
    with _started("study.block", root, *arguments) as (process, log):
        while True:
            parts = filter(None, [clock.words(), *so_far])
            line.show(f"block {block + 1} of {study.document['blocks']}", *parts, passing=passing)
            passing = True
            with contextlib.suppress(subprocess.TimeoutExpired):
                status = process.wait(1.0)
                break
            for (name, _), why in _failures(of_block, root, earlier).items():
                if failed.setdefault(name, why) is why:
                    first_line = why.partition("\n")[0]
                    line.say(f"note: {name} failed: {first_line}")
            try:
                _refuse_overload(options, study)
            except Failed:
                _interrupt(process)
                raise
    withdraw_failed(of_block, root)
    failed = {name: why for (name, _), why in _failures(of_block, root, earlier).items()}
    drawn = [la for la in StudyFolder(study).of_phase("A") if la.launch.block == block]
    for launch in drawn:
        if launch.index is None and (reason := failed.get(launch.launch.name)):
            raise Failed(
                f"{launch.launch.name} failed: {reason}\nMeasurements are kept; rerun the"
                " same command to resume there"
            )
    if status:
        raise Failed(f"block {block + 1} ended with status {status}: {_end_of(log)}")
    cells = (cell for cell in StudyFolder(study).cells("A") if cell.key.block == block)
    if void := [cell for cell in cells if cell.status == "void"]:
        count = "1 void cell" if len(void) == 1 else f"{len(void)} void cells"
        line.say(f"note: block {block + 1} has {count}: {why_void(void[0])}")


def _interrupt(process: subprocess.Popen[bytes]) -> None:
    """End a block and its launch at once, as Ctrl-C in a terminal does.

    After SIGTERM alone a launch ends with its cell.
    """
    with contextlib.suppress(psutil.NoSuchProcess, ProcessLookupError):
        process.terminate()
        for launch in psutil.Process(process.pid).children():
            launch.send_signal(signal.SIGINT)


def _failures(
    of_block: Sequence[Launch], root: Path, known: Collection[tuple[str, int]] = ()
) -> dict[tuple[str, int], str]:
    """Return why launches failed, by launch name and time (ns), except the failures in `known`."""
    found = {}
    for launch in of_block:
        for name in (paths.INDEX, paths.FAILED_INDEX):
            path = launch.folder(root) / name
            # The file may be renamed or removed while it is read.
            with contextlib.suppress(FileNotFoundError, ArtifactError):
                moment = path.stat().st_mtime_ns
                if (launch.name, moment) not in known:
                    index = read_json(path)
                    if index["status"] == "failed":
                        found[launch.name, moment] = str(index["reason"])
    return found


def _finished(study: Study, blocks: int, line: Line) -> tuple[Answer, str]:
    """Make the missing results of the study; return the answer, and why there is no archive."""
    from connector_tax.ab.answer import answer_of

    root, name = study.root, study.document["study"]
    archive, problem = Path("results", "archive", f"{name}.tar.zst"), ""
    # `remeasure` and the removal of the study's folder leave an older archive.
    if not (archive.exists() and (root / paths.COMPLETE).exists()):
        line.show("making tables, figures, report and archive")
        _stage("analysis.reference", root)
        _stage("report", root)
        try:
            _archive(study, archive)
        except Failed as error:
            problem = str(error)
        line.show("")
    for name in study.configurations:
        logs = (Launch(name, 0, "A").folder(root) / log for log in LOGS)
        log = "".join(path.read_text(errors="replace") for path in logs if path.exists())
        for note in weaker_notes(log):
            line.say(f"note: {_labels(study)[name]}: {note}")
    return answer_of(study, blocks, None if problem else archive), problem


def _archive(study: Study, archive: Path) -> None:
    root = study.root
    _stage("study.patch", root, "revert")
    _stage("provenance.manifest", root)
    _stage("study.complete", root, "--out", str(root / paths.COMPLETE))
    _stage("provenance.pack", root, "pack", "--manifest", "results/MANIFEST.md", "--out",
           str(archive))  # fmt: skip


def _stage(module: str, root: Path, *arguments: str, unless: str | None = None) -> None:
    """Run a stage of the study, unless the file that it makes exists.

    Raises:
        Failed: the stage exited non-zero; the message quotes the last line of its output.
    """
    if unless is not None and (root / unless).exists():
        return
    with _started(module, root, *arguments) as (process, log):
        status = process.wait()
    if status:
        raise Failed(f"{module} ended with status {status}: {_end_of(log)}")


@contextlib.contextmanager
def _started(
    module: str, root: Path, *arguments: str
) -> Iterator[tuple[subprocess.Popen[bytes], Path]]:
    """Run a stage's process; if the `with` body ends early, terminate it and wait for its end.

    The signal is SIGTERM, since the process that measures a block ignores SIGINT.
    """
    log = root / paths.LOGS / f"{module.replace('.', '_')}.ab.log"
    log.parent.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, "-m", f"connector_tax.{module}", *arguments]
    command += ["--study", str(root / paths.STUDY)]
    with log.open("ab") as stream:
        process = subprocess.Popen(command, stdout=stream, stderr=stream, stdin=subprocess.DEVNULL)
    try:
        yield process, log
    finally:
        if process.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                process.terminate()
            process.wait()


def _end_of(log: Path) -> str:
    lines = log.read_text(encoding="utf-8", errors="replace").splitlines()
    return f"{lines[-1] if lines else 'it printed nothing'}\nlog: {log}"


if __name__ == "__main__":
    sys.exit(main())
