"""Claims about the design and the launches: hash, run order, cells, labels, skips, run files.

Nothing here is shared with connector_tax.analysis.
"""

import shlex
from collections.abc import Iterator, Sequence

from connector_tax.artifacts import paths
from connector_tax.artifacts.names import PHASES, plain_names
from connector_tax.artifacts.study_records import ConfigurationEntry, LaunchPlan
from connector_tax.files import read_json, sha256_json
from connector_tax.provenance.audit_study import RawCell, RawLaunch, RawStudy
from connector_tax.provenance.claims import Ledger
from connector_tax.provenance.recompute import Measured, named_generator
from connector_tax.study.design import measured_design


def check_design(study: RawStudy, ledger: Ledger) -> None:
    """Every claim about the design and its launches."""
    ledger.check("design", "hash", _design_hash(study), "study.json hashes to its design_sha256")
    ledger.check("design", "run order", _run_order(study), "follows from the seed")
    ledger.check("design", "cells", _planned_cells(study), "follow from the grid")
    if study.config.get("shape_rates") is not None:
        ledger.check("design", "shape rates", _shape_rates(study), "follow from what was served")
    ledger.check("label", "engine", _labels(study), str(study.document["engine_label"]))
    for configuration in study.document["configurations"]:
        ledger.check("gate", configuration["id"], _gate(study, configuration))
    for launch in study.launches:
        ledger.check("launch", launch.name, _launch(study, launch))
        if launch.status == "skipped":
            ledger.check("skip", launch.name, _skip(study, launch), _reason(launch))
        elif launch.status == "done":
            ledger.check("run files", launch.name, _run_files(study, launch))


def _design_hash(study: RawStudy) -> Iterator[str]:
    config = study.as_sealed["config"]
    # What the hash covers is the design's own definition; whether it fits is what is checked.
    design = measured_design(config, study.document["configurations"])
    if study.older_form:
        design["closing_plain"] = config["closing_plain"]
    digest = sha256_json(design)
    if digest != study.document["design_sha256"]:
        yield f"design_sha256 is {study.document['design_sha256']}, its content hashes to {digest}"
    for key in ("study", "seed", "blocks"):
        if study.document[key] != config[key]:
            yield f"{key} is {study.document[key]!r}, config.{key} {config[key]!r}"


def _run_order(study: RawStudy) -> Iterator[str]:
    config = study.config
    for phase in PHASES:
        everyone = config["configurations"]
        members = {
            "A": everyone,
            "B": config["phase_b"].get("configurations", everyone),
            "Bp": config["phase_bp"].get("configurations", everyone),
        }[phase]
        expected: list[LaunchPlan] = []
        for block in range(config["blocks"]):
            order = _block_order(study, phase, block, members)
            expected += [{"config": name, "block": block} for name in order]
        if study.document["run_order"][phase] != expected:
            yield f"phase {phase} is not the order seed {config['seed']} gives"


def _block_order(study: RawStudy, phase: str, block: int, members: Sequence[str]) -> list[str]:
    """A block's launches as drawn; an older study's plain opens and closes it, or stands once."""
    draw = named_generator(f"{study.config['seed']}/run_order/{phase}/block{block}")
    others = [member for member in members if member != study.baseline]
    if not study.older_form:
        order = others + plain_names(study.config["plain_launches"], study.baseline)
        draw.shuffle(order)
        return order
    if study.as_sealed["config"]["closing_plain"]:
        draw.shuffle(others)
        return [study.baseline, *others, "plain_last"]
    order = list(members)
    draw.shuffle(order)
    return order


def _planned_cells(study: RawStudy) -> Iterator[str]:
    config = study.config
    sweep, grid = config["phase_a"], config["phase_b"]
    expected = {
        "A": [(f"r{r:g}", r, sweep["input_tokens"], sweep["output_tokens"])
              for r in sweep["rates_rps"]],
        "B": [(f"{i}x{o}", None, i, o)
              for i in grid["input_tokens"] for o in grid["output_tokens"]],
        "Bp": [(f"{i}x{o}", None, i, o) for i, o in config["phase_bp"]["shapes"]],
    }  # fmt: skip
    for phase in PHASES:
        planned = [
            (c["cell"], c["rate_rps"], c["input_tokens"], c["output_tokens"])
            for c in study.document["cells"][phase]
        ]
        if planned != expected[phase]:
            yield f"phase {phase} plans {planned}, the grid gives {expected[phase]}"


def _shape_rates(study: RawStudy) -> Iterator[str]:
    """What was served of each shape, and the share of it that is offered, once more."""
    content, section = study.shape_rates, study.config.get("shape_rates")
    assert section is not None
    share = section["max_share"]
    if content["design_sha256"] != study.document["design_sha256"]:
        yield "shape_rates.json is of another design"
    planned = {c["cell"] for phase in ("B", "Bp") for c in study.document["cells"][phase]}
    if content["shapes"].keys() != planned:
        yield f"shape_rates.json has {sorted(content['shapes'])}, the design {sorted(planned)}"
    for name, shape in content["shapes"].items():
        done = shape["completed_s"]
        most = float(f"{share * len(done) / max(done):.3g}")
        if shape["most_rps"] != most:
            yield f"{name}: most_rps is {shape['most_rps']}, what was served gives {most}"


def _labels(study: RawStudy) -> Iterator[str]:
    label, kind = study.document["engine_label"], study.config["engine"]["kind"]
    if study.document["emulated"] != (kind == "embedded"):
        yield f"emulated is {study.document['emulated']}, the engine is {kind!r}"
    if study.document["emulated"] != ("emulated" in label):
        yield f"engine_label {label!r} contradicts emulated: {study.document['emulated']}"
    if label != study.config["engine"]["label"]:
        yield f"engine_label {label!r} is not config.engine.label"
    for launch in study.launches:
        if launch.index is not None and launch.index.label != label:
            yield f"{launch.name}/index.json: label {launch.index.label!r}, not {label!r}"
    for cell in study.cells:
        if cell.measured and cell.record["label"] != label:
            yield f"{cell.path('cell').name} of {cell.launch.name}: label is not {label!r}"


def _reason(launch: RawLaunch) -> str:
    return "" if launch.index is None else str(launch.index.reason)


def _launch(study: RawStudy, launch: RawLaunch) -> Iterator[str]:
    if launch.index is None:
        yield "index.json is missing"
        return
    wanted = {"config": launch.config, "block": launch.block, "phase": launch.phase}
    for key, value in wanted.items():
        if getattr(launch.index, key) != value:
            said = getattr(launch.index, key)
            yield f"index.json: {key} is {said!r}, its folder says {value!r}"
    if launch.index.depends["design_sha256"] != study.document["design_sha256"]:
        yield "depends.design_sha256 is of another design"
    if launch.phase != "A" and launch.status != "skipped":
        rate = study.rates["ref_safe" if launch.phase == "B" else "ref_load"]
        if launch.index.rate_rps != rate:
            yield f"rate_rps is {launch.index.rate_rps}, reference_rates.json says {rate}"
    listed = sorted(entry.cell for entry in launch.index.cells)
    planned = sorted(c["cell"] for c in study.document["cells"][launch.phase])
    if listed != planned:
        yield f"index.json lists cells {listed}, the design plans {planned}"


def _gate(study: RawStudy, configuration: ConfigurationEntry) -> Iterator[str]:
    """What pre-flight decided stands in the log of the gate."""
    gates = read_json(study.root / paths.PREFLIGHT_STATUS)
    said = gates[configuration["id"]]
    if said["evidence"] is None:
        if study.config["engine"]["kind"] != "embedded" or configuration["gate"]:
            yield "preflight_status.json names no log of its gate"
        elif not said["include"]:
            yield "left out without a gate"
        return
    log = study.root / said["evidence"]
    decision = f"{'INCLUDE' if said['include'] else 'SKIP'}: {said['reason']}"
    if not log.is_file():
        yield f"{said['evidence']} is missing"
    elif not log.read_text(encoding="utf-8").rstrip("\n").endswith(f" {decision}"):
        yield f"{said['evidence']} does not end with {decision!r}"


def _skip(study: RawStudy, launch: RawLaunch) -> Iterator[str]:
    if not _reason(launch).strip():
        yield "skipped without a reason"
    gate = read_json(study.root / paths.PREFLIGHT_STATUS)[launch.configuration]
    same = study.rates["ref_safe"] == study.rates["ref_load"]
    if gate["include"] and not (launch.phase == "Bp" and same):
        yield "skipped, though pre-flight includes it and no rule leaves it out"
    if not gate["include"] and not gate["reason"]:
        yield "preflight_status.json excludes the configuration without a reason"
    if launch.folder.exists() and any(launch.folder.glob("*/cell_*.json")):
        yield "skipped, though there are measured cells"


def skipped_rate(study: RawStudy, cell: RawCell) -> Iterator[str]:
    """A single rate may be skipped where the same launch is certainly saturated far below it."""
    precision, rate = study.config.get("precision"), cell.planned["rate_rps"]
    if precision is None or not precision["enabled"] or rate is None:
        yield "skipped in a launch that ran, and the design allows no such skip"
        return
    factor = precision["skip_rate_factor"]
    for lower in study.cells:
        if lower.launch is not cell.launch or lower.status != "valid":
            continue
        lower_rate = lower.planned["rate_rps"]
        if lower_rate is not None and lower_rate < rate and factor * lower_rate <= rate:
            measured = Measured(lower.requests, lower.record["window"])
            served = measured.throughput_rps * measured.window_s
            if served < precision["certain_throughput_ratio"] * measured.arrivals:
                return
    yield "skipped, though the launch keeps up at every rate far enough below"


def _run_files(study: RawStudy, launch: RawLaunch) -> Iterator[str]:
    missing = [name for name in paths.LAUNCH_FILES if not (launch.folder / name).is_file()]
    yield from (f"{name} is missing" for name in missing)
    if missing:
        return
    config = read_json(launch.folder / paths.LAUNCH_CONFIG)
    if config["design_sha256"] != study.document["design_sha256"]:
        yield "config.json: design_sha256 is of another design"
    script = (launch.folder / paths.LAUNCH_SCRIPT).read_text(encoding="utf-8")
    # launch.sh has the project's folder in a variable of its own.
    argv = [argument.replace("{root}", "$root") for argument in config["argv"]]
    if shlex.split(script.rpartition("\nexec ")[2])[-len(argv) :] != argv:
        yield "launch.sh does not run config.json's argv"
    if (launch.folder / paths.ENV_TEXT).read_bytes() != (study.root / paths.ENV_TEXT).read_bytes():
        yield "env.txt differs from the study's env.txt"
