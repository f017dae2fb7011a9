"""A study's Phase A where machine time is short: the servers start together, and wait stopped.

Each launch has a network namespace of its own and the driver that it has in a study; all servers of
a wave become ready, and are stopped (SIGSTOP) but for the one that is measured, in the drawn order.
So a wave costs one start instead of one a launch, and the launches of a block lie seconds apart. It
needs a GPU with memory for all servers of a wave, each with `--kv-cache-memory-bytes`: what a
server sees free changes while others start. What a launch takes to start is not measured so.

The gates come first, all at a time. Files lie where the study's own rules put them.
"""

import argparse
import fcntl
import functools
import json
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import psutil

from benchmarks import study_parser
from connector_tax.artifacts import paths
from connector_tax.artifacts.names import Launch
from connector_tax.artifacts.study_file import launches, read_study
from connector_tax.commands import run_command
from connector_tax.files import ArtifactError, write_json
from connector_tax.linux import die_with_parent
from connector_tax.servers.kinds import engine_of
from connector_tax.study import launch as study_launch
from connector_tax.study import patch
from connector_tax.study.launch import launch_skip_reason
from connector_tax.study.preflight import ask_gate
from connector_tax.vllm import overlay

READY = "paused"
SIOCGIFFLAGS, SIOCSIFFLAGS, IFF_UP = 0x8913, 0x8914, 1


class _Paused(study_launch.LaunchDriver):
    """Stops its server when that is ready, until it is told to measure."""

    def _measure_all(self, instruments: Any, *arguments: Any) -> None:
        server = psutil.Process(instruments.server.pid)
        tree = [server, *server.children(recursive=True)]
        for process in tree:
            process.suspend()
        print(READY, flush=True)
        if not sys.stdin.readline():
            raise KeyboardInterrupt
        for process in tree:
            process.resume()
        super()._measure_all(instruments, *arguments)


def _launch(arguments: argparse.Namespace) -> int:
    study_launch.LaunchDriver = _Paused  # type: ignore[misc]
    launch = Launch(arguments.config, arguments.block, "A")
    log = arguments.study.parent / "logs" / f"{launch.config}.block{launch.block}.A.log"
    return study_launch.main([
        *("--study", str(arguments.study), "--config", launch.config),
        *("--block", str(launch.block), "--phase", launch.phase, "--log", str(log)),
    ])  # fmt: skip


def _gate(arguments: argparse.Namespace) -> None:
    study, folder = read_study(arguments.study), arguments.study.parent / paths.PREFLIGHT
    entry = next(e for e in study["configurations"] if e["id"] == arguments.config)
    gate = engine_of(study["config"]["engine"]).gate_of(entry)
    assert gate is not None
    print(json.dumps(ask_gate(study, entry["id"], gate, folder, folder / "overlay")), flush=True)


def _child(study: Path, step: str, *options: str) -> subprocess.Popen[str]:
    """This module's step in a network namespace of its own, which ends with this process."""
    module = (sys.executable, "-m", "benchmarks.paused", "--study", str(study), step, *options)
    return subprocess.Popen(
        ["unshare", "--net", *module],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, preexec_fn=die_with_parent,
    )  # fmt: skip


def _loopback_up() -> None:
    with socket.socket() as any_socket:
        request = struct.pack("16sH14x", b"lo", 0)
        flags = struct.unpack("16sH14x", fcntl.ioctl(any_socket, SIOCGIFFLAGS, request))[1]
        fcntl.ioctl(any_socket, SIOCSIFFLAGS, struct.pack("16sH14x", b"lo", flags | IFF_UP))


def _gates(arguments: argparse.Namespace) -> None:
    study, folder = read_study(arguments.study), arguments.study.parent
    overlay.install(folder / paths.PREFLIGHT / "overlay")
    children = {
        entry["id"]: _child(arguments.study, "gate", "--config", entry["id"])
        for entry in study["configurations"]
    }
    status = {}
    for name, child in children.items():
        said = child.communicate()[0].splitlines()
        if child.returncode or not said:
            raise ArtifactError(f"the gate of {name} ended with {child.returncode}")
        status[name] = json.loads(said[-1])
        print(f"{name}: {status[name]['reason']}", flush=True)
    overlay.remove(folder / paths.PREFLIGHT / "overlay")
    write_json(folder / paths.PREFLIGHT_STATUS, status)
    patch.main(["apply", "--study", str(arguments.study)])


def _waves(arguments: argparse.Namespace) -> None:
    study = read_study(arguments.study)
    began = time.monotonic()
    say = functools.partial(_say, began)
    root = arguments.study.parent
    drawn = [la for la in launches(study, "A") if launch_skip_reason(root, la) is None]
    for first in range(0, len(drawn), arguments.at_once):
        wave = drawn[first : first + arguments.at_once]
        children = {
            la: _child(
                arguments.study, "launch", "--config", la.config, "--block", str(la.block)
            )
            for la in wave
        }  # fmt: skip
        ready = [launch for launch, child in children.items() if _heard(child, launch, say)]
        say(f"{len(ready)} of {len(wave)} servers wait")
        for launch in ready:
            child = children[launch]
            if time.monotonic() - began > arguments.until_s:
                child.kill()
                continue
            assert child.stdin is not None
            assert child.stdout is not None
            child.stdin.write("go\n")
            child.stdin.flush()
            for line in child.stdout:
                print(line, end="", flush=True)
            say(f"{launch.name} ended with {child.wait()}")


def _heard(child: subprocess.Popen[str], launch: Launch, say: Any) -> bool:
    """Whether a launch's server became ready; what else its driver says is passed on."""
    assert child.stdout is not None
    for line in child.stdout:
        if line.strip() == READY:
            return True
        print(line, end="", flush=True)
    say(f"{launch.name} ended with {child.wait()} before it was ready")
    return False


def _say(began: float, text: str) -> None:
    print(f"{time.monotonic() - began:6.1f} s  {text}", flush=True)


def main(argv: Sequence[str] | None = None) -> int:
    """Measure a study's Phase A with servers that start together."""
    parser = study_parser("paused", __doc__)
    steps = parser.add_subparsers(required=True)
    for name, command in {
        "gates": _gates,
        "gate": _gate,
        "launch": _launch,
        "waves": _waves,
    }.items():
        step = steps.add_parser(name)
        step.set_defaults(work=command)
        if name in {"gate", "launch"}:
            step.add_argument("--config", required=True)
            step.set_defaults(inside=True)
        if name == "launch":
            step.add_argument("--block", type=int, required=True)
        if name == "waves":
            step.add_argument("--at-once", type=int, required=True)
            step.add_argument("--until-s", type=float, default=float("inf"))

    def work(arguments: argparse.Namespace) -> int | None:
        if getattr(arguments, "inside", False):
            _loopback_up()
        status: int | None = arguments.work(arguments)
        return status

    return run_command(parser, argv, work)


if __name__ == "__main__":
    sys.exit(main())
