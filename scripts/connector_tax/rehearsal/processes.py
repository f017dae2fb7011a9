"""Simulations side by side: tasks shared out to one process for each CPU, as JSON lines."""

import json
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from connector_tax.linux import die_with_parent


class SimulationError(Exception):
    """A process of a simulation failed; its output is the text."""


def in_processes(module: str, arguments: Sequence[str], tasks: Sequence[Any]) -> list[Any]:
    """What `python -m module *arguments` answers to each task (`answer_tasks`), in their order."""
    count = min(len(tasks), len(os.sched_getaffinity(0)))
    command = [sys.executable, "-m", module, *arguments]
    results: list[Any] = [None] * len(tasks)

    def run(number: int) -> None:
        done = subprocess.run(
            command,
            input=json.dumps(tasks[number::count]),
            capture_output=True,
            text=True,
            check=False,
            preexec_fn=die_with_parent,
        )
        if done.returncode:
            raise SimulationError(f"{' '.join(command)}\n{done.stderr}")
        results[number::count] = map(json.loads, done.stdout.splitlines())

    if count:
        with ThreadPoolExecutor(count) as pool:
            list(pool.map(run, range(count)))
    return results


def answer_tasks(answer: Callable[..., Any]) -> None:
    """Answer the tasks on stdin, each the arguments of `answer`: the other end of a process."""
    for task in json.load(sys.stdin):
        print(json.dumps(answer(*task)), flush=True)
