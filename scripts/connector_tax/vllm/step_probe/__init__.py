# CONNECTOR_TAX_PATCH
"""The step probe: times each engine step and its connector hooks inside a running vLLM.

Loaded by vLLM as a `vllm.general_plugins` entry point in the engine-core and worker processes; a
copy of this folder and its metadata in an overlay folder on the server's PYTHONPATH is the whole
installation (connector_tax.vllm.overlay), so no installed file changes.

With AGENTIC_STEP_LOG_PATH set it writes `<prefix>.scheduler.steps` and `<prefix>.worker.steps`.
Further ranks of the worker write `<prefix>.worker2.steps` and so on; the scheduler of data-parallel
rank 1 writes `<prefix>.scheduler2.steps`; connector_tax.vllm.step_records turns them into the
fields of docs/artifacts.md (engine_step):

    scheduler  Scheduler.schedule() entry to exit, with the step's requests and tokens;
               update_from_output(), which under asynchronous scheduling runs in a later engine
               step; the EngineCore step.
    worker     execute_model() and, where sampling is its own call, sample_tokens().
    both       every timed hook of the connector; of a MultiConnector's children the hooks with a
               field of the design and the lookup, since each costs its two clock readings.

The per-layer hooks (wait_for_layer_load, save_kv_layer) are not timed: on a deep model two clock
readings in each would cost more than the 5 us a step this probe may cost.

A step id set on SchedulerOutput travels to the worker with it and joins the two records; the id of
data-parallel rank r counts from r * STEPS_OF_A_RANK + 1, so that no two steps share one. An error
of the probe switches it off in that process, is logged once, and never reaches vLLM.

A file begins with a line of JSON, `{"process", "groups"}`: for each connector object its name
(null: the connector itself), its hooks and the position of the first. Timings follow as native
doubles, in the order of their ends: start and end (CLOCK_MONOTONIC, s), values (log.py),
`mark(position)`. A double holds a clock reading to 2 ns on a machine that has run for a hundred
days.

Between a model's kernels the caches are cold: Python code, thread wake-ups and touched memory cost
several times what they cost in a loop. So a step only appends numbers to a list, and no thread
wakes up while steps run. The list is written to the file when it has HELD_NUMBERS entries, when a
process sends a byte to the Unix socket `<prefix>.<process>.socket` (the byte is returned after the
write), and when the process ends by itself or by SIGTERM. SIGKILL loses what was not written.
"""

from .probe import register

__all__ = ["register"]
