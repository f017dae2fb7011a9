"""Stub the vLLM modules that the step probe hooks into: a small engine with the same call order.

`write` makes a package tree that a test's own interpreter can import as `vllm`; `drive` runs steps
in its own process, loading plugins by entry point as vLLM does.
"""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from connector_tax.vllm.step_records import step_records

_V1 = "vllm/v1"
_KV = "vllm/distributed/kv_transfer/kv_connector"
FILES = {
    "vllm/__init__.py": "__version__ = '9.9.9'\n",
    f"{_V1}/core/sched/output.py": """
from dataclasses import dataclass, field
from types import SimpleNamespace

@dataclass
class SchedulerOutput:
    scheduled_new_reqs: list
    scheduled_cached_reqs: object
    num_scheduled_tokens: dict
    total_num_scheduled_tokens: int
    kv_connector_metadata: object = None
""",
    f"{_V1}/core/sched/scheduler.py": """
from types import SimpleNamespace
from vllm.v1.core.sched.output import SchedulerOutput

class Scheduler:
    CHUNK = 100

    def __init__(self, connector, vllm_config=None):
        self.connector = connector
        self.vllm_config = vllm_config
        self.requests = {}
        self.done = {}
        self.fresh = []

    def add(self, name, prompt):
        self.requests[name] = SimpleNamespace(prompt=prompt, num_tokens=prompt)
        self.done[name] = 0
        self.fresh.append(name)

    def has_requests(self):
        return bool(self.requests)

    def get_request_counts(self):
        return len(self.requests), len(self.fresh)

    def schedule(self):
        new, tokens = [], {}
        for name, request in self.requests.items():
            left = request.prompt - self.done[name]
            count = min(self.CHUNK, left) if left > 0 else 1
            tokens[name] = count
            if name in self.fresh:
                new.append(SimpleNamespace(req_id=name, prompt_token_ids=[0] * request.prompt,
                                           num_computed_tokens=0))
            self.done[name] += count
        self.fresh = []
        cached = SimpleNamespace(resumed_req_ids=set())
        output = SchedulerOutput(new, cached, tokens, sum(tokens.values()))
        if self.connector is not None:
            output.kv_connector_metadata = self.connector.build_connector_meta(output)
        return output

    def update_from_output(self, output, result):
        if self.connector is not None:
            self.connector.update_connector_output(result)
        return {}
""",
    f"{_V1}/worker/worker_base.py": """
class Worker:
    def __init__(self, connector, sampling):
        self.connector, self.sampling = connector, sampling

    def initialize_from_config(self, config):
        self.vllm_config, self.model_runner = config

    def execute_model(self, output):
        if self.connector is not None:
            self.connector.start_load_kv(None)
            if not self.sampling:
                self.connector.wait_for_save()
                self.connector.get_transfer_results(set())
        self.output = output
        return None if self.sampling else output

    def sample_tokens(self, grammar):
        # The order of vLLM 0.33 with a drafter, which may save after the results are read.
        if self.connector is not None:
            self.connector.get_transfer_results(set())
            self.connector.wait_for_save()
        return self.output

class WorkerWrapperBase:
    def __init__(self, worker, rank=0):
        self.worker, self.global_rank = worker, rank

    def initialize_from_config(self, configs):
        self.worker.initialize_from_config(configs[self.global_rank])

    def execute_model(self, output):
        return self.worker.execute_model(output)

    def __getattr__(self, name):
        return getattr(self.worker, name)
""",
    f"{_KV}/v1/base.py": """
class KVConnectorBase_V1:
    def __init__(self, config, role, kv_cache_config):
        pass

    def build_connector_meta(self, output):
        return None

    def start_load_kv(self, context, **kwargs):
        pass

    def get_finished(self, finished):
        return None, None

    def get_transfer_results(self, finished):
        return self.get_finished(finished)

    def wait_for_save(self):
        return None

    def update_connector_output(self, output):
        pass
""",
    f"{_KV}/factory.py": """
import time
from types import SimpleNamespace
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1

def spend(us):
    end = time.monotonic_ns() + us * 1000
    while time.monotonic_ns() < end:
        pass

class One(KVConnectorBase_V1):
    def update_connector_output(self, output):
        # The duration identifies the step.
        spend(100 * getattr(output, "connector_tax_step_id", 0))

    def build_connector_meta(self, output):
        spend(300)

    def get_finished(self, finished):
        spend(200)
        return None, None

class Two(One):
    pass

class MultiConnector(KVConnectorBase_V1):
    def __init__(self, config, role, kv_cache_config):
        self._connectors = [One(config, role, None), Two(config, role, None)]
        self._ktc_kv_transfer_config = [SimpleNamespace(kv_connector="FirstName"),
                                        SimpleNamespace(kv_connector="SecondName")]

    def build_connector_meta(self, output):
        return [c.build_connector_meta(output) for c in self._connectors]

    def start_load_kv(self, context, **kwargs):
        return [c.start_load_kv(context) for c in self._connectors]

    def get_finished(self, finished):
        return [c.get_finished(finished) for c in self._connectors]

class KVConnectorFactory:
    @classmethod
    def create_connector(cls, config, role, kv_cache_config):
        name = config.kv_transfer_config.kv_connector
        return {"One": One, "MultiConnector": MultiConnector}[name](config, role, None)
""",
    f"{_V1}/engine/core.py": """
from collections import deque

class EngineCore:
    def __init__(self, scheduler, worker, asynchronous):
        self.scheduler, self.worker = scheduler, worker
        self.queue = deque()
        self.step_fn = self.step_with_batch_queue if asynchronous else self.step

    def execute(self, output):
        result = self.worker.execute_model(output)
        return self.worker.sample_tokens(None) if result is None else result

    def step(self):
        output = self.scheduler.schedule()
        result = self.execute(output)
        return self.scheduler.update_from_output(output, result)

    def step_with_batch_queue(self):
        output = self.scheduler.schedule()
        self.queue.appendleft((output, self.execute(output)))
        if len(self.queue) < 2:
            return None
        return self.scheduler.update_from_output(*self.queue.pop())
""",
}

_DRIVER = """
import json, sys, time
from importlib.metadata import entry_points
from types import SimpleNamespace
options = json.loads(sys.argv[1])
for entry in entry_points(group="vllm.general_plugins"):
    entry.load()()
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.engine.core import EngineCore
from vllm.v1.worker.worker_base import Worker, WorkerWrapperBase
import logging
logging.basicConfig(level=logging.INFO, stream=sys.stdout, format="%(message)s")
def connector(role):
    if options["connector"] is None:
        return None
    config = SimpleNamespace(kv_transfer_config=SimpleNamespace(kv_connector=options["connector"]))
    return KVConnectorFactory.create_connector(config, SimpleNamespace(name=role), None)
parallel = SimpleNamespace(data_parallel_index=options["rank"])
scheduler = Scheduler(connector("SCHEDULER"), SimpleNamespace(parallel_config=parallel))
worker = WorkerWrapperBase(Worker(connector("WORKER"), options["sampling"]))
engine = EngineCore(scheduler, worker, options["asynchronous"])
exec(options["before"])
scheduler.add("a", options["prompt"])
answers = [engine.step_fn() for _ in range(options["steps"])]
print("answers", len(answers))
"""


def write(folder: Path) -> Path:
    """Write the stub package below `folder`."""
    for name, text in FILES.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    for path in (folder / "vllm").rglob("*"):
        if path.is_dir() and not (path / "__init__.py").exists():
            (path / "__init__.py").touch()
    return folder


def drive(tree: Path, overlay: Path, log_prefix: Path | None, **options: Any) -> str:
    """Run the stub engine with the overlay on its path; return its output."""
    defaults: dict[str, Any] = {
        "connector": None,
        "sampling": True,
        "asynchronous": False,
        "before": "",
        "prompt": 250,
        "steps": 6,
        "rank": 0,
    }
    environment = {
        **os.environ,
        "PYTHONPATH": f"{overlay}{os.pathsep}{tree}",
        "AGENTIC_STEP_LOG_PATH": str(log_prefix) if log_prefix else "",
    }
    done = subprocess.run(
        [sys.executable, "-c", _DRIVER, json.dumps({**defaults, **options})],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout + done.stderr


def records(prefix: Path, process: str) -> list[Any]:
    """Return the records a process of the stub has written."""
    return list(step_records(Path(f"{prefix}.{process}.steps").read_bytes()))
