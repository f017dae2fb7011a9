# Which configurations are run, and why the others are not.


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
