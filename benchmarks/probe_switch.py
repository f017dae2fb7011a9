"""The step probe with a switch, to compare one vLLM with and without the probe.

Loaded by vLLM as a plugin in place of the probe (benchmark `probe`). Every process that runs steps
listens on the Unix socket `<prefix>.<pid>.switch`: the byte `1` installs the probe, `0` restores
vLLM's own functions, and the byte is returned as confirmation. Switch only while the engine is
idle, since a running step would be recorded in part.
"""

import contextlib
import os
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from types import MethodType
from typing import Any

from connector_tax.vllm.step_probe import probe as step_probe
from connector_tax.vllm.step_probe.hook_points import OWNERS, object_named
from connector_tax.vllm.step_probe.log import Log, socket_address

_ABSENT = object()


class Switch:
    """The probe's changes in this process, and vLLM's original functions."""

    def __init__(self, prefix: str) -> None:
        self._path = f"{prefix}.{os.getpid()}.switch"
        # (object, attribute, original value, the probe's value)
        self._changes: list[tuple[Any, str, Any, Any]] = []
        self._on = True
        self._listening = False

    @contextlib.contextmanager
    def watching(self, *objects: Any) -> Iterator[None]:
        """Record the changes that the `with` block makes to attributes of these objects."""
        before = [dict(vars(o)) for o in objects]
        yield
        for changed, old in zip(objects, before, strict=True):
            for name, value in vars(changed).items():
                if old.get(name, _ABSENT) is not value:
                    self._changes.append((changed, name, old.get(name, _ABSENT), value))

    def replace(self, owner: Any, name: str, without: Any, probed: Any) -> None:
        """Set an attribute to `probed`, or to `without` while the probe is switched off."""
        setattr(owner, name, probed)
        self._changes.append((owner, name, without, probed))

    def turn(self, on: bool) -> None:
        """Install or remove the probe."""
        if on == self._on:
            return
        for owner, name, without, probed in self._changes:
            value = probed if on else without
            if value is _ABSENT:
                delattr(owner, name)
            else:
                setattr(owner, name, value)
        self._on = on

    def listen(self) -> None:
        """Start handling commands on the socket, on the first call from the thread that runs
        steps."""
        if self._listening:
            return
        self._listening = True
        server = socket.socket(socket.AF_UNIX)
        with socket_address(self._path) as address:
            server.bind(address)
        server.listen(1)
        threading.Thread(target=self._serve, args=(server,), daemon=True).start()

    def _serve(self, server: socket.socket) -> None:
        peer, _ = server.accept()
        while order := peer.recv(1):
            self.turn(order == b"1")
            peer.sendall(order)


def register() -> None:
    """Install the probe with a switch for all of its changes; vLLM's entry point."""
    prefix = os.environ.get(step_probe.PREFIX_VARIABLE)
    if not prefix:
        return
    switch = Switch(str(Path(prefix).resolve()))
    install, step_wrapper = step_probe.install, step_probe._step_wrapper
    wrap_hooks, watch_sampling = step_probe._wrap_hooks, step_probe._watch_sampling

    def switched_install(probe: step_probe.Probe) -> None:
        with switch.watching(*(object_named(*owner) for owner in OWNERS)):
            install(probe)

    def switched_step(probe: step_probe.Probe, step: Any) -> Any:
        timed = step_wrapper(probe, step)

        # The engine holds a bound step function, so the switch must be in the engine itself.
        def first_step(engine: Any) -> Any:
            switch.replace(engine, "step_fn", MethodType(step, engine), MethodType(timed, engine))
            switch.listen()
            return timed(engine)

        return first_step

    def switched_hooks(connector: Any, log: Log, names: tuple[str, ...], child: str | None) -> None:
        with switch.watching(connector):
            wrap_hooks(connector, log, names, child)

    def switched_sampling(probe: step_probe.Probe, worker: Any) -> None:
        with switch.watching(worker):
            watch_sampling(probe, worker)
        switch.listen()

    step_probe.install, step_probe._step_wrapper = switched_install, switched_step
    step_probe._wrap_hooks, step_probe._watch_sampling = switched_hooks, switched_sampling
    step_probe.register()
