"""What the step probe costs: microseconds a step on its path, and a real vLLM with it and without.

`cost` drives the probe's own wrappers with classes that do nothing, so all that is left is the
probe. Warm: steps in a loop, the thread's CPU time of the round in which it was shortest, since
what makes it longer (other processes in the caches, a slower clock of the processor) is the
machine's. Cold: each step after EVICTED_BYTES of other memory were read, as a model's kernels do
between two steps, the median of each round and the shortest of them. The bound is 5 us per step in
each process. `serving` is probe_serving.
"""

import argparse
import statistics
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from benchmarks.probe_serving import serving
from connector_tax.commands import run_command
from connector_tax.files import ArtifactError, read_json
from connector_tax.machine import cpu
from connector_tax.study.device import DeviceError
from connector_tax.study.preflight import GateError
from connector_tax.vllm.step_probe.hook_points import FACTORY, OWNERS
from connector_tax.vllm.step_probe.probe import Probe, install

BOUND_US = 5.0
STEPS = 20_000
COLD_STEPS = 500
# More than the second-level cache of a core.
EVICTED_BYTES = 8 * 1024 * 1024
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


@dataclass(frozen=True, slots=True)
class Cost:
    """Microseconds of one step in one process."""

    warm_us: float
    cold_us: float


def step_cost(children: int | None, *, probed: bool) -> dict[str, Cost]:
    """What a step costs by process, with the probe or without.

    Args:
        children: children of the connector; None for plain.
    """
    engine_class, worker_class = _engine()
    with tempfile.TemporaryDirectory() as folder:
        if probed:
            install(Probe(f"{folder}/log"))
        engine, worker = engine_class(), worker_class()
        _connect(engine, worker, children)

        def worker_step(output: Any) -> None:
            # The model runs in one call and samples in another, as in vLLM.
            worker.execute_model(output)
            worker.worker.sample_tokens()

        return {"scheduler": _cost(lambda _: engine.step()), "worker": _cost(worker_step)}


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
    """Print the probe's cost per step; whether every row is within the bound while warm."""
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


def main(argv: Sequence[str] | None = None) -> int:
    """Measure the step probe."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.probe", description=main.__doc__)
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
    return run_command(parser, argv, _measure, (ArtifactError, DeviceError, GateError))


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
