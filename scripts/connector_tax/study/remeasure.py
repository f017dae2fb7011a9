"""Measuring again: only on explicit request, and nothing that was measured is deleted.

Snakemake's `--forcerun` (or `--forceall`) is the request. It deletes a forced job's index.json and
runs the driver again, which by itself would keep the intact cells; so the Snakefile names the
forced launches in CONNECTOR_TAX_REMEASURE, and the driver first renames the launch's folder to
`<phase>.superseded<k>`. A changed design replaces the old one in its folder only by `--forceall`.
"""

import os
from collections.abc import Collection
from pathlib import Path

from connector_tax.artifacts import paths
from connector_tax.artifacts.names import PHASE_RULES, PHASES, Launch
from connector_tax.artifacts.study_file import launches
from connector_tax.artifacts.study_records import StudyDocument
from connector_tax.config import ConfigError
from connector_tax.files import (
    ArtifactError,
    fsync_directory,
    read_json,
    sha256_file,
    write_bytes,
)
from connector_tax.study.design import has_begun, refuse_changed_design

REMEASURE_VARIABLE = "CONNECTOR_TAX_REMEASURE"
# Snakemake 9 forgets that a job is forced when a job above it is forced too and their link is
# ancient(), which all links between these are.
STAGES = ("preflight", "patch_apply", *PHASE_RULES.values())


def request_remeasuring(
    study: StudyDocument, folder: Path, forced: Collection[str], everything: bool
) -> None:
    """Tell the drivers which launches are forced.

    Args:
        study: the resolved design.
        folder: results/<study>.
        forced: what `--forcerun` names: rules and files.
        everything: whether `--forceall` is given.

    Raises:
        ConfigError: several stages are forced at once, of which Snakemake would drop all but one.
    """
    names, stages = [], {name for name in STAGES if name in forced}
    for phase in PHASES:
        for launch in launches(study, phase):
            index = (launch.folder(folder) / paths.INDEX).as_posix()
            if everything or PHASE_RULES[phase] in forced or index in forced:
                names.append(launch.name)
                stages.add(PHASE_RULES[phase])
    if len(stages) > 1 and not everything:
        listed = [stage for stage in STAGES if stage in stages]
        raise ConfigError(
            f"--forcerun: found {', '.join(listed)}; allowed: one of them at a time, since "
            "Snakemake would run the first and silently drop the others. Force one after the "
            "other, or everything with --forceall."
        )
    # A job that Snakemake runs elsewhere reads the Snakefile again, without these options.
    if names:
        os.environ[REMEASURE_VARIABLE] = " ".join(names)


def check_design(study: StudyDocument, folder: Path, source: str, everything: bool) -> None:
    """Refuse a changed design, unless everything is forced.

    Raises:
        ConfigError: names the keys that differ and the ways out.
    """
    if everything:
        return
    try:
        refuse_changed_design(folder / paths.STUDY, study, source)
    except ConfigError as error:
        raise ConfigError(
            f"{error}\nTo measure the changed design in this folder, the old launches moved aside "
            "and kept: --forceall"
        ) from None


def keep_old_design(study: StudyDocument, folder: Path) -> None:
    """Copy study.json to `study.superseded<k>.json` if a begun study's design will change."""
    path = folder / paths.STUDY
    if not path.exists() or not has_begun(folder):
        return
    if read_json(path)["design_sha256"] == study["design_sha256"]:
        return
    write_bytes(paths.set_aside(path, "superseded"), path.read_bytes())


def supersede(launch: Launch, study_folder: Path) -> Path | None:
    """Move the launch's folder aside if its measuring again was asked for; where it is now."""
    folder = launch.folder(study_folder)
    if launch.name not in os.environ.get(REMEASURE_VARIABLE, "").split() or not folder.exists():
        return None
    target = paths.set_aside(folder, "superseded")
    folder.rename(target)
    fsync_directory(folder.parent)
    return target


def superseded(launch: Launch, study_folder: Path) -> str | None:
    """The folder's name of the run that the present one takes the place of; None: it is the first.

    Of several the last.
    """
    folder = launch.folder(study_folder)
    label = f"{folder.name}.superseded"
    names = [path.name.removeprefix(label) for path in folder.parent.glob(f"{label}*")]
    numbers = [int(name) for name in names if name.isdecimal()]
    return f"{label}{max(numbers)}" if numbers else None


def withdraw_damaged(study: StudyDocument, folder: Path) -> list[str]:
    """Have damaged cells measured again: their launch's index.json becomes index.damaged.json.

    The launch's driver keeps what is intact.

    Returns:
        A line for each index withdrawn, with the file that is not what it says.
    """
    lines = []
    for phase in PHASES:
        for launch in launches(study, phase):
            path = launch.folder(folder)
            damage = _damage(path)
            if damage is not None:
                (path / paths.INDEX).rename(path / paths.DAMAGED_INDEX)
                fsync_directory(path)
                lines.append(f"{launch.name}: {damage}; what is damaged is measured again")
    return lines


def withdraw_failed(study: StudyDocument, folder: Path) -> list[tuple[Path, str]]:
    """Have failed launches measured again by the next run: index.json becomes index.failed.json.

    The launch's driver keeps what is intact.

    Returns:
        The folder of each launch whose index was withdrawn, and why it failed.
    """
    # Imported late, as below: Snakemake plans without msgspec.
    from connector_tax.artifacts.index import read_index

    failed = []
    for phase in PHASES:
        for launch in launches(study, phase):
            path = launch.folder(folder)
            index = read_index(path)
            if index is not None and index.status == "failed":
                (path / paths.INDEX).rename(path / paths.FAILED_INDEX)
                fsync_directory(path)
                failed.append((path, index.reason or ""))
    return failed


def _damage(launch_folder: Path) -> str | None:
    """The first file of a cell that is not what the launch's index says; None where all are."""
    from connector_tax.artifacts.index import read_index

    try:
        index = read_index(launch_folder)
    except ArtifactError as error:
        return f"damaged: {error}"
    for cell in index.cells if index is not None else ():
        for name, digest in cell.files.items():
            path = launch_folder / cell.cell / name
            if not path.is_file() or sha256_file(path) != digest:
                return f"{path} is missing or not what index.json says"
    return None


def refuse_other_design(study: StudyDocument, launch: Launch, study_folder: Path) -> None:
    """Refuse to carry on with cells that were measured under another design.

    Raises:
        ConfigError: names the folder and the way out.
    """
    path = launch.folder(study_folder) / paths.LAUNCH_CONFIG
    if path.exists() and read_json(path)["design_sha256"] != study["design_sha256"]:
        raise ConfigError(
            f"{path.parent} holds cells of another design than {study_folder / paths.STUDY}; they "
            f"are kept. To measure it again, the old cells moved aside: "
            f"--forcerun {(launch.folder(study_folder) / paths.INDEX).as_posix()}"
        )
