"""Compare decode steps of servers that take turns every few seconds, on a host of drifting speed.

All servers start together, and all but one are stopped (SIGSTOP). In a slice one server answers
batches of equal requests that arrive at once, one batch after the other for --slice-s. Its value is
the median over the answers of the time per token after the first, which is a step's duration. A
round has a slice of each server and batch size, in random order; a server's step is compared with
plain's in the same round. The output has medians over the rounds, with the 95% interval of the
median by order statistics.

The interval covers only these server processes. For two servers, plain and the first other one,
differences between launches are tested too: if --minutes allow, both are restarted and as many
rounds follow. All servers must fit into memory together (--kv-cache-memory-bytes on a GPU).

--step-ms is for an emulated device: each of its steps takes this long, and the last table gives the
shortest length that hides the host's work, so that the step is at most 1% longer than the device's.
"""

import argparse
import contextlib
import json
import math
import os
import shutil
import signal
import statistics
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

from benchmarks import machine, parser_of
from connector_tax.artifacts.names import Launch, baseline_of, configuration_of
from connector_tax.artifacts.study_file import read_study
from connector_tax.artifacts.study_records import StudyDocument
from connector_tax.commands import run_command
from connector_tax.files import ArtifactError
from connector_tax.loadgen.generator import LoadGenerator
from connector_tax.loadgen.messages import LoadGeneratorError, RequestRecord
from connector_tax.ranks import order_statistic_ranks
from connector_tax.seeds import named_generator
from connector_tax.servers.kinds import ServerError, command_for, free_port
from connector_tax.study.cell import load_generator
from connector_tax.study.device import DeviceError, devices_of, hold_devices
from connector_tax.study.guardian import started_for
from connector_tax.study.processes import stat_of
from connector_tax.study.server import Server
from connector_tax.study.server_command import affinity_plan, server_cpus
from connector_tax.study.shape_rates import ShapeRateError, all_at_once
from connector_tax.vllm import overlay
from connector_tax.vllm.evidence import dead_reason

PROMPT_TOKENS, ANSWER_TOKENS = 32, 128
ANSWERS_S = 30.0
HIDDEN = 1.01
# Coefficients whose device time is `besides_us` alone.
NO_ROOFLINE = dict.fromkeys(("linear_flops_s", "attention_flops_s", "bandwidth_bytes_s"), 1e30)


@dataclass(frozen=True)
class Turn:
    """A launched server that is stopped between its slices."""

    name: str
    server: Server
    generator: LoadGenerator

    def signal(self, number: signal.Signals) -> list[int]:
        """Send a signal to all processes of server and companions; return these processes."""
        pids = [pid for pid, _ in started_for(self.server.folder)]
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)
        return pids

    def stop(self) -> None:
        """Stop the server until `running`, and wait until none of its processes runs."""
        pids = self.signal(signal.SIGSTOP)
        while any((stat := stat_of(pid)) and stat.state not in "TZX" for pid in pids):
            time.sleep(0.001)

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """Resume the server and wait until it answers; stop it again after the `with` block.

        Raises:
            ServerError: the server does not answer in ANSWERS_S.
        """
        self.signal(signal.SIGCONT)
        try:
            # When it first answers, the server has closed connections that idled too long.
            deadline = time.monotonic() + ANSWERS_S
            while self.server.get("/v1/models") is None:
                self.server.check_alive("when it was resumed")
                if time.monotonic() > deadline:
                    raise ServerError(f"{self.name}: no answer {ANSWERS_S:g} s after SIGCONT")
            yield
        finally:
            self.stop()


# Medians of slices (us) by batch size and server, one value per round.
Rounds = Mapping[tuple[int, str], Sequence[float]]


def _step_us(record: RequestRecord) -> float:
    """Return an answer's time per token after the first, in us."""
    if record.status != "ok" or record.t_first_token_ns is None or record.t_last_token_ns is None:
        raise ShapeRateError(f"a request of a slice ended as {record.status}, not answered")
    return (record.t_last_token_ns - record.t_first_token_ns) / 1e3 / (ANSWER_TOKENS - 1)


class Slices:
    """Servers of one study that take turns.

    Args:
        study: a study with its servers and load generator.
        folder: the folder for the servers' files.
        batches: numbers of sequences that decode together.
        slice_s: length of a slice in s.
    """

    def __init__(
        self, study: StudyDocument, folder: Path, batches: Sequence[int], slice_s: float
    ) -> None:
        self._study, self._folder, self._batches = study, folder, batches
        self._slice_s = slice_s
        self._plan = affinity_plan(study)
        self._turns: dict[str, Turn] = {}
        self._stacks: dict[str, contextlib.ExitStack] = {}
        self._batches_sent = 0

    def start(self, names: Sequence[str]) -> None:
        """Start servers together, replacing those with the same names; leave all stopped.

        Raises:
            ServerError: one does not start, or its connector cannot transfer.
        """
        config = self._study["config"]
        probe = None
        if config["engine"].get("device") == "emulated":
            probe = self._folder / "overlay"
            overlay.install(probe)
        started = {}
        for name in names:
            if name in self._stacks:
                self._stacks[name].close()
            stack = self._stacks[name] = contextlib.ExitStack()
            # A connector's fixed port depends on the study's name.
            renamed = self._study | {"study": f"{self._study['study']}-{name}"}
            command = command_for(renamed, Launch(name, 0, "A"), port := free_port(), probe)
            folder = self._folder / f"{name}.{self._batches_sent}"
            folder.mkdir()
            server = Server(folder, command, name, port, server_cpus(self._plan))
            server.start()
            stack.callback(server.stop, config["server"]["stop_grace_s"])
            started[name] = server
        # Servers that share CPUs take as long together as one after the other.
        longest_s = len(started) * config["server"]["ready_timeout_s"]
        for name, server in started.items():
            server.wait_ready(longest_s)
            self._refuse_dead(name, server)
            stack = self._stacks[name]
            generator = stack.enter_context(load_generator(self._study, server, self._plan))
            turn = self._turns[name] = Turn(name, server, generator)
            stack.callback(turn.signal, signal.SIGCONT)
        for name in names:
            for batch in self._batches:
                self._slice(self._turns[name], batch)
            self._turns[name].stop()

    def _refuse_dead(self, name: str, server: Server) -> None:
        device = self._study["config"]["engine"].get("device", "")
        if dead := dead_reason(server.log_text(), device):
            raise ServerError(f"{name}: {dead}")

    def measure(self, names: Sequence[str], rounds: int, deadline_s: float) -> Rounds:
        """Measure up to `rounds` rounds that begin before the deadline; return their slices.

        Raises:
            ServerError: a server has ended, or its connector can no longer transfer.
        """
        values: dict[tuple[int, str], list[float]] = defaultdict(list)
        pairs = [(batch, name) for batch in self._batches for name in names]
        for _ in range(rounds):
            if values and time.monotonic() > deadline_s:
                break
            order = named_generator(f"{self._study['seed']}/slices/{self._batches_sent}")
            for number in order.permutation(len(pairs)):
                batch, name = pairs[number]
                with self._turns[name].running():
                    values[batch, name].append(self._slice(self._turns[name], batch))
        for name in names:
            self._turns[name].server.check_alive("while it took turns")
            self._refuse_dead(name, self._turns[name].server)
        return values

    def _slice(self, turn: Turn, batch: int) -> float:
        """Return a slice's median step in us."""
        values: list[float] = []
        end_s = time.monotonic() + self._slice_s
        while not values or time.monotonic() < end_s:
            self._batches_sent += 1
            name = f"slices/{turn.name}/{self._batches_sent}"
            shape = (PROMPT_TOKENS, ANSWER_TOKENS)
            records = all_at_once(self._study, turn.generator, name, shape, batch).records
            values += [_step_us(record) for record in records]
        return statistics.median(values)

    def close(self) -> None:
        """Stop all servers."""
        with contextlib.ExitStack() as stack:
            for one in self._stacks.values():
                stack.callback(one.close)
        overlay.remove(self._folder / "overlay")


def median_interval(values: Sequence[float]) -> tuple[float, float, float]:
    """Return the median and the ends of its 95% interval, which are infinite for too few values."""
    ordered = [-math.inf, *sorted(values), math.inf]
    low, high = order_statistic_ranks(len(values), 50, 0.95)
    return statistics.median(values), ordered[low or 0], ordered[-1 if high is None else high]


def _in_order(rounds: Rounds, baseline: str) -> list[tuple[int, str]]:
    """Return the keys by batch size, the baseline first and the others by name."""
    return sorted(rounds, key=lambda key: (key[0], key[1] != baseline, key[1]))


def _table(rounds: Rounds, baseline: str, title: str) -> Table:
    table = Table(title=title, box=None, title_justify="left")
    over = f"over {baseline}"
    for column in ("sequences", "server", "step, us", f"{over}, us", f"{over}, %"):
        table.add_column(column, justify="right")
    for batch, name in _in_order(rounds, baseline):
        values = rounds[batch, name]
        plain = rounds[batch, baseline]
        pairs = list(zip(values, plain, strict=True))
        differences = [
            ("{:+.0f} [{:+.0f}, {:+.0f}]", [a - b for a, b in pairs]),
            ("{:+.1f} [{:+.1f}, {:+.1f}]", [100 * (a / b - 1) for a, b in pairs]),
        ]
        words = [
            text.format(*median_interval(of)) if name != baseline else ""
            for text, of in differences
        ]
        table.add_row(str(batch), name, f"{statistics.median(values):,.0f}", *words)
    return table


def _print(rounds: Rounds, baseline: str, title: str) -> None:
    count = len(next(iter(rounds.values())))
    Console(width=110).print(_table(rounds, baseline, f"{title}, {count} rounds"))


def compare(options: argparse.Namespace, study: StudyDocument, title: str) -> Rounds:
    """Measure and print one set of servers, then two of them restarted; return the first set's
    rounds.
    """
    baseline = baseline_of(study["config"])
    began = time.monotonic()
    deadline_s = began + 60 * options.minutes
    # The folder is kept after an error, whose message names a log in it.
    folder = Path(tempfile.mkdtemp(prefix="slices-"))
    slices = Slices(study, folder, options.batches, options.slice_s)
    swapped = [baseline, next(name for name in options.servers if name != baseline)]
    try:
        slices.start(options.servers)
        start_s = time.monotonic() - began
        first = slices.measure(options.servers, options.rounds, deadline_s)
        _print(first, baseline, f"{title}one launch of each")
        round_s = (time.monotonic() - began - start_s) / options.rounds
        share = len(swapped) / len(options.servers)
        if time.monotonic() + share * (start_s + options.rounds * round_s) < deadline_s:
            slices.start(swapped)
            again = slices.measure(swapped, options.rounds, deadline_s)
            _print(again, baseline, f"{title}{' and '.join(swapped)} launched anew")
        else:
            print("No second launch: --minutes are up.")
    finally:
        slices.close()
    shutil.rmtree(folder)
    print("Intervals cover these server processes only, not differences between launches.")
    return first


def with_step(study: StudyDocument, step_ms: float) -> StudyDocument:
    """Return a study whose emulated device takes `step_ms` for each step.

    Raises:
        ArtifactError: its device is not emulated.
    """
    changed: StudyDocument = json.loads(json.dumps(study))
    content = changed["config"]["engine"].get("device_time_content")
    if content is None:
        raise ArtifactError(f"--step-ms: {study['study']} has no emulated device; leave it out")
    content |= {**NO_ROOFLINE, "besides_us": 1e3 * step_ms}
    return changed


def _hidden(by_step: Mapping[float, Rounds], baseline: str) -> Table:
    table = Table(title="shortest device step that hides the host's work", box=None,
                  title_justify="left")  # fmt: skip
    for column in ("sequences", "server", "ms"):
        table.add_column(column, justify="right")
    for batch, name in _in_order(next(iter(by_step.values())), baseline):
        hides = [
            step_ms
            for step_ms, rounds in by_step.items()
            if statistics.median(rounds[batch, name]) <= HIDDEN * 1e3 * step_ms
        ]
        table.add_row(str(batch), name, f"{min(hides):g}" if hides else "none of these")
    return table


def _run(options: argparse.Namespace) -> None:
    study = read_study(options.study)
    baseline = baseline_of(study["config"])
    known = {entry["id"] for entry in study["configurations"]}
    options.servers = options.servers or [baseline, f"{baseline}_2", *sorted(known - {baseline})]
    options.servers = list(dict.fromkeys(options.servers))
    if unknown := {configuration_of(name) for name in options.servers} - known:
        raise ArtifactError(f"--servers: {', '.join(sorted(unknown))}: not in the study")
    if baseline not in options.servers or len(options.servers) < 2:
        raise ArtifactError(f"--servers: found {' '.join(options.servers)}; allowed: {baseline} and"
                            " others")  # fmt: skip
    if min(options.rounds, *options.batches) < 1:
        raise ArtifactError("--rounds, --batches: found a number below 1; allowed: 1 and more")
    study["config"]["load_generator"]["keep_reads"] = False
    # Otherwise SIGTERM would leave the servers to their guardians.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    print(f"{study['engine_label']}; {machine()}")
    with hold_devices(devices_of(study["config"])):
        if not options.step_ms:
            compare(options, study, "")
            return
        by_step = {
            step_ms: compare(options, with_step(study, step_ms), f"device step {step_ms:g} ms: ")
            for step_ms in options.step_ms
        }
        Console(width=110).print(_hidden(by_step, baseline))


def main(argv: Sequence[str] | None = None) -> int:
    """Compare the decode steps of servers that take turns."""
    parser = parser_of(__file__, __doc__)
    add = parser.add_argument
    add("--study", type=Path, required=True,
        help="results/<study>/study.json; fetch its model first")  # fmt: skip
    add("--servers", nargs="+", default=[], metavar="NAME",
        help="plain_2 is a second server of plain (default: plain, plain_2, others)")  # fmt: skip
    add("--batches", nargs="+", type=int, default=[1, 16],
        help="numbers of decoding sequences (default: 1 16)")  # fmt: skip
    add("--slice-s", type=float, default=3.0, help="length of a slice (default: 3)")
    add("--rounds", type=int, default=15, help="rounds; an interval needs six (default: 15)")
    add("--minutes", type=float, default=10.0, help="longest time of each --step-ms (default: 10)")
    add("--step-ms", nargs="+", type=float, default=[], help="emulated step times (ms)")
    refusals = (ArtifactError, DeviceError, LoadGeneratorError, ServerError, ShapeRateError,
                overlay.OverlayError)  # fmt: skip
    return run_command(parser, argv, _run, refusals)


if __name__ == "__main__":
    sys.exit(main())
