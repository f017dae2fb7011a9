# The resolved design, and what it runs on.


rule study:
    output:
        f"{RESULTS}/study.json",
    log:
        f"{RESULTS}/logs/study.log",
    conda:
        CONDA
    params:
        # A function: braces in its value are not taken for wildcards.
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
        "python -m connector_tax.rehearsal --study {input.study} 2> {log}"


# How long each part will take, by the model of the machine that the study names. No input of a launch: an older study
# has none, and a new input would measure it again.
rule durations:
    input:
        study=f"{RESULTS}/study.json",
    output:
        f"{RESULTS}/durations.json",
    log:
        f"{RESULTS}/logs/durations.log",
    conda:
        CONDA
    shell:
        "python -m connector_tax.rehearsal.durations --study {input.study} 2>&1 | tee {log}"


rule plan:
    input:
        f"{RESULTS}/durations.json",
        study=f"{RESULTS}/study.json",
    log:
        f"{RESULTS}/logs/plan.log",
    conda:
        CONDA
    shell:
        "python -m connector_tax.rehearsal.plan --study {input.study} 2> {log}"
