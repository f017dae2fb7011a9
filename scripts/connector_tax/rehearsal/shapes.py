"""The probe of the shapes in virtual time: what `study.shape_rates` measures on a server."""

import functools

from connector_tax.artifacts.names import Launch, baseline_of
from connector_tax.artifacts.study_records import StudyDocument
from connector_tax.engine.virtual import VirtualEngine
from connector_tax.rehearsal.machine import Machine
from connector_tax.servers.embedded import launch_seed
from connector_tax.study.shape_rates import fastest_burst, shapes_of


def rehearse_shapes(study: StudyDocument, machine: Machine) -> tuple[dict[str, list[float]], float]:
    """Cell name to when its requests are completed, s; and how long all the probes take, s."""
    config = study["config"]
    baseline = baseline_of(config)
    seed = launch_seed(study, Launch(baseline, 0, "B"))
    engine = VirtualEngine(machine.engines[baseline], seed, machine.device_us)
    longest_s, front_s = config["cell"]["request_timeout_s"], machine.front_ns / 1e9
    completed_s = {
        name: fastest_burst(config, functools.partial(_burst, engine, shape, longest_s, front_s))
        for name, shape in shapes_of(study).items()
    }
    return completed_s, engine.now_ns / 1e9


def _burst(
    engine: VirtualEngine, shape: tuple[int, int], longest_s: float, front_s: float, count: int
) -> list[float]:
    """When `count` requests of a shape that all arrive at once are completed, s."""
    began_ns = engine.now_ns
    arrived = [engine.add(number, *shape) for number in range(count)]
    done: list[float] = []
    passed_s = 0.0
    while engine.scheduler.has_work and passed_s < longest_s:
        finished = sum(sequence.finished for sequence in engine.step())
        passed_s = (engine.now_ns - began_ns) / 1e9
        done += [passed_s + front_s] * finished
    for sequence in arrived:
        if not sequence.finished:
            engine.scheduler.abort(sequence)
    return done
