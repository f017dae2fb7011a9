# Configuration, its checks, and definitions that all stages share.
import json
import re
import sys
from base64 import urlsafe_b64encode
from importlib.util import find_spec
from pathlib import Path

from snakemake.utils import min_version

min_version("9.17")  # the first that runs jobs by their `priority`

# The package in this checkout, which the jobs import too, in any environment.
SOURCES = str(Path(sys._getframe().f_code.co_filename).resolve().parents[2] / "scripts")
if find_spec("connector_tax") is None:
    sys.path.insert(0, SOURCES)

# Planning needs only Snakemake; the jobs also need these packages.
LACKING = [
    name
    for name in ("msgspec", "numpy", "scipy", "uvloop", "zmq")
    if find_spec(name) is None
]
HINT = (
    f"not installed for {sys.executable}: {', '.join(LACKING)}. Snakemake alone plans a study; its jobs need"
    " envs/pipeline.lock: `make .venv/pipeline.stamp`, then .venv/bin/snakemake; or `pip install '.[study]'`"
)

import connector_tax
from snakemake.exceptions import WorkflowError
from snakemake.settings.types import SharedFSUsage

from connector_tax.config import ConfigError, load_yaml, shipped
from connector_tax.artifacts import paths
from connector_tax.artifacts.names import PHASES
from connector_tax.artifacts.study_file import every_launch, launches
from connector_tax.files import ArtifactError
from connector_tax.foreign import printable
from connector_tax.study.block import end_s
from connector_tax.study.design import refuse_changed_design, resolve
from connector_tax.study.guard import (
    pass_warnings_on,
    remove_temporaries,
    set_job_environment,
)
from connector_tax.study.device import read_claim, slot_of
from connector_tax.study.remeasure import withdraw_damaged, withdraw_failed

# A configuration named on the command line replaces the default, and is not merged with it.
if not workflow.overwrite_configfiles and "archive" not in config:

    configfile: str(shipped("config/config.yaml"))


# `quiet` has no option for the lines about each selection of jobs.
SELECTION = ("Select jobs to execute", "Execute ")
logger.addFilter(lambda record: not record.getMessage().startswith(SELECTION))

set_job_environment(SOURCES)
pass_warnings_on()

SOURCE = ", ".join(map(str, workflow.configfiles)) or "the configuration"
# `--config archive=FILE` redraws an archived study, with the archive's configuration only.
ARCHIVE = config.pop("archive", None)
# `--config accept_method=N`: `audit` and `replot` accept claims made by method N.
ACCEPTED = config.pop("accept_method", [])
if ACCEPTED != []:
    ACCEPTED = ["--accept-method", str(int(ACCEPTED))]
# `--config studies=A,B compare` compares two studies or archives.
STUDIES = config.pop("studies", None)
try:
    if ARCHIVE is None:
        # Snakemake silently takes the second of two equal keys.
        for file in workflow.configfiles:
            load_yaml(Path(file))
        STUDY = resolve(config, SOURCE, shuffled=False)
        RESULTS = f"results/{STUDY['study']}"
    else:
        if LACKING:
            raise WorkflowError(HINT)
        # Imported here, since planning does not need it.
        from connector_tax.provenance.archive import read_head

        STUDY = read_head(Path(ARCHIVE))
        RESULTS = f"results/replot/{STUDY['study']}"
except (ConfigError, ArtifactError) as error:
    raise WorkflowError(str(error)) from None

# Files that are `ancient` for all their readers.
ORDERING = ["env.txt", "patch/patch_status.json", "preflight/shape_rates.json"]


def remove_unfinished():
    """Remove each file in ORDERING whose rule was killed after writing the file.

    After making such a file again, Snakemake 9.27 ends without the other jobs, and reports success.
    """
    state = Path(".snakemake")
    # Snakemake has not read its options yet; it takes abbreviations (--dry) and clusters (-np).
    dry = any(re.match(r"-[A-Za-z]*n|--dry", word) for word in sys.argv)
    resumes = not dry and {"--rerun-incomplete", "--ri"} & {*sys.argv}
    # In a running study the marked files are being written.
    if not resumes or not workflow.is_main_process or any(state.glob("locks/*.lock")):
        return
    for file in (f"{RESULTS}/{name}" for name in ORDERING):
        if (state / "incomplete" / urlsafe_b64encode(file.encode()).decode()).exists():
            Path(file).unlink(missing_ok=True)


if ARCHIVE is None:
    remove_unfinished()

# One block at a time on each slot (`devices`), whatever --cores is. A Snakefile has no public way to limit a resource.
SLOTS = [slot["id"] for slot in STUDY["config"].get("devices", [])]
for slot in SLOTS:
    workflow.register_resource(f"device_{slot}", 1)


def checked_design(wildcards):
    """Check what study.json always needs; return "".

    Not an input function: if one fails, Snakemake treats study.json as a file that no rule makes.
    """
    shared = workflow.storage_settings.shared_fs_usage
    if workflow.is_main_process and SharedFSUsage.INPUT_OUTPUT not in shared:
        raise WorkflowError(
            "--executor: found one without a shared file system; allowed: local, or one whose jobs"
            " write into this folder. A job writes more files than those that"
            " Snakemake knows and copies back, so the raw records would be lost."
        )
    if workflow.is_main_process and workflow.non_local_exec and SLOTS:
        raise WorkflowError(
            f"{SOURCE}: devices: found {', '.join(SLOTS)} with --executor; allowed: no such section."
            " The scheduler assigns a device to each job."
        )
    try:
        refuse_changed_design(Path(RESULTS, paths.STUDY), STUDY, SOURCE)
        if workflow.dag_settings.force_incomplete and not workflow.dryrun:
            for line in withdraw_damaged(STUDY, Path(RESULTS)):
                print(printable(line), file=sys.stderr)
    except ConfigError as error:
        raise WorkflowError(str(error)) from None
    return ""


# A module's `onsuccess` is not run.
IS_MODULE = not workflow.modifier.is_main_snakefile()


def ends_by_hook(rule_name):
    """Return whether this rule is the only target and `onsuccess` runs, which then sets the exit status."""
    hooks = not (IS_MODULE or workflow.execution_settings.no_hooks)
    return hooks and [job.rule.name for job in workflow.dag.targetjobs] == [rule_name]


onsuccess:
    # Print the answer whenever the report was made.
    if "analyse" in {job.rule.name for job in workflow.dag.jobs}:
        # After a kill Snakemake 9.27 may make one file again, end with the rest unmade, and call it success.
        if not Path(RESULTS, paths.ANALYSIS, paths.EFFECTS).exists():
            sys.exit(
                "Snakemake ended before the study was complete; rerun the same command"
            )
        shell("python -m connector_tax.report.answer --study {RESULTS}/study.json")
    if "doctor" in {job.rule.name for job in workflow.dag.jobs}:
        said = Path(RESULTS, "logs/doctor.log").read_text().splitlines()
        sys.exit(0 if said and said[-1].startswith("fit ") else 1)


onstart:
    remove_temporaries(Path(RESULTS))


report: "../report/workflow.rst"


# Sources of the packages of envs/pipeline.lock if they are not installed: with --sdm apptainer an image that is built
# from Containerfile, with --sdm conda an environment.
container: "build/connector-tax.sif"


CONDA = workflow.source_path("../envs/study.yaml")


wildcard_constraints:
    config=r"[a-z][a-z0-9_]*",
    block=r"\d+",


# Inputs of a launch. A newer input does not cause a new measurement.
READY = {
    "study": ancient(f"{RESULTS}/study.json"),
    "environment": ancient(f"{RESULTS}/env.txt"),
    "preflight": ancient(f"{RESULTS}/preflight/preflight_status.json"),
    "patch": ancient(f"{RESULTS}/patch/patch_status.json"),
}
RATES = [ancient(f"{RESULTS}/reference_rates.json")]
if STUDY["config"].get("shape_rates") is not None:
    RATES.append(ancient(f"{RESULTS}/preflight/shape_rates.json"))


def block_files(phase, pattern):
    """Return one file of each launch of any block of a phase; Snakemake knows a block by these files."""
    names = dict.fromkeys(launch.config for launch in launches(STUDY, phase))
    return expand(f"{RESULTS}/{pattern}", config=names, phase=phase)


def block_looked_at(wildcards):
    """Return the index files of the previous block, if its interim analysis may drop launches of this block."""
    block = int(wildcards.block)
    if block == 0 or "looks" not in STUDY["config"]["statistics"]:
        return []
    before = block_files("A", "runs/{config}/block{{block}}/{phase}/index.json")
    return [ancient(path.format(block=block - 1)) for path in before]


def launch_indexes(phase):
    """Return the index files of all launches of a phase."""
    return [
        str(launch.folder(Path(RESULTS)) / paths.INDEX)
        for launch in launches(STUDY, phase)
    ]


INDEXES = [index for phase in PHASES for index in launch_indexes(phase)]


def modules(*names):
    """Return the named files, and the files of the named folders; inputs of rules that are cheap to run again."""
    package = Path(connector_tax.__file__).parent
    named = [package / name for name in names]
    files = [f for path in named for f in (path.iterdir() if path.is_dir() else [path])]
    return sorted(str(path) for path in files if path.is_file())


# Code that every table and picture depends on.
SHARED = [
    "commands.py",
    "files.py",
    "foreign.py",
    "linux.py",
    "ranks.py",
    "text.py",
    "artifacts",
]


def block_priority(phase):
    """Return priorities (above the default 0) that order the phases, and the blocks within a phase."""
    later = len(PHASES) - PHASES.index(phase)
    return lambda wildcards: STUDY["blocks"] * later - int(wildcards.block)


def slurm_options(wildcards):
    """Return options for sbatch: a signal early enough to finish a cell, and the node that began the block.

    Called again when the job is due, since the block's first job records the node.
    """
    warning = f"--signal=USR1@{end_s(STUDY['config'])}"
    held = read_claim(Path(RESULTS), int(wildcards.block), STUDY["design_sha256"])
    node = held and held["slurm_node"]
    return f"{warning} --nodelist={node}" if node else warning


def block_slots():
    """Return the resources of a block's job: one for the slot that the block is measured on."""

    def share(slot):
        def of_block(wildcards):
            mine = slot_of(STUDY, Path(RESULTS), int(wildcards.block))
            return int(mine["id"] == slot)

        return of_block

    return {f"device_{slot}": share(slot) for slot in SLOTS}


def two_studies(wildcards):
    """Return the paths of the two studies to compare."""
    named = [part.strip() for part in str(STUDIES or "").split(",") if part.strip()]
    if len(named) != 2:
        raise WorkflowError(
            f"compare: found studies={STUDIES}; allowed: --config studies=A,B, each a study's"
            " folder or an archive"
        )
    return named
