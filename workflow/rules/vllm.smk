# What a real vLLM needs before it can be launched: its environment, the tiny model, a fit machine.

from connector_tax.vllm.environment import files_of

ENGINE_FILES = files_of(STUDY["config"]["engine"])


rule vllm_environment:
    output:
        "envs/{environment}/.venv/built.json",
    log:
        "envs/{environment}/.venv.log",
    wildcard_constraints:
        environment="vllm-cpu|vllm-gpu",
    threads: workflow.cores
    shell:
        "python -m connector_tax.vllm.environment {wildcards.environment:q} 2>&1 | tee {log}"


rule tiny_model:
    output:
        expand(
            "build/models/tiny-qwen3/{file}.json",
            file=["config", "generation_config", "tokenizer", "tokenizer_config"],
        ),
    log:
        "build/models/tiny-qwen3.log",
    shell:
        "python -m connector_tax.vllm.tiny_model --out build/models/tiny-qwen3 2>&1 | tee {log}"


# Is this machine fit for the study, and how long will it take? Starts nothing.
rule doctor:
    input:
        study=f"{RESULTS}/study.json",
    log:
        f"{RESULTS}/logs/doctor.log",
    shell:
        "python -m connector_tax.study.doctor --study {input.study} 2>&1 | tee {log}"
