"""What the step probe costs: microseconds a step on its path, and a real vLLM with it and without.

`cost` drives the probe's own wrappers with classes that do nothing, so all that is left is the
probe; the bound is 5 us per step in each process, on the step's path and in the writer's thread
together, since the writer holds the interpreter lock. Times are the thread's CPU time, of the round
in which it was shortest: what makes it longer (other processes in the caches, a slower clock of the
processor) is the machine's, not the probe's. `serving` launches plain with the probe on and off in
turn (A/B/B/A ...) and compares the time per token of the same requests, one at a time.
"""

import argparse
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

from rich.console import Console
from rich.table import Table

from connector_tax.commands import run_command
from connector_tax.files import ArtifactError, read_json
from connector_tax.provenance.environment import cpu
from connector_tax.study.guard import DeviceBusyError
from connector_tax.study.preflight import GateError
from connector_tax.study.probe_serving import serving
from connector_tax.vllm import step_probe

BOUND_US = 5.0
STEPS = 20_000
STEPS_PER_FLUSH = 50
ROUNDS = 10


class _Connector:
    """The hooks that a step of vLLM 0.32 calls, doing nothing, with the parameters they have there.

    Who calls them there: Scheduler.schedule and update_from_output; for the worker,
    kv_connector_model_runner_mixin.
    """

    def build_connector_meta(self, scheduler_output: Any) -> None:
        pass

    def update_connector_output(self, connector_output: Any) -> None:
        pass

    def get_kv_connector_stats(self) -> None:
        pass

    def bind_connector_metadata(self, connector_metadata: Any) -> None:
        pass

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        pass

    def wait_for_save(self) -> None:
        pass

    def get_transfer_results(self, finished_req_ids: Any) -> None:
        pass

    def get_block_ids_with_load_errors(self) -> None:
        pass

    def get_kv_connector_kv_cache_events(self) -> None:
        pass

    def build_connector_worker_meta(self) -> None:
        pass

    def clear_connector_metadata(self) -> None:
        pass


class _MultiConnector(_Connector):
    """Passes on to its children what MultiConnector does."""

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
    """Fresh classes of the hook points, registered as vLLM's modules; scheduler side, worker."""
    cached = SimpleNamespace(resumed_req_ids=set())

    class Scheduler:
        connector: Any = None
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
            if self.connector is not None:
                connector = self.connector
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
    for module, name, _ in step_probe.HOOK_POINTS:
        stub = sys.modules.setdefault(module, ModuleType(module))
        setattr(stub, name, classes[name])
    return EngineCore, WorkerWrapperBase


def _connect(engine: Any, worker: Any, children: int | None) -> None:
    if children is None:
        return
    factory: Any = sys.modules[step_probe.HOOK_POINTS[5][0]]
    names = SimpleNamespace(kv_connector="bench")
    config = SimpleNamespace(children=children, kv_transfer_config=names)
    create = factory.KVConnectorFactory.create_connector
    engine.scheduler.connector = create(config, SimpleNamespace(name="SCHEDULER"))
    worker.connector = create(config, SimpleNamespace(name="WORKER"))


@dataclass(frozen=True, slots=True)
class Cost:
    """Microseconds of one step in one process: on the step's path, and of the writer's thread."""

    path_us: float
    writer_us: float


def step_cost(children: int | None, *, probed: bool) -> dict[str, Cost]:
    """What a step costs by process, with the probe or without.

    Args:
        children: children of the connector; None for plain.
    """
    engine_class, worker_class = _engine()
    with tempfile.TemporaryDirectory() as folder:
        probe = step_probe.Probe(f"{folder}/log")
        if probed:
            step_probe.install(probe)
        engine, worker = engine_class(), worker_class()
        _connect(engine, worker, children)
        outputs = [SimpleNamespace(connector_tax_step_id=i) for i in range(STEPS)]

        def worker_step(output: Any) -> None:
            # The model runs in one call and samples in another, as in vLLM.
            worker.execute_model(output)
            worker.worker.sample_tokens()

        costs = {
            "scheduler": _cost(lambda _: engine.step(), outputs, probe, "scheduler"),
            "worker": _cost(worker_step, outputs, probe, "worker"),
        }
        probe.close()
    return costs


def _cost(
    call: Callable[[Any], Any], outputs: Sequence[Any], probe: step_probe.Probe, process: str
) -> Cost:
    """Steps in batches of what one flush interval holds, the writing timed apart."""
    path = writing = 0
    for first in range(0, STEPS, STEPS_PER_FLUSH):
        started = time.thread_time_ns()
        for output in outputs[first : first + STEPS_PER_FLUSH]:
            call(output)
        ended = time.thread_time_ns()
        if process in probe.writers:
            probe.writers[process].flush()
        path += ended - started
        writing += time.thread_time_ns() - ended
    return Cost(path / STEPS / 1000, writing / STEPS / 1000)


def cost() -> bool:
    """Print the probe's cost per step; whether every row is within the bound."""
    # The writer runs when it is asked to, so that its time is told apart from the path's.
    step_probe.FLUSH_S = 3600.0
    table = Table(title=f"step probe, us per step; {cpu()}", box=None, pad_edge=False)
    for heading in ("connector", "process", "without", "with", "path", "writer", "both", "bound"):
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
            off, on = (min(r[process].path_us for r in rounds[label, p]) for p in (False, True))
            writer = min(r[process].writer_us for r in rounds[label, True])
            both = on - off + writer
            within = within and both <= BOUND_US
            row = [f"{value:.2f}" for value in (off, on, on - off, writer, both)]
            table.add_row(label, process, *row, f"{BOUND_US:g}")
    Console(width=100).print(table)
    return within


def main(argv: Sequence[str] | None = None) -> int:
    """Measure the step probe."""
    parser = argparse.ArgumentParser(
        prog="python -m connector_tax.study.bench_probe", description=main.__doc__
    )
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("cost", help="us per step on the probe's own path")
    real = commands.add_parser("serving", help="a real vLLM with the probe and without")
    real.add_argument("--study", type=Path, required=True, help="results/<study>/study.json")
    real.add_argument(
        "--configurations", nargs="+", default=["plain"], help="of the study (default: plain)"
    )
    real.add_argument("--launches", type=_several, default=2, help="of each (default: 2)")
    real.add_argument(
        "--blocks", type=_several, default=500, help="of four requests a launch (default: 500)"
    )
    return run_command(parser, argv, _measure, (ArtifactError, DeviceBusyError, GateError))


def _several(text: str) -> int:
    if not text.isdecimal() or int(text) < 2:
        raise argparse.ArgumentTypeError(f"{text}: an integer of 2 or more")
    return int(text)


def _measure(arguments: argparse.Namespace) -> int:
    if arguments.command == "cost":
        return int(not cost())
    study = read_json(arguments.study)
    serving(study, arguments.configurations, arguments.launches, arguments.blocks)
    return 0


if __name__ == "__main__":
    sys.exit(main())
