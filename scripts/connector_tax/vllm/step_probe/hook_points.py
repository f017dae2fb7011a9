# CONNECTOR_TAX_PATCH
"""What the step probe needs of a vLLM, and whether the one of this interpreter has it.

Also a program of its own, which prints that as JSON.
"""

import hashlib
import importlib
import inspect
import json
import sys
from pathlib import Path
from typing import Any

# (module, class) of what the probe wraps a method of.
ENGINE = ("vllm.v1.engine.core", "EngineCore")
SCHEDULER = ("vllm.v1.core.sched.scheduler", "Scheduler")
WORKER = ("vllm.v1.worker.worker_base", "WorkerWrapperBase")
FACTORY = ("vllm.distributed.kv_transfer.kv_connector.factory", "KVConnectorFactory")
# With the method; each must be there, or the probe is not installed.
HOOK_POINTS = (
    (*ENGINE, "step"),
    (*ENGINE, "step_with_batch_queue"),
    (*SCHEDULER, "schedule"),
    (*SCHEDULER, "update_from_output"),
    (*WORKER, "execute_model"),
    (*FACTORY, "create_connector"),
)
CONNECTOR_BASE = ("vllm.distributed.kv_transfer.kv_connector.v1.base", "KVConnectorBase_V1")
# Attributes of SchedulerOutput the records are made of.
OUTPUT_FIELDS = (
    "scheduled_new_reqs",
    "scheduled_cached_reqs",
    "num_scheduled_tokens",
    "total_num_scheduled_tokens",
)
REQUIRED_HOOKS = ("build_connector_meta", "get_finished", "start_load_kv")


def class_of(module: str, name: str) -> Any:
    """A class of the installed vLLM."""
    return getattr(importlib.import_module(module), name)


def missing_hooks() -> list[str]:
    """What of HOOK_POINTS, the connector's hooks and SchedulerOutput this vLLM lacks."""
    missing = []
    for module, owner, method in HOOK_POINTS:
        try:
            hook = getattr(class_of(module, owner), method, None)
        except (ImportError, AttributeError) as error:
            missing.append(f"{module}.{owner}.{method} ({error})")
            continue
        if not callable(hook):
            missing.append(f"{module}.{owner}.{method}")
    try:
        base = class_of(*CONNECTOR_BASE)
        missing += [
            f"{'.'.join(CONNECTOR_BASE)}.{name}"
            for name in REQUIRED_HOOKS
            if not callable(getattr(base, name, None))
        ]
        fields = class_of("vllm.v1.core.sched.output", "SchedulerOutput").__dataclass_fields__
        missing += [
            f"vllm.v1.core.sched.output.SchedulerOutput.{name}"
            for name in OUTPUT_FIELDS
            if name not in fields
        ]
        if not callable(getattr(class_of(*SCHEDULER), "get_request_counts", None)):
            missing.append(f"{'.'.join(SCHEDULER)}.get_request_counts")
    except (ImportError, AttributeError) as error:
        missing.append(str(error))
    return missing


def describe() -> dict[str, Any]:
    """The vLLM of this interpreter: version, hook points with file, line and hash, what is missing.

    Importing vLLM prints to standard output, so the caller looks for the last line.
    """
    missing = missing_hooks()
    targets = []
    for module, owner, method in HOOK_POINTS:
        if any(entry.startswith(f"{module}.{owner}.{method}") for entry in missing):
            continue
        function = inspect.unwrap(getattr(class_of(module, owner), method))
        code = getattr(function, "__func__", function).__code__
        path = Path(code.co_filename)
        targets.append(
            {
                "hook": f"{module}.{owner}.{method}",
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
        "missing": missing,
    }


if __name__ == "__main__":
    print(json.dumps(describe()))
    sys.exit(0)
