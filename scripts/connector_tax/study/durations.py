"""How long the parts of a study are expected to take: from a model of its machine, else assumed.

The model is `rehearsal.durations`; what it says is kept in durations.json, for `plan`, `doctor` and
the progress line. Without it a server is taken to keep up with every rate.
"""

from dataclasses import dataclass, field
from pathlib import Path

from connector_tax.artifacts import paths
from connector_tax.artifacts.record_reader import read_record
from connector_tax.artifacts.stage_records import DurationsRecord
from connector_tax.artifacts.study_records import RehearsalSection, StudyDocument
from connector_tax.servers.kinds import engine_of


@dataclass(frozen=True)
class Durations:
    """Expected seconds.

    Attributes:
        startup_s: from launch to ready.
        probes_s: all probes of shapes together, without their server's start; 0 where none is made.
        source: where the numbers are from, for whoever reads them.
        rates_rps: phase to the reference rate that they hold for; empty where none is expected.
        cells: phase to cell to seconds; empty where a server is taken to keep up.
    """

    startup_s: float
    probes_s: float
    source: str
    rates_rps: dict[str, float] = field(default_factory=dict)
    cells: dict[str, dict[str, float]] = field(default_factory=dict)


def gates_s(study: StudyDocument, startup_s: float) -> float:
    """Expected seconds of all gates, and of the proof of the step probe, which is a start more."""
    engine = engine_of(study["config"]["engine"])
    gates = sum(engine.gate_of(entry) is not None for entry in study["configurations"])
    return float((gates + bool(engine.pythons)) * (startup_s + engine.gate_s))


def probing_s(study: StudyDocument, known: Durations) -> float:
    """Expected seconds of the stage that probes the shapes; 0 in a study without it."""
    if study["config"].get("shape_rates") is None:
        return 0.0
    return known.startup_s + engine_of(study["config"]["engine"]).gate_s + known.probes_s


def assumed(study: StudyDocument, why: str) -> Durations:
    """What is said where there is no model of the machine, for the reason `why`."""
    engine, shape_rates = study["config"]["engine"], study["config"].get("shape_rates")
    startup_s = engine_of(engine).startup_s
    shapes = {cell["cell"] for phase in ("B", "Bp") for cell in study["cells"][phase]}
    probe_s = len(shapes) * shape_rates["probe_s"] if shape_rates else 0.0
    how = "assumed" if engine.get("device") == "cuda" else "as in the shipped studies"
    source = f"if the server keeps up with every rate, a start-up of {startup_s:g} s {how}; {why}"
    return Durations(startup_s, probe_s, source)


def durations_content(study: StudyDocument, known: Durations) -> DurationsRecord:
    """The content of durations.json."""
    return {
        "design_sha256": study["design_sha256"],
        "machine": machine_named(study),
        "startup_s": known.startup_s,
        "probes_s": known.probes_s,
        "source": known.source,
        "rates_rps": known.rates_rps,
        "cells": known.cells,
    }


def machine_named(study: StudyDocument) -> RehearsalSection | None:
    """The `rehearsal` section, which is no part of the design; None where there is none."""
    return study["config"].get("rehearsal")


def read_durations(study: StudyDocument, folder: Path) -> Durations | None:
    """What durations.json says; None where there is none of this design and machine."""
    path = folder / paths.DURATIONS
    if not path.exists():
        return None
    content = read_record(path, DurationsRecord)
    if content["design_sha256"] != study["design_sha256"]:
        return None
    if content["machine"] != machine_named(study):
        return None
    return Durations(
        content["startup_s"], content["probes_s"], content["source"],
        content["rates_rps"], content["cells"],
    )  # fmt: skip


def known_durations(study: StudyDocument, folder: Path) -> Durations:
    """What durations.json says, else what is assumed."""
    known = read_durations(study, folder)
    return assumed(study, f"no {paths.DURATIONS}") if known is None else known
