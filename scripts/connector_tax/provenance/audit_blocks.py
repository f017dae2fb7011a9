"""Claims about blocks: launches in their seeded order, one after the other, on one device.

A tax compares launches of one block (docs/method.md, "Design: blocks of launches"). Where these ran
on two devices, beside each other or in another order than the drawn one, it may compare devices,
neighbours or hours instead.
"""

import itertools
from collections.abc import Callable, Iterator, Sequence
from datetime import datetime
from typing import NamedTuple

from connector_tax.artifacts import paths
from connector_tax.artifacts.launch_files import AttemptRecord, NodeRecord, QuietLevel
from connector_tax.artifacts.names import PHASES
from connector_tax.files import read_json
from connector_tax.provenance.audit_study import RawLaunch, RawStudy
from connector_tax.provenance.claims import Ledger
from connector_tax.provenance.recompute import Row

ORDER, OVERLAP, DEVICE = "block order", "overlap", "block device"
LEVEL = "block quiet level"
UNKNOWN = "measured before launches recorded the machine they ran on"
# Of a node, what may change without another device: a reboot, the next job of a scheduler.
PASSING = ("boot", "job", "exclusive")
FILES_CLAIM = "engine files"
NO_FILES = "measured before launches recorded the lock and the sources of their vLLM"
# Of a GPU, what tells it from others of its type.
OWN = ("uuid", "pci.bus_id")


class Attempt(NamedTuple):
    """One start of a launch's server: whose, when, and the machine; None: not recorded."""

    name: str
    block: int
    started: datetime
    ended: datetime
    node: NodeRecord | None


def check_blocks(study: RawStudy, ledger: Ledger) -> None:
    """A claim for each order, each block's and device's time, each block's device, and the type."""
    began = {(la.config, la.block, la.phase): la for la in study.launches if _attempts(la)}
    for phase, block in itertools.product(PHASES, range(study.document["blocks"])):
        drawn = [
            began[key]
            for entry in study.document["run_order"][phase]
            if entry["block"] == block and (key := (entry["config"], block, phase)) in began
        ]
        if drawn:
            late = _again(drawn)
            told = f"as drawn, {', '.join(late)} again on request" if late else "as drawn"
            ledger.check(ORDER, f"block{block}/{phase}", _out_of_order(drawn, late), told)
        levels = [level for launch in drawn for level in _quiet_levels(launch)]
        if levels:
            other = (f"{name}: {level}" for name, level in levels if level != levels[0][1])
            ledger.check(LEVEL, f"block{block}/{phase}", other, "one level")
    attempts = sorted(
        (_attempt(la, entry) for la in began.values() for entry in _attempts(la)),
        key=lambda attempt: (attempt.started, attempt.ended),
    )
    for name, group in _together(attempts).items():
        ledger.check(OVERLAP, name, _overlapping(group), f"{len(group)} starts")
    known = [attempt for attempt in attempts if attempt.node is not None]
    if attempts and not known:
        ledger.not_checkable(DEVICE, "whole study", UNKNOWN)
        return
    for block in dict.fromkeys(attempt.block for attempt in known):
        mine = [attempt for attempt in known if attempt.block == block]
        ledger.check(DEVICE, f"block{block}", _unlike(mine, _device), "one device")
    ledger.check("device type", "whole study", _unlike(known, _type), "one type of device")
    if not any("engine_files" in (attempt.node or {}) for attempt in known):
        if not study.document["emulated"]:
            ledger.not_checkable(FILES_CLAIM, "whole study", NO_FILES)
        return
    ledger.check(FILES_CLAIM, "whole study", _other_files(study, known), "one environment")


def _attempts(launch: RawLaunch) -> Sequence[AttemptRecord]:
    return [] if launch.index is None else launch.index.attempts


def _attempt(launch: RawLaunch, entry: AttemptRecord) -> Attempt:
    """A killed attempt has no end: then its beginning counts."""
    started = datetime.fromisoformat(entry["started_utc"])
    ended = entry["ended_utc"]
    return Attempt(
        launch.name,
        launch.block,
        started,
        started if ended is None else datetime.fromisoformat(ended),
        entry.get("node"),
    )


def _quiet_levels(launch: RawLaunch) -> Iterator[tuple[str, QuietLevel]]:
    """By attempt; none in a study without a `quiet` section, or measured before they had any."""
    for attempt in _attempts(launch):
        level = attempt.get("quiet_level")
        if level is not None:
            yield launch.name, level


def _again(drawn: Sequence[RawLaunch]) -> list[str]:
    """Launches that were measured again on request, where this is why the order is not as drawn."""
    if not any(_out_of_order(drawn, ())):
        return []
    return [la.name for la in drawn if _attempts(la)[0].get("supersedes") is not None]


def _out_of_order(drawn: Sequence[RawLaunch], aside: Sequence[str]) -> Iterator[str]:
    begun = [(la.name, _attempt(la, _attempts(la)[0]).started) for la in drawn]
    begun = [(name, started) for name, started in begun if name not in aside]
    for (before, earlier), (name, started) in itertools.pairwise(begun):
        if started < earlier:
            yield f"{name} began at {started}, before {before} at {earlier}, which is drawn first"


def _together(attempts: Sequence[Attempt]) -> dict[str, list[Attempt]]:
    """What must not overlap, as it began: all of a block, and all on one device."""
    groups: dict[str, list[Attempt]] = {}
    for attempt in attempts:
        for name in (f"block{attempt.block}", *_places(attempt.node)):
            groups.setdefault(name, []).append(attempt)
    return groups


def _places(node: NodeRecord | None) -> list[str]:
    if node is None:
        return []
    if node["gpus"]:
        return list(node["devices"])
    return [f"{node['machine']} {name}, CPUs {node['cpus']}" for name in node["devices"]]


def _overlapping(group: Sequence[Attempt]) -> Iterator[str]:
    for before, after in itertools.pairwise(group):
        if after.started < before.ended:
            yield f"{after.name} began at {after.started}, {before.name} ended at {before.ended}"


def _device(node: NodeRecord) -> Row:
    return {key: value for key, value in node.items() if key not in PASSING}


def _type(node: NodeRecord) -> Row:
    gpus = [{k: v for k, v in gpu.items() if k not in OWN} for gpu in node["gpus"]]
    return {"gpus": gpus, "cpu": node["cpu"], "quota_cpus": node["quota_cpus"]}


def _other_files(study: RawStudy, attempts: Sequence[Attempt]) -> Iterator[str]:
    """Lock and sources that are not those of the other launches, or of the step probe's proof."""
    recorded = [
        (a.name, a.node["engine_files"]) for a in attempts if a.node and "engine_files" in a.node
    ]
    for name, files in recorded[1:]:
        if files != recorded[0][1]:
            yield f"{recorded[0][0]} had {recorded[0][1]}, {name} {files}"
    proved = read_json(study.root / paths.PATCH_STATUS).get("vllm_sources_sha256_before")
    python = study.document["config"]["engine"].get("python")
    first = recorded[0][1]
    own = first[python]["sources_sha256"] if python in first else None
    if None not in (proved, own) and proved != own:
        yield f"vLLM's sources are {own}, {proved} where step timing was proved"


def _unlike(attempts: Sequence[Attempt], what: Callable[[NodeRecord], Row]) -> Iterator[str]:
    """What differs from the first attempt, with both values; all have a node."""
    sides = [(a.name, what(a.node)) for a in attempts if a.node is not None]
    first, wanted = sides[0]
    for name, other in sides[1:]:
        for key in wanted:
            if wanted[key] != other.get(key):
                yield f"{key}: {first} on {wanted[key]!r}, {name} on {other.get(key)!r}"
