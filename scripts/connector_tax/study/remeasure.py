"""Mark launches of a study to be measured again; no measurement is deleted.

    connector-tax remeasure results/<study>

A launch's folder is renamed to `<phase>.superseded<k>`, which its next attempt records; the study's
command then measures what is missing. By default these are the launches with a void cell. Failed
launches are not moved: only their missing cells are measured. A server that was overloaded would be
overloaded again, so a launch with such a cell must be chosen by name.
"""

from __future__ import annotations

import argparse
import contextlib
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from connector_tax.artifacts import paths
from connector_tax.artifacts.checks import CHECKS, MACHINE_CHECKS
from connector_tax.artifacts.names import PHASES, UNANSWERED, Launch
from connector_tax.artifacts.study_file import every_launch, read_study
from connector_tax.commands import run_command
from connector_tax.config import ConfigError
from connector_tax.files import ArtifactError, fsync, is_intact, read_json
from connector_tax.foreign import printable

if TYPE_CHECKING:
    from connector_tax.artifacts.cell_records import CellRecord
    from connector_tax.artifacts.folder import LaunchFolder
    from connector_tax.artifacts.study_records import StudyDocument


# ---- causes of void cells

OVERLOADED = "the server was overloaded"
# The share of failed requests that shows that a server does not serve the load; fewer may be an
# accident.
UNSERVED_SHARE = 0.05
MACHINE_CAUSES = frozenset(
    CHECKS[name].void for name in (*MACHINE_CHECKS, "device_woken_late_ms", "device_exposed_share")
)


def void_cause(record: CellRecord) -> str | None:
    """Return why a cell is void, without numbers, or None if it is valid."""
    failed = [name for name, check in record["health"].items() if not check["pass"]]
    if not failed:
        return None
    if record["cooldown"]["ended_by"] == "overloaded":
        return OVERLOADED
    disturbed = [name for name in MACHINE_CHECKS if name in failed]
    if not disturbed and unserved(record) and _mostly_unanswered(record):
        return OVERLOADED
    first = [*disturbed, *failed][0]
    return CHECKS[first].void if first in CHECKS else first


def unserved(record: CellRecord) -> bool:
    """Return whether the failures of a cell show that the server does not serve the load."""
    check = record["health"].get("error_rate")
    if check is None or check["pass"] or check["value"] is None:
        return False
    return check["value"] >= UNSERVED_SHARE


def _mostly_unanswered(record: CellRecord) -> bool:
    """Return whether most of a cell's failed requests were left unanswered."""
    failed = record["counts"]["failed"]
    return 2 * sum(failed.get(kind, 0) for kind in UNANSWERED) > sum(failed.values())


def stolen_share(machine_file: Path) -> float:
    """Return the share of requested CPU time that the host took from server or load generator.

    The larger of both shares is returned, or 0 if the machine was not watched: the cell has no such
    file.
    """
    # Imported late: Snakemake plans without numpy.
    from connector_tax.analysis.machine import read_machine

    if not machine_file.exists():
        return 0.0
    return max(use.stolen for use in read_machine(machine_file, None).cpus.values())


# ---- moving aside

# Files of one design; `--all` sets them aside together with the launches.
DESIGN_FILES = (
    *(paths.STUDY, paths.ENVIRONMENT, paths.ENV_TEXT, paths.MODEL),
    *(paths.PREFLIGHT, paths.PATCH),
)


class RemeasureError(Exception):
    """Nothing was moved; the text gives the reason."""


def main(argv: Sequence[str] | None = None) -> int:
    """Set launches aside, so that the study's command measures them again."""
    parser = argparse.ArgumentParser(
        prog="connector-tax remeasure",
        description=main.__doc__,
        epilog="By default every launch with a void cell is chosen. The study's command resumes"
        " failed launches in any case.",
    )
    parser.add_argument("study", type=Path, help="results/<study>")
    choice = parser.add_mutually_exclusive_group()
    choice.add_argument(
        "--launch", nargs="+", metavar="NAME", help="choose these launches, such as plain/block0/A"
    )
    choice.add_argument("--phase", choices=PHASES, help="choose every launch of a phase")
    choice.add_argument(
        "--all", action="store_true", help="choose every launch, the gates and the design"
    )
    return run_command(parser, argv, _remeasure, (ArtifactError, RemeasureError))


def _remeasure(arguments: argparse.Namespace) -> None:
    folder: Path = arguments.study
    study = read_study(folder / paths.STUDY)
    _refuse_running(folder)
    launches = every_launch(study)
    if arguments.launch:
        names = {launch.name: launch for launch in launches}
        unknown = [name for name in arguments.launch if name not in names]
        if unknown:
            raise RemeasureError(
                f"--launch: found {unknown[0]}; allowed: <name>/block<k>/<phase> of a launch in"
                f" {folder / paths.STUDY}, such as {launches[0].name}"
            )
        chosen = [names[name] for name in dict.fromkeys(arguments.launch)]
    elif arguments.phase or arguments.all:
        chosen = [launch for launch in launches if arguments.phase in (None, launch.phase)]
    else:
        chosen = [launch for launch in launches if _worth_measuring(_folder(launch, folder))]
    moved = [launch for launch in chosen if launch.folder(folder).exists()]
    measured = {la for la in launches if la.phase == "A" and _is_measured(_folder(la, folder))}
    for launch in moved:
        move_aside(launch.folder(folder), "superseded")
    failed = withdraw_failed(launches, folder)
    if moved or arguments.all:
        # Recomputed from the new measurements.
        for name in (paths.REFERENCE_RATES, paths.COMPLETE):
            (folder / name).unlink(missing_ok=True)
    aside = [*DESIGN_FILES] if arguments.all else []
    if arguments.all or arguments.phase == "A" or (measured and measured <= {*moved}):
        # Interim decisions from the old launches do not hold for the new ones.
        aside.append(paths.LOOKS)
    for path in (folder / name for name in aside):
        if path.exists():
            move_aside(path, "superseded")
    fsync(folder)
    for launch, reason in failed.items():
        print(printable(f"{launch.name} failed: {reason}"))
    done = [f"{len(moved)} launches moved aside and kept"]
    done += [f"{len(failed)} failed launches to be resumed"] if failed else []
    then = "rerun the study's command to measure them" if moved or failed else "nothing to measure"
    print(f"{folder}: {', '.join(done)}; {then}")


def _refuse_running(folder: Path) -> None:
    """Raise if Snakemake is running on the study: it has planned its jobs by the existing files."""
    root = folder.resolve()
    # Snakemake may run where results/, or the study in it, is a link.
    homes = {root.parents[1], folder.absolute().parents[1], Path.cwd()}
    locks = (lock for home in homes for lock in (home / ".snakemake" / "locks").glob("*"))
    for lock in locks:
        for line in lock.read_text(encoding="utf-8").splitlines():
            if (lock.parents[2] / line).resolve().is_relative_to(root):
                raise RemeasureError(
                    f"{folder}: a run holds the folder ({lock}); wait until the run has ended."
                    " After a killed run: snakemake --unlock"
                )


def _worth_measuring(launch: LaunchFolder) -> bool:
    """Return whether a cell of the launch is void for another reason than overload."""
    entries = launch.index.cells if launch.index else []
    records = (launch.record(entry.cell) for entry in entries if entry.status == "void")
    return any(record is None or void_cause(record) != OVERLOADED for record in records)


def _is_measured(launch: LaunchFolder) -> bool:
    # A launch whose index cannot be read may be moved aside.
    with contextlib.suppress(ArtifactError):
        return launch.status == "done"
    return False


def move_aside(path: Path, label: str) -> Path:
    """Rename a file or folder to `<name>.<label><k>`; return the new path."""
    target = paths.set_aside(path, label)
    path.rename(target)
    fsync(path.parent)
    return target


def superseded(launch: Launch, study_folder: Path) -> str | None:
    """Return the folder name of the latest run that was set aside, or None."""
    folder = launch.folder(study_folder)
    label = f"{folder.name}.superseded"
    names = [path.name.removeprefix(label) for path in folder.parent.glob(f"{label}*")]
    numbers = [int(name) for name in names if name.isdecimal()]
    return f"{label}{max(numbers)}" if numbers else None


def withdraw_damaged(study: StudyDocument, folder: Path) -> list[str]:
    """Mark damaged cells to be measured again: rename their launch's index.json to
    index.damaged.json.

    Returns:
        A line for each renamed index, with the damaged file.
    """
    lines = []
    for launch in every_launch(study):
        there = _folder(launch, folder)
        damage = _damage(there)
        if damage is not None:
            _withdraw(there.folder, paths.DAMAGED_INDEX)
            lines.append(f"{launch.name}: {damage}; rerun the same command to measure it again")
    return lines


def withdraw_failed(among: Iterable[Launch], folder: Path) -> dict[Launch, str]:
    """Mark failed launches to be measured again: rename their index.json to index.failed.json.

    Returns:
        The reason of failure of each such launch.
    """
    failed = {}
    for launch in among:
        there = _folder(launch, folder)
        if there.index is not None and there.status == "failed":
            _withdraw(there.folder, paths.FAILED_INDEX)
            failed[launch] = there.index.reason or ""
    return failed


def _folder(launch: Launch, study_folder: Path) -> LaunchFolder:
    # Imported late: Snakemake plans without msgspec.
    from connector_tax.artifacts.folder import LaunchFolder

    return LaunchFolder(study_folder, launch)


def _withdraw(launch_folder: Path, name: str) -> None:
    (launch_folder / paths.INDEX).rename(launch_folder / name)
    fsync(launch_folder)


def _damage(launch: LaunchFolder) -> str | None:
    """Return a sentence on the first damaged file of a launch's cells, or None."""
    try:
        index = launch.index
    except ArtifactError as error:
        return f"damaged: {error}"
    for cell in index.cells if index is not None else ():
        for name, digest in cell.files.items():
            path = launch.folder / cell.cell / name
            if not is_intact(path, digest):
                return f"{path} is missing or differs from index.json"
    return None


def refuse_other_design(study: StudyDocument, launch: Launch, study_folder: Path) -> None:
    """Raise if the launch's folder contains cells of another design.

    Raises:
        ConfigError: names the folder and the remedy.
    """
    path = launch.folder(study_folder) / paths.LAUNCH_CONFIG
    if path.exists() and read_json(path)["design_sha256"] != study["design_sha256"]:
        raise ConfigError(
            f"{path.parent} holds cells of another design than {study_folder / paths.STUDY}; "
            "nothing was changed. To set these cells aside and measure the launch again: "
            f"connector-tax remeasure {study_folder} --launch {launch.name}"
        )


if __name__ == "__main__":
    sys.exit(main())
