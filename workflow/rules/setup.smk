# Stages before the first launch: vLLM's environment and model, doctor, resolved design, recorded environment,
# gates, step timing; also plan, rehearsal, and the messages of a failed run.

import os

from connector_tax.config import ROOT, is_fetched
from connector_tax.vllm.environment import PYTHON, PYTHON_VARIABLE, files_of

# In the project's folder, whatever the working directory is: studies share an environment of 3 GB.
PROJECT = os.path.relpath(ROOT)
ENGINE_FILES = [
    os.path.normpath(f"{PROJECT}/{name}")
    for name in files_of(STUDY["config"]["engine"])
]
MODEL = [f"{RESULTS}/model.json"] if is_fetched(STUDY["config"]["engine"]) else []
VLLM_ENVIRONMENT = os.path.normpath(f"{PROJECT}/envs/{{environment}}/.venv")
MODELS = os.path.normpath(f"{PROJECT}/build/models")
# No parameter of the rule, so that another interpreter path does not rebuild 3 GB.
os.environ[PYTHON_VARIABLE] = STUDY["config"]["engine"].get("build_python", PYTHON)
# A model without weights has the config.json of its name; with an emulated device the study names the file.
DEVICE_TIME = STUDY["config"]["engine"].get("device_time")
MODEL_OPTION = (
    ["--config", str(shipped(DEVICE_TIME["model_config"]))] if DEVICE_TIME else []
)


rule vllm_environment:
    output:
        f"{VLLM_ENVIRONMENT}/built.json",
    log:
        f"{VLLM_ENVIRONMENT}.log",
    wildcard_constraints:
        environment=r"vllm-cpu|vllm-cpu-0\.33|vllm-gpu",
    conda:
        CONDA
    threads: workflow.cores
    shell:
        "python -m connector_tax.vllm.environment {wildcards.environment:q} 2>&1 | tee {log}"


rule tiny_model:
    output:
        multiext(
            f"{MODELS}/{{model}}/",
            "config.json",
            "generation_config.json",
            "tokenizer.json",
            "tokenizer_config.json",
        ),
    log:
        f"{MODELS}/{{model}}.log",
    conda:
        CONDA
    params:
        folder=lambda wildcards, output: str(Path(output[0]).parent),
        config=MODEL_OPTION,
    shell:
        "python -m connector_tax.vllm.tiny_model --out {params.folder:q} {params.config:q} 2>&1 | tee {log}"


# A hub model is fetched before any launch, so that no start-up waits for it.
rule model:
    input:
        ancient(ENGINE_FILES),
        study=ancient(f"{RESULTS}/study.json"),
    output:
        f"{RESULTS}/model.json",
    log:
        f"{RESULTS}/logs/model.log",
    conda:
        CONDA
    shell:
        "python -m connector_tax.study.fetch --study {input.study} 2>&1 | tee {log}"


# Checks this machine for the study and estimates the duration, without starting anything.
rule doctor:
    input:
        study=f"{RESULTS}/study.json",
    log:
        f"{RESULTS}/logs/doctor.log",
    conda:
        CONDA
    params:
        # The job succeeds, since Snakemake's error report would hide the message; `onsuccess` exits non-zero.
        no=lambda _: "true" if ends_by_hook("doctor") else "false",
    shell:
        "python -m connector_tax.rehearsal.doctor --study {input.study} 2>&1 | tee {log} || {params.no:q}"


rule study:
    output:
        f"{RESULTS}/study.json",
    log:
        f"{RESULTS}/logs/study.log",
    conda:
        CONDA
    params:
        # A function, so that braces in its value are not wildcards.
        config=lambda wildcards: json.dumps(config, sort_keys=True),
        source=SOURCE,
        design=checked_design,
    shell:
        "python -m connector_tax.study.design --config-json {params.config:q} --source {params.source:q}"
        " --out {output} 2>&1 | tee {log}"


rule environment:
    input:
        ancient(ENGINE_FILES),
        ancient(MODEL),
        study=ancient(f"{RESULTS}/study.json"),
    output:
        f"{RESULTS}/environment.json",
        f"{RESULTS}/env.txt",
    log:
        f"{RESULTS}/logs/environment.log",
    conda:
        CONDA
    shell:
        "python -m connector_tax.provenance.environment --study {input.study} 2>&1 | tee {log}"


# The whole study in virtual time: no server, no GPU.
rule rehearse:
    input:
        study=f"{RESULTS}/study.json",
    log:
        f"{RESULTS}/logs/rehearse.log",
    conda:
        CONDA
    threads: workflow.cores
    shell:
        "python -m connector_tax.rehearsal --study {input.study} 2>&1 | tee {log}"


rule plan:
    input:
        study=f"{RESULTS}/study.json",
    log:
        f"{RESULTS}/logs/plan.log",
    conda:
        CONDA
    shell:
        "python -m connector_tax.rehearsal.plan --study {input.study} 2>&1 | tee {log}"


# Decides which configurations are run, with the reasons of skips.
rule preflight:
    input:
        study=ancient(f"{RESULTS}/study.json"),
        environment=ancient(f"{RESULTS}/environment.json"),
    output:
        f"{RESULTS}/preflight/preflight_status.json",
    log:
        f"{RESULTS}/logs/preflight.log",
    conda:
        CONDA
    threads: workflow.cores
    shell:
        "python -m connector_tax.study.preflight --study {input.study} 2>&1 | tee {log}"


# Step timing on before the first measurement, off after the last, also when the run fails.
rule patch_apply:
    input:
        study=ancient(f"{RESULTS}/study.json"),
        preflight=ancient(f"{RESULTS}/preflight/preflight_status.json"),
    output:
        f"{RESULTS}/patch/patch_status.json",
    log:
        f"{RESULTS}/logs/patch_apply.log",
    conda:
        CONDA
    shell:
        "python -m connector_tax.study.patch apply --study {input.study} 2>&1 | tee {log}"


rule patch_revert:
    input:
        INDEXES,
        study=ancient(f"{RESULTS}/study.json"),
        patch=ancient(f"{RESULTS}/patch/patch_status.json"),
    output:
        f"{RESULTS}/patch/revert_status.json",
    log:
        f"{RESULTS}/logs/patch_revert.log",
    conda:
        CONDA
    shell:
        "python -m connector_tax.study.patch revert --study {input.study} 2>&1 | tee {log}"


# Rules that read a study. Where one fails, the study stays as it is: its files are sealed.
READERS = {"audit", "compare", "doctor", "plan", "rehearse", "study"}


onerror:
    if LACKING:
        raise WorkflowError(HINT)
    if {job.rule.name for job in workflow.dag.jobs} <= READERS:
        return
    # Failed launches and damaged cells are measured again by the next run.
    for launch, reason in withdraw_failed(
        every_launch(STUDY), Path(RESULTS)
    ).items():
        print(
            printable(f"MISSING {launch.folder(Path(RESULTS))}: {reason}"),
            file=sys.stderr,
        )
    for line in withdraw_damaged(STUDY, Path(RESULTS)):
        print(printable(f"DAMAGED {line}"), file=sys.stderr)
    # Imported here, since planning does not need it.
    from connector_tax.study.server_command import OVERLAY

    # An existing record of a revert lists the removed files, and may be sealed: it is not overwritten.
    applied = Path(RESULTS, paths.PATCH, OVERLAY).exists()
    reverted = Path(RESULTS, paths.REVERT_STATUS).exists()
    if Path(RESULTS, paths.PATCH_STATUS).exists() and (applied or not reverted):
        shell(
            f"python -m connector_tax.study.patch revert --study {RESULTS}/study.json"
        )
