"""The probe of the shapes in virtual time: what `study.shape_rates` measures on a server."""

from collections.abc import Mapping
from typing import Any

from connector_tax.artifacts.names import PLAIN, Launch
from connector_tax.engine.virtual import VirtualEngine
from connector_tax.rehearsal.machine import Machine
from connector_tax.study.design import launch_seed
from connector_tax.study.shape_rates import probe_rule, shapes_of


def rehearse_shapes(
    study: Mapping[str, Any], machine: Machine
) -> tuple[dict[str, list[float]], float]:
    """Cell name to when its requests are completed, s; and how long all the probes take, s."""
    rule = probe_rule(study["config"])
    engine = VirtualEngine(
        machine.engines[PLAIN], launch_seed(study, Launch(PLAIN, 0, "B")), machine.device_us
    )
    completed_s: dict[str, list[float]] = {}
    for name, shape in shapes_of(study).items():
        began_ns = engine.now_ns
        arrived = [engine.add(n, *shape) for n in range(study["config"]["cell"]["inflight_cap"])]
        done: list[float] = []
        passed_s = 0.0
        while engine.scheduler.has_work and passed_s < (rule.floor_s if done else rule.cap_s):
            finished = sum(sequence.finished for sequence in engine.step())
            passed_s = (engine.now_ns - began_ns) / 1e9
            done += [passed_s + machine.front_ns / 1e9] * finished
        for sequence in arrived:
            if not sequence.finished:
                engine.scheduler.abort(sequence)
        completed_s[name] = done
    return completed_s, engine.now_ns / 1e9
