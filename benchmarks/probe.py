"""Measure the step probe's cost in microseconds per step, and its effect on a real vLLM.

`cost` calls the probe's own wrappers on classes that do nothing, so only the probe's time remains.
Warm: steps in a loop; the thread's CPU time in the shortest round, since the machine prolongs the
others. Cold: each step after EVICTED_BYTES of other memory were read, as a model's kernels do; the
median of each round, and the shortest of these. The limit is 5 us per step in each process.

`serving`: launches of a server differ by far more than the probe costs. So one server answers short
requests, one at a time, with the probe removed and reinstalled between them (probe_switch). Four
requests make a block, on-off-off-on or off-on-on-off in turn, so that a drift affects both equally.
A request's value is its mean time per token after the first; a block's is the log of the ratio
on/off. The mean over blocks without the outer tenths is printed with its 95% bootstrap interval
(BCa).
"""

import argparse
import contextlib
import math
import shutil
import socket
import statistics
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, NamedTuple

import httpx
import numpy as np
from numpy.typing import ArrayLike
from rich.console import Console
from rich.table import Table
from scipy import stats

from benchmarks import parser_of
from connector_tax.artifacts.names import Launch
from connector_tax.artifacts.study_records import StudyDocument
from connector_tax.commands import run_command
from connector_tax.files import ArtifactError, read_json
from connector_tax.loadgen.sessions import PlannedRequest
from connector_tax.machine import cpu
from connector_tax.servers.kinds import STEP_LOG_PREFIX
from connector_tax.study.cell import planned_requests
from connector_tax.study.device import DeviceError, devices_of, hold_devices
from connector_tax.study.preflight import GateError, gated_server
from connector_tax.vllm.step_probe.hook_points import FACTORY, OWNERS
from connector_tax.vllm.step_probe.log import socket_address
from connector_tax.vllm.step_probe.probe import Probe, install
from connector_tax.vllm.step_records import ProbeSocketError, ask_to_write

# ---- the probe's own path

BOUND_US = 5.0
STEPS = 20_000
COLD_STEPS = 500
# More than a core's second-level cache.
EVICTED_BYTES = 8 * 1024 * 1024
ROUNDS = 10


class _Connector:
    """The hooks that a step of vLLM 0.32 calls, with its parameters; they do nothing."""

    def build_connector_meta(self, scheduler_output: Any) -> None: ...
    def update_connector_output(self, connector_output: Any) -> None: ...
    def get_kv_connector_stats(self) -> None: ...
    def bind_connector_metadata(self, connector_metadata: Any) -> None: ...
    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None: ...
    def wait_for_save(self) -> None: ...
    def get_transfer_results(self, finished_req_ids: Any) -> None: ...
    def get_block_ids_with_load_errors(self) -> None: ...
    def get_kv_connector_kv_cache_events(self) -> None: ...
    def build_connector_worker_meta(self) -> None: ...
    def clear_connector_metadata(self) -> None: ...


class _MultiConnector(_Connector):
    """A connector that forwards the same hooks to its children as vLLM's MultiConnector."""

    def __init__(self, children: int) -> None:
        self._connectors = [_Connector() for _ in range(children)]
        names = [f"child{number}" for number in range(children)]
        self._ktc_kv_transfer_config = [SimpleNamespace(kv_connector=name) for name in names]

    def build_connector_meta(self, scheduler_output: Any) -> None:
        for child in self._connectors:
            child.build_connector_meta(scheduler_output)

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        for child in self._connectors:
            child.start_load_kv(forward_context, **kwargs)

    def wait_for_save(self) -> None:
        for child in self._connectors:
            child.wait_for_save()

    def get_transfer_results(self, finished_req_ids: Any) -> None:
        for child in self._connectors:
            child.get_transfer_results(finished_req_ids)


def _engine() -> tuple[Any, Any]:
    """Return new scheduler and worker classes, registered as vLLM's modules."""
    cached = SimpleNamespace(resumed_req_ids=set())

    class Scheduler:
        connector: Any = None
        vllm_config: Any = None
        requests: dict[str, Any] = {}  # noqa: RUF012 - the probe reads it, nothing writes

        def get_request_counts(self) -> tuple[int, int]:
            return 1, 0

        def schedule(self) -> Any:
            if self.connector is not None:
                self.connector.build_connector_meta(None)
            return SimpleNamespace(
                scheduled_new_reqs=[],
                scheduled_cached_reqs=cached,
                num_scheduled_tokens={"a": 1},
                total_num_scheduled_tokens=1,
            )

        def update_from_output(self, _output: Any) -> None:
            if self.connector is not None:
                self.connector.update_connector_output(None)
                self.connector.get_kv_connector_stats()

    class EngineCore:
        def __init__(self) -> None:
            self.scheduler = Scheduler()

        def step(self) -> None:
            output = self.scheduler.schedule()
            self.scheduler.update_from_output(output)

        step_with_batch_queue = step

    class WorkerWrapperBase:
        def __init__(self) -> None:
            self.worker = SimpleNamespace(sample_tokens=lambda: None)
            self.connector: Any = None

        def execute_model(self, _output: Any) -> None:
            if (connector := self.connector) is not None:
                connector.bind_connector_metadata(None)
                connector.start_load_kv(None)
                connector.wait_for_save()
                connector.get_transfer_results(None)
                connector.get_block_ids_with_load_errors()
                connector.get_kv_connector_stats()
                connector.get_kv_connector_kv_cache_events()
                connector.build_connector_worker_meta()
                connector.clear_connector_metadata()

    class KVConnectorFactory:
        @classmethod
        def create_connector(cls, config: Any, _role: Any) -> Any:
            return _MultiConnector(config.children) if config.children else _Connector()

    classes = {
        c.__name__: c for c in (Scheduler, EngineCore, WorkerWrapperBase, KVConnectorFactory)
    }
    for module, name in OWNERS:
        stub = sys.modules.setdefault(module, ModuleType(module))
        setattr(stub, name, classes[name])
    return EngineCore, WorkerWrapperBase


def _connect(engine: Any, worker: Any, children: int | None) -> None:
    if children is None:
        return
    factory: Any = sys.modules[FACTORY[0]]
    names = SimpleNamespace(kv_connector="bench")
    config = SimpleNamespace(children=children, kv_transfer_config=names)
    create = factory.KVConnectorFactory.create_connector
    engine.scheduler.connector = create(config, SimpleNamespace(name="SCHEDULER"))
    worker.connector = create(config, SimpleNamespace(name="WORKER"))


class Cost(NamedTuple):
    """The time of one step in one process, in us."""

    warm_us: float
    cold_us: float


def step_cost(children: int | None, *, probed: bool) -> dict[str, Cost]:
    """Return a step's cost by process, with `children` child connectors (None for plain)."""
    engine_class, worker_class = _engine()
    with tempfile.TemporaryDirectory() as folder:
        probe = Probe(f"{folder}/log")
        if probed:
            install(probe)
        engine, worker = engine_class(), worker_class()
        _connect(engine, worker, children)

        def worker_step(output: Any) -> None:
            # The model runs in one call and samples in another, as in vLLM.
            worker.execute_model(output)
            worker.worker.sample_tokens()

        costs = {"scheduler": _cost(lambda _: engine.step()), "worker": _cost(worker_step)}
        # Checked, since a probe that an error has switched off costs nothing.
        assert probe.active
        assert bool(probe.scheduler.numbers) == bool(probe.worker.numbers) == probed
        return costs


def _cost(call: Callable[[Any], Any]) -> Cost:
    outputs = [SimpleNamespace(connector_tax_step_id=1 + i) for i in range(STEPS)]
    started = time.thread_time_ns()
    for output in outputs:
        call(output)
    warm = (time.thread_time_ns() - started) / STEPS
    other = np.ones(EVICTED_BYTES // 8)
    cold = []
    for output in outputs[:COLD_STEPS]:
        other.sum()
        started = time.perf_counter_ns()
        call(output)
        cold.append(time.perf_counter_ns() - started)
    return Cost(warm / 1000, statistics.median(cold) / 1000)


def cost() -> bool:
    """Print the probe's cost per step; return whether every warm row is within the limit."""
    table = Table(title=f"step probe, us per step; {cpu()}", box=None, pad_edge=False)
    for heading in ("connector", "process", "without", "with", "probe, warm", "bound", "cold"):
        table.add_column(heading, justify="right")
    cases = {"none": None, "one": 0, "of two children": 2}
    rounds: dict[tuple[str, bool], list[dict[str, Cost]]] = defaultdict(list)
    for number in range(ROUNDS):
        for label, children in cases.items():
            for probed in (number % 2 == 0, number % 2 == 1):
                rounds[label, probed].append(step_cost(children, probed=probed))
    within = True
    for label in cases:
        for process in ("scheduler", "worker"):
            off, on = (min(r[process].warm_us for r in rounds[label, p]) for p in (False, True))
            cold = [min(r[process].cold_us for r in rounds[label, p]) for p in (False, True)]
            within = within and on - off <= BOUND_US
            row = [f"{value:.2f}" for value in (off, on, on - off)]
            table.add_row(label, process, *row, f"{BOUND_US:g}", f"{cold[1] - cold[0]:.2f}")
    Console(width=100).print(table)
    return within


# ---- a real vLLM

INPUT_TOKENS = 32
OUTPUT_TOKENS = 32
# After the switch the interpreter specialises its code again.
SETTLING_TOKENS = 4
# With asynchronous scheduling a step is still running when a request is answered.
IDLE_S = 0.03
_ENTRY_POINT = "connector_tax_probe_switch"


class Block(NamedTuple):
    """Seconds per token of requests, with the probe installed and with the probe removed."""

    on: tuple[float, ...]
    off: tuple[float, ...]

    @property
    def log_ratio(self) -> float:
        """Return log(on / off) of the geometric means."""
        return statistics.fmean(map(math.log, self.on)) - statistics.fmean(map(math.log, self.off))


class _Switches(contextlib.ExitStack):
    """The probe switches of a server's processes that run steps."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self._log = folder / f"{STEP_LOG_PREFIX}.scheduler.steps"
        self._recorded = 0
        self._on = True
        self._peers = [self.enter_context(_connected(path)) for path in folder.glob("*.switch")]
        if not self._peers:
            raise GateError(f"{folder}: no process of the server has a switch; see its log")

    def turn(self, on: bool) -> None:
        """Install or remove the probe in all processes.

        Raises:
            GateError: a process ended, or the size of the probe's records contradicts its state
                since the last call.
        """
        if on == self._on:
            return
        time.sleep(IDLE_S)
        order = b"1" if on else b"0"
        try:
            for peer in self._peers:
                peer.sendall(order)
                if peer.recv(1) != order:
                    raise GateError("the server ended while the probe was switched")
            ask_to_write(self._log)
        except (OSError, ProbeSocketError) as error:
            raise GateError(f"the probe cannot be switched: {error}") from error
        recorded = self._log.stat().st_size
        if (recorded > self._recorded) != self._on:
            raise GateError(
                f"the probe was {'installed' if self._on else 'removed'}; its record grew from "
                f"{self._recorded} to {recorded} bytes"
            )
        self._recorded, self._on = recorded, on


def _connected(path: Path) -> socket.socket:
    peer = socket.socket(socket.AF_UNIX)
    peer.settimeout(10.0)
    with socket_address(str(path)) as address:
        peer.connect(address)
    return peer


def serving(
    study: StudyDocument, configurations: Sequence[str], launches: int, blocks: int
) -> None:
    """Print the time per token with the probe over the time without it, by configuration.

    Raises:
        GateError: a server did not start, serve or stop as required, or the probe recorded in the
            wrong state.
        DeviceError: another study or benchmark measures on the device.
    """
    print(
        f"{cpu()}; {launches} launches of {blocks} blocks of four requests, one at a time, of "
        f"{INPUT_TOKENS} + {OUTPUT_TOKENS} tokens"
    )
    with (
        hold_devices(devices_of(study["config"])),
        tempfile.TemporaryDirectory() as text,
    ):
        folder = Path(text)
        write_plugin(folder / "plugin")
        for configuration in configurations:
            measured: list[Block] = []
            for number in range(launches):
                where = folder / f"{configuration}{number}"
                with (
                    gated_server(
                        study,
                        Launch(configuration, number, "A"),
                        "probe_serving",
                        where,
                        lambda _: None,
                        folder / "plugin",
                    ) as server,
                    _Switches(where) as switches,
                ):
                    of_launch = _measure_blocks(
                        study, server.url, switches, f"probe/{number}", blocks
                    )
                print(f"{configuration}, launch {number + 1}: {_summary(of_launch)}")
                measured += of_launch
            print(f"{configuration}, all: {_summary(measured)}")


def write_plugin(folder: Path) -> None:
    """Write the probe's switch as a plugin that vLLM loads if `folder` is on PYTHONPATH."""
    metadata = folder / f"{_ENTRY_POINT}-1.0.dist-info"
    metadata.mkdir(parents=True)
    texts = {
        "METADATA": f"Metadata-Version: 2.1\nName: {_ENTRY_POINT}\nVersion: 1.0\n",
        "entry_points.txt": f"[vllm.general_plugins]\n{_ENTRY_POINT} = {_ENTRY_POINT}:register\n",
    }
    for name, text in texts.items():
        (metadata / name).write_text(text)
    shutil.copy(Path(__file__).with_name("probe_switch.py"), folder / f"{_ENTRY_POINT}.py")


def _summary(blocks: Sequence[Block]) -> str:
    ratios = [block.log_ratio for block in blocks]
    interval = stats.bootstrap((ratios,), _centre, rng=0).confidence_interval
    low, middle, high = (math.expm1(x) for x in (interval.low, _centre(ratios), interval.high))
    on = statistics.median(value for block in blocks for value in block.on) * 1000
    off = statistics.median(value for block in blocks for value in block.off) * 1000
    return (
        f"on {on:.3f} ms, off {off:.3f} ms per token; on over off in {len(blocks)} blocks "
        f"{middle:+.2%} [{low:+.2%}, {high:+.2%}]"
    )


def _centre(values: ArrayLike, axis: int = -1) -> Any:
    return stats.trim_mean(values, 0.1, axis=axis)


def _measure_blocks(
    study: StudyDocument, url: str, switches: _Switches, name: str, blocks: int
) -> list[Block]:
    pairs = zip(
        planned_requests(study, f"{name}/settling", (INPUT_TOKENS, SETTLING_TOKENS), 4 * blocks),
        planned_requests(study, name, (INPUT_TOKENS, OUTPUT_TOKENS), 4 * blocks),
        strict=True,
    )
    headers = {"Content-Type": "application/json"}
    measured = []
    with httpx.Client(base_url=url, headers=headers, trust_env=False, timeout=60.0) as client:
        for number in range(blocks):
            outer = number % 2 == 0
            values: dict[bool, list[float]] = {True: [], False: []}
            for on in (outer, not outer, not outer, outer):
                switches.turn(on)
                first, request = next(pairs)
                _decoding_s(client, first)
                values[on].append(_decoding_s(client, request) / (OUTPUT_TOKENS - 1))
            measured.append(Block(tuple(values[True]), tuple(values[False])))
    return measured


def _decoding_s(client: httpx.Client, request: PlannedRequest) -> float:
    """Return the seconds from the first token to the last."""
    with client.stream("POST", "/v1/completions", content=request.body) as answer:
        answer.raise_for_status()
        stamps = [time.perf_counter() for line in answer.iter_lines() if line]
    # The last two events are the usage and [DONE].
    return stamps[-3] - stamps[0]


# ---- the command


def main(argv: Sequence[str] | None = None) -> int:
    """Measure the step probe."""
    parser = parser_of(__file__, __doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("cost", help="measure the time per step on the probe's own path (us)")
    real = commands.add_parser("serving", help="compare a real vLLM with and without the probe")
    real.add_argument("--study", type=Path, required=True, help="results/<study>/study.json")
    real.add_argument(
        "--configurations", nargs="+", default=["plain"], help="ids in the study (default: plain)"
    )
    words = "launches of each configuration (default: 2)"
    real.add_argument("--launches", type=int, default=2, help=words)
    words = "blocks of four requests in each launch, 2 or more (default: 500)"
    real.add_argument("--blocks", type=int, default=500, help=words)
    return run_command(parser, argv, _measure, (ArtifactError, DeviceError, GateError))


def _measure(arguments: argparse.Namespace) -> int:
    if arguments.command == "cost":
        return int(not cost())
    study = read_json(arguments.study)
    if unknown := {*arguments.configurations} - {c["id"] for c in study["configurations"]}:
        raise ArtifactError(f"--configurations: {', '.join(sorted(unknown))}: not in the study")
    if arguments.blocks < 2:
        raise ArtifactError(f"--blocks: found {arguments.blocks}; allowed: 2 or more")
    serving(study, arguments.configurations, arguments.launches, arguments.blocks)
    return 0


if __name__ == "__main__":
    sys.exit(main())
