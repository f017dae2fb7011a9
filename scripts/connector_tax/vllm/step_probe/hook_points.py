# CONNECTOR_TAX_PATCH
"""List the parts of vLLM that the step probe needs, and check this interpreter's vLLM for them.

Run as a program, it prints the result as JSON.
"""

import hashlib
import importlib
import inspect
import json
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

# Module and class of each wrapped method.
ENGINE = ("vllm.v1.engine.core", "EngineCore")
SCHEDULER = ("vllm.v1.core.sched.scheduler", "Scheduler")
WORKER = ("vllm.v1.worker.worker_base", "WorkerWrapperBase")
FACTORY = ("vllm.distributed.kv_transfer.kv_connector.factory", "KVConnectorFactory")
OWNERS = (ENGINE, SCHEDULER, WORKER, FACTORY)
# Module and method; if one is missing, the probe is not installed.
HOOK_POINTS = tuple(
    (module, f"{owner}.{method}")
    for (module, owner), method in (
        (ENGINE, "step"),
        (ENGINE, "step_with_batch_queue"),
        (SCHEDULER, "schedule"),
        (SCHEDULER, "update_from_output"),
        (WORKER, "execute_model"),
        (FACTORY, "create_connector"),
    )
)
_BASE = "vllm.distributed.kv_transfer.kv_connector.v1.base"
# Likewise required: objects that are called, timed or read.
NEEDED = (
    *HOOK_POINTS,
    (SCHEDULER[0], "Scheduler.get_request_counts"),
    (_BASE, "KVConnectorBase_V1.build_connector_meta"),
    (_BASE, "KVConnectorBase_V1.get_finished"),
    (_BASE, "KVConnectorBase_V1.start_load_kv"),
)
OUTPUT = "vllm.v1.core.sched.output"
# Attributes of its SchedulerOutput that the records need.
OUTPUT_FIELDS = (
    "scheduled_new_reqs",
    "scheduled_cached_reqs",
    "num_scheduled_tokens",
    "total_num_scheduled_tokens",
)


def object_named(module: str, name: str) -> Any:
    """Return the object of that name in a module of the installed vLLM, or in a class there."""
    value: Any = importlib.import_module(module)
    for part in name.split("."):
        value = getattr(value, part)
    return value


def missing(targets: Iterable[tuple[str, str]], called: bool = False) -> list[str]:
    """Return the targets that this vLLM lacks or, with `called`, that are not callable."""
    lacking = []
    for module, name in targets:
        try:
            value = object_named(module, name)
            if called and not callable(value):
                raise TypeError("not callable")
        except Exception as error:
            lacking.append(f"{module}.{name} ({type(error).__name__}: {error})")
    return lacking


def missing_hooks() -> list[str]:
    """Return the members of NEEDED and OUTPUT_FIELDS that this vLLM lacks."""
    lacking = missing((*NEEDED, (OUTPUT, "SchedulerOutput")), called=True)
    if not any(OUTPUT in entry for entry in lacking):
        fields = object_named(OUTPUT, "SchedulerOutput").__dataclass_fields__
        unknown = [name for name in OUTPUT_FIELDS if name not in fields]
        lacking += [f"{OUTPUT}.SchedulerOutput.{name}" for name in unknown]
    return lacking


def describe() -> dict[str, Any]:
    """Return this interpreter's vLLM: version, hook points with file, line and hash, missing ones.

    Importing vLLM prints to standard output, so the caller looks for the last line.
    """
    targets = []
    for module, name in HOOK_POINTS:
        if missing([(module, name)], called=True):
            continue
        function = inspect.unwrap(object_named(module, name))
        code = getattr(function, "__func__", function).__code__
        path = Path(code.co_filename)
        targets.append(
            {
                "hook": f"{module}.{name}",
                "file": module.replace(".", "/") + ".py",
                "line": code.co_firstlineno,
                "sha256": hashlib.sha256(path.read_bytes()).hexdigest(),
            }
        )
    vllm = importlib.import_module("vllm")
    return {
        "vllm": getattr(vllm, "__version__", "unknown"),
        "package": str(Path(str(vllm.__file__)).parent),
        "targets": targets,
        "missing": missing_hooks(),
    }


if __name__ == "__main__":
    print(json.dumps(describe()))
    sys.exit(0)
